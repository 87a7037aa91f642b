"""Experiment trackers (``run.trackers``), which record a run's metrics besides metrics.jsonl.

    require_trackers   before anything takes time: refuse trackers that are not installed
    open_trackers      on rank 0: each gets the run's name, tags, notes, git commit and settings
    Trackers           passes each step's values to all; one that fails is dropped from then on

Compute nodes have no network: each tracker writes into the run directory, unless its own variables
say otherwise (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL).
"""

import contextlib
import io
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hpc_tune.config.schema import RunSettings
from hpc_tune.config.section import flatten_settings
from hpc_tune.errors import ConfigError
from hpc_tune.files import write_file
from hpc_tune.log import log
from hpc_tune.packages import is_importable
from hpc_tune.rundir.json_lines import AtomicAppender

# -- Scalars for TensorBoard; a full disk loses some of them but does not end the run.
#
# TensorBoard's own writer has a thread that fails with a traceback if the file system refuses data.


class TensorBoardEventFile:
    """One event file: framed ``Event`` messages, as TensorBoard reads them."""

    def __init__(self, folder: Path, start_step: int) -> None:
        """Begin a file in ``folder`` that supersedes earlier files after ``start_step``.

        Raises:
            OSError: if the file cannot be created.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = AtomicAppender(folder / name)
        self._append(Event(file_version="brain.Event:2"))
        if start_step:
            session_start = SessionLog(status=SessionLog.START)
            self._append(Event(step=start_step + 1, session_log=session_start))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append the values of one step by name."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._append(Event(step=step, summary=Summary(value=values)))

    def write_text(self, step: int, markdown: str) -> None:
        """Append a text for TensorBoard's Text tab."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto

        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        text = TensorProto(dtype="DT_STRING", string_val=[markdown.encode()])
        value = Summary.Value(tag="run", metadata=kind, tensor=text)
        self._append(Event(step=step, summary=Summary(value=[value])))

    def close(self) -> None:
        """Close the file; later values are dropped."""
        self._file.close()

    def _append(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        event.wall_time = time.time()
        record = io.BytesIO()
        RecordWriter(record).write(event.SerializeToString())
        self._file.append(record.getvalue())


# -- The trackers.


DEFAULT_PROJECT = "hpc_tune"  # default name of the project or experiment that groups runs
_WANDB_MODES = ("online", "offline", "disabled", "shared")
_WANDB_TIMEOUT_S = 60.0  # for W&B to start, and at the end to send remaining data
_MLFLOW_PARAMS_PER_CALL = 50  # per call; servers accept up to 100
_URL_LOGIN = re.compile(r"(?<=:)//[^/\s@'\"]+@")  # user:password@ in a URL
_MLFLOW_MAX_VALUE_CHARS = 5000  # characters of a parameter or tag


class Tracker(Protocol):
    """Records the metrics of a run. Any method may raise any exception."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record the values of one step by name."""

    def close(self) -> None:
        """Send remaining data."""


@dataclass(frozen=True)
class RunMetadata:
    """What a tracker records about a run besides its metrics.

    ``settings``: the whole dumped configuration; ``start_step``: where the run resumes from.
    """

    dir: Path
    name: str
    tags: list[str]
    notes: str | None
    commit: str | None
    settings: dict[str, Any]
    start_step: int


def list_trackers(run: RunSettings) -> list[str]:
    """Return the names of the requested trackers, each once.

    run.tensorboard is on by default, so it counts only if tensorboard is installed.
    """
    default_trackers = ["tensorboard"] if run.tensorboard and is_importable("tensorboard") else []
    return list(dict.fromkeys([*default_trackers, *run.trackers]))


def require_trackers(run: RunSettings) -> None:
    """Check that each requested tracker is available, before anything takes time.

    Warns if run.tensorboard=true, the default, but tensorboard is not installed.

    Raises:
        ConfigError: if one is not installed, or WANDB_MODE is not a mode.
    """
    names = list_trackers(run)
    if run.tensorboard and "tensorboard" not in names:
        log.warning(
            "tensorboard is not installed, so no metrics are written for it; python -m pip install "
            "tensorboard, or set run.tensorboard=false"
        )
    for name in names:
        if not is_importable(name):
            package = "mlflow-skinny" if name == "mlflow" else name
            raise ConfigError(
                f"run.trackers has {name}, which is not installed; python -m pip install "
                f"{package}, or remove it from run.trackers"
            )
    mode = os.environ.get("WANDB_MODE", "offline")
    if "wandb" in run.trackers and mode not in _WANDB_MODES:
        raise ConfigError(
            f"WANDB_MODE={mode}: expected one of {', '.join(_WANDB_MODES)}; unset it to write "
            "files for `wandb sync`"
        )


def open_trackers(run: RunSettings, run_metadata: RunMetadata) -> "Trackers":
    """Open the requested trackers; one that fails is reported and dropped."""
    trackers = Trackers()
    for name in list_trackers(run):
        trackers.open(name, partial(OPENERS[name], run_metadata))
    return trackers


class Trackers:
    """Open trackers by name. One that raises is reported and dropped; the run continues.

    They run in the process of rank 0, so no error of their libraries may end it.
    """

    def __init__(self) -> None:
        self._trackers: dict[str, Tracker] = {}

    def open(self, name: str, make: Callable[[], Tracker]) -> None:
        """Add the tracker that ``make`` returns."""
        try:
            self._trackers[name] = make()
        except Exception as error:
            _warn_of_failure(name, "cannot be opened", error)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Pass the values of one step to all trackers."""
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.write(step, scalars)
            except Exception as error:
                del self._trackers[name]
                _warn_of_failure(name, "fails", error)
                with contextlib.suppress(Exception):
                    tracker.close()

    def close(self) -> None:
        """Close all trackers."""
        while self._trackers:
            name, tracker = self._trackers.popitem()
            try:
                tracker.close()
            except Exception as error:
                _warn_of_failure(name, "may lack the last metrics", error)


class Wandb:
    """One W&B run per run directory: a resumed run continues it."""

    def __init__(self, run_metadata: RunMetadata) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT),
            dir=run_metadata.dir,
            id=_read_or_make_id(run_metadata.dir / "wandb", lambda: secrets.token_hex(4)),
            resume=None if mode == "offline" else "allow",
            name=run_metadata.name,
            tags=run_metadata.tags,
            notes=run_metadata.notes,
            config=run_metadata.settings | {"git_commit": run_metadata.commit},
            mode=mode,  # type: ignore[arg-type]
            settings=wandb.Settings(
                init_timeout=_WANDB_TIMEOUT_S,
                finish_timeout=_WANDB_TIMEOUT_S,
                console="off",
                silent=True,
            ),
        )
        # Errors of writing its log file, as on a full disk, would be printed as tracebacks.
        logging.getLogger("wandb").setLevel(logging.CRITICAL)
        if mode == "offline":
            folder = Path(self._run.dir).parent
            log.info("wandb   offline; where there is a network: wandb sync %s", folder)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the values of one step by name."""
        self._run.log({**scalars, "step": step}, step=step)

    def close(self) -> None:
        """Send remaining data."""
        self._run.finish()


class Mlflow:
    """One MLflow run per run directory, in files there unless MLFLOW_TRACKING_URI names a server.

    A server that does not answer is given up after seconds; MLflow's default is minutes.
    """

    def __init__(self, run_metadata: RunMetadata) -> None:
        for name, value in _MLFLOW_ENV.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric_class, folder = Metric, run_metadata.dir / "mlflow"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or folder.absolute().as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        self._run_id = _read_or_make_id(folder, lambda: self._create_run(run_metadata))
        for name, value in _mlflow_tags(run_metadata).items():
            self._client.set_tag(self._run_id, name, value[:_MLFLOW_MAX_VALUE_CHARS])
        self._client.update_run(self._run_id, status="RUNNING", name=run_metadata.name)

    def _create_run(self, run_metadata: RunMetadata) -> str:
        """Create the run and return its id; its parameters cannot be changed later."""
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", DEFAULT_PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        id_ = experiment.experiment_id if experiment else self._client.create_experiment(name)
        run_id: str = self._client.create_run(id_, run_name=run_metadata.name).info.run_id
        items = flatten_settings(run_metadata.settings).items()
        params = [Param(key, str(value)[:_MLFLOW_MAX_VALUE_CHARS]) for key, value in items]
        for start in range(0, len(params), _MLFLOW_PARAMS_PER_CALL):
            self._client.log_batch(run_id, params=params[start : start + _MLFLOW_PARAMS_PER_CALL])
        return run_id

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the values of one step by name."""
        now_ms = int(1000 * time.time())
        metrics = [self._metric_class(name, value, now_ms, step) for name, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._run_id)


_MLFLOW_ENV = {
    "MLFLOW_ALLOW_FILE_STORE": "true",  # otherwise version 3 requires a database
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds
}


def _mlflow_tags(run_metadata: RunMetadata) -> dict[str, str]:
    """Return the tags of a run; MLflow's own pages show the dotted ones."""
    tags = {"tags": ", ".join(run_metadata.tags)}
    return tags | {
        name: text
        for name, text in (
            ("mlflow.note.content", run_metadata.notes),
            ("mlflow.source.git.commit", run_metadata.commit),
            ("mlflow.source.name", DEFAULT_PROJECT),
        )
        if text
    }


class Trackio:
    """A trackio run in the run directory, or where trackio's environment variables say.

    If trackio cannot write, it warns once by itself and continues.
    """

    def __init__(self, run_metadata: RunMetadata) -> None:
        os.environ.setdefault("TRACKIO_DIR", str((run_metadata.dir / "trackio").absolute()))
        with contextlib.redirect_stdout(io.StringIO()):  # it prints how to open a dashboard
            import trackio

            self._finish = trackio.finish
            self._run: Any = trackio.init(
                os.environ.get("TRACKIO_PROJECT", DEFAULT_PROJECT),
                name=run_metadata.name,
                resume="allow" if run_metadata.start_step else "never",
                config=_trackio_config(run_metadata),
                auto_log_gpu=False,
                auto_log_cpu=False,
                embed=False,
            )

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Log the values of one step by name."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Write remaining data."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._finish()


def _trackio_config(run_metadata: RunMetadata) -> dict[str, Any]:
    metadata = {
        "tags": ", ".join(run_metadata.tags),
        "notes": run_metadata.notes,
        "git_commit": run_metadata.commit,
    }
    return flatten_settings(run_metadata.settings) | metadata


def _open_tensorboard(run_metadata: RunMetadata) -> Tracker:
    file = TensorBoardEventFile(run_metadata.dir / "tensorboard", run_metadata.start_step)
    metadata = {
        "name": run_metadata.name,
        "tags": ", ".join(run_metadata.tags),
        "notes": run_metadata.notes,
    }
    rows = metadata | {"git commit": run_metadata.commit} | flatten_settings(run_metadata.settings)
    file.write_text(
        run_metadata.start_step,
        "".join(f"    {name}: {json.dumps(value)}\n" for name, value in rows.items()),
    )
    return file


OPENERS: dict[str, Callable[[RunMetadata], Tracker]] = {
    "tensorboard": _open_tensorboard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
}


def _read_or_make_id(folder: Path, make: Callable[[], str]) -> str:
    """Return the run directory's id for a tracker; it is made at the first start."""
    file = folder / "run-id"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_file(file, make())
    return file.read_text(encoding="utf-8").strip()


def _warn_of_failure(name: str, problem: str, error: Exception) -> None:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    reason = _URL_LOGIN.sub("//", reason)
    log.warning("tracker %s %s, and the run continues without it: %s", name, problem, reason)
