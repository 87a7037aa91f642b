"""A training run that is hungry for memory in a way that a test chooses.

    python -m tests.support.greedy WAY BYTES [key=value ...]

WAY is what happens from step 3 on: ``leak`` takes BYTES more at each step for good, ``burst`` takes
BYTES per second within one step until it ends, ``batch`` makes each micro-batch take BYTES per
row while it is computed, and ``eval`` each one that is evaluated; ``slow-disk`` makes a save in the
background keep its copies through a whole step, ``none`` does nothing.
"""

import sys
import time
from typing import Any

import torch

from hpc_tune.checkpoint.writer import Writer
from hpc_tune.config.load import load_config
from hpc_tune.engine.native import NativeEngine
from hpc_tune.train.run import run

FIRST_STEP = 3
_PIECE = 1 << 20
_SLOW_S = 6.0
_held: list[torch.Tensor] = []
_steps = 0


def take(num_bytes: int) -> torch.Tensor:
    """Return memory that was written to: only that counts."""
    return torch.ones(num_bytes, dtype=torch.uint8)


def plant(way: str, num_bytes: int) -> None:
    """Make the engine do as asked."""
    real_step, real_forward = NativeEngine.train_step, NativeEngine._forward

    def train_step(self: NativeEngine, *args: Any) -> Any:
        global _steps
        _steps += 1
        if _steps >= FIRST_STEP and way == "leak":
            _held.append(take(num_bytes))
        if _steps == FIRST_STEP and way == "burst":
            while True:
                _held.append(take(_PIECE))
                time.sleep(_PIECE / num_bytes)
        return real_step(self, *args)

    def forward(self: NativeEngine, chunk: int, batch: Any, hidden_BTD: Any) -> Any:
        hungry = "batch" if torch.is_grad_enabled() else "eval"
        if way == hungry and _steps >= FIRST_STEP:
            taken = take(num_bytes * batch.tokens_BT.shape[0])
            time.sleep(0.05)
            del taken
        return real_forward(self, chunk, batch, hidden_BTD)

    def slowly(writer: Writer, index: int) -> Any:
        # Training makes its copies while the first value is read, and goes on at the second.
        slow_s = _SLOW_S if writer._budget_bytes else 0.0
        until_s, step = time.monotonic() + slow_s, _steps
        while index == 0 and not writer._copies and time.monotonic() < until_s:
            time.sleep(0.01)
        while index == 2 and _steps < step + 2 and time.monotonic() < until_s:
            time.sleep(0.01)
        return real_take(writer, index)

    real_take = Writer._take
    if way == "slow-disk":
        Writer._take = slowly  # type: ignore[method-assign]
    NativeEngine.train_step = train_step  # type: ignore[method-assign,assignment]
    NativeEngine._forward = forward  # type: ignore[method-assign]


if __name__ == "__main__":
    plant(sys.argv[1], int(sys.argv[2]))
    is_off = "memory.governor=off" in sys.argv
    sys.exit(run(load_config(None, sys.argv[3:]), force=is_off))
