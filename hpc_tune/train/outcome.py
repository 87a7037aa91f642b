"""outcome.json: how the run ended, as the only witness that can be trusted."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hpc_tune.errors import EXIT_DONE, EXIT_RESUMABLE
from hpc_tune.world.stop import STOP_FILE

FILE = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """How a run ended: done, stopped (it can go on; exit code 75), or failed."""

    status: Literal["done", "stopped", "failed"]
    reason: str
    step: int | None
    exit_code: int


def done(step: int) -> Outcome:
    """Return the outcome of a run that did all its steps."""
    return Outcome("done", "all steps done", step, EXIT_DONE)


def stopped(reason: str, step: int | None) -> Outcome:
    """Return the outcome of a run that left on purpose and can be resumed."""
    return Outcome("stopped", reason, step, EXIT_RESUMABLE)


def write(outcome: Outcome, run_dir: Path) -> None:
    """Write outcome.json atomically; a STOP file that ended the run is removed: it was heard."""
    if outcome.status != "failed":
        (run_dir / STOP_FILE).unlink(missing_ok=True)
    temporary = run_dir / f".{FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")
    temporary.replace(run_dir / FILE)


def told_since(run_dir: Path, since_s: float) -> int | None:
    """Return the exit code of the outcome that another rank has written since, if one has."""
    file = run_dir / FILE
    try:
        if file.stat().st_mtime < since_s:
            return None
        return int(json.loads(file.read_text(encoding="utf-8"))["exit_code"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
