"""How a run ended: from outcome.json, as launchers' exit codes are not reliable, or else from the
last heartbeats of its nodes.
"""

import json
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import TypeAdapter

from hpc_tune.cluster.launchers import explain_command_failure, run_hpc_tune_command
from hpc_tune.errors import EXIT_DONE, EXIT_RESUMABLE
from hpc_tune.files import write_file
from hpc_tune.log import log, warn_unreadable
from hpc_tune.memory.host import (
    REPORT_PROCESS_BYTES,
    HostLimit,
    find_host_limit,
    free_host_bytes,
    oom_kills,
)
from hpc_tune.memory.policy import HOST_LIMITS, Level
from hpc_tune.rundir.json_lines import METRICS_FILE, RESOLVED_CONFIG
from hpc_tune.units import format_bytes
from hpc_tune.world.liveness import LATE_HEARTBEAT_S
from hpc_tune.world.stop import STOP_FILE

OUTCOME_FILE = "outcome.json"
# Reserves disk space for the outcome of a run that ends because its disk is full.
RESERVE_FILE = ".outcome.reserve"
_RESERVED_BYTES = 1 << 14
OutcomeStatus = Literal["done", "stopped", "failed"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: done, stopped (it can be resumed; exit code 75), or failed.

    ``facts`` are written next to the other fields, such as need, had, phase, rank, host and the
    governor's actions (``governor``) after a stop for memory.
    """

    status: OutcomeStatus
    reason: str
    step: int | None
    exit_code: int
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_time_left(self) -> bool:
        """Whether the run may still do work that takes seconds, as nobody is about to kill it."""
        return self.status == "done" or self.reason == "STOP file"


def done_outcome(step: int, early_reason: str | None = None) -> Outcome:
    """Return the outcome of a run that did all its steps, or ended early for ``early_reason``."""
    return Outcome("done", early_reason or "all steps done", step, EXIT_DONE)


def stopped_outcome(
    reason: str, step: int | None, facts: Mapping[str, Any] | None = None
) -> Outcome:
    """Return the outcome of a run that stopped on purpose and can be resumed."""
    return Outcome("stopped", reason, step, EXIT_RESUMABLE, facts or {})


def write_outcome(outcome: Outcome, run_dir: Path, start: str | None = None) -> None:
    """Write outcome.json atomically, and remove the STOP file unless the run failed.

    ``start`` is the nonce of the start that ended, if it got far enough to have one.

    Raises:
        OSError: if the file system refuses.
    """
    if outcome.status != "failed":
        _remove_stop_file(run_dir / STOP_FILE)
    fields = asdict(outcome)
    fields |= fields.pop("facts") | ({} if start is None else {"start": start})
    text = json.dumps(fields, indent=1) + "\n"
    try:
        write_file(run_dir / OUTCOME_FILE, text)
    except OSError:
        (run_dir / RESERVE_FILE).unlink(missing_ok=True)
        write_file(run_dir / OUTCOME_FILE, text)
    (run_dir / RESERVE_FILE).unlink(missing_ok=True)


def _remove_stop_file(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        problem = (
            "is a folder, which asks to stop as a file does" if file.is_dir() else error.strerror
        )
        log.warning("%s %s: remove it, or the next start will stop too", file, problem)


def reserve_outcome_space(run_dir: Path) -> None:
    """Reserve disk space for this run's outcome, then remove that of the last run.

    Raises:
        OSError: if the file system refuses.
    """
    (run_dir / RESERVE_FILE).write_bytes(bytes(_RESERVED_BYTES))
    (run_dir / OUTCOME_FILE).unlink(missing_ok=True)


def read_outcome(run_dir: Path) -> dict[str, Any] | None:
    """Return the fields of outcome.json; None if it is missing or cannot be read."""
    try:
        fields = json.loads((run_dir / OUTCOME_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        warn_unreadable(run_dir / OUTCOME_FILE, error)
        return None
    return fields if isinstance(fields, dict) else None


def read_valid_outcome(run_dir: Path) -> dict[str, Any] | None:
    """Return the fields of outcome.json if they tell how a start ended; None otherwise.

    ``status``, ``reason`` and ``exit_code`` are then there and of the right types. If the file is
    there but does not tell, as when it was cut short or is of another version, a warning says so.
    """
    if not (run_dir / OUTCOME_FILE).is_file():
        return None
    fields = read_outcome(run_dir) or {}
    is_valid_by_name = {
        "status": fields.get("status") in get_args(OutcomeStatus),
        "reason": isinstance(fields.get("reason"), str),
        "exit_code": isinstance(fields.get("exit_code"), int),
    }
    if all(is_valid_by_name.values()):
        return fields
    log.warning(
        "%s counts as missing, since it has no valid %s: it was cut short, or is of another "
        "version of hpc_tune",
        run_dir / OUTCOME_FILE,
        ", ".join(name for name, is_valid in is_valid_by_name.items() if not is_valid),
    )
    return None


def read_outcome_of_start(
    run_dir: Path, start: str | None, since_s: float
) -> dict[str, Any] | None:
    """Return the outcome that some rank has already written for this start, if any.

    ``start`` is the nonce, which a start has only after its ranks have met. Without it, an outcome
    not older than ``since_s`` counts, by the clocks of this host and of the file system.
    """
    outcome = read_outcome(run_dir)
    if outcome is None or not isinstance(outcome.get("exit_code"), int):
        return None
    if start is not None:
        return outcome if outcome.get("start") == start else None
    try:
        return outcome if (run_dir / OUTCOME_FILE).stat().st_mtime >= since_s else None
    except OSError:
        return None


# -- Heartbeats, which each node writes every few seconds: how a killed run was last seen.
#
#     run.dir/memory/node-0.json, one small file per node
#
# A run that ends by itself writes outcome.json and removes these files.


HEARTBEAT_FOLDER = "memory"


@dataclass(frozen=True)
class Heartbeat:
    """Host memory of one node a few seconds before the end, or now if the run is alive.

    ``time`` is in seconds since the epoch, ``used`` and ``limit`` are bytes. ``oom_kills`` is the
    kernel's counter, for ``cgroup`` or the machine, at the start of the run.
    """

    time: float
    phase: str
    host: str
    used: int
    limit: int
    limit_source: str
    cgroup: str | None
    oom_kills: int


_HEARTBEAT_ADAPTER = TypeAdapter(Heartbeat)


class HeartbeatFile:
    """Keeps the heartbeat file of this node up to date."""

    def __init__(self, path: Path, host: str, limit: HostLimit) -> None:
        """Write to ``path``, whose folder must exist before the first ``beat``."""
        self._path: Path | None = path
        self._host, self._limit, self._initial_oom_kills = host, limit, oom_kills(limit)

    def beat(self, phase: str, used: int) -> None:
        """Write what the run does and how many bytes the node uses; give up if that fails."""
        if self._path is None:
            return
        limit = self._limit
        cgroup = None if limit.cgroup is None else str(limit.cgroup)
        fields = (
            phase,
            self._host,
            used,
            limit.num_bytes,
            limit.source,
            cgroup,
            self._initial_oom_kills,
        )
        try:
            write_heartbeat(Heartbeat(time.time(), *fields), self._path)
        except OSError:
            self._path = None  # writers of required files report a full disk

    def close(self) -> None:
        """Remove the file, because the run ends by itself."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def heartbeat_path(run_dir: Path, node: int) -> Path:
    """Return the heartbeat file of a node."""
    return run_dir / HEARTBEAT_FOLDER / f"node-{node}.json"


def write_heartbeat(heartbeat: Heartbeat, path: Path) -> None:
    """Write a heartbeat, replacing the file.

    Raises:
        OSError: if the file system refuses.
    """
    write_file(path, json.dumps(asdict(heartbeat)))


def read_heartbeats(run_dir: Path) -> list[Heartbeat]:
    """Return the heartbeats of the last run's nodes, the fullest first."""
    heartbeats = []
    for file in sorted((run_dir / HEARTBEAT_FOLDER).glob("node-*.json")):
        try:
            heartbeat = _HEARTBEAT_ADAPTER.validate_json(file.read_bytes())
        except (OSError, ValueError) as error:
            warn_unreadable(file, error)
            continue
        heartbeats += [heartbeat] if heartbeat.limit > 0 else []
    return sorted(heartbeats, key=lambda beat: -beat.used / beat.limit)


def clear_heartbeats(run_dir: Path) -> None:
    """Remove all heartbeats, and temporary files of ranks that died while writing one."""
    for pattern in ("node-*.json", ".node-*.tmp"):
        for file in (run_dir / HEARTBEAT_FOLDER).glob(pattern):
            file.unlink(missing_ok=True)


def has_run_out_of_memory(last_heartbeats: Sequence[Heartbeat]) -> bool:
    """Return whether a run without an outcome probably died for lack of memory."""
    threshold = HOST_LIMITS.level_thresholds[Level.TIGHT]
    return any(
        _count_new_kills(beat) > 0 or beat.used >= threshold * beat.limit
        for beat in last_heartbeats
    )


def describe_last_heartbeats(last_heartbeats: Sequence[Heartbeat]) -> str:
    """Describe how a run without an outcome was last seen."""
    fullest = last_heartbeats[0]
    timestamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fullest.time))
    text = (
        f"it was killed: no outcome.json. Last seen on {fullest.host} at {timestamp} while "
        f"{fullest.phase}: {format_bytes(fullest.used)} of {format_bytes(fullest.limit)} host "
        f"memory in use ({fullest.used / fullest.limit:.0%} of {fullest.limit_source})"
    )
    kills = max(map(_count_new_kills, last_heartbeats))
    if kills:
        text += f"; since it began the kernel killed {kills} of that group's processes for memory"
    elif has_run_out_of_memory(last_heartbeats):
        text += "; probably by the kernel, for memory"
    return text


