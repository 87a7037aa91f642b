"""A real memory cgroup with a limit, for tests in which the kernel kills processes."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hpc_tune.memory.host import HostLimit, oom_kills
from tests.support.ranks import rank_environment, run_ranks, started

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class Group:
    """A cgroup that commands run in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(
        self, argv: Sequence[str], n: int, timeout: float, neighbor: Sequence[str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command of ``n`` ranks in the group, beside ``neighbor`` if given.

        The kernel kills the command first and spares the neighbor.
        """
        with contextlib.ExitStack() as stack:
            if neighbor is not None:
                beside = self.inside(neighbor, spared=True)
                stack.enter_context(started(beside, rank_environment(1)))
            return run_ranks(self.inside(argv), rank_environment(n), timeout)

    def inside(self, argv: Sequence[str], spared: bool = False) -> list[str]:
        """Return the command line that runs a command in the group."""
        enter = 'echo $$ > "$0"/cgroup.procs; exec "$@"'
        if not spared:
            enter = "echo 1000 > /proc/self/oom_score_adj; " + enter
        return ["/bin/sh", "-c", enter, str(self.folder), *argv]

    @contextlib.contextmanager
    def below(self, *names: str) -> Iterator["Group"]:
        """Make a group below this one, nested once for each name."""
        folders = [self.folder.joinpath(*names[: i + 1]) for i in range(len(names))]
        for folder in folders:
            folder.mkdir()
        try:
            yield Group(folders[-1])
        finally:
            for folder in reversed(folders):
                _remove(folder)

    @property
    def charged_bytes(self) -> int:
        """Bytes in use by the group, page cache included: exact at any time."""
        names = ("memory.usage_in_bytes", "memory.current")
        return int(next(f for name in names if (f := self.folder / name).exists()).read_text())

    @property
    def kills(self) -> int:
        """How often the kernel has killed a process in the group."""
        return oom_kills(HostLimit(1, "", self.folder))


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Group]:
    """Make a cgroup with a limit below the root group; skip the test if that is not allowed."""
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
        _remove(folder)


def _remove(folder: Path) -> None:
    until_s = time.monotonic() + 10
    while folder.is_dir():
        with contextlib.suppress(OSError):
            folder.rmdir()
        assert time.monotonic() < until_s, f"{folder} is still in use"
        time.sleep(0.1)
