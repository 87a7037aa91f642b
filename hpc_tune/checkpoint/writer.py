"""Writes a rank's tensors while training continues, in bounded memory.

The values are read in place. The forward and backward passes of the next step do not change them,
so only the optimizer's update must wait: ``release`` copies what is not written yet, up to
``budget_bytes``, and waits for the rest.
"""

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

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
    ) -> None:
        """Start to write ``files``; their regions must stay as they are until ``release``."""
        self._files = dict(files)
        self._regions = [region for regions in self._files.values() for region in regions]
        self._budget_bytes, self._faults = budget_bytes, faults
        self._copies: dict[int, torch.Tensor] = {}
        self._next = 0  # the region that is being written
        self._num_written_pieces = 0
        self._over = self._released = False
        self._error: CheckpointError | None = None
        self._written: list[WrittenFile] = []
        self._changed = threading.Condition()
        self._stream: Any = None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._stream = torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether the thread has ended, well or with an error."""
        return self._over

    @property
    def progress(self) -> int:
        """A number that grows as bytes are written; reading it does not touch the file system."""
        return self._num_written_pieces

    def give_up(self, why: str) -> None:
        """Count as failed from now on, whatever the thread does."""
        self._error, self._over = CheckpointError(why), True

    def result(self) -> list[WrittenFile]:
        """Return what was written.

        Raises:
            CheckpointError: if a file could not be written.
        """
        assert self._over
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
            first = self._copy_last()
            progress = self.progress
            while not self._changed.wait_for(lambda: self._over or self._next >= first, limit_s):
                if self.progress == progress:
                    self.give_up(
                        f"{next(iter(self._files)).parent}: no byte was written for {limit_s:.0f} "
                        "s; the file system hangs"
                    )
                progress = self.progress
            self._released = True

    def _copy_last(self) -> int:
        """Copy the last regions within the budget; return the index of the first copied one."""
        left, first = self._budget_bytes, len(self._regions)
        while first > self._next + 1:
            values = self._regions[first - 1].values()
            if values.nbytes > left:
                break
            left -= values.nbytes
            first -= 1
            self._copies[first] = values.to("cpu", copy=True)
        return first

    def _run(self) -> None:
        index = 0
        try:
            with torch.cuda.stream(self._stream) if self._stream else nullcontext():
                for file, regions in self._files.items():
                    taken = [
                        replace(region, values=partial(self._take, index + n))
                        for n, region in enumerate(regions)
                    ]
                    index += len(regions)
                    done = partial(self._reach, index)
                    self._written.append(write_regions(file, taken, done, self._count))
        except CheckpointError as error:
            self._error = self._error or error
        except Exception as error:  # a thread's error must reach the loop
            self._error = self._error or CheckpointError(f"{file} cannot be written: {error!r}")
        finally:
            with self._changed:
                self._over = True
                self._copies.clear()
                self._changed.notify_all()

    def _count(self) -> None:
        self._num_written_pieces += 1

    def _reach(self, index: int) -> None:
        with self._changed:
            self._next = index
            self._changed.notify_all()

    def _take(self, index: int) -> torch.Tensor:
        self._reach(index)
        self._faults.write(index, self._copies.keys())
        with self._changed:
            copy = self._copies.pop(index, None)
        return self._regions[index].values() if copy is None else copy
