"""Give each rank CPU cores and threads: its share of what the ranks of its node may use.

    masks of the node's ranks + what the cpuset would allow -> assign_cores (pure) ->
    apply_core_assignment

This runs before torch is imported, since the threads that torch starts inherit the mask. The ranks'
GPUs are known only later; then the cores are assigned again, by the GPUs' NUMA nodes.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_tune.cluster.schedulers import granted_cpus

CpuMask = frozenset[int]
CoreLookup = Callable[[int], tuple[int, int]]
ONEDNN_CACHE_SIZE = 128  # kernels that oneDNN keeps, see ``apply_core_assignment``


@dataclass(frozen=True)
class CoreAssignment:
    """One rank's CPUs (hardware threads), the number of their cores, and its compute threads.

    ``pin``: whether the mask must be set; ``warning``: for the user; ``num_sharing_ranks``: how
    many ranks use these CPUs.
    """

    cpus: CpuMask
    num_cores: int
    threads: int
    pin: bool
    warning: str | None = None
    num_sharing_ranks: int = 1


@dataclass(frozen=True)
class NumaNode:
    """The NUMA node of a rank's GPU, and its CPUs."""

    node: int
    cpus: CpuMask


def assign_cores(
    masks: Sequence[CpuMask],
    reachable_cpus: CpuMask,
    local_rank: int,
    find_core: CoreLookup,
    gpu_nodes: Sequence[NumaNode | None] = (),
) -> CoreAssignment:
    """Return the share of ``local_rank`` (pure).

    Ranks with the same mask split it into contiguous slices. A rank keeps a mask that no other rank
    has, or that overlaps other masks. If all ranks are pinned to too few CPUs, they are spread over
    ``reachable_cpus``; with more ranks than CPUs, each gets one thread and no slice of its own.
    ``find_core`` gives (package, core) of a CPU, so that a slice holds whole cores.

    ``gpu_nodes``: the NUMA node of each rank's GPU. The mask's CPUs at one node are then split
    among the ranks whose GPUs are at this node.
    """
    share = _split_cores(masks, reachable_cpus, local_rank, find_core, gpu_nodes)
    gpu_node = gpu_nodes[local_rank] if gpu_nodes else None
    if gpu_node is None or not gpu_node.cpus or share.cpus & gpu_node.cpus:
        return share
    warning = (
        f"a rank's GPU is at NUMA node {gpu_node.node}, where the rank has no CPU, so data takes a "
        "longer path. mpirun --bind-to none or srun --cpu-bind=none lets hpc_tune pin ranks by "
        "their GPUs' nodes; if the job has no cores there, request whole nodes, or let Slurm "
        "choose with --gres-flags=enforce-binding"
    )
    return replace(share, warning="; ".join(filter(None, [share.warning, warning])))


