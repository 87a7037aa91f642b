"""What ``submit`` does besides writing the script: chooses the scheduler, and calls it.

sections, sbatch or qsub on PATH -> choose_scheduler -> script of slurm.py or pbs.py
-> warnings -> the folder of the job's output -> sbatch, qsub -> the job's number
"""

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_tune.cluster import pbs, slurm
from hpc_tune.cluster.batch_script import sourced_files
from hpc_tune.cluster.protocol import Environ
from hpc_tune.cluster.unused_gpus import VISIBILITY_VARIABLES
from hpc_tune.config.scheduler import JobConfig, PbsConfig, SlurmConfig
from hpc_tune.errors import ConfigError, HpcTuneError
from hpc_tune.log import log

_SUBMIT_LIMIT_S = 60.0
# What a job sets for its own processes, besides their visible GPUs; what a user sets for all jobs.
_JOB_PREFIXES = ("SLURM_", "SRUN_", "PMI_", "PMIX_")
_USER_PREFIXES = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT", "PMIX_MCA_")
_LOGIN_VARIABLES = ("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "PWD")  # each job has its own
# Where hpc_tune looks for models by name: a PBS job gets the shell's values.
_HUB_VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class _SubmitCommand:
    """A scheduler's command that reads a script from standard input, and one that shows a job."""

    words: Sequence[str]
    status_template: str


_COMMANDS = {
    "slurm": _SubmitCommand(("sbatch", "--parsable"), "squeue -j {}"),
    "pbs": _SubmitCommand(("qsub",), "qstat {}"),
}


def find_schedulers() -> list[str]:
    """Return the names of the schedulers whose command is on PATH."""
    return [name for name, command in _COMMANDS.items() if shutil.which(command.words[0])]


def choose_scheduler(
    slurm_config: SlurmConfig, pbs_config: PbsConfig, scheduler_name: str | None
) -> JobConfig:
    """Return the section of the scheduler that gets the job.

    It is the one named ``scheduler_name``, else the only one whose section is given, else the only
    one that this host has. Without any it is Slurm's, for a script that is only looked at.

    Raises:
        ConfigError: if this does not decide between the two.
    """
    sections: dict[str, JobConfig] = {"slurm": slurm_config, "pbs": pbs_config}
    if scheduler_name is not None:
        return sections[scheduler_name]
    names = [name for name, section in sections.items() if section.is_given]
    host_schedulers = find_schedulers()
    if len(names) == 1:
        return sections[names[0]]
    if len(host_schedulers) == 1:
        return sections[host_schedulers[0]]
    if not names and not host_schedulers:
        return slurm_config
    text = "has a slurm and a pbs section" if names else "has neither a slurm nor a pbs section"
    found_commands = "sbatch and qsub" if host_schedulers else "neither sbatch nor qsub"
    raise ConfigError(
        f"this host has {found_commands}, and the configuration {text}: choose one with "
        "--scheduler slurm or --scheduler pbs"
    )


def render_script(
    settings: JobConfig, arguments: Sequence[str], folder: Path, variables: Mapping[str, str]
) -> str:
    """Return the script that keeps ``train ARGUMENTS`` going from ``folder`` (pure).

    ``variables`` are set for a PBS job; a Slurm job inherits those of the shell.

    Raises:
        ConfigError: if settings cannot be written into a script or contradict each other.
    """
    match settings:
        case PbsConfig():
            return pbs.render(settings, arguments, folder, variables)
        case SlurmConfig():
            return slurm.render(settings, arguments, folder)
    raise AssertionError(f"no scheduler has the section {settings.section}")


def job_variables(names: Sequence[str], environ: Environ) -> dict[str, str]:
    """Return the variables of this shell that a job lacks: ``names``, and the hub cache's."""
    names = [name for name in (*names, *_HUB_VARIABLES) if name not in _LOGIN_VARIABLES]
    return {name: environ[name] for name in names if environ.get(name)}


def submit_job(script: str, settings: JobConfig, folder: Path, environ: Environ) -> str:
    """Submit ``script``, which runs in ``folder``; return the job's id.

    Raises:
        HpcTuneError: if the scheduler is missing or refuses, or the output's folder cannot be made.
    """
    for warning in _missing_file_warnings(settings):
        log.warning(warning)
    words = _COMMANDS[settings.section].words
    if settings.section == "pbs":
        _require_pbs(words[0])
    _make_output_folder(settings, folder)
    result = _run_command(words, script, _inherited_variables(environ))
    if result.returncode:
        raise ConfigError(f"{words[0]} refused: {result.stderr.strip()}")
    return result.stdout.strip().partition(";")[0]


def status_command(settings: JobConfig, job: str) -> str:
    """Return the command that shows a job."""
    return _COMMANDS[settings.section].status_template.format(job)


def _run_command(
    words: Sequence[str], input_text: str, environ: Environ | None
) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            words,
            input=input_text,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=_SUBMIT_LIMIT_S,
            env=environ,
        )
    except FileNotFoundError:
        raise ConfigError(
            f"{words[0]} is not on PATH: submit from a login node of the cluster, or write the "
            "script to a file with --dry-run"
        ) from None
    except subprocess.TimeoutExpired:
        raise HpcTuneError(f"{words[0]} did not answer within {_SUBMIT_LIMIT_S:.0f} s") from None


