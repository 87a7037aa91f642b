"""The pass that computes a reference: as many rows at once as training, and few waits."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hpc_tune.train import reference


@pytest.mark.parametrize("num", [0, 1, 15, 16, 17, 100])
def test_results_are_read_many_micro_batches_at_a_time(monkeypatch, num):
    reads, whole = [], torch.Tensor.cpu

    def cpu(tensor):
        reads.append(tensor)
        return whole(tensor)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    # Some have no documents, as a row without mismatched answers.
    given = [
        ([] if n % 5 == 4 else [2 * n, 2 * n + 1], torch.full((4,), float(n))) for n in range(num)
    ]
    given = [(documents, values if documents else values[:0]) for documents, values in given]
    found = np.zeros((2 * num, 2))
    for documents, sums_M2 in reference._group_results(iter(given)):
        np.add.at(found, documents, sums_M2)
    wanted = [[n // 2 if n // 2 % 5 != 4 else 0] * 2 for n in range(2 * num)]
    assert found.tolist() == wanted
    with_some = sum(bool(documents) for documents, _ in given)
    assert len(reads) == -(-with_some // 16)


@pytest.mark.parametrize("micro_size", [1, 3])
def test_rows_go_through_the_model_as_many_at_once_as_in_training(monkeypatch, micro_size):
    seen = []

    class Rows:
        def __init__(self, *_, **__):
            pass

        def num_batches(self, rows):
            seen.append(("told", rows))
            return 4

        def batches(self, rows):
            seen.append(("taken", rows))
            return iter([SimpleNamespace(mismatched_batch=None, number=n) for n in range(4)])

        def documents_in(self, batch):
            return [batch.number]

    monkeypatch.setattr(reference, "HeldOutRows", Rows)
    monkeypatch.setattr(reference, "decide_micro_size", lambda *_: micro_size)
    engine = SimpleNamespace(
        objective_sums=lambda batches, _: ((b, torch.tensor([b.number, 1.0])) for b in batches)
    )
    comm = SimpleNamespace(
        world=SimpleNamespace(rank=0), is_rank_0=False, begin=lambda _: None, sum=lambda v: v
    )
    data = SimpleNamespace(seq_len=64, packing=True)
    layout = SimpleNamespace(data_parallel_size=1, coordinates=lambda _: SimpleNamespace(data=0))
    found = reference._compute_reference(
        SimpleNamespace(setup_comm=comm),
        SimpleNamespace(config=SimpleNamespace(data=data)),
        SimpleNamespace(layout=layout),
        SimpleNamespace(num_documents=4, form="pairs"),
        engine,
    )
    assert found.tolist() == [[n, 1.0] for n in range(4)]
    assert seen == [("told", micro_size), ("taken", micro_size)]
