"""On which nodes of a job the ranks are started, and which are left out after a failure, and why.

    a start has failed -> its steps are ended -> Slurm, a probe: lost nodes
                                              -> the launcher, the report: accused nodes, which
                                                 are tried once more
    -> the nodes that are left, without spares -> the launcher's command for the next start

Where the nodes are not known, or the launcher is none that can be told them, none is left out.
"""

import secrets
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_tune.cluster import launch_words
from hpc_tune.cluster.probe_nodes import find_silent_nodes
from hpc_tune.cluster.protocol import Environ
from hpc_tune.cluster.slurm_guard import RequeueGuard
from hpc_tune.cluster.slurm_nodes import OVERLAP_VARIABLES, SlurmNodes
from hpc_tune.config.fewer_ranks import fit_layout
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.scheduler import JobConfig, SlurmConfig
from hpc_tune.log import log

_STEPS_GONE_S, _LOST_STEPS_GONE_S = 60.0, 5.0  # until Slurm lists an ended step no more
_DRAINED = "drain"


@dataclass(frozen=True)
class LaunchCommand:
    """What starts the ranks: its words, what it adds to the environment, and on which nodes.

    On fewer nodes than asked for, by ``missing``, there are ``settings`` for the layout, and
    ``told`` says so.
    """

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: Sequence[str] = ()
    missing: int = 0
    settings: Sequence[str] = ()
    told: str = ""


