"""A training run whose memory is sampled often enough for a comparison with its plan.

mpirun -np N python -m tests.support.planned_run [key=value ...]

Its disk is as slow as makes a save in the background take most: it begins when copies are made,
and does not take them before the last step is done. The last save is one that training waits for.
"""

import sys
import threading
import time
from typing import Any

from hpc_tune.checkpoint.writer import Writer
from hpc_tune.config.load import load_config
from hpc_tune.memory import governor
from hpc_tune.train import loop
from hpc_tune.train.run import run

LONGEST_S = 120.0

if __name__ == "__main__":
    governor.PERIOD_S = 0.01
    config = load_config(None, sys.argv[1:])
    take, evaluate = Writer._take, loop._evaluate
    is_learned = threading.Event()

    def late(writer: Writer, index: int) -> Any:
        until_s = time.monotonic() + LONGEST_S
        while not writer._copies and not is_learned.is_set() and time.monotonic() < until_s:
            time.sleep(0.01)
        writer._reach(index)  # training waits for the values of which there are no copies
        if index in writer._copies:
            is_learned.wait(LONGEST_S)
        return take(writer, index)

    def last(work: Any, step: int, before: Any) -> Any:
        if step == config.train.max_steps:
            is_learned.set()
            work.saver.finish()
            work.saver.set_in_pieces(True)
        return evaluate(work, step, before)

    Writer._take, loop._evaluate = late, last  # type: ignore[method-assign,assignment]
    sys.exit(run(config))
