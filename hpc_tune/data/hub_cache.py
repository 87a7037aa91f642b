"""The hub's cache folder, as HF_HOME has it: which revision of a dataset is read.

datasets--OWNER--NAME/  blobs/HASH        the files' contents, once each
                        refs/main         the revision that was fetched last by that name
                        snapshots/REVISION/...   links into blobs, under the files' names
"""

from collections.abc import Iterable
from pathlib import Path

from hpc_tune.errors import DataError

_SNAPSHOTS, _BLOBS = "snapshots", "blobs"


def is_cache(folder: Path) -> bool:
    """Return whether a folder is that of one dataset or model in the hub's cache."""
    return (folder / _SNAPSHOTS).is_dir() and (
        (folder / _BLOBS).is_dir() or (folder / "refs").is_dir()
    )


def snapshot_of(folder: Path) -> tuple[Path, list[Path]] | None:
    """Return the folder of the revision that is read of a cache's folder, and those of the others.

    ``folder`` may be its ``snapshots`` as well; None if it is no such folder. It is the revision
    that refs/main names, or the only one.

    Raises:
        DataError: if there is none, or several to choose from.
    """
    if folder.name == _SNAPSHOTS and is_cache(folder.parent):
        folder = folder.parent
    if not is_cache(folder):
        return None
    revisions = sorted(path for path in (folder / _SNAPSHOTS).iterdir() if path.is_dir())
    try:
        named = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        named = ""
    chosen = [path for path in revisions if path.name == named] or revisions
    if not chosen:
        raise DataError(f"{folder} is a folder of the hub's cache without any snapshot in it")
    if len(chosen) > 1:
        raise DataError(
            f"{folder} is a folder of the hub's cache with {len(revisions)} revisions, and "
            f"refs/main names none of them; name one: {' or '.join(map(str, revisions[:5]))}"
        )
    return chosen[0], [path for path in revisions if path != chosen[0]]


def own_name(file: Path) -> Path:
    """Return the path by which files are told apart: of two names of one blob there are two."""
    if file.is_symlink() and file.resolve().parent.name == _BLOBS:
        return file.parent.resolve() / file.name
    return file.resolve()


def refuse_several_revisions(files: Iterable[Path]) -> None:
    """Raise a DataError where files are of several revisions of one dataset."""
    found: dict[Path, set[str]] = {}
    for file in files:
        parts = file.absolute().parts
        at = len(parts) - 1 - parts[::-1].index(_SNAPSHOTS) if _SNAPSHOTS in parts else 0
        root = Path(*parts[:at])
        if at and len(parts) > at + 2 and is_cache(root):
            found.setdefault(root, set()).add(parts[at + 1])
    for root, revisions in found.items():
        if len(revisions) > 1:
            raise DataError(
                f"data.path names files of {len(revisions)} revisions of {root}, which are the same"
                f" dataset at different times; name one: "
                f"{' or '.join(str(root / _SNAPSHOTS / name) for name in sorted(revisions)[:5])}"
            )
