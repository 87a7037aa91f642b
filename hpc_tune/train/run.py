"""A run from its configuration to its outcome, in stages: each takes the results of those before.

    join the world -> agree on the settings -> measure, for parallel=auto
    -> open the job -> model -> layout -> memory forecast -> data -> engine -> checkpoint -> train
    -> export, outcome, report

An error in any of them is reported once for all ranks (train/exit.py).
"""

from contextlib import closing, nullcontext
from pathlib import Path

from hpc_tune.autotune.candidates import Candidate
from hpc_tune.autotune.choose import choose_ranks
from hpc_tune.config.schema import RunConfig
from hpc_tune.faults import NO_FAULTS, Faults
from hpc_tune.log import configure
from hpc_tune.memory.garbage import defer_collection
from hpc_tune.plan.resolve import with_layout
from hpc_tune.rundir.outcome import Outcome
from hpc_tune.train.control import Control, prepare_control
from hpc_tune.train.data import open_data, require_data
from hpc_tune.train.energy import RunEnergy
from hpc_tune.train.exit import ending_world_on_error, in_world, startup_watchdog
from hpc_tune.train.finish import finish
from hpc_tune.train.job import open_job
from hpc_tune.train.model import build_model, plan_step, resolve_layout, with_scaled_positions
from hpc_tune.train.reference import use_reference
from hpc_tune.train.resume import find_checkpoint, keep_settings, resume
from hpc_tune.train.startup.agreement import agree_on_settings
from hpc_tune.train.startup.describe import log_start
from hpc_tune.train.startup.preflight import preflight
from hpc_tune.train.trainer import Trainer, load_engine, make_deterministic
from hpc_tune.world.bootstrap import shutdown
from hpc_tune.world.comm import Comm
from hpc_tune.world.regroup import release_idle_ranks, wait_as_idle_rank
from hpc_tune.world.stop import StopFlag


def run(
    config: RunConfig,
    stop: StopFlag | None = None,
    force: bool = False,
    faults: Faults = NO_FAULTS,
) -> int:
    """Train as configured, with all ranks that the launcher started; return the exit code.

    ``stop`` replaces the flag of signals, the time limit and the STOP file; without it signals are
    ignored when the run has ended, as the process is about to. ``force`` starts a run that is
    predicted not to fit into memory. ``faults`` are for tests.
    """
    run_dir = Path(config.run.dir)
    given = nullcontext() if stop is None else closing(stop)
    with in_world(config.run, run_dir, faults.join) as launched, given:
        agree_on_settings(launched, config.model_dump(mode="json"))
        stop = stop or StopFlag.for_run(run_dir, config.train.time_limit, launched.is_rank_0)
        stop.install()
        if config.parallel.layout != "auto":
            outcome = _train(config, launched, stop, None, force, faults)
            shutdown(launched)
            return outcome.exit_code
        with startup_watchdog(launched, stop, run_dir, launched.resume_point):
            require_data(config.data, launched, run_dir)
            chosen, comm = choose_ranks(config, launched)
        if comm is None:  # this rank is left out
            return wait_as_idle_rank(launched)
        configure(comm.world.rank)
        with ending_world_on_error(comm, run_dir):
            parallel = with_layout(config.parallel, chosen.layout)
            config = config.model_copy(update={"parallel": parallel})
            outcome = _train(config, comm, stop, chosen, force, faults)
            shutdown(comm)
        num_outside = launched.world.size - len(chosen.ranks) if launched.is_rank_0 else 0
        release_idle_ranks(launched.store, num_outside, outcome.exit_code)
        return outcome.exit_code


def _train(
    config: RunConfig,
    comm: Comm,
    stop: StopFlag,
    chosen: Candidate | None,
    force: bool,
    faults: Faults,
) -> Outcome:
    if config.train.deterministic:
        make_deterministic()
    with open_job(config, comm, stop, chosen, faults) as job:
        if chosen is None:
            require_data(config.data, comm, job.dir)
        checkpoint = find_checkpoint(job)
        model = build_model(job, fresh=checkpoint is None)
        resolved = resolve_layout(job, model)
        forecast = preflight(job, model, resolved, force)
        data = open_data(job, model, resolved, checkpoint)
        learned = [source.store for source in data.sources]
        model = with_scaled_positions(model, learned, job.setup_comm)
        log_start(job, model, resolved, forecast, data)
        plan = plan_step(model, resolved, data.loss_share)
        engine = load_engine(job, model, plan)
        data = use_reference(job, model, plan, data, engine)
        saved = resume(job, checkpoint, model, engine, data)
        keep_settings(job, data)
        control = prepare_control(job, model, plan, data, engine, saved)
        energy = RunEnergy(job)
        with control.step_limit.over(), defer_collection():
            outcome = train(control.trainer, control)
        finish(job, model, forecast, control, energy, outcome)
    return outcome


def train(trainer: Trainer, control: Control) -> Outcome:
    """Train to the end, or to an agreed stop, and save a checkpoint there. Collective.

    Raises:
        HpcTuneError: if the loss is not finite, or a checkpoint cannot be written.
    """
    control.begin()
    while (decision := control.decide()).goes_on:
        with control.profile_step():
            has_gradients = trainer.accumulate(decision.batches, decision.terms, decision.tokens)
            if has_gradients:
                control.saver.wait_until_weights_may_change()
                result = trainer.update()
        if has_gradients:
            control.record_step(result)
        else:  # the ranks decide again
            control.on_step_out_of_memory(trainer.out_of_memory_reason)
    return control.end()
