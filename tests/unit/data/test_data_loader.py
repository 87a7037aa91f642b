import dataclasses
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from hpc_tune.batch import IGNORED_LABEL, Batch, read_document_lengths
from hpc_tune.config.schema import ParallelConfig
from hpc_tune.data import loader as loader_module
from hpc_tune.data import order
from hpc_tune.data.counts import Counters
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.loader import HeldOutRows, Loader, warn_of_truncated_documents
from hpc_tune.data.order import SampleOrder
from hpc_tune.data.packed_rows import PackedRows, make_batch
from hpc_tune.data.writer import Block, verify_content, write_store
from hpc_tune.errors import ConfigError, DataError
from tests.support.data import attributes, store_of_lengths

LENGTHS = np.random.default_rng(0).integers(2, 60, 150).tolist()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return store_of_lengths(tmp_path_factory.mktemp("data") / "s.h5", LENGTHS)


def _loader(store, **changes):
    values = {"global_size": 10, "total_rows": 170, "micro_size": 2, **changes}
    order = {"seq_len": 64, "packing": True, "seed": 3}
    order |= {name: values.pop(name) for name in order if name in values}
    order = SampleOrder(**order)
    return Loader(PackedRows(store, order), order, **values)


def _rows(batches):
    """Each row as (tokens, labels, positions), up to its last label."""
    rows = []
    for batch in batches:
        for tokens, labels, positions in zip(
            batch.tokens_BT, batch.labels_BT, batch.positions_BT, strict=True
        ):
            learned = (labels != IGNORED_LABEL).nonzero()
            if len(learned):
                stop = int(learned[-1]) + 2
                rows.append((tokens[:stop], labels[:stop], positions[:stop]))
    return [tuple(map(tuple, (t.tolist() for t in row))) for row in rows]


def _all_steps(loader):
    steps = []
    while batches := loader.next_step():
        steps.append(batches)
    loader.close()
    return steps


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16])
def test_each_step_has_the_same_rows_for_any_number_of_ranks(store, size):
    alone = _all_steps(_loader(store))
    ranks = [_all_steps(_loader(store, rank=r, size=size, micro_size=3)) for r in range(size)]
    assert len(alone) == 17
    for number, step in enumerate(alone):
        parts = [steps[number] for steps in ranks]
        assert sorted(r for part in parts for r in _rows(part)) == sorted(_rows(step))
        assert len({len(part) for part in parts}) == 1, "ranks must run the same micro-batches"
        assert sum(b.num_loss_tokens for p in parts for b in p) == sum(
            b.num_loss_tokens for b in step
        )


def test_last_step_is_cut_at_the_end_of_the_stream_on_all_ranks(store):
    ranks = [_all_steps(_loader(store, total_rows=13, rank=r, size=4)) for r in range(4)]
    # 13 = 10 + 3 rows; 10 over 4 ranks: 3, 3, 2, 2 rows in micro-batches of 2; then 1, 1, 1, 0.
    assert [[len(step) for step in steps] for steps in ranks] == [[2, 1]] * 4
    assert [sum(b.num_loss_tokens > 0 for b in steps[1]) for steps in ranks] == [1, 1, 1, 0]
    assert ranks[3][1][0].tokens_BT.shape == (1, 1)


def test_labels_and_positions_do_not_cross_documents(store):
    num_documents = 0
    for batches in _all_steps(_loader(store)):
        for batch in batches:
            assert batch.tokens_BT.dtype == torch.int64
            assert batch.tokens_BT.shape[1] % 8 == 0
            assert batch.tokens_BT.shape[1] <= 64
            assert int((batch.labels_BT != IGNORED_LABEL).sum()) == batch.num_loss_tokens
            for tokens, labels, positions in zip(
                batch.tokens_BT, batch.labels_BT, batch.positions_BT, strict=True
            ):
                starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
                for start, stop in zip(starts[:-1], starts[1:], strict=True):
                    assert positions[start:stop].tolist() == list(range(stop - start))
                    assert labels[stop - 1] == IGNORED_LABEL, (
                        "the last token has nothing to predict"
                    )
                    if labels[start] != IGNORED_LABEL:  # a document: its tokens count upwards
                        assert (
                            labels[start : stop - 1].tolist() == tokens[start + 1 : stop].tolist()
                        )
                        assert tokens[start + 1] == tokens[start] + 1
                        num_documents += 1
    assert num_documents > len(LENGTHS), "more rows than an epoch has"


