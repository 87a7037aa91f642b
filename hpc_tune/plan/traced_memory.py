"""Bytes of live fake tensors, and what glibc's heap would take for them."""

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

# -- How far glibc's heap grows for blocks that come and go, by the rules of its malloc (2.36).
#
#     free   -> kept for requests of the same size, or merged with free neighbors
#     malloc -> a kept block, the smallest hole that is large enough, or the end of the heap
#
# Nothing is returned to the kernel (``make_malloc_keep_blocks``), so a heap takes the size that it
# has ever reached. That is more than the live blocks, because torch requests aligned blocks: malloc
# looks for a larger hole, cuts slivers off both sides, and uses these for the small objects that
# come with each tensor. A large block thus does not fit into the hole that one of its size left.


BLOCK_ALIGNMENT = 64  # of torch's blocks on CPUs (c10/core/alignment.h)
# Small requests that come with each block, in bytes: torch's storage and tensor (96 and 176 in
# torch 2.13), and their small parts: vectors, shared pointers, nodes of the graph.
SMALL_OBJECT_BYTES = (96, 176, 32, 32, 48, 64, 80)
_MIN_BLOCK_BYTES, _HEADER_BYTES, _MALLOC_ALIGNMENT = 32, 8, 16
_MAX_CACHED_BYTES, _NUM_CACHED_PER_SIZE = 1040, 7  # the per-thread cache: sizes, and blocks of each
_MAX_FAST_BIN_BYTES, _MIN_LARGE_BYTES, _CONSOLIDATION_BYTES = 128, 1024, 1 << 16
_PAGE_BYTES, _UNTRIMMED_BYTES = 4096, 1 << 17  # of a page; free, and kept at the heap's end


