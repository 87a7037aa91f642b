"""Bytes of fake tensors that are alive, and what glibc's heap would take for them."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# glibc keeps freed blocks below a size (see ``return_freed_blocks``) and fragments: torch asks for
# aligned blocks, and the slivers cut off them keep neighbours apart. What that heap takes is the
# most that such blocks held times this (measured, glibc 2.36; without its per-thread cache of small
# blocks 1.2).
HEAP_FACTOR_ADAPTERS, HEAP_FACTOR_FULL, HEAP_FACTOR_EVALUATION = 1.85, 1.45, 3.0


class TracedMemory(TorchDispatchMode):
    """Adds up the live storages of fake tensors, and gives 1 for their values.

    Blocks below ``heap_block_bytes`` lie in a heap that never shrinks and is larger by a factor.
    ``peaks`` holds, for each part of a phase, the most bytes and the most with such a heap.
    """

    def __init__(self, heap_block_bytes: int) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peaks: dict[str, tuple[int, int]] = {}
        self._part = ""
        self._heap_block_bytes, self._heap_factor = heap_block_bytes, 1.0
        self._in_heap = self._in_heap_before = self._most_in_heap = 0
        self._sizes: dict[int, int] = {}

    def begin(self, heap_factor: float) -> None:
        """Begin a phase: its peaks count from here, and what is there already is not fragmented."""
        self._heap_factor, self._in_heap_before = heap_factor, self._in_heap
        self._most_in_heap = 0
        self.peaks = {}
        self.begin_part("")

    def begin_part(self, part: str) -> None:
        """Count what follows as another part of the phase."""
        self._part = part
        self._count()

    @property
    def peak_bytes(self) -> int:
        """The most bytes since ``begin``."""
        return max((peak for peak, _ in self.peaks.values()), default=0)

    @property
    def heap_peak_bytes(self) -> int:
        """The most bytes since ``begin`` with what the heap takes."""
        return max((heap for _, heap in self.peaks.values()), default=0)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """See every fake tensor that is made, resized and freed in this context."""
        resize = torch.UntypedStorage.resize_

        # FSDP2 frees and refills gathered weights in this way, which no dispatch sees.
        def tracked(storage: torch.UntypedStorage, num_bytes: int) -> None:
            resize(storage, num_bytes)
            if id(storage) in self._sizes:
                self._change(id(storage), num_bytes)

        with replaced(torch.UntypedStorage, "resize_", tracked), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with the local tensors
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1  # a step reads its loss and norm, to report them
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key)
        self._change(key, storage.nbytes())

    def _change(self, key: int, num_bytes: int) -> None:
        before = self._sizes[key]
        self._sizes[key] = num_bytes
        self.live_bytes += num_bytes - before
        self._in_heap += self._heap_part(num_bytes) - self._heap_part(before)
        self._count()

    def _count(self) -> None:
        new_in_heap = self._in_heap - self._in_heap_before
        self._most_in_heap = max(self._most_in_heap, new_in_heap)
        heap = self.live_bytes - new_in_heap + int(self._heap_factor * self._most_in_heap)
        peak, heap_peak = self.peaks.get(self._part, (0, 0))
        self.peaks[self._part] = max(peak, self.live_bytes), max(heap_peak, heap)

    def _heap_part(self, num_bytes: int) -> int:
        return num_bytes if num_bytes < self._heap_block_bytes else 0

    def _forget(self, key: int) -> None:
        self._change(key, 0)
        del self._sizes[key]


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object within a block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
