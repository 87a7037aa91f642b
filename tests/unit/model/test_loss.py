import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from hpc_tune.batch import Batch
from hpc_tune.engine.compile import compile_loss
from hpc_tune.model import loss
from hpc_tune.model.loss import HeadUnit, LossModel, scale_logits, token_losses

VOCAB = 50


def test_a_unit_of_the_head_is_called_with_nothing_that_has_fields():
    """FSDP2 reads each field of a dataclass, which of some families' configs is an error."""
    hidden_ND, head, labels_N = problem(3)
    unit = HeadUnit(head)
    model = SimpleNamespace(
        get_output_embeddings=lambda: head,
        get_decoder=lambda: lambda **_: SimpleNamespace(last_hidden_state=hidden_ND[None]),
    )
    calls = []
    unit.register_forward_pre_hook(lambda _, given: calls.append(given))
    module = LossModel(nn.Identity(), LlamaConfig(vocab_size=VOCAB))
    module.causal_lm, module.head_unit = lambda: model, unit
    positions_BT = torch.arange(3)[None]
    batch = Batch(positions_BT, labels_N[None], positions_BT, 3, 3, 0, document_lengths=[[3]])
    [total] = module(batch)
    assert torch.isclose(total.double(), by_hand(hidden_ND, head, labels_N), rtol=1e-5)
    assert [[isinstance(x, torch.Tensor) or callable(x) for x in given] for given in calls] == [
        [True, True]
    ]
    assert not any(dataclasses.is_dataclass(x) for given in calls for x in given)


def config(**values):
    return SimpleNamespace(vocab_size=VOCAB, **({"model_type": "llama"} | values))


def problem(num_tokens, bias=False, requires_grad=True):
    torch.manual_seed(num_tokens)
    hidden_ND = torch.randn(num_tokens, 16, dtype=torch.float64).float()
    head = nn.Linear(16, VOCAB, bias=bias)
    labels_N = torch.randint(VOCAB, (num_tokens,))
    return hidden_ND.requires_grad_(requires_grad), head, labels_N


def by_hand(hidden_ND, head, labels_N, scale=lambda x: x):
    """Sum of log-sum-exp minus the label's logit, in fp64."""
    logits_NV = hidden_ND.double() @ head.weight.double().t()
    if head.bias is not None:
        logits_NV = logits_NV + head.bias.double()
    logits_NV = scale(logits_NV)
    return (logits_NV.logsumexp(1) - logits_NV.gather(1, labels_N[:, None])[:, 0]).sum()


FAMILIES = {
    "plain": ({}, lambda x: x),
    "cohere": ({"logit_scale": 0.25}, lambda x: x * 0.25),
    "granite": ({"logits_scaling": 8.0}, lambda x: x / 8),
    "hyperclovax": ({"model_type": "hyperclovax", "logits_scaling": 0.125}, lambda x: x * 0.125),
    "gemma2": ({"final_logit_softcapping": 2.0}, lambda x: 2 * torch.tanh(x / 2)),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 129, 500])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_value_and_gradient_are_those_worked_out_by_hand(
    monkeypatch, family, num_tokens, bias, frozen
):
    monkeypatch.setattr(loss, "TRAINED_HEAD_LOGITS_BYTES", 1)  # the smallest chunk, 128 tokens
    values, scale = FAMILIES[family]
    hidden_ND, head, labels_N = problem(num_tokens, bias)
    head.requires_grad_(not frozen)
    trained = [hidden_ND, *([] if frozen else head.parameters())]
    total = token_losses(
        hidden_ND, head, labels_N, config(**values), logits_bytes=(1, 40 * 4 * VOCAB)
    ).sum()
    got = torch.autograd.grad(total / 3, trained)
    wanted = by_hand(hidden_ND, head, labels_N, scale)
    expected = torch.autograd.grad(wanted / 3, trained)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(wanted.item(), rel=1e-6)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_compiled_loss_is_that_of_the_operations_one_by_one(frozen, dtype):
    compiled = LossModel(nn.Linear(1, 1), config())
    compile_loss(compiled)
    torch._dynamo.reset()
    for num_tokens in (1, 150, 301):  # the latter two by one graph
        hidden_ND, head, labels_N = problem(num_tokens, requires_grad=False)
        head.requires_grad_(not frozen).to(dtype)
        hidden_ND = hidden_ND.to(dtype).requires_grad_()
        trained = [hidden_ND, *([] if frozen else head.parameters())]
        found = []
        for kernels in (loss.EAGER_KERNELS, compiled.logits_kernels):
            losses_N = token_losses(hidden_ND, head, labels_N, config(), kernels=kernels)
            found.append([losses_N, *torch.autograd.grad(losses_N.sum() / 3, trained)])
        near = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {}
        for eager, joined in zip(*found, strict=True):
            torch.testing.assert_close(joined, eager, **near)
    torch._dynamo.reset()


