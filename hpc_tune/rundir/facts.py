"""Facts that several parts derive from the records of a run: its energy, failures and starts,
answers that become less likely, stragglers, nodes that are left out, and files of failure details.

Each start that ends by itself writes one event of kind ``energy``: what the energy counters of its
nodes have counted from the start of training to its end (probe/gpu_state.py).
"""

import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_tune.errors import EXIT_USER_ERROR, GoneError, LostHostError, StalledError
from hpc_tune.log import log
from hpc_tune.rundir.json_lines import EVENTS_FILE, STARTS_FILE, EventsWriter
from hpc_tune.units import format_energy

ENERGY_EVENT = "energy"
WHOLE_NODES = "whole nodes"
_UNKNOWN_STARTS_NOTE = "not known for {} of {} starts, which were killed, failed, or are not over"
_OTHER_JOBS_NOTE = "other jobs on these nodes, if any, included"


@dataclass(frozen=True)
class RunEnergy:
    """The energy of some starts of a run, as far as it was counted.

    ``joules``: the total for ``tokens``, None without any counter; ``parts``: by part of the nodes.
    ``missing``: what was not counted, and why. ``has_other_jobs``: counters of CPUs or nodes
    include other jobs that share them. ``num_unknown_starts``: how many of the ``starts`` have no
    energy event.
    ``step``: the newest that an energy event names.
    """

    joules: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0
    missing: tuple[str, ...] = ()
    has_other_jobs: bool = False
    starts: int = 1
    num_unknown_starts: int = 0
    step: int | None = None

    @property
    def short_text(self) -> str:
        """The energy, in all and per million tokens, as text."""
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
        """The energy as text, with what was not counted, and for how many starts."""
        notes = [f"not known: {part}" for part in self.missing]
        notes += [_OTHER_JOBS_NOTE] if self.has_other_jobs and self.joules is not None else []
        notes += (
            [_UNKNOWN_STARTS_NOTE.format(self.num_unknown_starts, self.starts)]
            if self.num_unknown_starts
            else []
        )
        if self.joules is None:
            return "; ".join(notes) or self.short_text
        prefix = (
            f"{self.starts - self.num_unknown_starts} starts: "
            if self.starts - self.num_unknown_starts > 1
            else ""
        )
        return "; ".join([prefix + self.short_text, *notes])


def sum_energy(events: Iterable[Mapping[str, Any]]) -> RunEnergy | None:
    """Return the energy of all starts of a run; None if there is no energy event.

    Fields of a wrong type are ignored.
    """
    readings: list[Mapping[str, Any]] = []
    starts = num_unknown_starts = 0
    is_open = False
    for event in events:
        if event.get("kind") == "start":
            starts, num_unknown_starts, is_open = starts + 1, num_unknown_starts + is_open, True
        elif event.get("kind") == ENERGY_EVENT:
            readings.append(event)
            is_open = False
    if not readings:
        return None
    num_unknown_starts += is_open
    known_events = [event for event in readings if _is_number(event.get("total_j"))]
    parts: dict[str, float] = {}
    for event in known_events:
        joules = event.get("joules")
        for part, value in joules.items() if isinstance(joules, dict) else ():
            if _is_number(value):
                parts[str(part)] = parts.get(str(part), 0.0) + value
    missing = dict.fromkeys(
        str(missing_part)
        for event in readings
        if isinstance(event.get("missing"), list)
        for missing_part in event["missing"]
    )
    return RunEnergy(
        joules=sum(event["total_j"] for event in known_events) if known_events else None,
        parts=parts,
        tokens=sum(int(e["tokens"]) for e in known_events if _is_number(e.get("tokens"))),
        missing=tuple(missing),
        has_other_jobs=any(event.get("has_others") is True for event in known_events),
        starts=max(starts, len(readings)),
        num_unknown_starts=num_unknown_starts,
        step=next((int(e["step"]) for e in reversed(readings) if _is_number(e.get("step"))), None),
    )


def read_energy(run_dir: Path) -> RunEnergy | None:
    """Return the energy of all starts of the run in ``run_dir``; None without an energy event."""
    return sum_energy(_read_rows(run_dir / EVENTS_FILE))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300


# -- How often the starts of a run have failed through no fault of the run, and how long they ran.
#
# Counted: starts that lost nodes, were killed without leaving an outcome, or hung. Not counted:
# stops, time limits, and errors that would recur, such as a loss that is not finite.


# The ``error`` of outcome.json; "": the start left none.
_NODE_ERRORS = ("", *(kind.__name__ for kind in (GoneError, LostHostError, StalledError)))
JsonRow = Mapping[str, Any]


@dataclass(frozen=True)
class StartHistory:
    """History of all starts of a run before its newest.

    ``num_failures`` in ``running_s`` seconds of running; ``waits_s``: how long training waited for
    each save, the newest last.
    """

    num_failures: int = 0
    running_s: float = 0.0
    waits_s: tuple[float, ...] = ()