class Nodes:
    """The nodes of one job and its launcher. ``left_out`` are those that are not used, and why."""

    def __init__(
        self,
        launch: Sequence[str],
        environ: Environ,
        job: JobConfig | None = None,
        parallel: ParallelConfig | None = None,
    ) -> None:
        """Take the launcher's command, and the settings of the run."""
        job, self._parallel = job or SlurmConfig(), parallel or ParallelConfig()
        self._launch, self.spares, self._least = list(launch), job.spare_nodes, job.min_nodes
        self._section = job.section
        self._steps: set[str] = set()  # the names of those that the launcher makes
        self.left_out: dict[str, str] = {}
        self._num_unexplained = self._num_swapped = 0
        self._suspects: set[str] = set()  # nodes that are tried once more
        self._slurm = SlurmNodes.from_environ(environ)
        if self._slurm is not None:
            self._job_nodes = self._slurm.given()
            self._guard = RequeueGuard(self._slurm.id, environ)
            # Others start steps in the same job, to look at a run or for another one.
            name = f"hpc_tune-{secrets.token_hex(3)}"
            self._launch, self._steps = launch_words.add_step_name(self._launch, name)
        else:
            self._job_nodes = launch_words.read_hosts(launch, environ)
        self._kind = (
            launch_words.find_launcher_kind(launch[0]) if len(self._job_nodes) > 1 else None
        )
        if self._kind == "srun":
            self._launch = launch_words.add_no_kill(self._launch)
        self._counts = self._find_counts()
        self._before: set[str] | None = None  # the steps that others have started
        self._shares_steps = False
        self._lost: dict[str, str] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="hpc_tune-", ignore_cleanup_errors=True)
        if self.spares and not self.can_choose_nodes:
            name = f"{self._section}.spare_nodes"
            log.warning("%s=%d has no effect: %s", name, self.spares, self._why_cannot_choose())

    @property
    def can_choose_nodes(self) -> bool:
        """Whether ranks can be started on some of the nodes only."""
        return self._kind is not None and bool(self._counts)

    def _why_cannot_choose(self) -> str:
        if len(self._job_nodes) < 2:
            return "the job has no second node that is known"
        if self._kind is None:
            return f"{self._launch[0]} is not a launcher that takes a list of nodes"
        return "its options do not say how many ranks each node has"

    @property
    def _usable(self) -> list[str]:
        return [node for node in self._job_nodes if node not in self.left_out]

    @property
    def _wanted(self) -> int:
        return max(1, len(self._job_nodes) - self.spares)

    def why_too_few(self) -> str | None:
        """Return why the job cannot go on with the nodes that are left, if so."""
        left, of = len(self._usable), len(self._job_nodes)
        if not self.can_choose_nodes or left >= self._least:
            return None
        return f"{left} of {of} nodes are left, fewer than {self._section}.min_nodes={self._least}"

    def command(self) -> LaunchCommand:
        """Return the command of the next start, on as many nodes as it is to have.

        On fewer, those nodes are used whose ranks a layout divides.
        """
        self._wait_for_steps()
        if self._slurm is not None:
            self._guard.keep(self._usable)
        shared = OVERLAP_VARIABLES if self._shares_steps else {}
        if not self.can_choose_nodes or not (self.left_out or self.spares):
            return LaunchCommand(self._launch, shared, list(self._job_nodes))
        use = self._usable[: self._wanted]
        axes: dict[str, int] | None = {}
        if len(use) < self._wanted:
            while (axes := self._fit_layout(use)) is None and len(use) > self._least:
                use.pop()
        words = self._command_words({node: self._counts[node] for node in use}, "hosts")
        missing = self._wanted - len(use)
        settings = [f"parallel.{name}={size}" for name, size in (axes or {}).items()]
        num_ranks = self._num_ranks(use)
        told = f"on {len(use)} of {self._wanted} nodes, {num_ranks} rank"
        told += "s" if num_ranks > 1 else ""
        told += f", with {' '.join(settings)}" if settings else ""
        return LaunchCommand(words, shared, use, missing, settings, told if missing else "")

    def _fit_layout(self, nodes: Sequence[str]) -> dict[str, int] | None:
        return fit_layout(self._parallel, self._num_ranks(nodes))

    def examine(
        self,
        used: Sequence[str],
        accused: Mapping[str, str],
        progressed: bool,
        has_cause: bool = False,
        certain: Collection[str] = (),
    ) -> tuple[dict[str, str], bool]:
        """After a failed start on ``used``, return which nodes are left out from now on, and why.

        Also whether nobody else is to blame: they are lost, by Slurm or by a probe, or were tried
        once more. ``accused`` are those that the launcher or the report names; they are tried once
        more before they are left out, but for those that are ``certain``. ``progressed``: whether
        the start saved a newer checkpoint; ``has_cause``: whether the report says why it failed,
        and that is no node, such as a full disk.
        """
        if not self.can_choose_nodes:
            return {}, False
        lost = self._slurm.find_sick(self._usable) if self._slurm is not None else {}
        if len(lost) == len(self._usable):  # an administrator drains all of them, later
            lost = {node: why for node, why in lost.items() if _DRAINED not in why}
        rest = [node for node in self._usable if node not in lost]
        lost |= find_silent_nodes(
            rest, self._probe_command, {**OVERLAP_VARIABLES} if self._slurm is not None else {}
        )
        named = {
            node: accused[name]
            for name in accused
            if (node := self._find_node(name)) is not None and node in used
        }
        if len(named) == len(used):
            named = {}
        named = {node: why for node, why in named.items() if node in self._usable}
        at_once = {self._find_node(name) for name in certain}
        again = {node for node in named if node not in at_once | self._suspects}
        twice = {node for node in named if node in self._suspects}
        if not lost:
            self._suspects |= again
            for node in sorted(again):
                log.warning(
                    "node %s is tried once more before it is left out: %s", node, named[node]
                )
        found = lost or {node: why for node, why in named.items() if node not in again}
        if not found and not again and not has_cause:
            found = self._swap_in_spare(used, progressed)
        self.left_out |= found
        self._lost = lost
        return found, bool(lost or twice)

    def end_steps(self) -> None:
        """End what is left of the last start's steps, which would keep nodes and GPUs."""
        self._lost = {}
        if self._slurm is not None:
            own = self._slurm.steps(self._steps) - (self._before or set())
            self._slurm.end(own, _LOST_STEPS_GONE_S)

    def _wait_for_steps(self) -> None:
        """Wait until the last start's steps are gone, but not for those of lost nodes."""
        if self._slurm is None:
            return
        own = self._slurm.steps(self._steps)
        left = set() if self._before is None else own - self._before
        if left and (self._lost or not self._slurm.end(left, _STEPS_GONE_S)):
            log.warning(
                "Slurm still lists the step %s, as it does after a node is lost: the next step "
                "shares its resources",
                ", ".join(sorted(left)),
            )
            self._shares_steps = True
        self._before = self._slurm.steps(self._steps)

    def _swap_in_spare(self, used: Sequence[str], progressed: bool) -> dict[str, str]:
        """Where nothing says which node is at fault: none at first, then one for a spare."""
        self._num_unexplained = 1 if progressed else self._num_unexplained + 1
        if self._num_unexplained < 2 or len(self._usable) <= self._wanted:
            return {}
        self._num_swapped += 1
        node = used[-1 - (self._num_swapped - 1) % len(used)]
        return {node: "nothing says which node is at fault: a spare one is tried in its place"}

    def _find_counts(self) -> dict[str, int]:
        """Return the ranks of each node, nothing if they are not known."""
        if self._kind is None:
            return {}
        each = launch_words.read_ranks_per_node(self._launch)
        number = launch_words.read_num_ranks(self._launch, self._kind)
        given = {node: count for node, count in self._job_nodes.items() if count is not None}
        if len(given) == len(self._job_nodes) and number in (None, sum(given.values())):
            return given
        if each is None and number is not None and number % self._wanted == 0:
            each = number // self._wanted
        return {} if each is None else dict.fromkeys(self._job_nodes, each)

    def _num_ranks(self, nodes: Sequence[str]) -> int:
        return sum(self._counts[node] for node in nodes)

    def _command_words(self, ranks: Mapping[str, int], file: str) -> list[str]:
        assert self._kind is not None
        hostfile = Path(self._folder.name) / file
        hostfile.write_text(launch_words.format_hostfile(self._kind, ranks), encoding="utf-8")
        return launch_words.restrict_to_nodes(self._launch, self._kind, ranks, hostfile)

    def _probe_command(self, node: str) -> list[str]:
        return [*self._command_words({node: 1}, f"probe-{node}"), "-c", ""]

    def _find_node(self, host: str) -> str | None:
        """Return the node of that host name, with or without a domain."""
        by_host = {node.partition(".")[0]: node for node in self._job_nodes}
        return by_host.get(host.partition(".")[0])
