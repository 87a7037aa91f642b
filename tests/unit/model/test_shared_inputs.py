"""One cast of what layers share as input under autocast: how many, what is kept, and the values."""

import copy
import weakref
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition, nop
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hpc_tune.batch import Batch
from hpc_tune.engine.activation_checkpoint import checkpoint_blocks
from hpc_tune.engine.compile import compile_blocks
from hpc_tune.model import layers as own_layers
from hpc_tune.model.faster_layers import share_input_casts
from hpc_tune.model.layers import find_blocks, use_faster_layers
from hpc_tune.model.loss import LossModel
from hpc_tune.model.packed_attention import use_document_attention

ROWS, TOKENS, HIDDEN = 2, 11, 32
NUM = ROWS * TOKENS * HIDDEN  # of no weight, and of no other activation
# Heads of 4 x 16 and 1 x 16 values: queries, keys and values are not as wide as their input.
SIZES = {
    **{"hidden_size": HIDDEN, "intermediate_size": 48, "vocab_size": 64, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 1, "pad_token_id": None},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    **{"q_lora_rank": 12, "kv_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    **{"v_head_dim": 16, "num_key_value_heads": 4, "first_k_dense_replace": 9, "head_dim": 8},
}
FAMILIES = {"llama": {}, "qwen3": {}, "gemma2": {}, "qwen3_moe": EXPERTS, "deepseek_v3": LATENT}
BF16 = torch.bfloat16


def batch():
    tokens_BT = torch.randint(0, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(3))
    positions_BT = torch.arange(TOKENS).repeat(ROWS, 1)
    count = tokens_BT.numel()
    made = Batch(tokens_BT, tokens_BT.roll(-1, 1), positions_BT, count, count, 0)
    return replace(made, document_lengths=((TOKENS,),) * ROWS)


def model_of(family, num_blocks=2, compiled=False, recompute="none", dtype=torch.float32):
    sizes = {**SIZES, **FAMILIES[family], "num_hidden_layers": num_blocks}
    config = CONFIG_MAPPING[family](**sizes)
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config).to(dtype)
    module = LossModel(lm, config, use_document_attention(lm)).train()
    blocks = list(find_blocks(module))
    use_faster_layers(module, blocks, compiled, dtype, torch.device("cpu"))
    checkpoint_blocks(blocks, recompute)
    return module


def step(module, dtype=BF16):
    """Return the loss and the gradients, under autocast unless ``dtype`` is None."""
    module.zero_grad()
    with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
        loss = module(batch())
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


@pytest.fixture
def separately(monkeypatch):
    """Return a function that makes a model whose layers each cast their input."""

    def make(*args, **options):
        with monkeypatch.context() as patch:
            patch.setattr(own_layers, "share_input_casts", lambda blocks: 0)
            return model_of(*args, **options)

    return make


class Casts(TorchDispatchMode):
    """Counts casts of activations as wide as the input: of those down, and of those up."""

    def __init__(self):
        super().__init__()
        self.down = self.up = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and out.numel() == NUM:
            self.down += (args[0].dtype, out.dtype) == (torch.float32, BF16)
            self.up += (args[0].dtype, out.dtype) == (BF16, torch.float32)
        return out


def casts_and_bytes(module):
    """Return casts forward, backward, and the bytes that are kept between both."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # alive, so that no other has its address
        return tensor

    with Casts() as forward, torch.autocast("cpu", BF16), saved_tensors_hooks(pack, lambda t: t):
        loss = module(batch())
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    num_bytes = sum(s.nbytes() for address, s in kept.items() if address not in weights)
    with Casts() as backward:
        loss.backward()
    return forward.down, backward.up, num_bytes


def of_a_block(make, family, compiled):
    few, more = (casts_and_bytes(make(family, n, compiled)) for n in (1, 3))
    return [(b - a) / 2 for a, b in zip(few, more, strict=True)]


@pytest.mark.parametrize(("family", "apart"), [("llama", 5), ("qwen3", 5), ("deepseek_v3", 4)])
def test_a_block_casts_each_norms_result_once_and_keeps_it_once(family, apart, separately):
    before = of_a_block(separately, family, False)
    after = of_a_block(model_of, family, False)
    assert before[0] == apart
    assert after[0] == 2
    assert before[1] - after[1] == apart - 2
    assert before[2] - after[2] == (apart - 2) * NUM * 2


def test_experts_keep_their_tokens_in_the_dtype_of_products(separately):
    """A token is cast once for attention, once for the router, and once for all its experts."""
    before = of_a_block(separately, "qwen3_moe", False)
    after = of_a_block(model_of, "qwen3_moe", False)
    assert before[0] == 5
    assert after[0] == 3
    assert before[2] - after[2] == 2 * NUM * 2


def test_an_input_that_not_all_layers_are_called_with_is_let_go_of():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, fails=False):
            out = self.first(x) + self.first(x)
            if fails:
                raise ValueError
            return out

    part = Part()
    assert share_input_casts([part]) == 1
    for fails in (False, True):
        x = torch.randn(3, 4, requires_grad=True)
        alive = weakref.ref(x)
        with torch.autocast("cpu", BF16), suppress(ValueError):
            part(x, fails).sum().backward()
            expected = 2 * part.first.weight.bfloat16().float().sum(0).expand(3, 4)
            torch.testing.assert_close(x.grad, expected, rtol=1e-2, atol=1e-2)
        del x
        assert alive() is None


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_layers_in_16_bits_are_left_alone(dtype):
    part = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)
    assert share_input_casts([part]) == (dtype == torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_without_autocast_every_bit_is_the_same(family, dtype, separately):
    wanted = step(separately(family, dtype=dtype), None)
    assert all(map(torch.equal, step(model_of(family, dtype=dtype), None), wanted))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_has_the_same_bits_and_gradients_are_as_near_to_fp32(family, separately):
    exact = step(model_of(family), None)[1:]
    loss, *found = step(model_of(family))
    wanted, *apart = step(separately(family))
    assert torch.equal(loss, wanted)
    assert {grad.dtype for grad in found} == {torch.float32}

    def gap(grads):
        pairs = zip(grads, exact, strict=True)
        return sum((one - true).square().sum() for one, true in pairs).sqrt()

    assert 0 < gap(found) < 1.001 * gap(apart)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_blocks_have_the_same_bits(family, recompute):
    wanted = step(model_of(family))
    assert all(map(torch.equal, step(model_of(family, recompute=recompute)), wanted))


@pytest.mark.parametrize("recompute", ["none", pytest.param("selective", marks=pytest.mark.full)])
def test_a_compiler_makes_one_cast_of_each_input_by_itself(recompute, monkeypatch):
    theirs, down = torch.compile, []

    def count(graph, _inputs):
        made = (
            node.meta.get("val") for node in graph.graph.nodes if "_to_copy" in str(node.target)
        )
        down.append(sum(bool(one.dtype == BF16 and one.numel() == NUM) for one in made))
        return graph.forward

    backend = aot_autograd(
        fw_compiler=count, partition_fn=min_cut_rematerialization_partition, bw_compiler=nop
    )
    monkeypatch.setattr(torch, "compile", lambda forward: theirs(forward, backend=backend))
    torch._dynamo.reset()
    counters.clear()
    module = model_of("llama", 3, True, recompute)
    wanted = step(copy.deepcopy(module))
    compile_blocks(list(find_blocks(module)))
    for _ in range(2):
        for found, true in zip(step(module), wanted, strict=True):
            torch.testing.assert_close(found, true, rtol=2e-2, atol=2e-2)
    torch._dynamo.reset()
    assert down == [2]
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
