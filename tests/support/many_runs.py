"""A program for the ranks of one launch: does several training runs one after another.

    python -m tests.support.many_runs JOBS.json RESULTS FIRST

JOBS.json is a list of {"overrides": [...], "stop_after": steps or null}. Each rank trains each of
them, from number FIRST on, as ``python -m hpc_tune`` would. Rank 0 announces each on stderr, so
that what is printed can be told apart, and appends its exit code to the file RESULTS.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_tune.cluster.launchers import rank_hint
from hpc_tune.config.load import load_config
from hpc_tune.faults import NO_FAULTS, Faults
from hpc_tune.train.run import run
from hpc_tune.world.stop import StopFlag

ROW = "== run"


class StopAfter(StopFlag):
    """Requests a stop after ``steps`` steps of this start, and for no other reason."""

    def __init__(self, steps: int | None) -> None:
        super().__init__(environ={})
        self._left = steps

    def is_requested(self, margin_s: float = 0.0) -> bool:
        return False

    def reason(self, margin_s: float = 0.0) -> str | None:
        if self._left is None:
            return None
        self._left -= 1
        return "the test's stop" if self._left < 0 else None


def train(job: dict[str, Any], faults: Faults = NO_FAULTS) -> int:
    """Do one job; return its exit code."""
    config = load_config(job.get("config"), job["overrides"])
    return run(config, StopAfter(job.get("stop_after")), faults=faults)


def main(do: Callable[[dict[str, Any]], int] = train) -> None:
    jobs, results, first = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    is_first_rank = rank_hint(os.environ) == 0
    for number, job in enumerate(json.loads(jobs.read_text())):
        if number < first:
            continue
        if is_first_rank:
            print(f"{ROW} {number}", file=sys.stderr, flush=True)
        code = do(job)
        if is_first_rank:
            with results.open("a") as out:
                out.write(f"{code}\n")


if __name__ == "__main__":
    main()
