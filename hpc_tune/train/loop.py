"""The one loop. Every engine, layout and launcher goes through it.

    one boundary per step:  loss tokens, stop requests and due saves of all ranks, agreed at once
    attempts.step           engine.train_step, all micro-batches of the step; None: decide again
    metrics, evaluation, checkpoint

Control flow depends on agreed values only, so that every rank takes the same branch.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_tune.batch import Batch
from hpc_tune.checkpoint.state import Evals, RunState
from hpc_tune.config.schema import RunConfig
from hpc_tune.data.loader import Loader
from hpc_tune.engine.adamw import for_batch, learning_rate
from hpc_tune.engine.base import Engine, StepResult
from hpc_tune.errors import HpcTuneError
from hpc_tune.faults import Faults
from hpc_tune.log import log
from hpc_tune.memory.host import trim_heap
from hpc_tune.memory.monitor import MemorySample, Monitor
from hpc_tune.memory.policy import Action
from hpc_tune.rundir.outcome import Outcome, done, stopped
from hpc_tune.step.messages import expected_bytes
from hpc_tune.step.plan import StepPlan
from hpc_tune.train import garbage
from hpc_tune.train.attempt import Attempts
from hpc_tune.train.checkpointing import Checkpointer
from hpc_tune.train.governor import Governor, facts_of
from hpc_tune.train.metrics import Metrics, StepMetrics
from hpc_tune.train.profile import StepProfile
from hpc_tune.train.rank_work import RankWork
from hpc_tune.train.step_status import StepStatus
from hpc_tune.world.comm import Comm
from hpc_tune.world.step_limit import StepLimit
from hpc_tune.world.stop import StopFlag

_MAX_RANKS = 1 << 20
_FIRST_SAVE_S = 300.0  # some launchers leave no time to save; and a save that fails shows early


@dataclass(frozen=True)
class Work:
    """What the loop trains with.

    ``state(step, loader_state, evals)`` is what a checkpoint of that step says; ``weight_flops`` of
    a token, ``attention_flops`` of documents of some lengths and ``peak_flops`` (of all ranks) give
    MFU, where the peak is known.
    ``counts_rows``: of the ranks that work on the same rows, this one counts them. ``evals`` holds
    those of the resumed run.
    """

    comm: Comm
    config: RunConfig
    engine: Engine
    loader: Loader
    eval_batches: Callable[[], Iterable[Batch]] | None
    counts_rows: bool
    saver: Checkpointer
    attempts: Attempts
    state: Callable[[int, dict[str, Any], Evals], RunState]
    evals: Evals
    metrics: Metrics
    rank_work: RankWork
    monitor: Monitor
    governor: Governor
    step_limit: StepLimit
    profile: StepProfile
    stop: StopFlag
    start_step: int
    total_steps: int
    weight_flops: float
    attention_flops: Callable[[Sequence[int]], float]
    peak_flops: float | None
    plan: StepPlan
    faults: Faults


def run_loop(work: Work) -> Outcome:
    """Train to the end, or to an agreed stop, and save a checkpoint there.

    Raises:
        HpcTuneError: if the loss is not finite, or a checkpoint cannot be written.
    """
    start_step = step = saved_step = work.start_step
    saver, evals = work.saver, work.evals
    saved_at_s, step_s = _clock_of_saves(work.config.checkpoint.every_minutes), 0.0
    optim = for_batch(work.config.optim, work.config.batch.global_size)
    if work.eval_batches is not None and evals.loss_at(step) is None and _is_due(work, step):
        evals = _evaluate(work, work.eval_batches, step, evals)
        saver.add_evaluation(work.state(step, work.loader.state(), evals))
    while step < work.total_steps:
        work.step_limit.enter(f"beginning step {step + 1}")
        loader_state, began_s = work.loader.state(), time.monotonic()
        batches = work.loader.next_step()
        data_s = time.monotonic() - began_s
        # What must still fit before the time limit: another step like the last, and two saves.
        margin_s = step_s + 2 * saver.last_save_s
        work.faults.at("boundary", step + 1)
        reason = work.stop.reason(margin_s)
        status = _vote(work, batches, saved_at_s, reason)
        if status.garbage:
            gc.collect()
        stop_reason = _first_reason(work, reason) if status.stop else None
        saver.advance(status.saves_done)
        micro_size = work.loader.micro_size
        need = work.governor.apply(status.levels, step)
        stop_reason = stop_reason or (need.words if need else None)
        if stop_reason:
            saver.finish()
        # A save that is due by the clock waits for the one before it; a stop tries one again.
        is_new = (saver.committed_step if stop_reason else saved_step) != step
        if is_new and not saver.busy and (stop_reason or status.save):
            saved_step, saved_at_s = step, time.monotonic()
            _start_save(work, work.state(step, loader_state, evals))
        if stop_reason:
            saver.finish()
            facts = facts_of(need, work.governor.taken) if need else {}
            return stopped(stop_reason, saver.committed_step, facts)
        if work.loader.micro_size != micro_size:
            work.loader.restore(loader_state)
            batches = work.loader.next_step()
        phase = "save, in the background" if saver.busy else "steady"
        _enter(work, "first step" if step == start_step else phase, f"training step {step + 1}")
        lr = learning_rate(optim, step, work.total_steps)
        num_tokens = max(1, int(status.loss_tokens))
        work.faults.at("step", step + 1)
        with work.profile.around(step + 1):
            result = work.attempts.step(batches, num_tokens, lr)
        if result is None:  # the ranks decide at the next boundary
            work.loader.restore(loader_state)
            continue
        step += 1
        _check_finite(result, step, saver)
        step_s = time.monotonic() - began_s
        sample = work.monitor.worst()
        work.governor.observe(sample)
        _record(work, _Step(step, lr, batches, status, result, step_s, data_s), sample)
        work.profile.after(step, result, data_s)
        is_last = step == work.total_steps
        if work.eval_batches is not None and _is_due(work, step):
            evals = _evaluate(work, work.eval_batches, step, evals)
        if is_last or _is_every(work.config.checkpoint.every_steps, step):
            saver.finish()
            saved_step, saved_at_s = step, time.monotonic()
            _start_save(work, work.state(step, work.loader.state(), evals))
    return _end(work, step, evals)


def _end(work: Work, step: int, evals: Evals) -> Outcome:
    """Save what is trained to the end, and tell how the held-out loss changed. Collective."""
    saver = work.saver
    saver.finish()
    if saver.committed_step < step:
        _start_save(work, work.state(step, work.loader.state(), evals))
        saver.finish()
    if work.eval_batches is not None and evals.loss_at(step) is None:
        reason = _first_reason(work, work.stop.reason(2 * saver.last_save_s))
        return stopped(reason, saver.committed_step)
    if evals.first is not None and evals.last is not None and evals.last != evals.first:
        (_, first), (_, last) = evals.first, evals.last
        change = f" ({100 * (last / first - 1):+.1f}%)" if first else ""
        log.info("held-out loss %.4f -> %.4f%s", first, last, change)
    if saver.committed_step < step:
        return stopped("the last checkpoint could not be saved", saver.committed_step)
    return done(step)


def _clock_of_saves(every_minutes: float | None) -> float:
    """Return when the last save was, as far as the first one of this start is concerned."""
    return time.monotonic() - max(0.0, 60 * (every_minutes or 0.0) - _FIRST_SAVE_S)


def _enter(work: Work, phase: str, activity: str) -> None:
    """Begin a phase of the memory plan, on all ranks together."""
    work.monitor.enter(phase, activity)
    work.step_limit.enter(activity)


def _start_save(work: Work, state: RunState) -> None:
    """Begin a save; if training waits for it, first return freed memory to the system."""
    phase = "save, in the background"
    if work.saver.waits:
        phase = "save, training waits"
        trim_heap()
    _enter(work, phase, f"saving step {state.step}")
    work.faults.at("save", state.step)
    work.saver.start(state)


@dataclass(frozen=True)
class _Step:
    """One finished step: ``status`` has the sums of all ranks, ``step_s`` includes ``data_s``."""

    number: int
    lr: float
    batches: Sequence[Batch]
    status: StepStatus
    result: StepResult
    step_s: float
    data_s: float


def _vote(
    work: Work, batches: Sequence[Batch], saved_at_s: float, reason: str | None
) -> StepStatus:
    """Return the sums of all ranks. The clock that says when to save is rank 0's."""
    minutes = work.config.checkpoint.every_minutes
    due = minutes is not None and time.monotonic() - saved_at_s >= 60 * minutes
    counted = batches if work.counts_rows else []
    return StepStatus(
        loss_tokens=sum(batch.num_loss_tokens for batch in counted),
        tokens=sum(batch.num_tokens for batch in counted),
        attention_flops=sum(work.attention_flops(batch.real_lengths) for batch in counted),
        save=due and work.comm.is_rank_0,
        stop=reason is not None,
        saves_done=work.saver.vote(),
        garbage=garbage.is_due(),
        levels=work.governor.votes(),
    ).summed(work.comm)


