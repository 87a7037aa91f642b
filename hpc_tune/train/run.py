"""A run from its configuration to its outcome, in stages: each takes the results of those before.

    join the world -> agree on the settings -> measure, for parallel=auto
    -> open the job -> model -> layout -> memory forecast -> data -> engine -> checkpoint -> train
    -> export, outcome, report

An error in any of them is reported once for all ranks (train/exit.py).
"""

from pathlib import Path

from hpc_tune.config.schema import RunConfig
from hpc_tune.faults import NO_FAULTS, Faults
from hpc_tune.log import configure
from hpc_tune.rundir.outcome import Outcome
from hpc_tune.train.agreement import agree_on_settings
from hpc_tune.train.choosing import Chosen, choose_ranks
from hpc_tune.train.data import open_data
from hpc_tune.train.describe import describe
from hpc_tune.train.exit import ResumePoint, failing, joined, startup_watchdog
from hpc_tune.train.finish import finish
from hpc_tune.train.job import open_job
from hpc_tune.train.layout import resolve
from hpc_tune.train.loading import load_engine, make_deterministic
from hpc_tune.train.loop import run_loop
from hpc_tune.train.model import build_model
from hpc_tune.train.preflight import preflight
from hpc_tune.train.resume import find_checkpoint, resume
from hpc_tune.train.training import prepare_training
from hpc_tune.world.bootstrap import shutdown
from hpc_tune.world.comm import Comm
from hpc_tune.world.regroup import dismiss, wait_outside
from hpc_tune.world.stop import StopFlag


def run(
    config: RunConfig,
    stop: StopFlag | None = None,
    force: bool = False,
    faults: Faults = NO_FAULTS,
) -> int:
    """Train as configured, with all ranks that the launcher started; return the exit code.

    ``stop`` replaces the flag of signals, the time limit and the STOP file. ``force`` starts a run
    that is predicted not to fit into memory. ``faults`` are for tests.
    """
    run_dir = Path(config.run.dir)
    with joined(config.run, run_dir, faults.join) as world:
        agree_on_settings(world, config.model_dump(mode="json"))
        stop = stop or StopFlag.of_run(run_dir, config.train.time_limit, world.is_rank_0)
        stop.install()
        if config.parallel.layout != "auto":
            outcome = _train(config, world, stop, None, force, faults)
            shutdown(world)
            return outcome.exit_code
        with startup_watchdog(world, stop, run_dir, ResumePoint()):
            chosen, inside = choose_ranks(config, world)
        if inside is None:
            return wait_outside(world)
        configure(inside.world.rank)
        with failing(inside, run_dir):
            outcome = _train(chosen.applied(config), inside, stop, chosen, force, faults)
            shutdown(inside)
        num_outside = world.world.size - len(chosen.ranks) if world.is_rank_0 else 0
        dismiss(world.store, num_outside, outcome.exit_code)
        return outcome.exit_code


def _train(
    config: RunConfig,
    comm: Comm,
    stop: StopFlag,
    chosen: Chosen | None,
    force: bool,
    faults: Faults,
) -> Outcome:
    if config.train.deterministic:
        make_deterministic()
    with open_job(config, comm, stop, chosen, faults) as job:
        checkpoint = find_checkpoint(job)
        model = build_model(job, fresh=checkpoint is None)
        resolved = resolve(job, model)
        forecast = preflight(job, model, resolved, force)
        data = open_data(job, model, resolved)
        describe(job, model, resolved, forecast, data)
        engine = load_engine(job, model, resolved, data)
        saved = resume(job, checkpoint, model, engine, data)
        work = prepare_training(job, model, resolved, data, engine, saved)
        outcome = run_loop(work)
        finish(job, model, forecast, work, outcome)
    return outcome
