"""Layer x expert: how many tokens each expert of a mixture had beside the mean of its layer."""

from collections.abc import Sequence

from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from hpc_tune.report.plots import SIZE
from hpc_tune.report.read import Run

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
