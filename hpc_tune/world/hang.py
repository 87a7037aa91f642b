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
from functools import partial
from pathlib import Path

import psutil

from hpc_tune.errors import HpcTuneError, WorldError
from hpc_tune.world import liveness


class HangWatch:
    """Watches the main thread in ``over``; ``lost`` ends the world, and is called in a thread."""

    def __init__(self, limit_s: float, lost: Callable[[HpcTuneError], None]) -> None:
        """Treat as a hang that nothing has been computed or read for ``limit_s`` seconds."""
        self._limit_s, self._end_world = limit_s, lost

    @contextlib.contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Watch the block, which does ``what``."""
        every_s = min(liveness.HANG_LOOK_EVERY_S, self._limit_s / liveness.HANG_NUM_LOOKS)
        ends_if_still = liveness.make_stall_check(
            read_progress, self._limit_s, every_s, partial(self._end, what)
        )

        def look() -> bool:
            watcher.run_unless_over(self._reset_timer)
            return ends_if_still()

        watcher = liveness.Watcher("hang", every_s, look)
        self._reset_timer()
        try:
            with watcher.over():
                yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _end(self, what: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        liveness.exit_soon()  # reporting it may wait for the same disk
        self._end_world(
            WorldError(
                f"{what}: nothing was read or computed for {self._limit_s:.0f} s "
                "(run.timeout): check for a file system that hangs"
            )
        )

    def _reset_timer(self) -> None:
        limit_s = liveness.GIL_FACTOR * self._limit_s
        faulthandler.dump_traceback_later(limit_s, exit=True, file=2)


def read_progress() -> tuple[float, ...]:
    """Return counters that grow while the main thread, or a child, computes or reads."""
    main = threading.main_thread().ident or 0  # None before a thread starts
    spent = time.clock_gettime_ns(time.pthread_getcpuclockid(main))
    return (spent, _read_bytes(), *(_cpu_s(pid) for pid in _child_pids()))


def _read_bytes() -> int:
    """Return the bytes that this process has read from disks, mapped pages included."""
    # Where a kernel does not count it, psutil has no such method.
    with contextlib.suppress(psutil.Error, OSError, ValueError, AttributeError):
        return psutil.Process().io_counters().read_bytes
    return 0


def _child_pids() -> list[int]:
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
