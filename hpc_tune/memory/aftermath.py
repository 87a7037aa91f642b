"""What is left of a run that the kernel killed: its last words, one small file per node.

A run that ends by itself writes outcome.json and removes them.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from hpc_tune.memory.host import HostLimit, oom_kills
from hpc_tune.units import format_bytes

FOLDER = "memory"
ALIVE_S = 30.0  # a run says every few seconds that it is there
NEAR_THE_LIMIT = 0.85  # of it in use: the kernel may have killed for memory


@dataclass(frozen=True)
class LastWord:
    """Host memory of one node a few seconds before the end, or now if the run is alive.

    ``time`` is in seconds since the epoch. ``oom_kills`` is the kernel's counter, for ``cgroup`` or
    the machine, when the run began.
    """

    time: float
    phase: str
    host: str
    used: int
    limit: int
    limit_source: str
    cgroup: str | None
    oom_kills: int


_LAST_WORD = TypeAdapter(LastWord)


def path_of(run_dir: Path, node: int) -> Path:
    """Return the file of a node."""
    return run_dir / FOLDER / f"node-{node}.json"


def write(word: LastWord, path: Path) -> None:
    """Replace the file.

    Raises:
        OSError: if the file system refuses.
    """
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(word)), encoding="utf-8")
    temporary.rename(path)


def read(run_dir: Path) -> list[LastWord]:
    """Return what the nodes of the last run said, the fullest first."""
    words = []
    for file in sorted((run_dir / FOLDER).glob("node-*.json")):
        try:
            word = _LAST_WORD.validate_json(file.read_bytes())
        except (OSError, ValueError):
            continue
        words += [word] if word.limit > 0 else []
    return sorted(words, key=lambda word: -word.used / word.limit)


def clear(run_dir: Path) -> None:
    """Remove what was said."""
    for file in (run_dir / FOLDER).glob("node-*.json"):
        file.unlink(missing_ok=True)


def was_memory(words: Sequence[LastWord]) -> bool:
    """Tell whether a run that left no outcome ended for memory, as far as one can know."""
    return any(_kills_since(w) > 0 or w.used >= NEAR_THE_LIMIT * w.limit for w in words)


def describe(words: Sequence[LastWord]) -> str:
    """Return, for a person, how a run without an outcome was last seen."""
    word = words[0]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(word.time))
    text = (
        f"it was killed: no outcome.json. Last seen on {word.host} at {when} while {word.phase}: "
        f"{format_bytes(word.used)} of {format_bytes(word.limit)} host memory in use "
        f"({word.used / word.limit:.0%} of {word.limit_source})"
    )
    kills = max(map(_kills_since, words))
    if kills:
        text += f"; since it began the kernel killed {kills} of that group's processes for memory"
    elif was_memory(words):
        text += "; probably by the kernel, for memory"
    return text


def _kills_since(word: LastWord) -> int:
    """Return how often the kernel killed since the run began; 0 where its group is gone."""
    if word.cgroup is None or not Path(word.cgroup).is_dir():
        return 0
    limit = HostLimit(word.limit, word.limit_source, Path(word.cgroup))
    return max(0, oom_kills(limit) - word.oom_kills)
