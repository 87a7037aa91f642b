"""All figures of a report: drawn, and as text of a page."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, TwoSlopeNorm
from matplotlib.figure import Figure

from hpc_tune.report.facts import list_starts
from hpc_tune.report.plots import (
    COLORS,
    DOTS,
    GREY,
    PLOTS,
    POINTS,
    RED,
    SIZE,
    STEP,
    Draw,
    curve_points,
    elapsed_s,
    finish_figure,
    integer_ticks,
    loss_label,
    make_label,
    thin_ticks,
    time_unit,
    two_axes,
    with_colors,
)
from hpc_tune.report.read import Record, Run
from hpc_tune.rundir.facts import relative_to_median
from hpc_tune.units import format_seconds

# -- All starts of one run on one axis of time: the loss, and below it what happened when.


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


# -- Rank x step: how long each rank worked beside the median rank of that step.


_ROWS, _COLUMNS, _COLORS = 128, 200, 12
_MIN_TOP_RATIO = 1.2  # of the scale: ranks that differ by less look alike
_TOP_RATIO = 3.0


def draw_heatmap(runs: Sequence[Run]) -> Figure | None:
    """Draw one run's own work of each rank, by that of the median rank at the same step."""
    [run, *others] = runs
    if others or not run.ranks or max(len(row["work_s"]) for row in run.ranks) < 2:
        return None
    num_ranks = max(len(row["work_s"]) for row in run.ranks)
    group = -(-num_ranks // _ROWS)
    lines = sorted(run.ranks, key=lambda line: line["step"])
    cells = _make_cells(lines, num_ranks, group)
    highest = max(value for column in cells for value in column if value == value)
    first, last = lines[0]["step"], lines[-1]["step"]
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        list(zip(*cells, strict=True)),
        aspect="auto",
        interpolation="none",
        cmap=_make_colormap(),
        vmin=1.0,
        vmax=min(_TOP_RATIO, max(_MIN_TOP_RATIO, highest)),
        extent=(first - 0.5, last + 0.5, num_ranks - 0.5, -0.5),
    )
    figure.colorbar(image, ax=axes, label="own work, x the median rank's", extend="both")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("rank" if group == 1 else f"rank (the slowest of each {group})")
    axes.xaxis.set_major_locator(integer_ticks())
    axes.yaxis.set_major_locator(integer_ticks())
    return figure


def _make_colormap() -> Colormap:
    return colormaps["YlOrRd"].resampled(_COLORS)


def _make_cells(lines: Sequence[Record], num_ranks: int, group: int) -> list[list[float]]:
    """Return columns of steps, each with the slowest of every ``group`` ranks; nan: none."""
    first, last = lines[0]["step"], lines[-1]["step"]
    num_columns = min(_COLUMNS, len(lines))
    nothing, num_rows = float("nan"), -(-num_ranks // group)
    columns: list[list[float]] = [[] for _ in range(num_columns)]
    for line in lines:
        share = (line["step"] - first) / (last - first + 1)
        place = min(num_columns - 1, int(share * num_columns))
        values = relative_to_median(line["work_s"])
        rows = [max(values[i : i + group]) for i in range(0, len(values), group)]
        rows += [nothing] * (num_rows - len(rows))
        before = columns[place]
        columns[place] = [max(a, b) for a, b in zip(before, rows, strict=True)] if before else rows
    for place, column in enumerate(columns):  # after a resume lines may lie further apart
        columns[place] = column or columns[place - 1]
    return columns


# -- Layer x expert: how many tokens each expert of a mixture had beside the mean of its layer.


_MIN_TOP, _TOP = 2.0, 8.0  # of the scale, in means


def expert_heatmap(runs: Sequence[Run]) -> Figure | None:
    """Draw the newest counts of one run; white is even, blue is starved."""
    [run, *others] = runs
    if others or not run.experts:
        return None
    line = run.experts[-1]
    widest = max(map(len, line["tokens"]))
    cells = [_divide_by_mean(row) + [float("nan")] * (widest - len(row)) for row in line["tokens"]]
    highest = max(value for row in cells for value in row if value == value)
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        cells,
        aspect="auto",
        interpolation="none",
        cmap="RdBu_r",
        norm=TwoSlopeNorm(1.0, 0.0, min(_TOP, max(_MIN_TOP, highest))),
    )
    figure.colorbar(image, ax=axes, label="tokens, x the layer's mean", extend="max")
    axes.set_title(f"steps {line['since'] + 1:.0f} to {line['step']:.0f}", fontsize=10)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    every = -(-len(cells) // 16)
    axes.set_yticks(range(0, len(cells), every), [f"{n:.0f}" for n in line["layers"][::every]])
    return figure


def _divide_by_mean(row: Sequence[float]) -> list[float]:
    mean = sum(row) / len(row)
    return [count / mean if mean else 0.0 for count in row]


# -- Figures of training on preferences: what it does to chosen and rejected answers.


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


FIGURES: tuple[tuple[str, str, Draw], ...] = (
    ("timeline", "All starts on one axis of time", draw_timeline),
    *PLOTS[:2],
    *PREFERENCE_PLOTS,
    *PLOTS[2:],
    ("rank-steps", "Own work of each rank: dark ranks are the slow ones", draw_heatmap),
    ("experts", "Tokens of each expert: white is even, blue has few", expert_heatmap),
)
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))


def draw_figures(runs: Sequence[Run]) -> Iterator[tuple[str, str, Figure]]:
    """Yield (file name, what it shows, figure) for what the runs have."""
    for name, caption, draw in FIGURES:
        figure = draw(runs)
        if figure is not None:
            yield name, caption, figure


def render_svgs(figures: Iterable[tuple[str, str, Figure]]) -> list[tuple[str, str, str]]:
    """Return (name, caption, element of a page) of figures; each letter is drawn once for all."""
    known: set[str] = set()

    def once(glyph: re.Match[str]) -> str:
        is_new = glyph[1] not in known
        known.add(glyph[1])
        return glyph[0] if is_new else ""

    return [
        (name, caption, re.sub(r'<path id="(DejaVu[^"]*)".*?/>\s*', once, _render_svg(name, figure),
                               flags=re.DOTALL))
        for name, caption, figure in figures
    ]  # fmt: skip


def _render_svg(name: str, figure: Figure) -> str:
    """Return a figure as an element of a page; ``name`` keeps its ids apart from others'."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata=_NO_METADATA)
    text = drawn.getvalue()
    text = re.sub(r"<!--.*?-->\s*", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)(?!DejaVu)', rf"\g<1>{name}-", text)
    # A hundredth of a pixel is more than a screen shows.
    return re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