def describe_silence(silent_s: float) -> str:
    """Return a clause about a run that lives but has been silent for a while, or ""."""
    return f", no sign of life for {silent_s:.0f} s" if silent_s > LATE_HEARTBEAT_S else ""


def _count_new_kills(heartbeat: Heartbeat) -> int:
    """Return how many processes the kernel OOM-killed since the run began; 0 without its cgroup."""
    if heartbeat.cgroup is None or not Path(heartbeat.cgroup).is_dir():
        return 0
    limit = HostLimit(heartbeat.limit, heartbeat.limit_source, Path(heartbeat.cgroup))
    return max(0, oom_kills(limit) - heartbeat.oom_kills)


# -- How the last run in a run directory ended: from its outcome, or else its last heartbeats.


@dataclass(frozen=True)
class PreviousRun:
    """What is known of the last run: its governor's actions, the memory that it ran short of, if
    any, and, if it left no outcome, how it died.
    """

    actions: tuple[str, ...] = ()
    exhausted_memory: Literal["host", "device"] | None = None
    death: str | None = None


def read_previous_run(run_dir: Path) -> PreviousRun:
    """Return what is known of the last run in ``run_dir``; empty if there was none."""
    outcome, last_heartbeats = read_outcome(run_dir), read_heartbeats(run_dir)
    if outcome is not None:
        governor = outcome.get("governor")
        actions = tuple(map(str, governor)) if isinstance(governor, list) else ()
        if outcome.get("status") != "stopped" or "need" not in outcome:
            return PreviousRun(actions)
        return PreviousRun(actions, "device" if outcome.get("memory") == "device" else "host")
    if last_heartbeats:
        last_seen = describe_last_heartbeats(last_heartbeats)
        death = f"the last run in {run_dir} did not end by itself; {last_seen}"
        return PreviousRun(
            exhausted_memory="host" if has_run_out_of_memory(last_heartbeats) else None, death=death
        )
    return PreviousRun()


