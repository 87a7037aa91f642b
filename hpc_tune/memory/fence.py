"""A bound on this process's private memory that moves with the room that is left.

The kernel ends a process that touches one page too many, and no sampling is quick enough for a
tensor that is filled at memory speed. An allocation that goes beyond RLIMIT_DATA fails instead
(since Linux 4.7 the limit counts private anonymous mappings too), which is an error that can be
told and acted on.
"""

import contextlib
import resource


class Fence:
    """Sets the soft limit of RLIMIT_DATA; ``lift`` gives back the one that was."""

    def __init__(self) -> None:
        """Remember the limit as it is."""
        self._before = resource.getrlimit(resource.RLIMIT_DATA)

    def set(self, mapped: int, room: int) -> None:
        """Let this process, which has ``mapped`` bytes, map ``room`` more, and no more."""
        soft, hard = mapped + max(0, room), self._before[1]
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def lift(self) -> None:
        """Give back the limit that was before."""
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, self._before)
