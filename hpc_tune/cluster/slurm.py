"""Slurm: SRUN is its launcher, SLURM its scheduler; ``submit`` gives it a batch script.

variables of a step -> SRUN: the launch information of a rank, where ranks without MPI meet
variables of a job, scontrol -> SLURM: its end, what it was granted, how it is requeued
slurm settings -> render (pure) -> submission.py
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from hpc_tune.cluster.batch_script import check_settings, environment_lines, format_supervise_line
from hpc_tune.cluster.protocol import (
    ANSWER_LIMIT_S,
    LIBMPI_OF_MPICH,
    LIBMPI_OF_OPEN_MPI,
    TORCH_VARIABLES,
    Environ,
    JobEnergy,
    Launcher,
    LaunchInfo,
    RendezvousEndpoint,
    Scheduler,
    read_launch_info,
    read_output,
)
from hpc_tune.config.scheduler import SlurmConfig, asks_for_gpus
from hpc_tune.errors import WorldError

# -- The energy of a job's nodes as counted by Slurm (AcctGatherEnergyType), once the job is over.
#
#     starts of a run in jobs -> sacct -> rows -> JobEnergy, of each execution of a job
#
# If a job has a separate step for all of its nodes (extern, PrologFlags=Contain), Slurm takes the
# job's energy from that step; else it adds up all steps, several of which can count the same node
# (_internal_step_complete in src/slurmctld/step_mgr.c). Job numbers begin again when a center sets
# up its accounting anew, and differ between clusters: so a job counts only if it ran when the run
# started.


_SACCT_LIMIT_S = 15.0
_MAX_CLOCK_SKEW_S = 120.0  # between the clocks of a node and of Slurm's database
_JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?")  # a job, or one task of an array
_SACCT_FIELDS = "JobID,Start,End,ConsumedEnergyRaw"
# What Slurm writes for no value, in 32 and 64 bits.
_NO_VALUES = (0, 0xFFFFFFFE, 0xFFFFFFFF)
_MAX_ENERGY_J = 1e15


@dataclass(frozen=True)
class _SacctRow:
    """One execution of a job or of one of its steps; ``end_s`` is None if it is not over."""

    job: str
    step: str
    begin_s: float
    end_s: float | None
    joules: float | None

    def ran_at(self, time_s: float) -> bool:
        return (
            self.begin_s - _MAX_CLOCK_SKEW_S <= time_s <= (self.end_s or time_s) + _MAX_CLOCK_SKEW_S
        )


def ask_energy(starts: Sequence[tuple[str, float]]) -> list[JobEnergy]:
    """Return the energy counted for these starts (job, seconds since 1970); ask sacct once."""
    jobs = list(dict.fromkeys(job for job, _ in starts if _JOB_ID.fullmatch(job)))
    if not jobs:
        return []
    command = ["sacct", "-n", "-P", "-D", "-j", ",".join(jobs), f"--format={_SACCT_FIELDS}"]
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=_SACCT_LIMIT_S,
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
        )
    except subprocess.TimeoutExpired:
        return [
            JobEnergy(job, reason=f"sacct did not answer in {_SACCT_LIMIT_S:.0f} s") for job in jobs
        ]
    except FileNotFoundError:
        return [JobEnergy(job, reason="there is no sacct here") for job in jobs]
    except OSError as error:
        return [JobEnergy(job, reason=f"sacct: {error.strerror or error}") for job in jobs]
    if result.returncode:
        message = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        return [JobEnergy(job, reason=f"sacct says {message}") for job in jobs]
    return parse_energies(result.stdout, [start for start in starts if start[0] in jobs])


def parse_energies(text: str, starts: Sequence[tuple[str, float]]) -> list[JobEnergy]:
    """Return the energy of each execution of a job, from sacct's rows (pure)."""
    rows = list(_parse_rows(text))
    energies: dict[tuple[str, float | None], JobEnergy] = {}
    for job, time_s in starts:
        job_row = next((r for r in rows if r.job == job and not r.step and r.ran_at(time_s)), None)
        if job_row is None:
            energies[job, None] = JobEnergy(job, reason="sacct knows of no such job at that time")
        else:
            energies[job, job_row.begin_s] = _job_energy(job_row, rows)
    return list(energies.values())


