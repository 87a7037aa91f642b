"""A run from its configuration to its outcome, in stages that use the results of earlier ones.

    join the world -> agree on the settings -> measure, for parallel=auto
    -> open the job -> model -> layout -> memory forecast -> data -> engine -> checkpoint -> train
    -> export, outcome, report

An error in any stage is reported once for all ranks (train/exit.py).
"""

import shlex
from contextlib import closing, nullcontext
from pathlib import Path

from hpc_tune.autotune.candidates import Candidate
from hpc_tune.autotune.search import compare_step_times, measure_and_choose_layout
from hpc_tune.checkpoint.export import export_adapter
from hpc_tune.checkpoint.locate import read_template
from hpc_tune.config.schema import RunConfig
from hpc_tune.errors import HpcTuneError, find_remedy
from hpc_tune.faults import NO_FAULTS, Faults
from hpc_tune.log import configure_logging, log
from hpc_tune.memory.host import defer_garbage_collection
from hpc_tune.plan.resolve import with_layout
from hpc_tune.rundir.outcome import OUTCOME_FILE, Outcome, run_report_command, write_outcome
from hpc_tune.step.plan import StepPlan
from hpc_tune.train.control import Control, prepare_control
from hpc_tune.train.data import open_data, require_data
from hpc_tune.train.energy import RunEnergyMeter
from hpc_tune.train.exit import ending_world_on_error, join_world, startup_watchdog
from hpc_tune.train.job import Job, open_job
from hpc_tune.train.model import Model, build_model, resolve_layout, with_scaled_positions
from hpc_tune.train.reference import attach_reference
from hpc_tune.train.resume import find_checkpoint, resume, store_settings
from hpc_tune.train.startup.describe import log_start
from hpc_tune.train.startup.preflight import (
    MemoryForecast,
    preflight,
    record_memory_peaks,
    require_same_rank_settings,
)
from hpc_tune.train.trainer import Trainer, load_engine, make_deterministic
from hpc_tune.units import format_seconds
from hpc_tune.world.bootstrap import release_idle_ranks, shutdown, wait_as_idle_rank
from hpc_tune.world.comm import Comm
from hpc_tune.world.stop import StopFlag

# -- The end of a run: the adapter exported, the outcome written, the report drawn.


def finish(
    job: Job,
    model: Model,
    forecast: MemoryForecast,
    control: Control,
    energy: RunEnergyMeter,
    outcome: Outcome,
) -> None:
    """Close everything that the run opened, and report how it ended. Collective."""
    job.watchdog.close()
    job.setup_comm.begin("ending the run")
    job.stop.announce_ending()
    energy.end(control.trainer.step, control.recorder.tokens)
    record_memory_peaks(job, forecast)
    if job.candidate is not None:
        job.events.write(
            "layout", **compare_step_times(job.candidate, control.recorder.metrics.steps_s)
        )
    control.recorder.close()
    control.trainer.loader.close()
    job.setup_comm.run_on_rank_0(
        "ending the run", lambda: _export_and_write_outcome(job, model, control, outcome)
    )
    job.stop.ignore_signals()
    job.monitor.close()
    job.events.write("stop", outcome.step, reason=outcome.reason)
    job.events.close()
    if job.config.run.report and outcome.has_time_left:
        job.setup_comm.run_on_rank_0("writing the report", lambda: run_report_command(job.dir))
    if job.setup_comm.is_rank_0:
        job.owner.close()


def _export_and_write_outcome(job: Job, model: Model, control: Control, outcome: Outcome) -> None:
    """Export the adapter of a finished run, write the outcome, and log what to do next."""
    config, run_dir = model.config, job.dir
    if outcome.status == "done" and config.tune.method != "full":
        out = run_dir / "export" / "adapter"
        try:
            template = read_template(run_dir, config.data.chat_template)
            base = model.built.directory
            out = export_adapter(job.store.step_folders()[-1], config.tune, base, out, template)
        except OSError as error:
            raise HpcTuneError(f"{out} cannot be written: {error}{find_remedy(error)}") from None
        log.info("adapter exported to %s", out)
    try:
        write_outcome(outcome, run_dir, job.setup_comm.nonce)
    except OSError as error:
        log.warning("%s cannot be written: %s", run_dir / OUTCOME_FILE, error.strerror)
    if outcome.status == "done":
        if outcome.step is not None and outcome.step < control.trainer.total_steps:
            log.info("stopped early: %s", outcome.reason)
            _log_best_checkpoint(job, control)
        log.info("done after %d steps. Next: %s", outcome.step, command_to_try_model(run_dir))
    else:
        log.info("%s", _describe_stop(job, control, outcome))


def command_to_try_model(run_dir: Path) -> str:
    """Return a shell command to try the tuned model with."""
    return f"python -m hpc_tune generate --run {shlex.quote(str(run_dir))} --prompt '...'"


