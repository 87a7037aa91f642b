"""The plan command in a process of its own: the trace of a step needs an interpreter to itself."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from hpc_tune.cluster.launchers import unlaunched
from hpc_tune.plan.hardware import Machine


def run_plan(
    config: Path, machine: Machine, arguments: Iterable[str], limit_s: float
) -> "subprocess.CompletedProcess[str]":
    """Run ``plan --json`` on a configuration file, as a process that no launcher has started.

    Raises:
        OSError, subprocess.TimeoutExpired: if it cannot be started, or is not done in time.
    """
    command = [sys.executable, "-m", "hpc_tune", "plan", "--json", "--config", str(config)]
    command += ["--nodes", str(machine.nodes), "--gpus-per-node", str(machine.ranks_per_node)]
    command += ["--device-memory", str(machine.device_bytes or 0)]
    command += ["--host-memory", str(machine.host_bytes), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=limit_s, env=unlaunched()
    )