# -- The report at the end of a run, written by the report command in a separate process.


# Bytes of memory per byte of metrics.jsonl, in addition to the process's own.
_MEMORY_PER_METRICS_BYTE = 4
_REPORT_LIMIT_S = 60.0


def run_report_command(run_dir: Path) -> None:
    """Write report.html; if that fails, only log how to write it later.

    Does nothing, silently, if no run has begun.
    """
    if not (run_dir / RESOLVED_CONFIG).is_file():
        return
    command = f"python -m hpc_tune report {shlex.quote(str(run_dir))}"
    free_bytes = free_host_bytes(find_host_limit())
    if free_bytes < REPORT_PROCESS_BYTES + _MEMORY_PER_METRICS_BYTE * _metrics_bytes(run_dir):
        log.warning(
            "no report: %s of memory left; write it with: %s", format_bytes(free_bytes), command
        )
        return
    try:
        result = run_hpc_tune_command(["report", "--no-job-energy", str(run_dir)], _REPORT_LIMIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("no report (%s); write it with: %s", explain_command_failure(error), command)
        return
    if result.returncode:
        reason = (result.stderr.strip().splitlines() or ["no output"])[-1]
        log.warning("no report: %s; write it with: %s", reason.removeprefix("hpc_tune: "), command)
        return
    log.info("report  %s", result.stdout.strip())


def _metrics_bytes(run_dir: Path) -> int:
    try:
        return (run_dir / METRICS_FILE).stat().st_size
    except OSError:
        return 0
