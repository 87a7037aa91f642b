"""A program for the ranks of one launch: training runs whose messages are counted per step.

    python -m tests.support.counted_steps JOBS.json RESULTS FIRST     (as many_runs.py)

Rank 0 writes ``messages.json`` into the run directory: for each step, from the boundary before it
to the one after it, how often each collective was called. ``control`` calls are those of ``Comm``,
which go over gloo. ``device`` calls are all others, which use NCCL on GPUs; they name the number of
ranks in their group.
"""

import functools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from hpc_tune.cluster.launchers import rank_hint
from hpc_tune.faults import FaultPoint, Faults
from tests.support import many_runs
from tests.support.nccl_rules import _COLLECTIVES, _callers

CONTROL = ("world/comm.py", "world/watch.py")


class Steps:
    """Counts of this rank's messages since the last boundary, and in each step."""

    def __init__(self) -> None:
        self.of_steps: dict[int, Counter[str]] = {}
        self._now: Counter[str] = Counter()

    def at(self, place: FaultPoint, step: int) -> None:
        if place == "boundary":
            self._now = self.of_steps[step] = Counter()

    def count(self, name: str, group: ProcessGroup) -> None:
        is_control = next(_callers(), "") in CONTROL
        self._now[f"control {name}" if is_control else f"device {name} of {group.size()}"] += 1


def install(steps: Steps) -> None:
    """Count the calls on the process groups of this process."""

    def counted(name: str) -> Any:
        made = getattr(ProcessGroup, name)

        @functools.wraps(made)
        def wrapper(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            steps.count(name, self)
            return made(self, *args, **kwargs)

        return wrapper

    for name in (*_COLLECTIVES, "send", "recv"):
        if hasattr(ProcessGroup, name):
            setattr(ProcessGroup, name, counted(name))


def main() -> None:
    steps = Steps()
    install(steps)

    def do(job: dict[str, Any]) -> int:
        steps.of_steps.clear()
        code = many_runs.train(job, Faults(at=steps.at))
        if rank_hint(os.environ) == 0:
            [run_dir] = [w.split("=", 1)[1] for w in job["overrides"] if w.startswith("run.dir=")]
            (Path(run_dir) / "messages.json").write_text(json.dumps(steps.of_steps))
        return code

    many_runs.main(do)


if __name__ == "__main__":
    main()
