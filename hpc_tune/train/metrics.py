"""What a run reports about each step: metrics.jsonl, trackers, the progress display."""

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpc_tune.batch import IGNORED_LABEL, Batch
from hpc_tune.data.loader import Loader
from hpc_tune.data.packed_rows import MixedRows
from hpc_tune.engine.base import StepResult
from hpc_tune.log import Progress, log
from hpc_tune.memory.monitor import MemoryMonitor, MemorySample
from hpc_tune.model.balance import Router, RouterSums, summarize_expert_load
from hpc_tune.model.objective import compute_metrics
from hpc_tune.model.shared_rows import count_own_tokens
from hpc_tune.plan.hardware import peak_flops
from hpc_tune.probe.software import git_commit
from hpc_tune.rundir.json_lines import (
    EXPERTS_FILE,
    METRICS_FILE,
    RANKS_FILE,
    EvalMetrics,
    EventsWriter,
    ExpertTokens,
    JsonLinesWriter,
    RankTimes,
    StepMetrics,
    drop_lines_after,
    to_row,
)
from hpc_tune.step.messages import expected_bytes
from hpc_tune.step.plan import StepPlan
from hpc_tune.step.size import attention_flops, weight_flops_per_token
from hpc_tune.trackers import RunMetadata, Trackers, open_trackers
from hpc_tune.train.data import Data
from hpc_tune.train.evaluate import EvalResult
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model
from hpc_tune.units import format_bytes, format_count, format_seconds, list_some
from hpc_tune.world.comm import Comm

# -- ranks.jsonl: how long each rank works on a step.


_MAX_RANK_WORK_LINES = 200  # of ranks.jsonl: 100,000 steps on 512 ranks take less than a megabyte


