"""metrics.jsonl, events.jsonl and their like: files that grow by whole lines."""

import errno
import json
import os
import time
from io import FileIO
from pathlib import Path
from typing import Any

from hpc_tune.files import write_file
from hpc_tune.log import log

METRICS, EVENTS, RANKS = "metrics.jsonl", "events.jsonl", "ranks.jsonl"
EXPERTS = "experts.jsonl"
STARTS = "starts.jsonl"  # written by supervise


class AtomicAppender:
    """A file to which each piece of bytes is appended whole or not at all.

    One that the file system refuses is lost, with one warning: a log must not end a run.
    """

    def __init__(self, path: Path) -> None:
        """Open ``path`` for appending.

        Raises:
            OSError: if that cannot be done.
        """
        self._file: FileIO | None = FileIO(path, "a")
        self._warned = False

    def append(self, data: bytes) -> None:
        """Append ``data``, or nothing."""
        if self._file is None:
            return
        try:
            written = self._file.write(data)
            if written < len(data):
                os.ftruncate(self._file.fileno(), self._file.tell() - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._warned:
                log.warning(
                    "%s cannot be written, lines are lost: %s", self._file.name, error.strerror
                )
            self._warned = True

    def close(self) -> None:
        """Close the file; later appends are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None


class JsonLines:
    """Appends one JSON object per line; a reader never sees half a line of a finished write."""

    def __init__(self, path: Path | None) -> None:
        """Open ``path`` for appending; ``None`` makes a writer that drops what it is given.

        Raises:
            OSError: if it cannot be opened.
        """
        self._file: AtomicAppender | None = None
        if path is not None:
            _end_torn_line(path)
            self._file = AtomicAppender(path)

    def write(self, **fields: Any) -> None:
        """Append one object of JSON types; NaN and infinities are written as null."""
        if self._file is not None:
            clean = {k: _finite(v) for k, v in fields.items()}
            line = json.dumps(clean, ensure_ascii=False) + "\n"
            # Of a path that is no UTF-8: as JSON writes such a character.
            self._file.append(line.encode(errors="backslashreplace"))

    def close(self) -> None:
        """Close the file; later writes are dropped."""
        if self._file is not None:
            self._file.close()


class Events:
    """What happens in a run, with the time: events.jsonl. ``path`` is None where no one writes."""

    def __init__(self, path: Path | None) -> None:
        """Open the file.

        Raises:
            OSError: if it cannot be opened.
        """
        self._lines = JsonLines(path)

    def write(self, kind: str, step: int | None = None, rank: int = 0, **fields: Any) -> None:
        """Append an event of a ``kind``, in ``step`` if it belongs to one, of ``rank``."""
        self._lines.write(time=time.time(), step=step, rank=rank, kind=kind, **fields)

    def close(self) -> None:
        """Close the file; later events are dropped."""
        self._lines.close()


def _end_torn_line(path: Path) -> None:
    """Give a file whose last line was cut off by a kill its line end back."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def drop_after(path: Path, step: int) -> None:
    """Remove the lines of steps after ``step``, which a resumed run does again, and a torn line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_bytes().split(b"\n"):
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    write_file(path, b"".join(kept))
