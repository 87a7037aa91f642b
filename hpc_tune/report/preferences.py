"""Figures of training on preferences: what it does to chosen and rejected answers."""

from collections.abc import Sequence
from functools import partial

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpc_tune.report.plots import (
    DOTS,
    STEP,
    Draw,
    curve_points,
    finish_figure,
    make_label,
    two_axes,
    with_colors,
)
from hpc_tune.report.read import Run


def _draw_two(runs: Sequence[Run], measures: dict[str, str]) -> Figure | None:
    """Draw two measures, each by its name in the metrics and with what its axis says."""
    figure, both = two_axes(STEP)
    for axes, (name, said) in zip(both, measures.items(), strict=True):
        axes.set_ylabel(said)
        for run, color in with_colors(runs):
            _draw_measure(axes, runs, run, name, color)
    return finish_figure(figure, *both)


# The share of pairs that are the right way round, and by how much.
_REWARD = {"accuracy": "accuracy (share)", "margin": "margin (reward)"}
# How likely the answers themselves are: both may fall while the margin grows.
_LOG_PROBS = {"chosen_log_prob": "chosen (nats)", "rejected_log_prob": "rejected (nats)"}


def _draw_measure(axes: Axes, runs: Sequence[Run], run: Run, name: str, color: str) -> None:
    """Draw what was measured in training, and on held-out rows."""
    trained = curve_points(run.steps, "step", f"preferences.{name}")
    axes.plot(*trained, color=color, lw=1.3, label=make_label(runs, run, "training"))
    held_out = curve_points(run.evals, "step", f"eval_preferences.{name}")
    marker = "o" if len(run.evals) <= DOTS else None
    axes.plot(*held_out, color=color, lw=1, ls="--", marker=marker, ms=4,
              label=make_label(runs, run, "held-out"))  # fmt: skip


PREFERENCE_PLOTS: tuple[tuple[str, str, Draw], ...] = (
    ("preferences", "Preferences: accuracy and margin", partial(_draw_two, measures=_REWARD)),
    (
        "log-probs",
        "Preferences: log-probability of the answers, per token",
        partial(_draw_two, measures=_LOG_PROBS),
    ),
)
