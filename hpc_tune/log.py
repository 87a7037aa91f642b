"""Rank-aware logging, the JSON-lines event writer and the progress display.

Rank 0 speaks for the world: ``log.info`` prints there only. A warning is printed by the rank that
has it, with the rank in front. Everything goes to stderr, so that a command's result on stdout can
be piped.
"""

import errno
import json
import logging
import os
import sys
import time
from io import FileIO
from pathlib import Path
from typing import Any

from hpc_tune.units import format_seconds

log = logging.getLogger("hpc_tune")
# They tell of kernels that this machine cannot load.
_CHATTER = ("torchao", "bitsandbytes", "torch.utils._pytree")

PLAIN_LINE_EVERY_S = 10.0


class _RankFormatter(logging.Formatter):
    """Puts the level, and on ranks above 0 the rank, in front of a message."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        who = f"[rank {self._rank}] " if self._rank else ""
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return f"{who}{level}{record.getMessage()}"


def configure(rank: int) -> None:
    """Send this process's log to stderr; ranks above 0 keep only warnings and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_RankFormatter(rank))
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    for name in _CHATTER:
        logging.getLogger(name).setLevel(logging.ERROR)


class WholeAppends:
    """A file to which each piece of bytes is appended whole or not at all.

    One that the file system does not take is lost and warned of once: telling is never worth a run.
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
        self._file: WholeAppends | None = None
        if path is not None:
            _end_torn_line(path)
            self._file = WholeAppends(path)

    def write(self, **fields: Any) -> None:
        """Append one object of JSON types; NaN and infinities are written as null."""
        if self._file is not None:
            clean = {k: _finite(v) for k, v in fields.items()}
            self._file.append((json.dumps(clean, ensure_ascii=False) + "\n").encode())

    def close(self) -> None:
        """Close the file; later writes are dropped."""
        if self._file is not None:
            self._file.close()


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


class Progress:
    """A bar with ETA where a person watches (stderr is a terminal), plain lines elsewhere.

    Only one process should make an enabled one; the others pass ``enabled=False``.
    """

    def __init__(self, what: str, total: int, done: int = 0, enabled: bool = True) -> None:
        self._what, self._total, self._start = what, total, done
        self._began_s = self._printed_s = time.monotonic()
        self._bar: Any = None
        self._enabled = enabled
        if enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task(what, total=total, completed=done, note="")

    def update(self, done: int, note: str = "") -> None:
        """Show that ``done`` of the total is reached; a plain line at most every ten seconds."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
            return
        now_s = time.monotonic()
        if (
            self._printed_s > self._began_s
            and now_s - self._printed_s < PLAIN_LINE_EVERY_S
            and done < self._total
        ):
            return
        self._printed_s = now_s
        rate = (done - self._start) / max(now_s - self._began_s, 1e-9)
        is_open = rate > 0 and done < self._total
        left = f"{format_seconds((self._total - done) / rate)} left" if is_open else ""
        parts = [f"{self._what} {done}/{self._total}", note, left]
        log.info("%s", "  ".join(part for part in parts if part))

    def exclude(self, seconds: float) -> None:
        """Leave time that was spent on something else out of the estimate."""
        self._began_s += seconds

    def show(self, done: int, total: int) -> None:
        """Show progress of work whose total is known only on the way."""
        self._total = total
        if self._bar is not None:
            self._bar.update(self._task, total=total)
        self.update(done)

    def close(self) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
