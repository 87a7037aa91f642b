"""Attention document by document, against transformers' masks."""

from dataclasses import replace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, masking_utils

from hpc_tune.batch import Batch, read_document_lengths
from hpc_tune.engine.activation_checkpoint import checkpoint_blocks
from hpc_tune.model.layers import find_blocks
from hpc_tune.model.loss import LossModel
from hpc_tune.model.micro_batch import MicroBatch, batch_context
from hpc_tune.model.packed_attention import _attend, make_documents, use_document_attention
from hpc_tune.model.shared_rows import RowShard, shard_documents
from hpc_tune.model.tiled_attention import _make_tiling, tiled_attention
from hpc_tune.model.varlen_attention import DocumentParts

# Documents of three rows: several, one, and single tokens at an end.
LENGTHS = ((5, 9, 2), (16,), (14, 1, 1))


def batch():
    generator = torch.Generator().manual_seed(3)
    tokens_BT = torch.randint(0, 64, (3, 16), generator=generator)
    rows = [torch.cat([torch.arange(length) for length in lengths]) for lengths in LENGTHS]
    return Batch(tokens_BT, tokens_BT.roll(-1, 1), torch.stack(rows), 48, 48, 0)


def model_of(family="llama", recompute="none", **more):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = CONFIG_MAPPING[family](**shape, **heads, **more)
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config)
    module = LossModel(lm, config, use_document_attention(lm)).train()
    checkpoint_blocks(list(find_blocks(module)), recompute)
    return module


def loss_and_grads(module):
    module.zero_grad()
    loss = module(batch())
    loss.backward()
    return loss.item(), [p.grad.clone() for p in module.parameters()]


def test_documents_of_packed_rows():
    assert make_documents(LENGTHS) == [
        *((slice(0, 1), 0, 5), (slice(0, 1), 5, 14), (slice(0, 1), 14, 16)),
        (slice(1, 2), 0, 16),
        *((slice(2, 3), 0, 14), (slice(2, 3), 14, 15), (slice(2, 3), 15, 16)),
    ]
    assert make_documents([[4], [4]]) == [(slice(0, 2), 0, 4)]


def test_lengths_are_read_off_positions_only_where_a_batch_has_none(monkeypatch):
    assert read_document_lengths(batch().positions_BT) == [list(lengths) for lengths in LENGTHS]
    module = model_of()
    wanted = module(batch())
    monkeypatch.setattr("hpc_tune.model.loss.read_document_lengths", None)
    assert torch.equal(module(replace(batch(), document_lengths=LENGTHS)), wanted)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_loss_and_gradients_are_those_of_the_mask(family, recompute):
    module = model_of(family, recompute)
    assert module.uses_document_attention
    loss, grads = loss_and_grads(module)
    module.uses_document_attention = False
    wanted, wanted_grads = loss_and_grads(module)
    assert loss == pytest.approx(wanted, rel=1e-6)
    for grad, other in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-6)


def test_weights_in_fp32_train_in_bf16():
    """Full fine-tuning does; what rotary positions leave in fp32 is no dtype of values in bf16."""
    module = model_of()
    wanted, wanted_grads = loss_and_grads(module)
    with torch.autocast("cpu", torch.bfloat16):
        loss, grads = loss_and_grads(module)
    assert loss != wanted
    assert loss == pytest.approx(wanted, rel=1e-2)
    for grad, other in zip(grads, wanted_grads, strict=True):
        assert grad.dtype == torch.float32
        assert (grad - other).norm() < 0.05 * other.norm()


def test_no_mask_is_made_where_documents_say_it_all(monkeypatch):
    made = []
    sdpa_mask = masking_utils.sdpa_mask
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda **o: made.append(o) or sdpa_mask(**o))
    module = model_of()
    module(batch())
    assert not made
    module.uses_document_attention = False
    module(batch())
    assert len(made) == 1


def test_layers_with_a_sliding_window_keep_their_mask():
    module = model_of("mistral", sliding_window=3)
    loss, _ = loss_and_grads(module)
    module.uses_document_attention = False
    assert loss == pytest.approx(loss_and_grads(module)[0], rel=1e-6)
    wide = model_of("mistral", sliding_window=None)
    wide.load_state_dict(module.state_dict())
    assert loss_and_grads(wide)[0] != pytest.approx(loss, rel=1e-4), "the window does nothing"


def test_families_without_sdpa_are_left_alone():
    module = model_of("gemma2", head_dim=8)
    assert not module.uses_document_attention
    assert module.config._attn_implementation == "eager"


def stock(query, key, value, lengths):
    parts = [tensor.split(lengths, 2) for tensor in (query, key, value)]
    attend = torch.nn.functional.scaled_dot_product_attention
    return torch.cat(
        [attend(*part, is_causal=True, enable_gqa=True) for part in zip(*parts, strict=True)], 2
    )


def ours(query, key, value, lengths):
    with batch_context.use_batch(MicroBatch(documents=make_documents([lengths] * len(query)))):
        return _attend(None, query, key, value, None)[0].transpose(1, 2)


def out_and_grads(attend, inputs, weight, dtype, lengths):
    inputs = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    out = attend(*inputs, lengths)
    return [out.detach(), *torch.autograd.grad(out, inputs, weight.to(dtype))]


