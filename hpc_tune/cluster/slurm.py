"""Slurm: SRUN is its launcher, SLURM its scheduler; ``submit`` gives it a batch script.

variables of a step -> SRUN: the claim of a rank, where ranks without MPI meet
variables of a job, scontrol -> SLURM: its end, what it was granted, how it is requeued
slurm settings -> render (pure) -> submission.py
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from hpc_tune.cluster.batch_script import check_settings, environment_lines, supervise_line
from hpc_tune.cluster.plain import TORCH_NAMES
from hpc_tune.cluster.protocol import (
    LIBMPI_OF_MPICH,
    LIBMPI_OF_OPEN_MPI,
    Claim,
    Environ,
    Launcher,
    MeetingPoint,
    Scheduler,
    read_claim,
)
from hpc_tune.cluster.slurm_energy import ask_energy
from hpc_tune.config.scheduler import SlurmConfig, asks_for_gpus
from hpc_tune.errors import WorldError

STEP_SIZE = "SLURM_STEP_NUM_TASKS"
# Step ids from here up are Slurm's own steps (batch shell, extern, interactive), not started by
# srun.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# So long scontrol may take. All ranks wait while rank 0 asks for the end of the job.
_END_LIMIT_S, _PREEMPTED_LIMIT_S = 10.0, 30.0
_JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?")  # a job, or one task of an array


def is_srun_step(environ: Environ) -> bool:
    """Tell whether srun has started this process.

    Every process of a batch script inherits SLURM_PROCID=0 too.
    """
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return (
        bool(re.fullmatch(r"[0-9]{1,10}", step))
        and int(step) < _FIRST_SPECIAL_STEP
        and "SLURM_PROCID" in environ
    )


def _claim(environ: Environ) -> Claim | None:
    if not is_srun_step(environ):
        return None
    plain = _claim_without_mpi(environ)
    # A task may start ranks itself, as deepspeed's launcher does on each node.
    sets_all = all(name in environ for name in (*TORCH_NAMES, "LOCAL_RANK"))
    if sets_all and environ["WORLD_SIZE"] != str(plain.size):
        return None
    # One task is often an interactive shell (srun --pty bash), whose PMI server serves one MPI_Init
    # only.
    if plain.size == 1:
        return plain
    if environ.get("PMIX_NAMESPACE", "").startswith("slurm"):
        return replace(plain, launcher="srun-pmix", libmpi=LIBMPI_OF_OPEN_MPI)
    if "PMI_RANK" in environ:
        return replace(plain, launcher="srun-pmi2", libmpi=LIBMPI_OF_MPICH)
    return plain


def _claim_without_mpi(environ: Environ) -> Claim:
    # SLURM_NTASKS can be the job's; the step's own count is right where both exist.
    def first(*names: str) -> str:
        return next((name for name in names if name in environ), names[0])

    claim = read_claim(
        environ,
        "slurm",
        rank="SLURM_PROCID",
        size=first(STEP_SIZE, "SLURM_NTASKS"),
        local_rank="SLURM_LOCALID",
        node="SLURM_NODEID",
        num_nodes=first("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    )
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    local_size = _tasks_on_node(tasks, claim.node)
    if local_size is None and claim.num_nodes == 1:
        local_size = claim.size
    return replace(claim, local_size=local_size)


def _tasks_on_node(text: str, node: int | None) -> int | None:
    """Return the tasks of one node from Slurm's run-length list, such as ``"4(x2),3"``."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,7})\))?", part)
        if match is None:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node is not None and node < len(counts) else None


def _meeting_point(environ: Environ, claim: Claim) -> MeetingPoint:
    """Return the first node of the step, and what only this start of this step knows."""
    hosts = expand_nodelist(
        environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    )
    several_nodes = (claim.num_nodes or 1) > 1
    addresses = hosts[:1] if several_nodes else ["127.0.0.1", "::1"]
    # srun often runs on the allocation's first node, which helps where node names do not resolve.
    if several_nodes and environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        addresses.append(environ["SLURM_LAUNCH_NODE_IPADDR"])
    if not addresses:
        raise WorldError(
            "SLURM_STEP_NODELIST is empty, so rank 0 cannot be found; start with srun or mpirun"
        )
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return MeetingPoint(addresses, "/".join(environ.get(name, "") for name in names))


