import os
import subprocess
import sys

import pytest

from hpc_tune.world import affinity
from hpc_tune.world.affinity import (
    CoreAssignment,
    NumaNode,
    assign_cores,
    from_cpu_ranges,
    pci_device_path,
    read_numa_node,
    read_numa_node_cpus,
    to_cpu_ranges,
)


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
    share = assign_cores(masks, reachable, local_rank, one_thread_per_core)
    assert (share.cpus, share.threads, share.pin, share.warning) == (cpus, threads, pin, None)


def test_the_shares_of_all_ranks_are_disjoint_and_use_every_cpu():
    for num_ranks in range(1, 9):
        shares = [
            assign_cores([EIGHT] * num_ranks, EIGHT, r, one_thread_per_core).cpus
            for r in range(num_ranks)
        ]
        assert sum(map(len, shares)) == 8
        assert frozenset().union(*shares) == EIGHT


def test_a_slice_holds_both_threads_of_its_cores():
    share = assign_cores([EIGHT] * 2, EIGHT, 0, two_threads_per_core)
    assert share.cpus == mask(0, 4, 1, 5)
    assert (share.num_cores, share.threads) == (2, 2)


def test_ranks_pinned_to_one_core_are_spread_and_told_both_figures():
    share = assign_cores([mask(0)] * 4, EIGHT, 1, one_thread_per_core)
    assert share.cpus == mask(2, 3)
    assert share.pin
    assert "pinned all 4 ranks of this node to 1 CPU while 8 CPUs may be used" in share.warning


def test_disjoint_but_meagre_masks_are_kept_with_a_warning():
    share = assign_cores([mask(0), mask(1)], EIGHT, 1, one_thread_per_core)
    assert share.cpus == mask(1)
    assert not share.pin
    assert "1 of the node's 8 cores, while its share would be 4" in share.warning