def _first_reason(work: Work, reason: str | None) -> str:
    """Return the reason to stop of the lowest rank that has one. Collective."""
    return next((own for own in work.comm.gather(reason) if own is not None), "time limit")


def _check_finite(result: StepResult, step: int, saver: Checkpointer) -> None:
    if not math.isfinite(result.loss) or not math.isfinite(result.grad_norm):
        saver.finish()  # what is being saved are the values before this step
        raise HpcTuneError(
            f"step {step}: loss {result.loss}, gradient norm {result.grad_norm}; both must be "
            f"finite. The last checkpoint is of step {saver.committed_step}. Lower optim.lr, set "
            "optim.clip_norm, or look for corrupt examples in the data"
        )


def _record(work: Work, step: _Step, sample: MemorySample | None) -> None:
    result, step_s = step.result, step.step_s
    work.faults.at("extremes", step.number)
    work_s = step_s - step.data_s - result.comm_s
    worst = _worst_of_all(work, sample, work_s)
    work.rank_work.add(step.number, work_s)
    tokens_per_s = step.status.tokens / step_s
    flops = step.status.tokens * work.weight_flops + step.status.attention_flops
    mfu = flops / step_s / work.peak_flops if work.peak_flops else None
    work.metrics.step(
        StepMetrics(
            time=time.time(),
            step=step.number,
            epoch=round(work.loader.epoch, 6),
            loss=result.loss,
            lr=step.lr,
            grad_norm=result.grad_norm,
            tokens=int(step.status.tokens),
            loss_tokens=int(step.status.loss_tokens),
            tokens_per_s=tokens_per_s,
            mfu=mfu,
            step_s=step_s,
            data_s=step.data_s,
            comm_s=result.comm_s,
            most_work_s=worst.most_work_s,
            least_work_s=worst.least_work_s,
            slowest_rank=worst.slowest_rank,
            sent_bytes=result.sent_bytes,
            expected_bytes=expected_bytes(
                work.plan,
                [(batch.tokens_BT.numel(), batch.num_loss_tokens) for batch in step.batches],
                Action.RECOMPUTE.value in work.governor.taken,
            ),
            device_util=work.monitor.device_utilization(),
            host_bytes=worst.host_bytes if sample else None,
            host_limit_bytes=sample.host_limit_bytes if sample else None,
            device_bytes=worst.device_bytes if sample and sample.device else None,
            device_limit_bytes=sample.device.limit_bytes if sample and sample.device else None,
            samples_seen=work.loader.rows,
        )
    )


