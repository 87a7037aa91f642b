"""When to stop on purpose: signals, the time limit, a file named STOP.

The handlers only set a flag; the loop reads it at step boundaries and agrees on it with the other
ranks. Nothing here is a collective.
"""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from hpc_tune.cluster.schedulers import find_job_end_s
from hpc_tune.errors import WorldError
from hpc_tune.startup_signals import STOP_SIGNALS, is_ignored_sighup, write_stderr
from hpc_tune.world.processes import process_start_after_boot_s

STOP_FILE = "STOP"
_FILE_CHECK_EVERY_S = 1.0


class StopFlag:
    """Whether this rank was asked to stop; ``install`` it once, in the main thread."""

    def __init__(
        self,
        run_dir: Path | None = None,
        time_limit_s: float | None = None,
        is_rank_0: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Set the deadline: ``time_limit_s`` after the process started, or the job's if earlier.

        ``is_rank_0`` is for rank 0 alone: it prints when a signal arrives, and may ask the
        scheduler once for the end if the environment lacks it; a thousand ranks at once would
        overload it.
        """
        self._prints = is_rank_0
        self._file = None if run_dir is None else run_dir / STOP_FILE
        self._file_checked_s = float("-inf")
        self._file_seen = False
        self._signal: int | None = None
        self._old_handlers: dict[int, Any] = {}
        self._stop_message = "stopping before the first step"
        # On the monotonic clock: the wall clock may be set during the run.
        now_s, self._began_s = time.monotonic(), time.monotonic() - process_age_s()
        ends = [] if time_limit_s is None else [self._began_s + time_limit_s]
        if (end := find_job_end_s(environ, is_rank_0)) is not None:
            ends.append(now_s + end - time.time())
        self._deadline = min(ends, default=None)

    @classmethod
    def create_for_run(
        cls, run_dir: Path, time_limit_s: float | None, is_rank_0: bool
    ) -> "StopFlag":
        """Return the flag of a rank.

        Only rank 0 looks for the STOP file, so that not all ranks load the file system.
        """
        return cls(run_dir if is_rank_0 else None, time_limit_s, is_rank_0=is_rank_0)

    def install(self) -> None:
        """Handle SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 and SIGINT; a second SIGINT interrupts at once.

        Under nohup SIGHUP stays ignored.
        """
        for number in STOP_SIGNALS:
            if not is_ignored_sighup(number):
                self._old_handlers[number] = signal.signal(number, self._on_signal)

    def announce_training(self) -> None:
        """From now on, answer a signal with the message that this step is saved before the stop."""
        self._stop_message = "stopping once this step is saved"

    def announce_ending(self) -> None:
        """From now on, answer a signal with the message that the run is ending already."""
        self._stop_message = "the run is ending already"

    def ignore_signals(self) -> None:
        """Ignore the signals from now on: the outcome is already written, and must stay true."""
        for number in self._old_handlers:
            signal.signal(number, signal.SIG_IGN)

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._old_handlers.clear()

    def reason(self, margin_s: float = 0.0) -> str | None:
        """Return why to stop now, or ``None``.

        ``margin_s`` is the time that stopping takes (the measured time of a checkpoint): the time
        limit counts as reached that long before. Returns a signal's name, ``"time limit"`` or
        ``"STOP file"``.
        """
        if self._signal is not None:
            return signal.Signals(self._signal).name
        left_s = self.seconds_left()
        if left_s is not None and left_s <= margin_s:
            return "time limit"
        return "STOP file" if self._has_stop_file() else None

    @property
    def limit_s(self) -> float:
        """The seconds from the start of this process to the deadline; 0 without a deadline."""
        return 0.0 if self._deadline is None else self._deadline - self._began_s

    def is_requested(self, margin_s: float = 0.0) -> bool:
        """Whether there is a reason to stop; for long phases between the steps."""
        return self.reason(margin_s) is not None

    def seconds_left(self) -> float | None:
        """Return the seconds until the deadline, or ``None`` without a deadline."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def _on_signal(self, signal_number: int, frame: FrameType | None) -> None:
        if signal_number == signal.SIGINT and self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._prints and self._signal is None:
            name = signal.Signals(signal_number).name
            write_stderr(f"{name}: {self._stop_message}\n")
        self._signal = signal_number

    def _has_stop_file(self) -> bool:
        now_s = time.monotonic()
        if self._file is not None and now_s - self._file_checked_s >= _FILE_CHECK_EVERY_S:
            # An error of the file system is no reason to end a run.
            self._file_seen = os.path.exists(self._file)
            self._file_checked_s = now_s  # afterwards: another thread may ask meanwhile
        return self._file_seen


def process_age_s() -> float:
    """Return how many seconds ago this process started."""
    after_boot_s = process_start_after_boot_s(os.getpid())
    if after_boot_s is None:
        raise WorldError("/proc does not show this process, so its start time is not known")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot_s


def process_start_s() -> float:
    """Return when this process started, in seconds since the epoch."""
    return time.time() - process_age_s()
