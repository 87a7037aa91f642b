"""Write a rank's tensors while training continues, in bounded memory.

The values are read in place. The forward and backward passes of the next step do not change them,
so only the optimizer's update must wait: ``release`` copies what is not written yet, up to
``budget_bytes``, and waits for the rest.

On a GPU, if ``budget_bytes`` is enough for everything, the device first copies all values to the
host by itself, and the update only waits for these copies.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import torch

from hpc_tune.config.schema import STAGING_BYTES
from hpc_tune.errors import CheckpointError
from hpc_tune.faults import NO_FAULTS, Faults
from hpc_tune.model.regions import Region, WrittenFile, write_regions
from hpc_tune.model.tensor_sources import PIECE_BYTES
from hpc_tune.world.comm import Comm, StoreKeys
from hpc_tune.world.device import set_thread_device
from hpc_tune.world.pinned import release_pinned_cache

# -- What a save copies to host memory, in which pieces, and how a device makes these copies.
#
# The bytes of a rank are divided into blocks of ``PIECE_BYTES``; a piece is the part of one region
# in one block. So every piece fits into a pinned block of that size, a power of two, and no pinned
# memory is wasted.


_ALIGNMENT_BYTES = 16  # so that values of any dtype may start there


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
    """A device that copies its values to host memory while it computes."""

    def stream(self) -> AbstractContextManager[object]:
        """Run copies within the ``with`` block in parallel to the device's computations."""

    def block(self) -> torch.Tensor:
        """Return ``PIECE_BYTES`` of host memory that the device can copy to asynchronously."""

    def copy(self, values: torch.Tensor, destination: torch.Tensor) -> None:
        """Start a copy into a part of a block."""

    def wait(self) -> None:
        """Wait until all copies are finished."""

    def close(self) -> None:
        """Give the blocks back for the next save."""