def read_start_history(run_dir: Path) -> StartHistory:
    """Return the history of all starts before the newest in ``run_dir``; empty if there are none.

    Failures are counted in starts.jsonl, which supervise writes. Without this file, starts that
    left no stop event count as failures.
    """
    events = _drop_newest_start(list(_read_rows(run_dir / EVENTS_FILE)))
    if (run_dir / STARTS_FILE).exists():
        num_failures = sum(map(is_failure, _read_rows(run_dir / STARTS_FILE)))
    else:
        num_failures = _num_killed_starts(events)
    waits = (event.get("blocked_s") for event in events if event.get("kind") == "checkpoint")
    waits_s = tuple(float(wait) for wait in waits if isinstance(wait, int | float))
    return StartHistory(num_failures, _running_s(events), waits_s)


def is_failure(start: JsonRow) -> bool:
    """Whether a line of starts.jsonl counts as a failure (pure)."""
    if (
        start.get("status") != "failed"
        or start.get("asked")
        or start.get("exit_code") == EXIT_USER_ERROR
    ):
        return False
    return start.get("lost_nodes") is True or start.get("error", "") in _NODE_ERRORS


def _num_killed_starts(events: Sequence[JsonRow]) -> int:
    """Return how many starts have left no stop event."""
    num_killed, is_open = 0, False
    for event in events:
        if event.get("kind") == "start":
            num_killed, is_open = num_killed + is_open, True
        elif event.get("kind") == "stop":
            is_open = False
    return num_killed + is_open


def _drop_newest_start(events: Sequence[JsonRow]) -> Sequence[JsonRow]:
    starts = [index for index, event in enumerate(events) if event.get("kind") == "start"]
    return events[: starts[-1]] if starts else events


def _running_s(events: Iterable[JsonRow]) -> float:
    """Return the seconds of all starts, each until its stop, or its last save if it was killed.

    A stop whose ``began_s`` is after the start belongs to another start, which was refused.
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
# The margin also grows if both answers become less likely and the rejected one more so
# (eric-mitchell/direct-preference-optimization#32): the model then writes something else.


MIN_LOG_PROB_FALLS = 3
FallingLogProbs = tuple[float, ...]


def extend_falling_streak(streak: FallingLogProbs, log_prob: float) -> FallingLogProbs:
    """Extend the streak of evaluations, each with a lower log-probability than the one before."""
    if not math.isfinite(log_prob):
        return ()
    return (*streak, log_prob) if streak and log_prob < streak[-1] else (log_prob,)


def likelihood_displacement_warning(streak: FallingLogProbs) -> str | None:
    """Return a warning if log-probabilities fell ``MIN_LOG_PROB_FALLS`` times in a row."""
    falls = len(streak) - 1
    if falls < MIN_LOG_PROB_FALLS:
        return None
    return (
        f"the held-out chosen answers became less likely in {falls} evaluations in a row, from "
        f"{streak[0]:.3f} to {streak[-1]:.3f} per token: the model unlearns them, too. A lower "
        "optim.lr, a higher tune.beta, or with dpo, ipo and simpo tune.sft_weight=1 counteracts "
        "it"
    )


def longest_falling_streak(log_probs: Sequence[float]) -> FallingLogProbs:
    """Return the longest streak of a run's evaluations; of equally long ones, the newest."""
    best: FallingLogProbs = ()
    streak: FallingLogProbs = ()
    for log_prob in log_probs:
        streak = extend_falling_streak(streak, log_prob)
        best = streak if len(streak) >= len(best) else best
    return best


# -- Which rank the others wait for: its own work relative to the median rank's. One definition for
# the profile, the report's figures and texts, and watch.


STRAGGLER_FACTOR = 1.1  # x the median rank's work
STRAGGLER_ADVICE = "look at its clocks, its memory and what else runs there"
_MIN_WORK_S = 1e-4  # the resolution in which work is recorded


def divide_by_median(work_s: Sequence[float]) -> list[float]:
    """Return the work of each rank, divided by the median rank's."""
    usual_s = max(statistics.median(work_s), _MIN_WORK_S)
    return [own_s / usual_s for own_s in work_s]


# -- Nodes that a run continues without: written to its events, for the report, and to the log.


def report_excluded_nodes(run_dir: Path, excluded_nodes: Mapping[str, str]) -> None:
    """Log and write as events which nodes are left out after a failed start, and why."""
    has_events = (run_dir / EVENTS_FILE).is_file()  # a refused first start leaves none
    events = EventsWriter(run_dir / EVENTS_FILE if has_events else None)
    for node, reason in excluded_nodes.items():
        message = f"node {node} is left out from now on: {reason}"
        log.warning("%s", message)
        events.write("left_out", node=node, message=message, began_s=time.time())
    events.close()


# -- failures/rank-N.txt: tracebacks and output of libraries; a failure's one-line message names it.


FAILURES_FOLDER = "failures"


def append_failure_details(text: str, run_dir: Path | None, rank: int) -> Path | None:
    """Append ``text`` to the file of a rank; return its path, None if it cannot be written."""
    if run_dir is None or not run_dir.is_dir():
        return None
    path = run_dir / FAILURES_FOLDER / f"rank-{rank}.txt"
    timestamp = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"== {timestamp}\n{text}\n")
    except OSError:
        return None
    return path
