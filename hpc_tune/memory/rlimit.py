"""A limit on this process's private memory that follows how much memory is free.

The kernel kills a process that exceeds its cgroup's limit, and no sampling is fast enough for a
tensor that is filled at memory speed. An allocation beyond RLIMIT_DATA fails instead (since
Linux 4.7 the limit counts private anonymous mappings too), which is an error that can be handled.
"""

import contextlib
import resource


class PrivateMemoryLimit:
    """Sets the soft limit of RLIMIT_DATA; ``lift`` restores the one from before."""

    def __init__(self) -> None:
        """Remember the current limit."""
        self._before = resource.getrlimit(resource.RLIMIT_DATA)

    def set(self, mapped: int, free: int) -> None:
        """Let this process, which has mapped ``mapped`` bytes, map ``free`` bytes more."""
        soft, hard = mapped + max(0, free), self._before[1]
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def lift(self) -> None:
        """Restore the limit from before."""
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, self._before)