def test_loss_mask_and_cut_at_seq_len_by_hand():
    first = (np.array([10, 11, 12, 13], np.uint16), np.array([0, 0, 1, 1], np.uint8))
    second = (np.array([20, 21, 22], np.uint16), np.array([1, 1, 0], np.uint8))
    batch = make_batch([[first, second]], 16, 5)
    no = IGNORED_LABEL
    assert batch.tokens_BT.tolist() == [[10, 11, 12, 13, 20, 21, 22, 0]]
    assert batch.labels_BT.tolist() == [[no, 12, 13, no, 21, no, no, no]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert (batch.num_loss_tokens, batch.num_tokens, batch.first_row) == (3, 7, 5)
    assert batch.document_lengths == [[4, 3, 1]]
    cut = make_batch([[first]], 3, 0)
    assert cut.document_lengths == [[3]]
    assert cut.tokens_BT.tolist() == [[10, 11, 12]]
    assert cut.labels_BT.tolist() == [[no, 12, no]]


@pytest.mark.parametrize("packing", [True, False])
def test_a_batch_knows_the_documents_that_its_positions_show(store, packing):
    batches = [batch for step in _all_steps(_loader(store, packing=packing)) for batch in step]
    lengths = [row for batch in batches for row in batch.document_lengths]
    assert (max(map(len, lengths)) > 2) == packing
    assert lengths == [
        row for batch in batches for row in read_document_lengths(batch.positions_BT)
    ]


@pytest.mark.parametrize("steps_before", [0, 1, 7, 16])
@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
def test_resume_goes_on_as_if_uninterrupted(store, steps_before, prefetch_bytes):
    whole = [_rows(step) for step in _all_steps(_loader(store, prefetch_bytes=0))]
    first = _loader(store, prefetch_bytes=prefetch_bytes)
    for _ in range(steps_before):
        first.next_step()
    state = first.state()
    first.close()
    assert state["rows"] == 10 * steps_before, "steps built ahead must not count as consumed"
    parts = []
    for rank in range(3):
        second = _loader(store, prefetch_bytes=prefetch_bytes, rank=rank, size=3)
        second.restore(state)
        parts.append([_rows(step) for step in _all_steps(second)])
    for number, step in enumerate(whole[steps_before:]):
        assert sorted(r for part in parts for r in part[number]) == sorted(step)


def test_restore_after_building_ahead_throws_that_away(store):
    loader = _loader(store)
    begin = loader.state()
    first = _rows(loader.next_step())
    loader.next_step()
    loader.restore(begin)
    assert _rows(loader.next_step()) == first
    loader.close()


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"seed": 4}, "seed"), ({"seq_len": 32}, "seq_len"), ({"packing": False}, "packing")],
)
def test_state_of_another_order_is_refused(store, changes, word):
    state = _loader(store).state()
    with pytest.raises(ConfigError, match=word):
        _loader(store, **changes).restore(state)


def test_state_of_other_data_is_refused(store, tmp_path):
    other = store_of_lengths(tmp_path / "o.h5", LENGTHS[::-1])
    with pytest.raises(ConfigError) as refused:
        _loader(other).restore(_loader(store).state())
    said = f"data.path={other.attributes.source} is not the data this run was trained on, or it was"
    assert str(refused.value).startswith(said)
    assert ". Give the old data, or another run.dir; if hpc_tune was updated" in str(refused.value)


def test_micro_size_can_change_between_steps_without_changing_the_rows(store):
    plain, changed = _loader(store), _loader(store)
    for number in range(6):
        if number == 3:
            changed.set_micro_size(5)
        one, two = plain.next_step(), changed.next_step()
        assert len(two) == (5 if number < 3 else 2)
        assert sorted(_rows(one)) == sorted(_rows(two))
    plain.close()
    changed.close()


def test_prefetch_stays_within_its_bytes_and_zero_frees_it(store):
    step_bytes = 10 * 64 * 24
    loader = _loader(store, prefetch_bytes=3 * step_bytes, total_rows=1000)
    expected = _loader(store, prefetch_bytes=0, total_rows=1000)
    for number in range(60):
        assert _rows(loader.next_step()) == _rows(expected.next_step())
        assert loader._prefetcher._queued_bytes <= 3 * step_bytes
        if number in (10, 30):
            loader.set_prefetch(0)
            assert loader._prefetcher._queued_bytes == 0
        if number == 20:
            loader.set_prefetch(2 * step_bytes)
    loader.close()
    assert _rows(loader.next_step()) == _rows(expected.next_step()), "also without the thread"


