"""Host memory as the kernel counts it against this job.

The limit is the tightest of: the limits from the process's own cgroup up to the root (in Slurm the
leaf says max and the limit is on an ancestor), the scheduler's limits, and the machine's RAM
without the memory of its GPUs. Anonymous, shared (tmpfs too) and unevictable memory count against
it, and so does the kernel's own memory for the job if it is accounted separately. Page cache does
not count: it is reclaimed before anything is killed.
"""

import contextlib
import ctypes
import gc
import os
import re
import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hpc_tune.cluster.schedulers import memory_limits
from hpc_tune.files import raise_if_too_many_open_files
from hpc_tune.memory.policy import free_bytes_below_level
from hpc_tune.world.affinity import SYS, read_numa_node_cpus

# -- GPU memory that the kernel counts as the machine's: on GH200 and GB200 it is a NUMA node.
#
# Such a node has no CPUs. MemTotal includes its 96 or 144 GB, but CUDA gives them to whoever asks
# for GPU memory, so they are not host memory.


_MEMINFO_LINE = re.compile(r"^Node \d+ (MemTotal|MemFree):\s+(\d+) kB", re.MULTILINE)


def find_gpu_meminfo_files(proc: Path = Path("/proc"), folder: Path = SYS) -> list[Path]:
    """Return the meminfo files of NUMA nodes that are GPU memory; none without NVIDIA's driver."""
    if not (proc / "driver" / "nvidia").is_dir():
        return []
    nodes = folder.glob("devices/system/node/node[0-9]*")
    return [
        node / "meminfo"
        for node in sorted(nodes)
        if (node / "cpulist").is_file()
        and not read_numa_node_cpus(folder, int(node.name[len("node") :]))
    ]


def read_total_and_free_bytes(files: list[Path]) -> tuple[int, int]:
    """Return the total and the free bytes of these NUMA nodes."""
    sums = {"MemTotal": 0, "MemFree": 0}
    for file in files:
        for name, kib in _MEMINFO_LINE.findall(file.read_text(encoding="ascii", errors="replace")):
            sums[name] += 1024 * int(kib)
    return sums["MemTotal"], sums["MemFree"]


# -- What the kernel counts against this job, and its limit.


MIN_RETURNED_BLOCK_BYTES, MAX_CACHED_BLOCK_BYTES = 1 << 20, 32 << 20
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # of malloc.h
_MAX_TRIM_THRESHOLD_BYTES = (1 << 31) - 1
_MAX_STAT_BYTES = 1 << 15
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes about 2**63 for "no limit"
_MAX_SUM_LAG_BYTES, _MAX_CHARGE_DRIFT_BYTES, _MAX_SUBGROUPS = 8 << 20, 1 << 20, 256
_MIN_REFRESH_INTERVAL_S, _REFRESH_INTERVAL_S_PER_RANK = 0.5, 0.1
_KERNEL_USAGE_FILE = "memory.kmem.usage_in_bytes"  # only in v1, whose sums leave it out
CONFIGURED_SOURCE, MACHINE_SOURCE = "memory.host_limit", "the machine's RAM"


@dataclass(frozen=True)
class _CgroupVersion:
    """A cgroup version: fields of memory.stat that count against the limit, fields that are charged
    but do not count, and the files with the charge and the limit.
    """

    counted_fields: tuple[str, ...]
    uncounted_fields: tuple[str, ...]
    charge_file: str
    limit_file: str


# The kernel's lists of memory that only swap could free, including shmem and mlocked files.
_CGROUP_V1 = _CgroupVersion(
    ("total_inactive_anon", "total_active_anon", "total_unevictable"),  # groups below included
    ("total_inactive_file", "total_active_file"),
    "memory.usage_in_bytes",
    "memory.limit_in_bytes",
)
_CGROUP_V2 = _CgroupVersion(
    ("inactive_anon", "active_anon", "unevictable")
    # v1 has only a sum of the kernel's own bytes, caches included.
    + ("kernel_stack", "pagetables", "sec_pagetables", "percpu", "sock", "slab_unreclaimable"),
    ("inactive_file", "active_file", "slab_reclaimable", "vmalloc"),
    "memory.current",
    "memory.max",
)


