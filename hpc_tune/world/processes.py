"""Processes of this node, from psutil: whether they are alive, since when, this one's ancestors.

psutil is not used for memory: its total is the machine's, but a job may use only what its cgroup
grants (memory/host.py).
"""

import contextlib
import os
import resource
from collections.abc import Iterator

import psutil

from hpc_tune.errors import ConfigError
from hpc_tune.files import raise_if_too_many_open_files


def is_alive(pid: int) -> bool:
    """Tell whether a process exists, may be inspected, and is not a zombie."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False
    except OSError:  # such as too many open files, which says nothing about the process
        return _exists(pid)


def process_start_after_boot_s(pid: int) -> float | None:
    """Return when a process started, in seconds since the boot; None if it is not alive.

    psutil's create_time adds the boot time, which changes when the clock is set and is rounded to
    seconds; without it, a process has the same start time whenever it is read.
    """
    try:
        boot_s = psutil.boot_time()  # read first: psutil below 7.1 adds the last value read
        return psutil.Process(pid).create_time() - boot_s if is_alive(pid) else None
    except psutil.Error:
        return None
    except OSError as error:
        raise_if_too_many_open_files(error)
        return None


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def list_ancestors() -> Iterator[tuple[int, str]]:
    """Yield (pid, name) of this process's parent, its parent and so on, as far as visible."""
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process()
        # Not psutil's parents(): if other users' processes are hidden, it stops at the lowest pid.
        while pid := process.ppid():
            process = psutil.Process(pid)
            yield pid, process.name()


# -- The limit of open files, which connections between ranks count against.


# Gloo connects each rank of a group to every other: in the group of all ranks, the control group,
# and the layout's groups, which add up to one more. Rank 0 also has the store's connections. The
# rest is for files, libraries and data.
BASE_FILES, FILES_PER_RANK = 256, 4
MIN_FILES = 64  # with fewer, the smallest model cannot start on one or two ranks
SPARE_FILES = 16  # kept back to report why a run fails when no other file can be opened

_LIMIT_REMEDY = (
    "ulimit -Hn {} before the launcher, or LimitNOFILE of the scheduler's daemon on the nodes"
)


def files_needed(num_ranks: int) -> int:
    """Return how many files a rank opens in a world of that size (pure)."""
    return BASE_FILES + FILES_PER_RANK * num_ranks


def read_file_limit() -> int | None:
    """Return how many files this process may open, spare files included; ``None``: no limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    return hard if soft == hard - SPARE_FILES else soft


def raise_file_limit() -> int | None:
    """Raise the soft limit of open files to SPARE_FILES below the hard one; return the hard one.

    Returns ``None`` without a limit, and the old soft limit if it cannot be raised.

    Sites leave the soft limit at 1,024 for programs that call select(), which nothing here does
    with the numbers of sockets between ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_finite = hard != resource.RLIM_INFINITY
    new_soft = hard - SPARE_FILES if is_finite and hard >= MIN_FILES + SPARE_FILES else hard
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_soft, hard))
    except (OSError, ValueError):  # no limit may be above fs.nr_open
        return None if soft == resource.RLIM_INFINITY else soft
    return hard if is_finite else None


def release_spare_files() -> None:
    """Let this process, which is about to end, open what ``raise_file_limit`` kept back."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require_min_files(limit: int | None) -> None:
    """Refuse a limit so low that a rank would fail at some point, in whatever library.

    Raises:
        ConfigError: if it is below MIN_FILES.
    """
    if limit is not None and limit < MIN_FILES:
        raise ConfigError(
            f"a rank may open {limit} files, expected at least {MIN_FILES}, and the hard limit "
            f"allows no more: {_LIMIT_REMEDY.format(4096)}"
        )


def file_shortage_warning(limit: int | None, num_ranks: int) -> str | None:
    """Return a warning if a rank may open too few files (pure)."""
    if limit is None or limit >= files_needed(num_ranks):
        return None
    return (
        f"a rank may open {limit} files, {num_ranks} ranks need about {files_needed(num_ranks)} "
        f"({FILES_PER_RANK} connections to each other rank, {BASE_FILES} for the rest), and the "
        f"hard limit allows no more: {_LIMIT_REMEDY.format(max(files_needed(num_ranks), 4096))}"
    )
