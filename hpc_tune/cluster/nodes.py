"""Choose the nodes of a job on which ranks start, and which to leave out after a failure, and why.

    a start has failed -> its steps are ended -> Slurm, a probe: lost nodes
                                              -> the launcher, the report: accused nodes, which
                                                 are tried once more
    -> the nodes that are left, without spares -> the launcher's command for the next start

If the nodes are not known, or the launcher cannot be told which to use, none is left out.
"""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from hpc_tune.cluster import launchers
from hpc_tune.cluster.protocol import Environ
from hpc_tune.cluster.slurm import OVERLAP_VARIABLES, RequeueGuard, SlurmNodes, expand_nodelist
from hpc_tune.config.parallel import ParallelConfig, fit_layout
from hpc_tune.config.scheduler import JobConfig, SlurmConfig
from hpc_tune.errors import EXIT_RESUMABLE
from hpc_tune.log import log
from hpc_tune.units import format_quantity

# -- Which nodes no longer start a process.


PROBE_LIMIT_S = 20.0
_PROCESS_END_LIMIT_S = 3.0
_MAX_PARALLEL_PROBES = 32


def find_silent_nodes(
    nodes: Sequence[str],
    make_command: Callable[[str], Sequence[str]],
    environment: Mapping[str, str],
) -> dict[str, str]:
    """Start a process on each of ``nodes``; return the nodes where that fails, and why.

    ``make_command`` returns the command for a node; ``environment`` is added to this process's own.
    If it fails on all nodes, the command is at fault, and no node is returned.
    """
    if not nodes:
        return {}
    full_env = {**os.environ, **environment}
    with ThreadPoolExecutor(_MAX_PARALLEL_PROBES) as pool:
        reasons = pool.map(lambda node: _explain_silence(make_command(node), full_env), nodes)
    silent_nodes = {node: reason for node, reason in zip(nodes, reasons, strict=True) if reason}
    if len(silent_nodes) == len(nodes):
        log.warning(
            "no node could be probed (%s): probably the probe itself fails, so no node is left out",
            silent_nodes[nodes[0]],
        )
        return {}
    return silent_nodes


