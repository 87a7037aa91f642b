"""Training objectives, as sums over a micro-batch: the losses of its tokens, or of its pairs.

    losses of tokens [N] -> log-probabilities of answers [P, 2] -> losses of pairs [P] -> sums

Shapes: N tokens with loss, P pairs. Sums are fp32 and have no side effects: the engine adds them up
and runs the backward pass. A sum over pairs, divided by the number of pairs of the step, does not
depend on ranks, micro-batches or packing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from hpc_tune.batch import Batch, PreferencePairs
from hpc_tune.config.tune import TuneConfig

ObjectiveName = Literal["dpo", "ipo", "simpo", "orpo", "kto"]
_OBJECTIVES_WITH_REFERENCE = ("dpo", "ipo", "kto")
# Bounds p away from 1 in log(1 - p) of a mean probability p; beyond it the gradient is zero.
_MIN_NEGATIVE_LOG_PROB = 1e-7


SumOverRanks = Callable[[torch.Tensor], torch.Tensor]


def _return_unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


class Objective(Protocol):
    """Turns a micro-batch's token losses into sums that a step adds up; the first is the loss."""

    @property
    def num_sums(self) -> int:
        """How many sums there are."""

    def sums(
        self, losses_N: torch.Tensor, batch: Batch, sum_over_ranks: SumOverRanks = _return_unchanged
    ) -> torch.Tensor:
        """Return the sums of a micro-batch.

        ``sum_over_ranks`` adds up the answers' values over the ranks that share their rows.
        """


class TokenSum:
    """Supervised fine-tuning: the weighted sum of the tokens' cross-entropies."""

    num_sums = 1

    def sums(
        self, losses_N: torch.Tensor, batch: Batch, sum_over_ranks: SumOverRanks = _return_unchanged
    ) -> torch.Tensor:
        """Return one sum, over the tokens of this rank."""
        if batch.weights_N is not None:
            losses_N = losses_N * batch.weights_N
        return losses_N.sum(0, keepdim=True)  # not a view: FSDP2 warns about views


class AnswerLogProbabilities:
    """Not a loss: the summed log-probabilities of the answers, [P * 2]."""

    num_sums = 0

    def sums(
        self, losses_N: torch.Tensor, batch: Batch, sum_over_ranks: SumOverRanks = _return_unchanged
    ) -> torch.Tensor:
        """Return each answer's summed log-probability."""
        if batch.pairs is None:  # an empty micro-batch
            return losses_N
        return sum_over_ranks(log_probabilities(losses_N, batch.pairs)).flatten()


@dataclass(frozen=True)
class PreferenceSums:
    """Statistics of the pairs of a step, summed over all of them.

    ``loss``: the pairs' losses. ``num_correct``: how many pairs have the higher reward on the
    chosen answer, or how many labeled answers have a reward on their side of the mean KL
    divergence. Then rewards and log-probabilities of chosen (desirable) and rejected (undesirable)
    answers, and the numbers of answers and tokens that they are sums over. ``log_prob_change``:
    absolute differences between the answers' log-probabilities and the reference's;
    ``reference_magnitude``: the latter's absolute values.
    """

    loss: float
    num_correct: float
    chosen_reward: float
    rejected_reward: float
    chosen_log_prob: float
    rejected_log_prob: float
    num_chosen: float
    num_rejected: float
    num_chosen_tokens: float
    num_rejected_tokens: float
    log_prob_change: float
    reference_magnitude: float

    def metrics(self, num_pairs: int) -> dict[str, float]:
        """Return the values to report: means over answers, and log-probabilities per token.

        ``margin`` is the mean reward of chosen answers minus that of rejected ones. Labeled answers
        may all be of one kind; then the margin and the other kind's log-probability are left out.
        """
        values = {"accuracy": self.num_correct / max(1, num_pairs)}
        if self.num_chosen and self.num_rejected:
            chosen_mean = self.chosen_reward / self.num_chosen
            values["margin"] = chosen_mean - self.rejected_reward / self.num_rejected
        if self.num_chosen_tokens:
            values["chosen_log_prob"] = self.chosen_log_prob / self.num_chosen_tokens
        if self.num_rejected_tokens:
            values["rejected_log_prob"] = self.rejected_log_prob / self.num_rejected_tokens
        return values


