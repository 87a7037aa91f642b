"""Read a run directory into records; also while the run is alive, and after it died.

Half-written last lines, missing files and fields of other versions are not errors: a report is most
useful when something went wrong.
"""

import json
import os
import sys
import time
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from hpc_tune.cluster.protocol import JobEnergy
from hpc_tune.cluster.schedulers import ask_job_energy, can_report_energy
from hpc_tune.config.section import flatten_settings, format_setting
from hpc_tune.errors import ConfigError
from hpc_tune.log import warn_unreadable
from hpc_tune.rundir import outcome, owner
from hpc_tune.rundir.json_lines import (
    EVENT_FIELDS,
    EVENT_KINDS,
    EVENTS_FILE,
    EXPERTS_FILE,
    METRICS_FILE,
    RANKS_FILE,
    RESOLVED_CONFIG,
    EvalMetrics,
    StepMetrics,
)
from hpc_tune.rundir.outcome import (
    Heartbeat,
    describe_last_heartbeats,
    describe_silence,
    read_heartbeats,
)
from hpc_tune.safe_yaml import load_yaml
from hpc_tune.units import format_energy, list_some
from hpc_tune.world.liveness import DEAD_HEARTBEAT_S

# -- The energy of a run's jobs as counted by the scheduler, besides the run's own counters.
#
# Only the report command asks for it, not the report that a job itself writes, since the count is
# complete only once a job is over.


_MAX_ASKED_STARTS = 1000  # the newest ones, as the length of a command line is limited
_NOT_ASKED_MESSAGE = (
    "{} was not asked, since a job's energy is known only after its end: write the report again"
)
JobEnergyQuery = Callable[[str, Sequence[tuple[str, float]]], list[JobEnergy]]


@dataclass(frozen=True)
class JobsEnergy:
    """What a scheduler reported: ``joules`` of all jobs that it has counted, None if none."""

    joules: float | None
    words: str


def find_jobs_energy(
    events: Iterable[Mapping[str, Any]], asks_scheduler: bool, ask: JobEnergyQuery = ask_job_energy
) -> JobsEnergy | None:
    """Return the energy of a run's jobs; None without jobs whose scheduler counts energy.

    ``asks_scheduler``: whether to ask the scheduler, by ``ask``, which may take many seconds.
    """
    starts: dict[str, list[tuple[str, float]]] = {}
    for event in events:
        scheduler = str(event.get("scheduler"))
        if event.get("kind") == "start" and event.get("job") and can_report_energy(scheduler):
            starts.setdefault(scheduler, []).append((str(event["job"]), event["time"]))
    if not starts:
        return None
    if not asks_scheduler:
        return JobsEnergy(None, _NOT_ASKED_MESSAGE.format(" and ".join(starts)))
    parts = [
        _sum_energies(ask(name, jobs[-_MAX_ASKED_STARTS:]), name) for name, jobs in starts.items()
    ]
    known_joules = [part.joules for part in parts if part.joules is not None]
    words = "; ".join(part.words for part in parts)
    return JobsEnergy(sum(known_joules) if known_joules else None, words)


def _sum_energies(energies: Sequence[JobEnergy], scheduler: str) -> JobsEnergy:
    known = [part for part in energies if part.joules is not None]
    reasons: dict[str, list[str]] = {}
    for part in energies:
        if part.joules is None:
            reasons.setdefault(part.reason, []).append(part.job)
    notes = [f"not known: {_describe_jobs(jobs)} ({reason})" for reason, jobs in reasons.items()]
    if not known:
        return JobsEnergy(None, "; ".join(notes))
    joules = sum(part.joules or 0.0 for part in known)
    text = (
        f"{scheduler} counted {format_energy(joules)} for the nodes of "
        f"{_describe_jobs([part.job for part in known])}, from start to end, including other jobs "
        "there"
    )
    if any(part.is_sum_of_steps for part in known):
        text += "; this is the sum of job steps, several of which can count the same node"
    return JobsEnergy(joules, "; ".join([text, *notes]))


def _describe_jobs(jobs: Sequence[str]) -> str:
    names = list(dict.fromkeys(jobs))
    return f"job{'s' if len(names) > 1 else ''} {list_some(names, 4)}"


# -- A run and its records.


Record = Mapping[str, Any]
_MAX_NUMBER, _MAX_TIME_S = 1e300, 4e9  # the year 2096
_READ_CHUNK_BYTES = 1 << 22
# Number fields are float here. Fields that are not declared are text, as are the governor's fields
# that the report uses.
_EVENT_FIELD_TYPES = {
    name: of_type
    for kind in EVENT_KINDS.keys() - {"governor"}
    for declared in (EVENT_FIELDS, EVENT_KINDS[kind].fields)
    for names, (of_type, _) in declared.items()
    for name in names.split()
}


