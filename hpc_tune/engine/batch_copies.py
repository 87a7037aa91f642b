"""Micro-batches on the device, each copied on a stream of its own while the one before is computed.

begin, take: pinned memory -> (the stream of copies) -> int64 on the device, and an event
take:        the stream that computes waits for the event; the host waits for nothing
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hpc_tune.batch import Batch


class BatchCopies:
    """Copies the micro-batches of one rank, one ahead of their use; on a CPU they stay as they are.

    Those that are used again, as by another stage of this rank, are copied again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._waiting: Iterator[Batch] = iter(())
        self._next_copy: tuple[Batch, Batch, Any] | None = None

    def begin(self, batches: Sequence[Batch]) -> None:
        """Begin to copy ``batches``, which are used in this order."""
        self._waiting = iter(batches)
        self._copy_next()

    def take(self, batch: Batch) -> Batch:
        """Return ``batch`` on the device, for the stream that computes."""
        if self._next_copy is None or self._next_copy[0] is not batch:
            return batch.to(self._device)
        _, copy, is_there = self._next_copy
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(is_there)
        for tensor in copy.all_tensors:
            tensor.record_stream(stream)  # else its memory would be given out while it is read
        self._copy_next()
        return copy

    def _copy_next(self) -> None:
        self._next_copy = None
        if self._stream is None or (batch := next(self._waiting, None)) is None:
            return
        with torch.cuda.stream(self._stream):
            self._next_copy = batch, batch.to(self._device), self._stream.record_event()