def with_zero_rewards(sums: Sequence[float]) -> Sequence[float]:
    """Set all rewards to zero, as they are for a model that is still its own reference.

    Rounding errors would otherwise put half of the answers on the right side.
    """
    zeros = {"num_correct": 0.0, "chosen_reward": 0.0, "rejected_reward": 0.0}
    return astuple(replace(PreferenceSums(*sums), **zeros))


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Format the reported values as text, with accuracy in percent as everywhere."""
    values = {name: f"{v:.1%}" if name == "accuracy" else f"{v:.4g}" for name, v in metrics.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def compute_metrics(sums: Sequence[float], num_pairs: int) -> dict[str, float]:
    """Return what is reported in addition to the loss, given an objective's sums; often nothing."""
    if len(sums) < len(fields(PreferenceSums)):
        return {}
    return PreferenceSums(*sums).metrics(num_pairs)


@dataclass(frozen=True)
class PreferenceObjective:
    """An objective on pairs, or for kto on labeled answers.

    ``sft_weight`` times the mean negative log-probability of the chosen answer's tokens is added to
    each pair's loss (arXiv:2404.19733, equation 1). ``label_smoothing``: the fraction of pairs
    whose labels are assumed to be swapped (arXiv:2403.00409). ``desirable_weight`` and
    ``undesirable_weight`` are kto's lambdas. ``beta`` and ``gamma``: see ``_pair_losses``.
    """

    name: ObjectiveName
    beta: float
    gamma: float = 0.0
    sft_weight: float = 0.0
    label_smoothing: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    num_sums = len(fields(PreferenceSums))

    def sums(
        self, losses_N: torch.Tensor, batch: Batch, sum_over_ranks: SumOverRanks = _return_unchanged
    ) -> torch.Tensor:
        """Return the values of ``PreferenceSums`` for a micro-batch."""
        pairs = batch.pairs
        if pairs is None:  # an empty micro-batch
            return F.pad(losses_N.sum().unsqueeze(0), (0, self.num_sums - 1))
        log_probs_P2 = sum_over_ranks(log_probabilities(losses_N, pairs))
        if self.name == "kto":
            losses_P = self._kto_losses(
                log_probs_P2[:, 0] - pairs.reference_log_probs_P2[:, 0], pairs
            )
        else:
            losses_P = self._pair_losses(log_probs_P2, pairs)
        return torch.cat(
            [losses_P.sum().unsqueeze(0), self._sum_statistics(log_probs_P2.detach(), pairs)]
        )

    def _pair_losses(self, log_probs_P2: torch.Tensor, pairs: PreferencePairs) -> torch.Tensor:
        """Return each pair's loss.

        With c and r for chosen and rejected, p the answers' log-probabilities, s = p minus the
        reference's log-probabilities, and n the answers' numbers of tokens:

        dpo (arXiv:2305.18290, equation 7): -log sigmoid(beta (s_c - s_r))
        ipo (arXiv:2310.12036, equation 17, with means over tokens as its authors advise):
            (s_c / n_c - s_r / n_r - 1 / (2 beta))^2
        simpo (arXiv:2405.14734, equation 6):
            -log sigmoid(beta (p_c / n_c - p_r / n_r) - gamma)
        orpo (arXiv:2403.07691, equations 6 and 7, with m = p / n):
            -m_c - beta log sigmoid(log odds(m_c) - log odds(m_r))
        """
        num_loss_tokens_P2 = pairs.num_loss_tokens_P2.clamp(min=1)
        means_P2 = log_probs_P2 / num_loss_tokens_P2
        log_ratio_P2 = log_probs_P2 - pairs.reference_log_probs_P2
        sft = self.sft_weight
        if self.name == "dpo":
            losses_P = self._smoothed_losses(self.beta * (log_ratio_P2[:, 0] - log_ratio_P2[:, 1]))
        elif self.name == "ipo":
            per_token_P2 = log_ratio_P2 / num_loss_tokens_P2
            losses_P = (per_token_P2[:, 0] - per_token_P2[:, 1] - 1 / (2 * self.beta)).square()
        elif self.name == "simpo":
            margin_P = self.beta * (means_P2[:, 0] - means_P2[:, 1]) - self.gamma
            losses_P = self._smoothed_losses(margin_P)
        else:
            odds_P2 = means_P2 - torch.log(
                -torch.expm1(means_P2.clamp(max=-_MIN_NEGATIVE_LOG_PROB))
            )
            losses_P = -self.beta * F.logsigmoid(odds_P2[:, 0] - odds_P2[:, 1])
            sft = 1.0
        return losses_P - sft * means_P2[:, 0] if sft else losses_P

    def _smoothed_losses(self, margin_P: torch.Tensor) -> torch.Tensor:
        """Return -log sigmoid of the margins, kept unbiased if some labels are wrong."""
        losses_P, share = -F.logsigmoid(margin_P), self.label_smoothing
        if not share:
            return losses_P
        return ((1 - share) * losses_P + share * F.logsigmoid(-margin_P)) / (1 - 2 * share)

    def _kto_losses(self, log_ratios_P: torch.Tensor, pairs: PreferencePairs) -> torch.Tensor:
        """Return each labeled answer's loss (arXiv:2402.01306, equation 8).

        lambda (1 - sigmoid(beta (s - KL))) for desirable ones, lambda (1 - sigmoid(beta (KL - s)))
        for the others. s are ``log_ratios_P``; KL is the step's, over mismatched answers
        (``PreferencePairs.kl``).
        """
        excess_P = self.beta * (log_ratios_P - pairs.kl)
        return torch.where(
            pairs.is_desirable_P,
            self.desirable_weight * torch.sigmoid(-excess_P),
            self.undesirable_weight * torch.sigmoid(excess_P),
        )

    def _rewards(self, log_probs_P2: torch.Tensor, pairs: PreferencePairs) -> torch.Tensor:
        if self.name in _OBJECTIVES_WITH_REFERENCE:
            return self.beta * (log_probs_P2 - pairs.reference_log_probs_P2)
        return self.beta * log_probs_P2 / pairs.num_loss_tokens_P2.clamp(min=1)

    def _sum_statistics(self, log_probs_P2: torch.Tensor, pairs: PreferencePairs) -> torch.Tensor:
        """Return all sums except the loss."""
        rewards_P2 = self._rewards(log_probs_P2, pairs)
        if self.name == "kto":
            is_chosen_P = pairs.is_desirable_P
            excess_P = rewards_P2[:, 0] - self.beta * pairs.kl
            is_right_P = torch.where(is_chosen_P, excess_P > 0, excess_P < 0)
            # Each answer counts only in the column of its own side.
            side_P2 = torch.stack([is_chosen_P, ~is_chosen_P], 1).float()
            rewards_P2, side_log_probs_P2 = (t[:, :1] * side_P2 for t in (rewards_P2, log_probs_P2))
            tokens_P2 = pairs.num_loss_tokens_P2[:, :1] * side_P2
            log_probs_P2 = log_probs_P2[:, :1]
            reference_log_probs_P2 = pairs.reference_log_probs_P2[:, :1]
        else:
            is_right_P = rewards_P2[:, 0] > rewards_P2[:, 1]
            side_P2, side_log_probs_P2 = torch.ones_like(log_probs_P2), log_probs_P2
            tokens_P2 = pairs.num_loss_tokens_P2
            reference_log_probs_P2 = pairs.reference_log_probs_P2
        return torch.cat(
            [
                is_right_P.sum().float().unsqueeze(0),
                *(t.float().sum(0) for t in (rewards_P2, side_log_probs_P2, side_P2, tokens_P2)),
                (log_probs_P2 - reference_log_probs_P2).abs().sum().unsqueeze(0),
                reference_log_probs_P2.abs().sum().unsqueeze(0),
            ]
        )


def log_probabilities(losses_N: torch.Tensor, pairs: PreferencePairs) -> torch.Tensor:
    """Return the summed log-probabilities of the answers of P pairs, [P, 2].

    ``losses_N``: the tokens' cross-entropies, document after document; if ranks share rows, only
    those of this rank's tokens.
    """
    num_tokens_P2 = (
        pairs.num_loss_tokens_P2
        if pairs.num_local_loss_tokens_P2 is None
        else pairs.num_local_loss_tokens_P2
    )
    counts = num_tokens_P2.flatten()
    # In fp64: values are added one by one, and in fp32 a sum over 8,000 tokens would be off by 1e-6
    # of itself. ``unsafe`` skips the check of lengths, for which the host would have to wait.
    sums = torch.segment_reduce(losses_N.double(), "sum", lengths=counts, unsafe=True)
    return -sums.float().view(-1, 2)


def make_objective(tune: TuneConfig) -> Objective:
    """Return the objective of a run."""
    if tune.objective == "sft":
        return TokenSum()
    return PreferenceObjective(tune.objective, **tune.coefficients)
