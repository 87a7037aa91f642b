"""Bytes of fake tensors that are alive, and what glibc's heap would take for them."""

import contextlib
import functools
import weakref
from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_tune import torch_versions
from hpc_tune.model import tiled_attention
from hpc_tune.world.affinity import ONEDNN_CACHE_SIZE

# -- How far glibc's heap reaches for blocks that come and go, by the rules of its malloc (2.36).
#
#     freed -> kept for its own size, or joined with free neighbours
#     asked -> one that was kept, the smallest hole that is large enough, or the end of the heap
#
# Nothing is returned to the kernel (``keep_freed_blocks``), so a heap takes what it has ever
# reached. That is more than the blocks that are alive, because torch asks for aligned blocks:
# malloc looks for a larger hole, cuts slivers off both its sides, and keeps these for the small
# objects that come with each tensor. A large block that is freed is thus no room for another one of
# its size.


ALIGNMENT = 64  # of torch's blocks on CPUs (c10/core/alignment.h)
# What malloc is asked for with each block, in bytes: torch's storage and tensor (96 and 176 in
# torch 2.13), and their small parts: vectors, shared pointers, nodes of the graph.
OBJECTS = (96, 176, 32, 32, 48, 64, 80)
_LEAST, _HEADER, _GRAIN = 32, 8, 16
_MAX_KEPT, _NUM_KEPT = 1040, 7  # the per-thread cache: sizes, and blocks of each
_FAST, _SMALL, _JOINING = 128, 1024, 1 << 16
_PAGE, _UNTRIMMED = 4096, 1 << 17  # bytes, and so many free ones at the end


