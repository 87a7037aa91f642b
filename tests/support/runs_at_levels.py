"""A program for the ranks of one launch: training runs whose governor is told which level it sees.

    python -m tests.support.runs_at_levels JOBS.json RESULTS FIRST   (see many_runs.py)

JOBS.json is a list of {"overrides": [...], "levels": [names by step]}; the last name holds for the
rest of the run. All that follows from a level is real: the decision, the levers, the events.
"""

from typing import Any

from hpc_tune.faults import Faults
from tests.support import many_runs


def at_levels(job: dict[str, Any]) -> Faults:
    """Report these levels of host memory step by step, and offer actions that only a GPU needs."""
    left = list(job["levels"])
    return Faults(
        level=lambda seen: left.pop(0) if len(left) > 1 else left[0], offloads_without_gpu=True
    )


if __name__ == "__main__":
    many_runs.main(lambda job: many_runs.train(job, at_levels(job)))