def _require_pbs(command: str) -> None:
    """Refuse the qsub of another scheduler: Torque's, Grid Engine's, or the one that Slurm has.

    Raises:
        ConfigError: unless it belongs to PBS Pro or OpenPBS.
    """
    result = _run_command((command, "--version"), "", None)
    output = f"{result.stdout}\n{result.stderr}"
    if "pbs_version" in output:
        return
    first = next((line.strip() for line in output.splitlines() if line.strip()), "nothing")
    raise ConfigError(
        f"this qsub does not belong to PBS Pro or OpenPBS, whose --version says pbs_version: it "
        f"says {first!r}. Torque and Grid Engine are not supported (their directives differ); use "
        "the script of --dry-run as a draft. For Slurm's own qsub, use --scheduler slurm"
    )


def _missing_file_warnings(settings: JobConfig) -> Iterator[str]:
    """Yield a warning for each file that the script sources and this host does not have."""
    for name, file in sourced_files(settings).items():
        if not Path(file).is_file():
            yield (
                f"{settings.section}.{name}={getattr(settings, name)}: there is no {file} on this "
                "host; the job ends at once on nodes that do not have it either"
            )


def _make_output_folder(settings: JobConfig, folder: Path) -> None:
    """Make the folder of the job's output, without which a job ends at once and says nothing."""
    output = settings.output
    if output is None:
        return
    name = Path(output) if settings.section == "pbs" else Path(output).parent
    if "%" in str(name):
        log.warning(
            "slurm.output=%s: Slurm makes no folders, and without the folder the job ends at once "
            "and says nothing; use %% only in the file's name",
            output,
        )
        return
    try:
        (folder / name).mkdir(parents=True, exist_ok=True)
    except (OSError, UnicodeEncodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{settings.section}.output={output}: its folder cannot be made ({why}); name one that "
            "you may write to"
        ) from None


def _inherited_variables(environ: Environ) -> dict[str, str]:
    """Return the variables for a new job, without the variables of the job that this shell is in.

    sbatch would pass them on, and srun in the new job would take them for options, which then
    contradict the new job's own. qsub passes on none.
    """
    if "SLURM_JOB_ID" not in environ:
        return dict(environ)
    variables = {
        name: value
        for name, value in environ.items()
        if name.startswith(_USER_PREFIXES)
        or not (name.startswith(_JOB_PREFIXES) or name in VISIBILITY_VARIABLES)
    }
    log.info(
        "this shell is in job %s; the new job does not get its %d variables (SLURM_*, PMI*)",
        environ["SLURM_JOB_ID"],
        len(environ) - len(variables),
    )
    return variables
