"""Which process groups engines make, in all layouts of two and four ranks."""

import itertools
import json

import pytest

from hpc_tune.step.layout import Layout
from tests.support.groups_made import kinds, layouts
from tests.support.ranks import HANG_S, ROOT, python, rank_environment, run_ranks

SIZES = (2, 4)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What the ranks of each layout do, by layout and kind of training."""
    folder = tmp_path_factory.mktemp("groups")
    words = [*python(cold=True), "-m", "tests.support.groups_made", str(folder)]
    done = run_ranks([*words, *map(str, SIZES)], rank_environment(1), HANG_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {json.dumps(row["case"]): row["ranks"] for row in rows}


def test_all_layouts_are_looked_at(made):
    """Each axis alone, and products of two."""
    assert [len(layouts(size)) for size in SIZES] == [5, 13]
    wanted = [
        json.dumps([str(layout), *kind])
        for layout in itertools.chain.from_iterable(map(layouts, SIZES))
        for kind in kinds(layout)
    ]
    assert [*made] == wanted
    assert "replicate 2 x shard 2, expert 2" in map(str, layouts(4))


def test_no_layout_makes_a_group_of_one_rank(made):
    sizes = {case: [rank["sizes"] for rank in ranks] for case, ranks in made.items()}
    ones = {case: found for case, found in sizes.items() if any(1 in each for each in found)}
    assert not ones, ones


def test_all_ranks_of_a_world_take_part_whenever_some_make_a_group(made):
    """NCCL makes it out of all of them; torch names it by how many a rank has counted before."""
    for case, ranks in made.items():
        for turn in itertools.zip_longest(*(rank["done"] for rank in ranks)):
            assert None not in turn, case
            for rank, (members, is_in) in enumerate(turn):
                assert is_in == (rank in members), case
                assert all(turn[member] == [members, True] for member in members), case


@pytest.mark.parametrize(
    ("layout", "said", "wanted"),
    [
        # The world's, and one for each direction of each edge; with four stages that of the ends.
        (Layout(1, 1, 1, 2), {}, [3, 3]),
        (Layout(1, 1, 1, 2), {"stages_per_rank": 2}, [5, 5]),
        (Layout(1, 1, 1, 4), {}, [4, 5, 5, 4]),
        (Layout(1, 1, 1, 4), {"stages_per_rank": 2}, [6, 5, 5, 6]),
        (Layout(2, 1, 1, 2), {}, [5, 5, 5, 5]),
        # What parallel=auto tries: the world's alone, so that trials leave none behind.
        (Layout(4, 1), {}, [1, 1, 1, 1]),
        (Layout(1, 4), {}, [1, 1, 1, 1]),
        (Layout(1, 1, 4), {}, [1, 1, 1, 1]),
        (Layout(2, 1), {"offload_params": "cpu"}, [1, 1]),
        (Layout(2, 2), {}, [3, 3, 3, 3]),
    ],
)
def test_a_rank_has_no_more_groups_than_it_sends_over(made, layout, said, wanted):
    ranks = made[json.dumps([str(layout), "full", said])]
    assert [len(rank["sizes"]) for rank in ranks] == wanted
