"""MLPs that keep one tensor less, against transformers'."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hpc_tune.model.faster_layers import use_faster_swiglu


def block_of(family, **more):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**shape, **heads, **more)
    return AutoModelForCausalLM.from_config(config).model.layers[0]


def grads_of(mlp, x, run):
    mlp.zero_grad()
    x.grad = None
    y = run(x)
    y.pow(2).sum().backward()
    return y.detach(), x.grad.clone(), *(p.grad.clone() for p in mlp.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recomputed", [False, True])
def test_the_same_bits_as_transformers(dtype, recomputed):
    stock = block_of("llama").to(dtype)
    replaced = copy.deepcopy(stock)
    assert use_faster_swiglu([replaced]) == 1
    x = torch.randn(2, 5, 32, dtype=dtype, requires_grad=True)

    def run(x):
        return checkpoint(replaced.mlp, x, use_reentrant=False) if recomputed else replaced.mlp(x)

    wanted = grads_of(stock.mlp, x, stock.mlp)
    for ours, theirs in zip(grads_of(replaced.mlp, x, run), wanted, strict=True):
        assert torch.equal(ours, theirs)


def test_one_tensor_less_is_kept():
    def kept_by(block):
        kept = {}

        def pack(tensor):
            kept[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            block.mlp(torch.randn(2, 5, 32))
        return sorted(size for size in kept.values() if size == 2 * 5 * 48)

    block = block_of("llama")
    before = kept_by(block)
    use_faster_swiglu([block])
    assert len(kept_by(block)) == len(before) - 1 == 3


@pytest.mark.parametrize(("family", "more"), [("gemma", {}), ("llama", {"hidden_act": "gelu"})])
def test_other_activations_are_left_alone(family, more):
    assert use_faster_swiglu([block_of(family, **more)]) == 0


def test_what_counts_is_what_a_class_computes_and_not_its_source():
    """Seed-OSS drops some of an MLP's results, after the same line of code as Llama's."""
    dropping = {"residual_dropout": 0.5, "attention_dropout": 0.0}
    assert use_faster_swiglu([block_of("seed_oss", **dropping).train()]) == 0
    assert (
        use_faster_swiglu([block_of("seed_oss", **dropping | {"residual_dropout": 0.0}).train()])
        == 1
    )

    class LimitedMlp(type(block_of("llama").mlp)):
        def forward(self, x):
            return super().forward(x).clamp(-7, 7)

    block = block_of("llama")
    block.mlp.__class__ = LimitedMlp
    assert use_faster_swiglu([block]) == 0


def test_an_mlp_on_the_meta_device_is_tried_on_values_all_the_same():
    with torch.device("meta"):
        assert use_faster_swiglu([block_of("llama")]) == 1


def test_layers_of_one_class_are_told_apart_by_their_attributes():
    class SometimesLimitedMlp(type(block_of("llama").mlp)):
        limit = None

        def forward(self, x):
            out = super().forward(x)
            return out if self.limit is None else out.clamp(-self.limit, self.limit)

    blocks = [block_of("llama") for _ in range(3)]
    for block in blocks:
        block.mlp.__class__ = SometimesLimitedMlp
    blocks[1].mlp.limit = 7.0
    assert use_faster_swiglu(blocks) == 2
    assert "forward" not in vars(blocks[1].mlp)