@dataclass(frozen=True)
class HostLimit:
    """The bytes that this node grants the job, their source, and the cgroup that counts usage.

    Without a cgroup, the machine's RAM is shared by everything that runs on it; any other limit is
    for the job's ranks alone.
    """

    num_bytes: int
    source: str
    cgroup: Path | None = None


def find_host_limit(
    configured_bytes: int | None = None,
    environ: Mapping[str, str] = os.environ,
    proc: Path = Path("/proc"),
    cgroups: Path = Path("/sys/fs/cgroup"),
    devices: Path = SYS,
) -> HostLimit:
    """Return the tightest limit on host memory of this process.

    ``devices`` is the kernel's tree of devices, with NUMA nodes that may be GPU memory.

    Of equal limits the outermost is used: a Slurm job has the limit of its steps, but more
    processes.
    """
    limits = [*_cgroup_limits(proc, cgroups)][::-1]
    limits += [HostLimit(num_bytes, source) for num_bytes, source in memory_limits(environ)]
    gpu_bytes, _ = read_total_and_free_bytes(find_gpu_meminfo_files(proc, devices))
    limits.append(HostLimit(_read_meminfo(proc)["MemTotal"] - gpu_bytes, MACHINE_SOURCE))
    tightest = min(limits, key=lambda limit: limit.num_bytes)
    if configured_bytes is not None and configured_bytes < tightest.num_bytes:
        return HostLimit(configured_bytes, CONFIGURED_SOURCE, tightest.cgroup)
    return tightest


