"""Which run directories may be meant by a path that is none."""

import difflib
from pathlib import Path

RESOLVED_CONFIG = "config.resolved.yaml"
STARTING_CONFIG = "config.starting.yaml"  # of a start that may still be refused
_MAX_HINTS = 3


def similar_runs_hint(path: Path) -> str:
    """Return what to say behind a path that is no run: the runs in it, or of similar names."""
    if path.is_dir():
        newest = sorted(_runs_in(path), key=lambda run: run.stat().st_mtime, reverse=True)
        named = ", ".join(map(str, newest[:_MAX_HINTS]))
        return f"; the newest runs in it: {named}" if newest else ""
    beside = {run.name: run for run in _runs_in(path.parent)}
    near = difflib.get_close_matches(path.name, beside, n=_MAX_HINTS)
    return f"; did you mean {' or '.join(str(beside[name]) for name in near)}?" if near else ""


def _runs_in(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if (entry / RESOLVED_CONFIG).is_file()]
    except OSError:
        return []