def _job_energy(job_row: _SacctRow, rows: Sequence[_SacctRow]) -> JobEnergy:
    if job_row.end_s is None:
        return JobEnergy(job_row.job, reason="it is not over")
    for row in rows:
        if (
            (row.job, row.step) == (job_row.job, "extern")
            and job_row.ran_at(row.begin_s)
            and row.joules
        ):
            return JobEnergy(job_row.job, row.joules)
    if job_row.joules is None:
        return JobEnergy(
            job_row.job, reason="Slurm has counted no energy there (AcctGatherEnergyType)"
        )
    return JobEnergy(job_row.job, job_row.joules, is_sum_of_steps=True)


def _parse_rows(text: str) -> Iterator[_SacctRow]:
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 4 or not fields[1].isdigit():
            continue  # such as a job that has not begun: Unknown
        job, _, step = fields[0].partition(".")
        end_s = float(fields[2]) if fields[2].isdigit() else None
        yield _SacctRow(job, step, float(fields[1]), end_s, _parse_joules(fields[3]))


def _parse_joules(text: str) -> float | None:
    is_known = text.isdigit() and int(text) not in _NO_VALUES and int(text) < _MAX_ENERGY_J
    return float(text) if is_known else None


STEP_NUM_TASKS_VARIABLE = "SLURM_STEP_NUM_TASKS"
# Step ids from here up are Slurm's own steps (batch shell, extern, interactive), not started by
# srun.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
# How long scontrol may take: all ranks wait while rank 0 asks for the end of the job.
_ASK_END_LIMIT_S, _ASK_PREEMPTED_LIMIT_S = 10.0, 30.0


def is_srun_step(environ: Environ) -> bool:
    """Tell whether srun has started this process.

    SLURM_PROCID alone does not tell: every process of a batch script inherits SLURM_PROCID=0 too.
    """
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    return (
        bool(re.fullmatch(r"[0-9]{1,10}", step))
        and int(step) < _FIRST_SPECIAL_STEP
        and "SLURM_PROCID" in environ
    )


def _read_slurm_info(environ: Environ) -> LaunchInfo | None:
    if not is_srun_step(environ):
        return None
    info = _read_info_without_mpi(environ)
    # A task may start ranks itself, as deepspeed's launcher does on each node.
    sets_all = all(name in environ for name in (*TORCH_VARIABLES, "LOCAL_RANK"))
    if sets_all and environ["WORLD_SIZE"] != str(info.size):
        return None
    # One task is often an interactive shell (srun --pty bash), whose PMI server serves one MPI_Init
    # only.
    if info.size == 1:
        return info
    if environ.get("PMIX_NAMESPACE", "").startswith("slurm"):
        return replace(info, launcher="srun-pmix", libmpi=LIBMPI_OF_OPEN_MPI)
    if "PMI_RANK" in environ:
        return replace(info, launcher="srun-pmi2", libmpi=LIBMPI_OF_MPICH)
    return info


