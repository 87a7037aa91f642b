"""Objectives on preferences against arithmetic that is written out."""

import math
from dataclasses import astuple, replace

import pytest
import torch

from hpc_tune.batch import PreferencePairs, padding_batch
from hpc_tune.config.tune import TuneConfig
from hpc_tune.model.objective import (
    AnswerLogProbabilities,
    PreferenceObjective,
    PreferenceSums,
    TokenSum,
    format_metrics,
    log_probabilities,
    make_objective,
    with_zero_rewards,
)

# Two pairs, of 2 + 1 and of 3 + 2 tokens with loss.
COUNTS = [[2, 1], [3, 2]]
LOSSES = [0.5, 1.5, 0.25, 1.0, 2.0, 0.5, 0.75, 1.25]
ANSWERS = [[-2.0, -0.25], [-3.5, -2.0]]
REFERENCE = [[-2.5, -0.5], [-3.0, -2.25]]


def batch_of(counts=COUNTS, desirable=(), kl=0.0):
    pairs = PreferencePairs(
        torch.tensor(counts), torch.tensor(REFERENCE), torch.tensor(desirable, dtype=torch.bool), kl
    )
    return replace(padding_batch(0), pairs=pairs)


def sums_of(objective, batch=None):
    losses_N = torch.tensor(LOSSES, requires_grad=True)
    sums = objective.sums(losses_N, batch or batch_of())
    [grad_N] = torch.autograd.grad(sums[0], losses_N)
    return PreferenceSums(*sums.tolist()), grad_N


def softplus(x):
    return math.log1p(math.exp(x))


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def of_pair(name, pair, beta, gamma=0.0, smoothing=0.0):
    """Return a pair's loss by the papers' formulas."""
    (c, r), (rc, rr), (nc, nr) = ANSWERS[pair], REFERENCE[pair], COUNTS[pair]
    margin = {"dpo": beta * ((c - rc) - (r - rr)), "simpo": beta * (c / nc - r / nr) - gamma}
    if name in margin:
        right, wrong = softplus(-margin[name]), softplus(margin[name])
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    if name == "ipo":
        return ((c - rc) / nc - (r - rr) / nr - 1 / (2 * beta)) ** 2
    p, q = math.exp(c / nc), math.exp(r / nr)
    odds = math.log(p / (1 - p)) - math.log(q / (1 - q))
    return -c / nc + beta * softplus(-odds)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("dpo", {"beta": 0.1}),
        ("dpo", {"beta": 0.5, "smoothing": 0.1}),
        ("ipo", {"beta": 0.1}),
        ("simpo", {"beta": 2.0, "gamma": 1.0}),
        ("simpo", {"beta": 2.0, "gamma": 0.5, "smoothing": 0.2}),
        ("orpo", {"beta": 0.1}),
    ],
)
def test_a_loss_is_the_papers(name, numbers):
    expected = sum(of_pair(name, pair, **numbers) for pair in range(2))
    named = {k: v for k, v in numbers.items() if k != "smoothing"}
    objective = PreferenceObjective(name, label_smoothing=numbers.get("smoothing", 0.0), **named)
    assert sums_of(objective)[0].loss == pytest.approx(expected, rel=1e-6)


def test_the_sft_term_is_the_chosen_answers_mean_loss():
    plain = sums_of(PreferenceObjective("dpo", 0.1))[0].loss
    with_sft = sums_of(PreferenceObjective("dpo", 0.1, sft_weight=0.5))[0].loss
    assert with_sft - plain == pytest.approx(0.5 * (2.0 / 2 + 3.5 / 3), rel=1e-6)


def test_the_gradient_is_a_weight_for_each_answers_tokens():
    """d loss / d log p of an answer, with the sign turned: what its tokens' losses weigh."""
    _, grad_N = sums_of(PreferenceObjective("dpo", 0.1))
    weights = []
    for (c, r), (rc, rr) in zip(ANSWERS, REFERENCE, strict=True):
        w = 0.1 * sigmoid(-0.1 * ((c - rc) - (r - rr)))
        weights.append((w, -w))
    expected = [
        w
        for pair, n in zip(weights, COUNTS, strict=True)
        for w, k in zip(pair, n, strict=True)
        for _ in range(k)
    ]
    assert grad_N.tolist() == pytest.approx(expected, rel=1e-5)


def test_what_is_measured_beside_the_loss():
    sums, _ = sums_of(PreferenceObjective("dpo", 0.1))
    measured = sums.metrics(2)
    assert sums.num_correct == 1  # s: 0.5 over 0.25, and -0.5 under 0.25
    assert measured["accuracy"] == 0.5
    assert measured["margin"] == pytest.approx(0.1 * (0.0 - 0.5) / 2)
    assert measured["chosen_log_prob"] == pytest.approx(-5.5 / 5)
    assert measured["rejected_log_prob"] == pytest.approx(-2.25 / 3)
    assert sums.log_prob_change == pytest.approx(0.5 + 0.25 + 0.5 + 0.25)
    assert sums.reference_magnitude == pytest.approx(2.5 + 0.5 + 3.0 + 2.25)


