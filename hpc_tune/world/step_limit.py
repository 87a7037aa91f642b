"""Ends the world when training stands still for run.timeout, and names the rank that is late.

    each rank            a thread looks every few seconds whether the main thread moves
    one that stood still asks all through the store where they are -> names who has not come
    each rank            another thread answers, and keeps what its collectives did last

torch's limit on a collective of NCCL (``nccl_errors``) counts while a job is suspended, and has no
word about the rank that is missing. So the groups' own limit is ``STEP_MARGIN_S`` later.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from hpc_tune.errors import HpcTuneError, StalledError
from hpc_tune.world import liveness
from hpc_tune.world.comm import Comm, Peer
from hpc_tune.world.failure import find_dead_peers

_STALL_KEY = "hpc_tune/stalled"
_COLLECTIVES_PATH = f"{os.sep}torch{os.sep}distributed{os.sep}"
_PACKAGE_PATH = f"{Path(__file__).parents[1]}{os.sep}"


@dataclass(frozen=True)
class RankProgress:
    """Where a rank is: how many parts of training it has entered, the newest, a line of code.

    ``waits``: it is in a collective.
    """

    entered: int
    activity: str
    line: str
    waits: bool


class StepLimit:
    """Watches the main thread in ``over``; ``lost`` ends the world, and is called in a thread."""

    def __init__(
        self,
        comm: Comm,
        limit_s: float,
        lost: Callable[[HpcTuneError], None],
        keep_trace: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Stand still for ``limit_s`` at most. ``keep_trace`` writes a file and returns its folder,
        if there is anything to write.
        """
        self._comm, self._limit_s, self._end_world = comm, limit_s, lost
        self._keep_trace = keep_trace
        self._every_s = every_s = min(liveness.STEP_LOOK_EVERY_S, limit_s / liveness.STEP_NUM_LOOKS)
        ends_if_still = liveness.make_stall_check(self._stall_sign, limit_s, every_s, self._end)
        self._watcher = liveness.Watcher("step-limit", every_s, ends_if_still, self._answer)
        self._num_entered, self._activity = 0, "the first step"
        self._send_lock = threading.Lock()
        self._has_sent = False
        self._trace: str | None = None

    def enter(self, doing: str) -> None:
        """Begin a part of training, which all ranks begin in the same order."""
        self._num_entered, self._activity = self._num_entered + 1, doing
        self._comm.begin(doing)

    def over(self) -> contextlib.AbstractContextManager[None]:
        """Watch the block, which all ranks are in; a rank by itself waits for nobody."""
        return self._watcher.over() if self._comm.world.size > 1 else contextlib.nullcontext()

    def _stall_sign(self) -> tuple[object, ...]:
        """Return what changes while the main thread does anything but wait in one place."""
        frame = _main_frame()
        place = (self._num_entered, id(frame), frame.f_lasti if frame is not None else 0)
        if self._comm.device.type != "cpu":
            return place  # it spins while it waits for a GPU
        main = threading.main_thread().ident or 0
        return *place, time.clock_gettime_ns(time.pthread_getcpuclockid(main))

    def _end(self, wait_s: float | None = None) -> None:
        wait_s = 2 * (3 * self._every_s + liveness.LEAVE_LIMIT_S) if wait_s is None else wait_s
        own = self._comm.world.rank
        places = {own: self._own_progress()}
        # The store may be behind a cut network.
        asking = threading.Thread(target=self._gather_progress, args=(places,), daemon=True)
        asking.start()
        asking.join(wait_s)
        liveness.exit_soon()
        if not self._watcher.is_over:
            gone = {peer.rank for peer in find_dead_peers(self._comm)}
            roster, doing = self._comm.roster, self._activity
            first = self._comm.store_rank
            if own != first and asking.is_alive():  # the others may well answer
                places |= {peer.rank: places[own] for peer in roster if peer.rank != first}
            self._end_world(stalled_error(places, roster, doing, self._limit_s, gone, self._trace))

    def _gather_progress(self, places: dict[int, RankProgress]) -> None:
        """Fill ``places`` with those of the ranks that answer, and let them keep their traces."""
        store, left = self._comm.store, set(range(self._comm.world.size))
        until_s = time.monotonic() + 2 * self._every_s + 1.0
        with contextlib.suppress(RuntimeError):
            store.set(_STALL_KEY, "")
            self._tell()
            while left and time.monotonic() < until_s:
                for rank in sorted(left):
                    if store.check([f"{_STALL_KEY}/{rank}"]):
                        place, has_trace = json.loads(store.get(f"{_STALL_KEY}/{rank}"))
                        places[rank] = RankProgress(**place)
                        left -= {rank} if has_trace else set()
                time.sleep(0.1)

    def _answer(self) -> bool:
        try:
            if not self._comm.store.check([_STALL_KEY]):
                return False
            self._tell()
        except RuntimeError:  # the store is gone with its rank
            pass
        return True

    def _tell(self) -> None:
        """Tell once where this rank is, and again when its trace is there: that may take longer."""
        with self._send_lock:
            if not self._has_sent:
                self._has_sent = True
                key, place = f"{_STALL_KEY}/{self._comm.world.rank}", asdict(self._own_progress())
                self._comm.store.set(key, json.dumps([place, False]))
                self._trace = self._keep_trace()
                self._comm.store.set(key, json.dumps([place, True]))

    def _own_progress(self) -> RankProgress:
        frame, line, waits = _main_frame(), "", False
        while frame is not None and not line:
            code = frame.f_code
            if code.co_filename.startswith(_PACKAGE_PATH):
                file = code.co_filename.removeprefix(_PACKAGE_PATH)
                line = f"hpc_tune/{file}:{frame.f_lineno} in {code.co_name}"
            waits = waits or _COLLECTIVES_PATH in code.co_filename
            frame = frame.f_back
        return RankProgress(self._num_entered, self._activity, line, waits)


