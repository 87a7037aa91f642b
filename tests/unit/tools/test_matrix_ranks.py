"""The ranks of the matrix are laid out as a run with a row's settings is."""

import sys

import pytest

from hpc_tune.step.layout import Layout
from tests.support.ranks import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from matrix_page import LAYOUTS  # noqa: E402
from matrix_ranks import RANKS, layout_of, settings  # noqa: E402

EXPECTED = {
    "one": Layout(1, 1),
    "shard": Layout(1, 2),
    "tensor": Layout(1, 1, tensor=2),
    "pipeline": Layout(1, 1, pipeline=2),
    "zero3": Layout(1, 2),
    "expert": Layout(1, 2, expert=2),
    "expert4": Layout(1, 4, expert=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_lie_along_the_axis_of_a_row(name):
    row = {"directory": "unused", "method": "lora", "layout": name}
    layout, parallel = layout_of(row, RANKS[name]), settings(row).parallel
    assert layout == EXPECTED[name]
    assert layout.size == RANKS[name]
    assert (layout.tensor, layout.pipeline) == (parallel.tensor or 1, parallel.pipeline or 1)
    assert layout.expert == parallel.expert
