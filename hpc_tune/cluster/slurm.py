"""The batch script that the ``slurm`` part of a configuration describes, and its submission."""

import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hpc_tune.config.batch_job import SlurmConfig
from hpc_tune.errors import ConfigError, HpcTuneError

_SUBMIT_LIMIT_S = 60.0
# A #SBATCH line ends a value at white space, and a comment or a quote changes what follows.
_WORD = re.compile(r"[\w@%+=:,./\[\]|&*-]+")


def render(settings: SlurmConfig, arguments: Sequence[str], folder: Path) -> str:
    """Return the script that keeps ``train ARGUMENTS`` going from ``folder`` (pure).

    Raises:
        ConfigError: naming every setting that cannot be written into a script.
    """
    options = _options(settings)
    wrong = [f"slurm.{name}={value!r}" for name, _, value in options if not _WORD.fullmatch(value)]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)}: a line of #SBATCH takes letters, digits and "
            "@ % + = : , . / [ ] | & * - _, no space and no quotes"
        )
    lines = ["#!/bin/bash", *(f"#SBATCH {option}={value}" for _, option, value in options)]
    lines += ["#SBATCH --open-mode=append", "#SBATCH --requeue", "set -eo pipefail"]
    lines.append(f"cd {shlex.quote(str(folder))}")
    if settings.modules:
        lines.append(f"module load {shlex.join(settings.modules)}")
    for file in (settings.env_file, settings.venv and f"{settings.venv}/bin/activate"):
        lines += [f"source {shlex.quote(file)}"] if file else []
    lines.append("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not know otherwise")
    launch = f"{settings.launch} {settings.container}".strip()
    words = ["python", "-m", "hpc_tune", "supervise", "--launch", launch]
    words += ["--python", "python"] if settings.container else []
    return "\n".join([*lines, f"exec {shlex.join([*words, *arguments])}", ""])


def submit(script: str) -> str:
    """Give ``script`` to sbatch and return the job's number.

    Raises:
        HpcTuneError: if sbatch is not there or refuses.
    """
    try:
        found = subprocess.run(
            ["sbatch", "--parsable"],
            input=script,
            capture_output=True,
            text=True,
            timeout=_SUBMIT_LIMIT_S,
        )
    except FileNotFoundError:
        raise ConfigError(
            "sbatch is not on PATH: submit from a login node of the cluster, or write the script "
            "to a file with --dry-run"
        ) from None
    except subprocess.TimeoutExpired:
        raise HpcTuneError(f"sbatch did not answer within {_SUBMIT_LIMIT_S:.0f} s") from None
    if found.returncode:
        raise ConfigError(f"sbatch refused: {found.stderr.strip()}")
    return found.stdout.strip().partition(";")[0]


def _options(settings: SlurmConfig) -> list[tuple[str, str, str]]:
    """Return (field, option of sbatch, value) of all that is set."""
    per_node = settings.tasks_per_node or settings.gpus_per_node or 1
    found: list[tuple[str, str, object]] = [
        ("account", "--account", settings.account),
        ("partition", "--partition", settings.partition),
        ("qos", "--qos", settings.qos),
        ("nodes", "--nodes", settings.nodes),
        ("tasks_per_node", "--ntasks-per-node", per_node),
        ("cpus_per_task", "--cpus-per-task", settings.cpus_per_task),
        ("gpus_per_node", "--gpus-per-node", settings.gpus_per_node or None),
        ("memory", "--mem", settings.memory),
        ("time", "--time", settings.time),
        ("job_name", "--job-name", settings.job_name),
        ("output", "--output", settings.output),
        ("leave_before", "--signal", f"B:USR1@{settings.leave_before:.0f}"),
    ]
    return [(name, option, str(value)) for name, option, value in found if value is not None]
