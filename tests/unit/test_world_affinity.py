import os

import pytest

from hpc_tune.world import affinity
from hpc_tune.world.affinity import CoreShare, mask_of, runs_of, share_of_cores


def one_thread_per_core(cpu):
    return 0, cpu


def two_threads_per_core(cpu):  # 4 cores; CPU i and i + 4 are one core, as Linux numbers them
    return 0, cpu % 4


def mask(*cpus):
    return frozenset(cpus)


EIGHT = mask(*range(8))


@pytest.mark.parametrize(
    ("masks", "reachable", "local_rank", "cpus", "threads", "pin"),
    [
        ([EIGHT] * 2, EIGHT, 1, mask(4, 5, 6, 7), 4, True),
        ([EIGHT] * 3, EIGHT, 0, mask(0, 1), 2, True),
        ([EIGHT] * 3, EIGHT, 2, mask(5, 6, 7), 3, True),
        ([EIGHT], EIGHT, 0, EIGHT, 8, False),
        ([mask(0, 1), mask(2, 3)], mask(0, 1, 2, 3), 1, mask(2, 3), 2, False),
        # two ranks per NUMA node, as mpirun maps more than two
        ([mask(0, 1), mask(2, 3)] * 2, mask(0, 1, 2, 3), 2, mask(1), 1, True),
        ([mask(0, 1)] * 4, mask(0, 1), 3, mask(0, 1), 1, False),
        ([mask(0, 1, 2), mask(2, 3)], mask(0, 1, 2, 3), 0, mask(0, 1, 2), 2, False),
    ],
)
def test_each_rank_gets_its_share(masks, reachable, local_rank, cpus, threads, pin):
    share = share_of_cores(masks, reachable, local_rank, one_thread_per_core)
    assert (share.cpus, share.threads, share.pin, share.warning) == (cpus, threads, pin, None)


def test_the_shares_of_all_ranks_are_disjoint_and_use_every_cpu():
    for num_ranks in range(1, 9):
        shares = [
            share_of_cores([EIGHT] * num_ranks, EIGHT, r, one_thread_per_core).cpus
            for r in range(num_ranks)
        ]
        assert sum(map(len, shares)) == 8
        assert frozenset().union(*shares) == EIGHT


def test_a_slice_holds_both_threads_of_its_cores():
    share = share_of_cores([EIGHT] * 2, EIGHT, 0, two_threads_per_core)
    assert share.cpus == mask(0, 4, 1, 5)
    assert (share.num_cores, share.threads) == (2, 2)


def test_ranks_pinned_to_one_core_are_spread_and_told_both_figures():
    share = share_of_cores([mask(0)] * 4, EIGHT, 1, one_thread_per_core)
    assert share.cpus == mask(2, 3)
    assert share.pin
    assert "pinned all 4 ranks of this node to 1 CPU while 8 CPUs may be used" in share.warning


def test_disjoint_but_meagre_masks_are_kept_with_a_warning():
    share = share_of_cores([mask(0), mask(1)], EIGHT, 1, one_thread_per_core)
    assert share.cpus == mask(1)
    assert not share.pin
    assert "1 of the node's 8 cores, while its share would be 4" in share.warning


@pytest.mark.parametrize(
    ("shares", "num_nodes", "line"),
    [
        ([(1, 1, 1)] * 4, 1, "4 ranks on 1 node, 1 core and 1 thread each"),
        ([(8, 8, 1)] * 16, 2, "16 ranks on 2 nodes, 8 cores and 8 threads each"),
        ([(2, 1, 4)] * 4, 1, "4 ranks on 1 node, 2 cores shared by 4, 1 thread each"),
        ([(2, 2, 1)], 1, "1 rank on 1 node, 2 cores and 2 threads"),
        (
            [(3, 3, 1), (2, 2, 1), (3, 3, 1)],
            1,
            "3 ranks on 1 node, 3 cores and 3 threads on 2 of them; "
            "2 cores and 2 threads on 1 of them",
        ),
    ],
)
def test_one_line_describes_the_world(shares, num_nodes, line):
    assert affinity.describe(shares, num_nodes) == line


def test_an_inherited_thread_count_is_overridden_aloud(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    share = CoreShare(mask(0, 1), 2, 2, pin=False)
    assert "OMP_NUM_THREADS=1 was set and is now 2" in affinity.apply(share, 2)
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert affinity.apply(share, 2) is None


@pytest.fixture
def narrowed(monkeypatch):
    """Pin this thread to one CPU; give the CPUs that it had, and could have again."""
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    before = os.sched_getaffinity(0)
    if len(before) == 1:
        pytest.skip("needs two CPUs")
    os.sched_setaffinity(0, {min(before)})
    yield before
    os.sched_setaffinity(0, before)


def test_looking_for_wider_masks_leaves_the_mask_as_it_was(narrowed):
    assert affinity.reachable_cpus() >= narrowed
    assert os.sched_getaffinity(0) == {min(narrowed)}


def test_a_slurm_share_of_the_node_is_not_widened(narrowed, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    assert affinity.reachable_cpus() == {min(narrowed)}


def test_runs_of_cpus_give_the_mask_back():
    cpus = frozenset({0, 1, 2, 5, 8, 9})
    assert runs_of(cpus) == [[0, 2], [5, 5], [8, 9]]
    assert mask_of(runs_of(cpus)) == cpus
    assert mask_of(runs_of(frozenset())) == frozenset()
