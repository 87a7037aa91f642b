"""Handle signals from the start of the process until a run can save: exit, as nothing is lost.

Imports take seconds, on a busy file system minutes. This file imports only what Python has loaded.
"""

import os
import signal

_EXIT_INTERRUPTED, _EXIT_RESUMABLE = 130, 75  # as in errors.py, which takes longer to import
# Sent by a person, a closed terminal, a scheduler, or a launcher.
STOP_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def exit_on_signals() -> None:
    """Make every signal that asks to stop end this process, with exit code 75, or 130 after SIGINT.

    SIGHUP stays ignored under nohup.
    """

    def exit_process(number: int, frame: object) -> None:
        name = signal.Signals(number).name
        write_stderr(f"{name}: stopped immediately. Rerun the same command to resume\n")
        os._exit(_EXIT_INTERRUPTED if number == signal.SIGINT else _EXIT_RESUMABLE)

    for number in STOP_SIGNALS:
        if not is_ignored_sighup(number):
            signal.signal(number, exit_process)


def is_ignored_sighup(signal_number: int) -> bool:
    """Return whether the process was started to ignore SIGHUP, as nohup does."""
    return signal_number == signal.SIGHUP and signal.getsignal(signal_number) == signal.SIG_IGN


def write_stderr(text: str) -> None:
    """Write to stderr; safe in a signal handler.

    If the terminal is gone, redirect output to /dev/null, so that later prints do not fail.
    """
    try:
        os.write(2, text.encode())
        return
    except OSError:
        pass
    null_fd = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        try:
            os.write(number, b"")
        except OSError:
            os.dup2(null_fd, number)
