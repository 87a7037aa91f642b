"""Ends the world when a rank hangs in work that it does alone, such as reading from a dead disk.

The other ranks may have to wait for hours, since one rank may work that long.

A library that hangs while it holds the interpreter's lock (HDF5, safetensors) stops every other
Python thread. So the watch sets a timer of faulthandler, which ends the process with a traceback
when it is not reset in time.
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
# Reporting it may wait for the same disk.
_LEAVE_LIMIT_S = 6.0
_LOCKED_FACTOR = 2  # of the limit: a library that holds the lock may still be reading


class HangWatch:
    """Watches the main thread in ``over``; ``lost`` ends the world, and is called in a thread."""

    def __init__(self, limit_s: float, lost: Callable[[HpcTuneError], None]) -> None:
        """Treat as a hang that nothing has been computed or read for ``limit_s`` seconds."""
        self._limit_s, self._lost = limit_s, lost

    @contextlib.contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Watch the block, which does ``what``."""
        done, winding = threading.Event(), threading.Lock()
        self._reset_timer()
        arguments = (what, done, winding)
        threading.Thread(target=self._watch, args=arguments, name="hang", daemon=True).start()
        try:
            yield
        finally:
            with winding:
                done.set()
                faulthandler.cancel_dump_traceback_later()

    def _watch(self, what: str, done: threading.Event, winding: threading.Lock) -> None:
        every_s = min(_LOOK_EVERY_S, self._limit_s / 10)
        seen, still_s = progress(), 0.0  # no clock: a suspended job does not hang
        while not done.wait(every_s):
            with winding:
                if not done.is_set():
                    self._reset_timer()
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
                        "(run.timeout): check for a file system that hangs"
                    )
                )
                return

    def _reset_timer(self) -> None:
        limit_s = _LOCKED_FACTOR * self._limit_s
        faulthandler.dump_traceback_later(limit_s, exit=True, file=2)


def progress() -> tuple[float, ...]:
    """Return counters that grow while the main thread, or a child, computes or reads."""
    main = threading.main_thread().ident or 0  # None before a thread starts
    spent = time.clock_gettime_ns(time.pthread_getcpuclockid(main))
    return (spent, _read_bytes(), *(_cpu_s(pid) for pid in _children()))


def _read_bytes() -> int:
    """Return the bytes that this process has read from disks, mapped pages included."""
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
    """Return the CPU time of a process and of the children that it has waited for."""
    try:
        return sum(psutil.Process(pid).cpu_times()[:4])  # without waiting for disks
    except (psutil.Error, OSError):
        return 0
