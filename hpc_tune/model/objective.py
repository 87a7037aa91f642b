"""What is learned, as a sum over a micro-batch: the losses of its tokens, or of its pairs.

    losses of tokens [N] -> log-probabilities of answers [P, 2] -> losses of pairs [P] -> sums

Shapes: N tokens with loss, P pairs. Sums are fp32, and pure: where a gradient goes, and who adds
them up, is the engine's business. A sum over pairs that is divided by the number of pairs of the
step does not depend on ranks, micro-batches or packing.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from hpc_tune.batch import Batch, PreferencePairs
from hpc_tune.config.tune import TuneConfig

ObjectiveName = Literal["dpo", "ipo", "simpo", "orpo", "kto"]
_WITH_REFERENCE = ("dpo", "ipo", "kto")
# log(1 - p) of a mean probability p: no further from 1 than this, where its gradient ends.
_MIN_ODDS = 1e-7


AddUp = Callable[[torch.Tensor], torch.Tensor]


def _is_whole(x: torch.Tensor) -> torch.Tensor:
    return x


class Objective(Protocol):
    """Makes the losses of a micro-batch's tokens the sums that a step adds up; the first is the
    loss.
    """

    @property
    def num_sums(self) -> int:
        """How many sums there are."""

    def sums(self, losses_N: torch.Tensor, batch: Batch, add_up: AddUp = _is_whole) -> torch.Tensor:
        """Return the sums of a micro-batch.

        ``add_up`` adds what answers have on each of the ranks that share their rows.
        """


class TokenSum:
    """Supervised fine-tuning: the sum of the tokens' cross-entropies, each times its weight."""

    num_sums = 1

    def sums(self, losses_N: torch.Tensor, batch: Batch, add_up: AddUp = _is_whole) -> torch.Tensor:
        """Return one sum, of the tokens of this rank."""
        if batch.weights_N is not None:
            losses_N = losses_N * batch.weights_N
        return losses_N.sum(0, keepdim=True)  # no view: FSDP2 warns of these


class LogProbabilities:
    """No loss: the summed log-probabilities of the answers, [P * 2]."""

    num_sums = 0

    def sums(self, losses_N: torch.Tensor, batch: Batch, add_up: AddUp = _is_whole) -> torch.Tensor:
        """Return each answer's."""
        if batch.pairs is None:  # an empty micro-batch
            return losses_N
        return add_up(log_probabilities(losses_N, batch.pairs)).flatten()


@dataclass(frozen=True)
class PreferenceSums:
    """What is known of the pairs of a step, added up over all of them.

    ``loss``: of pairs. ``right``: pairs whose chosen answer has the higher reward; of labelled
    answers, those whose reward is on their side of the mean KL divergence. Rewards and
    log-probabilities of chosen (desirable) and rejected (undesirable) answers, with how many
    answers and tokens they are sums over. ``moved``: the absolute differences of answers'
    log-probabilities to the reference's, and ``reference``: the absolute values of those.
    """

    loss: float
    right: float
    chosen_reward: float
    rejected_reward: float
    chosen_log_prob: float
    rejected_log_prob: float
    num_chosen: float
    num_rejected: float
    chosen_tokens: float
    rejected_tokens: float
    moved: float
    reference: float

    def measures(self, num_pairs: int) -> dict[str, float]:
        """Return what is reported: means over answers, and log-probabilities per token.

        ``margin`` is the mean reward of chosen answers less that of rejected ones. Labelled answers
        may all be of one kind: of the other there is nothing to report.
        """
        found = {"accuracy": self.right / max(1, num_pairs)}
        if self.num_chosen and self.num_rejected:
            chosen = self.chosen_reward / self.num_chosen
            found["margin"] = chosen - self.rejected_reward / self.num_rejected
        if self.chosen_tokens:
            found["chosen_log_prob"] = self.chosen_log_prob / self.chosen_tokens
        if self.rejected_tokens:
            found["rejected_log_prob"] = self.rejected_log_prob / self.rejected_tokens
        return found