def expand_nodelist(text: str) -> list[str]:
    """Return the hosts of Slurm's list, such as ``"n[01-03,7],gpu-[1-2]x[0-1]"``."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        names = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", item):
            tails = [plain] if plain else _expand_ranges(ranges)
            names = [name + tail for name in names for tail in tails]
        hosts += names
    return hosts


def _expand_ranges(text: str) -> list[str]:
    values: list[str] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        if not high:
            values.append(low)
        else:
            values += [str(i).zfill(len(low)) for i in range(int(low), int(high) + 1)]
    return values


SRUN = Launcher(
    _claim,
    prefixes=("SLURM_",),
    processes=("slurmstepd",),
    advice="Under srun, --mpi=pmix (Open MPI), --mpi=pmi2 (MPICH) or --mpi=none (no MPI is used "
    "then) may be all it needs.",
    meeting_point=_meeting_point,
    claim_without_mpi=_claim_without_mpi,
)


def _memory_limits(environ: Environ) -> Iterator[tuple[int, str]]:
    """Yield what --mem and --mem-per-cpu granted, in megabytes; 0 means all of the node's."""
    per_node, per_cpu = (environ.get(f"SLURM_MEM_PER_{what}", "") for what in ("NODE", "CPU"))
    cpus = _granted_cpus(environ)
    if per_node.isdigit() and int(per_node):
        yield int(per_node) << 20, "SLURM_MEM_PER_NODE"
    if per_cpu.isdigit() and cpus is not None and int(per_cpu) * cpus:
        yield int(per_cpu) * cpus << 20, "SLURM_MEM_PER_CPU x SLURM_CPUS_ON_NODE"


def _granted_cpus(environ: Environ) -> int | None:
    text = environ.get("SLURM_CPUS_ON_NODE", "")
    return int(text) if text.isdigit() else None


def _array_task(environ: Environ) -> str | None:
    """Return such as ``"700_3"``: one task of each array has the number of the array itself."""
    names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
    numbers = [environ.get(name, "") for name in names]
    return "_".join(numbers) if all(number.isdigit() for number in numbers) else None


def _ask_end(job_id: str) -> float | None:
    """A job without a limit has no end."""
    shown = _show_job(job_id, _END_LIMIT_S) if _JOB_ID.fullmatch(job_id) else ""
    match = re.search(r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", shown)
    return None if match is None else datetime.fromisoformat(match[1]).timestamp()


def _is_preempted(job_id: str) -> bool:
    """Ask whether the job is being preempted.

    With a grace time (GraceTime) it sends SIGTERM to the ranks, as scancel can, and waits; a job
    that ends in that time counts as ended and is not requeued.
    """
    return re.search(r"\bPreemptTime=\d", _show_job(job_id, _PREEMPTED_LIMIT_S)) is not None


def _show_job(job_id: str, limit_s: float) -> str:
    """Return the output of scontrol show job, empty if scontrol does not answer."""
    try:
        return subprocess.run(
            ["scontrol", "show", "job", job_id],
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=limit_s,
            # A user's own format of times would not be understood.
            env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _requeue_command(job_id: str) -> list[str]:
    return ["scontrol", "requeue", job_id] if shutil.which("scontrol") else []


SLURM = Scheduler(
    job_id="SLURM_JOB_ID",
    name="Slurm",
    restart_count="SLURM_RESTART_COUNT",
    end="SLURM_JOB_END_TIME",
    array_task=_array_task,
    memory_limits=_memory_limits,
    granted_cpus=_granted_cpus,
    ask_end=_ask_end,
    is_preempted=_is_preempted,
    requeue_command=_requeue_command,
    ask_energy=ask_energy,
)


def render(settings: SlurmConfig, arguments: Sequence[str], folder: Path) -> str:
    """Return the script that keeps ``train ARGUMENTS`` going from ``folder`` (pure).

    Raises:
        ConfigError: naming every setting that cannot be written into a script.
    """
    options = _options(settings)
    check_settings(settings, [(name, value) for name, _, value in options], "#SBATCH")
    supervise = supervise_line(settings, settings.launch, arguments, folder)
    lines = ["#!/bin/bash", *(f"#SBATCH {option}={value}" for _, option, value in options)]
    lines += ["#SBATCH --open-mode=append", "#SBATCH --requeue", "#SBATCH --no-kill"]
    lines += [f"#SBATCH {option}" for option in settings.options]
    lines += environment_lines(settings, folder)
    lines.append("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not know otherwise")
    lines.append(
        "export SLURM_EXPORT_ENV=ALL  # --export=NONE would keep all of this from the ranks"
    )
    return "\n".join([*lines, supervise, ""])


def _options(settings: SlurmConfig) -> list[tuple[str, str, str]]:
    """Return (field, option of sbatch, value) of all that is set."""
    gpus = None if asks_for_gpus(settings.options) else settings.gpus_per_node or None
    options: list[tuple[str, str, object]] = [
        ("account", "--account", settings.account),
        ("partition", "--partition", settings.partition),
        ("qos", "--qos", settings.qos),
        ("nodes", "--nodes", settings.nodes + settings.spare_nodes),
        ("tasks_per_node", "--ntasks-per-node", settings.ranks_per_node),
        ("cpus_per_task", "--cpus-per-task", settings.cpus_per_task),
        ("gpus_per_node", "--gpus-per-node", gpus),
        ("memory", "--mem", settings.memory),
        ("time", "--time", settings.time),
        ("job_name", "--job-name", settings.job_name),
        ("output", "--output", settings.output),
        ("leave_before", "--signal", f"B:USR1@{settings.leave_before:.0f}"),
    ]
    return [(name, option, str(value)) for name, option, value in options if value is not None]
