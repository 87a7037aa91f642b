"""The run's control flow around training itself (trainer.py): what all ranks agree to do next.

    decide       at the boundary before a step: one exchange of loss tokens, stop requests, due
                 saves, memory levels and the last step's metrics of all ranks; then write these
                 metrics, save, act on memory, and return the rows of the step
    record_step  after a step: memory, metrics, evaluation, a save that is due at this step number

Control flow depends only on values that all ranks agree on, so every rank takes the same branch.
"""

import gc
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial

from hpc_tune.batch import Batch
from hpc_tune.checkpoint.state import RunState
from hpc_tune.engine.adamw import with_scaled_lr
from hpc_tune.engine.base import Engine, StepResult
from hpc_tune.engine.profile import StepProfile
from hpc_tune.errors import HpcTuneError
from hpc_tune.memory.host import is_garbage_collection_due, trim_heap
from hpc_tune.memory.policy import Action, Phase
from hpc_tune.model.objective import with_zero_rewards
from hpc_tune.model.rotary import has_length_dependent_scaling
from hpc_tune.rundir.outcome import Outcome, done_outcome, stopped_outcome
from hpc_tune.step.plan import StepPlan
from hpc_tune.train.data import Data
from hpc_tune.train.evaluate import (
    Evaluation,
    fingerprint_held_out_data,
    held_out_batches,
    restore_evals,
)
from hpc_tune.train.governor import Governor, make_loader_actions, memory_outcome_facts
from hpc_tune.train.job import Job
from hpc_tune.train.metrics import FinishedStep, RankUsage, Recorder, UsageByRank, open_recorder
from hpc_tune.train.model import Model
from hpc_tune.train.reference import hash_init_adapter, require_matching_reference
from hpc_tune.train.saver import SaveClock, Saver, open_saver
from hpc_tune.train.startup.describe import describe_experts
from hpc_tune.train.startup.micro_size import decide_micro_size, log_micro_batches
from hpc_tune.train.trainer import Trainer
from hpc_tune.world.comm import Comm


@dataclass(frozen=True)
class StepStatus:
    """What one rank reports at the boundary before a step, or the sums over all ranks.

    ``loss_terms`` (of the loss, see ``Batch``), ``loss_tokens``, ``tokens`` and ``attention_flops``
    are sums over the rows of the step that this rank counts. ``saves_due``: a checkpoint is due by
    rank 0's clock. ``stop``: this rank was asked to stop. ``saves_done``: 1 if this rank has
    finished its part of the current checkpoint, see saver.py. ``collection_due``: garbage
    collection is due. ``levels``: the memory levels that this rank has reached.
    ``loss_tokens_by_source``: the loss tokens of each source of a mixture.
    """

    loss_terms: float
    loss_tokens: float
    tokens: float
    attention_flops: float
    saves_due: float
    stop: float
    saves_done: float
    collection_due: float
    levels: tuple[float, ...]
    loss_tokens_by_source: tuple[float, ...] = ()

    def exchange(self, comm: Comm, usage: RankUsage) -> tuple["StepStatus", UsageByRank]:
        """Return the sums over all ranks, and each rank's values of ``usage``. Collective.

        Each sum is rounded only once, so that it does not depend on the order of the ranks.
        """
        *scalars, levels, loss_tokens_by_source = astuple(self)
        numbers = [*scalars, *levels, *loss_tokens_by_source]
        values_by_rank = comm.gather_elementwise([*numbers, *astuple(usage)])
        sums = [math.fsum(number) for number in values_by_rank[: len(numbers)]]
        sources_start = len(scalars) + len(levels)
        loss_terms, loss_tokens, tokens, flops, saves_due, stop, saves_done, collection_due = sums[
            : len(scalars)
        ]
        total_status = StepStatus(
            *(loss_terms, loss_tokens, tokens, flops, saves_due, stop, saves_done, collection_due),
            levels=tuple(sums[len(scalars) : sources_start]),
            loss_tokens_by_source=tuple(sums[sources_start:]),
        )
        return total_status, UsageByRank(*values_by_rank[len(numbers) :])


