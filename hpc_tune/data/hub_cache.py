"""Data in the hub's cache: which revision of a dataset is read, and its files under their names."""

from collections.abc import Iterable
from pathlib import Path

from hpc_tune.errors import DataError
from hpc_tune.hub_cache import BLOBS, SNAPSHOTS, find_snapshot, is_cache, list_revisions


def choose_snapshot(folder: Path) -> tuple[Path, list[Path]] | None:
    """Return the folder of the revision that is read of a cache's folder, and those of the others.

    ``folder`` may be its ``snapshots`` as well; None if it is no such folder. It is the revision
    that refs/main names, or the only one.

    Raises:
        DataError: if there is none, or several to choose from.
    """
    if folder.name == SNAPSHOTS and is_cache(folder.parent):
        folder = folder.parent
    if not is_cache(folder):
        return None
    revisions = list_revisions(folder)
    if not revisions:
        raise DataError(f"{folder} is a folder of the hub's cache without any snapshot in it")
    if (found := find_snapshot(folder)) is None:
        raise DataError(
            f"{folder} is a folder of the hub's cache with {len(revisions)} revisions, and "
            f"refs/main names none of them; name one: {' or '.join(map(str, revisions[:5]))}"
        )
    return found.path, list(found.others)


def own_name(file: Path) -> Path:
    """Return the path by which files are told apart: of two names of one blob there are two."""
    if file.is_symlink() and file.resolve().parent.name == BLOBS:
        return file.parent.resolve() / file.name
    return file.resolve()


def refuse_several_revisions(files: Iterable[Path]) -> None:
    """Raise a DataError where files are of several revisions of one dataset."""
    found: dict[Path, set[str]] = {}
    for file in files:
        parts = file.absolute().parts
        at = len(parts) - 1 - parts[::-1].index(SNAPSHOTS) if SNAPSHOTS in parts else 0
        root = Path(*parts[:at])
        if at and len(parts) > at + 2 and is_cache(root):
            found.setdefault(root, set()).add(parts[at + 1])
    for root, revisions in found.items():
        if len(revisions) > 1:
            raise DataError(
                f"data.path names files of {len(revisions)} revisions of {root}, which are the same"
                f" dataset at different times; name one: "
                f"{' or '.join(str(root / SNAPSHOTS / name) for name in sorted(revisions)[:5])}"
            )
