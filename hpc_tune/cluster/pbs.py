"""PBS Pro and OpenPBS: the scheduler, and the batch script that ``submit`` gives it.

pbs settings -> render (pure) -> submission.py -> qsub
a script that submits itself again -> PBS: the next job, with the qsub options of this one

A job learns its end from its script, which asks qstat. MOM runs a copy of the script that qsub
read. The job may read this copy, and it is what qsub gets for the next job.
Source: qsub(1B), pbs_job_attributes(7B) and resmom/start_exec.c of OpenPBS.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hpc_tune.cluster.batch_script import check_settings, environment_lines, format_supervise_line
from hpc_tune.cluster.protocol import Scheduler, read_output
from hpc_tune.config.scheduler import PbsConfig
from hpc_tune.log import log

_SCRIPT_VARIABLE = "HPC_TUNE_JOB_SCRIPT"  # set by the script itself
_RESOURCES = ("walltime", "select", "place", "filesystems")
# PBS tells a job its end only if asked; a server that does not answer is no reason to fail.
_JOB_END_LINES = """\
walltime=$(qstat -f "$PBS_JOBID" | sed -n 's/^ *Resource_List.walltime = //p') || true
IFS=: read -r hours minutes seconds <<<"${{walltime:-{walltime}}}"
export HPC_TUNE_JOB_END=$(($(date +%s) + 10#$hours * 3600 + 10#$minutes * 60 + 10#$seconds))"""


def _requeue_command(job_id: str) -> list[str]:
    """Return the command that submits this job's script again, to run after this job has ended.

    Empty if that is impossible. PBS has no command that puts a user's own job back into its queue.
    """
    script = os.environ.get(_SCRIPT_VARIABLE)
    if script is None:  # the user's own script, which says how with --requeue
        return []
    if shutil.which("qsub") is None or not Path(script).is_file():
        problem = f"{script} is not a file" if shutil.which("qsub") else "qsub is not on PATH here"
        log.warning(
            "%s: the next job cannot be submitted; submit it by hand after this one", problem
        )
        return []
    return [
        "qsub",
        "-W",
        f"depend=afterany:{job_id}",
        *_qsub_options(read_output("qstat", "-f", job_id)),
        script,
    ]


def _qsub_options(job_text: str) -> Iterator[str]:
    """Yield the options that qsub was given for a job, from qstat: the command line's included."""
    job_text = job_text.replace("\n\t", "")  # long lines are wrapped
    attributes = dict(re.findall(r"^ *([\w.]+) = (\S.*)$", job_text, re.MULTILINE))
    # The queue of the submission: one that a routing queue has chosen may accept no jobs directly.
    options = {"-q": os.environ.get("PBS_O_QUEUE"), "-A": attributes.get("Account_Name")}
    for option, value in options.items():
        if value:
            yield from (option, value)
    for name in _RESOURCES:
        if value := attributes.get(f"Resource_List.{name}"):
            yield from ("-l", f"{name}={value}")


PBS = Scheduler(job_id="PBS_JOBID", name="PBS", requeue_command=_requeue_command)


def render(
    settings: PbsConfig, arguments: Sequence[str], folder: Path, variables: Mapping[str, str]
) -> str:
    """Return the script that keeps ``train ARGUMENTS`` going from ``folder`` (pure).

    ``variables`` are set in it: a PBS job inherits none of the shell's variables.

    Raises:
        ConfigError: names every setting that a script cannot hold; or min_nodes exceeds nodes.
    """
    directives = _directives(settings, folder)
    check_settings(settings, [(name, value) for name, _, value in directives], "#PBS")
    supervise = format_supervise_line(settings, _format_launch_command(settings), arguments, folder)
    # A login shell: without one there is no `module`, and no qsub on PATH, at many sites.
    lines = ["#!/bin/bash -l", *(f"#PBS {option}{value}" for _, option, value in directives)]
    lines += ["#PBS -j oe", "#PBS -r y", *(f"#PBS {option}" for option in settings.options)]
    lines += environment_lines(settings, folder, variables)
    time_limit_s = round(settings.time_limit_s)
    walltime = f"{time_limit_s // 3600:02d}:{time_limit_s // 60 % 60:02d}:{time_limit_s % 60:02d}"
    lines += [f"export {_SCRIPT_VARIABLE}=$0 HPC_TUNE_LEAVE_BEFORE={settings.leave_before:.0f}"]
    lines += [_JOB_END_LINES.format(walltime=walltime)]
    return "\n".join([*lines, supervise, ""])


def _format_launch_command(settings: PbsConfig) -> str:
    per_node = settings.ranks_per_node
    return settings.launch or f"mpiexec -n {settings.nodes * per_node} --ppn {per_node}"


def _directives(settings: PbsConfig, folder: Path) -> list[tuple[str, str, str]]:
    """Return (field, option of qsub, value) of every field that is set."""
    number = settings.nodes + settings.spare_nodes
    chunk = _format_select_chunk(settings) if settings.chunk is None else settings.chunk
    output = None if settings.output is None else f"{folder / settings.output}/"
    directives: list[tuple[str, str, str | None]] = [
        ("account", "-A ", settings.account),
        ("queue", "-q ", settings.queue),
        ("chunk", "-l select=", f"{number}:{chunk}" if chunk else f"{number}"),
        ("place", "-l place=", settings.place),
        ("walltime", "-l walltime=", settings.walltime),
        ("filesystems", "-l filesystems=", settings.filesystems),
        ("job_name", "-N ", settings.job_name),
        ("output", "-o ", output),
    ]
    return [(name, option, value) for name, option, value in directives if value is not None]


def _format_select_chunk(settings: PbsConfig) -> str:
    per_node = settings.ranks_per_node
    parts = [f"ncpus={per_node * settings.cpus_per_task}", f"mpiprocs={per_node}"]
    parts += [f"ngpus={settings.gpus_per_node}"] if settings.gpus_per_node else []
    parts += [f"mem={settings.memory}"] if settings.memory else []
    return ":".join(parts)