def _explain_silence(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    try:
        process = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return f"a probe failed: {error}"
    try:
        _, stderr = process.communicate(timeout=PROBE_LIMIT_S)
    except subprocess.TimeoutExpired:
        _end_process(process)
        return f"a probe had no answer in {PROBE_LIMIT_S:.0f} s"
    if process.returncode == 0:
        return ""
    summary = next((line.strip() for line in stderr.splitlines() if re.search(r"\w", line)), "")
    return f"a probe failed: {summary or f'exit code {process.returncode}'}"


def _end_process(process: "subprocess.Popen[str]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_PROCESS_END_LIMIT_S)
            return


# -- On which nodes the ranks are started.


_STEP_END_LIMIT_S, _LOST_STEP_END_LIMIT_S = 60.0, 5.0  # until Slurm no longer lists an ended step
_DRAIN_STATE = "drain"


@dataclass(frozen=True)
class LaunchCommand:
    """The command that starts the ranks: its words, added environment variables, and its nodes.

    If it has ``num_missing_nodes`` fewer than wanted, ``settings`` adapt the layout, and
    ``summary`` says so.
    """

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: Sequence[str] = ()
    num_missing_nodes: int = 0
    settings: Sequence[str] = ()
    summary: str = ""


class JobNodes:
    """The nodes of one job and its launcher. ``left_out``: nodes that are not used, and why."""

    def __init__(
        self,
        launch: Sequence[str],
        environ: Environ,
        job: JobConfig | None = None,
        parallel: ParallelConfig | None = None,
    ) -> None:
        """Take the launcher's command, and the settings of the run."""
        job, self._parallel = job or SlurmConfig(), parallel or ParallelConfig()
        self._launch_words, self.num_spares = list(launch), job.spare_nodes
        self._min_num_nodes = job.min_nodes
        self._section = job.section
        self._step_names: set[str] = set()  # the names of the steps that the launcher creates
        self.left_out: dict[str, str] = {}
        self._num_unexplained = self._num_swapped = 0
        self._suspects: set[str] = set()  # nodes that are tried once more
        self._slurm = SlurmNodes.from_environ(environ)
        if self._slurm is not None:
            self._job_nodes = self._slurm.allocated_nodes()
            self._guard = RequeueGuard(self._slurm.id, environ)
            # Other processes start steps in the same job, to look at this run or for another run.
            name = f"hpc_tune-{secrets.token_hex(3)}"
            self._launch_words, self._step_names = launchers.add_step_name(self._launch_words, name)
        else:
            self._job_nodes = launchers.read_hosts(launch, environ)
        self._launcher_kind = (
            launchers.find_launcher_kind(launch[0]) if len(self._job_nodes) > 1 else None
        )
        if self._launcher_kind == "srun":
            self._launch_words = launchers.add_no_kill_option(self._launch_words)
        self._ranks_per_node = self._find_ranks_per_node()
        self._earlier_steps: set[str] | None = None  # the steps that others have started
        self._shares_steps = False
        self._lost_nodes: dict[str, str] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="hpc_tune-", ignore_cleanup_errors=True)
        if self.num_spares and not self.can_choose_nodes:
            name = f"{self._section}.spare_nodes"
            log.warning(
                "%s=%d has no effect: %s", name, self.num_spares, self._explain_fixed_nodes()
            )

    @property
    def can_choose_nodes(self) -> bool:
        """Whether ranks can be started on some of the nodes only."""
        return self._launcher_kind is not None and bool(self._ranks_per_node)

    def _explain_fixed_nodes(self) -> str:
        if len(self._job_nodes) < 2:
            return "the job has no second node that is known"
        if self._launcher_kind is None:
            return f"{self._launch_words[0]} is not a launcher that takes a list of nodes"
        return "its options do not say how many ranks each node has"

    @property
    def _usable_nodes(self) -> list[str]:
        return [node for node in self._job_nodes if node not in self.left_out]

    @property
    def _num_wanted_nodes(self) -> int:
        return max(1, len(self._job_nodes) - self.num_spares)

    def explain_node_shortage(self) -> str | None:
        """Return why the job cannot continue with the nodes that are left; None if it can."""
        num_left, num_job_nodes = len(self._usable_nodes), len(self._job_nodes)
        if not self.can_choose_nodes or num_left >= self._min_num_nodes:
            return None
        minimum = f"{self._section}.min_nodes={self._min_num_nodes}"
        return f"{num_left} of {num_job_nodes} nodes are left, fewer than {minimum}"

    def command(self) -> LaunchCommand:
        """Return the command of the next start, on as many nodes as wanted if they are left.

        If fewer are left, it uses as many of them, but at least min_nodes, as a layout fits.
        """
        self._wait_for_steps()
        if self._slurm is not None:
            self._guard.keep_running(self._usable_nodes)
        variables = OVERLAP_VARIABLES if self._shares_steps else {}
        if not self.can_choose_nodes or not (self.left_out or self.num_spares):
            return LaunchCommand(self._launch_words, variables, list(self._job_nodes))
        use = self._usable_nodes[: self._num_wanted_nodes]
        axes: dict[str, int] | None = {}
        if len(use) < self._num_wanted_nodes:
            while (axes := self._fit_layout(use)) is None and len(use) > self._min_num_nodes:
                use.pop()
        words = self._command_words({node: self._ranks_per_node[node] for node in use}, "hosts")
        num_missing_nodes = self._num_wanted_nodes - len(use)
        settings = [f"parallel.{name}={size}" for name, size in (axes or {}).items()]
        num_ranks = self._num_ranks(use)
        summary = (
            f"on {len(use)} of {self._num_wanted_nodes} nodes, {format_quantity(num_ranks, 'rank')}"
        )
        summary += f", with {' '.join(settings)}" if settings else ""
        return LaunchCommand(
            words, variables, use, num_missing_nodes, settings, summary if num_missing_nodes else ""
        )

    def _fit_layout(self, nodes: Sequence[str]) -> dict[str, int] | None:
        return fit_layout(self._parallel, self._num_ranks(nodes))

    def exclude_faulty_nodes(
        self,
        used_nodes: Sequence[str],
        suspects: Mapping[str, str],
        has_progressed: bool,
        has_cause: bool = False,
        certain_suspects: Collection[str] = (),
    ) -> tuple[dict[str, str], bool]:
        """After a failed start on ``used_nodes``, leave out nodes from now on; return them and why.

        Also return whether nothing else is to blame: Slurm or a probe calls them lost, or they were
        already tried once more. ``suspects``: the nodes that the launcher or the report names; they
        are tried once more before they are left out, except those in ``certain_suspects``.
        ``has_progressed``: whether the start saved a newer checkpoint; ``has_cause``: whether the
        report gives a cause that is not a node, such as a full disk.
        """
        if not self.can_choose_nodes:
            return {}, False
        lost = (
            self._slurm.find_unhealthy_nodes(self._usable_nodes) if self._slurm is not None else {}
        )
        if len(lost) == len(self._usable_nodes):  # an administrator drains all of them, for later
            lost = {node: reason for node, reason in lost.items() if _DRAIN_STATE not in reason}
        healthy = [node for node in self._usable_nodes if node not in lost]
        lost |= find_silent_nodes(
            healthy, self._probe_command, {**OVERLAP_VARIABLES} if self._slurm is not None else {}
        )
        reasons = {
            node: suspects[name]
            for name in suspects
            if (node := self._find_node(name)) is not None and node in used_nodes
        }
        if len(reasons) == len(used_nodes):
            reasons = {}
        reasons = {node: reason for node, reason in reasons.items() if node in self._usable_nodes}
        certain_nodes = {self._find_node(name) for name in certain_suspects}
        retries = {node for node in reasons if node not in certain_nodes | self._suspects}
        repeated_nodes = {node for node in reasons if node in self._suspects}
        if not lost:
            self._suspects |= retries
            for node in sorted(retries):
                log.warning(
                    "node %s is tried once more before it is left out: %s", node, reasons[node]
                )
        faults = lost or {node: reason for node, reason in reasons.items() if node not in retries}
        if not faults and not retries and not has_cause:
            faults = self._swap_in_spare(used_nodes, has_progressed)
        self.left_out |= faults
        self._lost_nodes = lost
        return faults, bool(lost or repeated_nodes)

    def end_steps(self) -> None:
        """End the remaining steps of the last start, which would otherwise keep nodes and GPUs."""
        self._lost_nodes = {}
        if self._slurm is not None:
            steps = self._slurm.steps(self._step_names) - (self._earlier_steps or set())
            self._slurm.end(steps, _LOST_STEP_END_LIMIT_S)

    def _wait_for_steps(self) -> None:
        """Wait until the last start's steps are gone, but not for steps on lost nodes."""
        if self._slurm is None:
            return
        steps = self._slurm.steps(self._step_names)
        last_steps = set() if self._earlier_steps is None else steps - self._earlier_steps
        if last_steps and (self._lost_nodes or not self._slurm.end(last_steps, _STEP_END_LIMIT_S)):
            log.warning(
                "Slurm still lists the step %s, as it does after a node is lost: the next step "
                "shares its resources",
                ", ".join(sorted(last_steps)),
            )
            self._shares_steps = True
        self._earlier_steps = self._slurm.steps(self._step_names)

    def _swap_in_spare(self, used_nodes: Sequence[str], has_progressed: bool) -> dict[str, str]:
        """If nothing says which node is at fault, leave out none at first, then one for a spare."""
        self._num_unexplained = 1 if has_progressed else self._num_unexplained + 1
        if self._num_unexplained < 2 or len(self._usable_nodes) <= self._num_wanted_nodes:
            return {}
        self._num_swapped += 1
        node = used_nodes[-1 - (self._num_swapped - 1) % len(used_nodes)]
        return {node: "nothing says which node is at fault: a spare one is tried in its place"}

    def _find_ranks_per_node(self) -> dict[str, int]:
        """Return the number of ranks of each node, empty if not known."""
        if self._launcher_kind is None:
            return {}
        per_node = launchers.read_ranks_per_node(self._launch_words)
        num_ranks = launchers.read_num_ranks(self._launch_words, self._launcher_kind)
        counts = {node: count for node, count in self._job_nodes.items() if count is not None}
        if len(counts) == len(self._job_nodes) and num_ranks in (None, sum(counts.values())):
            return counts
        if per_node is None and num_ranks is not None and num_ranks % self._num_wanted_nodes == 0:
            per_node = num_ranks // self._num_wanted_nodes
        return {} if per_node is None else dict.fromkeys(self._job_nodes, per_node)

    def _num_ranks(self, nodes: Sequence[str]) -> int:
        return sum(self._ranks_per_node[node] for node in nodes)

    def _command_words(self, num_ranks_by_node: Mapping[str, int], hostfile_name: str) -> list[str]:
        assert self._launcher_kind is not None
        hostfile = Path(self._folder.name) / hostfile_name
        hostfile.write_text(
            launchers.format_hostfile(self._launcher_kind, num_ranks_by_node), encoding="utf-8"
        )
        return launchers.restrict_to_nodes(
            self._launch_words, self._launcher_kind, num_ranks_by_node, hostfile
        )

    def _probe_command(self, node: str) -> list[str]:
        return [*self._command_words({node: 1}, f"probe-{node}"), "-c", ""]

    def _find_node(self, host: str) -> str | None:
        """Return the node with this host name, with or without a domain."""
        by_host = {node.partition(".")[0]: node for node in self._job_nodes}
        return by_host.get(host.partition(".")[0])


# -- Which nodes a launcher's output, or a failed run's report, calls lost or sick.
#
# srun: error: n2: tasks 4-7: Killed      the victim; nodes named after "Terminating" are bystanders
# srun: error: Node failure on n2         the cause; every other task is killed because of it


_CHUNK_BYTES = 1 << 16
_NODE = r"([^\s:,]+(?:\[[^\]]*\][^\s:,]*)?)"
_LOST_NODE = (
    re.compile(rf"srun: error: Node failure on {_NODE}"),
    re.compile(rf"srun: error: Task launch for \S+ failed on node {_NODE}:"),
    re.compile(r"Remote daemon: \[[^\]]*\] on node (\S+)"),  # PRRTE, Open MPI 5
    re.compile(r"lost (?:connection|communication) .*? on (?:node|host):? (\S+)", re.I),
)
# Running out of memory is no node's fault, and is handled elsewhere.
_DEAD_RANK = re.compile(
    r"srun: error: (\S+): tasks? [\d,-]+: "
    r"(Killed|Segmentation fault|Bus error|Aborted|Illegal instruction|Exited with exit code \d+)"
)
_DEAD_MPI_RANK = re.compile(r"process rank \d+ .*?on node (\S+) exited on signal \d+ \(([^)]+)\)")
_TERMINATION = re.compile(
    r"srun: .*(Terminating StepId|Force Terminated)|STEP \S+ ON \S+ CANCELLED"
)
_GONE_HOST = re.compile(r"\bhost (\S+?)(?: \(ranks? [\d, and-]+\)|\) is gone)")


class LauncherOutputParser:
    """Reads what a launcher prints, line by line, and remembers which nodes it accuses."""

    def __init__(self) -> None:
        self._lost_nodes: dict[str, str] = {}
        self._dead_nodes: dict[str, str] = {}
        self._exited_nodes: dict[str, str] = {}
        self._is_over = False

    def copy(self, stream: IO[bytes]) -> threading.Thread:
        """Read ``stream`` in a thread and copy it to stderr unchanged; return the thread."""
        thread = threading.Thread(target=self._copy_to_stderr, args=(stream,), daemon=True)
        thread.start()
        return thread

    def _copy_to_stderr(self, stream: IO[bytes]) -> None:
        rest = b""
        with stream:
            while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
                with contextlib.suppress(OSError):  # the launcher must not block on a full pipe
                    os.write(2, chunk)
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self.read(line.decode(errors="replace"))
                rest = rest[-_CHUNK_BYTES:]

    def read(self, line: str) -> None:
        """Take the next line."""
        for pattern in _LOST_NODE:
            if match := pattern.search(line):
                self._add_suspects(self._lost_nodes, match[1], line.strip())
                self._is_over = True
        if self._is_over:
            return
        if _TERMINATION.search(line):
            self._is_over = True
        elif match := _DEAD_RANK.search(line) or _DEAD_MPI_RANK.search(line):
            did_exit = match[2].startswith("Exited")
            if match[2] == f"Exited with exit code {EXIT_RESUMABLE}":
                return  # it was asked to stop
            self._add_suspects(
                self._exited_nodes if did_exit else self._dead_nodes, match[1], line.strip()
            )

    def find_suspects(self, has_report: bool) -> dict[str, str]:
        """Return the nodes that were lost, else those whose ranks died, and the line that says so.

        A rank that exits with a code has a reason, which its own report gives: its node counts only
        without a report.
        """
        return self._lost_nodes or {
            **({} if has_report else self._exited_nodes),
            **self._dead_nodes,
        }

    def find_certain_suspects(self, has_report: bool) -> set[str]:
        """Return the accused nodes that another try would not help: lost nodes, and nodes whose
        ranks have exited without a report, for example because a program is missing; not nodes
        where a rank was killed, possibly by chance.
        """
        return {*self._lost_nodes, *(() if has_report else self._exited_nodes)}

    @staticmethod
    def _add_suspects(suspects_by_node: dict[str, str], nodes: str, line: str) -> None:
        suspects_by_node.update(dict.fromkeys(expand_nodelist(nodes), f"the launcher says: {line}"))


def find_lost_hosts(outcome: Mapping[str, Any]) -> dict[str, str]:
    """Return the hosts that a failed run's outcome.json calls gone, and why."""
    lost_hosts = outcome.get("lost_hosts")
    names = [str(name) for name in lost_hosts] if isinstance(lost_hosts, list) else []
    reason = str(outcome.get("reason", ""))
    return dict.fromkeys(names or _GONE_HOST.findall(reason), "the run says that it is gone")