# One tile and several, documents of equal numbers of tiles, and one of the longer tiles.
LONGER = [(40, 24), (64,), (600, 40), (130, 5, 190, 59, 64), (1100, 52)]


@pytest.mark.parametrize("value_dim", [5, 12])
def test_heads_whose_values_are_of_another_size_attend_as_torchs_do(value_dim):
    lengths, generator = (40, 24), torch.Generator().manual_seed(1)
    shapes = ((4, 8), (2, 8), (2, value_dim))
    inputs = [torch.randn(2, h, 64, dim, generator=generator) for h, dim in shapes]
    weight = torch.randn(2, 4, 64, value_dim, generator=generator)
    found = out_and_grads(ours, inputs, weight, torch.float64, lengths)
    wanted = out_and_grads(stock, inputs, weight, torch.float64, lengths)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("most_scores", [1 << 21, 1])
@pytest.mark.parametrize("lengths", LONGER)
def test_documents_of_any_length_attend_as_torchs_do(lengths, most_scores, monkeypatch):
    monkeypatch.setattr("hpc_tune.model.tiled_attention.MAX_SCORES", most_scores)
    _make_tiling.cache_clear()
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, h, sum(lengths), 8, generator=generator) for h in (6, 2, 2)]
    weight = torch.randn(2, 6, sum(lengths), 8, generator=generator)
    found = out_and_grads(ours, inputs, weight, torch.float64, lengths)
    wanted = out_and_grads(stock, inputs, weight, torch.float64, lengths)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 8])  # of queries: scores of up to 4 and 30
@pytest.mark.parametrize("lengths", LONGER)
def test_gradients_in_bf16_are_no_less_exact_than_torchs(lengths, size):
    """Those of queries, keys and values together; torch's fused kernel has its scores in fp32."""
    generator = torch.Generator().manual_seed(1)
    num_tokens = sum(lengths)
    inputs = [torch.randn(2, h, num_tokens, 16, generator=generator) for h in (4, 2, 2)]
    weight = torch.randn(2, 4, num_tokens, 16, generator=generator).bfloat16()
    inputs = [tensor.mul(size if n == 0 else 1).bfloat16() for n, tensor in enumerate(inputs)]
    wanted = out_and_grads(stock, inputs, weight, torch.float64, lengths)

    def errors(attend):
        found = out_and_grads(attend, inputs, weight, torch.bfloat16, lengths)
        pairs = zip(found, wanted, strict=True)
        return torch.stack([(one.double() - true).norm() / true.norm() for one, true in pairs])

    found, theirs = errors(ours), errors(stock)
    assert (found < torch.finfo(torch.bfloat16).eps).all()
    assert found[1:].norm() < 1.05 * theirs[1:].norm()


@pytest.mark.parametrize(("dropout", "value_dim"), [(0.3, 8), (0.0, 6)])
def test_documents_stay_apart_where_the_kernel_cannot_be_used(dropout, value_dim):
    generator = torch.Generator().manual_seed(1)
    shapes = ((4, 8), (2, 8), (2, value_dim))
    inputs = [torch.randn(3, h, 16, dim, generator=generator) for h, dim in shapes]

    def second_documents():
        torch.manual_seed(0)
        with batch_context.use_batch(MicroBatch(documents=make_documents(LENGTHS))):
            out_BTHD = _attend(None, *inputs, None, dropout=dropout)[0]
        assert out_BTHD.shape == (3, 16, 4, value_dim)
        return out_BTHD[0, LENGTHS[0][0] :]

    before = second_documents()
    for tensor in inputs:
        tensor[0, :, : LENGTHS[0][0]] += 1.0
    assert torch.equal(second_documents(), before)


@pytest.mark.parametrize("most_scores", [1 << 21, 1])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("lengths", [(600, 39, 9), (130, 5, 190, 59, 264), (1100, 52), (648,)])
def test_the_last_tokens_of_documents_attend_as_in_whole_rows(
    lengths, size, most_scores, monkeypatch
):
    monkeypatch.setattr("hpc_tune.model.tiled_attention.MAX_SCORES", most_scores)
    _make_tiling.cache_clear()
    generator, total = torch.Generator().manual_seed(1), sum(lengths)
    inputs = [torch.randn(2, h, total, 8, generator=generator) for h in (6, 2, 2)]
    weight = torch.randn(2, 6, total, 8, generator=generator)
    out, *wanted = out_and_grads(stock, inputs, weight, torch.float64, lengths)
    sums = [torch.zeros_like(grad) for grad in wanted]
    for part in (RowShard(rank, size, is_head_tail=True) for rank in range(size)):
        own = DocumentParts(shard_documents([lengths] * 2, part))

        def attend(query, key, value, _, part=part, own=own):
            query = part.shard_to_rank(query, 2).transpose(0, 1).flatten(1, 2).unsqueeze(0)
            keys = own.take_keys(key), own.take_keys(value)
            out_1SHD = tiled_attention(query, *keys, own.spans, None, own.num_earlier_keys)
            return out_1SHD.view(2, -1, 6, 8).transpose(1, 2)

        found, *grads = out_and_grads(
            attend, inputs, part.shard_to_rank(weight, 2), torch.float64, lengths
        )
        torch.testing.assert_close(found, part.shard_to_rank(out, 2), rtol=1e-12, atol=1e-12)
        sums = [one + other for one, other in zip(sums, grads, strict=True)]
    for one, other in zip(sums, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
