"""Who am I among the ranks: asks the launcher's variables first, then MPI itself.

    environment -> claim_of (pure) -> mpi4py, only if the launcher speaks MPI -> World

The launcher's variables decide whether MPI is imported at all; where it is, its own word is taken
for the world and the variables only check it. torch is never imported here, so that MPI can be
loaded first.
"""

import os
import re
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_tune.errors import WorldError
from hpc_tune.world.nodes import nodes_of, place_of

# Step ids from here up are Slurm's own steps (batch shell, extern, interactive), not started by
# srun.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
UNKNOWN = "an unknown launcher"
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHED_BY = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_", "HYDRA_", "TORCHELASTIC_", *_NEEDED)


@dataclass(frozen=True)
class World:
    """The place of this process among the ranks; nodes are numbered by their lowest rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    num_nodes: int
    hostname: str
    launcher: str

    def __str__(self) -> str:
        """Return such as ``"rank 5/16 node 1/2 local 1/8 via openmpi"``."""
        return (
            f"rank {self.rank}/{self.size} node {self.node}/{self.num_nodes} "
            f"local {self.local_rank}/{self.local_size} via {self.launcher}"
        )


@dataclass(frozen=True)
class Claim:
    """What the launcher's variables say; ``None`` where they are silent."""

    launcher: str
    speaks_mpi: bool = False
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None
    num_nodes: int | None = None


_SINGLE = Claim("single", rank=0, size=1, local_rank=0, local_size=1, node=0, num_nodes=1)


def claim_of(environ: Mapping[str, str]) -> Claim:
    """Return what the launcher's variables claim (pure).

    The innermost launcher wins: torchrun under srun, mpirun under sbatch or over srun-started
    daemons. Slurm's own variables count only in a step that srun started, since every process of a
    batch script inherits SLURM_PROCID=0.
    """
    has = environ.__contains__
    if has("TORCHELASTIC_RUN_ID"):
        return _claim(
            environ,
            "torchrun",
            rank="RANK",
            size="WORLD_SIZE",
            local_rank="LOCAL_RANK",
            local_size="LOCAL_WORLD_SIZE",
            node="GROUP_RANK",
            num_nodes="GROUP_WORLD_SIZE",
        )
    if has("OMPI_COMM_WORLD_SIZE"):
        # OMPI_COMM_WORLD_NODE_RANK is the rank within the node, not the index of the node.
        return _claim(
            environ,
            "openmpi",
            speaks_mpi=True,
            rank="OMPI_COMM_WORLD_RANK",
            size="OMPI_COMM_WORLD_SIZE",
            local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
            local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
        )
    if has("MV2_COMM_WORLD_SIZE"):
        return _claim(
            environ,
            "mvapich",
            speaks_mpi=True,
            rank="MV2_COMM_WORLD_RANK",
            size="MV2_COMM_WORLD_SIZE",
            local_rank="MV2_COMM_WORLD_LOCAL_RANK",
            local_size="MV2_COMM_WORLD_LOCAL_SIZE",
        )
    in_step = _is_srun_step(environ)
    if has("PALS_RANKID"):
        # srun --mpi=cray_shasta sets the rank but not the size.
        return _claim(
            environ,
            "pals",
            speaks_mpi=True,
            rank="PALS_RANKID",
            size="PMI_SIZE" if has("PMI_SIZE") or not in_step else "SLURM_STEP_NUM_TASKS",
            local_rank="PALS_LOCAL_RANKID",
            local_size="PALS_LOCAL_SIZE",
        )
    if has("PMI_RANK") and (has("MPI_LOCALNRANKS") or not in_step):
        # Hydra; over srun-started proxies the step's variables describe the proxies.
        intel = any(key.startswith(("I_MPI_HYDRA", "I_MPI_INFO")) for key in environ)
        return _claim(
            environ,
            "intelmpi" if intel else "mpich",
            speaks_mpi=True,
            rank="PMI_RANK",
            size="PMI_SIZE",
            local_rank="MPI_LOCALRANKID",
            local_size="MPI_LOCALNRANKS",
        )
    if in_step:
        claim = _srun_claim(environ)
        # A task may start ranks itself, as deepspeed's launcher does on each node.
        is_inner = all(map(has, (*_NEEDED, "LOCAL_RANK")))
        is_inner = is_inner and environ["WORLD_SIZE"] != str(claim.size)
        return _plain_claim(environ) if is_inner else claim
    if has("PMIX_RANK"):
        return _claim(environ, "pmix", speaks_mpi=True, rank="PMIX_RANK")
    if has("RANK") or environ.get("WORLD_SIZE", "") not in ("", "1"):
        return _plain_claim(environ)
    return _SINGLE


def rank_hint(environ: Mapping[str, str] = os.environ) -> int:
    """Return a cheap guess of this process's rank, from the launcher's variables alone."""
    try:
        return claim_of(environ).rank or 0
    except WorldError:
        return 0


