"""A training run that is hungry for memory in a way that a test chooses.

    python -m tests.support.memory_hog WAY BYTES [key=value ...]

WAY is what happens from step 3 on: ``leak`` takes BYTES more at each step for good, ``burst`` takes
BYTES per second within one step until it ends, ``batch`` makes each micro-batch take BYTES per
row while it is computed, and ``eval`` each one that is evaluated; ``slow-disk`` makes a save in the
background keep its copies through a whole step, ``none`` does nothing.
"""

import sys
import time
from collections.abc import Set

import torch

from hpc_tune.config.load import load_config
from hpc_tune.faults import NO_FAULTS, FaultPoint, Faults
from hpc_tune.train.run import run

FIRST_STEP = 3
_PIECE = 1 << 20
_SLOW_S = 6.0


def take(num_bytes: int) -> torch.Tensor:
    """Return memory that has been written to, since only that counts."""
    return torch.ones(num_bytes, dtype=torch.uint8)


class Hog:
    """The planted faults, and the memory that they hold. Steps count from this start."""

    def __init__(self, way: str, num_bytes: int) -> None:
        self._num_bytes, self._steps = num_bytes, 0
        self._held: list[torch.Tensor] = []
        self.faults = {
            "leak": Faults(at=self._leak),
            "burst": Faults(at=self._burst),
            "batch": Faults(at=self._begins, compute=self._training),
            "eval": Faults(at=self._begins, compute=self._evaluating),
            "slow-disk": Faults(at=self._begins, write=self._slowly),
            "none": NO_FAULTS,
        }[way]

    def _begins(self, place: FaultPoint, step: int) -> bool:
        """Count the steps; return whether a hungry one begins."""
        self._steps += place == "step"
        return place == "step" and self._steps >= FIRST_STEP

    def _leak(self, place: FaultPoint, step: int) -> None:
        if self._begins(place, step):
            self._held.append(take(self._num_bytes))

    def _burst(self, place: FaultPoint, step: int) -> None:
        hungry = self._begins(place, step)
        while hungry:
            self._held.append(take(_PIECE))
            time.sleep(_PIECE / self._num_bytes)

    def _training(self, rows: int) -> None:
        if torch.is_grad_enabled():
            self._compute(rows)

    def _evaluating(self, rows: int) -> None:
        if not torch.is_grad_enabled():
            self._compute(rows)

    def _compute(self, rows: int) -> None:
        if self._steps >= FIRST_STEP:
            taken = take(self._num_bytes * rows)
            time.sleep(0.05)
            del taken

    def _slowly(self, index: int, copies: Set[int]) -> None:
        # Holds value 0 until training has made its copies, and value 2 until two steps later.
        until_s, step = time.monotonic() + _SLOW_S, self._steps
        while index == 0 and not copies and time.monotonic() < until_s:
            time.sleep(0.01)
        while index == 2 and copies and self._steps < step + 2 and time.monotonic() < until_s:
            time.sleep(0.01)


if __name__ == "__main__":
    hog = Hog(sys.argv[1], int(sys.argv[2]))
    is_off = "memory.governor=off" in sys.argv
    sys.exit(run(load_config(None, sys.argv[3:]), force=is_off, faults=hog.faults))