class PinnedBlockPool:
    """Pinned blocks that are reused from one save to the next.

    Pinning memory runs at about 2 GB/s, and the update waits for it; freeing pinned memory makes a
    GPU wait too. Both the threads of saves and the training thread use this pool.
    """

    def __init__(self) -> None:
        self._free_blocks: list[torch.Tensor] = []
        self._keeps_blocks, self._lock = True, threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks that no save is using."""
        return len(self._free_blocks) * PIECE_BYTES

    def take(self) -> torch.Tensor:
        """Return a block of ``PIECE_BYTES``, a kept one if there is one."""
        with self._lock:
            if self._free_blocks:
                return self._free_blocks.pop()
        return torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)

    def return_blocks(self, blocks: list[torch.Tensor]) -> None:
        """Take blocks back from a save that is over; ``blocks`` is emptied.

        At most as many blocks are kept as one save had, since a save that hung may return its
        blocks after the next one; none after ``keep_between_saves(False)``.
        """
        with self._lock:
            max_blocks = max(len(self._free_blocks), len(blocks)) if self._keeps_blocks else 0
            all_blocks = [*self._free_blocks, *blocks]
            self._free_blocks = all_blocks[:max_blocks]
        blocks.clear()
        if len(all_blocks) > max_blocks:
            del all_blocks
            release_pinned_cache()

    def release(self) -> None:
        """Return all unused blocks to the system."""
        with self._lock:
            self._free_blocks.clear()
        release_pinned_cache()

    def keep_between_saves(self, keeps: bool) -> None:
        """Set whether blocks are kept between saves; if not, also free the ones kept now."""
        with self._lock:
            self._keeps_blocks = keeps
        if not keeps:
            self.release()


class CudaStagingDevice:
    """A GPU; the copies contain what the current stream has computed up to construction."""

    def __init__(self, pool: PinnedBlockPool) -> None:
        """Copy into blocks of the pool ``pool``, for one save."""
        self._pool, self._blocks, self._is_done = pool, list[torch.Tensor](), False
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
        self._blocks.append(self._pool.take())
        return self._blocks[-1]

    def copy(self, values: torch.Tensor, destination: torch.Tensor) -> None:
        """See ``StagingDevice``."""
        destination.copy_(values, non_blocking=True)

    def wait(self) -> None:
        """See ``StagingDevice``."""
        self._stream.synchronize()
        self._is_done = True

    def close(self) -> None:
        """See ``StagingDevice``."""
        if not self._is_done:  # the GPU may still write to them; torch frees them afterwards
            self._blocks.clear()
        self._pool.return_blocks(self._blocks)


def choose_staging_bytes(
    requested_bytes: int | Literal["auto"],
    total_bytes: int,
    is_on_gpu: bool,
    can_allocate: Callable[[int], bool],
    kept_bytes: int = 0,
) -> int:
    """Return up to how many bytes a rank may copy of the ``total_bytes`` that it saves, maybe 0.

    ``requested_bytes`` is checkpoint.staging_bytes; ``can_allocate`` tells whether there is memory
    for that many bytes in addition to the ``kept_bytes`` of the last save.
    """
    if requested_bytes != "auto":
        sizes = [requested_bytes]
    else:
        sizes = [total_bytes, STAGING_BYTES] if is_on_gpu else [STAGING_BYTES]
    return next((n for n in sizes if can_allocate(max(0, min(n, total_bytes) - kept_bytes))), 0)


def total_block_bytes(regions: Sequence[Region]) -> int:
    """Return the bytes of the blocks that hold copies of ``regions``."""
    last_block = max((piece.block for piece in split_into_pieces(regions)), default=-1)
    return (last_block + 1) * PIECE_BYTES


def split_into_pieces(regions: Sequence[Region]) -> Iterator[StagedPiece]:
    """Yield the pieces of ``regions`` in the order in which they are written."""
    position = 0
    for number, region in enumerate(regions):
        itemsize, numel, start = region.dtype.itemsize, region.box.num_values, 0
        position = -(-position // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        while start < numel:
            block, offset = divmod(position, PIECE_BYTES)
            stop = min(numel, start + (PIECE_BYTES - offset) // itemsize)
            num_bytes = (stop - start) * itemsize
            yield StagedPiece(number, start, stop, block, offset, num_bytes)
            start, position = stop, position + num_bytes


# -- The thread that writes a rank's tensors.


class CheckpointWriter:
    """One rank's part of one checkpoint, written by a separate thread."""

    def __init__(
        self,
        files: Mapping[Path, Sequence[Region]],
        budget_bytes: int,
        faults: Faults = NO_FAULTS,
        device: StagingDevice | None = None,
    ) -> None:
        """Start to write ``files``; their values must not change until ``release`` returns."""
        self._files, self._budget_bytes, self._faults = dict(files), budget_bytes, faults
        self._folder = next((file.parent for file in self._files), Path("a checkpoint"))
        self._regions = [region for regions in self._files.values() for region in regions]
        self._pieces = list(split_into_pieces(self._regions))
        self._piece_indices: dict[int, list[int]] = defaultdict(list)  # pieces of each region
        for number, piece in enumerate(self._pieces):
            self._piece_indices[piece.region].append(number)
        self._device = device
        self._copies_all = device is not None and total_block_bytes(self._regions) <= budget_bytes
        self._copies: dict[int, torch.Tensor] = {}
        self._next_piece = 0  # the piece that is being written
        self._num_read = 0  # regions, including the one that is being read
        self._progress_count = 0
        self._is_over = self._has_copied_all = self._is_released = False
        self._error: CheckpointError | None = None
        self._written_files: list[WrittenFile] = []
        self._state_changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended, with or without an error."""
        return self._is_over

    @property
    def progress(self) -> int:
        """A number that grows as bytes are written; reading it does not touch the file system."""
        return self._progress_count

    def cancel(self, reason: str) -> None:
        """Mark the save as failed unless everything is written; the thread ends when it can."""
        with self._state_changed:
            if not self._is_over:
                self._error, self._is_over = CheckpointError(reason), True
                self._state_changed.notify_all()

    def result(self) -> list[WrittenFile]:
        """Wait until everything is written, and return the files.

        Raises:
            CheckpointError: if a file could not be written.
        """
        with self._state_changed:
            self._state_changed.wait_for(lambda: self._is_over)
        if self._error is not None:
            raise self._error
        return self._written_files

    def release(self, limit_s: float) -> None:
        """Wait until the values may be changed.

        If nothing is written for ``limit_s`` seconds, the checkpoint is given up.
        """
        with self._state_changed:
            if self._is_released:
                return
            first = len(self._pieces) if self._copies_all else self._copy_last_pieces()
            progress = self.progress
            while not self._state_changed.wait_for(lambda: self._may_change_values(first), limit_s):
                if self.progress == progress:
                    self.cancel(
                        f"{self._folder}: no byte was written for {limit_s:.0f} s; the file system "
                        "hangs"
                    )
                progress = self.progress
            self._is_released = True

    def _may_change_values(self, first: int) -> bool:
        """Whether the values may be changed, if the pieces from ``first`` on are copied."""
        return self._is_over or self._has_copied_all or self._next_piece >= first

    def _copy_last_pieces(self) -> int:
        """Copy as many of the last pieces as the budget allows; return the first one's number."""
        remaining_bytes, first = self._budget_bytes, len(self._pieces)
        while first > self._next_piece + 1:
            piece = self._pieces[first - 1]
            if piece.num_bytes > remaining_bytes:
                break
            remaining_bytes -= piece.num_bytes
            first -= 1
            self._copies[first] = self._piece_values(piece).to("cpu", copy=True)
        return first

    def _copy_all_pieces(self, device: StagingDevice) -> None:
        """Let the device copy all pieces into blocks of pinned memory, and wait for the copies."""
        number, block = -1, torch.empty(0)
        for piece in self._pieces:
            if piece.block != number:
                number, block = piece.block, device.block()
            values = self._piece_values(piece)
            copy = block[piece.offset : piece.offset + piece.num_bytes].view(values.dtype)
            device.copy(values, destination=copy)
            self._copies[len(self._copies)] = copy
            self._count_progress()
        device.wait()
        with self._state_changed:
            self._has_copied_all = True
            self._state_changed.notify_all()

    def _piece_values(self, piece: StagedPiece) -> torch.Tensor:
        return self._regions[piece.region].values().view(-1)[piece.start : piece.stop]

    def _run(self) -> None:
        device = self._device
        try:
            with nullcontext() if device is None else device.stream():
                if device is not None and self._copies_all:
                    self._copy_all_pieces(device)
                for file, regions in self._files.items():
                    self._written_files.append(
                        write_regions(file, regions, self._read_pieces, self._count_progress)
                    )
        except CheckpointError as error:
            self._error = self._error or error
        except Exception as error:  # a thread's error must reach the loop
            message = f"{self._folder} cannot be written: {error!r}"
            self._error = self._error or CheckpointError(message)
        finally:
            self._report_end(device)

    def _report_end(self, device: StagingDevice | None) -> None:
        """Give the blocks back for the next save, then signal that the thread is over."""
        try:
            with self._state_changed:
                self._copies.clear()
            if device is not None and self._copies_all:
                device.close()
        finally:
            with self._state_changed:
                self._is_over = True
                self._state_changed.notify_all()

    def _count_progress(self) -> None:
        self._progress_count += 1

    def _read_pieces(self, region: Region) -> Iterator[torch.Tensor]:
        """Yield the values of the next region by piece: from its copy if there is one."""
        self._num_read += 1
        for number in self._piece_indices[self._num_read - 1]:
            if self._error is not None:  # given up: another save may write the same file
                raise self._error
            self._faults.write(number, self._copies.keys())
            with self._state_changed:
                copy = self._copies.pop(number, None)
            yield self._piece_values(self._pieces[number]) if copy is None else copy
            copy = None  # else it would stay in memory while the next piece is written
            with self._state_changed:
                self._next_piece = number + 1
                self._state_changed.notify_all()


