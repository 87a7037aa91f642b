"""What the scheduler has counted of the energy of a run's jobs, beside what the run's counters did.

Only the report command asks for it, since it is complete once a job is over: the report that a job
itself writes does not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_tune.cluster.protocol import JobEnergy
from hpc_tune.cluster.schedulers import ask_energy, counts_energy
from hpc_tune.units import format_energy

_MOST_STARTS = 1000  # the newest ones; a command line has an end
_NOT_ASKED = (
    "{} was not asked, since a job's energy is known only after its end: write the report again"
)
Ask = Callable[[str, Sequence[tuple[str, float]]], list[JobEnergy]]


@dataclass(frozen=True)
class JobsEnergy:
    """What a scheduler said: ``joules`` of all jobs that it has counted, None if of none."""

    joules: float | None
    words: str


def find_jobs_energy(
    events: Iterable[Mapping[str, Any]], asks: bool, ask: Ask = ask_energy
) -> JobsEnergy | None:
    """Return the energy of the jobs that a run had; None where their scheduler tells of none.

    ``asks``: whether to ask for it, which may take many seconds.
    """
    starts: dict[str, list[tuple[str, float]]] = {}
    for event in events:
        scheduler = str(event.get("scheduler"))
        if event.get("kind") == "start" and event.get("job") and counts_energy(scheduler):
            starts.setdefault(scheduler, []).append((str(event["job"]), event["time"]))
    if not starts:
        return None
    if not asks:
        return JobsEnergy(None, _NOT_ASKED.format(" and ".join(starts)))
    parts = [_sum_energies(ask(name, jobs[-_MOST_STARTS:]), name) for name, jobs in starts.items()]
    known = [part.joules for part in parts if part.joules is not None]
    words = "; ".join(part.words for part in parts)
    return JobsEnergy(sum(known) if known else None, words)


def _sum_energies(told: Sequence[JobEnergy], scheduler: str) -> JobsEnergy:
    known = [one for one in told if one.joules is not None]
    reasons: dict[str, list[str]] = {}
    for one in told:
        if one.joules is None:
            reasons.setdefault(one.why, []).append(one.job)
    notes = [f"not known: {_job_names(jobs)} ({why})" for why, jobs in reasons.items()]
    if not known:
        return JobsEnergy(None, "; ".join(notes))
    joules = sum(one.joules or 0.0 for one in known)
    text = (
        f"{scheduler} counted {format_energy(joules)} for the nodes of "
        f"{_job_names([one.job for one in known])}, from start to end, including other jobs there"
    )
    if any(one.of_steps for one in known):
        text += "; it is the sum of steps, several of which can count the same node"
    return JobsEnergy(joules, "; ".join([text, *notes]))


def _job_names(jobs: Sequence[str]) -> str:
    names = list(dict.fromkeys(jobs))
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"job{'s' if len(names) > 1 else ''} {', '.join(names[:4])}{more}"
