"""Whether this user may go on with a run that another user has begun."""

from collections.abc import Iterator
from pathlib import Path

from hpc_tune.rights import may_read, may_write, missing_permission
from hpc_tune.rundir import details, heartbeat, outcome
from hpc_tune.rundir.owner import InUseError

_APPENDED = ("logs", details.FAILURES_FOLDER)
_CHANGED = (
    *_APPENDED,
    heartbeat.HEARTBEAT_FOLDER,
    "checkpoints",
    "export",
    "tensorboard",
    "collectives",
)


class AnothersError(InUseError):
    """The run directory is of another user, and nothing of this start's belongs into it."""


def require_permissions(run_dir: Path) -> None:
    """Check that this user may read and write what any start does in ``run_dir``.

    So it is found before anything is changed there, and for the files of all ranks.

    Raises:
        AnothersError: if not, with whose files these are, and how others get the right.
    """
    kept = [path for path in _written_paths(run_dir) if path.exists() and not may_write(path)]
    kept += [path for path in _read_paths(run_dir) if path.exists() and not may_read(path)]
    if not kept:
        return
    more = f" and {len(kept) - 1} more" if len(kept) > 1 else ""
    raise AnothersError(
        f"run.dir={run_dir} is a run that this user may not continue: {kept[0]}{more} cannot be "
        f"opened. {missing_permission(kept[0], run_dir)}"
    )


def _written_paths(run_dir: Path) -> Iterator[Path]:
    yield run_dir
    yield run_dir / outcome.RESERVE_FILE
    yield from sorted(run_dir.glob("*.jsonl"))
    for name in _CHANGED:
        yield run_dir / name
    for name in _APPENDED:
        yield from sorted((run_dir / name).glob("*.txt"))
    yield from sorted((run_dir / "checkpoints").glob("step-*"))  # old ones are removed


def _read_paths(run_dir: Path) -> Iterator[Path]:
    yield from sorted(run_dir.glob("checkpoints/step-*/manifest.json"))
    yield from sorted(run_dir.glob("builtin-tiny/*"))
    yield from sorted(run_dir.glob("data/*.h5"))