def _split_cores(
    masks: Sequence[CpuMask],
    reachable_cpus: CpuMask,
    local_rank: int,
    find_core: CoreLookup,
    gpu_nodes: Sequence[NumaNode | None],
) -> CoreAssignment:
    pool, num_ranks, warning = masks[local_rank], len(masks), None
    same_mask_ranks = [rank for rank, mask in enumerate(masks) if mask == pool]
    if (
        num_ranks > 1
        and len(same_mask_ranks) == num_ranks > len(pool)
        and len(reachable_cpus) > len(pool)
    ):
        warning = (
            f"the launcher pinned all {num_ranks} ranks of this node to {_format_cpus(pool)} while "
            f"{_format_cpus(reachable_cpus)} may be used; spreading the ranks over these "
            "(mpirun --bind-to none avoids the pinning)"
        )
        pool = reachable_cpus
    if len(same_mask_ranks) > len(pool):
        num_cores = _num_cores(pool, find_core)
        return CoreAssignment(
            pool, num_cores, 1, warning is not None, warning, len(same_mask_ranks)
        )
    other_cpus: CpuMask = frozenset().union(*(m for m in masks if m != masks[local_rank]))
    if other_cpus & pool:
        num_cores = _num_cores(frozenset().union(*masks), find_core)
        return CoreAssignment(
            pool, num_cores, max(1, num_cores // num_ranks), False, warning, num_ranks
        )
    cpus = _core_slice(pool, len(same_mask_ranks), same_mask_ranks.index(local_rank), find_core)
    num_cores = _num_cores(cpus, find_core)
    fair_cores = _num_cores(reachable_cpus, find_core) // num_ranks
    if warning is None and 2 * num_cores <= fair_cores:
        node_cores = _num_cores(reachable_cpus, find_core)
        warning = (
            f"a rank may use {num_cores} of the node's {node_cores} cores, "
            f"while its share would be {fair_cores}; if that is not intended, start with "
            f"mpirun --bind-to none or srun --cpus-per-task={fair_cores}"
        )
    pin = cpus != masks[local_rank]
    if near_cpus := _core_slice_near_gpu(pool, same_mask_ranks, local_rank, find_core, gpu_nodes):
        cpus, num_cores, pin = near_cpus, _num_cores(near_cpus, find_core), True
    return CoreAssignment(cpus, num_cores, num_cores, pin, warning)


def widest_cpu_mask() -> CpuMask:
    """Return the CPUs that this process could widen its mask to.

    The kernel cuts a mask down to the cpuset, so setting all CPUs shows which are allowed. If the
    scheduler granted fewer CPUs of the node than that, it is unknown which ones, and the current
    mask is returned.
    """
    current_mask = frozenset(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, range(max(os.cpu_count() or 1, max(current_mask) + 1)))
        widest = frozenset(os.sched_getaffinity(0))
        os.sched_setaffinity(0, current_mask)
    except OSError:
        return current_mask
    num_granted = granted_cpus(os.environ)
    return current_mask if num_granted is not None and len(widest) > num_granted else widest


def to_cpu_ranges(mask: CpuMask) -> list[list[int]]:
    """Return the first and last CPU of each contiguous run: a short form to send."""
    runs: list[list[int]] = []
    for cpu in sorted(mask):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return runs


def from_cpu_ranges(ranges: Sequence[Sequence[int]]) -> CpuMask:
    """Return the CPUs of ``to_cpu_ranges``."""
    return frozenset(cpu for first, last in ranges for cpu in range(first, last + 1))


def physical_core(cpu: int) -> tuple[int, int]:
    """Return (package, core) of a CPU; if the kernel does not say, each CPU counts as a core."""
    folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        package = int((folder / "physical_package_id").read_text())
        return package, int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return 0, cpu


def apply_core_assignment(assignment: CoreAssignment, threads: int) -> str | None:
    """Set the mask and the thread pools' variables; return a note if one was overridden."""
    if assignment.pin:
        os.sched_setaffinity(0, assignment.cpus)
    # oneDNN caches a kernel for each of the last 1,024 shapes, and torch's layer above it caches as
    # many again. Documents have many lengths: a CPU rank of a 135M model in bf16 grew by half
    # within 100 steps. A cache of 128 is as fast; 64 is too small for rows of 1,024 tokens, where a
    # step rebuilds 333 of 660 kernels, 0.6 ms each. Torch's layer loses nothing by caching one.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(ONEDNN_CACHE_SIZE))
    os.environ.setdefault("LRU_CACHE_CAPACITY", "1")
    old_value = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if old_value is None or old_value == str(threads):
        return None
    return f"OMP_NUM_THREADS={old_value} was set and is now {threads}; set run.threads to choose"


def repin_threads_with_mask(old_mask: CpuMask, cpus: CpuMask) -> None:
    """Move this process's threads that have the mask ``old_mask`` to ``cpus``.

    The CUDA driver has started some of them by the time the rank's GPU is known.
    """
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if frozenset(os.sched_getaffinity(int(task.name))) == old_mask:
                os.sched_setaffinity(int(task.name), cpus)


def describe_cores(core_counts: Sequence[tuple[int, int, int]], num_nodes: int) -> str:
    """Describe the world in one line, from each rank's (cores, threads, ranks on these cores)."""
    counts = Counter(core_counts)
    nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes"
    ranks = "1 rank" if len(core_counts) == 1 else f"{len(core_counts)} ranks"
    parts = []
    for (cores, threads, num_sharing_ranks), num in counts.most_common(4):
        scope = (
            ("each" if len(core_counts) > 1 else "") if len(counts) == 1 else f"on {num} of them"
        )
        cores_text = "1 core" if cores == 1 else f"{cores} cores"
        threads_text = "1 thread" if threads == 1 else f"{threads} threads"
        if num_sharing_ranks > 1:
            parts.append(f"{cores_text} shared by {num_sharing_ranks}, {threads_text} {scope}")
        else:
            parts.append(f"{cores_text} and {threads_text} {scope}".rstrip())
    return f"{ranks} on {nodes}, {'; '.join(parts)}"


def _core_slice(mask: CpuMask, num_slices: int, index: int, find_core: CoreLookup) -> CpuMask:
    """Return slice ``index`` of ``num_slices`` contiguous ones; whole cores if there are enough."""
    cores: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(mask):
        cores.setdefault(find_core(cpu), []).append(cpu)
    groups = [cores[key] for key in sorted(cores)]
    if len(groups) < num_slices:
        groups = [[cpu] for group in groups for cpu in group]
    first, last = index * len(groups) // num_slices, (index + 1) * len(groups) // num_slices
    return frozenset(cpu for group in groups[first:last] for cpu in group)


def _core_slice_near_gpu(
    mask: CpuMask,
    same_mask_ranks: Sequence[int],
    local_rank: int,
    find_core: CoreLookup,
    gpu_nodes: Sequence[NumaNode | None],
) -> CpuMask | None:
    """Return the rank's slice of the mask's CPUs at its GPU's node.

    Return ``None`` for all ranks of the mask if one of them would get no CPU this way, or if its
    GPU's node is unknown: its slice of the whole mask would overlap the slices that other ranks
    take from a node. A rank that has the mask alone gets ``None``, too.
    """
    if not gpu_nodes or len(same_mask_ranks) == 1:
        return None
    nodes = [node for rank in same_mask_ranks if (node := gpu_nodes[rank]) is not None]
    if len(nodes) < len(same_mask_ranks):
        return None
    if any(len(node.cpus & mask) < nodes.count(node) for node in nodes):
        return None
    index = same_mask_ranks.index(local_rank)
    own_node = nodes[index]
    return _core_slice(
        own_node.cpus & mask, nodes.count(own_node), nodes[:index].count(own_node), find_core
    )


def _num_cores(mask: CpuMask, find_core: CoreLookup) -> int:
    return len({find_core(cpu) for cpu in mask})


def _format_cpus(mask: CpuMask) -> str:
    return "1 CPU" if len(mask) == 1 else f"{len(mask)} CPUs"


# -- The NUMA node of a PCI device and the CPUs of a NUMA node, as the kernel shows them.
#
# ``folder`` is the kernel's tree of devices: /sys, or a tree like it.


SYS = Path("/sys")


def pci_device_path(folder: Path, address: str) -> Path:
    """Return the path from the root complex to a device such as ``"0000:17:00.0"``."""
    return (folder / "bus" / "pci" / "devices" / address).resolve()


def read_numa_node(device: Path) -> int | None:
    """Return the NUMA node of a device, if known; the kernel says -1 if there is only one."""
    with contextlib.suppress(OSError, ValueError):
        number = int((device / "numa_node").read_text())
        return number if number >= 0 else None
    return None


def read_numa_node_cpus(folder: Path, node: int) -> frozenset[int]:
    """Return the CPUs of a NUMA node; empty if it has only memory, or is not shown."""
    file = folder / "devices" / "system" / "node" / f"node{node}" / "cpulist"
    with contextlib.suppress(OSError, ValueError):
        return frozenset(
            cpu
            for part in file.read_text().strip().split(",")
            if part
            for cpu in range(int(part.partition("-")[0]), int(part.rpartition("-")[2]) + 1)
        )
    return frozenset()
