"""Ends the world when what a rank does alone stands still, such as reading from a disk that hangs.

The other ranks wait for it where waiting may take hours, since one rank may work that long.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpc_tune.errors import EXIT_FAILED, HpcTuneError, WorldError

_LOOK_EVERY_S = 1.0
# What is said and written of it may wait for the same disk.
_LEAVE_LIMIT_S = 6.0


class HangWatch:
    """Watches the main thread in ``over``; ``lost`` ends the world, and is called in a thread."""

    def __init__(self, limit_s: float, lost: Callable[[HpcTuneError], None]) -> None:
        """Call it a hang when nothing has been computed or read for ``limit_s`` seconds."""
        self._limit_s, self._lost = limit_s, lost

    @contextlib.contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Watch the block, which does ``what``."""
        done = threading.Event()
        watch = threading.Thread(target=self._watch, args=(what, done), name="hang", daemon=True)
        watch.start()
        try:
            yield
        finally:
            done.set()

    def _watch(self, what: str, done: threading.Event) -> None:
        every_s = min(_LOOK_EVERY_S, self._limit_s / 10)
        seen, still_s = progress(), 0.0  # no clock: a job that is stopped as a whole does not hang
        while not done.wait(every_s):
            now = progress()
            still_s = still_s + every_s if now == seen else 0.0
            seen = now
            if still_s > self._limit_s:
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


def progress() -> tuple[int, ...]:
    """Return what grows while the main thread computes or reads, or waits for a child that does."""
    main = threading.main_thread().ident
    assert main is not None
    spent = time.clock_gettime_ns(time.pthread_getcpuclockid(main))
    return (spent, _read_bytes(), *(_ticks(pid) for pid in _children()))


def _read_bytes() -> int:
    """Return what this process has had read from disks; pages that are mapped count too."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                return int(line.split()[1])
    return 0


def _children() -> list[int]:
    try:
        return [*map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())]
    except (OSError, ValueError):
        return []


def _ticks(pid: int) -> int:
    """Return the time that a process and those that it has waited for have computed."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return sum(map(int, stat[stat.rindex(")") + 2 :].split()[11:15]))
    except (OSError, ValueError):
        return 0
