"""Processes of this node by psutil: whether they are alive, since when, and this one's ancestors.

psutil is not used for memory: its total is the machine's, and a job may use what its cgroup grants
(memory/host.py).
"""

import contextlib
import os
from collections.abc import Iterator

import psutil

from hpc_tune.errors import raise_if_out_of_files


def is_alive(pid: int) -> bool:
    """Tell whether a process exists, may be inspected, and is no zombie."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False
    except OSError:  # such as too many open files, which says nothing of the process
        return _exists(pid)


def seconds_from_boot(pid: int) -> float | None:
    """Return when a process started, in seconds since the boot; None if it is not alive.

    psutil's create_time adds the time of the boot, which changes when the clock is set and is
    rounded to seconds: without it, one process has one start.
    """
    try:
        boot_s = psutil.boot_time()  # before the process: psutil below 7.1 adds the last one read
        return psutil.Process(pid).create_time() - boot_s if is_alive(pid) else None
    except psutil.Error:
        return None
    except OSError as error:
        raise_if_out_of_files(error)
        return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def ancestors() -> Iterator[tuple[int, str]]:
    """Yield (pid, name) of this process's parent, its parent and so on, as far as may be seen."""
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process()
        # Not psutil's parents(): where others' are hidden, it takes the lowest pid for the first.
        while pid := process.ppid():
            process = psutil.Process(pid)
            yield pid, process.name()
