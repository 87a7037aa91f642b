"""A command of hpc_tune in a process of its own, which is no rank."""

import signal
import subprocess
import sys
from collections.abc import Iterable

from hpc_tune.cluster.launchers import environ_without_launcher


def run_command(words: Iterable[str], limit_s: float) -> "subprocess.CompletedProcess[str]":
    """Run ``python -m hpc_tune`` with ``words``; return its exit code and what it has printed.

    Raises:
        OSError, subprocess.TimeoutExpired: if it cannot be started, or is not done in time.
    """
    command = [sys.executable, "-m", "hpc_tune", *words]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="backslashreplace",
        timeout=limit_s,
        env=environ_without_launcher(),
    )


def why_command_failed(error: Exception) -> str:
    """Return in words why a command came to nothing, without the command itself."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"not done within {error.timeout:.0f} s"
    if isinstance(error, subprocess.CalledProcessError):
        if error.returncode < 0:
            return f"it was ended by {signal.Signals(-error.returncode).name}"
        return f"it ended with exit code {error.returncode}"
    return str(error)