def _describe_stop(job: Job, control: Control, outcome: Outcome) -> str:
    saved_step, advice = outcome.step or 0, "Rerun the same command to "
    text = f"stopped: {outcome.reason}. {advice}resume from step {saved_step}"
    if not saved_step:
        text = f"stopped: {outcome.reason}. Nothing is saved. {advice}start again"
    if outcome.reason == "time limit" and saved_step == control.start_step:
        limit = format_seconds(job.stop.limit_s)
        text = f"the limit of {limit} ended before a step was done. Give more time"
    if job.setup_comm.world.launcher != "single":
        text += f" (exit code {outcome.exit_code}; a launcher may call it an error, but it is not)"
    return text


def _log_best_checkpoint(job: Job, control: Control) -> None:
    """Log where the weights with the lowest held-out loss are, since they are not the last ones."""
    step, loss = control.best_evaluation or (None, 0.0)
    paths = [
        path for path in job.store.step_folders() if int(path.name.removeprefix("step-")) == step
    ]
    if paths:
        log.info(
            "the lowest held-out loss, %.4f, is that of %s: give it as --run to export or generate",
            loss,
            paths[0],
        )
    elif step is not None:
        log.warning(
            "the weights of step %d, which had the lowest held-out loss, are not kept: set "
            "checkpoint.keep_best=true, and checkpoint.every_steps to train.eval_every_steps",
            step,
        )


# -- A run, stage by stage.


def run(
    config: RunConfig, stop: StopFlag | None = None, force: bool = False, faults: Faults = NO_FAULTS
) -> int:
    """Train as configured, with all ranks that the launcher started; return the exit code.

    ``stop`` replaces the stop flag made from signals, the time limit and the STOP file; without it,
    signals are ignored after the run, since the process is about to end. ``force`` starts a run
    even if it is predicted not to fit into memory. ``faults`` are for tests.
    """
    run_dir = Path(config.run.dir)
    stop_scope = nullcontext() if stop is None else closing(stop)
    with join_world(config.run, run_dir, faults.join) as all_ranks, stop_scope:
        require_same_rank_settings(all_ranks, config.model_dump(mode="json"))
        stop = stop or StopFlag.create_for_run(
            run_dir, config.train.time_limit, all_ranks.is_rank_0
        )
        stop.install()
        if config.parallel.layout != "auto":
            outcome = _train(config, all_ranks, stop, None, force, faults)
            shutdown(all_ranks)
            return outcome.exit_code
        with startup_watchdog(all_ranks, stop, run_dir, all_ranks.resume_point):
            require_data(config.data, all_ranks, run_dir)
            candidate, comm = measure_and_choose_layout(config, all_ranks)
        if comm is None:  # this rank is left out
            return wait_as_idle_rank(all_ranks)
        configure_logging(comm.world.rank)
        with ending_world_on_error(comm, run_dir):
            parallel = with_layout(config.parallel, candidate.layout)
            config = config.model_copy(update={"parallel": parallel})
            outcome = _train(config, comm, stop, candidate, force, faults)
            shutdown(comm)
        num_idle = all_ranks.world.size - len(candidate.ranks) if all_ranks.is_rank_0 else 0
        release_idle_ranks(all_ranks.store, num_idle, outcome.exit_code)
        return outcome.exit_code


def _train(
    config: RunConfig,
    comm: Comm,
    stop: StopFlag,
    candidate: Candidate | None,
    force: bool,
    faults: Faults,
) -> Outcome:
    if config.train.deterministic:
        make_deterministic()
    with open_job(config, comm, stop, candidate, faults) as job:
        if candidate is None:
            require_data(config.data, comm, job.dir)
        checkpoint = find_checkpoint(job)
        model = build_model(job, is_fresh=checkpoint is None)
        resolved_layout = resolve_layout(job, model)
        forecast = preflight(job, model, resolved_layout, force)
        data = open_data(job, model, resolved_layout, checkpoint)
        stores = [source.store for source in data.sources]
        model = with_scaled_positions(model, stores, job.setup_comm)
        log_start(job, model, resolved_layout, forecast, data)
        layout, parallel = resolved_layout.layout, resolved_layout.parallel
        plan = StepPlan.for_model(
            model.built, layout, parallel, data.loss_token_fraction, model.size
        )
        engine = load_engine(job, model, plan)
        data = attach_reference(job, model, plan, data, engine)
        saved_state = resume(job, checkpoint, model, engine, data)
        store_settings(job, data)
        control = prepare_control(job, model, plan, data, engine, saved_state)
        energy = RunEnergyMeter(job)
        with control.stall_watch.watching(), defer_garbage_collection():
            outcome = train(control.trainer, control)
        finish(job, model, forecast, control, energy, outcome)
    return outcome


def train(trainer: Trainer, control: Control) -> Outcome:
    """Train until the end or an agreed stop, and save a checkpoint there. Collective.

    Raises:
        HpcTuneError: see ``Control.record_step``.
    """
    control.begin()
    while (decision := control.decide()).should_continue:
        with control.profile_step():
            has_gradients = trainer.accumulate(
                decision.batches, decision.loss_terms, decision.tokens
            )
            if has_gradients:
                control.saver.wait_until_weights_may_change()
                result = trainer.update()
        if has_gradients:
            control.record_step(result)
        else:  # a rank ran out of memory: the ranks decide again
            control.handle_step_out_of_memory(trainer.out_of_memory_reason)
    return control.end()
