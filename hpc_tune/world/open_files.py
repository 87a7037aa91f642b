"""The limit of open files, which connections between ranks count against."""

import contextlib
import resource

from hpc_tune.errors import ConfigError

# Gloo connects each rank of a group to each other: the group of all, the one for control traffic,
# and those of the layout, which add up to another. Rank 0 also has the store's connections. The
# rest is for files, libraries and data.
BASE_FILES, FILES_PER_RANK = 256, 4
MIN_FILES = 64  # with fewer a run of one or two ranks of the smallest model cannot begin
SPARE_FILES = 16  # what tells why a run fails can be opened when nothing else can

_REMEDY = "ulimit -Hn {} before the launcher, or LimitNOFILE of the scheduler's daemon on the nodes"


def files_needed(num_ranks: int) -> int:
    """Return how many files a rank opens in a world of that size (pure)."""
    return BASE_FILES + FILES_PER_RANK * num_ranks


def read_file_limit() -> int | None:
    """Return how many files this process may open, those kept back included; ``None``: any."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    return hard if soft == hard - SPARE_FILES else soft


def raise_file_limit() -> int | None:
    """Raise this process's soft limit to the hard one but for SPARE_FILES; return the hard one.

    ``None`` without a limit.

    Sites leave it at 1,024 for programs that call select(), which nothing here does with the
    numbers of sockets between ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_finite = hard != resource.RLIM_INFINITY
    wanted = hard - SPARE_FILES if is_finite and hard >= MIN_FILES + SPARE_FILES else hard
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # no limit may be above fs.nr_open
        return None if soft == resource.RLIM_INFINITY else soft
    return hard if is_finite else None


def release_spare_files() -> None:
    """Let this process open the files that ``raise_file_limit`` has kept back: it is about to end."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def require_min_files(limit: int | None) -> None:
    """Refuse a limit with which a rank would fail somewhere, of whatever library.

    Raises:
        ConfigError: if it is below MIN_FILES.
    """
    if limit is not None and limit < MIN_FILES:
        raise ConfigError(
            f"a rank may open {limit} files, expected at least {MIN_FILES}, and the hard limit "
            f"allows no more: {_REMEDY.format(4096)}"
        )


def file_shortage_warning(limit: int | None, num_ranks: int) -> str | None:
    """Return a warning if a rank may open too few files (pure)."""
    if limit is None or limit >= files_needed(num_ranks):
        return None
    return (
        f"a rank may open {limit} files, {num_ranks} ranks need about {files_needed(num_ranks)} "
        f"({FILES_PER_RANK} connections to each other rank, {BASE_FILES} for the rest), and the "
        f"hard limit allows no more: {_REMEDY.format(max(files_needed(num_ranks), 4096))}"
    )
