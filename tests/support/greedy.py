"""A training run that is hungry for memory in a way that a test chooses.

    python -m tests.support.greedy WAY BYTES [key=value ...]

WAY is what happens from step 3 on: ``leak`` takes BYTES more at each step for good, ``burst`` takes
BYTES per second within one step until it ends, ``batch`` makes each micro-batch take BYTES per
row while it is computed, and ``eval`` each one that is evaluated; ``slow-disk`` makes a save take
two seconds before it reads its first value, ``none`` does nothing.
"""

import sys
import time
from typing import Any

import torch

from hpc_tune.checkpoint import writer
from hpc_tune.config.load import load_config
from hpc_tune.engine.native import NativeEngine
from hpc_tune.train.run import run

FIRST_STEP = 3
_PIECE = 1 << 20
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

    def slowly(*args: Any) -> Any:
        time.sleep(2.0)
        return real_write(*args)

    real_write = writer.write_regions
    if way == "slow-disk":
        writer.write_regions = slowly  # type: ignore[assignment]
    NativeEngine.train_step = train_step  # type: ignore[method-assign,assignment]
    NativeEngine._forward = forward  # type: ignore[method-assign]


if __name__ == "__main__":
    plant(sys.argv[1], int(sys.argv[2]))
    is_off = "memory.governor=off" in sys.argv
    sys.exit(run(load_config(None, sys.argv[3:]), force=is_off))
