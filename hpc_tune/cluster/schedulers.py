"""The batch job of this process, as its scheduler describes it."""

import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_tune.cluster import pbs, slurm
from hpc_tune.cluster.protocol import Environ, JobEnergy, Scheduler
from hpc_tune.config.scheduler import JobConfig, PbsConfig, SlurmConfig
from hpc_tune.log import log
from hpc_tune.units import format_seconds

# The first whose job id is in the environment is the scheduler of the job.
SCHEDULERS = (slurm.SLURM, pbs.PBS)
# Set by the script of a scheduler that does not tell when the job ends.
_END_VARIABLE = "HPC_TUNE_JOB_END"
# Set by the script of a scheduler that sends no signal: seconds before the end to ask the ranks.
_EXIT_MARGIN_VARIABLE = "HPC_TUNE_LEAVE_BEFORE"


@dataclass(frozen=True)
class BatchJob:
    """The job that this process belongs to."""

    scheduler: Scheduler
    id: str
    restart_count: str


def find_job(environ: Environ) -> BatchJob | None:
    """Return the batch job of a process with these variables; ``None`` outside of a job."""
    for scheduler in SCHEDULERS:
        if job_id := environ.get(scheduler.job_id):
            count = environ.get(scheduler.restart_count or "", "0")
            return BatchJob(scheduler, scheduler.read_array_task_id(environ) or job_id, count)
    return None


def find_job_end_s(environ: Environ, asks_scheduler: bool) -> float | None:
    """Return when the batch job ends, in seconds since the epoch; ``None`` if it has no limit.

    An end in the past belongs to an earlier job, whose environment a shell has kept: no job
    outlives its end. ``asks_scheduler``: ask the scheduler if the environment does not tell.
    """
    for name in (_END_VARIABLE, *(s.end for s in SCHEDULERS if s.end is not None)):
        text = environ.get(name, "")
        if text.isdigit() and int(text) > time.time():
            return float(text)
        if text.isdigit() and int(text) > 0 and asks_scheduler:
            log.warning(
                "%s=%s is in the past, so it is ignored: the environment is from an earlier job",
                name,
                text,
            )
    job = find_job(environ) if asks_scheduler else None
    end_s = None if job is None else job.scheduler.ask_end_s(job.id)
    if end_s is not None and (ago_s := time.time() - end_s) > 0:
        log.warning(
            "the scheduler says that this job has ended %s ago: the clock of %s is ahead of the "
            "scheduler's by at least as much, so only its signal asks the run to stop. Compare "
            "the clocks (date), and correct this one",
            format_seconds(ago_s),
            socket.gethostname(),
        )
        return None
    return end_s


def read_exit_margin_s(environ: Environ, default_s: float) -> float:
    """Return how long before the end of the job its ranks are asked to stop."""
    text = environ.get(_EXIT_MARGIN_VARIABLE, "")
    return float(text) if text.isdigit() and int(text) else default_s


def choose_section(slurm_config: SlurmConfig, pbs_config: PbsConfig, environ: Environ) -> JobConfig:
    """Return the section for this process's job.

    ``pbs`` if it is given, and this is a PBS job or ``slurm`` is not given; else ``slurm``.
    """
    job = find_job(environ)
    is_of_pbs = job is not None and job.scheduler is pbs.PBS
    uses_pbs = pbs_config.is_given and (is_of_pbs or not slurm_config.is_given)
    return pbs_config if uses_pbs else slurm_config


def memory_limits(environ: Environ) -> Iterator[tuple[int, str]]:
    """Yield the bytes of host memory that a node grants the job, and the variables that say so."""
    for scheduler in SCHEDULERS:
        yield from scheduler.memory_limits(environ)


def granted_cpus(environ: Environ) -> int | None:
    """Return the CPUs of this node that the job was granted; ``None`` if no scheduler says."""
    counts = (scheduler.granted_cpus(environ) for scheduler in SCHEDULERS)
    return next((count for count in counts if count is not None), None)


def can_report_energy(scheduler_name: str) -> bool:
    """Whether the scheduler of this name may have counted the energy of its jobs."""
    return any(s.name == scheduler_name and s.ask_energy is not None for s in SCHEDULERS)


def ask_job_energy(scheduler_name: str, starts: Sequence[tuple[str, float]]) -> list[JobEnergy]:
    """Ask the scheduler of this name for the energy of the jobs in which a run started.

    It may take many seconds.
    """
    ask_energy = next((s.ask_energy for s in SCHEDULERS if s.name == scheduler_name), None)
    return [] if ask_energy is None else ask_energy(starts)