def _holds_dict(field: Field[Any]) -> bool:
    declared_type = get_args(field.type)[0]  # of Annotated
    return any(get_origin(variant) is dict for variant in (declared_type, *get_args(declared_type)))


# Rows share these names: with names of their own, a hundred thousand rows would take 140 MB more.
# Fields that the report does not use are left out: a dict of more than 21 takes twice the memory.
_UNREAD_METRICS = {"epoch", "device_util", "samples_seen", "experts", "eval_pairs"}
_HOLDS_DICT_BY_METRIC = {
    field.name: _holds_dict(field)
    for field in (*fields(StepMetrics), *fields(EvalMetrics))
    if field.name not in _UNREAD_METRICS
}
RunStatus = Literal["done", "stopped", "failed", "running", "died", "unknown"]


@dataclass(frozen=True)
class Segment:
    """One start of the run: seconds since 1970, and the running time of all starts before it."""

    begin_s: float
    end_s: float
    prior_running_s: float


@dataclass(frozen=True)
class Run:
    """The contents of one run directory.

    ``settings`` is flat (``"optim.lr"``); ``steps`` and ``evals`` are the lines of metrics.jsonl by
    kind, ``ranks`` the lines of ranks.jsonl, ``experts`` the lines of experts.jsonl. ``outcome`` is
    empty if the run has left none. ``silence_s``: seconds since it last wrote anything.
    ``has_died``: its process is known to be gone. ``jobs_energy``: as counted by the scheduler.
    """

    path: Path
    name: str
    settings: Mapping[str, Any]
    steps: Sequence[Record]
    evals: Sequence[Record]
    ranks: Sequence[Record]
    events: Sequence[Record]
    outcome: Record
    heartbeats: Sequence[Heartbeat]
    segments: Sequence[Segment]
    silence_s: float
    has_died: bool = False
    experts: Sequence[Record] = ()
    jobs_energy: JobsEnergy | None = None

    @property
    def state(self) -> RunStatus:
        """How the run ended, "running", or "unknown"."""
        if self.outcome:
            status = str(self.outcome.get("status"))
            return status if status in ("done", "stopped", "failed") else "unknown"  # type: ignore[return-value]
        longest_s = max((row.get("step_s") or 0.0 for row in self.steps[-20:]), default=0.0)
        limit_s = DEAD_HEARTBEAT_S + (0 if self.heartbeats else 3 * longest_s)
        if self.silence_s < limit_s and not self.has_died:
            return "running"
        return "died" if self.heartbeats else "unknown"

    @property
    def reason(self) -> str:
        """Why the run ended, or what it is doing, in words."""
        match self.state:
            case "running":
                activity = (
                    f"it is {self.heartbeats[0].phase}" if self.heartbeats else "it is running"
                )
                return activity + describe_silence(self.silence_s)
            case "died":
                return describe_last_heartbeats(self.heartbeats)
            case "unknown":
                if self.outcome:
                    return f"its outcome.json has the unknown status {self.outcome.get('status')!r}"
                return "it left no outcome.json and no heartbeat"
            case _:
                return str(self.outcome.get("reason", ""))

    def events_of_kind(self, kind: str) -> list[Record]:
        """Return the events of a kind."""
        return [event for event in self.events if event.get("kind") == kind]

    @property
    def governor_actions(self) -> list[Record]:
        """The governor's actions; its other events tell only how full memory is."""
        return [event for event in self.events_of_kind("governor") if "action" in event]

    @property
    def start(self) -> Record:
        """The newest start event, or an empty record."""
        return next(reversed(self.events_of_kind("start")), {})

    @property
    def total_steps(self) -> int | None:
        """The number of optimizer steps of the whole run."""
        total = self.start.get("total_steps")
        return total if isinstance(total, int) else None

    @property
    def comparable_evals(self) -> Sequence[Record]:
        """The evaluations over the same held-out data as the newest one."""
        if not (changes := self.events_of_kind("held_out")):
            return self.evals
        at_s, step = changes[-1]["time"], changes[-1].get("step", float("inf"))
        return [r for r in self.evals if r.get("time", 0.0) > at_s or r["step"] > step]

    def elapsed_s(self, time_s: float) -> float:
        """Return how many seconds the run had been running at a time, without waits in a queue."""
        index = self.start_index_at(time_s)
        if index < 0:
            return 0.0
        segment = self.segments[index]
        return segment.prior_running_s + min(time_s, segment.end_s) - segment.begin_s

    def start_index_at(self, at_s: float) -> int:
        """Return the index, from 0, of the newest start at a time; -1 before the first start."""
        return bisect(self.segments, at_s, key=lambda segment: segment.begin_s) - 1

    def elapsed_seconds_of(self, events: Iterable[Record]) -> list[float]:
        """Return how long the run had been running at each event.

        Events between its starts are skipped: they belong to a start that was refused.
        """
        times_s = [event["time"] for event in events]
        return [
            self.elapsed_s(at_s)
            for at_s in times_s
            if (index := self.start_index_at(at_s)) >= 0 and at_s <= self.segments[index].end_s
        ]