class Heap:
    """A heap that begins at address 0 and only grows; ``reach`` is its end.

    Left out is what makes no difference to large blocks: the order of equal holes, and that freed
    blocks are sorted into bins only when one is looked for. Blocks that are freed one after another
    are freed from the highest address down, which leaves the most holes: autocast drops its copies
    in the order of a hash table, which is another one each time.
    """

    def __init__(self, trims: bool = False) -> None:
        """``trims``: its free end is returned to the kernel, as glibc does unless it is told."""
        self.reach = 0
        self._trims = trims
        self._end = 0  # all after it is free
        self._pages, self._num_pages = bytearray(), 0  # 1 for each that is used, and their number
        self._left: list[int] = []
        self._sizes: dict[int, int] = {}  # of blocks in use, and of those that are kept
        self._kept: dict[int, list[int]] = defaultdict(list)
        self._fast: list[int] = []  # small blocks that are joined later
        self._holes: dict[int, int] = {}  # start -> size
        self._starts: dict[int, int] = {}  # end -> start
        self._by_size: list[tuple[int, int]] = []
        self._freed: list[tuple[int, ...]] = []  # since the last allocation

    def allocate(self, num_bytes: int) -> tuple[int, ...]:
        """Return the addresses of an aligned block and of the small objects that come with it."""
        self._release()
        return self._allocate_aligned(num_bytes), *self.allocate_objects()

    def allocate_objects(self) -> tuple[int, ...]:
        """Return the addresses of the small objects alone: of a block that lies elsewhere."""
        self._release()
        return tuple(map(self._allocate_small, OBJECTS))

    def _release(self) -> None:
        for blocks in sorted(self._freed, reverse=True):
            for block in blocks:
                self._free_block(block)
        self._freed.clear()

    def allocate_permanent(self, num_bytes: int) -> None:
        """Allocate a small object that stays, so that its neighbours never become one hole."""
        self._left.append(self._allocate_small(num_bytes))

    @property
    def resident(self) -> int:
        """Bytes that it takes: of the pages that were used since it was trimmed."""
        return min(self.reach, self._num_pages * _PAGE)

    def trim(self) -> None:
        """Free what was left, and return all free pages to the kernel, as ``malloc_trim`` does."""
        self._release()
        for block in self._left:
            self._free_block(block)
        self._left.clear()
        self._join_fast_bins()
        self.reach = self._end
        self._pages, self._num_pages = bytearray(), 0
        for block, size in self._sizes.items():
            self._mark_pages_used(block, size)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a block fits without a longer heap: where malloc looks before it maps memory."""
        self._release()
        self._join_fast_bins()
        largest = self._by_size[-1][0] if self._by_size else 0
        behind = 0 if self._trims else self.reach - self._end
        return max(largest, behind) >= _size_of(num_bytes) + ALIGNMENT + _LEAST

    def _mark_pages_used(self, start: int, size: int) -> None:
        first, last = start // _PAGE, (start + size - 1) // _PAGE + 1
        if len(self._pages) < last:
            self._pages.extend(bytes(last - len(self._pages)))
        self._num_pages += last - first - self._pages.count(1, first, last)
        self._pages[first:last] = b"\1" * (last - first)

    def free(self, blocks: tuple[int, ...]) -> None:
        """Free what ``allocate`` returned."""
        self._freed.append(blocks)

    def _allocate_small(self, num_bytes: int) -> int:
        size = _size_of(num_bytes)
        kept = self._kept[size]
        block = kept.pop() if kept else self._allocate_block(size)
        self._mark_pages_used(block, size)
        return block

    def _allocate_aligned(self, num_bytes: int) -> int:
        """As glibc's ``_int_memalign``: what lies before and after the block is freed."""
        size = _size_of(num_bytes)
        block = self._allocate_block(size + ALIGNMENT + _LEAST)
        found = self._sizes[block]
        # The caller's part begins _GRAIN bytes after the start of a block.
        if (before := -(block + _GRAIN) % ALIGNMENT) > 0:
            before += ALIGNMENT if before < _LEAST else 0
            self._sizes[block], found = before, found - before
            self._sizes[block + before] = found
            self._free_block(block)
            block += before
        if found > size + _LEAST:
            self._sizes[block], self._sizes[block + size] = size, found - size
            self._free_block(block + size)
        self._mark_pages_used(block, self._sizes[block])
        return block

    def _allocate_block(self, size: int) -> int:
        """Return a block of ``size`` or a little more: of the smallest hole, or from the end."""
        if size >= _SMALL:
            self._join_fast_bins()
        at = bisect_left(self._by_size, (size, -1))
        if at == len(self._by_size) and self._fast:
            self._join_fast_bins()
            at = bisect_left(self._by_size, (size, -1))
        if at == len(self._by_size):
            start, self._end = self._end, self._end + size
            self.reach = max(self.reach, self._end)
        else:
            start = self._by_size[at][1]
            rest = self._remove_hole(start) - size
            if rest < _LEAST:
                size += rest
            else:
                self._add_hole(start + size, rest)
        self._sizes[start] = size
        return start

    def _free_block(self, block: int) -> None:
        size = self._sizes[block]
        kept = self._kept[size]
        if size <= _MAX_KEPT and len(kept) < _NUM_KEPT:
            kept.append(block)
        elif size <= _FAST:
            self._fast.append(block)
        else:
            self._make_hole(block)
            if size > _JOINING:
                self._join_fast_bins()

    def _join_fast_bins(self) -> None:
        for block in self._fast:
            self._make_hole(block)
        self._fast.clear()

    def _make_hole(self, block: int) -> None:
        """Make a block a hole, joined with the holes beside it, or part of the free end."""
        stop = block + self._sizes.pop(block)
        if stop in self._holes:
            stop += self._remove_hole(stop)
        if block in self._starts:
            block = self._starts[block]
            self._remove_hole(block)
        if stop == self._end:
            self._end = block
            if self._trims and block + _UNTRIMMED < len(self._pages) * _PAGE:
                gone = -(-(block + _UNTRIMMED) // _PAGE)
                self._num_pages -= self._pages.count(1, gone)
                del self._pages[gone:]
        else:
            self._add_hole(block, stop - block)

    def _add_hole(self, start: int, size: int) -> None:
        self._holes[start], self._starts[start + size] = size, start
        insort(self._by_size, (size, start))

    def _remove_hole(self, start: int) -> int:
        size = self._holes.pop(start)
        del self._starts[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        return size


def _size_of(num_bytes: int) -> int:
    return max(_LEAST, -(-(num_bytes + _HEADER) // _GRAIN) * _GRAIN)


# -- Fake tensors that are alive.


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
    and then for the tokens of each, all experts are hit, and tokens are spread evenly. Blocks below
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
                self._heap.allocate_permanent(LEFT_BYTES)
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


# -- What torch's variable-length attention takes in its backward pass: its fake does not show it.
#
# Shapes: S tokens, H heads, K heads of keys and values, D values per head, N documents.


BLOCK = 128  # rows that the kernel leaves free between two documents


@contextlib.contextmanager
def simulating_scratch() -> Iterator[None]:
    """Let the fake kernel take, and free, as much memory as the real one in its backward pass.

    That is when the gradient of its result arrives: the three gradients, sums in fp32 for each
    head, and where heads share keys the gradients of keys and values of each.
    """
    kernel: Any = torch_versions.varlen_attention

    @functools.wraps(kernel)
    def attend(query_SHD: Any, key_SKD: Any, value_SKD: Any, documents: Any, *more: Any) -> Any:
        out_SHD = kernel(query_SHD, key_SKD, value_SKD, documents, *more)
        if out_SHD.requires_grad:
            num_bytes = scratch_bytes(query_SHD.shape, key_SKD.shape[:2], len(documents[0]) - 1)
            out_SHD.register_hook(lambda grad: _allocate_briefly(num_bytes, grad))
        return out_SHD

    with replaced_attribute(torch_versions, "varlen_attention", attend):
        yield


def scratch_bytes(shape_SHD: tuple[int, ...], shape_NK: tuple[int, ...], num_documents: int) -> int:
    """Return what the backward pass takes of 16-bit values, with the gradients that it returns.

    In fp32: (D' + 1) x H for each of S + 128 N rows, D' being D rounded up to 32s, above 128 to
    64s. In 16 bits: D x (S x H + N x 2 K), and N x D x 2 H more where K < H.
    """
    tokens, heads, values = shape_SHD
    multiple = 32 if values <= 128 else 64
    rounded = -(-values // multiple) * multiple
    sums = 4 * (rounded + 1) * heads * (tokens + BLOCK * num_documents)
    keys, groups = shape_NK
    each_head = 2 * heads if groups < heads else 0
    return sums + 2 * values * (tokens * heads + keys * (2 * groups + each_head))


def _allocate_briefly(num_bytes: int, grad: torch.Tensor) -> None:
    torch.empty(num_bytes, dtype=torch.uint8, device=grad.device)
