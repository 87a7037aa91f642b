"""Signals from the first instant on, until a run can save: it has nothing to save, so it leaves.

Imports take seconds, on a busy file system minutes. This file needs only what Python has loaded.
"""

import os
import signal

_EXIT_INTERRUPTED, _EXIT_RESUMABLE = 130, 75  # of errors.py, which takes longer than all of this
# Of a person, a terminal that is closed, a scheduler, a launcher.
STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def exit_on_signals(prints: bool = True) -> None:
    """Make every signal that asks to stop end this process, with the exit code of a stopped run.

    ``prints``: say so. What is ignored, as SIGHUP under nohup, stays ignored.
    """

    def leave(number: int, frame: object) -> None:
        if prints:
            name = signal.Signals(number).name
            write_stderr(f"{name}: stopped immediately. Rerun the same command to go on\n")
        os._exit(_EXIT_INTERRUPTED if number == signal.SIGINT else _EXIT_RESUMABLE)

    for number in STOP_SIGNALS:
        if not is_hup_ignored(number):
            signal.signal(number, leave)


def is_hup_ignored(number: int) -> bool:
    """Return whether the process was started to ignore SIGHUP, as nohup does."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def write_stderr(text: str) -> None:
    """Write to stderr, from a signal handler too.

    Where the terminal is gone, nothing that is printed later may fail for it.
    """
    try:
        os.write(2, text.encode())
        return
    except OSError:
        pass
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        try:
            os.write(number, b"")
        except OSError:
            os.dup2(nowhere, number)
