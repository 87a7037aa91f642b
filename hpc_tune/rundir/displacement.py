"""Whether training on preferences makes the chosen answers less likely, evaluation by evaluation.

The margin grows as well where both answers become less likely and the rejected one more so
(eric-mitchell/direct-preference-optimization#32): the model then writes something else.
"""

import math
from collections.abc import Sequence

MIN_FALLS = 3
Streak = tuple[float, ...]


def extend_streak(streak: Streak, log_prob: float) -> Streak:
    """Return the newest evaluations, each with a lower log-probability than the one before."""
    if not math.isfinite(log_prob):
        return ()
    return (*streak, log_prob) if streak and log_prob < streak[-1] else (log_prob,)


def displacement_warning(streak: Streak) -> str | None:
    """Return what to say of evaluations that fall; nothing of fewer than ``MIN_FALLS``."""
    falls = len(streak) - 1
    if falls < MIN_FALLS:
        return None
    return (
        f"the held-out chosen answers became less likely in {falls} evaluations in a row, from "
        f"{streak[0]:.3f} to {streak[-1]:.3f} per token: the model unlearns them, too. A lower "
        "optim.lr, a higher tune.beta, or with dpo, ipo and simpo tune.sft_weight=1 counteracts "
        "it"
    )


def longest_streak(log_probs: Sequence[float]) -> Streak:
    """Return the longest streak of all evaluations of a run, the newest of equal ones."""
    best: Streak = ()
    streak: Streak = ()
    for log_prob in log_probs:
        streak = extend_streak(streak, log_prob)
        best = streak if len(streak) >= len(best) else best
    return best