def _read_info_without_mpi(environ: Environ) -> LaunchInfo:
    # SLURM_NTASKS can be the job's; the step's own count is right where both exist.
    def first_set_variable(*names: str) -> str:
        return next((name for name in names if name in environ), names[0])

    info = read_launch_info(
        environ,
        "slurm",
        rank="SLURM_PROCID",
        size=first_set_variable(STEP_NUM_TASKS_VARIABLE, "SLURM_NTASKS"),
        local_rank="SLURM_LOCALID",
        node="SLURM_NODEID",
        num_nodes=first_set_variable("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    )
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", environ.get("SLURM_TASKS_PER_NODE", ""))
    counts = _expand_run_lengths(tasks)
    if info.node is not None and info.node < len(counts):
        return replace(info, local_size=counts[info.node])
    return replace(info, local_size=info.size if info.num_nodes == 1 else None)


def _expand_run_lengths(text: str) -> list[int]:
    """Return the numbers of Slurm's list, such as ``"4(x2),3"``; empty if it is not such a list."""
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,7})\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _find_rendezvous_endpoint(environ: Environ, info: LaunchInfo) -> RendezvousEndpoint:
    """Return the first node of the step, and a token that only this start of this step knows."""
    hosts = expand_nodelist(
        environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
    )
    several_nodes = (info.num_nodes or 1) > 1
    addresses = hosts[:1] if several_nodes else ["127.0.0.1", "::1"]
    # srun often runs on the allocation's first node, which helps where node names do not resolve.
    if several_nodes and environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        addresses.append(environ["SLURM_LAUNCH_NODE_IPADDR"])
    if not addresses:
        raise WorldError(
            "SLURM_STEP_NODELIST is empty, so rank 0 cannot be found; start with srun or mpirun"
        )
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return RendezvousEndpoint(addresses, "/".join(environ.get(name, "") for name in names))


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
    _read_slurm_info,
    variable_prefixes=("SLURM_",),
    process_prefixes=("slurmstepd",),
    advice="Under srun, --mpi=pmix (Open MPI), --mpi=pmi2 (MPICH) or --mpi=none (no MPI is used "
    "then) may be all it needs.",
    rendezvous_endpoint=_find_rendezvous_endpoint,
    read_info_without_mpi=_read_info_without_mpi,
)


def _memory_limits(environ: Environ) -> Iterator[tuple[int, str]]:
    """Yield the bytes granted by --mem and --mem-per-cpu (in MB; 0 means all of the node's)."""
    per_node, per_cpu = (environ.get(f"SLURM_MEM_PER_{unit}", "") for unit in ("NODE", "CPU"))
    cpus = _granted_cpus(environ)
    if per_node.isdigit() and int(per_node):
        yield int(per_node) << 20, "SLURM_MEM_PER_NODE"
    if per_cpu.isdigit() and cpus is not None and int(per_cpu) * cpus:
        yield int(per_cpu) * cpus << 20, "SLURM_MEM_PER_CPU x SLURM_CPUS_ON_NODE"


def _granted_cpus(environ: Environ) -> int | None:
    text = environ.get("SLURM_CPUS_ON_NODE", "")
    return int(text) if text.isdigit() else None


def _read_array_task_id(environ: Environ) -> str | None:
    """Return an id such as ``"700_3"``: one task of each array has the array's own job number."""
    names = ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID")
    numbers = [environ.get(name, "") for name in names]
    return "_".join(numbers) if all(number.isdigit() for number in numbers) else None


def _ask_end_s(job_id: str) -> float | None:
    """Return when the job ends; a job without a limit has no end."""
    if not _JOB_ID.fullmatch(job_id):
        return None
    end = _search_scontrol_job(
        job_id, r"\bEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", _ASK_END_LIMIT_S
    )
    return None if end is None else datetime.fromisoformat(end).timestamp()


def _is_preempted(job_id: str) -> bool:
    """Ask whether the job is being preempted.

    With a grace time (GraceTime) Slurm sends SIGTERM to the ranks, as scancel can, and waits; a job
    that ends in that time counts as ended and is not requeued.
    """
    return _search_scontrol_job(job_id, r"\bPreemptTime=(\d)", _ASK_PREEMPTED_LIMIT_S) is not None


def _search_scontrol_job(job_id: str, pattern: str, limit_s: float) -> str | None:
    """Return the group of ``pattern`` in what scontrol shows of a job, if it answers."""
    # A time format that the user has set would not be understood.
    command = ("scontrol", "show", "job", job_id)
    output = read_output(*command, limit_s=limit_s, SLURM_TIME_FORMAT="standard")
    match = re.search(pattern, output, re.MULTILINE)
    return None if match is None else match[1]


def _requeue_command(job_id: str) -> list[str]:
    return ["scontrol", "requeue", job_id] if shutil.which("scontrol") else []


SLURM = Scheduler(
    job_id="SLURM_JOB_ID",
    name="Slurm",
    restart_count="SLURM_RESTART_COUNT",
    end="SLURM_JOB_END_TIME",
    read_array_task_id=_read_array_task_id,
    memory_limits=_memory_limits,
    granted_cpus=_granted_cpus,
    ask_end_s=_ask_end_s,
    is_preempted=_is_preempted,
    requeue_command=_requeue_command,
    ask_energy=ask_energy,
)


