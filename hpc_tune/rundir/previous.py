"""How the last run in a run directory ended: by its outcome, or else by its last heartbeats."""

from dataclasses import dataclass
from pathlib import Path

from hpc_tune.rundir import heartbeat, outcome


@dataclass(frozen=True)
class Previous:
    """What the last run left: its governor's actions, whether memory ended it, and, if it left no
    outcome, how it died.
    """

    actions: tuple[str, ...] = ()
    ended_for_memory: bool = False
    death: str | None = None


def read(run_dir: Path) -> Previous:
    """Return what the last run in ``run_dir`` left; nothing where there was none."""
    ended, last = outcome.read(run_dir), heartbeat.read(run_dir)
    if ended is not None:
        actions = tuple(map(str, ended.get("governor", ())))
        return Previous(actions, ended.get("status") == "stopped" and "need" in ended)
    if last:
        death = f"the last run in {run_dir} did not end by itself; {heartbeat.last_seen(last)}"
        return Previous(ended_for_memory=heartbeat.was_memory(last), death=death)
    return Previous()