class RankWorkWriter:
    """Writes each rank's mean seconds of its own work per step; nothing in a world of one rank."""

    def __init__(
        self, world_size: int, run_dir: Path | None, start_step: int, total_steps: int
    ) -> None:
        """Write for ``world_size`` ranks from ``start_step`` on; ``run_dir``: None but on rank 0.

        Raises:
            OSError: if the file cannot be made.
        """
        self._interval_steps = max(1, total_steps // _MAX_RANK_WORK_LINES)
        self._work_s, self._num_steps = [0.0] * world_size, 0
        path = run_dir / RANKS_FILE if run_dir is not None and world_size > 1 else None
        if path is not None:
            drop_lines_after(path, start_step)
        self._lines, self._writes = JsonLinesWriter(path), path is not None

    def add(self, step: int, work_s: Sequence[float]) -> None:
        """Add the seconds of a step, by rank; write their means when a line is due."""
        if not self._writes:
            return
        self._work_s = [sum(both) for both in zip(self._work_s, work_s, strict=True)]
        self._num_steps += 1
        if step % self._interval_steps == 0:
            means_s = [round(rank_work_s / self._num_steps, 4) for rank_work_s in self._work_s]
            self._lines.write(**to_row(RankTimes(step, means_s)))
            self._work_s, self._num_steps = [0.0] * len(means_s), 0

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


# -- experts.jsonl: how many tokens each expert of a mixture got, and which experts starve.


# An expert starves with less than this share of its layer's mean; layers with a mean below
# _MIN_MEAN_TOKENS are not judged, since chance alone may explain such counts.
_STARVING_SHARE, _MIN_MEAN_TOKENS = 0.01, 100
_MAX_SHOWN = 8


class ExpertLoadWriter:
    """Sums the tokens of each expert over steps; writes them at each evaluation and at the end."""

    def __init__(
        self, run_dir: Path, start_step: int, routers: Sequence[Router], events: EventsWriter
    ) -> None:
        """Write into ``run_dir``, from ``start_step`` on. Only for rank 0.

        Raises:
            OSError: if the file cannot be made.
        """
        self._layers, self._events = [router.layer for router in routers], events
        self._counts = [[0] * router.num_experts for router in routers]
        self._last_written_step = self._step = start_step
        self._last_warned_experts: Mapping[int, list[int]] = {}
        drop_lines_after(run_dir / EXPERTS_FILE, start_step)
        self._lines = JsonLinesWriter(run_dir / EXPERTS_FILE)

    def add(self, step: int, router_sums: RouterSums) -> None:
        """Add the tokens of a step."""
        self._step = step
        for row, new_counts in zip(self._counts, router_sums.counts, strict=True):
            row[:] = [count + int(new) for count, new in zip(row, new_counts, strict=True)]

    def write(self) -> None:
        """Write a line with the tokens since the last line, and warn of experts that starve."""
        if self._step == self._last_written_step:
            return
        line = ExpertTokens(self._step, self._last_written_step, self._layers, self._counts)
        self._lines.write(**to_row(line))
        starving_experts = find_starving_experts(self._layers, self._counts)
        if starving_experts and starving_experts != self._last_warned_experts:
            text = describe_starving_experts(starving_experts, self._last_written_step, self._step)
            log.warning("%s", text)
            self._events.write("warning", self._step, message=text)
        self._last_warned_experts, self._last_written_step = starving_experts, self._step
        self._counts = [[0] * len(row) for row in self._counts]

    def close(self) -> None:
        """Write the remaining counts and close the file."""
        self.write()
        self._lines.close()


def find_starving_experts(
    layers: Sequence[int], counts: Sequence[Sequence[int]]
) -> dict[int, list[int]]:
    """Return the experts with almost no tokens, by layer number."""
    starving_experts = {}
    for layer, row in zip(layers, counts, strict=True):
        mean = sum(row) / len(row)
        experts = [expert for expert, count in enumerate(row) if count < _STARVING_SHARE * mean]
        if experts and mean >= _MIN_MEAN_TOKENS:
            starving_experts[layer] = experts
    return starving_experts


def describe_starving_experts(
    starving_experts: Mapping[int, Sequence[int]], start_step: int, step: int
) -> str:
    """Return a warning about experts that starve, naming a few of them."""
    layer_texts = [
        f"layer {i}: {list_some(experts, _MAX_SHOWN)}" for i, experts in starving_experts.items()
    ]
    return (
        "experts starve, with less than a hundredth of an even share of the tokens in steps "
        f"{start_step + 1} to {step}: {list_some(layer_texts, _MAX_SHOWN, '; ')}. "
        "tune.router_aux_loss spreads tokens"
    )


# -- metrics.jsonl, trackers and the progress display.


_MAX_STEP_TIMES = 1000
_STEPS_TO_ESTIMATE = 3
# The share of a step spent in messages that the progress line shows, and that causes a warning.
COMM_SHOWN_SHARE, COMM_WARN_SHARE = 0.05, 0.5


def _is_mostly_waiting(metrics: StepMetrics) -> bool:
    """Whether rank 0 spends most of its time in messages waiting for the slowest rank."""
    return metrics.most_work_s - metrics.least_work_s > COMM_WARN_SHARE * metrics.comm_s


def _describe_comm_time(metrics: StepMetrics) -> str:
    return (
        f"waiting for rank {metrics.slowest_rank}" if _is_mostly_waiting(metrics) else "in messages"
    )


class MetricsWriter:
    """Writes metrics on rank 0 (``run_dir`` given), discards them on the other ranks.

    ``steps_s``: seconds of the newest steps. ``advise``: warn once if messages take most of a step.

    Raises:
        OSError: if a file cannot be made.
    """

    def __init__(
        self,
        run_dir: Path | None,
        total_steps: int,
        start_step: int,
        trackers: Trackers | None = None,
        warns_of_comm_time: bool = False,
        expert_writer: ExpertLoadWriter | None = None,
    ) -> None:
        self._expert_writer = expert_writer
        self._advise = warns_of_comm_time and run_dir is not None
        self._total_steps = total_steps if run_dir is not None else 0
        self.steps_s: deque[float] = deque(maxlen=_MAX_STEP_TIMES)
        self._progress = Progress("step", total_steps, start_step, enabled=run_dir is not None)
        if run_dir is not None:
            drop_lines_after(run_dir / METRICS_FILE, start_step)
        self._lines = JsonLinesWriter(run_dir / METRICS_FILE if run_dir else None)
        self._trackers = trackers or Trackers()

    def record_step(self, metrics: StepMetrics, router_sums: RouterSums | None = None) -> None:
        """Record one optimizer step, with the sums of a mixture's routers."""
        if self._expert_writer is not None and router_sums is not None:
            self._expert_writer.add(metrics.step, router_sums)
        row = to_row(metrics)
        self.steps_s.append(metrics.step_s)
        self._lines.write(**row)
        self._write_trackers(metrics.step, row)
        note = f"loss {metrics.loss:.4f}  "
        if metrics.preferences:
            note += f"accuracy {metrics.preferences['accuracy']:.1%}  "
        note += f"{format_count(metrics.tokens_per_s)} tokens/s"
        if metrics.comm_s > COMM_SHOWN_SHARE * metrics.step_s:
            note += f"  {metrics.comm_s / metrics.step_s:.0%} {_describe_comm_time(metrics)}"
        if metrics.host_bytes is not None:
            note += f"  host {format_bytes(metrics.host_bytes)}"
        self._progress.update(metrics.step, note)
        if len(self.steps_s) == _STEPS_TO_ESTIMATE and self._total_steps > metrics.step:
            self._log_remaining_time(self._total_steps - metrics.step)
        is_slow = metrics.comm_s > COMM_WARN_SHARE * metrics.step_s
        if self._advise and len(self.steps_s) == 2 and is_slow and not _is_mostly_waiting(metrics):
            log.warning(
                "%.0f%% of a step goes to messages: parallel=auto measures, and chooses the "
                "fastest layout and number of ranks",
                100 * metrics.comm_s / metrics.step_s,
            )

    def record_evaluation(self, step: int, eval_loss: float, eval_result: EvalResult) -> None:
        """Record one evaluation: the mean loss over the held-out data's loss tokens, or pairs."""
        loss_terms = {
            "eval_pairs"
            if eval_result.preference_metrics
            else "eval_tokens": eval_result.loss_terms
        }
        row = to_row(
            EvalMetrics(
                time=time.time(),
                step=step,
                eval_loss=eval_loss,
                eval_s=eval_result.seconds,
                eval_preferences=eval_result.preference_metrics,
                eval_losses=eval_result.losses,
                **loss_terms,
            )
        )
        self._lines.write(**row)
        self._write_trackers(step, row)
        self._progress.exclude(eval_result.seconds)
        if self._expert_writer is not None:
            self._expert_writer.write()

    def _log_remaining_time(self, steps: int) -> None:
        """Log an estimate of when the run will end, without evaluations and saves."""
        usual_s = statistics.median(self.steps_s)
        left_s = steps * usual_s
        log.info(
            "time    about %s for %d steps of %.3g s, until %s",
            format_seconds(left_s),
            steps,
            usual_s,
            time.strftime("%a %H:%M", time.localtime(time.time() + left_s)),
        )

    def close(self) -> None:
        """Close the files and the progress bar."""
        self._progress.close()
        self._lines.close()
        self._trackers.close()
        if self._expert_writer is not None:
            self._expert_writer.close()

    def _write_trackers(self, step: int, row: Mapping[str, Any]) -> None:
        scalars = {}
        for name, value in row.items():
            for kind, number in value.items() if isinstance(value, dict) else (("", value),):
                if name not in ("step", "time") and number is not None:
                    scalars[f"{name}/{kind}" if kind else name] = number
        self._trackers.write(step, scalars)


@dataclass(frozen=True)
class Flops:
    """The flops that training needs: ``weights_per_token`` for the weights, and ``attention`` of
    documents of given lengths. ``peak_per_s``: of all ranks' devices together, None if unknown.
    """

    weights_per_token: float
    attention: Callable[[Sequence[int]], float]
    peak_per_s: float | None


@dataclass(frozen=True)
class FinishedStep:
    """A finished step. ``loss_terms``, ``loss_tokens``, ``tokens``, ``attention_flops`` and
    ``source_tokens`` (the loss tokens of each source of a mixture) are sums over all ranks.
    ``step_s`` includes ``data_s``, the wait for rows.
    """

    number: int
    lr: float
    batches: Sequence[Batch]
    loss_terms: float
    loss_tokens: int
    tokens: int
    attention_flops: float
    result: StepResult
    step_s: float
    data_s: float
    source_tokens: Sequence[int] = ()


@dataclass(frozen=True)
class RankUsage:
    """One rank's values of a step for which the extremes over all ranks are written."""

    host_bytes: float = 0.0
    host_ranks_bytes: float = 0.0
    device_bytes: float = 0.0
    work_s: float = 0.0


@dataclass(frozen=True)
class UsageByRank:
    """The values of ``RankUsage`` of all ranks, by rank."""

    host_bytes: Sequence[float]
    host_ranks_bytes: Sequence[float]
    device_bytes: Sequence[float]
    work_s: Sequence[float]


class Recorder:
    """Records each step on all ranks together: ``prepare_record`` when the step is done, ``record``
    once all ranks' values are known. These arrive with the exchange at the boundary before the next
    step, since a message of their own would take longer with more ranks; a run that fails in
    between has no line for its last step. ``tokens``: of all ranks in the steps so far.
    """

    def __init__(
        self,
        comm: Comm,
        plan: StepPlan,
        flops: Flops,
        loader: Loader,
        monitor: MemoryMonitor,
        metrics: MetricsWriter,
        rank_work: RankWorkWriter,
        mixture: MixedRows | None = None,
    ) -> None:
        self.metrics, self._rank_work = metrics, rank_work
        self._comm, self.plan, self._flops = comm, plan, flops
        self._loader, self._monitor, self._mixture = loader, monitor, mixture
        self.tokens = 0
        self._pending_record: tuple[StepMetrics, RouterSums | None, RankUsage] | None = None
        coordinates = plan.layout.coordinates(comm.world.rank)
        self._counts_rows = coordinates.counts_rows
        self._row_shard = plan.row_shard(coordinates.context)

    def count_tokens_and_flops(self, batches: Sequence[Batch]) -> tuple[float, int, int, float]:
        """Return the loss terms, loss tokens, tokens and attention flops of the rows that this rank
        counts.
        """
        counted_batches = batches if self._counts_rows else []
        return (
            math.fsum(b.num_loss_terms for b in counted_batches),
            sum(b.num_loss_tokens for b in counted_batches),
            sum(b.num_tokens for b in counted_batches),
            sum(self._flops.attention(b.unpadded_document_lengths) for b in counted_batches),
        )

    def loss_tokens_by_source(self, batches: Sequence[Batch]) -> tuple[int, ...]:
        """Return the loss tokens of each source of a mixture in the rows that this rank counts."""
        if self._mixture is None:
            return ()
        counts = [0] * len(self._mixture.names)
        for batch in (batch for batch in batches if self._counts_rows and batch.num_tokens):
            loss_tokens_B = (batch.labels_BT != IGNORED_LABEL).sum(1).tolist()
            for row, num_loss_tokens in zip(batch.rows, loss_tokens_B, strict=True):
                counts[self._mixture.source_and_row(row)[0]] += num_loss_tokens
        return tuple(counts)

    def _key_by_source_name(self, counts: Sequence[int]) -> dict[str, int] | None:
        names = self._mixture.names if self._mixture is not None else ()
        return dict(zip(names, counts, strict=True)) or None

    def prepare_record(
        self, step: FinishedStep, sample: MemorySample | None, recomputes: bool
    ) -> None:
        """Take in a finished step with its peak memory ``sample``; ``record`` writes it later."""
        result, step_s, peak_per_s = step.result, step.step_s, self._flops.peak_per_s
        self.tokens += step.tokens
        flops = step.tokens * self._flops.weights_per_token + step.attention_flops
        device = sample.device if sample else None
        usage = RankUsage(
            sample.host_bytes if sample else 0,
            sample.ranks_bytes if sample else 0,
            device.used_bytes if device else 0,
            step_s - step.data_s - result.comm_s,
        )
        metrics = StepMetrics(
            time=time.time(),
            step=step.number,
            epoch=round(self._loader.epoch, 6),
            loss=result.loss,
            lr=step.lr,
            grad_norm=result.grad_norm,
            tokens=step.tokens,
            loss_tokens=step.loss_tokens,
            tokens_per_s=step.tokens / step_s,
            mfu=flops / step_s / peak_per_s if peak_per_s else None,
            step_s=step_s,
            data_s=step.data_s,
            comm_s=result.comm_s,
            most_work_s=0.0,
            least_work_s=0.0,
            slowest_rank=0,
            sent_bytes=result.sent_bytes,
            expected_bytes=expected_bytes(
                self.plan,
                [count_own_tokens(batch, self._row_shard) for batch in step.batches],
                recomputes,
            ),
            device_util=self._monitor.device_utilization(),
            host_bytes=sample.host_bytes if sample else None,
            host_ranks_bytes=sample.ranks_bytes if sample else None,
            host_limit_bytes=sample.host_limit_bytes if sample else None,
            device_bytes=device.used_bytes if device else None,
            device_limit_bytes=device.limit_bytes if device else None,
            samples_seen=self._loader.rows,
            preferences=compute_metrics(result.sums, int(step.loss_terms)),
            source_tokens=self._key_by_source_name(step.source_tokens),
            experts=summarize_expert_load(result.routers, step.tokens),
        )
        self._pending_record = metrics, result.routers, usage

    @property
    def local_usage(self) -> RankUsage:
        """This rank's values of the step that is prepared but not yet recorded."""
        return self._pending_record[2] if self._pending_record is not None else RankUsage()

    def record(self, values_by_rank: UsageByRank) -> None:
        """Record the prepared step, if there is one, with the values of all ranks."""
        if self._pending_record is None:
            return
        (metrics, routers, _), self._pending_record = self._pending_record, None
        self._rank_work.add(metrics.step, values_by_rank.work_s)
        self.metrics.record_step(
            replace(metrics, **_find_extremes(metrics, values_by_rank)), routers
        )

    def record_now(self) -> None:
        """Record the step with a separate exchange, before an evaluation or a save. Collective."""
        self.record(UsageByRank(*self._comm.gather_elementwise(astuple(self.local_usage))))

    def close(self) -> None:
        """Close the files and the progress bar."""
        self.metrics.close()
        self._rank_work.close()


def _find_extremes(metrics: StepMetrics, values_by_rank: UsageByRank) -> dict[str, Any]:
    """Return the step's fields that are extremes over all ranks; times rounded to 0.1 ms."""
    tenths_of_ms = [max(0, round(1e4 * work)) for work in values_by_rank.work_s]
    max_work, slowest_rank = max((work, rank) for rank, work in enumerate(tenths_of_ms))
    fields: dict[str, Any] = {
        "most_work_s": max_work / 1e4,
        "least_work_s": min(tenths_of_ms) / 1e4,
        "slowest_rank": slowest_rank,
    }
    for name in ("host_bytes", "host_ranks_bytes", "device_bytes"):
        if getattr(metrics, name) is not None:
            fields[name] = int(max(getattr(values_by_rank, name)))
    return fields


def open_recorder(job: Job, model: Model, plan: StepPlan, data: Data, start_step: int) -> Recorder:
    """Open the files and trackers that record the steps after ``start_step``. Collective."""
    comm, peak_per_s = job.setup_comm, _peak_flops(job.setup_comm)

    def make_metrics_writer() -> MetricsWriter:
        if not comm.is_rank_0:
            return MetricsWriter(None, data.total_steps, start_step)
        trackers = _open_run_trackers(job, model, start_step)
        advise, routers = job.candidate is None, model.built.routers
        experts = ExpertLoadWriter(job.dir, start_step, routers, job.events) if routers else None
        return MetricsWriter(job.dir, data.total_steps, start_step, trackers, advise, experts)

    def make_rank_work_writer() -> RankWorkWriter:
        run_dir = job.dir if comm.is_rank_0 else None
        return RankWorkWriter(comm.world.size, run_dir, start_step, data.total_steps)

    flops = Flops(
        weight_flops_per_token(model.size, model.built.config),
        partial(attention_flops, model.built.config),
        peak_per_s * comm.world.size if peak_per_s else None,
    )
    metrics = comm.run_and_agree("opening the metrics", make_metrics_writer)
    rank_work = comm.run_and_agree("opening ranks.jsonl", make_rank_work_writer)
    arguments = job.step_comm, plan, flops, data.loader, job.monitor
    return Recorder(*arguments, metrics, rank_work, data.mixture)


def _peak_flops(comm: Comm) -> float | None:
    if comm.device.type == "cpu":
        return None
    return peak_flops(torch.cuda.get_device_name(comm.device))


def _open_run_trackers(job: Job, model: Model, step: int) -> Trackers:
    run, settings = job.config.run, model.config.model_dump(mode="json")
    name = run.name or job.dir.absolute().name
    facts = RunMetadata(job.dir, name, run.tags, run.notes, git_commit(), settings, step)
    return open_trackers(run, facts)
