"""Ends the world when what a rank does alone stands still, such as reading from a disk that hangs.

The other ranks wait for it where waiting may take hours, since one rank may work that long.

A library that hangs with the interpreter's lock in its hands (HDF5, safetensors) stops every other
thread of Python. So the watch winds up a timer of the C library's, which ends the process, with the
place in its output, when it is not wound up again.
"""

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from hpc_tune.errors import EXIT_FAILED, HpcTuneError, WorldError

_LOOK_EVERY_S = 1.0
# What is said and written of it may wait for the same disk.
_LEAVE_LIMIT_S = 6.0
_LOCKED_FACTOR = 2  # of the limit: who holds the lock may be reading all the while


class HangWatch:
    """Watches the main thread in ``over``; ``lost`` ends the world, and is called in a thread."""

    def __init__(self, limit_s: float, lost: Callable[[HpcTuneError], None]) -> None:
        """Call it a hang when nothing has been computed or read for ``limit_s`` seconds."""
        self._limit_s, self._lost = limit_s, lost

    @contextlib.contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Watch the block, which does ``what``."""
        done, winding = threading.Event(), threading.Lock()
        words = (what, done, winding)
        self._wind()
        threading.Thread(target=self._watch, args=words, name="hang", daemon=True).start()
        try:
            yield
        finally:
            with winding:
                done.set()
                faulthandler.cancel_dump_traceback_later()

    def _watch(self, what: str, done: threading.Event, winding: threading.Lock) -> None:
        every_s = min(_LOOK_EVERY_S, self._limit_s / 10)
        seen, still_s = progress(), 0.0  # no clock: a job that is stopped as a whole does not hang
        while not done.wait(every_s):
            with winding:
                if not done.is_set():
                    self._wind()
            now = progress()
            still_s = still_s + every_s if now == seen else 0.0
            seen = now
            if still_s > self._limit_s:
                faulthandler.cancel_dump_traceback_later()
                limit = threading.Timer(_LEAVE_LIMIT_S, os._exit, [EXIT_FAILED])
                limit.daemon = True
                limit.start()
                self._lost(
                    WorldError(
                        f"{what}: nothing was read or computed for {self._limit_s:.0f} s "
                        "(run.timeout): look for a file system that hangs"
                    )
                )
                return

    def _wind(self) -> None:
        limit_s = _LOCKED_FACTOR * self._limit_s
        faulthandler.dump_traceback_later(limit_s, exit=True, file=2)


def progress() -> tuple[float, ...]:
    """Return what grows while the main thread computes or reads, or waits for a child that does."""
    main = threading.main_thread().ident or 0  # None before a thread starts
    spent = time.clock_gettime_ns(time.pthread_getcpuclockid(main))
    return (spent, _read_bytes(), *(_cpu_s(pid) for pid in _children()))


def _read_bytes() -> int:
    """Return what this process has had read from disks; pages that are mapped count too."""
    # Where a kernel does not count it, psutil has no such method.
    with contextlib.suppress(psutil.Error, OSError, ValueError, AttributeError):
        return psutil.Process().io_counters().read_bytes
    return 0


def _children() -> list[int]:
    # Once a second: psutil's children() would look at every process of the node.
    try:
        return [*map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())]
    except (OSError, ValueError):
        return []


def _cpu_s(pid: int) -> float:
    """Return the time that a process and those that it has waited for have computed."""
    try:
        return sum(psutil.Process(pid).cpu_times()[:4])  # without waiting for disks
    except (psutil.Error, OSError):
        return 0
