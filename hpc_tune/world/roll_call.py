"""Finds ranks whose process is stopped, or hangs outside of Python, whatever the ranks do.

    rank 0      calls by a number in the store, again and again
    every rank  a thread answers with that number

    an answer is missing for too long    -> rank 0 ends the world and names who is silent
    the store does not answer for that   -> the others do, and name rank 0

In training ``step_limit`` asks sooner, and knows who is late. Before it a rank may work alone for
hours while the others wait, and only its threads tell that it lives.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from hpc_tune.errors import HpcTuneError, StalledError
from hpc_tune.world import liveness
from hpc_tune.world.comm import Comm

if TYPE_CHECKING:
    from torch.distributed import Store

_ROLL_KEY = "hpc_tune/roll"


class RollCall:
    """Calls the ranks of ``comm`` in ``over``; ``lost`` ends the world, in a thread."""

    def __init__(self, comm: Comm, limit_s: float, lost: Callable[[HpcTuneError], None]) -> None:
        """Treat as stopped who does not answer for twice ``limit_s``, in seconds."""
        self._comm, self._limit_s, self._end_world = comm, liveness.GIL_FACTOR * limit_s, lost
        self._every_s = every_s = min(liveness.STEP_LOOK_EVERY_S, limit_s / liveness.STEP_NUM_LOOKS)
        self._num_store_answers = self._last_answer = 0
        # The others wait for the store to answer no more.
        ends_if_silent = liveness.make_stall_check(
            lambda: self._num_store_answers,
            self._limit_s,
            every_s,
            partial(self._end, [comm.store_rank]),
        )
        has_store = comm.world.rank == comm.store_rank
        look = partial(self._stop_if_store_gone, self._call) if has_store else ends_if_silent
        self._watcher = liveness.Watcher(
            "roll-call", every_s, partial(self._stop_if_store_gone, self._answer), look
        )

    def over(self) -> AbstractContextManager[None]:
        """Call and answer during the block."""
        return self._watcher.over() if self._comm.world.size > 1 else nullcontext()

    def _stop_if_store_gone(self, look: Callable[[], bool]) -> bool:
        try:
            return look()
        except RuntimeError:  # the store is gone with its rank
            self._watcher.close()
            return True

    def _answer(self) -> bool:
        number = self._comm.store.add(_ROLL_KEY, 0)
        self._num_store_answers += 1
        if number > self._last_answer:
            self._comm.store.set(f"{_ROLL_KEY}/{self._comm.world.rank}", str(number))
            self._last_answer = number
        return False

    def _call(self) -> bool:
        """Call all ranks, and end the world if one does not answer; for the one
        that has the store.
        """
        store, own = self._comm.store, self._comm.world.rank
        number = store.add(_ROLL_KEY, 1)
        silent = [rank for rank in range(self._comm.world.size) if rank != own]
        for _ in range(round(self._limit_s / self._every_s)):
            if self._watcher.wait(self._every_s):
                return True
            silent = [rank for rank in silent if _read_answer(store, rank) < number]
            if not silent:
                return self._watcher.wait(self._limit_s / 4 - self._every_s)
        self._end(silent)
        return True

    def _end(self, silent: list[int]) -> None:
        peers = [self._comm.roster[rank] for rank in silent]
        said = [f"rank {peer.rank} (pid {peer.pid} on {peer.hostname})" for peer in peers[:4]]
        if len(peers) > len(said):
            said.append(f"{len(peers) - len(said)} more")
        verb = "does" if len(peers) == 1 else "do"
        if not self._watcher.is_over:
            self._end_world(
                StalledError(
                    f"{', '.join(said)} {verb} not answer while {self._comm.activity[0]}, for "
                    f"{self._limit_s:.0f} s ({liveness.GIL_FACTOR} x run.timeout): a process is "
                    "stopped, or hangs outside of Python",
                    {"late_ranks": silent},
                )
            )


def _read_answer(store: "Store", rank: int) -> int:
    key = f"{_ROLL_KEY}/{rank}"
    return int(store.get(key)) if store.check([key]) else 0
