"""The report as it is seen: text of the figures, and the page laid out by a real browser."""

import html
import itertools
import json
import re
import shutil
import subprocess

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from hpc_tune.report.figures import draw_figures
from hpc_tune.report.page import write_report
from hpc_tune.report.read import read_run
from hpc_tune.rundir import outcome
from tests.unit.report.test_report import BEGAN_S, DONE, EVENTS, LIMIT, event, make, step

__all__ = ["make"]  # a fixture

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
BROWSER = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
BROWSER += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
LONG = "a-name-of-a-run-as-long-as-people-make-them-who-try-many-things-" * 2
# Reports what is wrong as text of the page; what scrolls by itself may be wider than it shows.
LOOK = """<script>
onload = () => {
const wrong = [], shown = e => e.getBoundingClientRect();
if (document.documentElement.scrollWidth > innerWidth) wrong.push("wider than the window");
for (const e of document.querySelectorAll("body *")) {
  const inline = getComputedStyle(e).display === "inline";
  if (!inline && !e.closest(".scroll, pre, svg") && e.scrollWidth > e.clientWidth + 1)
    wrong.push("clipped: " + e.outerHTML.slice(0, 90));
  if (e.tagName === "TD" && shown(e).height > 4 * shown(e).width)
    wrong.push("squeezed: " + e.outerHTML.slice(0, 90));
  if (e.tagName === "svg" && shown(e).height < 100) wrong.push("no picture");
}
const cards = [...document.querySelectorAll(".card")].filter(e => e.checkVisibility());
for (const [i, a] of cards.entries()) for (const b of cards.slice(i + 1)) {
  const p = shown(a), q = shown(b);
  if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 1 && q.top < p.bottom - 1)
    wrong.push("overlap: " + a.innerText.slice(0, 40) + " / " + b.innerText.slice(0, 40));
}
for (const e of cards) if (!e.innerText.trim() && !e.querySelector("svg")) wrong.push("empty card");
document.body.innerText = "FOUND" + JSON.stringify([cards.length, wrong]) + "END";
};
</script>"""


def many_kinds(make):
    """Run directories: healthy, governed, resumed on fewer ranks, killed, failed early; and all."""
    pressed = [
        step(n, BEGAN_S + 2 * n, host_bytes=int(LIMIT * min(0.95, 0.5 + 0.08 * n)), device_bytes=0)
        for n in range(1, 11)
    ]
    said = "7.8 GiB of 8.0 GiB: " + "shrink " * 30
    acts = [
        event("governor", BEGAN_S + n, step=n // 2, action="trim", message=said)
        for n in range(8, 18, 2)
    ]
    later = [step(n, BEGAN_S + 1000 + 2 * n) for n in range(11, 16)]
    again = [event("start", BEGAN_S + 1020, size=1, total_steps=15)]
    left = {"status": "stopped", "reason": "SIGUSR1", "step": 10, "exit_code": 75}
    first = [step(n, BEGAN_S + 2 * n) for n in range(1, 11)]
    kinds = {
        "healthy": make("healthy", events=EVENTS, outcome=DONE),
        "governed": make(LONG, steps=pressed, events=[*EVENTS, *acts], outcome=left),
        "resumed": make("resumed", steps=first + later, events=again, outcome=DONE),
        "killed": make("killed", events=EVENTS, settings="lr: 0.2"),
        "early": make("early", steps=[], evals=False, outcome=DONE | {"status": "failed"}),
    }
    word = outcome.Heartbeat(BEGAN_S + 21, "saving", "n1", 7 << 30, LIMIT, "cgroup", None, 0)
    outcome.write_heartbeat(word, outcome.heartbeat_path(kinds["killed"], 0))
    return {**{name: [run] for name, run in kinds.items()}, "overlaid": list(kinds.values())}


def texts_of(figure):
    """Yield the bounds in pixels of each text that is drawn."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [t for legend in figure.legends for t in legend.get_texts()]
    for axes in figure.axes:
        texts += [axes.xaxis.label, axes.yaxis.label, axes.xaxis.offsetText, axes.yaxis.offsetText]
        for axis, (least, most) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            low, high = sorted((least, most))
            texts += [t.label1 for t in axis.get_major_ticks() if low <= t.get_loc() <= high]
    for text in texts:
        if text.get_text().strip() and text.get_visible():
            yield text.get_text(), text.get_window_extent(canvas.get_renderer())


@pytest.mark.full
def test_no_text_of_a_figure_is_cut_off_or_lies_on_another(make):
    num = 0
    for kind, runs in many_kinds(make).items():
        for name, _, figure in draw_figures([read_run(run) for run in runs]):
            width, height = figure.canvas.get_width_height()
            texts = list(texts_of(figure))
            num += len(texts)
            for said, box in texts:
                inside = (
                    box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
                )
                assert inside, (kind, name, said)
            for (a, box), (b, other) in itertools.combinations(texts, 2):
                assert not box.padded(-1).overlaps(other.padded(-1)), (kind, name, a, b)
    assert num > 300


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: make browser")
@pytest.mark.full
def test_a_browser_shows_nothing_clipped_overlapping_or_empty(make, tmp_path):
    looked = tmp_path / "looked.html"
    for kind, runs in many_kinds(make).items():
        page = write_report(runs, tmp_path / f"{kind}.html").read_text()
        looked.write_text(page.replace("</body>", f"{LOOK}</body>"))
        for width in (1440, 900):
            size = [f"--window-size={width},900", f"--user-data-dir={tmp_path / 'browser'}"]
            done = subprocess.run(
                [*BROWSER, *size, "--virtual-time-budget=5000", "--dump-dom", looked.as_uri()],
                capture_output=True,
                text=True,
                timeout=120,
            )
            found = re.search(r"<body>FOUND(.*)END", done.stdout, re.DOTALL)
            assert found, (kind, width, done.stderr[-2000:])
            num_cards, wrong = json.loads(html.unescape(found[1]))
            assert num_cards > 3
            assert wrong == [], (kind, width)
