"""MLPs in pieces of a row: the same results, and the memory of one piece."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import TrainConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.engine.activation_checkpoint import checkpoint_blocks
from hpc_tune.engine.row_pieces import PiecewiseMlps, find_mlps
from hpc_tune.memory.policy import Action
from hpc_tune.model.dropout import disable_dropout
from hpc_tune.model.faster_layers import share_input_casts, use_faster_rms_norm, use_faster_swiglu
from hpc_tune.plan.resolve import resolve_row_pieces
from tests.unit.engine.test_activation_checkpoint import LiveBytes

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "pad_token_id": 0,
}
TOKENS = 1000
# How many MLPs of a block are cut: routed experts are not, what all tokens share is.
FAMILIES = {
    "llama": 1,
    "qwen2": 1,
    "qwen3": 1,
    "gemma2": 1,
    "phi": 1,
    "gpt_neox": 1,
    "gpt2": 1,
    "starcoder2": 1,
    "cohere": 1,
    "olmo2": 1,
    "mixtral": 0,
    "qwen2_moe": 1,
    "opt": 0,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}


def settings(row_pieces=1, row_tokens=0, zero_stage=None, compiles=False):
    return SimpleNamespace(
        parallel=ParallelConfig(row_pieces=row_pieces, zero_stage=zero_stage),
        train=TrainConfig(compile=compiles),
        row_tokens=row_tokens,
    )


def make(family):
    torch.manual_seed(0)
    more = EXPERTS if family in ("mixtral", "qwen2_moe") else {}
    config = AutoConfig.for_model(family, **SIZES, **more)
    disable_dropout(config)
    return AutoModelForCausalLM.from_config(config).train()


def blocks_of(model):
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


def step(model, row_pieces, recompute="full", casts=False):
    """Return (loss, gradients by name, peak of the backward pass, calls of a block's MLP)."""
    model = copy.deepcopy(model)
    blocks, calls = blocks_of(model), []
    share_input_casts(blocks)
    use_faster_swiglu(blocks)
    use_faster_rms_norm(blocks)
    PiecewiseMlps(blocks, settings(row_pieces))
    checkpoint_blocks(blocks, recompute)
    for mlp in find_mlps(blocks[0]):
        last = getattr(mlp, "down_proj", mlp)
        last.register_forward_hook(lambda *_: calls.append(1))
    tokens_BT = torch.arange(TOKENS).view(1, -1) % 100
    with torch.autocast("cpu", torch.bfloat16, enabled=casts):
        loss = model(input_ids=tokens_BT, use_cache=False).logits.logsumexp(-1).sum()
    with LiveBytes() as counted:
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), grads, counted.peak, len(calls)


def worst(found, wanted):
    assert found.keys() == wanted.keys()
    return max(((found[n] - g).norm() / (g.norm() + 1e-9)).item() for n, g in wanted.items())


@pytest.mark.parametrize(
    "family", [pytest.param(x, marks=pytest.mark.full) if x == "gemma2" else x for x in FAMILIES]
)
def test_a_family_has_the_same_losses_and_gradients_in_pieces(family):
    model = make(family)
    assert [len([*find_mlps(b)]) for b in blocks_of(model)] == [FAMILIES[family]] * 3
    loss, gradients, *_ = step(model, 1)
    found, same, *_ = step(model, 4)
    assert found == pytest.approx(loss, rel=1e-6)
    assert worst(same, gradients) < 1e-4


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("casts", [False, True])
def test_more_pieces_take_less_memory_to_the_same_loss(recompute, casts):
    model = make("llama")
    loss, gradients, most, once = step(model, 1, recompute, casts)
    peaks = [most]
    for row_pieces in (2, 4):
        found, same, peak, calls = step(model, row_pieces, recompute, casts)
        assert found == loss
        assert worst(same, gradients) < (1e-2 if casts else 1e-5)
        # Once in the forward pass and once in the backward pass, whatever the block does.
        assert (once, calls) == (1, 2 * row_pieces)
        peaks.append(peak)
    print([f"{peak >> 10} KiB" for peak in peaks])
    assert peaks[2] < 0.8 * peaks[0]
    if not casts:
        assert peaks[2] < 0.8 * peaks[1] < 0.8 * peaks[0]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("of_input", [False, True])
def test_what_is_frozen_has_no_gradient(trained, of_input):
    mlp = next(find_mlps(make("llama").model.layers[0])).requires_grad_(trained)
    other, grads = copy.deepcopy(mlp), []
    PiecewiseMlps([nn.ModuleDict({"mlp": other})], settings(3))
    for module in (mlp, other):
        torch.manual_seed(0)
        x_BTD = torch.randn(2, 10, 32).requires_grad_(of_input)
        out_BTD = module(x_BTD)
        if trained or of_input:
            out_BTD.square().sum().backward()
        grads.append([out_BTD.detach(), x_BTD.grad, *(p.grad for p in module.parameters())])
    for wanted, found in zip(*grads, strict=True):
        assert (wanted is None) == (found is None)
        assert wanted is None or torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_sliced_mlp_sends_its_sum_once_for_a_row():
    mlp = next(find_mlps(make("llama").model.layers[0]))
    other, sent, x_BTD = copy.deepcopy(mlp), [], torch.randn(1, 12, 32)

    def sum_output(_module, _inputs, y):
        sent.append(y.shape[-2])
        return 2 * y

    layer = other.down_proj
    layer.output_sum = layer.register_forward_hook(sum_output), sum_output
    PiecewiseMlps([nn.ModuleDict({"mlp": other})], settings(4))
    assert torch.allclose(other(x_BTD), 2 * mlp(x_BTD), rtol=1e-4, atol=1e-6)
    assert sent == [12]
    other(x_BTD.requires_grad_()).sum().backward()
    assert sent == [12, 12]


def test_a_lever_doubles_the_pieces_of_long_rows():
    block = make("llama").model.layers[0]
    assert PiecewiseMlps([block], settings(2, row_tokens=2048)).memory_actions() == {}
    pieces = PiecewiseMlps([block], settings(2, row_tokens=1 << 14))
    [(action, lever)] = pieces.memory_actions().items()
    assert (action, lever.max_times) == (Action.USE_MORE_PIECES, 3)
    assert "16 pieces" in lever.apply_times(3)
    assert "2 pieces" in lever.apply_times(0)


@pytest.mark.parametrize("family", ["mixtral", "opt", "llama"])
def test_pieces_are_chosen_where_there_is_an_mlp_to_cut(family, caplog):
    model, full = make(family), ParallelConfig(recompute="full")
    what = (TuneConfig(), TrainConfig(compile=False), 1 << 15)
    chosen = resolve_row_pieces(full, *what, model).row_pieces
    assert chosen == (8 if family == "llama" else 1)
    PiecewiseMlps(blocks_of(model), settings(chosen))
    assert not caplog.records
    if family != "llama":  # a number of the user's own
        assert PiecewiseMlps(blocks_of(model), settings(8)).num_pieces == 1
        assert "parallel.row_pieces=8 has no effect" in caplog.text


@pytest.mark.parametrize("other", [{"zero_stage": 3}, {"compiles": True}])
def test_what_cannot_be_cut_has_no_lever(other):
    block = make("llama").model.layers[0]
    assert PiecewiseMlps([block], settings(row_tokens=1 << 14, **other)).memory_actions() == {}
    assert "forward" not in vars(block.mlp)
