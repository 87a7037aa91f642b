"""How the last run in a run directory ended: by its outcome, or else by its last heartbeats."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_tune.rundir import heartbeat, outcome


@dataclass(frozen=True)
class PreviousRun:
    """What the last run left: its governor's actions, the memory whose want ended it, if any, and,
    if it left no outcome, how it died.
    """

    actions: tuple[str, ...] = ()
    short_of: Literal["host", "device"] | None = None
    death: str | None = None


def read_previous_run(run_dir: Path) -> PreviousRun:
    """Return what the last run in ``run_dir`` left; nothing where there was none."""
    ended, last = outcome.read_outcome(run_dir), heartbeat.read_heartbeats(run_dir)
    if ended is not None:
        actions = tuple(map(str, ended.get("governor", ())))
        if ended.get("status") != "stopped" or "need" not in ended:
            return PreviousRun(actions)
        return PreviousRun(actions, "device" if ended.get("memory") == "device" else "host")
    if last:
        death = (
            f"the last run in {run_dir} did not end by itself; {heartbeat.describe_last_seen(last)}"
        )
        return PreviousRun(short_of="host" if heartbeat.died_of_memory(last) else None, death=death)
    return PreviousRun()
