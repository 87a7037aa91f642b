"""The run directory at the start of a run."""

from pathlib import Path

from hpc_tune.config.load import write_resolved
from hpc_tune.config.schema import RunConfig
from hpc_tune.errors import ConfigError
from hpc_tune.rundir import heartbeat, outcome, previous
from hpc_tune.rundir.owner import LiveMark
from hpc_tune.rundir.previous import Previous
from hpc_tune.train.wandb_log import require_wandb


def make_run_dir(config: RunConfig, run_dir: Path, mark: LiveMark) -> Previous:
    """Make the run directory, this job's alone, and find out now and not at the first save if it
    can be written.

    Returns what the run before this one left there.

    Raises:
        ConfigError: if it cannot be written, or another job is at work in it.
    """
    require_wandb(config.run.wandb)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        mark.take()
        left = previous.read(run_dir)
        (run_dir / heartbeat.FOLDER).mkdir(exist_ok=True)
        heartbeat.clear(run_dir)
        (run_dir / outcome.FILE).unlink(missing_ok=True)
        write_resolved(config, run_dir / "config.resolved.yaml")
    except OSError as error:
        raise ConfigError(
            f"run.dir={run_dir} cannot be written: {error.strerror or error}; choose a folder on "
            "a file system that this job may write to and that has room"
        ) from None
    return left
