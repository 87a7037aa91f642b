"""Rank x step: how long each rank worked beside the median rank of that step."""

from collections.abc import Sequence

from matplotlib import colormaps
from matplotlib.colors import Colormap
from matplotlib.figure import Figure

from hpc_tune.report.plots import SIZE, integer_ticks
from hpc_tune.report.read import Record, Run
from hpc_tune.rundir.stragglers import relative_to_median

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