# Four NUMA nodes of four CPUs, as a node of LUMI has four: its first GPUs are at the last node.
NODES = [NumaNode(node, mask(*range(4 * node, 4 * node + 4))) for node in range(4)]
SIXTEEN = mask(*range(16))
LOWER = mask(*range(8))
NEAR = {
    "two GPUs at each node, in another order than the CPUs": (
        [SIXTEEN] * 8,
        [3, 3, 1, 1, 0, 0, 2, 2],
        [{12, 13}, {14, 15}, {4, 5}, {6, 7}, {0, 1}, {2, 3}, {8, 9}, {10, 11}],
    ),
    "GPUs at two nodes in turn": ([SIXTEEN] * 4, [2, 0, 2, 0], [{8, 9}, {0, 1}, {10, 11}, {2, 3}]),
    "all GPUs at one node": ([SIXTEEN] * 2, [1, 1], [{4, 5}, {6, 7}]),
    "a mask that has a part of each node": ([mask(2, 3, 4, 5)] * 2, [1, 0], [{4, 5}, {2, 3}]),
    "two masks, each split by its own ranks": (
        [LOWER, LOWER, SIXTEEN - LOWER, SIXTEEN - LOWER],
        [1, 0, 3, 2],
        [{4, 5, 6, 7}, {0, 1, 2, 3}, {12, 13, 14, 15}, {8, 9, 10, 11}],
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_cores_are_assigned_by_the_node_of_the_gpu(name):
    masks, nodes, expected = NEAR[name]
    gpu_nodes = [NODES[node] for node in nodes]
    reachable = frozenset().union(*masks)
    shares = [
        assign_cores(masks, reachable, rank, one_thread_per_core, gpu_nodes)
        for rank in range(len(masks))
    ]
    assert [share.cpus for share in shares] == expected
    assert {(share.pin, share.warning) for share in shares} == {(True, None)}
    assert [share.threads for share in shares] == [len(cpus) for cpus in expected]


# Of a node of LUMI: the cores nearest to each die of its MI250X, by the site's masks
# (https://docs.lumi-supercomputer.eu/runjobs/scheduled-jobs/distribution-binding/); the first core
# of each eight is the system's. NUMA node N has the cores 16 N to 16 N + 15.
LUMI = (49, 57, 17, 25, 1, 9, 33, 41)


def test_eight_ranks_of_a_lumi_node_get_the_cores_that_the_site_gives_their_dies():
    given = mask(*(cpu for cpu in range(64) if cpu % 8))
    gpu_nodes = [
        NumaNode(cpu // 16, mask(*range(cpu // 16 * 16, cpu // 16 * 16 + 16))) for cpu in LUMI
    ]
    for rank, first in enumerate(LUMI):
        share = assign_cores([given] * 8, given, rank, one_thread_per_core, gpu_nodes)
        assert share.cpus == mask(*range(first, first + 7)), rank
        assert (share.threads, share.pin, share.warning) == (7, True, None)


def test_ranks_that_were_pinned_to_one_core_are_spread_by_the_nodes_of_their_gpus():
    gpu_nodes = [NODES[node] for node in (3, 0)]
    shares = [
        assign_cores([mask(0)] * 2, SIXTEEN, rank, one_thread_per_core, gpu_nodes)
        for rank in (0, 1)
    ]
    assert [share.cpus for share in shares] == [{12, 13, 14, 15}, {0, 1, 2, 3}]
    assert all("pinned all 2 ranks" in share.warning for share in shares)
    assert all("NUMA" not in share.warning for share in shares)


# Masks, the nodes of the GPUs, and the nodes that warnings name.
KEPT = {
    "without GPUs": ([SIXTEEN] * 4, [None] * 4, set()),
    "a GPU whose place is unknown": ([SIXTEEN] * 4, [3, 3, 3, None], {3}),
    "one node alone is allowed": ([NODES[1].cpus] * 2, [1, 1], set()),
    "no core of a GPU's node is allowed": ([LOWER] * 4, [3, 3, 0, 1], {0, 3}),
    "fewer CPUs at a node than GPUs": ([LOWER | {12}] * 3, [3, 3, 0], {0, 3}),
    "a mask of its own": ([LOWER, SIXTEEN - LOWER], [0, 3], set()),
    "a mask of its own at the wrong node": ([NODES[0].cpus, NODES[1].cpus], [1, 1], {1}),
    "masks that overlap": ([SIXTEEN, LOWER], [3, 3], {3}),
    "alone": ([SIXTEEN], [2], set()),
    "more ranks than CPUs": ([mask(0, 4)] * 3, [0, 1, 2], {2}),
}


@pytest.mark.parametrize("name", KEPT)
def test_otherwise_each_keeps_the_cores_that_it_has_without_gpus(name):
    masks, nodes, warned = KEPT[name]
    gpu_nodes = [None if node is None else NODES[node] for node in nodes]
    said, reachable = set(), frozenset().union(*masks)
    for rank in range(len(masks)):
        before = assign_cores(masks, reachable, rank, one_thread_per_core)
        share = assign_cores(masks, reachable, rank, one_thread_per_core, gpu_nodes)
        assert (share.cpus, share.threads) == (before.cpus, before.threads)
        assert (share.warning or "").startswith(before.warning or "")
        said |= {
            n
            for n in range(4)
            if f"GPU is at NUMA node {n}, where the rank" in (share.warning or "")
        }
    assert said == warned


def test_a_node_of_memory_alone_changes_nothing():
    gpu_nodes = [NumaNode(4, mask()), NumaNode(5, mask())]
    share = assign_cores([SIXTEEN] * 2, SIXTEEN, 1, one_thread_per_core, gpu_nodes)
    assert share == assign_cores([SIXTEEN] * 2, SIXTEEN, 1, one_thread_per_core)


def test_the_kernel_says_where_a_gpu_is_and_which_cpus_are_near(tmp_path):
    gpu = tmp_path / "bus" / "pci" / "devices" / "0000:c1:00.0"
    node = tmp_path / "devices" / "system" / "node"
    for folder in (gpu, node / "node3", node / "node4"):
        folder.mkdir(parents=True)
    (gpu / "numa_node").write_text("3\n")
    (node / "node3" / "cpulist").write_text("48-50,112,114-115\n")
    (node / "node4" / "cpulist").write_text("\n")
    assert read_numa_node(pci_device_path(tmp_path, "0000:c1:00.0")) == 3
    assert read_numa_node_cpus(tmp_path, 3) == mask(48, 49, 50, 112, 114, 115)
    assert read_numa_node_cpus(tmp_path, 4) == read_numa_node_cpus(tmp_path, 7) == mask()
    (gpu / "numa_node").write_text("-1\n")
    assert read_numa_node(pci_device_path(tmp_path, "0000:c1:00.0")) is None
    assert read_numa_node(pci_device_path(tmp_path, "")) is None


MOVED = """
import os, threading
from hpc_tune.world import affinity
both = frozenset(os.sched_getaffinity(0))
one, other = sorted(both)[:2]
os.sched_setaffinity(0, {one})
done, at = threading.Event(), []
threads = [threading.Thread(target=done.wait) for _ in range(2)]
for thread in threads:
    thread.start()
os.sched_setaffinity(threads[1].native_id, both)
share = affinity.CoreAssignment(frozenset({other}), 1, 1, pin=True)
affinity.apply_core_assignment(share, 1)
affinity.repin_threads_with_mask(frozenset({one}), share.cpus)
masks = [os.sched_getaffinity(tid) for tid in (0, *(thread.native_id for thread in threads))]
done.set()
assert masks == [{other}, {other}, both], masks
"""


def test_threads_that_have_the_mask_of_before_move_along_and_others_stay():
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("needs two CPUs")
    subprocess.run([sys.executable, "-c", MOVED], check=True, timeout=60)


# Rank 1 of two, whose GPUs are at each other's half of the cores; rank 0 is played.
RANK_1 = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from hpc_tune.config.schema import RunSettings
from hpc_tune.world import bootstrap, device
from hpc_tune.world.discover import World

class Cuda:
    def is_available(self): return True
    def device_count(self): return 2
    def set_device(self, device): pass
    def get_device_properties(self, index):
        address = dict(pci_domain_id=0, pci_bus_id=index, pci_device_id=0)
        return SimpleNamespace(uuid="ab"[index], **address)

class Exchange:
    def all_gather(self, value):
        if isinstance(value, dict):
            return [{**value, "rank": 0, "uuid": "a"}, value]
        return [json.loads(json.dumps(value))] * 2

torch.cuda, folder = Cuda(), Path(sys.argv[1])
both = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, both)
for index, cpu in enumerate(reversed(both)):  # GPU 0 at the node of the second CPU
    gpu = folder / "bus" / "pci" / "devices" / f"0000:0{index}:00.0"
    node = folder / "devices" / "system" / "node" / f"node{index}"
    gpu.mkdir(parents=True), node.mkdir(parents=True)
    (gpu / "numa_node").write_text(str(index))
    (node / "cpulist").write_text(str(cpu))
device.find_visible_gpus.__defaults__, bootstrap.SYS = (folder,), folder
world = World(1, 2, 1, 2, 0, 1, "n0", "slurm")
cores, settings = ([frozenset(both)] * 2, frozenset(both)), RunSettings()
bootstrap._set_cores(world, cores, settings)
before = os.sched_getaffinity(0)
device, warning, near = bootstrap._choose_device(
    world, Exchange(), settings, SimpleNamespace(launcher="mpich")
)
share, threads, _ = bootstrap._set_cores(world, cores, settings, near)
assert (str(device), warning) == ("cuda:1", None)
assert (before, os.sched_getaffinity(0), threads) == ({both[1]}, {both[0]}, 1)
"""


def test_a_rank_moves_to_the_cores_at_its_gpu_once_it_has_one(tmp_path):
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("needs two CPUs")
    subprocess.run([sys.executable, "-c", RANK_1, tmp_path], check=True, timeout=120)


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
    assert affinity.describe_cores(shares, num_nodes) == line


def test_an_inherited_thread_count_is_overridden_aloud(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    share = CoreAssignment(mask(0, 1), 2, 2, pin=False)
    assert "OMP_NUM_THREADS=1 was set and is now 2" in affinity.apply_core_assignment(share, 2)
    assert os.environ["OMP_NUM_THREADS"] == "2"
    assert affinity.apply_core_assignment(share, 2) is None


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
    assert affinity.widest_cpu_mask() >= narrowed
    assert os.sched_getaffinity(0) == {min(narrowed)}


def test_a_slurm_share_of_the_node_is_not_widened(narrowed, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    assert affinity.widest_cpu_mask() == {min(narrowed)}


def test_runs_of_cpus_give_the_mask_back():
    cpus = frozenset({0, 1, 2, 5, 8, 9})
    assert to_cpu_ranges(cpus) == [[0, 2], [5, 5], [8, 9]]
    assert from_cpu_ranges(to_cpu_ranges(cpus)) == cpus
    assert from_cpu_ranges(to_cpu_ranges(frozenset())) == frozenset()
