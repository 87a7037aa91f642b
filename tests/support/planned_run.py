"""A training run whose memory is sampled often enough for a comparison with its plan.

mpirun -np N python -m tests.support.planned_run [key=value ...]

Its disk is slow, so that a background save takes as much memory as it can: writing begins when
copies have been made, and does not take them before the last step is done.
"""

import sys
import threading
import time
from collections.abc import Set

from hpc_tune.config.load import load_config
from hpc_tune.faults import FaultPoint, Faults
from hpc_tune.train.run import run

PERIOD_S = 0.01
LONGEST_S = 120.0


def slow_disk(last_step: int | None) -> Faults:
    is_learned = threading.Event()

    def at(place: FaultPoint, step: int) -> None:
        if (place, step) == ("extremes", last_step):
            is_learned.set()

    def write(index: int, copies: Set[int]) -> None:
        # Training waits for values that have no copy.
        until_s = time.monotonic() + LONGEST_S
        while not copies and not is_learned.is_set() and time.monotonic() < until_s:
            time.sleep(0.01)
        if index in copies:
            is_learned.wait(LONGEST_S)

    return Faults(at=at, write=write, sample_period_s=PERIOD_S)


if __name__ == "__main__":
    config = load_config(None, sys.argv[1:])
    sys.exit(run(config, faults=slow_disk(config.train.max_steps)))
