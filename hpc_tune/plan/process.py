"""The plan command in a process of its own: the trace of a step needs an interpreter to itself."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from hpc_tune.cluster.launchers import unlaunched


def run_plan(
    config: Path, words: Iterable[str], limit_s: float
) -> "subprocess.CompletedProcess[str]":
    """Run ``plan --json`` on a configuration file, as a process that no launcher has started.

    Raises:
        OSError, subprocess.TimeoutExpired: if it cannot be started, or is not done in time.
    """
    command = [sys.executable, "-m", "hpc_tune", "plan", "--json", "--config", str(config), *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=limit_s, env=unlaunched()
    )