class HostUsage:
    """Usage that counts against a limit, and this process's own; read ten times per second or more.

    The kernel's files stay open and only the few lines that count are parsed: a thread that wakes
    up on a cold processor pays for everything it touches.

    The kernel sums up a group's memory.stat when it is read, but includes the groups below only
    every two seconds; the charge of a group is always exact. Reading the groups below makes the
    next sum come earlier. This is done when the sum differs from the charge and the part of the
    charge that is not the ranks' has changed, and periodically, less often with more ranks.
    """

    def __init__(
        self,
        limit: HostLimit,
        proc: Path = Path("/proc"),
        pids: Sequence[int] = (),
        devices: Path = SYS,
    ) -> None:
        """Open the files of the cgroup of ``limit``, or the machine's if the limit has no cgroup.

        ``pids`` are the process ids of the job's ranks on this node; if empty, this process. Ranks
        outside the cgroup do not count.
        """
        self._proc, self._pids = proc, tuple(pids) or (os.getpid(),)
        self._counts_ranks = limit.cgroup is None and limit.source != MACHINE_SOURCE
        self._group, self._limit_bytes = limit.cgroup, limit.num_bytes
        self._charge_file: IO[bytes] | None = None
        self._kernel_usage_file: IO[bytes] | None = None
        counted_fields: tuple[str, ...] = ("MemAvailable:",)
        uncounted_fields: tuple[str, ...] = ()
        if limit.cgroup is None:
            self._total = _read_meminfo(proc)["MemTotal"]
            self._gpu_meminfo_files = find_gpu_meminfo_files(proc, devices)
            file = proc / "meminfo"
        else:
            file = limit.cgroup / "memory.stat"
            layout = _CGROUP_V1 if "total_rss" in _read_fields(file) else _CGROUP_V2
            counted_fields, uncounted_fields = layout.counted_fields, layout.uncounted_fields
            with _skip_missing_file(), contextlib.suppress(ValueError):
                self._limit_bytes = int((limit.cgroup / layout.limit_file).read_text())
            with _skip_missing_file():
                self._charge_file = (limit.cgroup / layout.charge_file).open("rb", buffering=0)
                self._kernel_usage_file = (limit.cgroup / _KERNEL_USAGE_FILE).open(
                    "rb", buffering=0
                )
        self._counted_keys, self._uncounted_keys = (
            _stat_keys(counted_fields),
            _stat_keys(uncounted_fields),
        )
        self._file = file.open("rb", buffering=0)
        self._statm = (proc / "self" / "statm").open("rb", buffering=0)
        self._statms = []
        members = _member_pids(limit.cgroup)
        for pid in self._pids:
            if members and pid not in members:
                continue  # it has a limit of its own
            with _skip_missing_file():  # the process has ended
                self._statms.append((proc / str(pid) / "statm").open("rb", buffering=0))
        self._last_sum, self._ranks_at_sum = -1, 0
        self._last_other_bytes, self._next_sum_s = 0, 0.0
        self._sum_interval_s = max(
            _MIN_REFRESH_INTERVAL_S, _REFRESH_INTERVAL_S_PER_RANK * len(self._pids)
        )
        self._page_bytes = os.sysconf("SC_PAGESIZE")

    def used_bytes(self) -> int:
        """Return the bytes in use that count against the limit."""
        if self._counts_ranks:
            return sum(own_bytes(self._proc, pid) for pid in self._pids)
        text = b"\n" + os.pread(self._file.fileno(), _MAX_STAT_BYTES, 0)
        stat = _sum_fields(self._counted_keys, text)
        if self._group is None:
            gpu_bytes, free_gpu_bytes = read_total_and_free_bytes(self._gpu_meminfo_files)
            return self._total - gpu_bytes - (1024 * stat - free_gpu_bytes)
        # The ranks' own usage is exact too.
        ranks_bytes = sum(anonymous for anonymous, _ in map(self._read_statm, self._statms))
        if stat != self._last_sum:
            self._last_sum, self._ranks_at_sum = stat, ranks_bytes
        growth = ranks_bytes - self._ranks_at_sum
        counted_bytes = max(ranks_bytes, stat + max(0, growth))
        if self._charge_file is None:
            return counted_bytes
        # Sums can lag in both directions, and can count memory twice that ranks allocate and free
        # ten times per second: the charge without page cache is an upper bound.
        charge = int(os.pread(self._charge_file.fileno(), 128, 0))
        kernel_bytes = (
            0
            if self._kernel_usage_file is None
            else int(os.pread(self._kernel_usage_file.fileno(), 128, 0))
        )
        max_bytes = charge - kernel_bytes - _sum_fields(self._uncounted_keys, text)
        self._refresh_stale_sum(self._group, charge - ranks_bytes, abs(max_bytes - stat - growth))
        if charge > self._limit_bytes - _MAX_SUM_LAG_BYTES:
            return counted_bytes  # page cache is reclaimed for new memory: the charge says nothing
        return max(ranks_bytes, min(counted_bytes, max_bytes))

    def _refresh_stale_sum(self, group: Path, other_bytes: int, gap: int) -> None:
        """Make the kernel sum up ``group`` if its sum lags by a large ``gap`` (bytes), or is old.

        The gap counts only if ``other_bytes``, those charged to the group beyond the ranks', moved.
        """
        has_moved = abs(other_bytes - self._last_other_bytes) > _MAX_CHARGE_DRIFT_BYTES
        self._last_other_bytes = other_bytes
        if (has_moved and gap > _MAX_SUM_LAG_BYTES) or time.monotonic() > self._next_sum_s:
            self._next_sum_s = time.monotonic() + self._sum_interval_s
            _refresh_subgroup_sums(group)

    def private_bytes(self) -> tuple[int, int]:
        """Return this process's anonymous bytes, and those of its private writable mappings."""
        return self._read_statm(self._statm)

    def _read_statm(self, statm: IO[bytes]) -> tuple[int, int]:
        try:
            _, resident, shared, _, _, data, *_ = os.pread(statm.fileno(), 128, 0).split()
        except OSError:
            return 0, 0  # the process has ended
        return (int(resident) - int(shared)) * self._page_bytes, int(data) * self._page_bytes

    def close(self) -> None:
        """Close the files."""
        for file in (
            self._file,
            self._statm,
            self._charge_file,
            self._kernel_usage_file,
            *self._statms,
        ):
            if file is not None:
                file.close()


