"""Draw figures of runs. Each function takes runs and returns a figure, or None without data.

Long curves are averaged to a few hundred points, so that a report of a million steps stays small.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from hpc_tune.report.facts import list_starts
from hpc_tune.report.read import Record, Run
from hpc_tune.rundir.facts import divide_by_median
from hpc_tune.units import format_count, format_quantity, format_seconds

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
GRAY, RED = "#777777", "#b00020"
MAX_CURVE_POINTS, MAX_POINTS_WITH_MARKERS = 300, 40  # of a curve, and of one that shows its dots
_MAX_MARKS_PER_AXIS, _LEGEND_FONT_SIZE = 120, 8.5  # closer marks could not be distinguished; points
STEP_AXIS_LABEL, FIGURE_SIZE_INCHES = "optimizer step", (7.2, 3.6)
Points = tuple[list[float], list[float]]
DrawFigure = Callable[[Sequence[Run]], Figure | None]


def _loss_label(runs: Sequence[Run]) -> str:
    # Losses of preference objectives are not in nats.
    has_pairs = any(run.settings.get("tune.objective", "sft") != "sft" for run in runs)
    return "loss" if has_pairs else "loss (nats per token)"


def _plot_loss(runs: Sequence[Run]) -> Figure | None:
    figure, axes = _new_figure(STEP_AXIS_LABEL, _loss_label(runs))
    for run, color in _color_runs(runs):
        steps, losses = curve_points(run.steps, "step", "loss")
        axes.plot(steps, losses, color=color, lw=1.3, label=_make_label(runs, run, "training"))
        if run.evals:
            label = _make_label(runs, run, "held-out")
            _plot_held_out_curve(axes, run.evals, "step", "eval_loss", color=color, label=label)
    return _finish_figure(figure, axes)


def _plot_held_out_curve(
    axes: Axes, evals: Sequence[Record], x: str, y: str, **options: Any
) -> None:
    marker = "o" if len(evals) <= MAX_POINTS_WITH_MARKERS else None
    axes.plot(*curve_points(evals, x, y), **{"lw": 1, "ls": "--", **options}, marker=marker, ms=4)


def _plot_held_out_sources(runs: Sequence[Run]) -> Figure | None:
    """Draw the loss of each held-out source: the mean may fall while one of them rises."""
    figure, axes = _new_figure(STEP_AXIS_LABEL, _loss_label(runs))
    lines = [
        (run, name, [{"step": row["step"], "loss": losses[name]} for row in run.evals
                     if name in (losses := row.get("eval_losses", {}))])
        for run, _ in _color_runs(runs)
        for name in dict.fromkeys(n for row in run.evals for n in row.get("eval_losses", {}))
    ]  # fmt: skip
    if len({name for _, name, _ in lines}) < 2:
        return None
    for number, (run, name, rows) in enumerate(lines):
        options = {"color": COLORS[number % len(COLORS)], "lw": 1.2}
        options |= {"ls": ("-", "--", ":", "-.")[number // len(COLORS) % 4]}
        label = _make_label(runs, run, _shorten(name))
        _plot_held_out_curve(axes, rows, "step", "loss", **options, label=label)
    return _finish_figure(figure, axes)


def _plot_learning_rate(runs: Sequence[Run]) -> Figure | None:
    figure, (ax1, ax2) = _two_axes(STEP_AXIS_LABEL)
    ax1.set_ylabel("learning rate")
    ax2.set_ylabel("gradient norm")
    for run, color in _color_runs(runs):
        ax1.plot(
            *curve_points(run.steps, "step", "lr"), color=color, label=_make_label(runs, run, "")
        )
        ax2.plot(*curve_points(run.steps, "step", "grad_norm"), color=color, lw=1)
    ax1.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    return _finish_figure(figure, ax1, ax2)


def _plot_speed(runs: Sequence[Run]) -> Figure | None:
    has_mfu = any(row.get("mfu") for run in runs for row in run.steps)
    if has_mfu:
        figure, (ax1, ax2) = _two_axes(STEP_AXIS_LABEL)
        ax2.set_ylabel("MFU (% of peak)")
    else:
        figure, ax1 = _new_figure(STEP_AXIS_LABEL, "")
        ax2 = ax1
    ax1.set_ylabel("tokens per second")
    ax1.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
    for run, color in _color_runs(runs):
        label = _make_label(runs, run, "")
        ax1.plot(*curve_points(run.steps, "step", "tokens_per_s"), color=color, lw=1.2, label=label)
        if has_mfu:
            shares = curve_points(run.steps, "step", "mfu", lambda share: 100 * share)
            ax2.plot(*shares, color=color, lw=1.2)
    for axes in {ax1, ax2}:
        _begin_at_zero(axes)
    return _finish_figure(figure, ax1, *([ax2] if has_mfu else []))


def _plot_step_time(runs: Sequence[Run]) -> Figure | None:
    """Draw the parts of the step time as a stack; for several runs, their means side by side."""
    names = ("compute", "messages", "data", "waiting for saves")
    if len(runs) == 1:
        figure, axes = _new_figure(STEP_AXIS_LABEL, "seconds per step")
        rows = _bin_means(_step_time_parts(runs[0]))
        if len(rows) < 2:
            return None
        steps = [row["step"] for row in rows]
        axes.stackplot(
            steps, [[row[n] for row in rows] for n in names], labels=names, colors=COLORS, alpha=0.8
        )
        axes.set_xlim(steps[0], steps[-1])
        axes.set_ylim(0, _axis_top([sum(row[name] for name in names) for row in rows]))
        return _finish_figure(figure, axes)
    figure, axes = _new_figure("mean seconds per step", "")
    means = [_mean_row(_step_time_parts(run)) for run in runs if run.steps]
    if not means:
        return None
    offsets = [0.0] * len(means)
    for name, color in zip(names, COLORS, strict=False):
        values = [mean[name] for mean in means]
        axes.barh(range(len(means)), values, left=offsets, color=color, label=name, alpha=0.8)
        offsets = [a + b for a, b in zip(offsets, values, strict=True)]
    labels = [_shorten(run.name) for run in runs if run.steps]
    axes.set_yticks(range(len(means)), labels)
    axes.invert_yaxis()
    return _finish_figure(figure, axes)


def _plot_memory(runs: Sequence[Run]) -> Figure | None:
    """Draw host and device memory over time with limits; mark saves and the governor's actions."""
    kinds = [
        (f"{kind} memory ({owner})", f"{kind}_bytes", f"{kind}_limit_bytes")
        for kind, owner in (("host", "fullest node"), ("device", "fullest rank"))
        if any(row.get(f"{kind}_bytes") for run in runs for row in run.steps)
    ]
    if not kinds:
        return None
    unit, unit_s = _time_unit(max(_elapsed_s(run, run.steps[-1]) for run in runs if run.steps))
    again = any(len(run.segments) > 1 for run in runs)
    time_label = f"{unit} since the start" + (", waits between starts left out" if again else "")
    all_axes: Sequence[Axes]
    figure, all_axes = _two_axes(time_label)
    if len(kinds) == 1:
        figure, single_axes = _new_figure(time_label, "")
        all_axes = (single_axes,)
    for axes, (label, used_key, limit_key) in zip(all_axes, kinds, strict=True):
        axes.set_ylabel(f"{label}, GiB" if len(kinds) == 1 else f"{label.split()[0]}, GiB")
        for run, color in _color_runs(runs):
            rows = _bin_maxima(run.steps, used_key)
            times = [_elapsed_s(run, row) / unit_s for row in rows]
            axes.plot(times, [row[used_key] / 2**30 for row in rows], color=color, lw=1.4,
                      label=_make_label(runs, run, "used"))  # fmt: skip
            has_ranks = any("host_ranks_bytes" in row for row in rows)
            if len(runs) == 1 and used_key == "host_bytes" and has_ranks:
                ranks = [row.get("host_ranks_bytes", float("nan")) / 2**30 for row in rows]
                axes.plot(times, ranks, color=COLORS[5], lw=1.4, label="of which this run's ranks")
            limits = [(a, row[limit_key] / 2**30) for a, row in zip(times, rows, strict=True)
                      if row.get(limit_key)]  # fmt: skip
            axes.plot(*zip(*limits, strict=True) if limits else ([], []), color=color, ls=":",
                      lw=1.4, label=_make_label(runs, run, "limit"))  # fmt: skip
        if len(runs) == 1:
            _mark_events(axes, runs[0], unit_s)
        _begin_at_zero(axes)
    return _finish_figure(figure, *all_axes)


