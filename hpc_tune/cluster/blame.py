"""Which nodes a launcher's own lines, or a failed run's report, call lost or sick.

srun: error: n2: tasks 4-7: Killed      the victim; what follows "Terminating" are bystanders
srun: error: Node failure on n2         the cause, and every other task is killed with it
"""

import contextlib
import os
import re
import threading
from collections.abc import Mapping
from typing import IO, Any

from hpc_tune.cluster.slurm import expand_nodelist
from hpc_tune.errors import EXIT_RESUMABLE

_CHUNK_BYTES = 1 << 16
_NODE = r"([^\s:,]+(?:\[[^\]]*\][^\s:,]*)?)"
_LOST_NODE = (
    re.compile(rf"srun: error: Node failure on {_NODE}"),
    re.compile(rf"srun: error: Task launch for \S+ failed on node {_NODE}:"),
    re.compile(r"Remote daemon: \[[^\]]*\] on node (\S+)"),  # PRRTE, Open MPI 5
    re.compile(r"lost (?:connection|communication) .*? on (?:node|host):? (\S+)", re.I),
)
# Memory that ran out is nobody's node's fault, and has its own answer.
_DIED_RANK = re.compile(
    r"srun: error: (\S+): tasks? [\d,-]+: "
    r"(Killed|Segmentation fault|Bus error|Aborted|Illegal instruction|Exited with exit code \d+)"
)
_DIED_MPI_RANK = re.compile(r"process rank \d+ .*?on node (\S+) exited on signal \d+ \(([^)]+)\)")
_TERMINATION = re.compile(
    r"srun: .*(Terminating StepId|Force Terminated)|STEP \S+ ON \S+ CANCELLED"
)
_GONE_HOST = re.compile(r"\bhost (\S+?)(?: \(ranks? [\d, and-]+\)|\) is gone)")


class LauncherLines:
    """Reads what a launcher prints, line by line, and remembers which nodes it accuses."""

    def __init__(self) -> None:
        self._lost: dict[str, str] = {}
        self._died: dict[str, str] = {}
        self._exited: dict[str, str] = {}
        self._is_over = False

    def copy(self, stream: IO[bytes]) -> threading.Thread:
        """Read what comes from ``stream`` and write it to stderr as it is; return the thread."""
        thread = threading.Thread(target=self._copy, args=(stream,), daemon=True)
        thread.start()
        return thread

    def _copy(self, stream: IO[bytes]) -> None:
        rest = b""
        with stream:
            while new := os.read(stream.fileno(), _CHUNK_BYTES):
                with contextlib.suppress(OSError):  # whoever starts the ranks must not wait for it
                    os.write(2, new)
                *lines, rest = (rest + new).split(b"\n")
                for line in lines:
                    self.read(line.decode(errors="replace"))
                rest = rest[-_CHUNK_BYTES:]

    def read(self, line: str) -> None:
        """Take the next line."""
        for pattern in _LOST_NODE:
            if match := pattern.search(line):
                self._note(self._lost, match[1], line.strip())
                self._is_over = True
        if self._is_over:
            return
        if _TERMINATION.search(line):
            self._is_over = True
        elif match := _DIED_RANK.search(line) or _DIED_MPI_RANK.search(line):
            did_exit = match[2].startswith("Exited")
            if match[2] == f"Exited with exit code {EXIT_RESUMABLE}":
                return  # it was asked to stop
            self._note(self._exited if did_exit else self._died, match[1], line.strip())

    def find_suspects(self, has_report: bool) -> dict[str, str]:
        """Return the nodes that were lost or whose ranks died, and the line that says so.

        A rank that exits with a code has a reason, which its own report gives: only without one
        does its node count.
        """
        return self._lost or {**({} if has_report else self._exited), **self._died}

    def find_certain_suspects(self, has_report: bool) -> set[str]:
        """Return those of the accused that another try would not help: lost nodes, and those whose
        ranks have exited without a report, as where a program is not there. Not those where a rank
        was killed, which may have been by chance.
        """
        return {*self._lost, *(() if has_report else self._exited)}

    @staticmethod
    def _note(where: dict[str, str], nodes: str, line: str) -> None:
        where.update(dict.fromkeys(expand_nodelist(nodes), f"the launcher says: {line}"))


def find_lost_hosts(outcome: Mapping[str, Any]) -> dict[str, str]:
    """Return the hosts that a failed run's outcome.json calls gone, and why."""
    listed = outcome.get("lost_hosts")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    reason = str(outcome.get("reason", ""))
    return dict.fromkeys(names or _GONE_HOST.findall(reason), "the run says that it is gone")
