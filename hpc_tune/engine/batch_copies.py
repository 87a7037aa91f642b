"""A step's micro-batches on the device, copied on a stream of their own while others are computed.

    begin: pinned memory -> (a stream for copies) -> int64 on the device, an event per micro-batch
    take:  the stream that computes waits for that event; the host waits for nothing

All micro-batches of a step are begun at once: 24 bytes per token of this rank's step, far less than
what one layer keeps of one micro-batch.
"""

from collections.abc import Sequence
from typing import Any

import torch

from hpc_tune.batch import Batch


class BatchCopies:
    """The copies of one rank; on a CPU a batch is its own copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        # By the identity of what was copied, which is held so that no other object gets it.
        self._begun: dict[int, tuple[Batch, Batch, Any]] = {}

    def begin(self, batches: Sequence[Batch]) -> None:
        """Begin to copy ``batches``, and forget those before."""
        self._begun.clear()
        if self._stream is None:
            return
        with torch.cuda.stream(self._stream):
            for batch in batches:
                copy = batch.to(self._device)
                self._begun[id(batch)] = batch, copy, self._stream.record_event()

    def take(self, batch: Batch) -> Batch:
        """Return the copy of ``batch`` for the current stream, in whose order it is there."""
        if id(batch) not in self._begun:
            return batch.to(self._device)
        _, copy, is_there = self._begun[id(batch)]
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(is_there)
        for tensor in copy.tensors:
            tensor.record_stream(stream)  # else its memory would be given out while it is read
        return copy
