"""What one rank can tell about itself and its node; nothing here talks to other ranks."""

import contextlib
import importlib.metadata
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_tune.memory.host import find_limit, used_bytes
from hpc_tune.world.bootstrap import Session

PACKAGES = ("hpc_tune", "torch", "mpi4py", "deepspeed", "transformers", "peft", "h5py")
WRITTEN_BYTES = 16 << 20
_SYS = Path("/sys")


@dataclass(frozen=True)
class Folder:
    """A folder that a run writes into; ``error`` says why it cannot."""

    role: str
    path: str
    free_bytes: int = 0
    bytes_per_s: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class RankFacts:
    """One rank and what it has. Sizes in bytes; None where there is no limit.

    ``cpus`` are those that the launcher gave it, before it took its share.
    """

    rank: int
    node: int
    local_rank: int
    hostname: str
    launcher: str
    cpus: tuple[int, ...]
    numa_nodes: tuple[int, ...]
    threads: int
    device: str
    device_bytes: int
    device_numa: int | None
    versions: Mapping[str, str]
    mpi: str
    nccl: str
    host_limit_bytes: int
    host_limit_source: str
    host_used_bytes: int
    memlock_bytes: int | None
    open_files: int | None
    shm_bytes: int
    shm_free_bytes: int
    network_cards: tuple[str, ...]
    folders: tuple[Folder, ...]


def gather(
    session: Session, cpus: tuple[int, ...], folders: Mapping[str, Path], host_limit: int | None
) -> RankFacts:
    """Return this rank's facts; ``folders`` by what they are for, tried by one rank of a node."""
    world, limit = session.world, find_limit(host_limit)
    shm = os.statvfs("/dev/shm") if Path("/dev/shm").is_dir() else None
    name, device_bytes, numa = _device(session)
    tried = folders.items() if world.local_rank == 0 else ()
    return RankFacts(
        rank=world.rank,
        node=world.node,
        local_rank=world.local_rank,
        hostname=world.hostname,
        launcher=world.launcher,
        cpus=cpus,
        numa_nodes=tuple(sorted({n for cpu in cpus if (n := _numa_of(cpu)) is not None})),
        threads=session.threads,
        device=name,
        device_bytes=device_bytes,
        device_numa=numa,
        versions=versions(),
        mpi=_mpi(),
        nccl=_nccl(session),
        host_limit_bytes=limit.num_bytes,
        host_limit_source=limit.source,
        host_used_bytes=used_bytes(limit),
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        shm_bytes=shm.f_blocks * shm.f_frsize if shm else 0,
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm else 0,
        network_cards=_names(_SYS / "class" / "infiniband"),
        folders=tuple(try_folder(role, path) for role, path in tried),
    )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def try_folder(role: str, path: Path) -> Folder:
    """Write WRITTEN_BYTES into a file there, through to the disk, and remove it again."""
    place = path
    while not place.exists():  # what a run makes itself need not be there yet
        place = place.parent
    data = os.urandom(1 << 20)
    try:
        began_s = time.monotonic()
        with tempfile.NamedTemporaryFile(dir=place, prefix=".hpc_tune-doctor-") as file:
            for _ in range(WRITTEN_BYTES // len(data)):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        took_s = time.monotonic() - began_s
        stat = os.statvfs(place)
    except OSError as error:
        return Folder(role, str(path), error=error.strerror or str(error))
    return Folder(role, str(path), stat.f_bavail * stat.f_frsize, WRITTEN_BYTES / took_s)


def _device(session: Session) -> tuple[str, int, int | None]:
    if session.device.type != "cuda":
        return "cpu", 0, None
    import torch

    found: Any = torch.cuda.get_device_properties(session.device)
    place = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    text = _read(_SYS / "bus" / "pci" / "devices" / place / "numa_node")
    numa = int(text) if text.isdigit() else None
    return found.name, found.total_memory, numa


def _mpi() -> str:
    """Return the name of the MPI library that is loaded, if any is."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return ""
    text: str = mpi.Get_library_version()
    return text.replace("\0", "").strip().splitlines()[0].partition(",")[0]


def _nccl(session: Session) -> str:
    if session.device.type != "cuda":
        return ""
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))


def _limit(number: int) -> int | None:
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft


def _numa_of(cpu: int) -> int | None:
    names = _names(_SYS / "devices" / "system" / "cpu" / f"cpu{cpu}")
    found = [name.removeprefix("node") for name in names if name.startswith("node")]
    return next((int(number) for number in found if number.isdigit()), None)


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(path.name for path in folder.iterdir()))
    except OSError:
        return ()


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
