"""A program for the ranks of one launch: training runs whose governor is told what it sees.

    python -m tests.support.pressed_runs JOBS.json

JOBS.json is a list of {"overrides": [...], "levels": [names by step]}; the last name holds for the
rest of the run. All that follows from a level is real: the decision, the levers, the events.
"""

import json
import sys
from pathlib import Path
from typing import Any

from hpc_tune.config.load import load_config
from hpc_tune.engine.native import NativeEngine
from hpc_tune.memory.governor import Governor
from hpc_tune.memory.policy import Action, Level
from hpc_tune.train.run import run
from tests.support.many_runs import StopAfter


def tell(levels: list[str]) -> None:
    """Let every governor see these levels of host memory, step by step."""
    left = list(levels)

    def seen(self: Governor, sample: Any) -> tuple[Level, Level]:
        return Level[left.pop(0) if len(left) > 1 else left[0]], Level.CALM

    Governor.levels = seen  # type: ignore[method-assign]


def move_optimizer_too() -> None:
    """Offer the lever that only a GPU needs: here state moves from the host to the host."""
    real = NativeEngine.levers
    NativeEngine.levers = lambda self: real(self) | {Action.MOVE_OPTIMIZER}  # type: ignore[method-assign]


def main() -> None:
    move_optimizer_too()
    codes = []
    for job in json.loads(Path(sys.argv[1]).read_text()):
        tell(job["levels"])
        codes.append(run(load_config(None, job["overrides"]), StopAfter(None)))
    print(json.dumps(codes))


if __name__ == "__main__":
    main()
