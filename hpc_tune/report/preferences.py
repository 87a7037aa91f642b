"""Figures of training on preferences: what it does to chosen and rejected answers."""

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpc_tune.report.plots import DOTS, STEP, Draw, colored, finished, label_of, points, two_axes
from hpc_tune.report.read import Run


def _two(runs: Sequence[Run], measures: dict[str, str]) -> Figure | None:
    """Draw two measures, each by its name in the metrics and with what its axis says."""
    figure, both = two_axes(STEP)
    for axes, (name, said) in zip(both, measures.items(), strict=True):
        axes.set_ylabel(said)
        for run, color in colored(runs):
            _both(axes, runs, run, name, color)
    return finished(figure, *both)


# The share of pairs that are the right way round, and by how much.
_REWARD = {"accuracy": "accuracy (share)", "margin": "margin (reward)"}
# How likely the answers themselves are: both may fall while the margin grows.
_LOG_PROBS = {"chosen_log_prob": "chosen (nats)", "rejected_log_prob": "rejected (nats)"}


def _both(axes: Axes, runs: Sequence[Run], run: Run, name: str, color: str) -> None:
    """Draw what was measured in training, and on held-out rows."""
    trained = points(run.steps, "step", f"preferences.{name}")
    axes.plot(*trained, color=color, lw=1.3, label=label_of(runs, run, "training"))
    held_out = points(run.evals, "step", f"eval_preferences.{name}")
    marker = "o" if len(run.evals) <= DOTS else None
    axes.plot(*held_out, color=color, lw=1, ls="--", marker=marker, ms=4,
              label=label_of(runs, run, "held-out"))  # fmt: skip


PREFERENCE_PLOTS: tuple[tuple[str, str, Draw], ...] = (
    ("preferences", "Preferences: accuracy and margin", partial(_two, measures=_REWARD)),
    (
        "log-probs",
        "Preferences: log-probability of the answers, per token",
        partial(_two, measures=_LOG_PROBS),
    ),
)