def test_labeled_answers_are_compared_with_the_mean_divergence():
    """s is 0.5 for the desirable one and -1.25 - -3 = 1.75 for the other."""
    batch = batch_of([[2, 0], [6, 0]], [True, False], kl=0.2)
    objective = PreferenceObjective("kto", 0.1, desirable_weight=2.0)
    losses_N = torch.tensor(LOSSES)
    sums = PreferenceSums(*objective.sums(losses_N, batch).tolist())
    moved = (-2.0 + 2.5, -sum(LOSSES[2:]) + 3.0)
    expected = 2.0 * sigmoid(-0.1 * (moved[0] - 0.2)) + sigmoid(0.1 * (moved[1] - 0.2))
    assert sums.loss == pytest.approx(expected, rel=1e-6)
    assert (sums.num_chosen, sums.num_rejected, sums.num_correct) == (1, 1, 2)
    assert (sums.num_chosen_tokens, sums.num_rejected_tokens) == (2, 6)


def test_of_a_kind_of_answers_that_is_not_there_nothing_is_measured():
    losses_N = torch.tensor(LOSSES)
    for is_good, own in ((True, "chosen"), (False, "rejected")):
        batch = batch_of([[2, 0], [6, 0]], [is_good, is_good])
        sums = PreferenceSums(*PreferenceObjective("kto", 0.1).sums(losses_N, batch).tolist())
        measured = sums.metrics(2)
        assert measured.keys() == {"accuracy", f"{own}_log_prob"}
        assert measured[f"{own}_log_prob"] == pytest.approx(-sum(LOSSES) / 8)


def test_of_equal_rewards_none_is_right():
    losses_N = torch.tensor([0.5] * 8)
    for objective, desirable in (("dpo", ()), ("kto", [True, False])):
        counts = [[2, 2], [2, 2]] if objective == "dpo" else [[4, 0], [4, 0]]
        own = torch.tensor([[-1.0, -1.0]] * 2 if objective == "dpo" else [[-2.0, 0.0]] * 2)
        batch = batch_of(counts, desirable)
        batch = replace(batch, pairs=replace(batch.pairs, reference_log_probs_P2=own))
        sums = PreferenceSums(*PreferenceObjective(objective, 0.1).sums(losses_N, batch).tolist())
        assert sums.num_correct == 0
        assert sums.metrics(2)["accuracy"] == 0


def test_before_anything_is_learned_rewards_are_equal_but_for_rounding():
    sums = PreferenceSums(0.7, 3, 1e-6, 2e-6, -9.0, -8.0, 4, 4, 20, 20, 1e-5, 17.0)
    equal = PreferenceSums(*with_zero_rewards(astuple(sums)))
    kept = {"num_correct": 0, "chosen_reward": 0, "rejected_reward": 0}
    assert equal == replace(sums, **kept)
    assert (equal.metrics(4)["accuracy"], equal.metrics(4)["margin"]) == (0, 0)


def test_accuracy_is_said_in_percent():
    metrics = {"accuracy": 0.75, "margin": 0.25, "chosen_log_prob": -1.5}
    assert format_metrics(metrics) == "accuracy 75.0%, margin 0.25, chosen log prob -1.5"


def test_an_answer_of_certain_tokens_has_finite_odds():
    losses_N = torch.zeros(8, requires_grad=True)
    loss = PreferenceObjective("orpo", 0.1).sums(losses_N, batch_of())[0]
    [grad_N] = torch.autograd.grad(loss, losses_N)
    assert loss.isfinite()
    assert grad_N.isfinite().all()


def test_an_empty_micro_batch_has_sums_and_a_gradient_of_nothing():
    losses_N = torch.zeros(0, requires_grad=True)
    objective = PreferenceObjective("dpo", 0.1)
    sums = objective.sums(losses_N, padding_batch(0))
    assert sums.tolist() == [0.0] * objective.num_sums
    sums[0].backward()
    assert AnswerLogProbabilities().sums(losses_N, padding_batch(0)).numel() == 0


def test_log_probabilities_are_those_of_documents_in_their_order():
    found = log_probabilities(torch.tensor(LOSSES), batch_of().pairs)
    assert found.tolist() == ANSWERS


@pytest.mark.parametrize("num_tokens", [500, 8000, 32000])
def test_the_sum_of_a_long_answer_is_the_nearest_number_to_the_exact_one(num_tokens):
    generator = torch.Generator().manual_seed(0)
    losses_PN = 4 * torch.rand(8, num_tokens, generator=generator)
    batch = batch_of(counts=[[num_tokens, num_tokens]] * 4)
    found = log_probabilities(losses_PN.flatten(), batch.pairs)
    exact = [
        [-math.fsum(losses_N) for losses_N in pair] for pair in losses_PN.view(4, 2, -1).tolist()
    ]
    assert torch.equal(found, torch.tensor(exact, dtype=torch.float32))


def test_the_gradient_of_an_answers_sum_is_in_fp32_and_each_tokens_own():
    losses_N = torch.tensor(LOSSES, requires_grad=True)
    log_probs_P2 = log_probabilities(losses_N, batch_of().pairs)
    [grad_N] = torch.autograd.grad(log_probs_P2, losses_N, torch.tensor([[0.1, 0.2], [0.3, 0.4]]))
    assert grad_N.dtype == torch.float32
    expected = [-0.1, -0.1, -0.2, -0.3, -0.3, -0.3, -0.4, -0.4]
    assert torch.equal(grad_N, torch.tensor(expected))


def test_an_objective_has_its_own_numbers():
    assert isinstance(make_objective(TuneConfig()), TokenSum)
    assert make_objective(TuneConfig(objective="simpo")) == PreferenceObjective("simpo", 2.0, 1.0)
    assert make_objective(TuneConfig(objective="dpo", beta=0.3)) == PreferenceObjective("dpo", 0.3)
    assert TuneConfig(objective="dpo", gamma=1.0).unused_coefficients == {"gamma": 1.0}
