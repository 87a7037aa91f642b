"""Runs -> figures. Each function takes the runs and returns a figure, or None where no run has it.

What is long is averaged to a few hundred points: a report of a million steps stays small.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from hpc_tune.report.read import Record, Run
from hpc_tune.units import format_count

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
GREY, RED = "#777777", "#b00020"
POINTS, _MARKS = 300, 120
DOTS = 40  # more of them on a line are no help
STEP = "optimizer step"
SIZE = (7.2, 3.6)  # inches
_LEGEND_SIZE = 8.5  # points
Points = tuple[list[float], list[float]]
Draw = Callable[[Sequence[Run]], Figure | None]


def loss_label(runs: Sequence[Run]) -> str:
    """Return what an axis of losses says: those of preferences are no nats."""
    has_pairs = any(run.settings.get("tune.objective", "sft") != "sft" for run in runs)
    return "loss" if has_pairs else "loss (nats per token)"


def _loss(runs: Sequence[Run]) -> Figure | None:
    figure, axes = _new_figure(STEP, loss_label(runs))
    for run, color in with_colors(runs):
        steps, losses = curve_points(run.steps, "step", "loss")
        axes.plot(steps, losses, color=color, lw=1.3, label=make_label(runs, run, "training"))
        if run.evals:
            evals = curve_points(run.evals, "step", "eval_loss")
            held_out = make_label(runs, run, "held-out")
            marker = "o" if len(run.evals) <= DOTS else None
            axes.plot(*evals, color=color, lw=1, ls="--", marker=marker, ms=4, label=held_out)
    return finish_figure(figure, axes)


def _held_out(runs: Sequence[Run]) -> Figure | None:
    """Draw each held-out source's own loss: their mean may fall while one of them rises."""
    figure, axes = _new_figure(STEP, loss_label(runs))
    lines = [
        (run, name, [(row["step"], own[name]) for row in run.evals
                     if name in (own := row.get("eval_losses", {}))])
        for run, _ in with_colors(runs)
        for name in dict.fromkeys(n for row in run.evals for n in row.get("eval_losses", {}))
    ]  # fmt: skip
    if len({name for _, name, _ in lines}) < 2:
        return None
    for number, (run, name, losses) in enumerate(lines):
        rows = [{"step": step, "loss": loss} for step, loss in losses]
        marker = "o" if len(rows) <= DOTS else None
        axes.plot(*curve_points(rows, "step", "loss"), color=COLORS[number % len(COLORS)], lw=1.2,
                  ls=("-", "--", ":", "-.")[number // len(COLORS) % 4], marker=marker, ms=4,
                  label=make_label(runs, run, shorten(name)))  # fmt: skip
    return finish_figure(figure, axes)


def _rate(runs: Sequence[Run]) -> Figure | None:
    figure, (above, below) = two_axes(STEP)
    above.set_ylabel("learning rate")
    below.set_ylabel("gradient norm")
    for run, color in with_colors(runs):
        above.plot(
            *curve_points(run.steps, "step", "lr"), color=color, label=make_label(runs, run, "")
        )
        below.plot(*curve_points(run.steps, "step", "grad_norm"), color=color, lw=1)
    above.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    return finish_figure(figure, above, below)


def _speed(runs: Sequence[Run]) -> Figure | None:
    has_mfu = any(row.get("mfu") for run in runs for row in run.steps)
    if has_mfu:
        figure, (above, below) = two_axes(STEP)
        below.set_ylabel("MFU (% of peak)")
    else:
        figure, above = _new_figure(STEP, "")
        below = above
    above.set_ylabel("tokens per second")
    above.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    for run, color in with_colors(runs):
        label = make_label(runs, run, "")
        above.plot(
            *curve_points(run.steps, "step", "tokens_per_s"), color=color, lw=1.2, label=label
        )
        if has_mfu:
            shares = curve_points(run.steps, "step", "mfu", lambda share: 100 * share)
            below.plot(*shares, color=color, lw=1.2)
    for axes in {above, below}:
        _begin_at_zero(axes)
    return finish_figure(figure, above, *([below] if has_mfu else []))


def _step_parts(runs: Sequence[Run]) -> Figure | None:
    """Stack what a step's time went into; of several runs the means side by side."""
    names = ("compute", "messages", "data", "waiting for saves")
    if len(runs) == 1:
        figure, axes = _new_figure(STEP, "seconds per step")
        rows = _bin_means(_shares(runs[0]))
        if len(rows) < 2:
            return None
        steps = [row["step"] for row in rows]
        axes.stackplot(
            steps, [[row[n] for row in rows] for n in names], labels=names, colors=COLORS, alpha=0.8
        )
        axes.set_xlim(steps[0], steps[-1])
        axes.set_ylim(0, _axis_top([sum(row[name] for name in names) for row in rows]))
        return finish_figure(figure, axes)
    figure, axes = _new_figure("mean seconds per step", "")
    means = [_mean(_shares(run)) for run in runs if run.steps]
    if not means:
        return None
    left = [0.0] * len(means)
    for name, color in zip(names, COLORS, strict=False):
        values = [mean[name] for mean in means]
        axes.barh(range(len(means)), values, left=left, color=color, label=name, alpha=0.8)
        left = [a + b for a, b in zip(left, values, strict=True)]
    labels = [shorten(run.name) for run in runs if run.steps]
    axes.set_yticks(range(len(means)), labels)
    axes.invert_yaxis()
    return finish_figure(figure, axes)


def _memory(runs: Sequence[Run]) -> Figure | None:
    """Draw host and device memory over time, limits dashed, saves and the governor marked."""
    kinds = [
        (f"{kind} memory ({whose})", f"{kind}_bytes", f"{kind}_limit_bytes")
        for kind, whose in (("host", "fullest node"), ("device", "fullest rank"))
        if any(row.get(f"{kind}_bytes") for run in runs for row in run.steps)
    ]
    if not kinds:
        return None
    unit, factor = time_unit(max(elapsed_s(run, run.steps[-1]) for run in runs if run.steps))
    again = any(len(run.segments) > 1 for run in runs)
    time_label = f"{unit} since the start" + (", waits between starts left out" if again else "")
    all_axes: Sequence[Axes]
    figure, all_axes = two_axes(time_label)
    if len(kinds) == 1:
        figure, only = _new_figure(time_label, "")
        all_axes = (only,)
    for axes, (label, used, limit) in zip(all_axes, kinds, strict=True):
        axes.set_ylabel(f"{label}, GiB" if len(kinds) == 1 else f"{label.split()[0]}, GiB")
        for run, color in with_colors(runs):
            rows = _keep_worst(run.steps, used)
            at = [elapsed_s(run, row) / factor for row in rows]
            axes.plot(at, [row[used] / 2**30 for row in rows], color=color, lw=1.4,
                      label=make_label(runs, run, "used"))  # fmt: skip
            if len(runs) == 1 and used == "host_bytes" and "host_ranks_bytes" in rows[-1]:
                own = [row.get("host_ranks_bytes", float("nan")) / 2**30 for row in rows]
                axes.plot(at, own, color=COLORS[5], lw=1.4, label="of which this run's ranks")
            limits = [(a, row[limit] / 2**30) for a, row in zip(at, rows, strict=True)
                      if row.get(limit)]  # fmt: skip
            axes.plot(*zip(*limits, strict=True) if limits else ([], []), color=color, ls=":",
                      lw=1.4, label=make_label(runs, run, "limit"))  # fmt: skip
        if len(runs) == 1:
            _mark_events(axes, runs[0], factor)
        _begin_at_zero(axes)
    return finish_figure(figure, *all_axes)


def _mark_events(axes: Axes, run: Run, factor: float) -> None:
    """Mark saves, the governor's actions, and starts after the first on a time axis."""
    # Saves can be many: a tick each at the bottom.
    for kind, color, height, label in (
        ("governor", RED, 1.0, "governor acts"),
        ("checkpoint", COLORS[2], 0.07, "save"),
    ):
        happened = run.actions if kind == "governor" else run.events_of_kind(kind)
        places = thin_ticks([at_s / factor for at_s in run.seconds_of(happened)])
        if places:  # one line with gaps: as many lines would be half of the page
            at = [x for place in places for x in (place, place, place)]
            heights = [0.0, height, float("nan")] * len(places)
            axes.plot(at, heights, color=color, lw=1.2, alpha=0.7, label=label,
                      transform=axes.get_xaxis_transform())  # fmt: skip
    for number, segment in enumerate(run.segments[1:]):
        again = "started again" if number == 0 else None
        axes.axvline(segment.before_s / factor, color=GREY, lw=2.5, alpha=0.5, label=again)


def _ranks(runs: Sequence[Run]) -> Figure | None:
    figure, axes = _new_figure(STEP, "seconds of a rank's own work")
    shown = [(run, color) for run, color in with_colors(runs) if (run.start.get("size") or 1) > 1]
    for run, color in shown:
        rows = [row for row in run.steps if row.get("most_work_s") is not None]
        steps, most = curve_points(rows, "step", "most_work_s")
        _, least = curve_points(rows, "step", "least_work_s")
        axes.fill_between(steps, least, most, color=color, alpha=0.3)
        axes.plot(steps, most, color=color, lw=1.2, label=make_label(runs, run, "slowest rank"))
        axes.plot(steps, least, color=color, lw=0.8, ls="--",
                  label=make_label(runs, run, "fastest rank"))  # fmt: skip
    _begin_at_zero(axes)
    return finish_figure(figure, axes)


def _predictions(runs: Sequence[Run]) -> Figure | None:
    """Draw each phase's predicted and measured memory of the fullest rank."""
    memory = [event for run in runs[:1] for event in run.events_of_kind("memory")]
    phases = memory[-1].get("phases", {}) if memory else {}
    phases = {name: row for name, row in phases.items() if row.get("rank_bytes")}
    if len(runs) > 1 or not phases:
        return None
    figure, axes = _new_figure("GiB on the fullest rank", "")
    has_plan = any(row.get("planned") for row in phases.values())
    rows = range(len(phases))
    measured = [row["rank_bytes"] / 2**30 for row in phases.values()]
    axes.barh([r + 0.2 for r in rows] if has_plan else rows, measured, height=0.38,
              color=COLORS[0], label="measured")  # fmt: skip
    if has_plan:
        planned = [(row.get("planned") or 0) / 2**30 for row in phases.values()]
        axes.barh([r - 0.2 for r in rows], planned, height=0.38, color=COLORS[4], label="predicted")
    axes.set_yticks(rows, list(phases))
    axes.invert_yaxis()
    return finish_figure(figure, axes)


PLOTS: tuple[tuple[str, str, Draw], ...] = (
    ("loss", "Loss", _loss),
    ("held-out", "Held-out loss of each source", _held_out),
    ("memory", "Memory against its limits", _memory),
    ("step-time", "Where a step's time went, on rank 0", _step_parts),
    ("speed", "Speed", _speed),
    ("rate", "Learning rate and gradient norm", _rate),
    ("ranks", "The ranks' own work: slowest and fastest", _ranks),
    ("foreseen", "Memory by phase", _predictions),
)


def _shares(run: Run) -> list[dict[str, float]]:
    """Return what each step's time went into, and how long training waited for its save."""
    saves = run.events_of_kind("checkpoint")
    blocked_s = {event.get("step"): event.get("blocked_s") or 0.0 for event in saves}
    shares = []
    for row in run.steps:
        step_s, data_s, comm_s = (row.get(key) or 0.0 for key in ("step_s", "data_s", "comm_s"))
        shares.append(
            {
                "step": float(row["step"]),
                "compute": max(0.0, step_s - data_s - comm_s),
                "messages": comm_s,
                "data": data_s,
                "waiting for saves": blocked_s.get(row["step"], 0.0),
            }
        )
    return shares


def _mean(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def _bin_means(rows: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Return a few hundred rows, each the mean of its neighbours, so that no save is left out."""
    width = max(1, -(-len(rows) // POINTS))
    return [_mean(rows[i : i + width]) for i in range(0, len(rows), width)]


def _keep_worst(rows: Sequence[Record], key: str) -> list[Record]:
    """Return a few hundred rows, each the one of the largest value of those around it."""
    known = [row for row in rows if row.get(key) is not None and row.get("time") is not None]
    width = max(1, len(known) // POINTS)
    return [
        max(known[i : i + width], key=lambda row: row[key]) for i in range(0, len(known), width)
    ]


def curve_points(
    rows: Sequence[Record],
    x: str,
    y: str,
    scale: Callable[[float], float] = float,
    most: int = POINTS,
) -> Points:
    """Return x and y of the rows that have y, as means over neighbours where there are many."""
    known = [(float(row[x]), scale(row[y])) for row in rows if row.get(y) is not None]
    width = max(1, -(-len(known) // most))
    groups = [known[i : i + width] for i in range(0, len(known), width)]
    return (
        [sum(a for a, _ in group) / len(group) for group in groups],
        [sum(b for _, b in group) / len(group) for group in groups],
    )


def thin_ticks(places: Sequence[float]) -> list[float]:
    """Return marks of an axis, thinned out where they could not be told apart."""
    return list(places[:: -(-len(places) // _MARKS) or 1])


def time_unit(longest_s: float) -> tuple[str, int]:
    """Return the unit of an axis of time, and its seconds."""
    units = (("hours", 3600, 7200), ("minutes", 60, 180), ("seconds", 1, 0))
    return next((unit, seconds) for unit, seconds, least in units if longest_s >= least)


def _begin_at_zero(axes: Axes) -> None:
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def _axis_top(values: Sequence[float]) -> float:
    """Return where an axis of seconds ends: a first step that compiles must not hide the rest."""
    usual = sorted(values)[int(0.95 * (len(values) - 1))]
    return min(max(values), 2.5 * usual) * 1.05 or 1.0


def elapsed_s(run: Run, row: Record) -> float:
    """Return the seconds that a run had been running when a row was written."""
    return run.elapsed_s(row["time"]) if row.get("time") else 0.0


def with_colors(runs: Sequence[Run]) -> Iterator[tuple[Run, str]]:
    """Yield the runs that have something to draw; a run has one color in all figures."""
    numbered = ((run, COLORS[n % len(COLORS)]) for n, run in enumerate(runs))
    return ((run, color) for run, color in numbered if run.steps or run.evals)


def make_label(runs: Sequence[Run], run: Run, what: str) -> str:
    """Return what a line is called: of which run it is, if there are several, and what it shows."""
    if len(runs) == 1:
        return what
    return f"{shorten(run.name)}: {what}" if what else shorten(run.name)


def shorten(name: str) -> str:
    """Return a name with its middle cut out where it is long."""
    return name if len(name) <= 24 else f"{name[:11]}…{name[-11:]}"


def _new_figure(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def two_axes(x_label: str) -> tuple[Figure, tuple[Axes, Axes]]:
    """Return a figure of two plots above each other."""
    figure = Figure(figsize=SIZE, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    below.set_xlabel(x_label)
    return figure, (above, below)


def finish_figure(figure: Figure, *all_axes: Any) -> Figure | None:
    """Give the axes what all have; None where nothing was drawn."""
    if not any(_has_data(axes) for axes in all_axes):
        return None
    for axes in all_axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if all_axes[-1].get_xlabel() == STEP:
            axes.xaxis.set_major_locator(integer_ticks())
        for line in axes.lines:
            if len(line.get_xdata()) == 1 and line.get_marker() == "None":  # type: ignore[arg-type]
                line.set_marker("o" if line.get_linestyle() == "-" else "x")
    handles, labels = all_axes[0].get_legend_handles_labels()
    if any(labels) and len(labels) > 1:
        # A letter is a little over half as wide as high; the line before it takes four.
        column = _LEGEND_SIZE * (0.6 * max(map(len, labels)) + 4) / 72
        figure.legend(
            handles, labels, loc="outside upper center", frameon=False, fontsize=_LEGEND_SIZE,
            ncols=max(1, min(4, len(labels), int(SIZE[0] / column))),
        )  # fmt: skip
    return figure


def integer_ticks() -> MaxNLocator:
    """Return where an axis of steps or ranks has its ticks, also if there is only one."""
    return MaxNLocator(integer=True, nbins=8, min_n_ticks=1)


def _has_data(axes: Axes) -> bool:
    drawn = any(len(line.get_xdata()) for line in axes.lines)  # type: ignore[arg-type]
    return drawn or bool(axes.patches or axes.collections)
