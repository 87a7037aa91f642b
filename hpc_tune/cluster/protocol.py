"""What this project has to know of a launcher: each file of this package gives it as one value.

environment -> Launcher.claim -> Claim, if this launcher has started the process
"""

import re
from collections.abc import Callable, Mapping, Sequence
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


def _never(library: str) -> bool:
    return False


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
