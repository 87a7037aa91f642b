"""RMS norms that keep one tensor for the backward pass, against transformers'."""

import copy
import types

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hpc_tune.model import faster_layers
from hpc_tune.model.faster_layers import use_faster_rms_norm

SHAPE = 3, 7, 96


def norm_of(kind=LlamaRMSNorm, dtype=torch.float32):
    torch.manual_seed(0)
    norm = kind(SHAPE[-1])
    torch.nn.init.normal_(norm.weight, 1.0, 0.3)
    return norm.to(dtype)


def out_and_grads(norm, dtype):
    generator = torch.Generator().manual_seed(1)
    x = (5 * torch.randn(SHAPE, generator=generator)).to(dtype).requires_grad_()
    weight = torch.randn(SHAPE, generator=generator).to(dtype)
    out = norm(x)
    out.backward(weight)
    return [out.detach(), x.grad, norm.weight.grad]


@pytest.mark.parametrize("uses_torch", [False, True])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_in_fp32_values_and_gradients_are_transformers(kind, uses_torch):
    stock = norm_of(kind)
    replaced = copy.deepcopy(stock)
    assert use_faster_rms_norm([replaced], uses_torch) == 1
    pairs = zip(
        out_and_grads(replaced, torch.float32), out_and_grads(stock, torch.float32), strict=True
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("uses_torch", [False, True])
def test_in_bf16_they_are_as_exact_as_transformers(uses_torch):
    exact = norm_of(dtype=torch.bfloat16).float()
    generator = torch.Generator().manual_seed(1)
    x = (5 * torch.randn(SHAPE, generator=generator)).bfloat16()
    weight = torch.randn(SHAPE, generator=generator).bfloat16()

    def grads(norm, dtype):
        leaf = x.to(dtype).requires_grad_()
        norm.zero_grad()
        out = norm(leaf)
        out.backward(weight.to(dtype))
        return [out.detach(), leaf.grad, norm.weight.grad]

    wanted = grads(exact, torch.float32)
    stock = norm_of(dtype=torch.bfloat16)
    replaced = copy.deepcopy(stock)
    use_faster_rms_norm([replaced], uses_torch)
    found = zip(grads(replaced, torch.bfloat16), grads(stock, torch.bfloat16), wanted, strict=True)
    for ours, theirs, true in found:
        assert (ours - true).norm() <= 1.02 * (theirs - true).norm()


def test_only_the_input_is_kept_and_in_its_own_dtype():
    kept = []

    def pack(tensor):
        kept.append((tensor.shape, tensor.dtype))
        return tensor

    norm = norm_of(dtype=torch.bfloat16).requires_grad_(False)
    use_faster_rms_norm([norm])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        norm(torch.randn(SHAPE, dtype=torch.bfloat16, requires_grad=True))
    assert sorted(kept, key=str) == sorted(
        [
            (torch.Size(SHAPE), torch.bfloat16),
            (torch.Size(SHAPE[-1:]), torch.bfloat16),
            (torch.Size((*SHAPE[:-1], 1)), torch.float32),
        ],
        key=str,
    )


@pytest.mark.parametrize("uses_torch", [False, True])
def test_weights_in_fp32_under_values_in_bf16_are_transformers_affair(uses_torch):
    stock = norm_of()
    replaced = copy.deepcopy(stock)
    use_faster_rms_norm([replaced], uses_torch)
    x = torch.randn(SHAPE, dtype=torch.bfloat16)
    assert replaced(x).dtype == torch.float32
    assert torch.equal(replaced(x), stock(x))


@pytest.mark.parametrize("uses_torch", [False, True])
@pytest.mark.parametrize("kind", [GemmaRMSNorm, Olmo2RMSNorm])
def test_norms_of_another_form_are_left_alone(kind, uses_torch):
    """Gemma's weights are stored less 1."""
    assert use_faster_rms_norm([norm_of(kind)], uses_torch) == 0


def test_torchs_norm_is_one_operator():
    """On a GPU that operator is one kernel forward and one backward."""
    norm, seen = norm_of(dtype=torch.bfloat16).requires_grad_(False), []
    use_faster_rms_norm([norm], uses_torch=True)

    class Seen(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Seen():
        norm(torch.randn(SHAPE, dtype=torch.bfloat16))
    assert torch.nn.functional.rms_norm in seen
    assert not {torch.rsqrt, torch.Tensor.rsqrt, torch.Tensor.float, torch.Tensor.mul_} & {*seen}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_a_gpus_autocast_the_result_has_transformers_dtype(dtype):
    norm = LlamaRMSNorm(8)
    torch.set_autocast_enabled("cuda", True)  # torch.autocast refuses to, without a GPU
    try:
        with FakeTensorMode():
            weight = torch.empty(8, dtype=dtype, device="cuda")
            norm.weight = torch.nn.Parameter(weight, requires_grad=False)
            x = torch.empty(SHAPE[0], 8, dtype=dtype, device="cuda")
            stock = norm(x)
            norm.forward = types.MethodType(faster_layers._torch_rms_norm_forward, norm)
            assert norm(x).dtype == stock.dtype == dtype
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_what_counts_is_what_a_class_computes_and_not_its_source():
    class LimitedRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states).clamp(-3, 3)

    class OtherwiseWrittenRMSNorm(LlamaRMSNorm):
        def forward(self, x):
            wide = x.float()
            wide = wide * (wide.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
            return wide.type_as(x) * self.weight

    class FreeRMSNorm(LlamaRMSNorm):
        def __init__(self, size):
            super().__init__(size)
            self.weight = None

    assert use_faster_rms_norm([norm_of(LimitedRMSNorm)]) == 0
    assert use_faster_rms_norm([norm_of(OtherwiseWrittenRMSNorm)]) == 1
    assert use_faster_rms_norm([FreeRMSNorm(8)]) == 0


def test_a_norm_on_the_meta_device_is_tried_on_values_all_the_same():
    with torch.device("meta"):
        assert use_faster_rms_norm([LlamaRMSNorm(8), GemmaRMSNorm(8)]) == 1