@dataclass(frozen=True)
class StepDecision:
    """Whether training goes on, and if so, on which ``batches`` of this rank.

    ``loss_terms``: the loss terms of all ranks, which are tokens (by their weights) or pairs.
    ``tokens``: the tokens of all ranks, without padding.
    """

    should_continue: bool
    batches: Sequence[Batch] = ()
    loss_terms: float = 1.0
    tokens: float = 1.0


class Control:
    """Decides what to do before each step of ``trainer``, and records each finished step."""

    def __init__(
        self,
        job: Job,
        trainer: Trainer,
        saver: Saver,
        governor: Governor,
        evaluation: Evaluation,
        recorder: Recorder,
        state: RunState,
    ) -> None:
        """``state``: the state that checkpoints save, without what changes at each step."""
        self.trainer, self.saver, self.recorder = trainer, saver, recorder
        self.start_step = trainer.step
        self.stall_watch = job.make_stall_watch()
        self._job, self._comm, self._faults = job, job.step_comm, job.faults
        self._governor, self._evaluation, self._state = governor, evaluation, state
        self._profile = StepProfile(
            job.step_comm,
            job.dir,
            job.config.train.profiled_steps,
            trainer.step,
            trainer.total_steps,
        )
        self._checkpoint_settings = job.config.checkpoint
        self._saved_step, self._step_s = trainer.step, 0.0
        # Rank 0 alone watches the clock, for all ranks.
        minutes = self._checkpoint_settings.every_minutes if self._comm.is_rank_0 else None
        self._clock = SaveClock(minutes, job.dir, self._comm.world.num_nodes)
        self._status = StepStatus(*(0.0,) * 8, ())
        self._batches: Sequence[Batch] = ()
        self._stop_outcome: Outcome | None = None

    def begin(self) -> None:
        """Evaluate before the first step, and repeat an evaluation that a stop interrupted."""
        step = self.trainer.step
        if self._evaluation.is_overdue(step):
            self._evaluate()
            self.saver.add_evaluation(self._current_state())
        self._job.stop.announce_training()

    def decide(self) -> StepDecision:
        """Return what all ranks do next; save the state before a stop. Collective."""
        trainer, saver, step = self.trainer, self.saver, self.trainer.step
        if step >= trainer.total_steps or self._evaluation.early_stop_reason:
            return StepDecision(should_continue=False)
        self.stall_watch.enter(f"beginning step {step + 1}")
        self._batches = trainer.next_batches()
        # What must still fit before the time limit: another step like the last, and two saves.
        margin_s = self._step_s + 2 * saver.last_save_s
        self._faults.at("boundary", step + 1)
        reason = self._job.stop.reason(margin_s)
        own_status, last_usage = self._local_status(reason), self.recorder.local_usage
        status, values_by_rank = own_status.exchange(self._comm, last_usage)
        self._status = status
        self._record_last_step(values_by_rank)
        if status.collection_due:
            gc.collect()
        stop_reason = self._agree_on_stop_reason(reason) if status.stop else None
        saver.complete_if_done(status.saves_done)
        for wait_s in saver.pop_waits_s():
            self._clock.record_wait(wait_s)
        micro_size = trainer.loader.micro_size
        shortage = self._governor.act_on_levels(status.levels, step)
        stop_reason = stop_reason or (shortage.words if shortage else None)
        if stop_reason:
            saver.finish()
        # A save that is due by the clock waits for the one before it. A stop retries a failed one.
        is_new = (saver.committed_step if stop_reason else self._saved_step) != step
        if is_new and not saver.is_saving and (stop_reason or status.saves_due):
            self._save()
        if stop_reason:
            saver.finish()
            facts = memory_outcome_facts(shortage, self._governor.actions_taken) if shortage else {}
            self._stop_outcome = stopped_outcome(stop_reason, saver.committed_step, facts)
            return StepDecision(should_continue=False)
        if trainer.loader.micro_size != micro_size:
            self._batches = trainer.reread_batches()
        phase = Phase.SAVE_IN_BACKGROUND if saver.is_saving else Phase.STEADY
        phase = Phase.FIRST_STEP if step == self.start_step else phase
        self._enter_phase(phase, f"training step {step + 1}")
        self._faults.at("step", step + 1)
        return StepDecision(True, self._batches, status.loss_terms or 1.0, status.tokens or 1.0)

    @property
    def best_evaluation(self) -> tuple[int, float] | None:
        """The step of the lowest held-out loss, and that loss."""
        return self._evaluation.evals.best

    def profile_step(self) -> AbstractContextManager[None]:
        """Return a context manager that profiles the next step if it is one of those to profile."""
        return self._profile.profiling(self.trainer.step + 1)

    def handle_step_out_of_memory(self, failed_allocation: str | None) -> None:
        """Handle a step that all ranks gave up; ``failed_allocation``: see ``Trainer``."""
        if failed_allocation is not None:
            self._governor.observe_out_of_memory(failed_allocation)

    def record_step(self, result: StepResult) -> None:
        """Record a finished step; evaluate and save if due. Collective.

        Raises:
            HpcTuneError: if loss or gradient norm is not finite, if the model of step 1 is not its
                reference, or if a save fails and checkpoint.required is set.
        """
        trainer, step = self.trainer, self.trainer.step
        self._job.watchdog.close()
        self._require_finite(result)
        if self._job.config.tune.has_reference and step == 1:
            require_matching_reference(result, self.recorder.plan)
            result = replace(result, sums=with_zero_rewards(result.sums))
        self._step_s = time.monotonic() - trainer.began_s
        sample = self._job.monitor.take_peaks()
        self._governor.observe(sample)
        self._faults.at("extremes", step)
        status = self._status
        finished_step = FinishedStep(
            step,
            trainer.lr,
            self._batches,
            status.loss_terms,
            int(status.loss_tokens),
            int(status.tokens),
            status.attention_flops,
            result,
            self._step_s,
            trainer.data_s,
            [int(tokens) for tokens in status.loss_tokens_by_source],
        )
        recomputes = Action.RECOMPUTE.value in self._governor.actions_taken
        self.recorder.prepare_record(finished_step, sample, recomputes)
        self._profile.finish_step(step, result, trainer.data_s)
        interval = self._checkpoint_settings.every_steps
        saves = step == trainer.total_steps or (interval is not None and step % interval == 0)
        evaluates = self._evaluation.is_due(step)
        if saves or evaluates:  # the step's metrics are written before those of the evaluation
            self.recorder.record_now()
        if evaluates:
            self._evaluate()
        if saves:
            self.saver.finish()
            self._save()

    def end(self) -> Outcome:
        """Save the last step if needed, log how the held-out loss changed, and return how the run
        ended. Collective.
        """
        if self._stop_outcome is not None:
            return self._stop_outcome
        saver, step = self.saver, self.trainer.step
        saver.finish()
        if saver.committed_step < step:
            self._save()
            saver.finish()
        if self._evaluation.is_overdue(step):
            reason = self._agree_on_stop_reason(self._job.stop.reason(2 * saver.last_save_s))
            return stopped_outcome(reason, saver.committed_step)
        self._evaluation.log_loss_change()
        if saver.committed_step < step:
            return stopped_outcome("the last checkpoint could not be saved", saver.committed_step)
        return done_outcome(
            step, self._evaluation.early_stop_reason if step < self.trainer.total_steps else None
        )

    def _local_status(self, reason: str | None) -> StepStatus:
        """Return this rank's status. Only rank 0's clock determines when to save."""
        return StepStatus(
            *self.recorder.count_tokens_and_flops(self._batches),
            saves_due=self._clock.time_until_due_s <= 0,
            stop=reason is not None,
            saves_done=self.saver.status(),
            collection_due=is_garbage_collection_due(),
            levels=self._governor.status(),
            loss_tokens_by_source=self.recorder.loss_tokens_by_source(self._batches),
        )

    def _record_last_step(self, values_by_rank: UsageByRank) -> None:
        """Write the last step's metrics, and exclude the time it takes from the current step."""
        began_s = time.monotonic()
        self.recorder.record(values_by_rank)
        self.trainer.began_s += time.monotonic() - began_s

    def _agree_on_stop_reason(self, reason: str | None) -> str:
        """Return the stop reason of the lowest rank that has one. Collective."""
        return next((r for r in self._comm.gather(reason) if r is not None), "time limit")

    def _require_finite(self, result: StepResult) -> None:
        if not math.isfinite(result.loss) or not math.isfinite(result.grad_norm):
            self.saver.finish()  # a running save holds the values from before this step
            raise HpcTuneError(
                f"step {self.trainer.step}: loss {result.loss}, gradient norm {result.grad_norm}; "
                f"both must be finite. The last checkpoint is of step {self.saver.committed_step}. "
                "Lower optim.lr, set optim.clip_norm, or look for corrupt examples in the data"
            )

    def _enter_phase(self, phase: Phase, activity: str) -> None:
        """Enter a phase of the memory plan, on all ranks together."""
        self._job.monitor.enter(phase, activity)
        self.stall_watch.enter(activity)

    def _save(self) -> None:
        """Begin a save; if training waits for it, first return freed memory to the system."""
        state, phase = self._current_state(), Phase.SAVE_IN_BACKGROUND
        self._saved_step = state.step
        self._clock.record_save_start()
        if self.saver.is_blocking:
            phase = Phase.SAVE_WAITING
            trim_heap()
        self._enter_phase(phase, f"saving step {state.step}")
        self._faults.at("save", state.step)
        self.saver.start(state)

    def _current_state(self) -> RunState:
        step, evals = self.trainer.step, self._evaluation.evals
        return replace(
            self._state,
            step=step,
            loader=self.trainer.position,
            eval_loss=evals.loss_at(step),
            evals=asdict(evals),
            governor=self._governor.actions_taken,
        )

    def _evaluate(self) -> None:
        step, saver = self.trainer.step, self.saver
        trim_heap()
        self._enter_phase(
            Phase.SAVE_IN_BACKGROUND if saver.is_saving else Phase.EVALUATE,
            f"evaluating after step {step}",
        )
        result = self._evaluation.measure(self.trainer.engine, step, 2 * saver.last_save_s)
        if result is not None:
            _, loss = self._evaluation.evals.last or (step, math.nan)
            self.recorder.metrics.record_evaluation(step, loss, result)


