"""outcome.json: how the run ended, as the only witness that can be trusted."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from hpc_tune.errors import EXIT_DONE, EXIT_RESUMABLE

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


def stopped(reason: str, step: int) -> Outcome:
    """Return the outcome of a run that left on purpose and can be resumed."""
    return Outcome("stopped", reason, step, EXIT_RESUMABLE)


def write(outcome: Outcome, run_dir: Path) -> None:
    """Write outcome.json atomically."""
    temporary = run_dir / f".{FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(outcome), indent=1) + "\n", encoding="utf-8")
    temporary.replace(run_dir / FILE)
