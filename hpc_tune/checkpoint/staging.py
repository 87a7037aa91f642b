"""What a save copies to host memory, in which pieces, and how a device copies by itself.

The bytes of a rank are cut into stretches of ``PIECE_BYTES``; a piece is what one region has in one
of them. So pinned blocks of that size, which is a power of two, hold every piece and nothing else.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from hpc_tune.config.schema import STAGING_BYTES
from hpc_tune.model.regions import Region
from hpc_tune.model.weights import PIECE_BYTES
from hpc_tune.world.device import set_thread_device
from hpc_tune.world.pinned import empty_pinned_cache

_ALIGNMENT = 16  # so that values of any dtype may begin there


@dataclass(frozen=True)
class StagedPiece:
    """Values ``start`` to ``stop`` of region number ``region``, flat.

    A copy of them is at ``offset`` (bytes) in block number ``block``.
    """

    region: int
    start: int
    stop: int
    block: int
    offset: int
    num_bytes: int


class StagingDevice(Protocol):
    """Copies its values to host memory while it computes."""

    def stream(self) -> AbstractContextManager[object]:
        """Do the copies within a block beside what the device computes."""

    def block(self) -> torch.Tensor:
        """Return ``PIECE_BYTES`` of host memory that the device can copy to by itself."""

    def copy(self, values: torch.Tensor, to: torch.Tensor) -> None:
        """Begin to copy into a part of a block."""

    def wait(self) -> None:
        """Return when all copies have been made."""

    def close(self) -> None:
        """Let another save have the blocks: none is held any longer."""


class PinnedBlockPool:
    """Pinned blocks that one save after another uses.

    A system pins about 2 GB a second, and the update waits for as long; to free pinned memory
    makes a GPU wait too. Threads of saves and the one that trains use this.
    """

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._keeps, self._lock = True, threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that no save uses."""
        return len(self._free) * PIECE_BYTES

    def take(self) -> torch.Tensor:
        """Return a block of ``PIECE_BYTES``, a kept one if there is one."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)

    def put_back(self, blocks: list[torch.Tensor]) -> None:
        """Take blocks back from a save that is over; ``blocks`` is emptied.

        No more are kept than one save had: one that hung may come back after the next.
        """
        with self._lock:
            most = max(len(self._free), len(blocks)) if self._keeps else 0
            kept = [*self._free, *blocks]
            self._free = kept[:most]
        blocks.clear()
        if len(kept) > most:
            del kept
            empty_pinned_cache()

    def release(self) -> None:
        """Give all that no save uses back to the system."""
        with self._lock:
            self._free.clear()
        empty_pinned_cache()

    def keep(self, keeps: bool) -> None:
        """From now on keep blocks between saves, or give them back, those of now too."""
        with self._lock:
            self._keeps = keeps
        if not keeps:
            self.release()


class CudaStagingDevice:
    """A GPU; what it has computed so far is what is copied."""

    def __init__(self, kept: PinnedBlockPool) -> None:
        """Copy into blocks of ``kept``, for one save."""
        self._kept, self._blocks, self._is_done = kept, list[torch.Tensor](), False
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())

    @contextmanager
    def stream(self) -> Iterator[None]:
        """See ``StagingDevice``."""
        set_thread_device(self._stream.device)
        with torch.cuda.stream(self._stream):
            yield

    def block(self) -> torch.Tensor:
        """See ``StagingDevice``."""
        self._blocks.append(self._kept.take())
        return self._blocks[-1]

    def copy(self, values: torch.Tensor, to: torch.Tensor) -> None:
        """See ``StagingDevice``."""
        to.copy_(values, non_blocking=True)

    def wait(self) -> None:
        """See ``StagingDevice``."""
        self._stream.synchronize()
        self._is_done = True

    def close(self) -> None:
        """See ``StagingDevice``."""
        if not self._is_done:  # the GPU may still write to them; torch frees them when it has
            self._blocks.clear()
        self._kept.put_back(self._blocks)


def choose_staging_bytes(
    wanted: int | Literal["auto"],
    total: int,
    on_device: bool,
    admit: Callable[[int, str], bool],
    kept: int = 0,
) -> int:
    """Return how many bytes a rank may copy of the ``total`` that it saves.

    ``wanted`` is checkpoint.staging_bytes; ``admit`` tells whether there is memory for so many
    beside the ``kept`` ones of the last save.
    """
    if wanted != "auto":
        sizes = [wanted]
    else:
        sizes = [total, STAGING_BYTES] if on_device else [STAGING_BYTES]
    why = "copies of what is to be saved"
    return next((size for size in sizes if admit(max(0, min(size, total) - kept), why)), 0)


def block_bytes(regions: Sequence[Region]) -> int:
    """Return the bytes of the blocks that hold copies of ``regions``."""
    last = max((piece.block for piece in cut_pieces(regions)), default=-1)
    return (last + 1) * PIECE_BYTES


def cut_pieces(regions: Sequence[Region]) -> Iterator[StagedPiece]:
    """Yield the pieces of ``regions`` in the order in which they are written."""
    at = 0
    for number, region in enumerate(regions):
        itemsize, numel, start = region.dtype.itemsize, region.box.num_values, 0
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        while start < numel:
            block, offset = divmod(at, PIECE_BYTES)
            stop = min(numel, start + (PIECE_BYTES - offset) // itemsize)
            num_bytes = (stop - start) * itemsize
            yield StagedPiece(number, start, stop, block, offset, num_bytes)
            start, at = stop, at + num_bytes
