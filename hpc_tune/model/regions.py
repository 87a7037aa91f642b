"""Tensors written by region: each rank streams what it holds into its own safetensors file.

    write_regions: streams a rank's own regions into one safetensors file, hashing meanwhile

See ``weights.py`` for what the header says about regions, and for reading them.
"""

import ctypes
import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from hpc_tune.errors import CheckpointError, find_remedy
from hpc_tune.model.tensor_sources import PIECE_BYTES, Box
from hpc_tune.model.weights import DTYPE_NAMES, FULL_SHAPES_KEY, NAMES_KEY, OFFSETS_KEY

SYNC_BYTES = 256 << 20  # so that progress follows a file system that is slower than memory
_LIBC = ctypes.CDLL("libc.so.6", use_errno=True)
_OFFSET_TYPE = ctypes.c_int64
_SYNC_BEGIN, _SYNC_BEGIN_AND_WAIT = 2, 7  # SYNC_FILE_RANGE_* of fcntl.h


def local_region(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the part of a tensor that this rank holds and its offset in the full tensor."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return tensor, (0,) * tensor.dim()
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tensor.to_local(), tuple(offset)


@dataclass(frozen=True)
class WrittenFile:
    """What a rank wrote: the file's name, its size in bytes and its SHA-256."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Region:
    """A box of one tensor to write; ``values`` is called at the time of writing.

    ``stored_name``: the box's name in the file, if the file holds several boxes of one tensor.
    """

    name: str
    dtype: torch.dtype
    box: Box
    full_shape: tuple[int, ...]
    values: Callable[[], torch.Tensor]
    stored_name: str = ""

    @classmethod
    def cover_tensor(
        cls,
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        values: Callable[[], torch.Tensor],
    ) -> "Region":
        """Return a region that is a whole tensor."""
        return cls(name, dtype, Box.cover_tensor(shape), shape, values)

    @property
    def key(self) -> str:
        """The box's name in the file."""
        return self.stored_name or self.name


def read_pieces(region: Region) -> Iterator[torch.Tensor]:
    """Yield the values of a region, flat, at most ``PIECE_BYTES`` at a time."""
    flat = region.values().view(-1)
    step = max(1, PIECE_BYTES // flat.element_size())
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step]


def write_regions(
    file: Path,
    regions: Sequence[Region],
    read: Callable[[Region], Iterable[torch.Tensor]] = read_pieces,
    notify_written: Callable[[], None] = lambda: None,
) -> WrittenFile:
    """Stream regions into one safetensors file, one tensor at a time, and sync it.

    ``read`` yields the values of a region in flat pieces. Each is copied to host memory if it is
    not there, and hashed while it is written; then ``notify_written`` is called. A piece is no
    longer used once ``read`` is asked for the next one.

    Raises:
        CheckpointError: if the file cannot be written; it may be left behind half-written.
    """
    position = num_synced = num_syncing = 0
    try:
        with file.open("wb") as out, _Hash() as digest:
            for block in _file_blocks(regions, read):
                digest.begin_hashing(block)
                out.write(block)
                digest.wait_until_hashed()
                position += len(block)
                del block  # else it would keep its tensor alive while the next one is made
                if position - num_syncing >= SYNC_BYTES:
                    _write_back(out.fileno(), num_synced, num_syncing, position)
                    num_synced, num_syncing = num_syncing, position
                notify_written()
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise CheckpointError(f"{file} cannot be written: {error}{find_remedy(error)}") from None
    return WrittenFile(file.name, position, digest.hexdigest())


class _Hash:
    """A SHA-256 that is computed in its own thread: hashlib releases the GIL."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._blocks: SimpleQueue[bytes | memoryview | None] = SimpleQueue()
        self._hashed_semaphore = threading.Semaphore(0)

    def __enter__(self) -> "_Hash":
        threading.Thread(target=self._run, name="checkpoint-hash", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._blocks.put(None)

    def begin_hashing(self, block: bytes | memoryview) -> None:
        self._blocks.put(block)

    def wait_until_hashed(self) -> None:
        """Wait until the block is hashed and its reference dropped."""
        self._hashed_semaphore.acquire()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def _run(self) -> None:
        while (block := self._blocks.get()) is not None:
            self._digest.update(block)
            del block
            self._hashed_semaphore.release()


def _write_back(descriptor: int, synced_end: int, syncing_end: int, position: int) -> None:
    """Start writing back ``syncing_end:position`` to disk, wait for ``synced_end:syncing_end``.

    So at most two ranges of a large file are still unwritten at the final sync.
    """
    for start, end, flags in (
        (syncing_end, position, _SYNC_BEGIN),
        (synced_end, syncing_end, _SYNC_BEGIN_AND_WAIT),
    ):
        if start == end:  # the kernel would take a length of 0 as "to the end of the file"
            continue
        if _LIBC.sync_file_range(descriptor, _OFFSET_TYPE(start), _OFFSET_TYPE(end - start), flags):
            number = ctypes.get_errno()
            if number not in (errno.EINVAL, errno.ESPIPE, errno.ENOSYS):  # such as for a pipe
                raise OSError(number, os.strerror(number))


def _file_blocks(
    regions: Sequence[Region], read: Callable[[Region], Iterable[torch.Tensor]]
) -> Iterator[bytes | memoryview]:
    header: dict[str, object] = {}
    position = 0
    for region in regions:
        num_bytes = region.box.num_values * region.dtype.itemsize
        header[region.key] = {
            "dtype": DTYPE_NAMES[region.dtype],
            "shape": list(region.box.shape),
            "data_offsets": [position, position + num_bytes],
        }
        position += num_bytes
    parts = [r for r in regions if r.box.shape != r.full_shape]
    metadata = {
        OFFSETS_KEY: {r.key: r.box.offset for r in parts},
        FULL_SHAPES_KEY: {r.key: r.full_shape for r in parts},
        NAMES_KEY: {r.key: r.name for r in regions if r.key != r.name},
    }
    header["__metadata__"] = {
        "format": "pt",
        **{key: json.dumps(value) for key, value in metadata.items() if value},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for region in regions:
        for piece in read(region):
            block: Any = piece.cpu().view(torch.uint8).numpy()
            del piece
            yield memoryview(block)
            del block
