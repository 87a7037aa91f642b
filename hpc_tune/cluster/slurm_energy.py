"""What Slurm has counted of the energy of a job's nodes (AcctGatherEnergyType), once it is over.

    starts of a run in jobs -> sacct -> rows -> JobEnergy, of each time that a job ran

Where a job has a step of its own for all of its nodes (extern, PrologFlags=Contain), Slurm takes
the job's energy from that, else it adds up all steps, of which several can count one node
(_internal_step_complete in src/slurmctld/step_mgr.c). Numbers of jobs begin again where a centre
sets up its accounting anew, and are others on another cluster: so a job counts only if it ran when
the run started.
"""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_tune.cluster.protocol import JobEnergy

_SACCT_LIMIT_S = 15.0
_MAX_CLOCK_SKEW_S = 120.0  # of the clocks of a node and of Slurm's database
_JOB_ID = re.compile(r"[0-9]+(_[0-9]+)?")
_FIELDS = "JobID,Start,End,ConsumedEnergyRaw"
# What Slurm has for no value, as 32 and 64 bits.
_NO_VALUES = (0, 0xFFFFFFFE, 0xFFFFFFFF)
_MAX_J = 1e15


@dataclass(frozen=True)
class _SacctRow:
    """A job, or one of its steps, in one of the times that it ran; ``end_s`` None: not over."""

    job: str
    step: str
    begin_s: float
    end_s: float | None
    joules: float | None

    def ran_at(self, at_s: float) -> bool:
        return self.begin_s - _MAX_CLOCK_SKEW_S <= at_s <= (self.end_s or at_s) + _MAX_CLOCK_SKEW_S


def ask_energy(starts: Sequence[tuple[str, float]]) -> list[JobEnergy]:
    """Return what Slurm counted for these starts, of (job, seconds since 1970); asks sacct once."""
    jobs = list(dict.fromkeys(job for job, _ in starts if _JOB_ID.fullmatch(job)))
    if not jobs:
        return []
    command = ["sacct", "-n", "-P", "-D", "-j", ",".join(jobs), f"--format={_FIELDS}"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=_SACCT_LIMIT_S,
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
        )
    except subprocess.TimeoutExpired:
        return [
            JobEnergy(job, why=f"sacct did not answer in {_SACCT_LIMIT_S:.0f} s") for job in jobs
        ]
    except FileNotFoundError:
        return [JobEnergy(job, why="there is no sacct here") for job in jobs]
    except OSError as error:
        return [JobEnergy(job, why=f"sacct: {error.strerror or error}") for job in jobs]
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [JobEnergy(job, why=f"sacct says {said}") for job in jobs]
    return parse_energies(done.stdout, [start for start in starts if start[0] in jobs])


def parse_energies(text: str, starts: Sequence[tuple[str, float]]) -> list[JobEnergy]:
    """Return the energy of each time that a job ran, from sacct's rows (pure)."""
    rows = list(_parse_rows(text))
    found: dict[tuple[str, float | None], JobEnergy] = {}
    for job, at_s in starts:
        own = next((r for r in rows if r.job == job and not r.step and r.ran_at(at_s)), None)
        if own is None:
            found[job, None] = JobEnergy(job, why="sacct knows of no such job at that time")
        else:
            found[job, own.begin_s] = _job_energy(own, rows)
    return list(found.values())


def _job_energy(own: _SacctRow, rows: Sequence[_SacctRow]) -> JobEnergy:
    if own.end_s is None:
        return JobEnergy(own.job, why="it is not over")
    for row in rows:
        if (row.job, row.step) == (own.job, "extern") and own.ran_at(row.begin_s) and row.joules:
            return JobEnergy(own.job, row.joules)
    if own.joules is None:
        return JobEnergy(own.job, why="Slurm has counted no energy there (AcctGatherEnergyType)")
    return JobEnergy(own.job, own.joules, of_steps=True)


def _parse_rows(text: str) -> Iterator[_SacctRow]:
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 4 or not fields[1].isdigit():
            continue  # such as a job that has not begun: Unknown
        job, _, step = fields[0].partition(".")
        end_s = float(fields[2]) if fields[2].isdigit() else None
        yield _SacctRow(job, step, float(fields[1]), end_s, _parse_joules(fields[3]))


def _parse_joules(text: str) -> float | None:
    known = text.isdigit() and int(text) not in _NO_VALUES and int(text) < _MAX_J
    return float(text) if known else None
