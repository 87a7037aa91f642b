"""The end of a run: the adapter exported, the outcome written, the report drawn."""

import shlex
from pathlib import Path

from hpc_tune.autotune.choose import compare_step
from hpc_tune.checkpoint.export import export_adapter
from hpc_tune.checkpoint.locate import read_template
from hpc_tune.errors import HpcTuneError, find_remedy
from hpc_tune.log import log
from hpc_tune.rundir import outcome
from hpc_tune.rundir.outcome import Outcome
from hpc_tune.train.control import Control
from hpc_tune.train.energy import RunEnergy
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model
from hpc_tune.train.report import write_report
from hpc_tune.train.startup.preflight import Forecast, compare_memory
from hpc_tune.units import format_seconds


def finish(
    job: Job,
    model: Model,
    forecast: Forecast,
    control: Control,
    energy: RunEnergy,
    ended: Outcome,
) -> None:
    """Close what the run had open, and report how it ended. Collective."""
    job.watchdog.close()
    job.setup_comm.begin("ending the run")
    job.stop.end()
    energy.end(control.trainer.step, control.recorder.tokens)
    compare_memory(job, forecast)
    if job.chosen is not None:
        job.events.write("layout", **compare_step(job.chosen, control.recorder.metrics.steps_s))
    control.recorder.close()
    control.trainer.loader.close()
    job.setup_comm.on_rank_0("ending the run", lambda: _write_outcome(job, model, control, ended))
    job.stop.ignore_signals()
    job.monitor.close()
    job.events.write("stop", ended.step, reason=ended.reason)
    job.events.close()
    if job.config.run.report and ended.has_time_left:
        job.setup_comm.on_rank_0("writing the report", lambda: write_report(job.dir))
    if job.setup_comm.is_rank_0:
        job.owner.close()


def _write_outcome(job: Job, model: Model, control: Control, ended: Outcome) -> None:
    """Export the adapter of a finished run, write the outcome, and log what to do next."""
    config, run_dir = model.config, job.dir
    if ended.status == "done" and config.tune.method != "full":
        out = run_dir / "export" / "adapter"
        try:
            template, base = (
                read_template(run_dir, config.data.chat_template),
                model.built.directory,
            )
            out = export_adapter(job.store.steps()[-1], config.tune, base, out, template)
        except OSError as error:
            raise HpcTuneError(f"{out} cannot be written: {error}{find_remedy(error)}") from None
        log.info("adapter exported to %s", out)
    try:
        outcome.write_outcome(ended, run_dir, job.setup_comm.nonce)
    except OSError as error:
        log.warning("%s cannot be written: %s", run_dir / outcome.OUTCOME_FILE, error.strerror)
    if ended.status == "done":
        if ended.step is not None and ended.step < control.trainer.total_steps:
            log.info("stopped early: %s", ended.reason)
            _log_best_checkpoint(job, control)
        log.info("done after %d steps. Next: %s", ended.step, next_command(run_dir))
    else:
        log.info("%s", _describe_stop(job, control, ended))


def next_command(run_dir: Path) -> str:
    """Return what to paste into a shell after a run."""
    return f"python -m hpc_tune generate --run {shlex.quote(str(run_dir))} --prompt '...'"


def _describe_stop(job: Job, control: Control, ended: Outcome) -> str:
    saved, again = ended.step or 0, "Rerun the same command to "
    text = f"stopped: {ended.reason}. {again}resume from step {saved}"
    if not saved:
        text = f"stopped: {ended.reason}. Nothing is saved. {again}start again"
    if ended.reason == "time limit" and saved == control.start_step:
        limit = format_seconds(job.stop.limit_s)
        text = f"the limit of {limit} ended before a step was done. Give more time"
    if job.setup_comm.world.launcher != "single":
        text += f" (exit code {ended.exit_code}; a launcher may call it an error, but it is none)"
    return text


def _log_best_checkpoint(job: Job, control: Control) -> None:
    """Log where the weights of the lowest held-out loss are, as the last ones have another."""
    step, loss = control.best_evaluation or (None, 0.0)
    paths = [path for path in job.store.steps() if int(path.name.removeprefix("step-")) == step]
    if paths:
        log.info(
            "the lowest held-out loss, %.4f, is that of %s: export and generate take it as --run",
            loss,
            paths[0],
        )
    elif step is not None:
        log.warning(
            "the weights of step %d, which had the lowest held-out loss, are not kept: set "
            "checkpoint.keep_best=true, and checkpoint.every_steps to train.eval_every_steps",
            step,
        )
