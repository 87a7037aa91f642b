"""Figures of training on preferences: what it does to chosen and rejected answers."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpc_tune.report.plots import DOTS, STEP, Draw, colored, finished, label_of, points, two_axes
from hpc_tune.report.read import Run


def _reward(runs: Sequence[Run]) -> Figure | None:
    """Draw the share of pairs that are the right way round, and by how much."""
    figure, (above, below) = two_axes(STEP)
    above.set_ylabel("accuracy (share)")
    below.set_ylabel("margin (reward)")
    for run, color in colored(runs):
        for axes, name in ((above, "accuracy"), (below, "margin")):
            _both(axes, runs, run, name, color)
    return finished(figure, above, below)


def _log_probs(runs: Sequence[Run]) -> Figure | None:
    """Draw how likely the answers themselves are: both may fall while the margin grows."""
    figure, (above, below) = two_axes(STEP)
    above.set_ylabel("chosen (nats)")
    below.set_ylabel("rejected (nats)")
    for run, color in colored(runs):
        for axes, name in ((above, "chosen_log_prob"), (below, "rejected_log_prob")):
            _both(axes, runs, run, name, color)
    return finished(figure, above, below)


def _both(axes: Axes, runs: Sequence[Run], run: Run, name: str, color: str) -> None:
    """Draw what was measured in training, and on held-out rows."""
    trained = points(run.steps, "step", f"preferences.{name}")
    axes.plot(*trained, color=color, lw=1.3, label=label_of(runs, run, "training"))
    held_out = points(run.evals, "step", f"eval_preferences.{name}")
    marker = "o" if len(run.evals) <= DOTS else None
    axes.plot(*held_out, color=color, lw=1, ls="--", marker=marker, ms=4,
              label=label_of(runs, run, "held-out"))  # fmt: skip


PREFERENCE_PLOTS: tuple[tuple[str, str, Draw], ...] = (
    ("preferences", "Preferences: accuracy and margin", _reward),
    ("log-probs", "Preferences: log-probability of the answers, per token", _log_probs),
)