@dataclass(frozen=True)
class _Worst:
    """Bytes of the fullest node and device; compute seconds of the slowest and fastest rank."""

    host_bytes: int
    device_bytes: int
    most_work_s: float
    least_work_s: float
    slowest_rank: int


def _worst_of_all(work: Work, sample: MemorySample | None, work_s: float) -> _Worst:
    """Return the extremes over all ranks by one collective."""
    tenths_of_ms = max(0, round(1e4 * work_s))
    host, device, slowest, least = work.comm.max(
        [
            sample.host_bytes if sample else 0,
            sample.device.used_bytes if sample and sample.device else 0,
            # A rank's time and its number in one value, which a float64 holds exactly.
            tenths_of_ms * _MAX_RANKS + work.comm.world.rank,
            -tenths_of_ms,
        ],
    )
    most, rank = divmod(int(slowest), _MAX_RANKS)
    return _Worst(int(host), int(device), most / 1e4, -least / 1e4, rank)


def _evaluate(
    work: Work, eval_batches: Callable[[], Iterable[Batch]], step: int, before: Evals
) -> Evals:
    """Measure the mean loss over the held-out data's loss tokens, unless asked to stop."""
    was_cut = False

    def batches() -> Iterator[Batch]:
        nonlocal was_cut
        for batch in eval_batches():
            asked = work.stop.is_asked(2 * work.saver.last_save_s)
            if work.comm.sum([asked]) != [0]:
                was_cut = True
                return
            yield batch

    trim_heap()
    phase = "save, in the background" if work.saver.busy else "evaluate"
    _enter(work, phase, f"evaluating after step {step}")
    log.info("step %d: evaluating on held-out data", step)
    began_s = time.monotonic()
    loss_sum, tokens = work.engine.evaluate(batches())
    if was_cut:
        log.info("step %d: evaluation interrupted to stop in time", step)
        return before
    eval_s = time.monotonic() - began_s
    loss = loss_sum / max(1, tokens)
    work.metrics.evaluation(step, loss, tokens, eval_s)
    if not math.isfinite(loss):
        log.warning("step %d: the held-out loss is %s; it is never taken for the best", step, loss)
    log.info("step %d: held-out loss %.4f over %d tokens (%.1fs)", step, loss, tokens, eval_s)
    return before.with_(step, loss)


def _is_due(work: Work, step: int) -> bool:
    """Whether held-out data is measured after ``step``: at the start, at the end, in between."""
    is_end = step == 0 or step >= work.total_steps  # beyond it where max_steps was lowered
    return is_end or _is_every(work.config.train.eval_every_steps, step)


def _is_every(interval: int | None, step: int) -> bool:
    return interval is not None and step % interval == 0
