"""A device that reports given samples, and a program for ranks, one with too small a device.

    python -m tests.support.full_device JOBS.json RESULTS FIRST   (see many_runs.py)

JOBS.json is a list of {"overrides": [...], "where": "forward", "backward", "zero" or null}: where
the last rank's device runs out of memory, if a micro-batch has more than two rows ("zero": in a
pass of DeepSpeed). "step K" and "evaluation K": only once, in the K-th pass of step 2 or of the
evaluation after it. The error is raised where torch's allocator would; all that follows is real.
"""

import os
from dataclasses import replace
from typing import Any

import torch

from hpc_tune.batch import Batch
from hpc_tune.cluster.launchers import rank_hint
from hpc_tune.engine import gradients
from hpc_tune.engine.gradients import OverlappedAllReduce
from hpc_tune.engine.zero.engine import ZeroEngine
from hpc_tune.faults import Faults
from hpc_tune.memory.device import DeviceSample
from tests.support import many_runs

GIB = 1 << 30
SAMPLE = DeviceSample(40 * GIB, 80 * GIB, 30 * GIB, 50 * GIB, GIB, 0, 0)
ERROR = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 1.00 GiB is free."
)
ROOM_ROWS, LAST_RANK = 2, 1


class Device:
    """Returns ``samples`` one after the other, and the last one from then on."""

    def __init__(self, *samples: DeviceSample) -> None:
        self._samples = list(samples) or [SAMPLE]

    def sample(self) -> DeviceSample:
        return self._samples.pop(0) if len(self._samples) > 1 else self._samples[0]

    def utilization(self) -> float | None:
        return 0.5


def sample_at(share: float, retries: int = 0) -> DeviceSample:
    """Return a sample whose peak is ``share`` of the limit, with ``retries`` so far."""
    return replace(SAMPLE, used_bytes=int(share * SAMPLE.limit_bytes), retries=retries)


def with_room_for(rows: int) -> Faults:
    """Return a device that runs out in the forward pass of a micro-batch of more than ``rows``."""

    def compute(num_rows: int) -> None:
        if torch.is_grad_enabled() and num_rows > rows:
            raise torch.OutOfMemoryError(ERROR)

    return Faults(device=Device(), compute=compute, offloads_without_gpu=True)


def with_room_in_forward() -> Faults:
    """Return one that runs out in a step's last backward pass, when half of it is reduced."""
    done, rows = OverlappedAllReduce._handle_gradient, 0

    def compute(num_rows: int) -> None:
        nonlocal rows
        rows = num_rows

    def run_out(sums: OverlappedAllReduce, number: int, parameter: torch.Tensor) -> None:
        done(sums, number, parameter)
        if sums._is_last and rows > ROOM_ROWS and len(sums._works) == len(sums._pieces) // 2:
            raise torch.OutOfMemoryError(ERROR)

    OverlappedAllReduce._handle_gradient = run_out
    return Faults(device=Device(), compute=compute, offloads_without_gpu=True)


def with_room_under_zero() -> Faults:
    """Return one that runs out in DeepSpeed's passes."""
    backward = ZeroEngine._backward

    def run_out(engine: ZeroEngine, batch: Batch, scale: float) -> torch.Tensor:
        if batch.tokens_BT.shape[0] > ROOM_ROWS:
            raise torch.OutOfMemoryError(ERROR)
        return backward(engine, batch, scale)

    ZeroEngine._backward = run_out
    return Faults(device=Device())


class Once:
    """A device that runs out in one pass of step 2, or of the evaluation after it."""

    def __init__(self, phase: str, number: int) -> None:
        self._begins, self._left = (
            {"step": ("step", 2), "evaluation": ("extremes", 2)}[phase],
            number,
        )
        self._counts = False

    def at(self, place: str, step: int) -> None:
        self._counts = (place, step) == self._begins

    def compute(self, num_rows: int) -> None:
        if self._counts:
            self._left -= 1
            if self._left == 0:
                raise torch.OutOfMemoryError(ERROR)

    def faults(self) -> Faults:
        return Faults(device=Device(), compute=self.compute, at=self.at, offloads_without_gpu=True)


def faults_of(job: dict[str, Any]) -> Faults:
    """Return the faults of this rank."""
    last = min(LAST_RANK, int(job.get("ranks", 2)) - 1)
    where = job["where"] if rank_hint(os.environ) == last else None
    if where and where.split()[0] in ("step", "evaluation"):
        phase, number = where.split()
        return Once(phase, int(number)).faults()
    match where:
        case "forward":
            return with_room_for(ROOM_ROWS)
        case "backward":
            return with_room_in_forward()
        case "zero":
            return with_room_under_zero()
    return Faults(device=Device(), offloads_without_gpu=True)


if __name__ == "__main__":
    gradients.GRADIENT_BUCKET_BYTES = 1 << 16  # a tiny model then has several
    many_runs.main(lambda job: many_runs.train(job, faults_of(job)))