def test_never_more_logits_at_once_than_the_budget(monkeypatch):
    monkeypatch.setattr(loss, "TRAINED_HEAD_LOGITS_BYTES", 200 * 4 * VOCAB)
    seen = []
    hidden_ND, head, labels_N = problem(450)
    head.register_forward_hook(lambda _, __, logits_NV: seen.append(logits_NV.shape[0]))
    token_losses(hidden_ND, head, labels_N, config()).sum().backward()
    assert seen[:3] == [200, 200, 50]
    assert sorted(seen[3:]) == [50, 200, 200], "each chunk is computed again in the backward pass"


class Widest(TorchDispatchMode):
    """Remembers the most values that any operation returned."""

    num_values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.num_values = max(self.num_values, out.numel())
        return out


def test_a_frozen_head_never_has_more_logits_than_the_budget_and_none_are_kept():
    hidden_ND, head, labels_N = problem(450)
    head.requires_grad_(False)
    with Widest() as widest:
        losses_N = token_losses(
            hidden_ND, head, labels_N, config(), logits_bytes=(200 * 4 * VOCAB, 70 * 4 * VOCAB)
        )
        (kept,) = losses_N.grad_fn.saved_tensors
        losses_N.sum().backward()
    assert widest.num_values == 200 * VOCAB
    assert kept.shape == hidden_ND.shape


def test_without_a_gradient_a_frozen_head_keeps_nothing():
    hidden_ND, head, labels_N = problem(300)
    head.requires_grad_(False)
    with torch.no_grad():
        total = token_losses(hidden_ND, head, labels_N, config()).sum()
    assert total.item() == pytest.approx(by_hand(hidden_ND, head, labels_N).item(), rel=1e-6)
    assert total.grad_fn is None


def test_the_gradient_under_a_bf16_head_is_scaled_in_fp32():
    hidden_ND, head, labels_N = problem(300)
    low_ND = hidden_ND.detach().bfloat16().requires_grad_()
    head = head.bfloat16().requires_grad_(False)
    [whole] = torch.autograd.grad(token_losses(low_ND, head, labels_N, config()).sum(), low_ND)
    # 1/255 lies half-way between two numbers of bf16, which would be 0.4% of every value.
    [part] = torch.autograd.grad(token_losses(low_ND, head, labels_N, config()).sum() / 255, low_ND)
    ratio = (part.double() * whole.double()).sum() / whole.double().square().sum()
    assert 255 * ratio.item() == pytest.approx(1, abs=5e-4)


def test_in_bf16_the_small_gradient_of_a_token_that_is_nearly_certain_keeps_its_digits():
    _, head, _ = problem(0)
    head = head.bfloat16().requires_grad_(False)
    labels_N = torch.arange(VOCAB)
    # Along its own vector a token's logit is far above the others: probabilities of 0.99 and more.
    low_ND = (30 * head.weight.detach()).requires_grad_()
    [grad] = torch.autograd.grad(token_losses(low_ND, head, labels_N, config()).sum(), low_ND)
    [exact] = torch.autograd.grad(by_hand(low_ND, head, labels_N), low_ND)
    assert (grad - exact).norm() < 0.1 * exact.norm()


def test_logits_of_a_bf16_head_are_summed_in_fp32():
    hidden_ND, head, labels_N = problem(300, requires_grad=False)
    low = token_losses(hidden_ND.bfloat16(), head.bfloat16(), labels_N, config()).sum()
    exact = by_hand(hidden_ND.bfloat16(), head, labels_N)
    assert low.dtype == torch.float32
    # Summed in bf16 it is 2e-3 off.
    assert low.item() == pytest.approx(exact.item(), rel=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_scales_its_logits_its_own_way(family):
    values, scale = FAMILIES[family]
    logits = torch.linspace(-9, 9, 7)
    assert torch.allclose(scale_logits(logits, config(**values)), scale(logits))


def test_a_scale_that_is_none_changes_nothing():
    logits = torch.linspace(-9, 9, 7)
    unset = config(logit_scale=None, logits_scaling=None, final_logit_softcapping=None)
    assert torch.equal(scale_logits(logits, unset), logits)


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_trained_head_computes_in_the_dtype_of_autocast_on_a_gpu_too(monkeypatch, dtype):
    """Weights that are sharded are gathered in bf16, others cast; hidden states are fp32."""
    monkeypatch.setattr(loss, "TRAINED_HEAD_LOGITS_BYTES", 1)
    hidden_ND, head, labels_N = problem(300)
    head = head.to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        logits_NV = head(hidden_ND)
        losses_N = token_losses(hidden_ND.as_subclass(OnGpu), head, labels_N, config())
    assert logits_NV.dtype == torch.bfloat16
    assert losses_N.dtype == torch.float32
    wanted_N = torch.nn.functional.cross_entropy(logits_NV.float(), labels_N, reduction="none")
    assert torch.equal(losses_N.as_subclass(torch.Tensor), wanted_N)