class Heap:
    """A heap from address 0 to ``max_end``, the furthest end that it has had since ``trim``.

    Not modeled, as it makes no difference to large blocks: the order of equal holes, and that freed
    blocks are sorted into bins only on the next search. Blocks freed in a row are freed from the
    highest address down, which leaves the most holes: autocast drops its copies in the order of a
    hash table, which differs from run to run.
    """

    def __init__(self, trims: bool = False) -> None:
        """``trims``: the free end is returned to the kernel, as glibc does by default."""
        self.max_end = 0
        self._trims = trims
        self._end = 0  # everything after it is free
        self._pages, self._num_pages = bytearray(), 0  # 1 for each used page, and their number
        self._permanent_blocks: list[int] = []
        self._sizes: dict[int, int] = {}  # of blocks in use and kept blocks
        self._cached_blocks: dict[int, list[int]] = defaultdict(list)
        self._fast_bin_blocks: list[int] = []  # small free blocks that are merged later
        self._holes: dict[int, int] = {}  # start -> size
        self._hole_start_by_end: dict[int, int] = {}  # end -> start
        self._holes_by_size: list[tuple[int, int]] = []
        self._freed_blocks: list[tuple[int, ...]] = []  # since the last allocation

    def allocate(self, num_bytes: int) -> tuple[int, ...]:
        """Return the addresses of an aligned block and of the small objects that come with it."""
        self._process_freed_blocks()
        return self._allocate_aligned(num_bytes), *self.allocate_objects()

    def allocate_objects(self) -> tuple[int, ...]:
        """Return the addresses of the small objects only, of a block that lies outside the heap."""
        self._process_freed_blocks()
        return tuple(map(self._allocate_small, SMALL_OBJECT_BYTES))

    def _process_freed_blocks(self) -> None:
        for blocks in sorted(self._freed_blocks, reverse=True):
            for block in blocks:
                self._free_block(block)
        self._freed_blocks.clear()

    def allocate_permanent(self, num_bytes: int) -> None:
        """Allocate a small object that stays until ``trim``, so that its neighbors do not merge."""
        self._permanent_blocks.append(self._allocate_small(num_bytes))

    @property
    def resident_bytes(self) -> int:
        """Bytes of the pages that were used since the last ``trim``."""
        return min(self.max_end, self._num_pages * _PAGE_BYTES)

    def trim(self) -> None:
        """Free the permanent objects, and return all free pages to the kernel (``malloc_trim``)."""
        self._process_freed_blocks()
        for block in self._permanent_blocks:
            self._free_block(block)
        self._permanent_blocks.clear()
        self._join_fast_bins()
        self.max_end = self._end
        self._pages, self._num_pages = bytearray(), 0
        for block, size in self._sizes.items():
            self._mark_pages_used(block, size)

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a block fits without growing the heap; malloc checks this before mmap."""
        self._process_freed_blocks()
        self._join_fast_bins()
        largest = self._holes_by_size[-1][0] if self._holes_by_size else 0
        end_bytes = 0 if self._trims else self.max_end - self._end
        needed_bytes = _heap_block_size(num_bytes) + BLOCK_ALIGNMENT + _MIN_BLOCK_BYTES
        return max(largest, end_bytes) >= needed_bytes

    def _mark_pages_used(self, start: int, size: int) -> None:
        first, last = start // _PAGE_BYTES, (start + size - 1) // _PAGE_BYTES + 1
        if len(self._pages) < last:
            self._pages.extend(bytes(last - len(self._pages)))
        self._num_pages += last - first - self._pages.count(1, first, last)
        self._pages[first:last] = b"\1" * (last - first)

    def free(self, blocks: tuple[int, ...]) -> None:
        """Free what ``allocate`` returned."""
        self._freed_blocks.append(blocks)

    def _allocate_small(self, num_bytes: int) -> int:
        size = _heap_block_size(num_bytes)
        cached_blocks = self._cached_blocks[size]
        block = cached_blocks.pop() if cached_blocks else self._allocate_block(size)
        self._mark_pages_used(block, size)
        return block

    def _allocate_aligned(self, num_bytes: int) -> int:
        """Allocate as glibc's ``_int_memalign``: what lies before and after the block is freed."""
        size = _heap_block_size(num_bytes)
        block = self._allocate_block(size + BLOCK_ALIGNMENT + _MIN_BLOCK_BYTES)
        block_size = self._sizes[block]
        # The caller's part begins _MALLOC_ALIGNMENT bytes after the start of a block.
        if (padding := -(block + _MALLOC_ALIGNMENT) % BLOCK_ALIGNMENT) > 0:
            padding += BLOCK_ALIGNMENT if padding < _MIN_BLOCK_BYTES else 0
            self._sizes[block], block_size = padding, block_size - padding
            self._sizes[block + padding] = block_size
            self._free_block(block)
            block += padding
        if block_size > size + _MIN_BLOCK_BYTES:
            self._sizes[block], self._sizes[block + size] = size, block_size - size
            self._free_block(block + size)
        self._mark_pages_used(block, self._sizes[block])
        return block

    def _allocate_block(self, size: int) -> int:
        """Return a block of ``size`` or slightly more: from the smallest hole, or the end."""
        if size >= _MIN_LARGE_BYTES:
            self._join_fast_bins()
        index = bisect_left(self._holes_by_size, (size, -1))
        if index == len(self._holes_by_size) and self._fast_bin_blocks:
            self._join_fast_bins()
            index = bisect_left(self._holes_by_size, (size, -1))
        if index == len(self._holes_by_size):
            start, self._end = self._end, self._end + size
            self.max_end = max(self.max_end, self._end)
        else:
            start = self._holes_by_size[index][1]
            rest_size = self._remove_hole(start) - size
            if rest_size < _MIN_BLOCK_BYTES:
                size += rest_size
            else:
                self._add_hole(start + size, rest_size)
        self._sizes[start] = size
        return start

    def _free_block(self, block: int) -> None:
        size = self._sizes[block]
        cached_blocks = self._cached_blocks[size]
        if size <= _MAX_CACHED_BYTES and len(cached_blocks) < _NUM_CACHED_PER_SIZE:
            cached_blocks.append(block)
        elif size <= _MAX_FAST_BIN_BYTES:
            self._fast_bin_blocks.append(block)
        else:
            self._make_hole(block)
            if size > _CONSOLIDATION_BYTES:
                self._join_fast_bins()

    def _join_fast_bins(self) -> None:
        for block in self._fast_bin_blocks:
            self._make_hole(block)
        self._fast_bin_blocks.clear()

    def _make_hole(self, block: int) -> None:
        """Turn a block into a hole, merged with adjacent holes, or into part of the free end."""
        stop = block + self._sizes.pop(block)
        if stop in self._holes:
            stop += self._remove_hole(stop)
        if block in self._hole_start_by_end:
            block = self._hole_start_by_end[block]
            self._remove_hole(block)
        if stop == self._end:
            self._end = block
            if self._trims and block + _UNTRIMMED_BYTES < len(self._pages) * _PAGE_BYTES:
                first_free_page = -(-(block + _UNTRIMMED_BYTES) // _PAGE_BYTES)
                self._num_pages -= self._pages.count(1, first_free_page)
                del self._pages[first_free_page:]
        else:
            self._add_hole(block, stop - block)

    def _add_hole(self, start: int, size: int) -> None:
        self._holes[start], self._hole_start_by_end[start + size] = size, start
        insort(self._holes_by_size, (size, start))

    def _remove_hole(self, start: int) -> int:
        size = self._holes.pop(start)
        del self._hole_start_by_end[start + size]
        del self._holes_by_size[bisect_left(self._holes_by_size, (size, start))]
        return size


def _heap_block_size(num_bytes: int) -> int:
    num_units = -(-(num_bytes + _HEADER_BYTES) // _MALLOC_ALIGNMENT)
    return max(_MIN_BLOCK_BYTES, num_units * _MALLOC_ALIGNMENT)


# -- Live fake tensors.


# oneDNN caches ONEDNN_CACHE_SIZE kernels (``ONEDNN_PRIMITIVE_CACHE_CAPACITY``), each with the
# buffer it was generated in: 64 pages minus what Xbyak takes (oneDNN 3, measured).
ONEDNN_KERNEL_BYTES = 258376
# One in BLOCKS_PER_PERMANENT_OBJECT blocks leaves one of PERMANENT_OBJECT_BYTES until the end:
# nodes of the graph, Python's dicts. Fitted to 22 runs (benchmarks/README.md).
BLOCKS_PER_PERMANENT_OBJECT, PERMANENT_OBJECT_BYTES = 4, 64
GROUPED_MM = torch.ops.aten._grouped_mm
MATMULS = {
    GROUPED_MM,
    torch.ops.aten.mm,
    torch.ops.aten.addmm,
    torch.ops.aten.bmm,
    torch.ops.aten.baddbmm,
}


class TracedMemory(TorchDispatchMode):
    """Adds up the live storages of fake tensors; a value that is read from one is 1.

    Models call ``nonzero``: the code of experts, for the experts that are hit and then for the
    tokens of each. All experts are then hit, and tokens are spread evenly. Blocks below
    ``heap_block_bytes``, and larger ones that fit into its holes, lie in a heap, which shrinks only
    if it ``trims``. ``peaks``: by part of a phase, the most bytes, without and with its overhead.
    """

    def __init__(self, heap_block_bytes: int, trims: bool = False) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peaks: dict[str, tuple[int, int]] = {}
        self._part = ""
        self._trims = trims
        self._heap_block_bytes, self._heap = heap_block_bytes, Heap(trims)
        self._total_heap_bytes = self._num_allocated = 0
        self._num_hit_experts = 1  # experts of the current layer
        self._sizes: dict[int, int] = {}
        self._blocks: dict[int, tuple[int, ...]] = {}  # addresses in the heap
        self._bytes_in_heap: dict[int, int] = {}  # of blocks that lie in the heap themselves
        self._kernels: OrderedDict[tuple[Any, ...], tuple[int, ...]] = OrderedDict()

    def begin_phase(self, is_trimmed: bool = False) -> None:
        """Begin a phase: its peaks count from here, and its blocks lie in a new heap.

        ``is_trimmed``: use the heap of the last phase, with its free pages returned, instead.
        """
        self._num_allocated = 0
        if is_trimmed:
            self._heap.trim()
        else:
            self._heap, self._total_heap_bytes, self._blocks = Heap(self._trims), 0, {}
            self._bytes_in_heap = {}
            self._kernels.clear()
        self.peaks = {}
        self.begin_part("")

    def begin_part(self, part: str) -> None:
        """Count what follows as part ``part`` of the phase."""
        self._part = part
        self._update_peak()

    @property
    def peak_bytes(self) -> int:
        """The most bytes since ``begin_phase``."""
        return max((peak for peak, _ in self.peaks.values()), default=0)

    @property
    def heap_peak_bytes(self) -> int:
        """The most bytes since ``begin_phase``, with the overhead of the heap."""
        return max((heap for _, heap in self.peaks.values()), default=0)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Track every fake tensor that is created, resized or freed in this context."""
        resize = torch.UntypedStorage.resize_

        # FSDP2 frees and refills gathered weights in this way, which is not dispatched.
        def resize_and_track(storage: torch.UntypedStorage, num_bytes: int) -> None:
            resize(storage, num_bytes)
            if id(storage) in self._sizes:
                self._resize(id(storage), num_bytes)

        with replace_attribute(torch.UntypedStorage, "resize_", resize_and_track), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it is dispatched again with the local tensors
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1  # a step reads its loss and norm, to report them
        if func is torch.ops.aten.nonzero.default:
            return self._fake_nonzero(args[0])
        self._allocate_matmul_kernel(func, args)
        if func is torch.ops.hpc_tune.document_attention.default:
            with self:  # tracks its tiles too
                return tiled_attention._tiled_forward(*args)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self._track(leaf.untyped_storage())
        return result

    def _fake_nonzero(self, mask: torch.Tensor) -> torch.Tensor:
        if mask.dim() == 1:
            self._num_hit_experts = mask.numel()
        count = mask.numel() if mask.dim() == 1 else -(-mask.numel() // self._num_hit_experts)
        indices = mask.new_empty((count, mask.dim()), dtype=torch.int64)
        self._track(indices.untyped_storage())
        return indices

    @property
    def kernel_bytes(self) -> int:
        """Bytes of the kernels that oneDNN caches."""
        return len(self._kernels) * ONEDNN_KERNEL_BYTES

    def _allocate_matmul_kernel(self, func: Any, args: Any) -> None:
        """Allocate the kernel that oneDNN generates for a 16-bit matmul that is not in its cache.

        A grouped matmul has a kernel for each number of rows of an expert, which differs from layer
        to layer and from step to step: it fills the cache.
        """
        if func.overloadpacket not in MATMULS or args[0].element_size() != 2:
            return
        factors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        key = func.overloadpacket, *((f.shape, f.stride()) for f in factors)
        if func.overloadpacket is GROUPED_MM:
            for number in range(ONEDNN_CACHE_SIZE - len(self._kernels)):
                number_key = (*key, number)
                self._kernels[number_key] = self._heap.allocate(ONEDNN_KERNEL_BYTES)
            return
        if key not in self._kernels:
            if len(self._kernels) == ONEDNN_CACHE_SIZE:
                self._heap.free(self._kernels.popitem(last=False)[1])
            self._kernels[key] = self._heap.allocate(ONEDNN_KERNEL_BYTES)
        self._kernels.move_to_end(key)

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._forget, key)
        self._resize(key, storage.nbytes())

    def _resize(self, key: int, num_bytes: int) -> None:
        old_bytes = self._sizes[key]
        if num_bytes == old_bytes:
            return
        self._sizes[key] = num_bytes
        self.live_bytes += num_bytes - old_bytes
        if (block := self._blocks.pop(key, None)) is not None:
            self._heap.free(block)
            self._total_heap_bytes -= self._bytes_in_heap.pop(key, 0)
        if num_bytes > 0:
            self._allocate(key, num_bytes)
            self._num_allocated += 1
            if self._num_allocated % BLOCKS_PER_PERMANENT_OBJECT == 0:
                self._heap.allocate_permanent(PERMANENT_OBJECT_BYTES)
        self._update_peak()

    def _allocate(self, key: int, num_bytes: int) -> None:
        if num_bytes < self._heap_block_bytes or self._heap.has_room(num_bytes):
            self._blocks[key] = self._heap.allocate(num_bytes)
            self._bytes_in_heap[key] = num_bytes
            self._total_heap_bytes += num_bytes
        else:
            self._blocks[key] = self._heap.allocate_objects()

    def _update_peak(self) -> None:
        heap_bytes = self.live_bytes - self._total_heap_bytes + self._heap.resident_bytes
        peak, heap_peak = self.peaks.get(self._part, (0, 0))
        self.peaks[self._part] = max(peak, self.live_bytes), max(heap_peak, heap_bytes)

    def _forget(self, key: int) -> None:
        self._resize(key, 0)
        del self._sizes[key]


@contextlib.contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object within a ``with`` block."""
    old_value = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old_value)


# -- Scratch memory of torch's variable-length attention in its backward pass, which its fake
# kernel does not show.
#
# Shapes: S tokens, H heads, N keys, K heads of keys and values, D values per head.


DOCUMENT_GAP_ROWS = 128  # rows that the kernel leaves free between two documents


@contextlib.contextmanager
def simulate_attention_scratch() -> Iterator[None]:
    """Let the fake kernel allocate and free as much as the real one does in its backward pass.

    It does so when the gradient of its result arrives: the three gradients, sums in fp32 for each
    head, and, if heads share keys, the gradients of keys and values for each head.
    """
    kernel: Any = torch_versions.varlen_attention

    @functools.wraps(kernel)
    def attend(query_SHD: Any, key_NKD: Any, value_NKD: Any, documents: Any, *options: Any) -> Any:
        out_SHD = kernel(query_SHD, key_NKD, value_NKD, documents, *options)
        if out_SHD.requires_grad:
            num_bytes = attention_scratch_bytes(
                query_SHD.shape, key_NKD.shape[:2], len(documents[0]) - 1
            )
            out_SHD.register_hook(lambda grad: _allocate_briefly(num_bytes, grad))
        return out_SHD

    with replace_attribute(torch_versions, "varlen_attention", attend):
        yield


def attention_scratch_bytes(
    shape_SHD: tuple[int, ...], shape_NK: tuple[int, ...], num_documents: int
) -> int:
    """Return the bytes that the backward pass takes for 16-bit inputs, its results included.

    In fp32: (D' + 1) x H for each of S + 128 x documents rows, where D' is D rounded up to a
    multiple of 32, above 128 of 64. In 16 bits, for N keys: D x (S x H + N x 2 K), and N x D x 2 H
    more if K < H.
    """
    tokens, heads, values = shape_SHD
    multiple = 32 if values <= 128 else 64
    padded_values = -(-values // multiple) * multiple
    sums = 4 * (padded_values + 1) * heads * (tokens + DOCUMENT_GAP_ROWS * num_documents)
    keys, key_heads = shape_NK
    extra_heads = 2 * heads if key_heads < heads else 0
    return sums + 2 * values * (tokens * heads + keys * (2 * key_heads + extra_heads))


def _allocate_briefly(num_bytes: int, grad: torch.Tensor) -> None:
    torch.empty(num_bytes, dtype=torch.uint8, device=grad.device)
