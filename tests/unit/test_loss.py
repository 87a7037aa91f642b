from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpc_tune.model import loss
from hpc_tune.model.loss import loss_sum, scale_logits

VOCAB = 50


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Models this small only lose by more threads, on a busy machine most of all."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config(**values):
    return SimpleNamespace(vocab_size=VOCAB, **values)


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
    "gemma2": ({"final_logit_softcapping": 2.0}, lambda x: 2 * torch.tanh(x / 2)),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_tokens", [0, 1, 127, 128, 129, 500])
@pytest.mark.parametrize("bias", [False, True])
def test_value_and_gradient_are_those_worked_out_by_hand(monkeypatch, family, num_tokens, bias):
    monkeypatch.setattr(loss, "LOGITS_BYTES", 1)  # the smallest chunk, 128 tokens
    values, scale = FAMILIES[family]
    hidden_ND, head, labels_N = problem(num_tokens, bias)
    total = loss_sum(hidden_ND, head, labels_N, config(**values))
    total.backward()
    got = [hidden_ND.grad, head.weight.grad, *([head.bias.grad] if bias else [])]
    hidden_ND.grad = None
    head.zero_grad()
    wanted = by_hand(hidden_ND, head, labels_N, scale)
    wanted.backward()
    expected = [hidden_ND.grad, head.weight.grad, *([head.bias.grad] if bias else [])]
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(wanted.item(), rel=1e-6)
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-6)


def test_never_more_logits_at_once_than_the_budget(monkeypatch):
    monkeypatch.setattr(loss, "LOGITS_BYTES", 200 * 4 * VOCAB)
    seen = []
    hidden_ND, head, labels_N = problem(450)
    head.register_forward_hook(lambda _, __, logits_NV: seen.append(logits_NV.shape[0]))
    loss_sum(hidden_ND, head, labels_N, config()).backward()
    assert seen[:3] == [200, 200, 50]
    assert sorted(seen[3:]) == [50, 200, 200], "each chunk is computed again in the backward pass"


def test_logits_of_a_bf16_head_are_summed_in_fp32():
    hidden_ND, head, labels_N = problem(300, requires_grad=False)
    low = loss_sum(hidden_ND.bfloat16(), head.bfloat16(), labels_N, config())
    exact = by_hand(hidden_ND.bfloat16(), head, labels_N)
    assert low.dtype == torch.float32
    assert low.item() == pytest.approx(exact.item(), rel=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_scales_its_logits_its_own_way(family):
    values, scale = FAMILIES[family]
    logits = torch.linspace(-9, 9, 7)
    assert torch.allclose(scale_logits(logits, config(**values)), scale(logits))


def test_a_scale_that_is_none_changes_nothing():
    logits = torch.linspace(-9, 9, 7)
    unset = config(logit_scale=None, logits_scaling=None, final_logit_softcapping=None)
    assert torch.equal(scale_logits(logits, unset), logits)