def used_bytes(
    limit: HostLimit, proc: Path = Path("/proc"), pids: Sequence[int] = (), devices: Path = SYS
) -> int:
    """Return the bytes in use that count against ``limit``; see ``HostUsage``."""
    with closing(HostUsage(limit, proc, pids, devices)) as usage:
        return usage.used_bytes()


def free_host_bytes(limit: HostLimit) -> int:
    """Return how many bytes other work may take now, beside a run, before the governor acts."""
    return free_bytes_below_level(used_bytes(limit), limit.num_bytes)


def swapped_bytes(limit: HostLimit, proc: Path = Path("/proc")) -> int:
    """Return the bytes in swap of all processes under ``limit``."""
    if limit.cgroup is None:
        info = _read_meminfo(proc)
        return info.get("SwapTotal", 0) - info.get("SwapFree", 0)
    stat = _read_fields(limit.cgroup / "memory.stat")
    if "total_rss" in stat:
        return stat.get("total_swap", 0)
    text = "".join(_read_lines(limit.cgroup / "memory.swap.current")).strip()
    return int(text) if text.isdigit() else 0


def memory_pressure(limit: HostLimit, proc: Path = Path("/proc")) -> float | None:
    """Return the share of the last ten seconds in which some task waited for memory (PSI), 0 to 1.

    It is the cgroup's own share if the kernel has it, else the machine's; None without PSI.
    """
    group = [] if limit.cgroup is None else _read_lines(limit.cgroup / "memory.pressure")
    for line in group or _read_lines(proc / "pressure" / "memory"):
        kind, *fields = line.split()
        values = dict(field.split("=", 1) for field in fields)
        if kind == "some" and "avg10" in values:
            return float(values["avg10"]) / 100
    return None


def shm_bytes() -> int:
    """Return the bytes of files in shared memory, which the kernel cannot reclaim."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def oom_kills(limit: HostLimit, proc: Path = Path("/proc")) -> int:
    """Return how many processes the kernel killed for memory, in the cgroup or on the machine."""
    if limit.cgroup is None:
        return _read_fields(proc / "vmstat").get("oom_kill", 0)
    if (kills := _read_fields(limit.cgroup / "memory.events").get("oom_kill")) is not None:
        return kills
    # v1 counts a kill only in the group of the killed process, which can be below the full one.
    files = limit.cgroup.rglob("memory.oom_control")
    return sum(_read_fields(file).get("oom_kill", 0) for file in files)


def trim_heap() -> None:
    """Collect garbage and return the heap's free pages to the kernel."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def make_malloc_keep_blocks() -> None:
    """Make glibc keep freed blocks of up to MAX_CACHED_BLOCK_BYTES: a step asks for them again.

    Its thresholds adapt up to the same size, but on the way it returns the end of the heap: 20,000
    to 100,000 page faults in a step of a 135M model. ``trim_heap`` returns what is kept.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, MAX_CACHED_BLOCK_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _MAX_TRIM_THRESHOLD_BYTES)


def make_malloc_return_blocks() -> None:
    """Make glibc return freed blocks of at least MIN_RETURNED_BLOCK_BYTES at once.

    Its threshold would adapt up to MAX_CACHED_BLOCK_BYTES, and weights that are gathered and freed
    block by block would then leave a heap as large as the model.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, MIN_RETURNED_BLOCK_BYTES)


