"""Each node's last sign of life, written every few seconds: how a killed run was last seen.

    run.dir/memory/node-0.json, one small file per node

A run that ends by itself writes outcome.json and removes them.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from hpc_tune.atomic_file import write_file
from hpc_tune.log import warn_unreadable
from hpc_tune.memory.host import HostLimit, oom_kills
from hpc_tune.memory.policy import HOST_LIMITS, Level
from hpc_tune.units import format_bytes
from hpc_tune.world.liveness import HEARTBEAT_LATE_S

HEARTBEAT_FOLDER = "memory"


@dataclass(frozen=True)
class Heartbeat:
    """Host memory of one node a few seconds before the end, or now if the run is alive.

    ``time`` is in seconds since the epoch, ``used`` and ``limit`` are bytes. ``oom_kills`` is the
    kernel's counter, for ``cgroup`` or the machine, when the run began.
    """

    time: float
    phase: str
    host: str
    used: int
    limit: int
    limit_source: str
    cgroup: str | None
    oom_kills: int


_HEARTBEAT = TypeAdapter(Heartbeat)


class HeartbeatFile:
    """Keeps the file of this node up to date."""

    def __init__(self, path: Path, host: str, limit: HostLimit) -> None:
        """Write to ``path``, whose folder exists by then."""
        self._path: Path | None = path
        self._host, self._limit, self._kills = host, limit, oom_kills(limit)

    def beat(self, phase: str, used: int) -> None:
        """Write what the run does and how many bytes the node uses; stop if the disk is full."""
        if self._path is None:
            return
        limit = self._limit
        cgroup = None if limit.cgroup is None else str(limit.cgroup)
        fields = (phase, self._host, used, limit.num_bytes, limit.source, cgroup, self._kills)
        try:
            write_heartbeat(Heartbeat(time.time(), *fields), self._path)
        except OSError:
            self._path = None  # whoever must write reports a full disk

    def close(self) -> None:
        """Remove the file: the run ends by itself."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def heartbeat_path(run_dir: Path, node: int) -> Path:
    """Return the file of a node."""
    return run_dir / HEARTBEAT_FOLDER / f"node-{node}.json"


def write_heartbeat(heartbeat: Heartbeat, path: Path) -> None:
    """Replace the file.

    Raises:
        OSError: if the file system refuses.
    """
    write_file(path, json.dumps(asdict(heartbeat)))


def read_heartbeats(run_dir: Path) -> list[Heartbeat]:
    """Return the heartbeats of the last run's nodes, the fullest first."""
    heartbeats = []
    for file in sorted((run_dir / HEARTBEAT_FOLDER).glob("node-*.json")):
        try:
            heartbeat = _HEARTBEAT.validate_json(file.read_bytes())
        except (OSError, ValueError) as error:
            warn_unreadable(file, error)
            continue
        heartbeats += [heartbeat] if heartbeat.limit > 0 else []
    return sorted(heartbeats, key=lambda beat: -beat.used / beat.limit)


def clear_heartbeats(run_dir: Path) -> None:
    """Remove all heartbeats, and what is left of one that was being written when its rank died."""
    for pattern in ("node-*.json", ".node-*.tmp"):
        for file in (run_dir / HEARTBEAT_FOLDER).glob(pattern):
            file.unlink(missing_ok=True)


def died_of_memory(last: Sequence[Heartbeat]) -> bool:
    """Tell whether a run that left no outcome ended for memory, as far as one can know."""
    near = HOST_LIMITS.begins_at[Level.TIGHT]
    return any(_count_new_kills(beat) > 0 or beat.used >= near * beat.limit for beat in last)


def describe_last_seen(last: Sequence[Heartbeat]) -> str:
    """Return, for a person, how a run without an outcome was last seen."""
    fullest = last[0]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fullest.time))
    text = (
        f"it was killed: no outcome.json. Last seen on {fullest.host} at {when} while "
        f"{fullest.phase}: {format_bytes(fullest.used)} of {format_bytes(fullest.limit)} host "
        f"memory in use ({fullest.used / fullest.limit:.0%} of {fullest.limit_source})"
    )
    kills = max(map(_count_new_kills, last))
    if kills:
        text += f"; since it began the kernel killed {kills} of that group's processes for memory"
    elif died_of_memory(last):
        text += "; probably by the kernel, for memory"
    return text


def describe_silence(silent_s: float) -> str:
    """Return a clause on a run that lives and has given no sign of that for a while, or nothing."""
    return f", no sign of life for {silent_s:.0f} s" if silent_s > HEARTBEAT_LATE_S else ""


def _count_new_kills(heartbeat: Heartbeat) -> int:
    """Return how often the kernel killed since the run began; 0 where its group is gone."""
    if heartbeat.cgroup is None or not Path(heartbeat.cgroup).is_dir():
        return 0
    limit = HostLimit(heartbeat.limit, heartbeat.limit_source, Path(heartbeat.cgroup))
    return max(0, oom_kills(limit) - heartbeat.oom_kills)
