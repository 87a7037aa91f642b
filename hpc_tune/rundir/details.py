"""failures/rank-N.txt: tracebacks and other libraries' words, which a failure's one line names."""

import time
from pathlib import Path

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