def discover(environ: Mapping[str, str] = os.environ) -> tuple[World, Any]:
    """Return this process's place and MPI's COMM_WORLD, or ``None`` where MPI is not used.

    An ``UNKNOWN`` launcher's ranks seem to be alone on their nodes until they can talk.

    Raises:
        WorldError: if MPI and the launcher disagree, or if the launcher speaks MPI and mpi4py does
        not.
    """
    claim = claim_of(environ)
    if claim.launcher == UNKNOWN:
        rank, size = claim.rank or 0, claim.size or 1
        return World(rank, size, 0, 1, rank, size, socket.gethostname(), UNKNOWN), None
    if not claim.speaks_mpi:
        return _world_of_claim(claim, environ), None
    # MPI waits by spinning; ranks that share a core must give it away to be done at all.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    try:
        import mpi4py

        # Its library is asked for its name before MPI_Init, in which some libraries end the rank.
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if claim.launcher.startswith("srun"):
            return _world_of_claim(_plain_srun(environ), environ), None
        raise WorldError(
            f"started by {claim.launcher} as rank {claim.rank} of {claim.size}, but mpi4py cannot "
            f"be loaded "
            f"({_first_line(error)}); install it against this MPI: load the MPI's module, then "
            f"pip install --no-binary=mpi4py mpi4py{_libmpi_hint(claim.launcher, environ)}"
        ) from error
    library = MPI.Get_library_version()
    _check_library(claim, library, environ)
    if not MPI.Is_initialized():
        MPI.Init_thread()
    mpi_comm = MPI.COMM_WORLD
    _check_claim(claim, mpi_comm.Get_rank(), mpi_comm.Get_size(), library, environ)
    on_node = mpi_comm.Split_type(MPI.COMM_TYPE_SHARED, key=mpi_comm.Get_rank())
    lowest = on_node.bcast(mpi_comm.Get_rank() if on_node.Get_rank() == 0 else None)
    on_node.Free()
    hostname = socket.gethostname()
    told = mpi_comm.allgather((lowest, hostname, claim.local_size))
    nodes = nodes_of(*(list(column) for column in zip(*told, strict=True)))
    world = World(
        rank=mpi_comm.Get_rank(),
        size=mpi_comm.Get_size(),
        hostname=hostname,
        launcher=claim.launcher,
        **place_of(mpi_comm.Get_rank(), nodes),
    )
    return world, mpi_comm


def unlaunched() -> dict[str, str]:
    """Return the environment without the launchers' variables, for a process that is no rank."""
    return {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHED_BY)}


def _claim(
    environ: Mapping[str, str], launcher: str, speaks_mpi: bool = False, **names: str
) -> Claim:
    values: dict[str, int] = {}
    for field, name in names.items():
        text = environ.get(name)
        if text is None:
            continue
        if not re.fullmatch(r"[0-9]{1,9}", text):
            raise WorldError(
                f"{name}={text!r} in the environment is not a number; {launcher} should have set it"
            )
        values[field] = int(text)
    if "rank" in values and values["rank"] >= values.get("size", values["rank"] + 1):
        raise WorldError(
            f"{names['rank']}={values['rank']} is not below {names['size']}={values['size']}; "
            f"unset these variables or start through {launcher} again"
        )
    return Claim(launcher, speaks_mpi, **values)


def _plain_claim(environ: Mapping[str, str]) -> Claim:
    """Return what torch's own variables say, where nobody known has set them.

    deepspeed's launcher, a Kubernetes PyTorchJob and a loop over ssh do. Nodes are not in it: each
    has other names for them, or none.
    """
    claim = _claim(environ, UNKNOWN, rank="RANK", size="WORLD_SIZE")
    if claim.size == 1 and claim.rank in (0, None):
        return _SINGLE
    if missing := [name for name in _NEEDED if not environ.get(name)]:
        found = ", ".join(f"{name}={environ[name]}" for name in _NEEDED if environ.get(name))
        raise WorldError(
            f"the environment has {found}, but not {', '.join(missing)}: who starts ranks sets "
            f"{', '.join(_NEEDED)} for each. Set them, start through mpirun, srun or torchrun, or "
            "unset them all for one process alone"
        )
    if not re.fullmatch(r"[0-9]{1,5}", environ["MASTER_PORT"]):
        raise WorldError(f"MASTER_PORT={environ['MASTER_PORT']!r} is not the number of a port")
    return claim