def render(settings: SlurmConfig, arguments: Sequence[str], folder: Path) -> str:
    """Return the script that keeps ``train ARGUMENTS`` going from ``folder`` (pure).

    Raises:
        ConfigError: if settings cannot be written into a script or contradict each other.
    """
    options = _sbatch_options(settings)
    check_settings(settings, [(name, value) for name, _, value in options], "#SBATCH")
    supervise = format_supervise_line(settings, settings.launch, arguments, folder)
    lines = ["#!/bin/bash", *(f"#SBATCH {option}={value}" for _, option, value in options)]
    lines += ["#SBATCH --open-mode=append", "#SBATCH --requeue", "#SBATCH --no-kill"]
    lines += [f"#SBATCH {option}" for option in settings.options]
    lines += environment_lines(settings, folder)
    lines.append(
        "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not inherit --cpus-per-task"
    )
    lines.append(
        "export SLURM_EXPORT_ENV=ALL  # else --export=NONE hides all of this from the ranks"
    )
    return "\n".join([*lines, supervise, ""])


def _sbatch_options(settings: SlurmConfig) -> list[tuple[str, str, str]]:
    """Return (field, option of sbatch, value) of every field that is set."""
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


# -- The nodes of a running Slurm job: which it has, which are sick, and the end of its steps.
#
# scontrol show job -> the nodes of the job: SLURM_JOB_NODELIST still counts those that it has lost
# sinfo             -> the state of each
# squeue -s         -> the steps that still hold nodes


# With it a step shares the resources of an old step whose end a lost node has not reported.
OVERLAP_VARIABLES = {"SLURM_OVERLAP": "1"}
GUARD_STEP_NAME = "hpc_tune-guard"  # of the step that RequeueGuard keeps running
_POLL_S = 0.5
# The states in sinfo of nodes on which no rank can start; a * after it: the node does not answer.
_UNHEALTHY_STATE = re.compile(r"(down|drain|fail|error|unknown|no_respond|power|reboot)\w*|\w+\*")


class SlurmNodes:
    """What Slurm says of the nodes of one job."""

    @classmethod
    def from_environ(cls, environ: Environ) -> "SlurmNodes | None":
        """Return the nodes of the job with these variables; ``None`` outside of a job."""
        return cls(environ) if environ.get("SLURM_JOB_NODELIST") else None

    def __init__(self, environ: Environ) -> None:
        """Take the job of ``environ``."""
        number = environ.get("SLURM_JOB_ID", "")
        self._id = _read_array_task_id(environ) or number
        self._possible_job_ids = {number, self._id}
        self._job_node_names = expand_nodelist(environ.get("SLURM_JOB_NODELIST", ""))
        self._ranks_per_node = _expand_run_lengths(environ.get("SLURM_TASKS_PER_NODE", ""))

    @property
    def id(self) -> str:
        """The number of the job for Slurm's programs; in an array, the number of the task."""
        return self._id

    def allocated_nodes(self) -> dict[str, int | None]:
        """Return the nodes that the job began with, and the number of ranks of each if known."""
        if len(self._ranks_per_node) != len(self._job_node_names):
            return dict.fromkeys(self._job_node_names)
        return dict(zip(self._job_node_names, self._ranks_per_node, strict=True))

    def find_unhealthy_nodes(self, nodes: Sequence[str]) -> dict[str, str]:
        """Return the ``nodes`` that the job no longer has or that cannot be used, and why.

        If Slurm does not answer, all nodes count as usable.
        """
        nodelist = _search_scontrol_job(self._id, r"^ *NodeList=(\S+)", ANSWER_LIMIT_S)
        job_nodes = expand_nodelist(nodelist) if nodelist else list(nodes)
        states = read_output("sinfo", "-N", "-h", "-o", "%N %T", "-n", ",".join(nodes)).split()
        unhealthy_nodes = {
            node: _explain_unhealthy_state(state)
            for node, state in zip(states[::2], states[1::2], strict=False)
            if node in nodes and _UNHEALTHY_STATE.fullmatch(state)
        }
        lost_nodes = {
            node: "Slurm has taken it out of the job" for node in nodes if node not in job_nodes
        }
        return {
            node: (lost_nodes | unhealthy_nodes).get(node, "")
            for node in nodes
            if node in lost_nodes | unhealthy_nodes
        }

    def steps(self, names: Container[str] | None = None) -> set[str]:
        """Return the job's steps started by srun, such as ``7.0``; only ``names`` if given."""
        lines = read_output("squeue", "-s", "-h", "-j", self._id, "-o", "%i %j").splitlines()
        words = [line.split(maxsplit=1) for line in lines]
        parts = [
            word[0].rpartition(".")
            for word in words
            if word and (names is None or word[-1] in names)
        ]
        return {f"{id}.{n}" for id, _, n in parts if id in self._possible_job_ids and n.isdigit()}

    def end(self, steps: Iterable[str], limit_s: float) -> bool:
        """End steps; return whether they have gone within ``limit_s`` seconds."""
        remaining_steps = set(steps) & self.steps()
        if not remaining_steps:
            return True
        deadline_s = time.monotonic() + limit_s
        read_output("scancel", *sorted(remaining_steps))
        while remaining_steps := remaining_steps & self.steps():
            if time.monotonic() > deadline_s:
                return False
            time.sleep(_POLL_S)
        return True