class LineReader:
    """A growing file of JSON lines. ``read`` reads only new lines, unless the file was replaced."""

    def __init__(self, path: Path, clean: Callable[[Record], Record] = dict) -> None:
        """Prepare to read ``path``; ``clean`` returns the usable fields of an object."""
        self._path, self._clean, self._rows = path, clean, list[Record]()
        self._offset, self._partial_line, self._inode = 0, b"", 0

    def read(self) -> list[Record]:
        """Return the objects of all complete lines read so far; other lines are skipped."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._rows, self._offset, self._partial_line = [], 0, b""
                    self._inode = status.st_ino
                file.seek(self._offset)
                while chunk := file.read(_READ_CHUNK_BYTES):
                    self._offset += len(chunk)
                    *complete_lines, self._partial_line = (self._partial_line + chunk).split(b"\n")
                    self._add_rows(complete_lines)
        except OSError as error:
            warn_unreadable(self._path, error)
        return self._rows

    def _add_rows(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                self._rows.append(self._clean(value))


def read_run(path: Path) -> Run:
    """Read the run directory ``path``, or that of the checkpoint ``path``.

    Raises:
        ConfigError: if it is neither.
    """
    path = find_run_dir(path)
    return build_run_from_records(path, *(lines.read() for lines in open_record_readers(path)))


def open_record_readers(path: Path) -> tuple[LineReader, ...]:
    """Return readers of metrics, events, ranks and experts.jsonl of the run at ``path``."""
    return (
        LineReader(path / METRICS_FILE, _clean_metrics),
        LineReader(path / EVENTS_FILE, _clean_event),
        LineReader(path / RANKS_FILE, _clean_ranks),
        LineReader(path / EXPERTS_FILE, _clean_experts),
    )


def find_run_dir(path: Path) -> Path:
    """Return the run directory ``path``, or the run directory of the checkpoint ``path``.

    Raises:
        ConfigError: if it is neither.
    """
    if path.is_dir() and not _is_run_dir(path) and _is_run_dir(path.absolute().parent.parent):
        path = path.absolute().parent.parent  # one of its checkpoints
    if not _is_run_dir(path):
        problem = f"a folder without {RESOLVED_CONFIG}" if path.is_dir() else "not a folder"
        raise ConfigError(
            f"{path} is {problem}; expected the run directory (run.dir) of a training run"
            f"{owner.similar_runs_hint(path)}"
        )
    return path


def build_run_from_records(
    path: Path,
    metrics_rows: Sequence[Record],
    events: Sequence[Record],
    ranks: Sequence[Record],
    experts: Sequence[Record],
) -> Run:
    """Build the run at ``path`` from the rows of the readers of ``open_record_readers``."""
    steps = [row for row in metrics_rows if "step" in row and "step_s" in row]
    evals = [row for row in metrics_rows if "step" in row and "eval_loss" in row]
    events = [event for event in events if "time" in event]
    settings = _read_settings(path / RESOLVED_CONFIG)
    return Run(
        path=path,
        name=str(settings.get("run.name") or path.absolute().name),
        settings=settings,
        steps=steps,
        evals=evals,
        ranks=[row for row in ranks if "step" in row and row["work_s"]],
        events=events,
        outcome=outcome.read_outcome(path) or {},
        heartbeats=(heartbeats := read_heartbeats(path)),
        segments=_find_segments([*events, *evals], steps),
        silence_s=_silence_s(path, heartbeats),
        has_died=owner.has_owner_died(path),
        experts=[row for row in experts if row],
    )


def find_setting_differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return (setting, its value in each run) where runs differ, except run.dir and run.name."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    differences = []
    for name in names:
        values = [format_setting(run.settings.get(name)) for run in runs]
        if len(set(values)) > 1 and name not in ("run.dir", "run.name"):
            differences.append((name, values))
    return differences


def _is_run_dir(path: Path) -> bool:
    return any((path / name).is_file() for name in (RESOLVED_CONFIG, METRICS_FILE))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _MAX_NUMBER


def _keep_numbers(row: Record) -> Record:
    return {k: v for k, v in row.items() if _is_number(v) and (k != "time" or 0 <= v < _MAX_TIME_S)}


def _clean_metrics(row: Record) -> Record:
    """Return a row's numbers, dicts of numbers, and numbers of preferences under dotted names."""
    valid_fields: dict[str, Any] = {}
    for name, holds_dict in _HOLDS_DICT_BY_METRIC.items():
        value = row.get(name)
        if not holds_dict:
            if _is_number(value):
                valid_fields[name] = value
        elif isinstance(value, dict):
            is_flat = name.endswith("preferences")
            numbers = {
                sys.intern(f"{name}.{key}" if is_flat else key): number
                for key, number in value.items()
                if _is_number(number)
            }
            valid_fields |= numbers if is_flat else {name: numbers}
    if not 0 <= valid_fields.get("time", 0.0) < _MAX_TIME_S:
        del valid_fields["time"]
    return valid_fields


