"""The limit of open files, which connections between ranks count against."""

import contextlib
import resource

# Gloo connects each rank of a group to each other: the group of all, the one for control traffic,
# and those of the layout, which add up to another. Rank 0 also has the store's connections. The
# rest is for files, libraries and data.
FILES, FILES_PER_RANK = 256, 4


def needed(num_ranks: int) -> int:
    """Return how many files a rank opens in a world of that size (pure)."""
    return FILES + FILES_PER_RANK * num_ranks


def raise_limit() -> int | None:
    """Raise this process's soft limit to the hard one; return it, ``None`` without a limit.

    Sites leave it at 1,024 for programs that call select(), which nothing here does with the
    numbers of sockets between ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # no limit may be above fs.nr_open
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return None if soft == resource.RLIM_INFINITY else soft


def shortage(limit: int | None, num_ranks: int) -> str | None:
    """Return a warning if a rank may open too few files (pure)."""
    if limit is None or limit >= needed(num_ranks):
        return None
    return (
        f"a rank may open {limit} files, {num_ranks} ranks need about {needed(num_ranks)} "
        f"({FILES_PER_RANK} connections to each other rank, {FILES} for the rest), and the hard "
        f"limit allows no more: ulimit -Hn {max(needed(num_ranks), 4096)} before the launcher, or "
        "LimitNOFILE of the scheduler's daemon on the nodes"
    )