def test_error_in_the_thread_comes_out_of_next_step(store):
    loader = _loader(store)
    num_read = 0

    def breaks_soon(document):
        nonlocal num_read
        num_read += 1
        if num_read > 20:
            raise OSError(f"cannot read document {document}")
        return store.sides(document)

    broken = dataclasses.make_dataclass("Breaking", ["sides", "labels"])
    loader.stream.store = broken(breaks_soon, None)
    with pytest.raises(OSError, match="cannot read document"):
        _all_steps(loader)
    assert num_read == 21
    loader.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_evaluation_has_the_same_rows_for_any_number_of_ranks(store, size):
    order = SampleOrder(64, packing=True, seed=0)
    reference = _rows(HeldOutRows(store, order, num_rows=11).batches())
    parts = [
        list(HeldOutRows(store, order, num_rows=11, rank=r, size=size).batches(micro_size=2))
        for r in range(size)
    ]
    assert len({len(part) for part in parts}) == 1
    assert sorted(r for part in parts for r in _rows(part)) == sorted(reference)
    assert len(reference) == 11


def test_documents_that_are_cut_are_warned_of(store, caplog):
    num_longer = sum(length > 32 for length in LENGTHS)
    warn_of_truncated_documents(store, 32)
    assert [r.getMessage().split(" in ")[0] for r in caplog.records] == [
        f"{num_longer} of 150 documents"
    ]
    caplog.clear()
    counters = Counters(truncated=7)
    store.attributes = dataclasses.replace(store.attributes, seq_len=60, counters=counters)
    warn_of_truncated_documents(store, 64)
    assert "prepared with seq_len 60: 7 documents are cut" in caplog.text


def test_what_would_hold_the_documents_that_are_cut_is_said(tmp_path, caplog):
    store = store_of_lengths(tmp_path / "s.h5", [10] * 100 + [64] * 200)
    # Of the 200 that fill a row 150 were cut there, and 1 more was dropped.
    cut = {"200": 149, "1024": 1, "4224": 1}
    counters = Counters(truncated=150, cut_tokens=9_000, cut_lengths=cut)
    store.attributes = dataclasses.replace(store.attributes, seq_len=64, counters=counters)
    warn_of_truncated_documents(store, 64)
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("151 of 301 documents in ")
    assert "longer than data.seq_len=64 and are cut there, or dropped (1): about 9,000 to" in line
    assert "data.seq_len=4224 holds all of them, 1024 99%" in line
    assert line.endswith("plan --config FILE data.seq_len=4224")
    for name in ("context", "row_pieces", "offload_activations"):
        assert name in ParallelConfig.model_fields
        assert f"parallel.{name}" in line
    assert (Path(__file__).parents[3] / "docs" / "long-rows.md").is_file()
    caplog.clear()
    HeldOutRows(store, SampleOrder(64, packing=True, seed=0))  # as many words once are enough
    (held_out,) = (record.getMessage() for record in caplog.records)
    assert held_out == line.partition(". data.seq_len")[0]
    caplog.clear()
    warn_of_truncated_documents(store, 32)  # the 50 whole ones of 64 are cut now, too
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("201 of 301 documents in ")
    assert f"about {9_000 + 200 * 32:,} tokens" in line


def test_a_row_may_be_one_document_of_more_than_a_million_tokens(tmp_path):
    length = (1 << 20) + 5
    store = store_of_lengths(tmp_path / "s.h5", [3, length])
    verify_content(store)
    order = SampleOrder(length, packing=True, seed=0)
    rows = sorted(_rows(HeldOutRows(store, order).batches()), key=lambda row: len(row[0]))
    assert [len(tokens) for tokens, _, _ in rows] == [3, length]
    tokens, labels, positions = rows[1]
    assert positions == tuple(range(length))
    assert tokens == tuple((1 + n) % 60_000 for n in range(length))
    assert labels[: length - 1] == tokens[1:]