def _mark_events(axes: Axes, run: Run, unit_s: float) -> None:
    """Mark saves, the governor's actions, and starts after the first on a time axis."""
    # There can be many saves, so each is a short tick at the bottom.
    for kind, color, height, label in (
        ("governor", RED, 1.0, "governor acts"),
        ("checkpoint", COLORS[2], 0.07, "save"),
    ):
        events = run.governor_actions if kind == "governor" else run.events_of_kind(kind)
        positions = _thin_ticks([at_s / unit_s for at_s in run.elapsed_seconds_of(events)])
        if positions:  # one line with gaps: separate lines would take up half of the file
            xs = [x for position in positions for x in (position, position, position)]
            heights = [0.0, height, float("nan")] * len(positions)
            axes.plot(xs, heights, color=color, lw=1.2, alpha=0.7, label=label,
                      transform=axes.get_xaxis_transform())  # fmt: skip
    for number, segment in enumerate(run.segments[1:]):
        text = "started again" if number == 0 else None
        axes.axvline(segment.prior_running_s / unit_s, color=GRAY, lw=2.5, alpha=0.5, label=text)


def _plot_rank_work(runs: Sequence[Run]) -> Figure | None:
    figure, axes = _new_figure(STEP_AXIS_LABEL, "seconds of a rank's own work")
    pairs = [(run, color) for run, color in _color_runs(runs) if (run.start.get("size") or 1) > 1]
    for run, color in pairs:
        rows = [row for row in run.steps if row.get("most_work_s") is not None]
        steps, slowest = curve_points(rows, "step", "most_work_s")
        _, fastest = curve_points(rows, "step", "least_work_s")
        axes.fill_between(steps, fastest, slowest, color=color, alpha=0.3)
        axes.plot(steps, slowest, color=color, lw=1.2, label=_make_label(runs, run, "slowest rank"))
        axes.plot(steps, fastest, color=color, lw=0.8, ls="--",
                  label=_make_label(runs, run, "fastest rank"))  # fmt: skip
    _begin_at_zero(axes)
    return _finish_figure(figure, axes)


