"""What a save copies to host memory, in which pieces, and how a device copies by itself.

The bytes of a rank are cut into stretches of ``PIECE_BYTES``; a piece is what one region has in one
of them. So pinned blocks of that size, which torch rounds up to powers of two, hold every piece and
nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from hpc_tune.config.schema import STAGING_BYTES
from hpc_tune.model.regions import Region
from hpc_tune.model.weights import PIECE_BYTES
from hpc_tune.world.device import use_in_this_thread

_ALIGNED = 16  # so that values of any dtype may begin there


@dataclass(frozen=True)
class Piece:
    """Values ``start`` to ``stop`` of region number ``region``, flat.

    A copy of them is at ``offset`` (bytes) in block number ``block``.
    """

    region: int
    start: int
    stop: int
    block: int
    offset: int
    num_bytes: int


class Device(Protocol):
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
        """Give the blocks that are no longer held back to the system."""


class CudaDevice:
    """A GPU; what it has computed so far is what is copied."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())

    @contextmanager
    def stream(self) -> Iterator[None]:
        """See ``Device``."""
        use_in_this_thread(self._stream.device)
        with torch.cuda.stream(self._stream):
            yield

    def block(self) -> torch.Tensor:
        """See ``Device``."""
        return torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)

    def copy(self, values: torch.Tensor, to: torch.Tensor) -> None:
        """See ``Device``."""
        to.copy_(values, non_blocking=True)

    def wait(self) -> None:
        """See ``Device``."""
        self._stream.synchronize()

    def close(self) -> None:
        """See ``Device``; torch keeps pinned memory for good otherwise."""
        torch._C._host_emptyCache()


def bytes_to_copy(
    wanted: int | Literal["auto"], total: int, on_device: bool, admit: Callable[[int, str], bool]
) -> int:
    """Return how many bytes a rank may copy of the ``total`` that it saves.

    ``wanted`` is checkpoint.staging_bytes; ``admit`` tells whether there is memory for so many.
    """
    if wanted != "auto":
        sizes = [wanted]
    else:
        sizes = [total, STAGING_BYTES] if on_device else [STAGING_BYTES]
    why = "copies of what is to be saved"
    return next((size for size in sizes if admit(min(size, total), why)), 0)


def bytes_of(regions: Sequence[Region]) -> int:
    """Return the bytes of the blocks that hold copies of ``regions``."""
    last = max((piece.block for piece in pieces_of_all(regions)), default=-1)
    return (last + 1) * PIECE_BYTES


def pieces_of_all(regions: Sequence[Region]) -> Iterator[Piece]:
    """Yield the pieces of ``regions`` in the order in which they are written."""
    at = 0
    for number, region in enumerate(regions):
        itemsize, numel, start = region.dtype.itemsize, region.box.num_values, 0
        at = -(-at // _ALIGNED) * _ALIGNED
        while start < numel:
            block, offset = divmod(at, PIECE_BYTES)
            stop = min(numel, start + (PIECE_BYTES - offset) // itemsize)
            num_bytes = (stop - start) * itemsize
            yield Piece(number, start, stop, block, offset, num_bytes)
            start, at = stop, at + num_bytes
