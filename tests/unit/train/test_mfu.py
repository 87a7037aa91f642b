"""MFU of a step: the flops of its weights and of attention within its documents."""

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hpc_tune.batch import costliest_batch, padding_batch
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.data.packed_rows import make_batch
from hpc_tune.step.layout import Layout
from hpc_tune.step.plan import StepPlan
from hpc_tune.step.size import ModelSize, attention_flops
from hpc_tune.train.metrics import FinishedStep, Flops, Recorder

MODEL = SimpleNamespace(
    hidden_size=4, num_hidden_layers=3, vocab_size=16, tie_word_embeddings=False
)


def rows_of(*rows):
    laid = [
        [(np.arange(length), np.ones(length, dtype=bool)) for length in lengths] for lengths in rows
    ]
    return make_batch(laid, 64, 0)


class TwoRanks:
    """A world whose two ranks have the same rows; the second is one that counts none."""

    is_rank_0 = True

    def __init__(self, counts_rows: bool) -> None:
        self.world = SimpleNamespace(rank=0 if counts_rows else 1)

    def gather_elementwise(self, values):
        return [[value, value] for value in values]


def mfu_of(batches, counts_rows=True, peak_flops: float | None = 1e6):
    """A step of 2 seconds, of 100 flops per token in weights."""
    told: list[Any] = []
    layout = Layout(1, 1) if counts_rows else Layout(1, 1, tensor=2)
    plan = StepPlan(layout, ParallelConfig(), ModelSize(100, 0, 200, 0), MODEL, 2)
    recorder = Recorder(
        cast(Any, TwoRanks(counts_rows)),
        plan,
        Flops(100.0, partial(attention_flops, MODEL), peak_flops),
        cast(Any, SimpleNamespace(epoch=0.0, rows=0)),
        cast(Any, SimpleNamespace(device_utilization=lambda: None)),
        cast(Any, SimpleNamespace(record_step=lambda metrics, _: told.append(metrics))),
        cast(Any, SimpleNamespace(add=lambda *_: None)),
    )
    of_both = [2 * count for count in recorder.count_tokens_and_flops(batches)]
    result: Any = SimpleNamespace(
        loss=1.0, grad_norm=1.0, comm_s=0.0, sent_bytes={}, sums=[1.0], routers=None
    )
    step = FinishedStep(1, 1e-4, batches, *of_both, result, step_s=2.0, data_s=0.0)
    recorder.prepare_record(step, None, recomputes=False)
    recorder.record_now()
    [metrics] = told
    return metrics.mfu


def test_scores_are_counted_within_documents_and_not_in_padding():
    """Rows of 5 + 3 and of 2 tokens, padded to 8, twice on each of two ranks: 40 tokens.

    Their weights take 40 x 100 flops. Attention takes 6 x hidden 4 x 3 layers x (25 + 9 + 4) for
    each of the four batches, and rows of 8 would take 2 x 64 in place of 38.
    """
    batches = [rows_of((5, 3), (2,))] * 2
    flops = 40 * 100 + 4 * 72 * 38
    assert mfu_of(batches) == pytest.approx(flops / 2.0 / 1e6)


def test_full_rows_have_the_flops_of_rows():
    """Two ranks with 2 rows of 8 tokens each: 32 x (100 + 72 x 8)."""
    assert mfu_of([costliest_batch(2, 8)]) == pytest.approx(32 * (100 + 72 * 8) / 2.0 / 1e6)
    assert mfu_of([rows_of((8,), (8,))]) == mfu_of([costliest_batch(2, 8)])


def test_rows_that_another_rank_counts_are_counted_once():
    assert mfu_of([costliest_batch(2, 8)], counts_rows=False) == 0.0


def test_a_device_without_a_known_peak_has_no_mfu():
    assert mfu_of([costliest_batch(2, 8)], peak_flops=None) is None


def test_padding_is_no_document():
    batch = rows_of((5, 3), (2,))
    assert [list(row) for row in batch.document_lengths] == [[5, 3], [2, 6]]
    assert batch.unpadded_document_lengths == [5, 3, 2]
    assert costliest_batch(2, 8).unpadded_document_lengths == [8, 8]
    assert padding_batch(0).unpadded_document_lengths == []