def _clean_ranks(row: Record) -> Record:
    """Return the step of a row and the seconds of its ranks; no seconds if one is not a number."""
    work_s = row.get("work_s")
    is_good = isinstance(work_s, list) and all(map(_is_number, work_s))
    return {**_keep_numbers(row), "work_s": work_s if is_good else []}


def _clean_experts(row: Record) -> Record:
    """Return a row with its tokens by layer and expert; an empty row if one is not a number."""
    tokens, layers = row.get("tokens"), row.get("layers")
    if not isinstance(tokens, list) or not isinstance(layers, list):
        return {}
    rows = [counts if isinstance(counts, list) else [] for counts in tokens]
    numbers = [row.get("step"), row.get("since"), *layers, *(n for counts in rows for n in counts)]
    is_good = all(map(_is_number, numbers)) and rows and all(rows) and len(rows) == len(layers)
    return {**_keep_numbers(row), "layers": layers, "tokens": rows} if is_good else {}


def _clean_event(event: Record) -> Record:
    """Return the fields of an event that have the right type."""
    numbers = _keep_numbers(event)
    valid_fields: dict[str, Any] = {}
    for name, value in event.items():
        expected_type = _EVENT_FIELD_TYPES.get(name, str)
        if name in numbers if expected_type is float else isinstance(value, expected_type):
            valid_fields[name] = value
    if "counts" in valid_fields:
        valid_fields["counts"] = _keep_numbers(valid_fields["counts"])
    if "mixture" in valid_fields:
        valid_fields["mixture"] = [
            {
                **_keep_numbers(source),
                "name": str(source.get("name")),
                "asked": str(source.get("asked")),
            }
            for source in valid_fields["mixture"]
            if isinstance(source, dict)
        ]
    phases = valid_fields.get("phases", {})
    valid_fields["phases"] = {k: _keep_numbers(v) for k, v in phases.items() if isinstance(v, dict)}
    return valid_fields


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        tree = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        warn_unreadable(path, error)
        return {}
    sections = tree if isinstance(tree, dict) else {}
    return flatten_settings(
        {name: fields for name, fields in sections.items() if isinstance(fields, dict)}
    )


def _silence_s(path: Path, heartbeats: Sequence[Heartbeat]) -> float:
    """Return the seconds since the run's last sign of life."""
    signs = [beat.time for beat in heartbeats]
    for name in (METRICS_FILE, EVENTS_FILE):
        if (path / name).is_file():
            signs.append((path / name).stat().st_mtime)
    return time.time() - max(signs, default=0.0)


def _find_segments(other_records: Sequence[Record], steps: Sequence[Record]) -> list[Segment]:
    """Return the segments of the run, one per start; each ends with its last sign of life.

    ``other_records`` are events and evaluations. What a refused start wrote is not a sign of life
    of the start before it.
    """
    first = [row["time"] - row["step_s"] for row in steps[:1] if "time" in row]
    signs = sorted(
        [
            (row["time"], row.get("began_s", 0.0))
            for row in (*other_records, *steps)
            if "time" in row
        ]
        + [(at_s, 0.0) for at_s in first]
    )
    if not signs:
        return []
    starts = sorted(row["time"] for row in other_records if row.get("kind") == "start")
    starts = starts or [signs[0][0]]
    starts[0] = min([starts[0], *first])  # the first start's event may be lost
    segments, prior_running_s = [], 0.0
    for begin_s, next_s in zip(starts, [*starts[1:], float("inf")], strict=True):
        end_s = max(
            (time_s for time_s, began in signs if time_s < next_s and began <= begin_s),
            default=begin_s,
        )
        segments.append(Segment(begin_s, end_s, prior_running_s))
        prior_running_s += end_s - begin_s
    return segments
