"""What one rank knows about itself and its node; the ranks communicate only in a barrier."""

import os
import resource
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_tune.cluster.unused_gpus import UnusedGpus
from hpc_tune.memory.host import find_host_limit, used_bytes
from hpc_tune.packages import hidden_torch_warning, is_installed
from hpc_tune.probe import software
from hpc_tune.probe.fabric import NcclLibrary, read_nccl
from hpc_tune.probe.matmuls import MatmulResult
from hpc_tune.probe.topology import Topology, read_topology
from hpc_tune.world import liveness
from hpc_tune.world.affinity import SYS, pci_device_path, read_numa_node
from hpc_tune.world.comm import Comm
from hpc_tune.world.device import (
    FLASH_ATTENTION_PACKAGES,
    explain_unused_gpus,
    find_architecture,
    pci_address,
)
from hpc_tune.world.processes import read_file_limit

DISK_TEST_BYTES = 16 << 20


@dataclass(frozen=True)
class FolderFacts:
    """A folder that a run writes into; ``error``: why it cannot write there."""

    role: str
    path: str
    free_bytes: int = 0
    bytes_per_s: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class RankFacts:
    """One rank and its resources. Sizes in bytes; None if there is no limit.

    ``cpus``: the CPUs from the launcher; ``taken``: the rank's own share, which lies on
    ``numa_nodes``; ``num_reachable``: how many it could have had. One rank of each node has
    ``topology``, ``library`` and ``folders``. ``clock_s``: its clock, in seconds since the epoch,
    right after a barrier of all ranks. ``unused``: why it uses no GPU, if there may be some;
    ``hidden``: a warning about a torch that another one hides. ``device_place``: the PCI address of
    its GPU. ``products``: how fast it multiplies matrices, if measured. ``lacks_attention``: the
    package of a newer attention that its GPU could use, if none is installed.
    """

    rank: int
    node: int
    local_rank: int
    hostname: str
    launcher: str
    cpus: tuple[int, ...]
    num_reachable: int
    numa_nodes: tuple[int, ...]
    threads: int
    device_wanted: str
    device: str
    device_uuid: str
    device_bytes: int
    device_numa: int | None
    versions: Mapping[str, str]
    mpi: str
    cuda: str
    nccl: str
    compiled: software.CompiledOps | None
    host_limit_bytes: int
    host_limit_source: str
    host_used_bytes: int
    memlock_bytes: int | None
    open_files: int | None
    shm_bytes: int
    shm_free_bytes: int
    topology: Topology | None
    folders: tuple[FolderFacts, ...]
    taken: tuple[int, ...] = ()
    rocm: str = ""
    library: NcclLibrary | None = None
    clock_s: float | None = None
    unused: UnusedGpus | None = None
    hidden: str | None = None
    device_place: str = ""
    products: MatmulResult | None = None
    lacks_attention: str = ""


@dataclass(frozen=True)
class LaunchCores:
    """The CPUs of a rank before it takes its share: those given, and how many it could have."""

    given_cpus: tuple[int, ...]
    num_reachable: int


