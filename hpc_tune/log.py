"""Rank-aware logging and the progress display.

Rank 0 logs for all: ``log.info`` prints only there. A warning is printed by each rank that logs it,
with its rank, but only by rank 0 with ``extra=LOG_ON_RANK_0_ONLY``, for warnings that all ranks
have. Everything goes to stderr, so that a command's result on stdout can be piped. In a run each
rank also logs to a file, with a time on every line.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_tune.files import describe_missing_permission, is_permission_error
from hpc_tune.units import format_seconds

log = logging.getLogger("hpc_tune")
# These warn about kernels that this machine cannot load.
_NOISY_LOGGERS = ("torchao", "bitsandbytes", "torch.utils._pytree")
# This advises packages that would be faster on a GPU; only rank 0 prints it.
_ADVICE_LOGGERS = ("transformers.integrations.hub_kernels",)
LOG_ON_RANK_0_ONLY = {"of_all": True}
PROGRESS_LINE_EVERY_S = 10.0


class _RankFormatter(logging.Formatter):
    """Puts the level, and on ranks above 0 the rank, before a message."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        rank_prefix = f"[rank {self._rank}] " if self._rank else ""
        level_prefix = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return f"{rank_prefix}{level_prefix}{record.getMessage()}"


class _RankFileHandler(logging.FileHandler):
    """Appends to a file, created at the first line. Errors, as of a full disk, are ignored."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Do nothing."""


def configure_logging(rank: int) -> None:
    """Send this process's log to stderr; ranks above 0 keep only their own warnings and errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_RankFormatter(rank))
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    handler.addFilter(lambda record: rank == 0 or not getattr(record, "of_all", False))
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(logging.INFO)
    for name in (*_NOISY_LOGGERS, *(_ADVICE_LOGGERS if rank else ())):
        logging.getLogger(name).setLevel(logging.ERROR)


def print_line(text: str) -> None:
    """Write a line to stderr in one piece; ``print`` with PYTHONUNBUFFERED writes two.

    Between the two a launcher may write a line of its own.
    """
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def warn_unreadable(path: Path, error: Exception) -> None:
    """Warn that an existing file counts as missing because it cannot be read."""
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError | NotADirectoryError):
        remedy = describe_missing_permission(path) if is_permission_error(error.errno) else ""
        words = f"{error.strerror}: {remedy}" if remedy else error.strerror
        log.warning("%s cannot be read and counts as missing: %s", path, words)


@contextlib.contextmanager
def log_to_file(file: Path) -> Iterator[None]:
    """Also append every line of this process's log to ``file``, within a block.

    Each line has its time and level. Lines that cannot be written are lost.
    """
    with contextlib.suppress(OSError):
        file.parent.mkdir(exist_ok=True)
    handler = _RankFileHandler(file, encoding="utf-8", errors="backslashreplace", delay=True)
    layout = "%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s"
    handler.setFormatter(logging.Formatter(layout, "%Y-%m-%d %H:%M:%S"))
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()


class Progress:
    """A progress bar with an ETA if stderr is a terminal, plain lines otherwise.

    Only one process should enable it; the others pass ``enabled=False``.
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
            and now_s - self._printed_s < PROGRESS_LINE_EVERY_S
            and done < self._total
        ):
            return
        self._printed_s = now_s
        rate = (done - self._start) / max(now_s - self._began_s, 1e-9)
        is_open = rate > 0 and done < self._total
        eta = f"{format_seconds((self._total - done) / rate)} left" if is_open else ""
        parts = [f"{self._what} {done}/{self._total}", note, eta]
        log.info("%s", "  ".join(part for part in parts if part))

    def exclude(self, seconds: float) -> None:
        """Exclude time that was spent on something else from the estimate."""
        self._began_s += seconds

    def show(self, done: int, total: int) -> None:
        """Show progress of work whose total becomes known while it runs."""
        self._total = total
        if self._bar is not None:
            self._bar.update(self._task, total=total)
        self.update(done)

    def close(self) -> None:
        """Remove the bar from the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
