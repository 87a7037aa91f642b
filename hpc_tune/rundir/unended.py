"""start.json: a start that supervise has begun and whose end it has not seen yet.

If the job's first node is lost, or the whole job is killed, supervise goes with it: the next one
finds this file, and says and keeps how that start ended.
"""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_tune.atomic_file import write_file
from hpc_tune.errors import EXIT_FAILED
from hpc_tune.rundir import outcome, owner, previous

START_FILE = "start.json"
_UNKNOWN_ENDING = "its job was killed, or lost its first node; no more is known"


@dataclass(frozen=True)
class UnfinishedStart:
    """What was known when a start began: fields of its line in starts.jsonl, and its time."""

    fields: dict[str, Any]
    began_s: float


def note_start(run_dir: Path, **fields: Any) -> None:
    """Note a start. What cannot be written is not there for the next one."""
    with contextlib.suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        write_file(run_dir / START_FILE, json.dumps(fields))


def forget_start(run_dir: Path) -> None:
    """Remove the note."""
    with contextlib.suppress(OSError):
        (run_dir / START_FILE).unlink()


def read_unfinished_start(run_dir: Path) -> UnfinishedStart | None:
    """Return the start that supervise has not seen end, if there is one."""
    try:
        fields = json.loads((run_dir / START_FILE).read_text(encoding="utf-8"))
        began_s = (run_dir / START_FILE).stat().st_mtime
    except (OSError, ValueError):
        return None
    return UnfinishedStart(fields, began_s) if isinstance(fields, dict) else None


def has_ended(run_dir: Path) -> bool:
    """Whether no run can be at work in the folder any more."""
    return owner.is_free(run_dir) or owner.has_owner_died(run_dir)


def find_ending(run_dir: Path, start: UnfinishedStart) -> tuple[str, str, int]:
    """Return the status, the reason and the exit code of a start, as far as it has left them."""
    told = outcome.read_outcome(run_dir)
    if told is not None and (run_dir / outcome.OUTCOME_FILE).stat().st_mtime >= start.began_s:
        return str(told["status"]), str(told["reason"]), int(told["exit_code"])
    return "failed", previous.read_previous_run(run_dir).death or _UNKNOWN_ENDING, EXIT_FAILED
