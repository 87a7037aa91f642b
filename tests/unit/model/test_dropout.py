"""Dropout as a function of (seed, row, layer), however rows are grouped."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hpc_tune.model.dropout import RowDropout, use_row_dropout
from hpc_tune.model.micro_batch import MicroBatch, batch_context
from hpc_tune.model.shared_rows import RowShard

P = 0.25


def dropped(rows, seed=0, layer="a", x_BTD=None):
    x_BTD = torch.ones(len(rows), 16, 32) if x_BTD is None else x_BTD
    with batch_context.use_batch(MicroBatch(rows)):
        return RowDropout(P, seed, layer)(x_BTD)


def test_a_row_has_one_mask_in_any_company():
    together = dropped(range(3, 15, 3))
    for number, row in enumerate(range(3, 15, 3)):
        assert torch.equal(together[number], dropped([row])[0])


def test_a_shorter_row_has_the_beginning_of_the_mask():
    short = dropped([5], x_BTD=torch.ones(1, 7, 32))
    assert torch.equal(short[0], dropped([5])[0, :7])


def test_slices_of_the_features_have_the_slices_of_the_mask():
    whole = dropped([5, 6])
    for number in range(4):
        layer = RowDropout(P, 0, "a")
        layer.set_feature_slice(number, 4)
        with batch_context.use_batch(MicroBatch([5, 6])):
            assert torch.equal(layer(torch.ones(2, 16, 8)), whole.chunk(4, -1)[number])


def test_ranks_that_share_rows_have_their_part_of_the_mask_and_keep_no_more():
    whole, kept = dropped([5, 6]), []
    for rank in range(4):
        row_sharing = SimpleNamespace(part=RowShard(rank, 4))
        x_BSD = torch.ones(2, 4, 32, requires_grad=True)
        with (
            batch_context.use_batch(MicroBatch([5, 6], row_sharing=row_sharing)),
            torch.autograd.graph.saved_tensors_hooks(
                lambda t: kept.append(t.untyped_storage().nbytes()) or t, lambda t: t
            ),
        ):
            assert torch.equal(RowDropout(P, 0, "a")(x_BSD), whole.chunk(4, 1)[rank])
    assert kept == [2 * 4 * 32 * 4] * 4


@pytest.mark.parametrize("other", [{"rows": [6]}, {"seed": 1}, {"layer": "b"}])
def test_another_row_seed_or_layer_has_another_mask(other):
    assert not torch.equal(dropped([5]), dropped(**{"rows": [5], **other}))


def test_the_mean_stays_and_evaluation_drops_nothing():
    many = dropped(range(64))
    assert many.mean().item() == pytest.approx(1.0, abs=0.02)
    assert many.unique().tolist() == [0.0, pytest.approx(1 / (1 - P))]
    layer = RowDropout(P, 0, "a").eval()
    x = torch.ones(2, 3, 4)
    assert layer(x) is x


def test_what_is_recomputed_later_drops_the_same():
    layer, x = RowDropout(P, 0, "a"), torch.ones(1, 16, 32, requires_grad=True)
    with batch_context.use_batch(MicroBatch([5])):
        y = checkpoint(batch_context.bind(lambda v: layer(v).square()), x, use_reentrant=False)
    with batch_context.use_batch(
        MicroBatch([9])
    ):  # another micro-batch runs before this one's backward pass
        y.sum().backward()
    assert torch.equal(x.grad.bool(), y.bool())


def test_rows_laid_flat_are_rows_too():
    flat = dropped([5, 6], x_BTD=torch.ones(2 * 16, 32))
    assert torch.equal(flat.view(2, 16, 32), dropped([5, 6]))


def test_only_the_dropout_of_adapters_is_replaced():
    model = nn.ModuleDict({"lora_dropout": nn.ModuleDict({"default": nn.Dropout(P)})})
    root = nn.ModuleDict({"layer": model, "other": nn.Dropout(P)})
    use_row_dropout(root, 0)
    assert isinstance(model["lora_dropout"]["default"], RowDropout)
    assert isinstance(root["other"], nn.Dropout)