def test_of_texts_that_are_split_no_loss_is_said(tmp_path, caplog):
    store = store_of_lengths(tmp_path / "s.h5", [64] * 5 + [10])
    counters = Counters(split=1)
    store.attributes = dataclasses.replace(store.attributes, seq_len=64, counters=counters)
    warn_of_truncated_documents(store, 64)
    assert not caplog.records
    warn_of_truncated_documents(store, 32)
    assert "texts that were split lose none if they are prepared again" in caplog.text


def test_held_out_rows_are_packed_and_warned_of_once_for_all_evaluations(
    store, caplog, monkeypatch
):
    packed = []
    pack = order.pack_documents

    def counted(*given):
        packed.append(given)
        return pack(*given)

    monkeypatch.setattr(order, "pack_documents", counted)
    held_out = HeldOutRows(store, SampleOrder(32, packing=True, seed=0), num_rows=7)
    first, second = (_rows(held_out.batches(micro_size)) for micro_size in (1, 3))
    assert first == second
    assert len(packed) == 1
    assert len(caplog.records) == 1


def test_a_step_is_prefetched_however_large_it_is(store, monkeypatch):
    monkeypatch.setattr(loader_module, "PREFETCH_BYTES", 10)
    loader = _loader(store)
    first = loader.next_step()
    deadline_s = time.monotonic() + 20
    while loader._prefetcher._queued_bytes == 0 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert loader._prefetcher._queued_bytes > 10
    assert first
    loader.close()


def test_evaluation_of_all_rows_has_each_document_once(store):
    order = SampleOrder(64, packing=False, seed=0)
    total = sum(b.num_loss_tokens for b in HeldOutRows(store, order).batches())
    assert total == sum(length - 1 for length in LENGTHS)


@pytest.mark.soak
def test_ten_million_documents_open_and_resume_anywhere_in_less_than_a_second(tmp_path):
    num_documents = 10_000_000
    lengths = np.random.default_rng(0).integers(2, 5, num_documents)
    values, counts = np.unique(lengths, return_counts=True)
    blocks = (
        Block(part, np.ones(part.sum(), np.uint16), np.ones(part.sum(), np.uint8))
        for part in np.array_split(lengths, 10)
    )
    histogram = dict(zip(values.tolist(), counts.tolist(), strict=True))
    write_store(tmp_path / "big.h5", blocks, histogram, attributes())
    start_s = time.perf_counter()
    store = TokenStore.open(tmp_path / "big.h5")
    loader = _loader(store, seq_len=8, total_rows=10**9)
    state = {**loader.state(), "rows": 5 * loader.num_rows_per_epoch + 4_321_987}
    loader.restore(state)
    batches = loader.next_step()
    assert time.perf_counter() - start_s < 1
    assert sum(len(batch.tokens_BT) for batch in batches) == 10
    loader.close()
    assert store.num_documents == num_documents
    sample = np.sort(np.array(store.documents_by_length[: counts[0]]))
    assert np.array_equal(sample, np.flatnonzero(lengths == 2))


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
def test_a_file_that_is_cut_off_in_use_ends_the_stream_with_its_name(tmp_path, prefetch_bytes):
    store = store_of_lengths(tmp_path / "s.h5", LENGTHS)
    loader = _loader(store, total_rows=10**6, prefetch_bytes=prefetch_bytes)
    assert loader.next_step()
    with (tmp_path / "s.h5").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(DataError, match=r"s\.h5 was cut off while it was in use"):  # noqa: PT012
        for _ in range(1000):  # what was built ahead comes first
            loader.next_step()
    loader.close()


def test_the_thread_that_pins_batches_does_so_on_the_ranks_own_gpu(store, monkeypatch):
    """A thread begins on the first GPU, where it would make a context for what it asks of CUDA."""
    here, pinned = threading.local(), []
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: setattr(here, "gpu", gpu))

    def pin(batch):
        pinned.append((threading.current_thread().name, str(getattr(here, "gpu", "cuda:0"))))
        return batch

    monkeypatch.setattr(Batch, "pinned", pin)
    for limit in (0, 1 << 20):
        loader = _loader(store, prefetch_bytes=limit)
        loader.pin_batches(torch.device("cuda", 3))
        _all_steps(loader)
    assert set(pinned) == {("MainThread", "cuda:3"), ("prefetch", "cuda:3")}