def _is_srun_step(environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return (
        bool(re.fullmatch(r"[0-9]{1,10}", step))
        and int(step) < _FIRST_SPECIAL_STEP
        and "SLURM_PROCID" in environ
    )


def _srun_claim(environ: Mapping[str, str]) -> Claim:
    plain = _plain_srun(environ)
    speaks = ""
    if environ.get("PMIX_NAMESPACE", "").startswith("slurm"):
        speaks = "srun-pmix"
    elif "PMI_RANK" in environ:
        speaks = "srun-pmi2"
    # One task is often an interactive shell (srun --pty bash), whose PMI server serves one MPI_Init
    # only.
    if not speaks or plain.size == 1:
        return plain
    return Claim(
        speaks,
        True,
        plain.rank,
        plain.size,
        plain.local_rank,
        plain.local_size,
        plain.node,
        plain.num_nodes,
    )


def _plain_srun(environ: Mapping[str, str]) -> Claim:
    # SLURM_NTASKS can be the job's; the step's own count is right where both exist.
    def first(*names: str) -> str:
        return next((name for name in names if name in environ), names[0])

    claim = _claim(
        environ,
        "slurm",
        rank="SLURM_PROCID",
        size=first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank="SLURM_LOCALID",
        node="SLURM_NODEID",
        num_nodes=first("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    )
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    local_size = _tasks_on_node(tasks, claim.node)
    return Claim(
        "slurm",
        False,
        claim.rank,
        claim.size,
        claim.local_rank,
        local_size if local_size is not None else claim.size if claim.num_nodes == 1 else None,
        claim.node,
        claim.num_nodes,
    )


def _tasks_on_node(text: str, node: int | None) -> int | None:
    """Return the tasks of one node from Slurm's run-length list, such as ``"4(x2),3"``."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,7})\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node is not None and node < len(counts) else None


def _world_of_claim(claim: Claim, environ: Mapping[str, str]) -> World:
    values = {
        field: getattr(claim, field)
        for field in ("rank", "size", "local_rank", "local_size", "node", "num_nodes")
    }
    missing = [field for field, value in values.items() if value is None]
    if missing:
        found = sorted(
            k for k in environ if k.startswith(("SLURM_", "RANK", "WORLD", "LOCAL_", "GROUP"))
        )
        raise WorldError(
            f"{claim.launcher} did not say {', '.join(missing)}; found only {', '.join(found)}. "
            "Start through mpirun, srun or torchrun"
        )
    return World(**values, hostname=socket.gethostname(), launcher=claim.launcher)


def _check_library(claim: Claim, library: str, environ: Mapping[str, str]) -> None:
    """Refuse what would end the rank within MPI_Init, without a word of what to do.

    MPICH 5 under Open MPI's launcher: "unsupported PMI version PMIx". Older ones start alone, and
    are found by ``_check_claim``.
    """
    version = re.match(r"MPICH Version:\s*(\d+)", library)
    if claim.launcher == "openmpi" and version and int(version[1]) >= 5:
        raise _of_another_mpi(claim, "this library cannot start", library, environ)


def _check_claim(
    claim: Claim, rank: int, size: int, library: str, environ: Mapping[str, str]
) -> None:
    """Compare MPI's own word with the launcher's variables."""
    if claim.size not in (None, size) or claim.rank not in (None, rank):
        raise _of_another_mpi(claim, f"MPI says rank {rank} of {size}", library, environ)


def _of_another_mpi(
    claim: Claim, found: str, library: str, environ: Mapping[str, str]
) -> WorldError:
    srun = (
        " Under srun, --mpi=pmix (Open MPI), --mpi=pmi2 (MPICH) or --mpi=none (no MPI is used "
        "then) may be all it needs."
        if claim.launcher.startswith("srun")
        else ""
    )
    return WorldError(
        f"the launcher ({claim.launcher}) says rank {claim.rank} of {claim.size}, but {found}: "
        f"mpi4py has loaded {_first_line(library).partition(',')[0]!r}, "
        "which is not the MPI of this launcher. Start with that MPI's own mpirun, or give mpi4py "
        "the launcher's MPI: load its module and rebuild (pip install --force-reinstall "
        f"--no-binary=mpi4py mpi4py){_libmpi_hint(claim.launcher, environ)}.{srun}"
    )


def _libmpi_hint(launcher: str, environ: Mapping[str, str]) -> str:
    """Name the launcher's MPI library where it can be found.

    The first mpirun on PATH may be another MPI's; the library's version tells which one's it is. A
    libmpi.so without a version may be a text for linkers.
    """
    name = "libmpi.so.40" if launcher in ("openmpi", "srun-pmix", "pmix") else "libmpi.so.12"
    mpirun = shutil.which("mpirun", path=environ.get("PATH", os.defpath))
    folders = [environ.get("OMPI_LIBDIR_LOC", "")]
    folders += [str(Path(mpirun).resolve().parent.parent / "lib")] if mpirun else []
    for folder in filter(None, folders):
        if (Path(folder) / name).exists():
            return f", or set MPI4PY_LIBMPI={folder}/{name}"
    return f", or set MPI4PY_LIBMPI to the path of its {name}"


def _first_line(value: object) -> str:
    lines = str(value).replace("\0", "").strip().splitlines()
    return lines[0][:160] if lines else type(value).__name__
