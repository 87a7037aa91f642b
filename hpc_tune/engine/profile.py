"""train.profile=STEP:COUNT: where the time of a few optimizer steps goes, on every rank.

    each rank   torch profiler around its steps -> profile/rank-R.json.gz, for Perfetto
    all         seconds per step by kind -> rank 0: profile/summary.txt, and the log

Kinds: *compute* is the operators' own time (a GPU's kernels), *copies* the own time of those that
only move values, *messages* the time in collectives (``StepResult.comm_s``), *data* the wait for
the loader, *idle* the rest of the step: Python, launches, waiting.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpc_tune.engine.base import StepResult
from hpc_tune.log import log
from hpc_tune.rundir.facts import STRAGGLER_ADVICE, STRAGGLER_FACTOR, divide_by_median
from hpc_tune.world.comm import Comm

PROFILE_FOLDER = "profile"
_MAX_SHOWN_RANKS = 16
_COPY_OPS = ("aten::copy_", "aten::_to_copy", "aten::clone", "aten::contiguous", "Memcpy", "Memset")
_COMM_OPS = ("nccl", "gloo", "c10d", "record_param_comms")


@dataclass(frozen=True)
class StepBreakdown:
    """Seconds per step of one rank, by kind; ``step_s`` is the total."""

    rank: int
    host: str
    compute_s: float
    messages_s: float
    copies_s: float
    data_s: float
    step_s: float

    @property
    def work_s(self) -> float:
        """The time in which the rank works itself."""
        return self.compute_s + self.copies_s

    @property
    def idle_s(self) -> float:
        """The time that no other kind takes; 0 where kinds overlap."""
        accounted_s = self.compute_s + self.messages_s + self.copies_s + self.data_s
        return max(0.0, self.step_s - accounted_s)


class StepProfile:
    """Profiles the steps of ``steps`` (the first of a run is 1), on all ranks at once."""

    def __init__(
        self, comm: Comm, run_dir: Path, steps: range, done_steps: int, total_steps: int
    ) -> None:
        """Profile those of ``steps`` that a run still does after ``done_steps``."""
        if steps and not done_steps < steps[0] <= total_steps:
            if comm.is_rank_0:
                log.warning(
                    "train.profile=%d:%d is not among the steps that this run does, %d to %d: "
                    "no step is profiled",
                    steps[0],
                    len(steps),
                    done_steps + 1,
                    total_steps,
                )
            steps = range(0)
        steps = steps[: max(0, total_steps + 1 - steps.start)]
        self._comm, self._folder, self._steps = comm, run_dir / PROFILE_FOLDER, steps
        self._profiler: torch.profiler.profile | None = None
        self._comm_s = self._data_s = self._step_s = 0.0

    @contextmanager
    def profiling(self, step: int) -> Iterator[None]:
        """Surround the work of optimizer step ``step``."""
        if step not in self._steps:
            yield
            return
        is_on_gpu = self._comm.device.type == "cuda"
        if self._profiler is None:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if is_on_gpu else []
            self._profiler = torch.profiler.profile(activities=kinds)
            self._profiler.start()
        began_s = time.perf_counter()
        if is_on_gpu:
            torch.cuda.nvtx.range_push(f"step {step}")
        with torch.profiler.record_function(f"step {step}"):
            yield
        if is_on_gpu:
            torch.cuda.synchronize(self._comm.device)
            torch.cuda.nvtx.range_pop()
        self._step_s += time.perf_counter() - began_s

    def finish_step(self, step: int, result: StepResult, data_s: float) -> None:
        """Add what the loop measured; after the last step, write the files. Collective then."""
        if step not in self._steps:
            return
        self._comm_s += result.comm_s
        self._data_s += data_s
        self._step_s += data_s
        if step == self._steps[-1] and self._profiler is not None:
            self._finish(self._profiler)

    def _finish(self, profiler: torch.profiler.profile) -> None:
        count = len(self._steps)
        profiler.stop()
        self._profiler = None
        world = self._comm.world
        with _warning_if_unwritable(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / f"rank-{world.rank}.json.gz"))
        is_on_gpu = self._comm.device.type == "cuda"
        compute_s, copies_s = compute_and_copy_seconds(profiler.key_averages(), is_on_gpu)
        own_breakdown = StepBreakdown(
            world.rank,
            world.hostname,
            compute_s / count,
            self._comm_s / count,
            copies_s / count,
            self._data_s / count,
            self._step_s / count,
        )
        breakdowns = self._comm.gather(own_breakdown)
        first, last = self._steps[0], self._steps[-1]
        lines = [f"profile of steps {first} to {last}, seconds per step", *format_table(breakdowns)]
        if world.rank != 0:
            return
        with _warning_if_unwritable(self._folder):
            text = "\n".join(lines) + "\n"
            (self._folder / "summary.txt").write_text(text, encoding="utf-8")
        stragglers = lines[2 + len(breakdowns) :]
        for line in (*lines[: 2 + min(_MAX_SHOWN_RANKS, len(breakdowns))], *stragglers):
            log.info("%s", line)
        log.info("traces of all ranks and this table: %s", self._folder)


@contextmanager
def _warning_if_unwritable(folder: Path) -> Iterator[None]:
    """Warn instead of failing: a profile that cannot be written does not end the run."""
    try:
        yield
    except OSError as error:
        log.warning("%s cannot be written: %s", folder, error.strerror or error)


def compute_and_copy_seconds(events: Iterable[Any], is_on_gpu: bool) -> tuple[float, float]:
    """Return the seconds of compute and of copies among a profiler's averaged events."""
    compute_us = copies_us = 0.0
    for event in events:
        name = event.key
        if is_on_gpu:
            if event.device_type == torch.autograd.DeviceType.CPU or event.is_user_annotation:
                continue
            own_us = event.self_device_time_total
        else:
            own_us = event.self_cpu_time_total
            if not (name.startswith(("aten::", "bitsandbytes::")) or "Compiled" in name):
                continue
        if any(word in name for word in _COMM_OPS):
            continue
        if name.startswith(_COPY_OPS):
            copies_us += own_us
        else:
            compute_us += own_us
    return compute_us / 1e6, copies_us / 1e6


def format_table(breakdowns: Sequence[StepBreakdown]) -> list[str]:
    """Return a header, a line per rank, and a line for each rank that the others wait for."""
    width = max(len(breakdown.host) for breakdown in breakdowns) + 2
    names = ("compute", "messages", "copies", "data", "idle", "step")
    lines = [f"{'rank':>5}  {'host':{width}}" + "".join(f"{name:>10}" for name in names)]
    for s in breakdowns:
        parts = (s.compute_s, s.messages_s, s.copies_s, s.data_s, s.idle_s, s.step_s)
        numbers = "".join(f"{value:>10.3f}" for value in parts)
        lines.append(f"{s.rank:>5}  {s.host:{width}}{numbers}")
    for s, ratio in zip(breakdowns, divide_by_median([s.work_s for s in breakdowns]), strict=True):
        if ratio > STRAGGLER_FACTOR:
            lines.append(
                f"rank {s.rank} on {s.host} works {ratio:.2f} x as long as the median rank, and "
                f"the others wait for it: {STRAGGLER_ADVICE}"
            )
    return lines
