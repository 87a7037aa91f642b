"""Find this process's place among the ranks: from the launcher's variables, then from MPI.

    environment -> find_launcher (pure) -> mpi4py, only if the ranks use MPI -> World

The launcher's variables decide whether MPI is imported at all; if it is, MPI defines the world, and
the variables only check it. torch is never imported here, so that MPI can be loaded first.
"""

import contextlib
import os
import shutil
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_tune.cluster.launchers import (
    LAUNCHERS,
    OPENMPI_YIELD_WHEN_IDLE,
    disable_gpu_aware_mpi,
    find_launcher,
)
from hpc_tune.cluster.protocol import UNKNOWN_LAUNCHER, Launcher, LaunchInfo
from hpc_tune.errors import WorldError, first_line
from hpc_tune.log import log

# -- Which ranks share a node.


def make_host_key() -> str:
    """Return a key that is the same for all ranks of one host: its name, which several hosts may
    share, the boot id of its kernel, and the network namespace, which may be a container's own.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def assign_node_indices(
    mpi_node_keys: Sequence[object],
    host_keys: Sequence[object],
    claimed_sizes: Sequence[int | None],
) -> list[int]:
    """Return each rank's node; nodes are numbered in the order of their lowest ranks (pure).

    ``mpi_node_keys`` and ``host_keys`` hold one key per rank, equal within a node: from MPI's own
    split, and from the host name in case MPI cannot tell (Open MPI 5 over Slurm's PMIx 4 sees every
    rank alone; all would take the same GPU). ``claimed_sizes``: the launcher's ranks per node, by
    rank.

    Raises:
        WorldError: if the launcher's sizes match neither.
    """
    for keys in (mpi_node_keys, host_keys):
        counts = Counter(keys)
        if all(n in (None, counts[k]) for k, n in zip(keys, claimed_sizes, strict=True)):
            order = {key: index for index, key in enumerate(dict.fromkeys(keys))}
            return [order[key] for key in keys]
    sizes = [sorted(Counter(keys).values()) for keys in (mpi_node_keys, host_keys)]
    raise WorldError(
        f"the launcher says {sorted(set(map(str, claimed_sizes)))} ranks per node, MPI sees "
        f"{sizes[0][:16]} and the host names {host_keys[:16]} give {sizes[1][:16]}; check that "
        "mpi4py uses the launcher's MPI and that every node has a host name of its own"
    )


def local_world_fields(rank: int, nodes: list[int]) -> dict[str, Any]:
    """Return the fields of ``World`` that follow from each rank's node."""
    node = nodes[rank]
    return {
        "local_rank": nodes[:rank].count(node),
        "local_size": nodes.count(node),
        "node": node,
        "num_nodes": len(set(nodes)),
    }


# -- This process's place among the ranks.


@dataclass(frozen=True)
class World:
    """The place of this process among the ranks; nodes are numbered by their lowest ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    num_nodes: int
    hostname: str
    launcher: str

    @property
    def label(self) -> str:
        """The rank's name in messages, such as ``"rank 5 on n2"``."""
        return f"rank {self.rank} on {self.hostname}"

    def __str__(self) -> str:
        """Return such as ``"rank 5/16 node 1/2 local 1/8 via openmpi"``."""
        return (
            f"rank {self.rank}/{self.size} node {self.node}/{self.num_nodes} "
            f"local {self.local_rank}/{self.local_size} via {self.launcher}"
        )


