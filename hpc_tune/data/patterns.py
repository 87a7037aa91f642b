"""Patterns with ``**``, in which each folder is searched once, whatever links lead back to it."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path

_ANY = "**"


def matches(pattern: str) -> list[str]:
    """Return what a pattern matches, sorted; folders that links lead to are searched once.

    glob of Python follows links as often as they lead to each other, and does not come to an end.
    """
    parts = Path(pattern).parts
    if _ANY not in parts:
        return sorted(glob.glob(pattern))
    at = parts.index(_ANY)
    found = set()
    for base in glob.glob(str(Path(*parts[:at]))):
        for folder in _folders(Path(base), set()):
            inner = str(Path(glob.escape(str(folder)), *(parts[at + 1 :] or "*")))
            found |= {*matches(inner), *(() if parts[at + 1 :] else [str(folder)])}
    return sorted(found)


def _folders(folder: Path, seen: set[str]) -> Iterator[Path]:
    """Yield a folder and those below it that are not hidden, each of them once."""
    seen.add(os.path.realpath(folder))
    try:
        entries = [entry for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return
    yield folder
    for entry in sorted(entries, key=lambda entry: (entry.is_symlink(), entry.name)):
        if not entry.name.startswith(".") and os.path.realpath(entry.path) not in seen:
            yield from _folders(folder / entry.name, seen)