def prepare_control(
    job: Job, model: Model, plan: StepPlan, data: Data, engine: Engine, saved: RunState | None
) -> Control:
    """Return the control of a run; ``saved``: the state that it resumes from. Collective."""
    config, loader = model.config, data.loader
    step = saved.step if saved is not None else 0
    micro_size = decide_micro_size(job, model, plan, engine, saved)
    loader.set_micro_size(micro_size)
    saver = open_saver(job, model, engine)
    files = [source.store.path for source in data.sources]
    memory_actions = (
        make_loader_actions(loader, files, saver.release_staging_blocks)
        | saver.memory_actions
        | engine.memory_actions
    )
    previous_run = job.previous_run
    if saved is not None and not previous_run.actions:  # a killed run's are only in its checkpoint
        previous_run = replace(previous_run, actions=tuple(saved.governor))
    governor = Governor(job.step_comm, job.monitor, job.events, memory_actions, previous_run)
    job.shortage_handler.governor = governor
    log_micro_batches(model, plan, loader.micro_size)
    job.monitor.enter(Phase.FIRST_STEP, "beginning the first step", writes_heartbeat=True)
    job.monitor.limit_private_memory()
    optim = with_scaled_lr(config.optim, config.batch.global_size)
    steps = range(step, data.total_steps)
    trainer = Trainer(job.step_comm, engine, loader, optim, steps, governor.handles_device_oom)
    held_out = fingerprint_held_out_data(data, config.train.eval_rows)
    batches = held_out_batches(job, model, plan, data)
    evaluation = Evaluation(
        job.step_comm,
        job.stop,
        plan,
        batches,
        config.train,
        data.total_steps,
        restore_evals(saved, held_out, job.events),
        config.tune,
    )
    state = RunState(
        step,
        data.total_steps,
        model.built.architecture_hash,
        trainer.position,
        plan.layout.saved_axes,
        micro_size,
        job.config.model_dump(),
        model_sample=model.weights_fingerprint,
        experts=describe_experts(model.size, model.built.config),
        held_out=held_out or (saved.held_out if saved is not None else ""),
        start=job.setup_comm.run_on_rank_0(
            "looking at the adapter", partial(hash_init_adapter, config.tune)
        ),
        scaled_for=model.built.seq_len
        if has_length_dependent_scaling(model.built.config)
        else None,
    )
    recorder = open_recorder(job, model, plan, data, step)
    return Control(job, trainer, saver, governor, evaluation, recorder, state)