def zero_rewards(sums: Sequence[float]) -> Sequence[float]:
    """Return the sums of a model that still is its own reference: all rewards are zero.

    By their rounding half of the answers would be on the right side.
    """
    none = {"right": 0.0, "chosen_reward": 0.0, "rejected_reward": 0.0}
    return astuple(replace(PreferenceSums(*sums), **none))


def format_measures(measures: Mapping[str, float]) -> str:
    """Return what is reported, in words: accuracy in percent as everywhere."""
    values = {
        name: f"{v:.1%}" if name == "accuracy" else f"{v:.4g}" for name, v in measures.items()
    }
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def compute_measures(sums: Sequence[float], num_pairs: int) -> dict[str, float]:
    """Return what is reported beside the loss of an objective with these sums; often nothing."""
    if len(sums) < len(fields(PreferenceSums)):
        return {}
    return PreferenceSums(*sums).measures(num_pairs)


@dataclass(frozen=True)
class Preference:
    """An objective on pairs, or for kto on labelled answers.

    ``sft_weight`` times the mean negative log-probability of the chosen answer's tokens is added to
    each pair's loss (arXiv:2404.19733, equation 1). ``label_smoothing``: the share of pairs
    that are taken to be the wrong way round (arXiv:2403.00409). ``desirable_weight`` and
    ``undesirable_weight`` are kto's lambdas.
    """

    name: ObjectiveName
    beta: float
    gamma: float = 0.0
    sft_weight: float = 0.0
    label_smoothing: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    num_sums = len(fields(PreferenceSums))

    def sums(self, losses_N: torch.Tensor, batch: Batch, add_up: AddUp = _is_whole) -> torch.Tensor:
        """Return the values of ``PreferenceSums`` of a micro-batch."""
        pairs = batch.pairs
        if pairs is None:  # an empty micro-batch
            return F.pad(losses_N.sum().unsqueeze(0), (0, self.num_sums - 1))
        log_probs_P2 = add_up(log_probabilities(losses_N, pairs))
        if self.name == "kto":
            losses_P = self._kto_losses(log_probs_P2[:, 0] - pairs.reference_P2[:, 0], pairs)
        else:
            losses_P = self._pair_losses(log_probs_P2, pairs)
        return torch.cat(
            [losses_P.sum().unsqueeze(0), self._measured_sums(log_probs_P2.detach(), pairs)]
        )

    def _pair_losses(self, log_probs_P2: torch.Tensor, pairs: PreferencePairs) -> torch.Tensor:
        """Return each pair's loss.

        With c and r for chosen and rejected, p the answers' log-probabilities, s those less the
        reference's, and n the answers' tokens:

        dpo (arXiv:2305.18290, equation 7): -log sigmoid(beta (s_c - s_r))
        ipo (arXiv:2310.12036, equation 17, of means over tokens as its authors advise):
            (s_c / n_c - s_r / n_r - 1 / (2 beta))^2
        simpo (arXiv:2405.14734, equation 6):
            -log sigmoid(beta (p_c / n_c - p_r / n_r) - gamma)
        orpo (arXiv:2403.07691, equations 6 and 7, with m = p / n):
            -m_c - beta log sigmoid(log odds(m_c) - log odds(m_r))
        """
        counts_P2 = pairs.counts_P2.clamp(min=1)
        means_P2 = log_probs_P2 / counts_P2
        moved_P2 = log_probs_P2 - pairs.reference_P2
        sft = self.sft_weight
        if self.name == "dpo":
            losses_P = self._smoothed_losses(self.beta * (moved_P2[:, 0] - moved_P2[:, 1]))
        elif self.name == "ipo":
            per_token_P2 = moved_P2 / counts_P2
            losses_P = (per_token_P2[:, 0] - per_token_P2[:, 1] - 1 / (2 * self.beta)).square()
        elif self.name == "simpo":
            margin_P = self.beta * (means_P2[:, 0] - means_P2[:, 1]) - self.gamma
            losses_P = self._smoothed_losses(margin_P)
        else:
            odds_P2 = means_P2 - torch.log(-torch.expm1(means_P2.clamp(max=-_MIN_ODDS)))
            losses_P = -self.beta * F.logsigmoid(odds_P2[:, 0] - odds_P2[:, 1])
            sft = 1.0
        return losses_P - sft * means_P2[:, 0] if sft else losses_P

    def _smoothed_losses(self, margin_P: torch.Tensor) -> torch.Tensor:
        """Return -log sigmoid of the margins, unbiased where some labels are wrong."""
        losses_P, share = -F.logsigmoid(margin_P), self.label_smoothing
        if not share:
            return losses_P
        return ((1 - share) * losses_P + share * F.logsigmoid(-margin_P)) / (1 - 2 * share)

    def _kto_losses(self, moved_P: torch.Tensor, pairs: PreferencePairs) -> torch.Tensor:
        """Return each labelled answer's loss (arXiv:2402.01306, equation 8).

        lambda (1 - sigmoid(beta (s - KL))) of desirable ones, lambda (1 - sigmoid(beta (KL - s)))
        of the others; KL is the step's, over mismatched answers (``PreferencePairs.kl``).
        """
        above_P = self.beta * (moved_P - pairs.kl)
        return torch.where(
            pairs.desirable_P,
            self.desirable_weight * torch.sigmoid(-above_P),
            self.undesirable_weight * torch.sigmoid(above_P),
        )

    def _rewards(self, log_probs_P2: torch.Tensor, pairs: PreferencePairs) -> torch.Tensor:
        if self.name in _WITH_REFERENCE:
            return self.beta * (log_probs_P2 - pairs.reference_P2)
        return self.beta * log_probs_P2 / pairs.counts_P2.clamp(min=1)

    def _measured_sums(self, log_probs_P2: torch.Tensor, pairs: PreferencePairs) -> torch.Tensor:
        """Return all sums but the loss."""
        rewards_P2 = self._rewards(log_probs_P2, pairs)
        if self.name == "kto":
            is_chosen_P = pairs.desirable_P
            above_P = rewards_P2[:, 0] - self.beta * pairs.kl
            is_right_P = torch.where(is_chosen_P, above_P > 0, above_P < 0)
            # Of each answer, what it adds on its side.
            side_P2 = torch.stack([is_chosen_P, ~is_chosen_P], 1).float()
            answers = (t[:, :1] * side_P2 for t in (rewards_P2, log_probs_P2))
            rewards_P2, own_P2 = answers
            tokens_P2, moved_P2 = pairs.counts_P2[:, :1] * side_P2, log_probs_P2[:, :1]
            reference_P2 = pairs.reference_P2[:, :1]
        else:
            is_right_P = rewards_P2[:, 0] > rewards_P2[:, 1]
            side_P2, own_P2 = torch.ones_like(log_probs_P2), log_probs_P2
            tokens_P2, moved_P2, reference_P2 = pairs.counts_P2, log_probs_P2, pairs.reference_P2
        return torch.cat(
            [
                is_right_P.sum().float().unsqueeze(0),
                *(t.float().sum(0) for t in (rewards_P2, own_P2, side_P2, tokens_P2)),
                (moved_P2 - reference_P2).abs().sum().unsqueeze(0),
                reference_P2.abs().sum().unsqueeze(0),
            ]
        )


def log_probabilities(losses_N: torch.Tensor, pairs: PreferencePairs) -> torch.Tensor:
    """Return the summed log-probabilities of the answers of P pairs, [P, 2].

    ``losses_N``: the tokens' cross-entropies, document after document. Where ranks share rows, of
    the tokens that this rank has.
    """
    own_P2 = pairs.counts_P2 if pairs.own_counts_P2 is None else pairs.own_counts_P2
    counts = own_P2.flatten()
    # In fp64: it adds one by one, and fp32 would be off by 1e-6 of a sum of 8,000 tokens. Without a
    # check of the lengths, for which the host would wait.
    sums = torch.segment_reduce(losses_N.double(), "sum", lengths=counts, unsafe=True)
    return -sums.float().view(-1, 2)


def make_objective(tune: TuneConfig) -> Objective:
    """Return what a run learns."""
    if tune.objective == "sft":
        return TokenSum()
    return Preference(tune.objective, **tune.numbers)