def find_late_ranks(places: Mapping[int, RankProgress], size: int) -> list[int]:
    """Return the ranks that the others wait for; none where all wait in the same place.

    Those that do not answer, or else those that are behind, or else those in no collective.
    """
    if missing := [rank for rank in range(size) if rank not in places]:
        return missing
    most = max(place.entered for place in places.values())
    if behind := [rank for rank in range(size) if places[rank].entered < most]:
        return behind
    busy = [rank for rank in range(size) if not places[rank].waits]
    return busy if len(busy) < size else []


def stalled_error(
    places: Mapping[int, RankProgress],
    roster: Sequence[Peer],
    doing: str,
    limit_s: float,
    gone: set[int],
    trace: str | None,
) -> StalledError:
    """Return the error that names who is late, of what all answered to a rank at ``doing``.

    ``gone``: processes that are known to have ended. ``trace``: where the ranks' collectives are.
    """
    late = find_late_ranks(places, len(roster))
    said = [_describe_late_rank(roster[rank], places.get(rank), rank in gone) for rank in late[:4]]
    if len(late) > len(said):
        said.append(f"and {len(late) - len(said)} more")
    if not late:
        lines = sorted({place.line for place in places.values()})
        said = [f"all ranks are at {', '.join(lines)}: look at the network and the devices"]
    words = f"{doing}: no progress for {limit_s:.0f} s (run.timeout): {'; '.join(said)}"
    facts: dict[str, object] = {"during": doing, "late_ranks": late}
    if trace is not None:
        words += f". The last collectives of each rank are in {trace}, for torchfrtrace"
        facts["trace"] = trace
    return StalledError(words, facts)


def _describe_late_rank(peer: Peer, place: RankProgress | None, is_gone: bool) -> str:
    who = f"rank {peer.rank} (pid {peer.pid} on {peer.hostname})"
    if is_gone:
        return f"{who} is gone"
    if place is None:
        return f"{who} does not answer: its process is stopped, or hangs outside of Python"
    return f"{who} has not arrived: it is at {place.activity}, {place.line}"


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)
