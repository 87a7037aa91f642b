"""metrics.jsonl, events.jsonl and similar files: how whole lines are appended, and their fields.

Each field is declared here once: the writers fill the rows, the report reads these fields, and
``tools/reference.py`` lists them in docs/files.md.
"""

import errno
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from io import FileIO
from pathlib import Path
from typing import Annotated, Any

from hpc_tune.files import write_file
from hpc_tune.log import log

RESOLVED_CONFIG = "config.resolved.yaml"
STARTING_CONFIG = "config.starting.yaml"  # of a start that may still be refused
METRICS_FILE, EVENTS_FILE, RANKS_FILE = "metrics.jsonl", "events.jsonl", "ranks.jsonl"
EXPERTS_FILE = "experts.jsonl"
STARTS_FILE = "starts.jsonl"  # written by supervise


class AtomicAppender:
    """A file to which each write is appended whole or not at all.

    Writes that the file system refuses are lost, with one warning: a log must not end a run.
    """

    def __init__(self, path: Path) -> None:
        """Open ``path`` for appending.

        Raises:
            OSError: if it cannot be opened.
        """
        self._file: FileIO | None = FileIO(path, "a")
        self._has_warned = False

    def append(self, data: bytes) -> None:
        """Append ``data`` whole, or nothing if the file system refuses."""
        if self._file is None:
            return
        try:
            num_written = self._file.write(data)
            if num_written < len(data):
                os.ftruncate(self._file.fileno(), self._file.tell() - num_written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._has_warned:
                log.warning(
                    "%s cannot be written, lines are lost: %s", self._file.name, error.strerror
                )
            self._has_warned = True

    def close(self) -> None:
        """Close the file; later appends are dropped."""
        if self._file is not None:
            self._file.close()
            self._file = None


class JsonLinesWriter:
    """Appends one JSON object per line; a reader never sees half a line of a finished write."""

    def __init__(self, path: Path | None) -> None:
        """Open ``path`` for appending; None makes a writer that discards everything.

        Raises:
            OSError: if it cannot be opened.
        """
        self._file: AtomicAppender | None = None
        if path is not None:
            _end_torn_line(path)
            self._file = AtomicAppender(path)

    def write(self, **fields: Any) -> None:
        """Append one object of JSON types; NaN and infinities are written as null."""
        if self._file is not None:
            clean = {k: _replace_non_finite(v) for k, v in fields.items()}
            line = json.dumps(clean, ensure_ascii=False) + "\n"
            # Surrogates, from a path that is not UTF-8, are written as JSON escapes.
            self._file.append(line.encode(errors="backslashreplace"))

    def close(self) -> None:
        """Close the file; later writes are dropped."""
        if self._file is not None:
            self._file.close()


class EventsWriter:
    """Writer of events.jsonl: what happens in a run, and when. Without ``path``, discard all."""

    def __init__(self, path: Path | None) -> None:
        """Open the file.

        Raises:
            OSError: if it cannot be opened.
        """
        self._lines = JsonLinesWriter(path)

    def write(self, kind: str, step: int | None = None, rank: int = 0, **fields: Any) -> None:
        """Append an event of a ``kind`` about ``rank``, with its ``step`` if it belongs to one."""
        self._lines.write(time=time.time(), step=step, rank=rank, kind=kind, **fields)

    def close(self) -> None:
        """Close the file; later events are dropped."""
        self._lines.close()


def _end_torn_line(path: Path) -> None:
    """Append a line end to a file whose last line was cut off by a kill."""
    if path.exists() and path.stat().st_size:
        with path.open("rb+") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


def drop_lines_after(path: Path, step: int) -> None:
    """Remove lines of steps after ``step``, which a resumed run repeats, and lines cut off."""
    if not path.exists():
        return
    kept_lines = []
    for line in path.read_bytes().split(b"\n"):
        try:
            if json.loads(line)["step"] <= step:
                kept_lines.append(line + b"\n")
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    write_file(path, b"".join(kept_lines))


# -- The fields of a line. Each field of a dataclass is annotated with its meaning in Markdown; a
# field with a default is left out of a line if it has no value.


@dataclass(frozen=True)
class StepMetrics:
    """A line of a step. Times in seconds, sizes in bytes. Tokens are counted over all ranks."""

    time: Annotated[float, "when the step ended, in seconds since 1970"]
    step: Annotated[int, "optimizer steps done"]
    epoch: Annotated[float, "passes over the data, a fraction"]
    loss: Annotated[float, "mean over the step's tokens that carry loss"]
    lr: Annotated[float, "learning rate of the step"]
    grad_norm: Annotated[float, "L2 norm of all gradients, before clipping"]
    tokens: Annotated[int, "tokens of the step's documents, without padding"]
    loss_tokens: Annotated[int, "tokens that carry loss"]
    tokens_per_s: Annotated[float, "`tokens` / `step_s`"]
    mfu: Annotated[
        float | None,
        "model FLOPs (attention: only within documents) divided by the peak of all devices; null "
        "if the peak is unknown",
    ]
    step_s: Annotated[float, "the step, `data_s` included"]
    data_s: Annotated[float, "waiting for data (rank 0)"]
    comm_s: Annotated[float, "waiting for messages (rank 0)"]
    most_work_s: Annotated[float, "the slowest rank's own work: neither data nor messages"]
    least_work_s: Annotated[float, "the fastest rank's own work"]
    slowest_rank: Annotated[int, "which rank was the slowest"]
    sent_bytes: Annotated[dict[str, int], "what rank 0 sent, by kind of collective"]
    expected_bytes: Annotated[dict[str, int], "what the layout's formulas predict for `sent_bytes`"]
    device_util: Annotated[
        float | None,
        "share of the step in which the GPU computed; null without its counters (MIG, vGPU; the "
        "log says why)",
    ]
    host_bytes: Annotated[int | None, "used on the fullest node, including by other processes"]
    host_ranks_bytes: Annotated[int | None, "the most that this run's own ranks use on a node"]
    host_limit_bytes: Annotated[int | None, "the limit of rank 0's node"]
    device_bytes: Annotated[int | None, "used by the fullest rank"]
    device_limit_bytes: Annotated[int | None, "the limit of rank 0's device"]
    samples_seen: Annotated[int, "rows since the beginning of the run"]
    preferences: Annotated[
        dict[str, float] | None,
        "with a `tune.objective` on preferences: `accuracy`, `margin`, and the log-probabilities "
        "per token, `chosen_log_prob` and `rejected_log_prob` ([preferences](preferences.md))",
    ] = None
    source_tokens: Annotated[
        dict[str, int] | None,
        "with `data.sources`: the tokens that carry loss, by source ([mixtures](mixtures.md))",
    ] = None
    experts: Annotated[
        dict[str, float] | None,
        "with a mixture of experts: `largest`, the tokens of the fullest expert divided by the "
        "mean of its layer; `unused`, the share of experts without a token in the step; with "
        "`tune.router_aux_loss` or `tune.router_z_loss` also `aux_loss` and `z_loss`, per token, "
        "summed over layers, before their factor; `loss` does not include them",
    ] = None


@dataclass(frozen=True)
class EvalMetrics:
    """A line of an evaluation on the held-out data."""

    time: Annotated[float, "when it was done, in seconds since 1970"]
    step: Annotated[int, "optimizer steps done"]
    eval_loss: Annotated[float, "mean over its tokens that carry loss, or over its pairs"]
    eval_s: Annotated[float, "how long it took"]
    eval_pairs: Annotated[
        int | None, "with preferences: the number of pairs, or of labeled answers"
    ] = None
    eval_preferences: Annotated[
        dict[str, float] | None, "with preferences: as `preferences` of a step"
    ] = None
    eval_tokens: Annotated[int | None, "else: the number of tokens that carry loss"] = None
    eval_losses: Annotated[
        dict[str, float] | None,
        "with several held-out sources: the loss of each by name; `eval_loss` is their mean",
    ] = None


@dataclass(frozen=True)
class RankTimes:
    """A line for every few steps, 400 at most; there is no such file with a single rank."""

    step: Annotated[int, "optimizer steps done"]
    work_s: Annotated[
        list[float],
        "for each rank, in order, the mean seconds per step since the previous line that it spent "
        "neither on messages nor on data",
    ]


@dataclass(frozen=True)
class ExpertTokens:
    """With a mixture of experts, a line for each evaluation and one at the end. Tokens of
    evaluations, and padding, are not counted.
    """

    step: Annotated[int, "optimizer steps done"]
    since: Annotated[int, "the step of the previous line, or of the start"]
    layers: Annotated[list[int], "the numbers of the decoder blocks with experts"]
    tokens: Annotated[
        list[list[int]],
        "for each of these blocks, how many tokens each expert had in the steps after `since`",
    ]


def to_row(line: StepMetrics | EvalMetrics | RankTimes | ExpertTokens) -> dict[str, Any]:
    """Return the fields that are written."""
    optional = {field.name for field in fields(line) if field.default is None}
    row = asdict(line)
    return {k: v for k, v in row.items() if k not in optional or v not in (None, {})}


@dataclass(frozen=True)
class EventKind:
    """When an event is written, and its fields: (type, meaning) by name; numbers are ``float``.

    A key may hold several names, separated by spaces.
    """

    occasion: str
    fields: Mapping[str, tuple[type, str]]


EVENT_FIELDS: Mapping[str, tuple[type, str]] = {
    "time": (float, "when it happened, in seconds since 1970"),
    "step": (float, "optimizer steps done, null if it belongs to no step"),
    "rank": (float, "which rank it is about"),
    "kind": (str, "what happened"),
}
EVENT_KINDS: Mapping[str, EventKind] = {
    "start": EventKind(
        "a start is about to train",
        {
            "world model method experts data evals layout memory kernels batch rate": (
                str,
                "the lines that it logs",
            ),
            "size num_nodes total_steps": (float, "ranks, nodes, optimizer steps of the run"),
            "command": (list, "its arguments"),
            "folder launcher": (str, "where and by what it was started"),
            "job scheduler": (str, "in a batch job"),
            "hosts": (dict, "ranks by host name"),
            "hardware": (str, "of a node"),
            "links": (str, "as measured by `parallel: auto`"),
            "counts": (dict, "numbers of documents, tokens and rows, share of padding"),
            "remarks": (list, "what was cut, dropped or not learned, in words"),
            "mixture": (list, "each source, its rows, learned tokens and passes by the end"),
            "versions": (dict, "of packages"),
            "commit": (str, "the git commit of the working directory"),
        },
    ),
    "resume": EventKind("the run has resumed from a checkpoint", {"path": (str, "which")}),
    "mixture": EventKind(
        "the run resumes with another mixture than the checkpoint's (`data.new_mixture`)",
        {"changes": (str, "in words")},
    ),
    "held_out": EventKind(
        "the run resumes, and its held-out losses are over other data, or another number of rows, "
        "than before",
        {},
    ),
    "checkpoint": EventKind(
        "a save is done",
        {
            "path": (str, "its folder"),
            "bytes": (float, "of all its files"),
            "save_s": (float, "how long it took"),
            "blocked_s": (float, "how long training waited for it"),
        },
    ),
    "governor": EventKind(
        "a memory level or an action",
        {
            "action way": (str, "what it did, and whether that is done (`do`) or undone (`undo`)"),
            "message": (str, "in words"),
            "host_bytes host_limit_bytes ranks_bytes own_bytes swap_bytes shm_bytes stalled "
            "device_used_bytes device_limit_bytes device_allocated_bytes device_reserved_bytes "
            "device_others_bytes device_retries device_ooms": (float, "of the fullest rank"),
        },
    ),
    "memory": EventKind(
        "the end of a run",
        {"phases": (dict, "for each phase, its peak `rank_bytes`, and the plan's, `planned`")},
    ),
    "layout": EventKind(
        "the end of a run with `parallel: auto`",
        {
            "layout": (str, "which was chosen"),
            "ranks": (list, "which took part"),
            "predicted_step_s measured_step_s off": (float, "step time, and its relative error"),
            "predicted_comm_share": (float, "share of messages in the step time"),
        },
    ),
    "energy": EventKind(
        "the end of a start that ends by itself",
        {
            "total_j": (float, "energy since training began"),
            "joules": (dict, "energy by part of the nodes"),
            "tokens seconds": (float, "trained tokens and time since then"),
            "nodes nodes_as_a_whole": (float, "how many, and how many were counted as a whole"),
            "missing": (list, "what was not counted, and why"),
            "has_others": (bool, "other jobs on the nodes, if any, are counted too"),
        },
    ),
    "stop": EventKind(
        "a start ends", {"reason": (str, "why"), "began_s": (float, "when a refused start began")}
    ),
    "left_out": EventKind(
        "`supervise` leaves a node out after a failure",
        {"node message": (str, "which, and why"), "began_s": (float, "as `time`")},
    ),
    "warning": EventKind(
        "a warning in the log",
        {"message": (str, "in words"), "began_s": (float, "when the start that warns began")},
    ),
}
