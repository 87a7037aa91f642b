"""All starts of one run on one axis of time: the loss, and below it what happened when."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpc_tune.report.facts import starts
from hpc_tune.report.plots import (
    COLORS,
    DOTS,
    GREY,
    RED,
    SIZE,
    elapsed,
    finished,
    points,
    some,
    time_unit,
)
from hpc_tune.report.read import Run
from hpc_tune.units import format_seconds

_LETTER = 0.0125  # of the axis, of a label of a start
_TEXT = 8  # points


def timeline(runs: Sequence[Run]) -> Figure | None:
    """Draw the loss of one run over its running time, with starts, saves and actions below."""
    [run, *others] = runs
    if others or not run.segments or len(run.steps) < 2:
        return None
    unit, factor = time_unit(max(elapsed(run, row) for row in run.steps[-1:]))
    figure = Figure(figsize=SIZE, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    rows = [
        {"step": row["step"], "loss": row.get("loss"), "at": elapsed(run, row) / factor}
        for row in run.steps
        if "time" in row
    ]
    above.plot(*points(rows, "at", "loss"), color=COLORS[0], lw=1.3, label="training loss")
    ends = {row["step"]: row["at"] for row in rows}
    evals = [{**row, "at": ends.get(row["step"], 0.0)} for row in run.evals]
    if evals:
        marker = "o" if len(evals) <= DOTS else None
        above.plot(*points(evals, "at", "eval_loss"), color=COLORS[1], lw=1, ls="--",
                   marker=marker, ms=4, label="held-out loss", clip_on=False)  # fmt: skip
    above.set_ylabel("loss (nats per token)")
    waits = " (waits between starts left out)" if len(run.segments) > 1 else ""
    below.set_xlabel(f"{unit} of running{waits}")
    _bands(above, below, run, factor)
    _lanes(below, run, factor)
    return finished(figure, above, below)


def _bands(above: Axes, below: Axes, run: Run, factor: float) -> None:
    """Draw each start as a bar with its ranks and layout, where they have room."""
    all_starts = starts(run)
    whole = (all_starts[-1].before_s + all_starts[-1].seconds) / factor or 1.0
    for start in all_starts:
        begin, width = start.before_s / factor, start.seconds / factor
        color = COLORS[(0, 5)[start.number % 2]]
        below.barh(0, width, left=begin, height=0.8, color=color, alpha=0.45)
        ranks = f"{start.ranks} rank{'s' if start.ranks != 1 else ''}" if start.ranks else ""
        named = f"start {start.number}"
        for text in (", ".join(filter(None, (named, ranks, start.layout))), named,
                     str(start.number)):  # fmt: skip
            if len(text) * _LETTER * whole < width:
                below.text(begin + width / 2, 0, text, ha="center", va="center", fontsize=_TEXT)
                break
        if start.number > 1:
            waited = f"started again after {format_seconds(start.waited_s)}"
            label = waited if len(all_starts) == 2 else "started again"
            above.axvline(begin, color=GREY, lw=1.5, ls=":",
                          label=label if start.number == 2 else None)  # fmt: skip


def _lanes(axes: Axes, run: Run, factor: float) -> None:
    """Mark saves, actions of the governor, warnings and stops, each on its own line."""
    names = ["starts"]
    for kind, name, marker, color in (
        ("checkpoint", "saves", "|", COLORS[2]),
        ("governor", "governor", "v", RED),
        ("warning", "warnings", "x", COLORS[4]),
        ("stop", "stops", "s", COLORS[6]),
    ):
        happened = run.actions if kind == "governor" else run.of_kind(kind)
        places = some([run.elapsed_s(event["time"]) / factor for event in happened])
        if places:
            axes.plot(places, [len(names)] * len(places), ls="", marker=marker, color=color,
                      ms=8 if marker == "|" else 5)  # fmt: skip
            names.append(name)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
