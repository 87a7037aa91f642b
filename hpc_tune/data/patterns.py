"""Patterns with ``**``, in which each folder is searched once, whatever links lead back to it."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from hpc_tune.errors import DataError, find_remedy

_ANY = "**"


def glob_files(pattern: str) -> list[str]:
    """Return what a pattern matches, sorted; folders that links lead to are searched once.

    glob of Python follows links as often as they lead to each other, and does not come to an end.

    Raises:
        DataError: if a folder cannot be read: what is in it would be left out in silence.
    """
    parts = Path(pattern).parts
    if _ANY not in parts:
        for at, part in enumerate(parts):
            for base in glob.glob(str(Path(*parts[:at]))) if glob.has_magic(part) else ():
                _list_entries(base)
        return sorted(glob.glob(pattern))
    at = parts.index(_ANY)
    found = set()
    for base in glob_files(str(Path(*parts[:at]))):
        for folder in _walk_folders(Path(base), set()):
            inner = str(Path(glob.escape(str(folder)), *(parts[at + 1 :] or "*")))
            found |= {*glob_files(inner), *(() if parts[at + 1 :] else [str(folder)])}
    return sorted(found)


def _walk_folders(folder: Path, seen: set[str]) -> Iterator[Path]:
    """Yield a folder and those below it that are not hidden, each of them once."""
    seen.add(os.path.realpath(folder))
    if (found := _list_entries(folder)) is None:
        return
    entries = [entry for entry in found if entry.is_dir()]
    yield folder
    for entry in sorted(entries, key=lambda entry: (entry.is_symlink(), entry.name)):
        if not entry.name.startswith(".") and os.path.realpath(entry.path) not in seen:
            yield from _walk_folders(folder / entry.name, seen)


def _list_entries(folder: str | Path) -> list[os.DirEntry[str]] | None:
    """Return what is in a folder; None where there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error.strerror}{find_remedy(error)}") from None
