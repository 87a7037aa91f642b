"""Finds ranks whose process is stopped, or hangs outside of Python, whatever the ranks do.

    rank 0      calls by a number in the store, again and again
    every rank  a thread answers with that number

    an answer is missing for too long    -> rank 0 ends the world and names who is silent
    the store does not answer for that   -> the others do, and name rank 0

In training ``step_limit`` asks sooner, and knows who is late. Before it a rank may work alone for
hours while the others wait, and only its threads tell that it lives.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hpc_tune.errors import HpcTuneError, StalledError
from hpc_tune.world.comm import Comm

if TYPE_CHECKING:
    from torch.distributed import Store

_KEY = "hpc_tune/roll"
_LOOK_EVERY_S = 5.0
_LOOKS = 20  # within a limit that is short
_FACTOR = 2  # of run.timeout: a library that holds the interpreter's lock may still be reading


class RollCall:
    """Calls the ranks of ``comm`` in ``over``; ``lost`` ends the world, and is called in a thread.

    It counts looks and reads no clock: a job that is suspended as a whole does not hang.
    """

    def __init__(self, comm: Comm, limit_s: float, lost: Callable[[HpcTuneError], None]) -> None:
        """Treat as stopped who does not answer for twice ``limit_s``, in seconds."""
        self._comm, self._limit_s, self._lost = comm, _FACTOR * limit_s, lost
        self._every_s = min(_LOOK_EVERY_S, limit_s / _LOOKS)
        self._over = threading.Event()
        self._looks_in_vain = 0

    @contextlib.contextmanager
    def over(self) -> Iterator[None]:
        """Call and answer during the block."""
        works = [self._answer, self._call if self._comm.is_rank_0 else self._watch]
        if self._comm.world.size > 1:
            for work in works:
                threading.Thread(target=self._guard, args=(work,), daemon=True).start()
        try:
            yield
        finally:
            self._over.set()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except RuntimeError:  # the store is gone with its rank
            self._over.set()

    def _answer(self) -> None:
        store, own = self._comm.store, f"{_KEY}/{self._comm.world.rank}"
        said = 0
        while not self._over.wait(self._every_s):
            number = store.add(_KEY, 0)
            self._looks_in_vain = 0
            if number > said:
                store.set(own, str(number))
                said = number

    def _call(self) -> None:
        """Call all ranks until one does not answer; for rank 0."""
        store, number = self._comm.store, 0
        while not self._over.is_set():
            number = store.add(_KEY, 1)
            silent = list(range(1, self._comm.world.size))
            for _ in range(round(self._limit_s / self._every_s)):
                if self._over.wait(self._every_s):
                    return
                silent = [rank for rank in silent if _answer_of(store, rank) < number]
                if not silent:
                    break
            if silent:
                self._end(silent)
                return
            if self._over.wait(self._limit_s / 4):
                return

    def _watch(self) -> None:
        """Wait for the store, which rank 0 holds, to answer no more."""
        while not self._over.wait(self._every_s):
            self._looks_in_vain += 1
            if self._looks_in_vain * self._every_s > self._limit_s:
                self._end([0])
                return

    def _end(self, silent: list[int]) -> None:
        peers = [self._comm.roster[rank] for rank in silent]
        said = [f"rank {peer.rank} (pid {peer.pid} on {peer.hostname})" for peer in peers[:4]]
        if len(peers) > len(said):
            said.append(f"{len(peers) - len(said)} more")
        verb = "does" if len(peers) == 1 else "do"
        if not self._over.is_set():
            self._lost(
                StalledError(
                    f"{', '.join(said)} {verb} not answer while {self._comm.doing[0]}, for "
                    f"{self._limit_s:.0f} s ({_FACTOR} x run.timeout): a process is stopped, or "
                    "hangs outside of Python",
                    {"late_ranks": silent},
                )
            )


def _answer_of(store: "Store", rank: int) -> int:
    key = f"{_KEY}/{rank}"
    return int(store.get(key)) if store.check([key]) else 0
