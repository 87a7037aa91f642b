"""The nodes of a running Slurm job: which it has, which are sick, and the end of its steps.

scontrol show job -> the nodes of the job: SLURM_JOB_NODELIST still counts those that it has lost
sinfo             -> the state of each
squeue -s         -> the steps that still hold nodes
"""

import re
import time
from collections.abc import Container, Iterable, Sequence

from hpc_tune.cluster.asking import read_output
from hpc_tune.cluster.protocol import Environ
from hpc_tune.cluster.slurm import expand_nodelist

# With it a step shares what an old one, of which a lost node has not reported the end, still holds.
OVERLAP_VARIABLES = {"SLURM_OVERLAP": "1"}
GUARD_STEP = "hpc_tune-guard"  # the name of the step that slurm_guard.py keeps
_POLL_S = 0.5
# What sinfo calls a node on which no rank can be started; * behind it: it does not answer.
_SICK_STATE = re.compile(r"(down|drain|fail|error|unknown|no_respond|power|reboot)\w*|\w+\*")


class SlurmNodes:
    """What Slurm says of the nodes of one job."""

    @classmethod
    def from_environ(cls, environ: Environ) -> "SlurmNodes | None":
        """Return those of the job with these variables; ``None`` outside of one."""
        return cls(environ) if environ.get("SLURM_JOB_NODELIST") else None

    def __init__(self, environ: Environ) -> None:
        """Take the job of ``environ``."""
        self._ids = {environ.get("SLURM_JOB_ID", "")}
        self._id = next(iter(self._ids))
        array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        if array and task:  # the number of one of its tasks is that of the whole array
            self._id = f"{array}_{task}"
            self._ids.add(self._id)
        self._given = expand_nodelist(environ.get("SLURM_JOB_NODELIST", ""))
        self._counts = _expand_run_lengths(environ.get("SLURM_TASKS_PER_NODE", ""))

    @property
    def id(self) -> str:
        """The number of the job, for Slurm's programs: of an array that of its task."""
        return self._id

    def given(self) -> dict[str, int | None]:
        """Return the nodes that the job began with, and the ranks for each where they are known."""
        counts = (
            self._counts if len(self._counts) == len(self._given) else [None] * len(self._given)
        )
        return dict(zip(self._given, counts, strict=True))

    def find_sick(self, nodes: Sequence[str]) -> dict[str, str]:
        """Return those of ``nodes`` that the job no longer has or that cannot be used, and why.

        What Slurm does not answer counts as good news.
        """
        shown = re.search(
            r"^ *NodeList=(\S+)", read_output("scontrol", "show", "job", self._id), re.M
        )
        held = expand_nodelist(shown[1]) if shown else list(nodes)
        states = read_output("sinfo", "-N", "-h", "-o", "%N %T", "-n", ",".join(nodes)).split()
        found = {
            node: _why_sick(state)
            for node, state in zip(states[::2], states[1::2], strict=False)
            if node in nodes and _SICK_STATE.fullmatch(state)
        }
        lost = {node: "Slurm has taken it out of the job" for node in nodes if node not in held}
        return {node: (lost | found).get(node, "") for node in nodes if node in lost | found}

    def steps(self, names: Container[str] | None = None) -> set[str]:
        """Return the steps of the job that srun has started, such as ``7.0``, of these names."""
        listed = read_output("squeue", "-s", "-h", "-j", self._id, "-o", "%i %j").splitlines()
        words = [line.split(maxsplit=1) for line in listed]
        parts = [
            word[0].rpartition(".")
            for word in words
            if word and (names is None or word[-1] in names)
        ]
        return {f"{id}.{step}" for id, _, step in parts if id in self._ids and step.isdigit()}

    def end(self, steps: Iterable[str], limit_s: float) -> bool:
        """End steps; return whether they have gone within ``limit_s`` seconds."""
        left = set(steps) & self.steps()
        if not left:
            return True
        until_s = time.monotonic() + limit_s
        read_output("scancel", *sorted(left))
        while left := left & self.steps():
            if time.monotonic() > until_s:
                return False
            time.sleep(_POLL_S)
        return True


def _why_sick(state: str) -> str:
    name = state.rstrip("*")
    said = [f"is {name}"] if _SICK_STATE.fullmatch(name) else []
    said += ["does not respond"] if state.endswith("*") else []
    return f"Slurm says that it {' and '.join(said)}"


def _expand_run_lengths(text: str) -> list[int | None]:
    """Return the numbers of Slurm's run-length list, such as ``"4(x2),3"``."""
    parts = re.findall(r"([0-9]{1,9})(?:\(x([0-9]{1,7})\))?(?:,|$)", text)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]
