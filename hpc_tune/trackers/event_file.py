"""Scalars for TensorBoard; a full disk loses some of them but does not end the run.

TensorBoard's own writer has a thread that fails with a traceback if the file system refuses data.
"""

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpc_tune.rundir.json_lines import AtomicAppender


class EventFile:
    """One event file: framed ``Event`` messages, as TensorBoard reads them."""

    def __init__(self, folder: Path, start_step: int) -> None:
        """Begin a file in ``folder`` that supersedes earlier files from ``start_step`` on.

        Raises:
            OSError: if the file cannot be made.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = AtomicAppender(folder / name)
        self._append(Event(file_version="brain.Event:2"))
        if start_step:
            begun = SessionLog(status=SessionLog.START)
            self._append(Event(step=start_step + 1, session_log=begun))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Append the values of one step by name."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        self._append(Event(step=step, summary=Summary(value=values)))

    def describe(self, step: int, markdown: str) -> None:
        """Append a text for TensorBoard's page of texts."""
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