def discover(environ: Mapping[str, str] = os.environ) -> tuple[World, Any]:
    """Return this process's place and MPI's COMM_WORLD, or ``None`` if MPI is not used.

    The ranks of ``UNKNOWN_LAUNCHER`` count as alone on their nodes until they can communicate.

    Raises:
        WorldError: if the launcher's variables are invalid or incomplete, MPI does not fit the
            launcher, or the ranks use MPI and mpi4py cannot be loaded.
    """
    launcher, info = find_launcher(environ)
    if info.launcher == UNKNOWN_LAUNCHER:
        rank, size = info.rank or 0, info.size or 1
        return World(rank, size, 0, 1, rank, size, socket.gethostname(), UNKNOWN_LAUNCHER), None
    if (message := disable_gpu_aware_mpi(os.environ)) is not None:
        log.info("%s", message)
    if not info.uses_mpi:
        return _world_from_launch_info(launcher, info, environ), None
    os.environ.setdefault(*OPENMPI_YIELD_WHEN_IDLE)
    try:
        import mpi4py

        # Get the library's name before MPI_Init, in which some libraries end the rank.
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if launcher.read_info_without_mpi is not None:
            return _world_from_launch_info(
                launcher, launcher.read_info_without_mpi(environ), environ
            ), None
        raise WorldError(
            f"started by {info.launcher} as rank {info.rank} of {info.size}, but mpi4py cannot "
            f"be loaded ({first_line(error)}); install it against this MPI: load the MPI's "
            f"module, then pip install --no-binary=mpi4py mpi4py{_libmpi_hint(info, environ)}"
        ) from error
    library = MPI.Get_library_version()
    if launcher.cannot_run_mpi(library):
        raise _wrong_mpi_error(launcher, info, "this library cannot start", library, environ)
    if not MPI.Is_initialized():
        MPI.Init_thread()
    mpi_comm = MPI.COMM_WORLD
    rank, size = mpi_comm.Get_rank(), mpi_comm.Get_size()
    if info.size not in (None, size) or info.rank not in (None, rank):
        problem = f"MPI says rank {rank} of {size}"
        raise _wrong_mpi_error(launcher, info, problem, library, environ)
    node_comm = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED, key=rank)
    lowest_rank = node_comm.bcast(rank if node_comm.Get_rank() == 0 else None)
    node_comm.Free()
    hostname = socket.gethostname()
    rows = mpi_comm.allgather((lowest_rank, make_host_key(), info.local_size))
    nodes = assign_node_indices(*(list(column) for column in zip(*rows, strict=True)))
    world = World(
        rank=rank,
        size=size,
        hostname=hostname,
        launcher=info.launcher,
        **local_world_fields(rank, nodes),
    )
    return world, mpi_comm


def _world_from_launch_info(
    launcher: Launcher, info: LaunchInfo, environ: Mapping[str, str]
) -> World:
    values = {
        field: getattr(info, field)
        for field in ("rank", "size", "local_rank", "local_size", "node", "num_nodes")
    }
    missing = [field for field, value in values.items() if value is None]
    if missing:
        names = sorted(name for name in environ if name.startswith(launcher.variable_prefixes))
        raise WorldError(
            f"{info.launcher} did not set {', '.join(missing)}; found only {', '.join(names)}. "
            "Start with mpirun, srun or torchrun"
        )
    return World(**values, hostname=socket.gethostname(), launcher=info.launcher)


def _wrong_mpi_error(
    launcher: Launcher, info: LaunchInfo, problem: str, library: str, environ: Mapping[str, str]
) -> WorldError:
    advice = f" {launcher.advice}" if launcher.advice else ""
    version = library.replace("\0", "").strip().partition("\n")[0].partition(",")[0]
    return WorldError(
        f"the launcher ({info.launcher}) says rank {info.rank} of {info.size}, but {problem}: "
        f"mpi4py has loaded {version!r}, which is not the MPI of this launcher. Start "
        "with that MPI's own mpirun, or rebuild mpi4py against the launcher's MPI: load its module "
        "and run pip install --force-reinstall "
        f"--no-binary=mpi4py mpi4py{_libmpi_hint(info, environ)}.{advice}"
    )


def _libmpi_hint(info: LaunchInfo, environ: Mapping[str, str]) -> str:
    """Return a hint that names the launcher's MPI library, with its folder if it can be found.

    The first mpirun on PATH may belong to another MPI; the version in the library's name tells. A
    libmpi.so without a version may be a linker script.
    """
    name = info.libmpi or ""
    mpirun = shutil.which("mpirun", path=environ.get("PATH", os.defpath))
    folders = [environ.get(launcher.library_folder_variable or "", "") for launcher in LAUNCHERS]
    folders += [str(Path(mpirun).resolve().parent.parent / "lib")] if mpirun else []
    for folder in filter(None, folders):
        if (Path(folder) / name).exists():
            return f", or set MPI4PY_LIBMPI={folder}/{name}"
    return f", or set MPI4PY_LIBMPI to the path of its {name}"
