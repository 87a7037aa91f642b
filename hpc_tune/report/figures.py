"""All figures of a report: drawn, and as text of a page."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence

from matplotlib.figure import Figure

from hpc_tune.report.experts import expert_heatmap
from hpc_tune.report.heatmap import draw_heatmap
from hpc_tune.report.plots import PLOTS, Draw
from hpc_tune.report.preferences import PREFERENCE_PLOTS
from hpc_tune.report.read import Run
from hpc_tune.report.timeline import draw_timeline

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
