"""Writes a rank's tensors while training continues, in bounded memory.

The values are read in place. The forward and backward passes of the next step do not change them,
so only the optimizer's update must wait: ``release`` copies what is not written yet, up to
``budget_bytes``, and waits for the rest.

From a device all is copied first if ``budget_bytes`` allow it, by the device itself, and the update
waits for nothing but that.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from hpc_tune.checkpoint.staging import StagedPiece, StagingDevice, block_bytes, cut_pieces
from hpc_tune.errors import CheckpointError
from hpc_tune.faults import NO_FAULTS, Faults
from hpc_tune.model.regions import Region, WrittenFile, write_regions


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
    def over(self) -> bool:
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
            while not self._changed.wait_for(lambda: self._may_change(first), limit_s):
                if self.progress == progress:
                    self.cancel(
                        f"{self._folder}: no byte was written for {limit_s:.0f} s; the file system "
                        "hangs"
                    )
                progress = self.progress
            self._released = True

    def _may_change(self, first: int) -> bool:
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
            self._copies[first] = self._values(piece).to("cpu", copy=True)
        return first

    def _copy_all(self, device: StagingDevice) -> None:
        """Let the device copy all pieces into blocks of pinned memory, and wait for that."""
        number, block = -1, torch.empty(0)
        for piece in self._pieces:
            if piece.block != number:
                number, block = piece.block, device.block()
            values = self._values(piece)
            copy = block[piece.offset : piece.offset + piece.num_bytes].view(values.dtype)
            device.copy(values, to=copy)
            self._copies[len(self._copies)] = copy
            self._count_progress()
        device.wait()
        with self._changed:
            self._copied_all = True
            self._changed.notify_all()

    def _values(self, piece: StagedPiece) -> torch.Tensor:
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
            self._end(device)

    def _end(self, device: StagingDevice | None) -> None:
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
            yield self._values(self._pieces[number]) if copy is None else copy
            copy = None  # else it would stay in memory while the next one is written
            with self._changed:
                self._next = number + 1
                self._changed.notify_all()
