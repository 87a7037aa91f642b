"""The energy of a run: what the events of its starts say of it, added up, in words.

Each start that ends by itself writes one event of kind ``energy``: what the counters of its nodes
have counted from the begin of training to its end (probe/energy.py).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_tune.rundir.json_lines import EVENTS
from hpc_tune.units import format_energy

ENERGY_EVENT = "energy"
WHOLE_NODES = "whole nodes"
_UNKNOWN_STARTS = "not known for {} of {} starts, which were killed, failed, or are not over"
_OTHER_JOBS_NOTE = "other jobs on these nodes, if any, included"


@dataclass(frozen=True)
class RunEnergy:
    """What some starts of a run took, as far as counters told: ``joules`` in all and ``parts`` of
    it, for ``tokens``.

    ``joules`` is None where no counter told anything, ``missing`` says what was not counted, and
    why. ``has_others``: counters of CPUs or nodes count for other jobs, too, where they share them.
    ``untold``: of the ``starts`` those that told nothing. ``step``: the newest.
    """

    joules: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0
    missing: tuple[str, ...] = ()
    has_others: bool = False
    starts: int = 1
    untold: int = 0
    step: int | None = None

    @property
    def short(self) -> str:
        """The energy, and that of a million tokens."""
        if self.joules is None:
            return "not known"
        text = format_energy(self.joules)
        if self.parts:
            shares = (f"{part} {format_energy(joules)}" for part, joules in self.parts.items())
            text += f" ({', '.join(shares)})"
        if self.tokens:
            text += f": {format_energy(1e6 * self.joules / self.tokens)} per million tokens"
        return text

    @property
    def words(self) -> str:
        """All of it: what was counted, what was not, and for how many starts."""
        notes = [f"not known: {what}" for what in self.missing]
        notes += [_OTHER_JOBS_NOTE] if self.has_others and self.joules is not None else []
        notes += [_UNKNOWN_STARTS.format(self.untold, self.starts)] if self.untold else []
        if self.joules is None:
            return "; ".join(notes) or self.short
        of = f"{self.starts - self.untold} starts: " if self.starts - self.untold > 1 else ""
        return "; ".join([of + self.short, *notes])


def sum_energy(events: Iterable[Mapping[str, Any]]) -> RunEnergy | None:
    """Return what the starts of a run took together; None where none has told of it.

    What has another type than it should is as if it were not there.
    """
    told: list[Mapping[str, Any]] = []
    starts = untold = 0
    is_open = False
    for event in events:
        if event.get("kind") == "start":
            starts, untold, is_open = starts + 1, untold + is_open, True
        elif event.get("kind") == ENERGY_EVENT:
            told.append(event)
            is_open = False
    if not told:
        return None
    untold += is_open
    known = [event for event in told if _is_number(event.get("total_j"))]
    parts: dict[str, float] = {}
    for event in known:
        joules = event.get("joules")
        for part, value in joules.items() if isinstance(joules, dict) else ():
            if _is_number(value):
                parts[str(part)] = parts.get(str(part), 0.0) + value
    missing = dict.fromkeys(
        str(what)
        for event in told
        if isinstance(event.get("missing"), list)
        for what in event["missing"]
    )
    return RunEnergy(
        joules=sum(event["total_j"] for event in known) if known else None,
        parts=parts,
        tokens=sum(int(e["tokens"]) for e in known if _is_number(e.get("tokens"))),
        missing=tuple(missing),
        has_others=any(event.get("has_others") is True for event in known),
        starts=max(starts, len(told)),
        untold=untold,
        step=next((int(e["step"]) for e in reversed(told) if _is_number(e.get("step"))), None),
    )


def read_energy(run_dir: Path) -> RunEnergy | None:
    """Return what the starts of the run in ``run_dir`` took; None where none has told of it."""
    events: list[dict[str, Any]] = []
    try:
        lines = (run_dir / EVENTS).read_bytes().split(b"\n")
    except OSError:
        return None
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            events.append(event)
    return sum_energy(events)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300
