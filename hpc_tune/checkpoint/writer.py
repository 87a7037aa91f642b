"""Writes a rank's tensors while training continues, in bounded memory.

The values are read in place. The forward and backward passes of the next step do not change them,
so only the optimizer's update must wait: ``release`` copies what is not written yet, up to
``budget_bytes``, and waits for the rest.

From a device all is copied first if ``budget_bytes`` allow it, by the device itself, and the update
waits for nothing but that.
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
from hpc_tune.world.pinned import empty_pinned_cache

# -- What a save copies to host memory, in which pieces, and how a device copies by itself.
#
# The bytes of a rank are cut into stretches of ``PIECE_BYTES``; a piece is what one region has in
# one of them. So pinned blocks of that size, which is a power of two, hold every piece and nothing
# else.


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

    def keep_between_saves(self, keeps: bool) -> None:
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


# -- The thread that writes a rank's tensors.


class Writer:
    """One rank's part of one checkpoint, written by a thread of its own."""

    def __init__(
        self,
        files: Mapping[Path, Sequence[Region]],
        budget_bytes: int,
        faults: Faults = NO_FAULTS,
        device: StagingDevice | None = None,
    ) -> None:
        """Start to write ``files``; their regions must stay as they are until ``release``."""
        self._files, self._budget_bytes, self._faults = dict(files), budget_bytes, faults
        self._folder = next((file.parent for file in self._files), Path("a checkpoint"))
        self._regions = [region for regions in self._files.values() for region in regions]
        self._pieces = list(cut_pieces(self._regions))
        self._numbers: dict[int, list[int]] = defaultdict(list)  # pieces of each region
        for number, piece in enumerate(self._pieces):
            self._numbers[piece.region].append(number)
        self._device = device
        self._copies_all = device is not None and block_bytes(self._regions) <= budget_bytes
        self._copies: dict[int, torch.Tensor] = {}
        self._next = 0  # the piece that is being written
        self._num_read = 0  # regions, the one that is being read included
        self._num_progressed = 0
        self._over = self._copied_all = self._released = False
        self._error: CheckpointError | None = None
        self._written: list[WrittenFile] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended, well or with an error."""
        return self._over

    @property
    def progress(self) -> int:
        """A number that grows as bytes are written; reading it does not touch the file system."""
        return self._num_progressed

    def cancel(self, why: str) -> None:
        """Count as failed from now on, unless all is written; the thread ends when it can."""
        with self._changed:
            if not self._over:
                self._error, self._over = CheckpointError(why), True
                self._changed.notify_all()

    def result(self) -> list[WrittenFile]:
        """Return what was written, when it is.

        Raises:
            CheckpointError: if a file could not be written.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over)
        if self._error is not None:
            raise self._error
        return self._written

    def release(self, limit_s: float) -> None:
        """Return when the values may be changed.

        If nothing reaches the disk for ``limit_s`` seconds the checkpoint is given up.
        """
        with self._changed:
            if self._released:
                return
            first = len(self._pieces) if self._copies_all else self._copy_last()
            progress = self.progress
            while not self._changed.wait_for(lambda: self._may_change_values(first), limit_s):
                if self.progress == progress:
                    self.cancel(
                        f"{self._folder}: no byte was written for {limit_s:.0f} s; the file system "
                        "hangs"
                    )
                progress = self.progress
            self._released = True

    def _may_change_values(self, first: int) -> bool:
        """Whether the values may be changed, of which those from piece ``first`` on are copied."""
        return self._over or self._copied_all or self._next >= first

    def _copy_last(self) -> int:
        """Copy the last pieces within the budget; return the number of the first copied one."""
        left, first = self._budget_bytes, len(self._pieces)
        while first > self._next + 1:
            piece = self._pieces[first - 1]
            if piece.num_bytes > left:
                break
            left -= piece.num_bytes
            first -= 1
            self._copies[first] = self._piece_values(piece).to("cpu", copy=True)
        return first

    def _copy_all(self, device: StagingDevice) -> None:
        """Let the device copy all pieces into blocks of pinned memory, and wait for that."""
        number, block = -1, torch.empty(0)
        for piece in self._pieces:
            if piece.block != number:
                number, block = piece.block, device.block()
            values = self._piece_values(piece)
            copy = block[piece.offset : piece.offset + piece.num_bytes].view(values.dtype)
            device.copy(values, to=copy)
            self._copies[len(self._copies)] = copy
            self._count_progress()
        device.wait()
        with self._changed:
            self._copied_all = True
            self._changed.notify_all()

    def _piece_values(self, piece: StagedPiece) -> torch.Tensor:
        return self._regions[piece.region].values().view(-1)[piece.start : piece.stop]

    def _run(self) -> None:
        device = self._device
        try:
            with nullcontext() if device is None else device.stream():
                if device is not None and self._copies_all:
                    self._copy_all(device)
                for file, regions in self._files.items():
                    self._written.append(
                        write_regions(file, regions, self._read, self._count_progress)
                    )
        except CheckpointError as error:
            self._error = self._error or error
        except Exception as error:  # a thread's error must reach the loop
            message = f"{self._folder} cannot be written: {error!r}"
            self._error = self._error or CheckpointError(message)
        finally:
            self._report_end(device)

    def _report_end(self, device: StagingDevice | None) -> None:
        """Tell that the thread is over, once the next save may have the blocks of this one."""
        try:
            with self._changed:
                self._copies.clear()
            if device is not None and self._copies_all:
                device.close()
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()

    def _count_progress(self) -> None:
        self._num_progressed += 1

    def _read(self, region: Region) -> Iterator[torch.Tensor]:
        """Yield the values of the next region: the copies of its pieces, or else what is there."""
        self._num_read += 1
        for number in self._numbers[self._num_read - 1]:
            if self._error is not None:  # given up: another save may write the same file
                raise self._error
            self._faults.write(number, self._copies.keys())
            with self._changed:
                copy = self._copies.pop(number, None)
            yield self._piece_values(self._pieces[number]) if copy is None else copy
            copy = None  # else it would stay in memory while the next one is written
            with self._changed:
                self._next = number + 1
                self._changed.notify_all()


