"""What ``submit`` does besides writing the script: looks at this host, and calls sbatch.

script of slurm.py -> warnings -> the folder of slurm.output -> sbatch -> the job's number
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

from hpc_tune.cluster.protocol import Environ
from hpc_tune.cluster.slurm import sourced
from hpc_tune.cluster.unused_gpus import VISIBLE
from hpc_tune.config.scheduler import SlurmConfig
from hpc_tune.errors import ConfigError, HpcTuneError
from hpc_tune.log import log

_LIMIT_S = 60.0
# What a job sets for its own processes, the GPUs that they see beside it; what a user sets for all.
_OF_A_JOB = ("SLURM_", "SRUN_", "PMI_", "PMIX_")
_OF_THE_USER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT", "PMIX_MCA_")


def submit(script: str, settings: SlurmConfig, folder: Path, environ: Environ) -> str:
    """Submit ``script``, which runs in ``folder``, with sbatch; return the job's id.

    Raises:
        HpcTuneError: if sbatch is missing or refuses, or slurm.output cannot be written.
    """
    for warning in _not_here(settings):
        log.warning(warning)
    _make_output_folder(settings, folder)
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"],
            input=script,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=_LIMIT_S,
            env=_handed_on(environ),
        )
    except FileNotFoundError:
        raise ConfigError(
            "sbatch is not on PATH: submit from a login node of the cluster, or write the script "
            "to a file with --dry-run"
        ) from None
    except subprocess.TimeoutExpired:
        raise HpcTuneError(f"sbatch did not answer within {_LIMIT_S:.0f} s") from None
    if done.returncode:
        raise ConfigError(f"sbatch refused: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]


def _not_here(settings: SlurmConfig) -> Iterator[str]:
    """Yield a warning for each file that the script sources and this host does not have."""
    for name, file in sourced(settings).items():
        if not Path(file).is_file():
            yield (
                f"slurm.{name}={getattr(settings, name)}: there is no {file} on this host; the job "
                "ends at once on nodes that do not have it either"
            )


def _make_output_folder(settings: SlurmConfig, folder: Path) -> None:
    """Make the folder of slurm.output, without which a job ends at once and says nothing."""
    name = Path(settings.output).parent
    if "%" in str(name):
        log.warning(
            "slurm.output=%s: Slurm makes no folders, and the job ends at once without a word "
            "where there is none; use %% in the file's name alone",
            settings.output,
        )
        return
    try:
        (folder / name).mkdir(parents=True, exist_ok=True)
    except (OSError, UnicodeEncodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"slurm.output={settings.output}: its folder cannot be made ({why}); name one that you "
            "may write to"
        ) from None


def _handed_on(environ: Environ) -> dict[str, str]:
    """Return the variables for a new job: without those of the job that this shell is in.

    sbatch would hand them on, and srun in the new job takes them for options, which then
    contradict the new job's own.
    """
    if "SLURM_JOB_ID" not in environ:
        return dict(environ)
    left = {
        name: value
        for name, value in environ.items()
        if name.startswith(_OF_THE_USER) or not (name.startswith(_OF_A_JOB) or name in VISIBLE)
    }
    log.info(
        "this shell is in job %s; the new job does not get its %d variables (SLURM_*, PMI*)",
        environ["SLURM_JOB_ID"],
        len(environ) - len(left),
    )
    return left
