"""A command of hpc_tune in a process of its own, which is no rank."""

import subprocess
import sys
from collections.abc import Iterable

from hpc_tune.cluster.launchers import unlaunched


def run_command(words: Iterable[str], limit_s: float) -> "subprocess.CompletedProcess[str]":
    """Run ``python -m hpc_tune`` with ``words``; return its exit code and what it has printed.

    Raises:
        OSError, subprocess.TimeoutExpired: if it cannot be started, or is not done in time.
    """
    command = [sys.executable, "-m", "hpc_tune", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=limit_s, env=unlaunched()
    )
