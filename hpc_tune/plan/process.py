"""The plan command in a process of its own: the trace of a step needs an interpreter to itself."""

import subprocess
from collections.abc import Iterable
from pathlib import Path

from hpc_tune.cluster.own_command import run_command
from hpc_tune.plan.hardware import Machine


def run_plan(
    config: Path, machine: Machine, arguments: Iterable[str], limit_s: float
) -> "subprocess.CompletedProcess[str]":
    """Run ``plan --json`` on a configuration file, as a process that no launcher has started.

    Raises:
        OSError, subprocess.TimeoutExpired: if it cannot be started, or is not done in time.
    """
    words = ["plan", "--json", "--config", str(config), "--nodes", str(machine.nodes)]
    words += ["--gpus-per-node", str(machine.ranks_per_node)]
    words += ["--device-memory", str(machine.device_bytes or 0)]
    words += ["--host-memory", str(machine.host_bytes), *arguments]
    return run_command(words, limit_s)
