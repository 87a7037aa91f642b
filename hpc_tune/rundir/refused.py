"""A start that is refused leaves its run directory as it was, but for what tells of it.

before   what is in the directory when the start begins
fail     removes what has come since: logs, settings, a small model; prepared data stays, for
         the next start, as hours of work may be in it
"""

import contextlib
import shutil
from pathlib import Path

from hpc_tune.rundir import nearby, outcome, owner
from hpc_tune.rundir.json_lines import EVENTS

PREPARED_FOLDER = "data"
# What tells of the start, and what the start that ends removes itself.
_KEPT_NAMES = {outcome.OUTCOME_FILE, outcome.RESERVE_FILE, EVENTS, owner.LIVE_FILE}


def list_run_files(run_dir: Path) -> frozenset[str] | None:
    """Return what is in a run directory: nothing where there is none; None if it cannot be read."""
    try:
        return frozenset(entry.name for entry in run_dir.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    except OSError:
        return None


def remove_new_files(run_dir: Path, before: frozenset[str]) -> list[str]:
    """Remove what is in ``run_dir`` and was not ``before``; return the names of what stays of it.

    Those are prepared data, and what the file system does not let go.
    """
    prepared = list_run_files(run_dir / PREPARED_FOLDER)
    is_prepared = prepared is None or any(not name.startswith(".") for name in prepared)
    kept = {PREPARED_FOLDER} if is_prepared else set()  # else there are parts of files alone
    for name in {
        *((list_run_files(run_dir) or frozenset()) - before - _KEPT_NAMES - kept),
        nearby.STARTING_CONFIG,
    }:
        path = run_dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted((list_run_files(run_dir) or frozenset()) - before - _KEPT_NAMES)
