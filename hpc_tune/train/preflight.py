"""The plan that a run makes of its own memory before it loads anything, and what came of it.

    a bound by arithmetic says that it surely fits -> no more is asked
    else the plan command, in a process of its own -> refused, unless --force

The trace needs an interpreter to itself, some seconds, and under 1 GB on the first node.
"""

import json
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_tune.errors import MemoryBudgetError
from hpc_tune.log import log
from hpc_tune.memory.host import find_limit, used_bytes
from hpc_tune.memory.policy import room_of
from hpc_tune.plan.memory_model import SURE_SHARE, most_bytes
from hpc_tune.plan.process import run_plan
from hpc_tune.train.job import Job
from hpc_tune.train.layout import Resolved, bytes_per_rank
from hpc_tune.train.model import Model
from hpc_tune.units import format_bytes

_PLAN_LIMIT_S = 300.0
_PLAN_BYTES = 600 << 20  # what the plan itself takes, with some to spare


@dataclass(frozen=True)
class Forecast:
    """What ``plan --json`` says of a run, None where it surely fits, and the verdict in words."""

    plan: dict[str, Any] | None
    verdict: str


def preflight(job: Job, model: Model, resolved: Resolved, force: bool) -> Forecast:
    """Return what this run will take. Collective.

    Raises:
        MemoryBudgetError: if a phase does not fit, and not ``force``.
    """
    config, comm, monitor = model.config, job.comm, job.monitor
    # Nodes may differ, and all ranks must decide alike: the least of any counts.
    room = bytes_per_rank(monitor, comm)
    host, ranks = monitor.limit.num_bytes, comm.world.local_size
    least_host, ranks = map(int, comm.max([-host, ranks]))
    host, device = -least_host, room if comm.device.type == "cuda" else None
    rows = config.batch.micro_size if config.batch.micro_size != "auto" else 1
    tokens = rows * config.data.seq_len
    most = most_bytes(model.size, resolved.layout, model.built.config, tokens, bool(device))
    if most < SURE_SHARE * room:
        rows_too = " with micro-batches of one row" if config.batch.micro_size == "auto" else ""
        verdict = f"fits{rows_too}: at most {format_bytes(most)} of {format_bytes(room)} per rank"
        return Forecast(None, verdict)
    words = ["--nodes", comm.world.num_nodes, "--gpus-per-node", ranks]
    words += ["--device-memory", device or 0, "--host-memory", host]
    # The other ranks wait for it.
    limit_s = min(_PLAN_LIMIT_S, config.run.timeout / 2)
    said = comm.on_rank_0("planning", lambda: _ask(job.dir, map(str, words), limit_s))
    if said is not None:
        monitor.expect(next(p["node_bytes"] for p in said["phases"] if p["name"] == "steady"))
    if said is None:
        return Forecast(None, "not planned, see above")
    if said["fits"]:
        return Forecast(said, _verdict(said, device, host))
    bad = [p for p in said["phases"] if not p["fits"] and not p["optional"]]
    text = "this run does not fit into memory:\n" + "\n".join(
        f"  - {phase['name']}: {format_bytes(phase['device_bytes'])} on a device, "
        f"{format_bytes(phase['node_bytes'])} on a node's host, which have "
        f"{format_bytes(device or 0)} and {format_bytes(host)}"
        for phase in bad
    )
    advice = "\n".join(f"  - {line}" for line in said["advice"])
    text += f"\nWhat would help:\n{advice}\n--force starts it all the same."
    if not force:
        raise MemoryBudgetError(text)
    if comm.is_rank_0:
        log.warning("%s", text)
    return Forecast(said, "does not fit by the plan, and was forced")


def _verdict(said: dict[str, Any], device: int | None, host: int) -> str:
    fullest = max(said["phases"], key=lambda phase: phase["node_bytes"])
    text = f"fits: {format_bytes(fullest['node_bytes'])} of {format_bytes(host)} on a node"
    text += f" ({fullest['name']})"
    if device:
        fullest = max(said["phases"], key=lambda phase: phase["device_bytes"])
        text += f", {format_bytes(fullest['device_bytes'])} of {format_bytes(device)} on a device"
        text += f" ({fullest['name']})"
    return text


def compare(job: Job, forecast: Forecast) -> None:
    """Write the most that a rank had in each phase beside what was planned. Collective."""
    planned = forecast.plan
    measured: dict[str, int] = {}
    for peaks in job.comm.gather(job.monitor.peaks):
        for phase, num_bytes in peaks.items():
            measured[phase] = max(measured.get(phase, 0), num_bytes)
    foreseen = {p["name"]: p["rank_bytes"] for p in planned["phases"]} if planned else {}
    phases = {
        phase: {"rank_bytes": num_bytes, "planned": foreseen.get(phase)}
        for phase, num_bytes in measured.items()
    }
    job.events.write("memory", phases=phases)


def _ask(run_dir: Path, words: Iterable[str], limit_s: float) -> dict[str, Any] | None:
    """Run the plan command on the run's own configuration; None where it cannot tell."""
    limit = find_limit()
    left = room_of(used_bytes(limit), limit.num_bytes)
    if left < _PLAN_BYTES:
        log.warning(
            "memory  not planned: that takes %s, and %s of %s are left",
            *map(format_bytes, (_PLAN_BYTES, left, limit.num_bytes)),
        )
        return None
    log.info("memory  planning what each phase takes")
    said = ""
    try:
        done = run_plan(run_dir / "config.resolved.yaml", words, limit_s)
        said = done.stderr.strip()
        found: dict[str, Any] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        why = said.splitlines()[-1] if said else str(error)
        log.warning("memory  not planned, the run goes on without: %s", why)
        return None
    return found
