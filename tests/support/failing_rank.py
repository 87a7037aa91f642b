"""Trains as ``python -m hpc_tune`` does, until one rank fails at a place of the loop.

    python -m tests.support.failing_rank HOW RANK PLACE STEP [key=value ...]

HOW is ``raise``: an unexpected exception; ``stop``: the process exists but no longer responds; or
``sleep``: it comes an hour late. PLACE and STEP are those of ``hpc_tune.faults``.
"""

import os
import signal
import sys
import time

import torch.distributed as dist

from hpc_tune.config.load import load_config
from hpc_tune.faults import FaultPoint, Faults
from hpc_tune.train.run import run


def fail_at(how: str, rank: int, place: str, step: int) -> Faults:
    def at(reached: FaultPoint, number: int) -> None:
        if (reached, number) != (place, step) or dist.get_rank() != rank:
            return
        if how == "raise":
            raise KeyError(f"planted on rank {rank}")
        if how == "sleep":
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGSTOP)

    return Faults(at=at)


if __name__ == "__main__":
    how, rank, place, step, *overrides = sys.argv[1:]
    faults = fail_at(how, int(rank), place, int(step))
    sys.exit(run(load_config(None, overrides), faults=faults))
