"""What the ranks tell rank 0 of one save, through the rendezvous store.

    each other rank   its part is written, or has failed -> what it has written, or why not
    rank 0            hears of all                       -> commits, or gives up

These are messages of the threads that write: the main threads may be within a step that takes an
hour, and a part that is on the disk waits for none of them.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

from hpc_tune.errors import CheckpointError
from hpc_tune.model.regions import WrittenFile
from hpc_tune.world.comm import Comm

_POLL_S = 0.05
T = TypeVar("T")


@dataclass(frozen=True)
class SaveReport:
    """The files that a rank has written, or why it could not."""

    files: tuple[WrittenFile, ...] = ()
    error: str | None = None


class SaveReports:
    """The reports of one save; ``name`` is that save's own, in the whole life of the store."""

    def __init__(self, comm: Comm, name: str) -> None:
        """Know the ranks; nothing is sent yet."""
        self._comm, self._key = comm, f"hpc_tune/save/{name}"

    def send(self, report: SaveReport) -> None:
        """Tell rank 0 what another rank has done, once.

        Raises:
            CheckpointError: if rank 0 cannot be told.
        """
        store, rank = self._comm.store, self._comm.world.rank
        content = json.dumps([[asdict(file) for file in report.files], report.error])

        def tell() -> None:
            store.set(f"{self._key}/{rank}", content)
            store.add(self._key, 1)

        _with_store(tell, f"rank {rank} could not tell rank 0 that its part of a save is written")

    def collect(self, own: SaveReport, between: Callable[[], None]) -> list[SaveReport]:
        """Return the reports of all ranks, by rank, when all are there; for rank 0.

        ``between`` is called again and again while it waits, and may raise.

        Raises:
            CheckpointError: if the store is gone.
        """
        store, size = self._comm.store, self._comm.world.size
        lost = "rank 0 cannot learn whether the other ranks have written their parts of a save"
        while size > 1 and _with_store(lambda: store.add(self._key, 0), lost) < size - 1:
            between()
            time.sleep(_POLL_S)
        return [
            own,
            *(_with_store(partial(self._pop_report, rank), lost) for rank in range(1, size)),
        ]

    def _pop_report(self, rank: int) -> SaveReport:
        store, key = self._comm.store, f"{self._key}/{rank}"
        files, error = json.loads(store.get(key))
        store.delete_key(key)
        if rank == self._comm.world.size - 1:
            store.delete_key(self._key)
        return SaveReport(tuple(WrittenFile(**file) for file in files), error)


def _with_store(work: Callable[[], T], lost: str) -> T:
    try:
        return work()
    except RuntimeError as error:  # the store is gone with its rank
        raise CheckpointError(f"{lost}: {error}") from None