# -- What the ranks report to rank 0 about one save, through the rendezvous store.
#
#     each other rank   its part is written, or has failed -> what it has written, or why not
#     rank 0            has all reports                    -> commits, or gives up
#
# The threads that write send these messages: the main threads may be within a step that takes an
# hour, and a part that is on disk must not wait for them.


_POLL_S = 0.05
T = TypeVar("T")


@dataclass(frozen=True)
class SaveReport:
    """The files that a rank has written, or why it could not."""

    files: tuple[WrittenFile, ...] = ()
    error: str | None = None


class SaveReports:
    """The reports of one save; ``name`` must be unique over the whole life of the store."""

    def __init__(self, comm: Comm, name: str) -> None:
        """Prepare the keys in the store; nothing is sent yet."""
        self._world, self._keys = comm.world, StoreKeys(comm.store, f"save/{name}")

    def send(self, report: SaveReport) -> None:
        """Send the report of a rank other than 0 to rank 0; call it once.

        Raises:
            CheckpointError: if the store is gone.
        """
        rank = self._world.rank
        content = [[asdict(file) for file in report.files], report.error]

        def set_report() -> None:
            self._keys.set(content, rank)
            self._keys.add(1)

        _access_store(
            set_report, f"rank {rank} could not tell rank 0 that its part of a save is written"
        )

    def collect(
        self, own_report: SaveReport, poll_callback: Callable[[], None]
    ) -> list[SaveReport]:
        """Wait for the reports of all ranks and return them by rank; only for rank 0.

        ``poll_callback`` is called repeatedly while waiting, and may raise.

        Raises:
            CheckpointError: if the store is gone.
        """
        size = self._world.size
        error_prefix = (
            "rank 0 cannot learn whether the other ranks have written their parts of a save"
        )
        while size > 1 and _access_store(lambda: self._keys.add(0), error_prefix) < size - 1:
            poll_callback()
            time.sleep(_POLL_S)
        return [
            own_report,
            *(
                _access_store(partial(self._pop_report, rank), error_prefix)
                for rank in range(1, size)
            ),
        ]

    def _pop_report(self, rank: int) -> SaveReport:
        files, error = self._keys.get(rank)
        self._keys.delete(rank)
        if rank == self._world.size - 1:
            self._keys.delete()
        return SaveReport(tuple(WrittenFile(**file) for file in files), error)


def _access_store(work: Callable[[], T], error_prefix: str) -> T:
    try:
        return work()
    except RuntimeError as error:  # the store is gone with its rank
        raise CheckpointError(f"{error_prefix}: {error}") from None
