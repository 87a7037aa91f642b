"""What several parts derive from the records of a run: its energy, its failures and starts, answers
that become less likely, stragglers, nodes that are left out, and the files of failures.

Each start that ends by itself writes one event of kind ``energy``: what the counters of its nodes
have counted from the begin of training to its end (probe/gpu_state.py).
"""

import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_tune.errors import EXIT_USER, GoneError, LostHostError, StalledError
from hpc_tune.log import log
from hpc_tune.rundir.json_lines import EVENTS, STARTS, Events
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
    def short_text(self) -> str:
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
    def full_text(self) -> str:
        """All of it: what was counted, what was not, and for how many starts."""
        notes = [f"not known: {what}" for what in self.missing]
        notes += [_OTHER_JOBS_NOTE] if self.has_others and self.joules is not None else []
        notes += [_UNKNOWN_STARTS.format(self.untold, self.starts)] if self.untold else []
        if self.joules is None:
            return "; ".join(notes) or self.short_text
        of = f"{self.starts - self.untold} starts: " if self.starts - self.untold > 1 else ""
        return "; ".join([of + self.short_text, *notes])


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


# -- How often the starts of a run have failed by no fault of its own, and how long they ran.
#
# Counted: starts whose nodes were lost, that were killed without a word, or that stood still. Not
# counted: stops, time limits, and errors that would come again, such as a loss that is not finite.


# The error of outcome.json; "": the start left none.
_NODE_ERRORS = ("", *(kind.__name__ for kind in (GoneError, LostHostError, StalledError)))
JsonRow = Mapping[str, Any]


@dataclass(frozen=True)
class StartHistory:
    """What the starts of a run before its newest have left: ``failures`` in ``running_s`` seconds,
    and for how many each save let training wait, the newest last.
    """

    failures: int = 0
    running_s: float = 0.0
    waits_s: tuple[float, ...] = ()


def read_start_history(run_dir: Path) -> StartHistory:
    """Return what the starts before the newest have left in ``run_dir``; nothing without any.

    Failures are those of starts.jsonl, which supervise writes; without it the starts that were
    killed, which have left no event of their end.
    """
    events = _drop_newest_start(list(_read_rows(run_dir / EVENTS)))
    if (run_dir / STARTS).exists():
        failures = sum(map(is_failure, _read_rows(run_dir / STARTS)))
    else:
        failures = _num_killed(events)
    waits = (event.get("blocked_s") for event in events if event.get("kind") == "checkpoint")
    waits_s = tuple(float(wait) for wait in waits if isinstance(wait, int | float))
    return StartHistory(failures, _running_s(events), waits_s)


def is_failure(start: JsonRow) -> bool:
    """Whether a line of starts.jsonl counts (pure)."""
    if start.get("status") != "failed" or start.get("asked") or start.get("exit_code") == EXIT_USER:
        return False
    return start.get("lost_nodes") is True or start.get("error", "") in _NODE_ERRORS


def _num_killed(events: Sequence[JsonRow]) -> int:
    """Return how many starts have left no stop."""
    killed, is_open = 0, False
    for event in events:
        if event.get("kind") == "start":
            killed, is_open = killed + is_open, True
        elif event.get("kind") == "stop":
            is_open = False
    return killed + is_open


def _drop_newest_start(events: Sequence[JsonRow]) -> Sequence[JsonRow]:
    starts = [place for place, event in enumerate(events) if event.get("kind") == "start"]
    return events[: starts[-1]] if starts else events


def _running_s(events: Iterable[JsonRow]) -> float:
    """Return the seconds of all starts: until its stop, or its last save where it was killed.

    A stop that began after the start is that of another, which was refused.
    """
    total_s, begin_s, end_s = 0.0, float("inf"), 0.0
    for event in events:
        kind, at_s, began_s = (event.get(name, 0.0) for name in ("kind", "time", "began_s"))
        if not isinstance(at_s, int | float) or not isinstance(began_s, int | float):
            continue
        if kind == "start":
            total_s += max(0.0, end_s - begin_s)
            begin_s = end_s = at_s
        elif kind in ("checkpoint", "stop") and began_s <= begin_s:
            end_s = at_s
    return total_s + max(0.0, end_s - begin_s)


def _read_rows(path: Path) -> Iterator[JsonRow]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError:
        return
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            yield row


# -- Whether training on preferences makes the chosen answers less likely, evaluation by evaluation.
#
# The margin grows as well where both answers become less likely and the rejected one more so
# (eric-mitchell/direct-preference-optimization#32): the model then writes something else.


MIN_FALLS = 3
Streak = tuple[float, ...]


def extend_streak(streak: Streak, log_prob: float) -> Streak:
    """Return the newest evaluations, each with a lower log-probability than the one before."""
    if not math.isfinite(log_prob):
        return ()
    return (*streak, log_prob) if streak and log_prob < streak[-1] else (log_prob,)


def displacement_warning(streak: Streak) -> str | None:
    """Return what to say of evaluations that fall; nothing of fewer than ``MIN_FALLS``."""
    falls = len(streak) - 1
    if falls < MIN_FALLS:
        return None
    return (
        f"the held-out chosen answers became less likely in {falls} evaluations in a row, from "
        f"{streak[0]:.3f} to {streak[-1]:.3f} per token: the model unlearns them, too. A lower "
        "optim.lr, a higher tune.beta, or with dpo, ipo and simpo tune.sft_weight=1 counteracts "
        "it"
    )


def longest_streak(log_probs: Sequence[float]) -> Streak:
    """Return the longest streak of all evaluations of a run, the newest of equal ones."""
    best: Streak = ()
    streak: Streak = ()
    for log_prob in log_probs:
        streak = extend_streak(streak, log_prob)
        best = streak if len(streak) >= len(best) else best
    return best


# -- Which rank the others wait for: what it works itself beside the median rank. One meaning for
# all that tells of it: the profile, the report's figures and words, and watch.


STRAGGLER_FACTOR = 1.1  # x the median rank's work
STRAGGLER_ADVICE = "look at its clocks, its memory and what else runs there"
_LEAST_S = 1e-4  # as finely as work is recorded


def relative_to_median(work_s: Sequence[float]) -> list[float]:
    """Return how many times as long as the median rank each rank works."""
    usual_s = max(statistics.median(work_s), _LEAST_S)
    return [own_s / usual_s for own_s in work_s]


# -- Nodes that a run goes on without: told in its events, for the report, and in the log.


def report_excluded_nodes(run_dir: Path, left_out: Mapping[str, str]) -> None:
    """Tell which nodes are left out after a failed start, and why."""
    has_events = (run_dir / EVENTS).is_file()  # not of a start that came to nothing
    events = Events(run_dir / EVENTS if has_events else None)
    for node, why in left_out.items():
        message = f"node {node} is left out from now on: {why}"
        log.warning("%s", message)
        events.write("left_out", node=node, message=message, began_s=time.time())
    events.close()


# -- failures/rank-N.txt: tracebacks and other libraries' words, which a failure's one line names.


FAILURES_FOLDER = "failures"


def append_failure_details(text: str, run_dir: Path | None, rank: int) -> Path | None:
    """Append ``text`` to the file of a rank; return it, None where it cannot be written."""
    if run_dir is None or not run_dir.is_dir():
        return None
    path = run_dir / FAILURES_FOLDER / f"rank-{rank}.txt"
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"== {when}\n{text}\n")
    except OSError:
        return None
    return path