def own_bytes(proc: Path = Path("/proc"), pid: int | None = None) -> int:
    """Return the anonymous and shared bytes (RssAnon + RssShmem) of this process, or of ``pid``.

    0 if the process has ended. psutil has no such sum: its figures include mapped files.
    """
    status = _read_fields(proc / ("self" if pid is None else str(pid)) / "status", separator=":")
    return (status.get("RssAnon", 0) + status.get("RssShmem", 0)) * 1024


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[HostLimit]:
    """Yield every limit from this process's cgroup up to the root, v2 and v1."""
    for line in _read_lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            roots, name = [cgroups, cgroups / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            roots, name = [cgroups / "memory"], "memory.limit_in_bytes"
        else:
            continue
        for root in roots:
            group = root / os.path.normpath("/" + path).lstrip("/")  # it can begin with /../
            # In a container the path can be the host's: then the root of our tree is our group.
            for folder in (group, *group.parents):
                if not folder.is_relative_to(root):
                    break
                text = "".join(_read_lines(folder / name)).strip()
                if text.isdigit() and int(text) < _UNLIMITED_BYTES:
                    yield HostLimit(int(text), f"{folder / name}", folder)


def _refresh_subgroup_sums(group: Path) -> None:
    """Make the kernel sum up the groups below, innermost first: a sum needs the sums below it."""
    for _, folder in zip(range(_MAX_SUBGROUPS), _walk_subfolders(group), strict=False):
        with contextlib.suppress(OSError), open(f"{folder}/memory.stat", "rb", 0) as file:
            os.read(file.fileno(), 1)  # the kernel sums at the first byte


def _walk_subfolders(folder: str | Path) -> Iterator[str]:
    """Yield the folders below, the innermost first."""
    with contextlib.suppress(OSError), os.scandir(folder) as children:  # a group can be removed
        for child in children:
            if child.is_dir(follow_symlinks=False):
                yield from _walk_subfolders(child.path)
                yield child.path


def _member_pids(group: Path | None) -> set[int]:
    """Return the visible processes in a group and below it."""
    folders = [] if group is None else [str(group), *_walk_subfolders(group)]
    return {int(pid) for folder in folders for pid in _read_lines(Path(folder, "cgroup.procs"))}


@contextlib.contextmanager
def _skip_missing_file() -> Iterator[None]:
    """Skip a file that cannot be opened; raise if this process may open no more files."""
    try:
        yield
    except OSError as error:
        raise_if_too_many_open_files(error)


def _stat_keys(names: Sequence[str]) -> list[bytes]:
    return [f"\n{name} ".encode() for name in names]


def _sum_fields(keys: list[bytes], text: bytes) -> int:
    """Add up the numbers that follow ``keys``; each key begins and ends with white space."""
    total = 0
    for key in keys:
        if (position := text.find(key)) >= 0:
            total += int(text[position + len(key) :].split(None, 1)[0])
    return total


def _read_meminfo(proc: Path) -> dict[str, int]:
    return {k: v * 1024 for k, v in _read_fields(proc / "meminfo", separator=":").items()}


def _read_fields(file: Path, separator: str | None = None) -> dict[str, int]:
    """Return the ``name number`` lines of a kernel file."""
    fields = {}
    for line in _read_lines(file):
        name, *values = line.split(separator, 1)
        parts = values[0].split() if values else []
        if parts and parts[0].isdigit():
            fields[name] = int(parts[0])
    return fields


def _read_lines(file: Path) -> list[str]:
    try:
        return os.fsdecode(file.read_bytes()).splitlines()  # mount paths may have any bytes
    except OSError as error:
        raise_if_too_many_open_files(error)  # without its cgroup's limit a job would be killed
        return []


# -- Host memory that a run's processes take before any model values: the only table of it.
#
# Bytes are the anonymous and shared ones of one process, as ``own_bytes`` counts them.
# Measured on x86-64 with torch 2.13, transformers 5.23 and Python 3.11, unless a comment says
# otherwise.


MIB = 1 << 20

# A rank that has imported torch, transformers and peft and connected gloo, without a model. It has
# prepared the data and tried the architecture too; the median of 6 shapes.
RANK_BASE_BYTES = 284 * MIB
# Added to it with a model: Python's objects for modules and parameters, adapters included (Llama
# shapes), once and for each decoder block. Added with ZeRO: DeepSpeed.
MODEL_OBJECTS_BYTES, BLOCK_OBJECTS_BYTES = 20 * MIB, 900 * 1024
DEEPSPEED_BYTES = 45 * MIB
# Added by the first step on CPUs: the libraries' own buffers, Python's objects, and blocks of the
# sizes that rows of short documents have. Fitted to 3 shapes. Then the part that stays when the
# heap is trimmed before an evaluation or a save that training waits for: 2 to 14 MiB in 4 runs.
FIRST_STEP_BYTES, FIRST_STEP_RETAINED_BYTES = 32 * MIB, 12 * MIB
# Added with a GPU. Not measured; on the safe side.
GPU_RUNTIME_BYTES = 1478 * MIB
# A node with less than this for each of its ranks is worth a warning: a rank's libraries and a
# small model. Not measured.
MIN_RANK_BYTES = 1024 * MIB

# A process that merges, before it knows the model; and what transformers and its model without
# values add to it: 113 to 140 MiB.
MERGE_PROCESS_BASE_BYTES, EMPTY_MODEL_BYTES = 153 * MIB, 130 * MIB
# What other processes of hpc_tune take in total, with some margin: a plan, and a report without the
# run's metrics.
PLAN_PROCESS_BYTES, REPORT_PROCESS_BYTES = 600 * MIB, 250 * MIB
# A worker of torch.compile: a Python with torch, and one run of the C++ or Triton compiler. Not
# measured.
COMPILE_WORKER_BYTES = 1024 * MIB


# -- A limit on this process's private memory that follows how much memory is free.
#
# The kernel kills a process that exceeds its cgroup's limit, and no sampling is fast enough for a
# tensor that is filled at memory speed. An allocation beyond RLIMIT_DATA fails instead (since
# Linux 4.7 the limit counts private anonymous mappings too), which is an error that can be handled.


class PrivateMemoryLimit:
    """Sets the soft limit of RLIMIT_DATA; ``lift`` restores the one from before."""

    def __init__(self) -> None:
        """Remember the current limit."""
        self._previous_limits = resource.getrlimit(resource.RLIMIT_DATA)

    def set(self, mapped_bytes: int, free_bytes: int) -> None:
        """Let this process, which has mapped ``mapped_bytes``, map ``free_bytes`` more."""
        soft, hard = mapped_bytes + max(0, free_bytes), self._previous_limits[1]
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def lift(self) -> None:
        """Restore the limit from before."""
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, self._previous_limits)


# -- Garbage collection in step with all ranks.
#
# Python collects when a process has made enough objects: each rank at a different time, while the
# others wait for it in their next collective. Here all ranks collect at the step boundary at which
# one of them has made many.


# Some 10 MB; selective recompute leaves a hundred per pass of a block.
_COLLECTION_THRESHOLD = 100_000
# Then a rank collects alone, within a step or an evaluation.
_FORCED_COLLECTION_THRESHOLD = 10 * _COLLECTION_THRESHOLD


@contextmanager
def defer_garbage_collection() -> Iterator[None]:
    """Leave garbage collection in the block to callers of ``is_garbage_collection_due``."""
    gc.collect()
    previous_thresholds = gc.get_threshold()
    gc.set_threshold(_FORCED_COLLECTION_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*previous_thresholds)


def is_garbage_collection_due() -> bool:
    """Whether many more objects were made than freed since the last collection."""
    return gc.get_count()[0] > _COLLECTION_THRESHOLD
