"""Bytes of fake tensors that are alive, and what glibc's heap would take for them."""

import contextlib
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_tune.model import tiled_attention
from hpc_tune.plan.heap import Heap
from hpc_tune.world.affinity import ONEDNN_CACHE_SIZE

# oneDNN keeps as many kernels (``ONEDNN_PRIMITIVE_CACHE_CAPACITY``), each with the buffer that it
# was generated in, of 64 pages less what Xbyak takes (oneDNN 3, measured).
KERNEL_BYTES = 258376
# One of so many blocks leaves an object of as many bytes for the rest of the step: nodes of the
# graph, Python's dicts. Fitted to 22 runs (benchmarks/README.md).
LEAVING_BLOCKS, LEFT_BYTES = 4, 64
GROUPED_MM = torch.ops.aten._grouped_mm
MATMULS = {
    GROUPED_MM,
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten.baddbmm,
}


class TracedMemory(TorchDispatchMode):
    """Adds up the live storages of fake tensors, and gives 1 for their values.

    Where a model asks which values are not zero, as experts' own code does for those that are hit
    and then for the tokens of each, all experts are hit, and tokens are dealt evenly. Blocks below
    ``heap_block_bytes`` lie in a heap that never shrinks. ``peaks`` holds, for each part of a
    phase, the most bytes and the most with such a heap.
    """

    def __init__(self, heap_block_bytes: int, trims: bool = False) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peaks: dict[str, tuple[int, int]] = {}
        self._part = ""
        self._trims = trims
        self._heap_block_bytes, self._heap = heap_block_bytes, Heap(trims)
        self._in_heap = self._num_allocated = 0
        self._num_hit = 1  # experts, of the layer at hand
        self._sizes: dict[int, int] = {}
        self._blocks: dict[int, tuple[int, ...]] = {}  # addresses in the heap
        self._bytes_in_heap: dict[int, int] = {}  # of the blocks that are there themselves
        self._kernels: OrderedDict[tuple[Any, ...], tuple[int, ...]] = OrderedDict()

    def begin(self, trimmed: bool = False) -> None:
        """Begin a phase: its peaks count from here, and its blocks have a heap of their own.

        ``trimmed``: the heap of the last phase, whose free pages have been returned.
        """
        self._num_allocated = 0
        if trimmed:
            self._heap.trim()
        else:
            self._heap, self._in_heap, self._blocks = Heap(self._trims), 0, {}
            self._bytes_in_heap = {}
            self._kernels.clear()
        self.peaks = {}
        self.begin_part("")

    def begin_part(self, part: str) -> None:
        """Count what follows as another part of the phase."""
        self._part = part
        self._update_peak()

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
                self._resize(id(storage), num_bytes)

        with replaced_attribute(torch.UntypedStorage, "resize_", tracked), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with the local tensors
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1  # a step reads its loss and norm, to report them
        if func is torch.ops.aten.nonzero.default:
            return self._nonzero(args[0])
        self._note_matmul(func, args)
        if func is torch.ops.hpc_tune.document_attention.default:
            with self:  # its tiles are seen too
                return tiled_attention._tiled_forward(*args)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._track(leaf.untyped_storage())
        return result

    def _nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        if mask.dim() == 1:
            self._num_hit = mask.numel()
        count = mask.numel() if mask.dim() == 1 else -(-mask.numel() // self._num_hit)
        places = mask.new_empty((count, mask.dim()), dtype=torch.int64)
        self._track(places.untyped_storage())
        return places

    @property
    def kernel_bytes(self) -> int:
        """Bytes of the kernels that oneDNN keeps."""
        return len(self._kernels) * KERNEL_BYTES

    def _note_matmul(self, func: Any, args: Any) -> None:
        """Make the kernel of a product in 16 bits that oneDNN has not met, or has forgotten.

        One that is grouped has a kernel for each number of rows of an expert, which differ from
        layer to layer and from step to step: it makes as many as are kept.
        """
        if func.overloadpacket not in MATMULS or args[0].element_size() != 2:
            return
        factors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        key = func.overloadpacket, *((f.shape, f.stride()) for f in factors)
        if func.overloadpacket is GROUPED_MM:
            for number in range(ONEDNN_CACHE_SIZE - len(self._kernels)):
                of_number = (*key, number)
                self._kernels[of_number] = self._heap.allocate(KERNEL_BYTES)
            return
        if key not in self._kernels:
            if len(self._kernels) == ONEDNN_CACHE_SIZE:
                self._heap.free(self._kernels.popitem(last=False)[1])
            self._kernels[key] = self._heap.allocate(KERNEL_BYTES)
        self._kernels.move_to_end(key)

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key)
        self._resize(key, storage.nbytes())

    def _resize(self, key: int, num_bytes: int) -> None:
        before = self._sizes[key]
        if num_bytes == before:
            return
        self._sizes[key] = num_bytes
        self.live_bytes += num_bytes - before
        if (block := self._blocks.pop(key, None)) is not None:
            self._heap.free(block)
            self._in_heap -= self._bytes_in_heap.pop(key, 0)
        if num_bytes > 0:
            self._allocate(key, num_bytes)
            self._num_allocated += 1
            if self._num_allocated % LEAVING_BLOCKS == 0:
                self._heap.leave(LEFT_BYTES)
        self._update_peak()

    def _allocate(self, key: int, num_bytes: int) -> None:
        if num_bytes < self._heap_block_bytes or self._heap.has_room(num_bytes):
            self._blocks[key] = self._heap.allocate(num_bytes)
            self._bytes_in_heap[key] = num_bytes
            self._in_heap += num_bytes
        else:
            self._blocks[key] = self._heap.allocate_objects()

    def _update_peak(self) -> None:
        heap = self.live_bytes - self._in_heap + self._heap.resident
        peak, heap_peak = self.peaks.get(self._part, (0, 0))
        self.peaks[self._part] = max(peak, self.live_bytes), max(heap_peak, heap)

    def _forget(self, key: int) -> None:
        self._resize(key, 0)
        del self._sizes[key]


@contextlib.contextmanager
def replaced_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object within a block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