def _explain_unhealthy_state(state: str) -> str:
    name = state.rstrip("*")
    problems = [f"is {name}"] if _UNHEALTHY_STATE.fullmatch(name) else []
    problems += ["does not respond"] if state.endswith("*") else []
    return f"Slurm says that it {' and '.join(problems)}"


# -- Requeues a Slurm job whose first node is lost.
#
# With --no-kill Slurm only takes the node out of the job. If the node is gone with all processes,
# the job then holds the other nodes until its time limit, without a batch script; if the node's
# daemon is alive, the job has failed. So a small step on another node checks the job, and requeues
# it as Slurm would without --no-kill.


GUARD_CHECK_INTERVAL_S = 60
# A job that its user has ended is left alone: its state has another reason.
_GUARD_SCRIPT = """\
first=$1 job=$2
check() {
    shown=$(scontrol show job "$job") || return 1
    case "$shown" in
    *JobState=RUNNING*) ;;
    *Reason=JobLaunchFailure* | *Reason=NodeFail* | *Reason=NodeDown*) ;;
    *) return 1 ;;
    esac
    nodes=$(printf '%s\\n' "$shown" | sed -n 's/^ *NodeList=//p')
    [ -n "$nodes" ] || return 1
    scontrol show hostnames "$nodes" | grep -qx "$first" && return 1
    scontrol requeue "$job"
}
trap 'check; exit' TERM
while :; do
    sleep "$3" &
    wait $!
    check && exit
done
"""


class RequeueGuard:
    """Keeps one such step running."""

    def __init__(self, job_id: str, environ: Environ) -> None:
        """Take the job of ``environ``, in whose batch script this process runs."""
        self._job_id, self._first_node = job_id, environ.get("SLURMD_NODENAME", "")
        self._child: subprocess.Popen[bytes] | None = None
        self._node = ""

    def keep_running(self, nodes: Sequence[str]) -> None:
        """Start the step on one of ``nodes`` unless it already runs there."""
        peers = [node for node in nodes if node != self._first_node]
        is_running = self._child is not None and self._child.poll() is None and self._node in peers
        if is_running or not peers or self._first_node not in nodes:
            return
        self._node = peers[0]
        words = ["srun", "--no-kill", f"--job-name={GUARD_STEP_NAME}", "--nodes=1", "--ntasks=1"]
        words += [f"--nodelist={self._node}", "--mpi=none", "--quiet"]
        words += [
            "sh",
            "-c",
            _GUARD_SCRIPT,
            GUARD_STEP_NAME,
            self._first_node,
            self._job_id,
            str(GUARD_CHECK_INTERVAL_S),
        ]
        try:
            self._child = subprocess.Popen(
                words,
                env={**os.environ, **OVERLAP_VARIABLES},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError:  # without srun there is no step at all
            self._child = None