def _plot_memory_predictions(runs: Sequence[Run]) -> Figure | None:
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
    return _finish_figure(figure, axes)


def _step_time_parts(run: Run) -> list[dict[str, float]]:
    """Return the parts of each step's time, and how long training waited for its save."""
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


def _mean_row(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def _bin_means(rows: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Return a few hundred rows, each the mean of its neighbors, so that every save counts."""
    width = max(1, -(-len(rows) // MAX_CURVE_POINTS))
    return [_mean_row(rows[i : i + width]) for i in range(0, len(rows), width)]


def _bin_maxima(rows: Sequence[Record], key: str) -> list[Record]:
    """Return a few hundred rows, each the one with the largest value among its neighbors."""
    known = [row for row in rows if row.get(key) is not None and row.get("time") is not None]
    width = max(1, len(known) // MAX_CURVE_POINTS)
    return [
        max(known[i : i + width], key=lambda row: row[key]) for i in range(0, len(known), width)
    ]


def curve_points(
    rows: Sequence[Record],
    x_key: str,
    y_key: str,
    scale: Callable[[float], float] = float,
    max_points: int = MAX_CURVE_POINTS,
) -> Points:
    """Return x and y of the rows that have y; if there are many, as means over neighbors."""
    points = [(float(row[x_key]), scale(row[y_key])) for row in rows if row.get(y_key) is not None]
    width = max(1, -(-len(points) // max_points))
    groups = [points[i : i + width] for i in range(0, len(points), width)]
    return (
        [sum(a for a, _ in group) / len(group) for group in groups],
        [sum(b for _, b in group) / len(group) for group in groups],
    )


def _thin_ticks(positions: Sequence[float]) -> list[float]:
    return list(positions[:: -(-len(positions) // _MAX_MARKS_PER_AXIS) or 1])


def _time_unit(longest_s: float) -> tuple[str, int]:
    units = (("hours", 3600, 7200), ("minutes", 60, 180), ("seconds", 1, 0))
    return next((unit, seconds) for unit, seconds, min_s in units if longest_s >= min_s)


def _begin_at_zero(axes: Axes) -> None:
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])


def _axis_top(values: Sequence[float]) -> float:
    """Return the top of an axis of seconds: a first step that compiles must not hide the rest."""
    percentile_95 = sorted(values)[int(0.95 * (len(values) - 1))]
    return min(max(values), 2.5 * percentile_95) * 1.05 or 1.0


def _elapsed_s(run: Run, row: Record) -> float:
    return run.elapsed_s(row["time"]) if row.get("time") else 0.0


def _color_runs(runs: Sequence[Run]) -> Iterator[tuple[Run, str]]:
    """Yield the runs that have something to draw; a run has one color in all figures."""
    colored_runs = ((run, COLORS[n % len(COLORS)]) for n, run in enumerate(runs))
    return ((run, color) for run, color in colored_runs if run.steps or run.evals)


def _make_label(runs: Sequence[Run], run: Run, quantity: str) -> str:
    if len(runs) == 1:
        return quantity
    return f"{_shorten(run.name)}: {quantity}" if quantity else _shorten(run.name)


def _shorten(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:11]}…{name[-11:]}"


def _new_figure(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=FIGURE_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def _two_axes(x_label: str, **layout: Any) -> tuple[Figure, tuple[Axes, Axes]]:
    figure = Figure(figsize=FIGURE_SIZE_INCHES, layout="constrained")
    ax1, ax2 = figure.subplots(2, 1, sharex=True, **layout)
    ax2.set_xlabel(x_label)
    return figure, (ax1, ax2)


def _finish_figure(figure: Figure, *all_axes: Any) -> Figure | None:
    """Add grid, ticks and legend to the axes; return None if nothing was drawn."""
    if not any(_has_data(axes) for axes in all_axes):
        return None
    for axes in all_axes:
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if all_axes[-1].get_xlabel() == STEP_AXIS_LABEL:
            axes.xaxis.set_major_locator(_integer_ticks())
        for line in axes.lines:
            if len(line.get_xdata()) == 1 and line.get_marker() == "None":  # type: ignore[arg-type]
                line.set_marker("o" if line.get_linestyle() == "-" else "x")
    handles, labels = all_axes[0].get_legend_handles_labels()
    if any(labels) and len(labels) > 1:
        # A letter is a little over half as wide as high; the legend's line takes four letters.
        column = _LEGEND_FONT_SIZE * (0.6 * max(map(len, labels)) + 4) / 72
        figure.legend(
            handles, labels, loc="outside upper center", frameon=False, fontsize=_LEGEND_FONT_SIZE,
            ncols=max(1, min(4, len(labels), int(FIGURE_SIZE_INCHES[0] / column))),
        )  # fmt: skip
    return figure


def _integer_ticks() -> MaxNLocator:
    return MaxNLocator(integer=True, nbins=8, min_n_ticks=1)


def _has_data(axes: Axes) -> bool:
    has_lines = any(len(line.get_xdata()) for line in axes.lines)  # type: ignore[arg-type]
    return has_lines or bool(axes.patches or axes.collections)


# -- All starts of one run on one time axis: the loss, and below it the events.


_LETTER_WIDTH, _LABEL_SIZE = 0.0125, 8  # of a start's label: share of the axis, font points


def _plot_timeline(runs: Sequence[Run]) -> Figure | None:
    """Draw the loss of one run over its running time, with starts, saves and actions below."""
    [run, *other_runs] = runs
    if other_runs or not run.segments or len(run.steps) < 2:
        return None
    unit, unit_s = _time_unit(max(_elapsed_s(run, row) for row in run.steps[-1:]))
    waits = " (waits between starts left out)" if len(run.segments) > 1 else ""
    figure, (ax1, ax2) = _two_axes(f"{unit} of running{waits}", height_ratios=(2, 1))
    _draw_losses(ax1, run, unit_s)
    ax1.set_ylabel(_loss_label(runs))
    _draw_starts(ax1, ax2, run, unit_s)
    _draw_event_lanes(ax2, run, unit_s)
    return _finish_figure(figure, ax1, ax2)


def _draw_losses(axes: Axes, run: Run, unit_s: float) -> None:
    """Draw the losses; the training loss has a line per start, since steps between are lost."""
    by_start: dict[int, list[Record]] = {}
    for row in run.steps:
        if "time" in row:
            by_start.setdefault(run.start_index_at(row["time"]), []).append(row)
    max_points = max(2, MAX_CURVE_POINTS // max(1, len(by_start)))
    times: list[float] = []
    losses: list[float] = []
    for rows in by_start.values():
        points = [{"at": _elapsed_s(run, row) / unit_s, "loss": row.get("loss")} for row in rows]
        start_times, start_losses = curve_points(points, "at", "loss", max_points=max_points)
        times += [*start_times, float("nan")]
        losses += [*start_losses, float("nan")]
    axes.plot(times[:-1], losses[:-1], color=COLORS[0], lw=1.3, label="training loss")
    evals = [{**row, "at": at_s / unit_s} for row, at_s in _timed_evaluations(run)]
    if evals:
        options = {"color": COLORS[1], "label": "held-out loss", "clip_on": False}
        _plot_held_out_curve(axes, evals, "at", "eval_loss", **options)


def _timed_evaluations(run: Run) -> Iterator[tuple[Record, float]]:
    """Yield evaluations and when they ended; for runs of older versions, when their step ended."""
    ends = {row["step"]: row["time"] for row in run.steps if "time" in row}
    for row in run.steps[:1]:  # step 0 is evaluated before the first step begins
        ends.setdefault(0, row.get("time", 0.0) - row["step_s"])
    for row in run.evals:
        if at_s := row.get("time") or ends.get(row["step"]):
            yield row, run.elapsed_s(at_s)


def _draw_starts(ax1: Axes, ax2: Axes, run: Run, unit_s: float) -> None:
    """Draw each start as a bar, labeled with its ranks and layout if there is room."""
    all_starts = list_starts(run)
    axis_width = (all_starts[-1].prior_running_s + all_starts[-1].seconds) / unit_s or 1.0
    for start in all_starts:
        begin, width = start.prior_running_s / unit_s, start.seconds / unit_s
        color = COLORS[(0, 5)[start.number % 2]]
        ax2.barh(0, width, left=begin, height=0.8, color=color, alpha=0.45)
        ranks = format_quantity(start.ranks, "rank") if start.ranks else ""
        start_name = f"start {start.number}"
        for text in (", ".join(filter(None, (start_name, ranks, start.layout))), start_name,
                     str(start.number)):  # fmt: skip
            if len(text) * _LETTER_WIDTH * axis_width < width:
                ax2.text(begin + width / 2, 0, text, size=_LABEL_SIZE, ha="center", va="center")
                break
        if start.number > 1:
            wait_label = f"started again after {format_seconds(start.wait_s)}"
            label = wait_label if len(all_starts) == 2 else "started again"
            ax1.axvline(begin, color=GRAY, lw=1.5, ls=":",
                        label=label if start.number == 2 else None)  # fmt: skip


def _draw_event_lanes(axes: Axes, run: Run, unit_s: float) -> None:
    """Mark saves, actions of the governor, warnings and stops, each kind on its own line."""
    names = ["starts"]
    for kind, name, marker, color in (
        ("checkpoint", "saves", "|", COLORS[2]),
        ("governor", "governor", "v", RED),
        ("warning", "warnings", "x", COLORS[4]),
        ("stop", "stops", "s", COLORS[6]),
    ):
        events = run.governor_actions if kind == "governor" else run.events_of_kind(kind)
        positions = _thin_ticks([at_s / unit_s for at_s in run.elapsed_seconds_of(events)])
        if positions:
            axes.plot(positions, [len(names)] * len(positions), ls="", marker=marker, color=color,
                      ms=8 if marker == "|" else 5)  # fmt: skip
            names.append(name)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)


# -- Rank x step: how long each rank worked, relative to the median rank of that step.


_MAX_HEATMAP_ROWS, _MAX_HEATMAP_COLUMNS, _NUM_HEATMAP_COLORS = 128, 200, 12
_MIN_SCALE_TOP, _MAX_SCALE_TOP = 1.2, 3.0  # bounds of the scale's top, so that noise stays pale


def _rank_heatmap(runs: Sequence[Run]) -> Figure | None:
    """Draw the own work of each rank of one run, divided by the median rank's at the same step."""
    [run, *other_runs] = runs
    if other_runs or not run.ranks or max(len(row["work_s"]) for row in run.ranks) < 2:
        return None
    num_ranks = max(len(row["work_s"]) for row in run.ranks)
    group = -(-num_ranks // _MAX_HEATMAP_ROWS)
    lines = sorted(run.ranks, key=lambda line: line["step"])
    cells = _heatmap_columns(lines, num_ranks, group)
    highest = max(value for column in cells for value in column if value == value)
    first, last = lines[0]["step"], lines[-1]["step"]
    y_label = "rank" if group == 1 else f"rank (the slowest of each {group})"
    figure, axes = _new_figure(STEP_AXIS_LABEL, y_label)
    image = axes.imshow(
        list(zip(*cells, strict=True)),
        aspect="auto",
        interpolation="none",
        cmap=colormaps["YlOrRd"].resampled(_NUM_HEATMAP_COLORS),
        vmin=1.0,
        vmax=min(_MAX_SCALE_TOP, max(_MIN_SCALE_TOP, highest)),
        extent=(first - 0.5, last + 0.5, num_ranks - 0.5, -0.5),
    )
    figure.colorbar(image, ax=axes, label="own work, x the median rank's", extend="both")
    axes.xaxis.set_major_locator(_integer_ticks())
    axes.yaxis.set_major_locator(_integer_ticks())
    return figure


def _heatmap_columns(lines: Sequence[Record], num_ranks: int, per_row: int) -> list[list[float]]:
    """Return a column per bin of steps: the slowest of every ``per_row`` ranks, or nan."""
    first, last = lines[0]["step"], lines[-1]["step"]
    num_columns = min(_MAX_HEATMAP_COLUMNS, len(lines))
    nan, num_rows = float("nan"), -(-num_ranks // per_row)
    columns: list[list[float]] = [[] for _ in range(num_columns)]
    for line in lines:
        share = (line["step"] - first) / (last - first + 1)
        index = min(num_columns - 1, int(share * num_columns))
        values = divide_by_median(line["work_s"])
        rows = [max(values[i : i + per_row]) for i in range(0, len(values), per_row)]
        rows += [nan] * (num_rows - len(rows))
        columns[index] = np.fmax(columns[index] or rows, rows).tolist()
    for index, column in enumerate(columns):  # after a resume, lines may be further apart
        columns[index] = column or columns[index - 1]
    return columns


# -- Layer x expert: tokens of each expert of a mixture, relative to the mean of its layer.


_MIN_EXPERT_TOP, _MAX_EXPERT_TOP = 2.0, 8.0  # bounds of the scale's top, in means


def _expert_heatmap(runs: Sequence[Run]) -> Figure | None:
    """Draw the newest token counts of one run; white is the mean, blue has few."""
    [run, *other_runs] = runs
    if other_runs or not run.experts:
        return None
    line = run.experts[-1]
    widest = max(map(len, line["tokens"]))
    cells = [_divide_by_mean(row) + [float("nan")] * (widest - len(row)) for row in line["tokens"]]
    highest = max(value for row in cells for value in row if value == value)
    figure, axes = _new_figure("expert", "layer")
    image = axes.imshow(
        cells,
        aspect="auto",
        interpolation="none",
        cmap="RdBu_r",
        norm=TwoSlopeNorm(1.0, 0.0, min(_MAX_EXPERT_TOP, max(_MIN_EXPERT_TOP, highest))),
    )
    figure.colorbar(image, ax=axes, label="tokens, x the layer's mean", extend="max")
    axes.set_title(f"steps {line['since'] + 1:.0f} to {line['step']:.0f}", fontsize=10)
    stride = -(-len(cells) // 16)
    axes.set_yticks(range(0, len(cells), stride), [f"{n:.0f}" for n in line["layers"][::stride]])
    return figure


def _divide_by_mean(row: Sequence[float]) -> list[float]:
    mean = sum(row) / len(row)
    return [count / mean if mean else 0.0 for count in row]


# -- Figures of training on preferences: its effect on chosen and rejected answers.


def _plot_two_metrics(runs: Sequence[Run], measures: dict[str, str]) -> Figure | None:
    """Draw two measures; ``measures``: axis label by name in the metrics."""
    figure, all_axes = _two_axes(STEP_AXIS_LABEL)
    for axes, (name, label) in zip(all_axes, measures.items(), strict=True):
        axes.set_ylabel(label)
        for run, color in _color_runs(runs):
            curve = curve_points(run.steps, "step", f"preferences.{name}")
            axes.plot(*curve, color=color, lw=1.3, label=_make_label(runs, run, "training"))
            options = {"color": color, "label": _make_label(runs, run, "held-out")}
            _plot_held_out_curve(axes, run.evals, "step", f"eval_preferences.{name}", **options)
    return _finish_figure(figure, *all_axes)


# The share of pairs whose chosen answer has the higher reward, and the difference of rewards.
_REWARD_LABELS = {"accuracy": "accuracy (share)", "margin": "margin (reward)"}
_plot_reward = partial(_plot_two_metrics, measures=_REWARD_LABELS)
# The log-probabilities of the answers: both may fall while the margin grows.
_plot_log_probs = partial(
    _plot_two_metrics,
    measures={"chosen_log_prob": "chosen (nats)", "rejected_log_prob": "rejected (nats)"},
)


FIGURES: tuple[tuple[str, str, DrawFigure], ...] = (
    ("timeline", "All starts on one axis of time", _plot_timeline),
    ("loss", "Loss", _plot_loss),
    ("held-out", "Held-out loss of each source", _plot_held_out_sources),
    ("preferences", "Preferences: accuracy and margin", _plot_reward),
    ("log-probs", "Preferences: log-probability of the answers, per token", _plot_log_probs),
    ("memory", "Memory against its limits", _plot_memory),
    ("step-time", "Where a step's time went, on rank 0", _plot_step_time),
    ("speed", "Speed", _plot_speed),
    ("rate", "Learning rate and gradient norm", _plot_learning_rate),
    ("ranks", "The ranks' own work: slowest and fastest", _plot_rank_work),
    ("foreseen", "Memory by phase", _plot_memory_predictions),
    ("rank-steps", "Own work of each rank: dark ranks are the slow ones", _rank_heatmap),
    ("experts", "Tokens of each expert: white is even, blue has few", _expert_heatmap),
)


def draw_figures(runs: Sequence[Run]) -> Iterator[tuple[str, str, Figure]]:
    """Yield (file name, caption, figure) for every figure that the runs have data for."""
    for name, caption, draw in FIGURES:
        if (figure := draw(runs)) is not None:
            yield name, caption, figure
