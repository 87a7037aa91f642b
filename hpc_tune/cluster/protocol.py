"""The interface of a launcher and of a scheduler, which the files of this package implement.

    environment -> Launcher.read_info -> LaunchInfo, if this launcher has started the process
    environment -> Scheduler.job_id -> the id of the job, if this scheduler runs it

Each implementation sets the fields that apply to it and keeps the defaults of the others.
"""

import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpc_tune.errors import WorldError

Environ = Mapping[str, str]
# The two families of MPI libraries, by the file that a program loads.
LIBMPI_OF_OPEN_MPI, LIBMPI_OF_MPICH = "libmpi.so.40", "libmpi.so.12"


@dataclass(frozen=True)
class LaunchInfo:
    """What the launcher's variables say; ``None`` where they say nothing.

    ``libmpi`` is the file of the MPI library that the ranks use, ``None`` if they use none.
    """

    launcher: str
    libmpi: str | None = None
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    node: int | None = None
    num_nodes: int | None = None

    @property
    def uses_mpi(self) -> bool:
        """Whether the ranks find each other through MPI."""
        return self.libmpi is not None


@dataclass(frozen=True)
class RendezvousEndpoint:
    """Where ranks without MPI connect to rank 0, which refuses ranks with another ``token``.

    The token identifies the job, but is no secret. If ``ports`` is None, they are derived from it.
    """

    addresses: Sequence[str]
    token: str
    ports: Sequence[int] | None = None


def _return_false(_argument: str) -> bool:
    return False


def _return_none(_argument: object) -> None:
    return None


@dataclass(frozen=True)
class Launcher:
    """What starts the ranks, and the variables that it sets for them.

    ``read_info`` is pure and returns ``None`` unless this launcher has started the process. The
    names of its variables begin with one of ``variable_prefixes``, the names of its own processes
    with one of ``process_prefixes``.

    Ranks that use MPI: ``library_folder_variable`` is the variable that names the folder of the MPI
    library. ``cannot_run_mpi`` tells from a library's version string whether MPI_Init would end the
    rank. ``advice`` ends the error of ranks that have loaded another MPI.

    Ranks without MPI: ``has_store`` if the launcher runs a store for torch.distributed, else
    ``rendezvous_endpoint``. ``read_info_without_mpi`` is for ranks that could use MPI but lack
    mpi4py.
    """

    read_info: Callable[[Environ], LaunchInfo | None]
    variable_prefixes: tuple[str, ...] = ()
    process_prefixes: tuple[str, ...] = ()
    library_folder_variable: str | None = None
    cannot_run_mpi: Callable[[str], bool] = _return_false
    advice: str = ""
    has_store: bool = False
    rendezvous_endpoint: Callable[[Environ, LaunchInfo], RendezvousEndpoint] | None = None
    read_info_without_mpi: Callable[[Environ], LaunchInfo] | None = None


@dataclass(frozen=True)
class JobEnergy:
    """The energy that a scheduler has counted for a job's nodes, in one execution of the job.

    If it is not known, ``joules`` is None and ``reason`` says why. ``is_sum_of_steps``: it is a sum
    over steps, several of which can have counted the same node.
    """

    job: str
    joules: float | None = None
    reason: str = ""
    is_sum_of_steps: bool = False


@dataclass(frozen=True)
class Scheduler:
    """What runs batch jobs, and the variables that it sets for them.

    ``job_id``, ``restart_count`` (how often it has started the job again) and ``end`` (in seconds
    since the epoch) name variables. ``read_array_task_id`` reads the id of one task of a job array,
    since ``job_id`` may stand for the whole array. ``memory_limits`` reads how many bytes of each
    node the job may use, with the names of the variables that say so; ``granted_cpus`` reads how
    many CPUs of this node it may use.

    The next functions take the id of the job. ``ask_end_s`` and ``is_preempted`` ask the scheduler,
    which may take many seconds. ``requeue_command`` returns the command that requeues the job,
    empty if that is impossible. ``ask_energy``, if the scheduler counts energy, takes starts of a
    run instead: (job, seconds since 1970). ``name`` is the scheduler's name in words.
    """

    job_id: str
    name: str = ""
    restart_count: str | None = None
    end: str | None = None
    read_array_task_id: Callable[[Environ], str | None] = _return_none
    memory_limits: Callable[[Environ], Iterable[tuple[int, str]]] = lambda environ: ()
    granted_cpus: Callable[[Environ], int | None] = _return_none
    ask_end_s: Callable[[str], float | None] = _return_none
    is_preempted: Callable[[str], bool] = _return_false
    requeue_command: Callable[[str], Sequence[str]] = lambda job_id: ()
    ask_energy: Callable[[Sequence[tuple[str, float]]], list[JobEnergy]] | None = None


def read_launch_info(
    environ: Environ, launcher: str, libmpi: str | None = None, **names: str
) -> LaunchInfo:
    """Return the information whose fields are in the variables ``names``.

    Raises:
        WorldError: if one is not a number, or the rank is not below the size.
    """
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
    return LaunchInfo(launcher, libmpi, **values)


# -- Ranks that have torch's own variables and nothing else, and a single process.
#
# deepspeed's launcher, a Kubernetes PyTorchJob and a loop over ssh start such ranks.


UNKNOWN_LAUNCHER = "an unknown launcher"
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SINGLE_INFO = LaunchInfo("single", rank=0, size=1, local_rank=0, local_size=1, node=0, num_nodes=1)


def _read_info_without_nodes(environ: Environ) -> LaunchInfo | None:
    """Return a rank and the world's size: launchers differ in the variables for nodes."""
    if "RANK" not in environ and environ.get("WORLD_SIZE", "") in ("", "1"):
        return None
    info = read_launch_info(environ, UNKNOWN_LAUNCHER, rank="RANK", size="WORLD_SIZE")
    if info.size == 1 and info.rank in (0, None):
        return None
    if missing := [name for name in TORCH_VARIABLES if not environ.get(name)]:
        assignments = ", ".join(
            f"{name}={environ[name]}" for name in TORCH_VARIABLES if environ.get(name)
        )
        raise WorldError(
            f"the environment has {assignments}, but not {', '.join(missing)}: a launcher sets "
            f"{', '.join(TORCH_VARIABLES)} for each rank. Set them, start with mpirun, srun or "
            "torchrun, or unset them all for a single process"
        )
    if not re.fullmatch(r"[0-9]{1,5}", environ["MASTER_PORT"]):
        raise WorldError(f"MASTER_PORT={environ['MASTER_PORT']!r} is not a port number")
    return info


def _find_rendezvous_endpoint(environ: Environ, info: LaunchInfo) -> RendezvousEndpoint:
    port = int(environ["MASTER_PORT"])
    # The token leaves out the address, which is often localhost for rank 0.
    return RendezvousEndpoint([environ["MASTER_ADDR"]], f"{info.size} ranks at {port}", [port])


TORCH_VARIABLES_LAUNCHER = Launcher(
    _read_info_without_nodes,
    variable_prefixes=TORCH_VARIABLES,
    rendezvous_endpoint=_find_rendezvous_endpoint,
)
SINGLE_PROCESS = Launcher(lambda environ: _SINGLE_INFO)


# -- What a scheduler's programs answer.


ANSWER_LIMIT_S = 15.0


def read_output(*command: str, limit_s: float = ANSWER_LIMIT_S, **variables: str) -> str:
    """Return what a program prints; empty if it is missing or does not answer within ``limit_s``.

    ``variables`` are set in its environment.
    """
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=limit_s,
            env={**os.environ, **variables},
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
