"""outcome.json: how the run ended; launchers' exit codes do not tell it reliably."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from hpc_tune.atomic_file import write_file
from hpc_tune.errors import EXIT_DONE, EXIT_RESUMABLE
from hpc_tune.log import log, warn_unreadable
from hpc_tune.world.stop import STOP_FILE

OUTCOME_FILE = "outcome.json"
# Room for the outcome of a run that ends since its disk is full.
RESERVE_FILE = ".outcome.reserve"
_RESERVED_BYTES = 1 << 14


@dataclass(frozen=True)
class Outcome:
    """How a run ended: done, stopped (it can be resumed; exit code 75), or failed.

    ``facts`` are written beside the rest: of memory need, had, phase, rank, host, and what the
    governor had done (``governor``).
    """

    status: Literal["done", "stopped", "failed"]
    reason: str
    step: int | None
    exit_code: int
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_time_left(self) -> bool:
        """Whether the run may do something more that takes seconds: nobody is about to kill it."""
        return self.status == "done" or self.reason == "STOP file"


def done(step: int, early: str | None = None) -> Outcome:
    """Return the outcome of a run that did all its steps, or was done ``early`` for a reason."""
    return Outcome("done", early or "all steps done", step, EXIT_DONE)


def stopped(reason: str, step: int | None, facts: Mapping[str, Any] | None = None) -> Outcome:
    """Return the outcome of a run that stopped on purpose and can be resumed."""
    return Outcome("stopped", reason, step, EXIT_RESUMABLE, facts or {})


def write_outcome(outcome: Outcome, run_dir: Path, start: str | None = None) -> None:
    """Write outcome.json atomically, and remove the STOP file that a stopped run has obeyed.

    ``start`` is the nonce of the start that ended, where it came so far as to have one.

    Raises:
        OSError: if the file system refuses.
    """
    if outcome.status != "failed":
        _remove_stop_file(run_dir / STOP_FILE)
    fields = asdict(outcome)
    fields |= fields.pop("facts") | ({} if start is None else {"start": start})
    text = json.dumps(fields, indent=1) + "\n"
    try:
        write_file(run_dir / OUTCOME_FILE, text)
    except OSError:
        (run_dir / RESERVE_FILE).unlink(missing_ok=True)
        write_file(run_dir / OUTCOME_FILE, text)
    (run_dir / RESERVE_FILE).unlink(missing_ok=True)


def _remove_stop_file(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        what = "is a folder, which asks to stop as a file does" if file.is_dir() else error.strerror
        log.warning("%s %s: remove it before the next start, or that stops too", file, what)


def begin_outcome(run_dir: Path) -> None:
    """Remove the outcome of the last run, once there is room for this one's.

    Raises:
        OSError: if the file system refuses.
    """
    (run_dir / RESERVE_FILE).write_bytes(bytes(_RESERVED_BYTES))
    (run_dir / OUTCOME_FILE).unlink(missing_ok=True)


def read_outcome(run_dir: Path) -> dict[str, Any] | None:
    """Return outcome.json, or None where there is none that can be read."""
    try:
        fields = json.loads((run_dir / OUTCOME_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        warn_unreadable(run_dir / OUTCOME_FILE, error)
        return None
    return fields if isinstance(fields, dict) else None


def read_outcome_of_start(
    run_dir: Path, start: str | None, since_s: float
) -> dict[str, Any] | None:
    """Return the outcome that a rank has written already for this start, if one has.

    A start whose ranks have not met has no nonce, ``start``: then one that is as new as ``since_s``
    counts, by the clocks of this host and of the file system.
    """
    told = read_outcome(run_dir)
    if told is None or not isinstance(told.get("exit_code"), int):
        return None
    if start is not None:
        return told if told.get("start") == start else None
    try:
        return told if (run_dir / OUTCOME_FILE).stat().st_mtime >= since_s else None
    except OSError:
        return None