# -- What the ranks tell rank 0 of one save, through the rendezvous store.
#
#     each other rank   its part is written, or has failed -> what it has written, or why not
#     rank 0            hears of all                       -> commits, or gives up
#
# These are messages of the threads that write: the main threads may be within a step that takes an
# hour, and a part that is on the disk waits for none of them.


_POLL_S = 0.05
T = TypeVar("T")


@dataclass(frozen=True)
class SaveReport:
    """The files that a rank has written, or why it could not."""

    files: tuple[WrittenFile, ...] = ()
    error: str | None = None


class SaveReports:
    """The reports of one save; ``name`` is that save's own, in the whole life of the store."""

    def __init__(self, comm: Comm, name: str) -> None:
        """Know the ranks; nothing is sent yet."""
        self._world, self._keys = comm.world, StoreKeys(comm.store, f"save/{name}")

    def send(self, report: SaveReport) -> None:
        """Tell rank 0 what another rank has done, once.

        Raises:
            CheckpointError: if rank 0 cannot be told.
        """
        rank = self._world.rank
        content = [[asdict(file) for file in report.files], report.error]

        def tell() -> None:
            self._keys.set(content, rank)
            self._keys.add(1)

        _with_store(tell, f"rank {rank} could not tell rank 0 that its part of a save is written")

    def collect(self, own: SaveReport, between: Callable[[], None]) -> list[SaveReport]:
        """Return the reports of all ranks, by rank, when all are there; for rank 0.

        ``between`` is called again and again while it waits, and may raise.

        Raises:
            CheckpointError: if the store is gone.
        """
        size = self._world.size
        lost = "rank 0 cannot learn whether the other ranks have written their parts of a save"
        while size > 1 and _with_store(lambda: self._keys.add(0), lost) < size - 1:
            between()
            time.sleep(_POLL_S)
        return [
            own,
            *(_with_store(partial(self._pop_report, rank), lost) for rank in range(1, size)),
        ]

    def _pop_report(self, rank: int) -> SaveReport:
        files, error = self._keys.get(rank)
        self._keys.delete(rank)
        if rank == self._world.size - 1:
            self._keys.delete()
        return SaveReport(tuple(WrittenFile(**file) for file in files), error)


def _with_store(work: Callable[[], T], lost: str) -> T:
    try:
        return work()
    except RuntimeError as error:  # the store is gone with its rank
        raise CheckpointError(f"{lost}: {error}") from None
