"""A real memory cgroup with a limit, for the tests that let the kernel kill."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hpc_tune.memory.host import HostLimit, oom_kills

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class Group:
    """A cgroup; ``inside`` gives the command line that runs a command in it.

    Such a command is what the kernel kills first, unless it is ``spared``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def inside(self, argv: Sequence[str], spared: bool = False) -> list[str]:
        enter = 'echo $$ > "$0"/cgroup.procs; exec "$@"'
        if not spared:
            enter = "echo 1000 > /proc/self/oom_score_adj; " + enter
        return ["/bin/sh", "-c", enter, str(self.folder), *argv]

    @property
    def kills(self) -> int:
        """How often the kernel has killed in it."""
        return oom_kills(HostLimit(1, "", self.folder))


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Group]:
    """Make a cgroup below this process's; skip the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("a memory cgroup needs root")
    v1 = V1.is_dir()
    folder = (V1 if v1 else V2) / f"hpc_tune-{os.getpid()}-{time.monotonic_ns()}"
    name = "memory.limit_in_bytes" if v1 else "memory.max"
    try:
        folder.mkdir()
        (folder / name).write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        yield Group(folder)
    finally:
        until_s = time.monotonic() + 10
        while folder.is_dir():
            with contextlib.suppress(OSError):
                folder.rmdir()
            assert time.monotonic() < until_s, f"{folder} is still in use"
            time.sleep(0.1)
