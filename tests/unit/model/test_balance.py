"""The losses of routers: against transformers, Megatron's formula and torch, and in odd cases."""

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hpc_tune.batch import padding_batch
from hpc_tune.model.balance import (
    RouterSums,
    _infer_score_function,
    _is_router_output,
    balance_loss,
    count_expert_tokens,
    real_token_mask,
    summarize_expert_load,
    z_loss,
)

EXPERTS, CHOSEN, TOKENS = 6, 2, 40


def logits(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows * TOKENS, EXPERTS, generator=generator).mul_(2).requires_grad_()


def real(*lengths):
    return torch.arange(TOKENS) < torch.tensor(lengths).unsqueeze(1)


def balance(logits_NE, is_real_BT, score="softmax", chosen=CHOSEN):
    expert_ids_NK = logits_NE.topk(chosen).indices
    counts_BE = count_expert_tokens(expert_ids_NK, is_real_BT, logits_NE.shape[1])
    return balance_loss(logits_NE, counts_BE, chosen, is_real_BT, score)


@pytest.mark.parametrize("length", [TOKENS, 23, 1])
def test_one_row_of_one_layer_has_the_loss_and_gradient_of_transformers_by_k(length):
    ours, theirs, is_real_BT = logits(1), logits(1), real(length)
    balance(ours, is_real_BT).backward()
    stock = load_balancing_loss_func((theirs,), EXPERTS, CHOSEN, is_real_BT.long())
    stock.backward()
    expected = length * stock.item() / CHOSEN
    assert balance(ours, is_real_BT).item() == pytest.approx(expected, rel=1e-6)
    assert torch.allclose(ours.grad, length * theirs.grad / CHOSEN, atol=1e-6)
    assert not ours.grad[length:].any()


def test_scores_of_a_sigmoid_add_up_to_one_as_in_megatron():
    logits_NE, length = logits(1), 23
    scores_TE = torch.sigmoid(logits_NE[:length].double())
    probs_TE = scores_TE / scores_TE.sum(1, keepdim=True)
    counts_E = torch.zeros(EXPERTS, dtype=torch.float64)
    for expert in logits_NE[:length].topk(CHOSEN).indices.flatten().tolist():
        counts_E[expert] += 1
    expected = EXPERTS / (CHOSEN * length**2) * (counts_E * probs_TE.sum(0)).sum()
    found = balance(logits_NE, real(length), "sigmoid")
    assert found.item() == pytest.approx(length * expected.item(), rel=1e-6)


def test_rows_add_up_whatever_their_company_and_padding():
    logits_NE, lengths = logits(4), (TOKENS, 7, 0, 23)
    together = balance(logits_NE, real(*lengths)), z_loss(logits_NE, real(*lengths))
    each = logits_NE.split(TOKENS)
    alone = [
        sum(loss(row, real(length)) for row, length in zip(each, lengths, strict=True))
        for loss in (balance, z_loss)
    ]
    for whole, parts in zip(together, alone, strict=True):
        assert whole.item() == pytest.approx(parts.item(), rel=1e-6)
    spoiled = logits_NE.detach().view(4, TOKENS, EXPERTS).clone()
    for row, length in zip(spoiled, lengths, strict=True):
        row[length:] = float("nan")
    spoiled = spoiled.view(-1, EXPERTS)
    expert_ids_NK = logits_NE.topk(CHOSEN).indices
    counts_BE = count_expert_tokens(expert_ids_NK, real(*lengths), EXPERTS)
    found = balance_loss(spoiled, counts_BE, CHOSEN, real(*lengths), "softmax")
    assert found.item() == pytest.approx(together[0].item(), rel=1e-6)


def test_the_z_loss_is_torchs_formula():
    logits_NE = logits(1)
    expected = torch.log(torch.exp(logits_NE[:23].double()).sum(1)).square().sum()
    assert z_loss(logits_NE, real(23)).item() == pytest.approx(expected.item(), rel=1e-6)


