"""How often the starts of a run have failed by no fault of its own, and how long they ran.

Counted: starts whose nodes were lost, that were killed without a word, or that stood still. Not
counted: stops, time limits, and errors that would come again, such as a loss that is not finite.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_tune.errors import EXIT_USER, GoneError, LostHostError, StalledError
from hpc_tune.rundir.json_lines import EVENTS, STARTS

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
