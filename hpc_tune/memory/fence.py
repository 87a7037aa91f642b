"""A bound on this process's private memory that moves with the room that is left.

The kernel ends a process that touches one page too many, and no sampling is quick enough for a
tensor that is filled at memory speed. An allocation that goes beyond RLIMIT_DATA fails instead
(since Linux 4.7 the limit counts private anonymous mappings too), which is an error that can be
told and acted on.
"""

import contextlib
import resource
from pathlib import Path


class Fence:
    """Sets the soft limit of RLIMIT_DATA; ``lift`` gives back the one that was."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        """Remember the limit as it is."""
        self._statm, self._page = proc / "self" / "statm", resource.getpagesize()
        self._before = resource.getrlimit(resource.RLIMIT_DATA)

    def set(self, room: int) -> None:
        """Let this process map ``room`` more bytes than now, and no more."""
        data = int(self._statm.read_text().split()[5]) * self._page
        soft, hard = data + max(0, room), self._before[1]
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def lift(self) -> None:
        """Give back the limit that was before."""
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, self._before)