def collect_facts(
    comm: Comm,
    cores: LaunchCores,
    folders: Mapping[str, Path],
    host_limit: int | None,
    device_wanted: str,
) -> RankFacts:
    """Return this rank's facts. Collective.

    ``folders``: by their purpose, tested by one rank of each node; ``host_limit``:
    memory.host_limit; ``device_wanted``: run.device.
    """
    import torch

    comm.barrier("all ranks to compare their clocks", liveness.START_LIMIT_S)
    clock_s = time.time()
    world, limit = comm.world, find_host_limit(host_limit)
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    name, uuid, device_bytes, address = _describe_device(comm)
    on_gpu, is_first = bool(device_bytes), world.local_rank == 0
    own_cpus = tuple(sorted(os.sched_getaffinity(0)))
    library = find_nccl() if on_gpu else None
    return RankFacts(
        rank=world.rank,
        node=world.node,
        local_rank=world.local_rank,
        hostname=world.hostname,
        launcher=world.launcher,
        cpus=cores.given_cpus,
        num_reachable=cores.num_reachable,
        numa_nodes=tuple(sorted({n for cpu in own_cpus if (n := _cpu_numa_node(cpu)) is not None})),
        threads=comm.threads,
        device_wanted=device_wanted,
        device=name,
        device_uuid=uuid,
        device_bytes=device_bytes,
        device_numa=read_numa_node(pci_device_path(SYS, address)) if on_gpu else None,
        versions=software.package_versions(),
        mpi=software.mpi_library(),
        cuda=torch.version.cuda or "",
        nccl=library.version if library else "",
        compiled=software.find_compiled_deepspeed_ops(on_gpu),
        host_limit_bytes=limit.num_bytes,
        host_limit_source=limit.source,
        host_used_bytes=used_bytes(limit),
        memlock_bytes=_lockable_bytes(),
        open_files=read_file_limit(),
        shm_bytes=shm.f_blocks * shm.f_frsize if shm else 0,
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm else 0,
        topology=read_topology() if is_first else None,
        folders=tuple(measure_folder(*item) for item in folders.items()) if is_first else (),
        taken=own_cpus,
        rocm=torch.version.hip or "",
        library=library if is_first else None,
        clock_s=clock_s,
        unused=None if on_gpu or device_wanted != "auto" else explain_unused_gpus(world.hostname),
        hidden=hidden_torch_warning(),
        device_place=address,
        lacks_attention=_missing_attention_package(comm),
    )


def measure_folder(role: str, path: Path) -> FolderFacts:
    """Time writing DISK_TEST_BYTES to a temporary file in the folder, fsync included."""
    parent = path
    while not parent.exists():  # a folder that a run creates need not exist yet
        parent = parent.parent
    data = os.urandom(1 << 20)
    try:
        began_s = time.monotonic()
        with tempfile.NamedTemporaryFile(dir=parent, prefix=".hpc_tune-doctor-") as file:
            for _ in range(DISK_TEST_BYTES // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        took_s = time.monotonic() - began_s
        stat = os.statvfs(parent)
    except OSError as error:
        return FolderFacts(role, str(path), error=error.strerror or str(error))
    return FolderFacts(role, str(path), stat.f_bavail * stat.f_frsize, DISK_TEST_BYTES / took_s)


def _describe_device(comm: Comm) -> tuple[str, str, int, str]:
    """Return name, UUID, bytes and PCI address."""
    if comm.device.type != "cuda":
        return "cpu", "", 0, ""
    import torch

    gpu: Any = torch.cuda.get_device_properties(comm.device)
    return gpu.name, str(getattr(gpu, "uuid", "")), gpu.total_memory, pci_address(gpu)


def _missing_attention_package(comm: Comm) -> str:
    architecture = find_architecture(comm.device)
    versions = architecture.flash_attention_versions if architecture else ()
    if not versions or any(is_installed(FLASH_ATTENTION_PACKAGES[name][0]) for name in versions):
        return ""
    return FLASH_ATTENTION_PACKAGES[versions[0]][1]


def find_nccl() -> NcclLibrary:
    """Return which NCCL or RCCL this process has loaded."""
    import torch

    try:
        built_version = ".".join(map(str, torch.cuda.nccl.version()[:3]))
    except (AttributeError, RuntimeError):  # a torch without NCCL
        built_version = ""
    return read_nccl(built_version, is_rocm=torch.version.hip is not None)


def _lockable_bytes() -> int | None:
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft_limit == resource.RLIM_INFINITY else soft_limit


def _cpu_numa_node(cpu: int) -> int | None:
    folder = SYS / "devices" / "system" / "cpu" / f"cpu{cpu}"
    numbers = sorted(path.name.removeprefix("node") for path in folder.glob("node*"))
    return next((int(number) for number in numbers if number.isdigit()), None)