def test_an_even_router_has_one_per_token_and_one_that_sends_all_to_one_as_many_as_experts():
    even = torch.eye(EXPERTS).repeat(TOKENS, 1) * 1e-3
    is_real_BT = torch.ones(1, EXPERTS * TOKENS, dtype=torch.bool)
    tokens = EXPERTS * TOKENS
    assert balance(even, is_real_BT, chosen=1).item() == pytest.approx(tokens, rel=1e-5)
    one = torch.zeros(tokens, EXPERTS)
    one[:, 4] = 100.0
    assert balance(one, is_real_BT, chosen=1).item() == pytest.approx(tokens * EXPERTS, rel=1e-5)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_no_gradient_is_nan_where_an_expert_starves_or_a_batch_is_empty(score):
    logits_NE = logits(1).detach()
    logits_NE[:, 2] = -1e4
    logits_NE.requires_grad_()
    expert_ids_NK = logits_NE.topk(CHOSEN).indices
    assert count_expert_tokens(expert_ids_NK, real(TOKENS), EXPERTS)[0, 2] == 0
    for is_real_BT in (real(TOKENS), real(0), real(1)):
        logits_NE.grad = None
        loss = balance(logits_NE, is_real_BT, score) + z_loss(logits_NE, is_real_BT)
        loss.backward()
        assert loss.isfinite()
        assert logits_NE.grad.isfinite().all()
        assert bool(loss) == bool(is_real_BT.any())


def test_padding_and_empty_batches_have_no_real_tokens():
    assert not real_token_mask(padding_batch(0)).any()


def test_tokens_of_experts_are_counted_by_row():
    expert_ids_NK = torch.tensor([[0, 1], [0, 2], [3, 0], [1, 2]])
    is_real_BT = torch.tensor([[True, True], [True, False]])
    assert count_expert_tokens(expert_ids_NK, is_real_BT, 4).tolist() == [
        [2, 1, 1, 0],
        [1, 0, 0, 1],
    ]


def router(name, normalizes=True, scale=1.0, chosen=2):
    logits_NE = logits(1).detach()
    scores_NE = {"softmax": logits_NE.softmax(1), "sigmoid": logits_NE.sigmoid()}.get(name)
    scores_NE = logits_NE.square() if scores_NE is None else scores_NE
    weights_NK, expert_ids_NK = scores_NE.topk(chosen)
    if normalizes:
        weights_NK = weights_NK / (weights_NK.sum(1, keepdim=True) + 1e-6)
    return logits_NE, scale * weights_NK, expert_ids_NK


@pytest.mark.parametrize("name", ["softmax", "sigmoid"])
def test_what_routers_weigh_by_is_seen_from_what_they_return(name):
    for normalizes, scale in ((True, 1.0), (False, 1.0), (True, 2.5), (False, 2.5)):
        assert _infer_score_function(*router(name, normalizes, scale)) == name
    assert _infer_score_function(*router(name, normalizes=False, chosen=1)) == name


def test_routers_that_return_something_else_are_not_understood():
    logits_NE, weights_NK, expert_ids_NK = router("squares")
    assert _infer_score_function(logits_NE, weights_NK, expert_ids_NK) == ""
    assert _infer_score_function(*router("softmax", chosen=1)) == ""  # all weights are 1
    for out in ((weights_NK, logits_NE), logits_NE, (logits_NE, weights_NK, logits_NE), None):
        assert not _is_router_output(out)
    assert _is_router_output((logits_NE, weights_NK, expert_ids_NK))
    assert not _is_router_output((logits_NE, weights_NK, expert_ids_NK - 9))


def test_the_load_of_a_step_in_numbers():
    counts = [[30, 10, 0, 0], [4, 4]]  # 3 x the mean of its layer; 2 of 6 without a token
    found = summarize_expert_load(RouterSums(50.0, 0.0, counts), num_tokens=20)
    assert found == {"largest": 3.0, "unused": 2 / 6, "aux_loss": 2.5}
    nothing = summarize_expert_load(RouterSums(0.0, 8.0, [[0, 0]]), num_tokens=0)
    assert nothing == {"largest": 0.0, "unused": 1.0, "z_loss": 8.0}
    assert summarize_expert_load(None, 5) is None
