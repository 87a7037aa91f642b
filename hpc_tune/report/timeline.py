"""All starts of one run on one axis of time: the loss, and below it what happened when."""

from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hpc_tune.report.plots import (
    COLORS,
    DOTS,
    GREY,
    POINTS,
    RED,
    SIZE,
    curve_points,
    elapsed_s,
    finish_figure,
    loss_label,
    thin_ticks,
    time_unit,
)
from hpc_tune.report.read import Record, Run
from hpc_tune.report.starts import list_starts
from hpc_tune.units import format_seconds

_LETTER = 0.0125  # of the axis, of a label of a start
_TEXT = 8  # points


def draw_timeline(runs: Sequence[Run]) -> Figure | None:
    """Draw the loss of one run over its running time, with starts, saves and actions below."""
    [run, *others] = runs
    if others or not run.segments or len(run.steps) < 2:
        return None
    unit, factor = time_unit(max(elapsed_s(run, row) for row in run.steps[-1:]))
    figure = Figure(figsize=SIZE, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    _draw_losses(above, run, factor)
    above.set_ylabel(loss_label(runs))
    waits = " (waits between starts left out)" if len(run.segments) > 1 else ""
    below.set_xlabel(f"{unit} of running{waits}")
    _draw_bands(above, below, run, factor)
    _draw_lanes(below, run, factor)
    return finish_figure(figure, above, below)


def _draw_losses(axes: Axes, run: Run, factor: float) -> None:
    """Draw the losses: of training a line for each start, since the steps between are lost."""
    by_start: dict[int, list[Record]] = {}
    for row in run.steps:
        if "time" in row:
            by_start.setdefault(run.place_of(row["time"]), []).append(row)
    most = max(2, POINTS // max(1, len(by_start)))
    at: list[float] = []
    losses: list[float] = []
    for rows in by_start.values():
        placed = [{"at": elapsed_s(run, row) / factor, "loss": row.get("loss")} for row in rows]
        own_at, own_losses = curve_points(placed, "at", "loss", most=most)
        at += [*own_at, float("nan")]
        losses += [*own_losses, float("nan")]
    axes.plot(at[:-1], losses[:-1], color=COLORS[0], lw=1.3, label="training loss")
    evals = [{**row, "at": at_s / factor} for row, at_s in _timed_evaluations(run)]
    if evals:
        marker = "o" if len(evals) <= DOTS else None
        axes.plot(*curve_points(evals, "at", "eval_loss"), color=COLORS[1], lw=1, ls="--",
                  marker=marker, ms=4, label="held-out loss", clip_on=False)  # fmt: skip


def _timed_evaluations(run: Run) -> Iterator[tuple[Record, float]]:
    """Yield evaluations and when they were done; in runs of older versions, when their step was."""
    ends = {row["step"]: row["time"] for row in run.steps if "time" in row}
    for row in run.steps[:1]:  # step 0 is evaluated before the first step begins
        ends.setdefault(0, row.get("time", 0.0) - row["step_s"])
    for row in run.evals:
        if at_s := row.get("time") or ends.get(row["step"]):
            yield row, run.elapsed_s(at_s)


def _draw_bands(above: Axes, below: Axes, run: Run, factor: float) -> None:
    """Draw each start as a bar with its ranks and layout, where they have room."""
    all_starts = list_starts(run)
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


def _draw_lanes(axes: Axes, run: Run, factor: float) -> None:
    """Mark saves, actions of the governor, warnings and stops, each on its own line."""
    names = ["starts"]
    for kind, name, marker, color in (
        ("checkpoint", "saves", "|", COLORS[2]),
        ("governor", "governor", "v", RED),
        ("warning", "warnings", "x", COLORS[4]),
        ("stop", "stops", "s", COLORS[6]),
    ):
        happened = run.actions if kind == "governor" else run.events_of_kind(kind)
        places = thin_ticks([at_s / factor for at_s in run.seconds_of(happened)])
        if places:
            axes.plot(places, [len(names)] * len(places), ls="", marker=marker, color=color,
                      ms=8 if marker == "|" else 5)  # fmt: skip
            names.append(name)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
