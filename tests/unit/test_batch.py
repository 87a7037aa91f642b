"""A batch on its way to a device: every tensor is the one that it was."""

import pytest
import torch

from hpc_tune.batch import padding_batch
from hpc_tune.data.order import SampleOrder
from hpc_tune.data.packed_rows import PackedRows, make_micro_batches
from tests.unit.data.test_pair_store import LABELLED, PAIRS, prepared

ROWS = {"pairs": PAIRS, "labels": LABELLED, "answers": PAIRS}


@pytest.fixture
def pinned(monkeypatch):
    """The tensors that were pinned; they are copied to memory that is not pinned."""
    asked = []

    def pin(tensor):
        asked.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return asked


def rows_of(tmp_path, form):
    rows = ROWS[form]
    if form == "answers":
        rows = [
            {"prompt": row["prompt"], "completion": row["chosen"], "weight": 0.5} for row in rows
        ]
    store = prepared(tmp_path, rows, form)
    packed = PackedRows(store, SampleOrder(256, True, 0))
    if form != "answers":
        packed.set_reference_log_probs(torch.arange(2.0 * store.num_documents).view(-1, 2).numpy())
    return packed


def assert_same(one, other):
    """Every tensor of two batches is equal, int32 or int64, those of mismatched answers too."""
    assert len(one.all_tensors) == len(other.all_tensors)
    for a, b in zip(one.all_tensors, other.all_tensors, strict=True):
        assert torch.equal(a.to(b.dtype), b)
    assert (one.pairs is None, one.num_loss_terms) == (other.pairs is None, other.num_loss_terms)
    assert (one.mismatched_batch is None) == (other.mismatched_batch is None)
    if one.mismatched_batch is not None:
        assert_same(one.mismatched_batch, other.mismatched_batch)


@pytest.mark.parametrize("form", ROWS)
def test_what_is_pinned_has_the_values_that_it_had_before(tmp_path, pinned, form):
    rows = rows_of(tmp_path, form)
    for batch in make_micro_batches(rows, range(8), 8, 4):
        assert batch.form == form
        pinned.clear()
        assert_same(batch.pinned(), batch)
        assert len(pinned) == len(batch.all_tensors), "and none is left out"


def test_own_and_mismatched_answers_keep_their_own_numbers_of_tokens(tmp_path, pinned):
    rows = rows_of(tmp_path, "labels")
    for batch in make_micro_batches(rows, range(8), 8, 4):
        moved = batch.pinned()
        assert moved.pairs.num_loss_tokens_P2[:, 0].all()
        assert not moved.pairs.num_loss_tokens_P2[:, 1].any()
        assert moved.mismatched_batch.pairs.num_loss_tokens_P2[:, 1].all()
        assert not moved.mismatched_batch.pairs.num_loss_tokens_P2[:, 0].any()


@pytest.mark.parametrize("form", ROWS)
def test_an_empty_batch_has_the_parts_of_others_of_its_form(pinned, form):
    batch = padding_batch(3, form)
    assert batch.form == form
    assert_same(batch.pinned(), batch)
