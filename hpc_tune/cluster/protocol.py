"""What this project has to know of a launcher and of a scheduler; each has a file that says it.

    environment -> Launcher.claim -> Claim, if this launcher has started the process
    environment -> Scheduler.job_id -> the id of the job, if this scheduler runs it

A ``Launcher`` or ``Scheduler`` leaves out what there is nothing to say of.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpc_tune.errors import WorldError

Environ = Mapping[str, str]
# The two families of MPI libraries, by the file that a program loads.
LIBMPI_OF_OPEN_MPI, LIBMPI_OF_MPICH = "libmpi.so.40", "libmpi.so.12"


@dataclass(frozen=True)
class Claim:
    """What the launcher's variables say; ``None`` where they are silent.

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
    def speaks_mpi(self) -> bool:
        """Whether the ranks find each other through MPI."""
        return self.libmpi is not None


@dataclass(frozen=True)
class MeetingPoint:
    """Where ranks without MPI connect to rank 0; ``token`` is what only ranks of this job know.

    Without ``ports`` they follow from the token.
    """

    addresses: Sequence[str]
    token: str
    ports: Sequence[int] | None = None


def _never(asked: str) -> bool:
    return False


def _unknown(asked: object) -> None:
    return None


@dataclass(frozen=True)
class Launcher:
    """What starts the ranks, and what it tells them.

    ``claim`` is pure and returns ``None`` unless this launcher has started the process.
    ``prefixes`` are how the names of its variables begin, ``processes`` how those of its own
    processes on a compute node do.

    MPI: ``library_folder`` is the variable with the folder of its MPI library. ``cannot_start``
    tells by the name that a library gives itself whether it would end the rank within MPI_Init.
    ``advice`` is for ranks that have loaded another MPI.

    Without MPI: ``has_store`` says that it runs a store for torch.distributed. ``meeting_point`` is
    where its ranks connect otherwise; ``claim_without_mpi`` is its claim where mpi4py is missing.
    """

    claim: Callable[[Environ], Claim | None]
    prefixes: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    library_folder: str | None = None
    cannot_start: Callable[[str], bool] = _never
    advice: str = ""
    has_store: bool = False
    meeting_point: Callable[[Environ, Claim], MeetingPoint] | None = None
    claim_without_mpi: Callable[[Environ], Claim] | None = None


@dataclass(frozen=True)
class Scheduler:
    """What runs batch jobs, and what it tells them.

    ``job_id``, ``restart_count`` (how often it has started the job again) and ``end`` (in seconds
    since the epoch) are the names of variables.

    From the environment: ``memory_limits`` gives the bytes that each node grants the job, with the
    variables that say so; ``granted_cpus`` the number of CPUs of this node.

    By the id of the job: ``ask_end`` and ``is_preempted`` ask the scheduler, which may take long;
    ``requeue_command`` puts the job back into the queue, and is empty where nothing can.
    """

    job_id: str
    restart_count: str | None = None
    end: str | None = None
    memory_limits: Callable[[Environ], Iterable[tuple[int, str]]] = lambda environ: ()
    granted_cpus: Callable[[Environ], int | None] = _unknown
    ask_end: Callable[[str], float | None] = _unknown
    is_preempted: Callable[[str], bool] = _never
    requeue_command: Callable[[str], Sequence[str]] = lambda job_id: ()


def read_claim(environ: Environ, launcher: str, libmpi: str | None = None, **names: str) -> Claim:
    """Return the claim whose fields are in the variables ``names``.

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
    return Claim(launcher, libmpi, **values)
