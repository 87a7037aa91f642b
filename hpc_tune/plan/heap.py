"""How far glibc's heap reaches for blocks that come and go, by the rules of its malloc (2.36).

    freed -> kept for its own size, or joined with free neighbours
    asked -> one that was kept, the smallest hole that is large enough, or the end of the heap

Nothing is returned to the kernel (``keep_freed_blocks``), so a heap takes what it has ever reached.
That is more than the blocks that are alive, because torch asks for aligned blocks: malloc looks for
a larger hole, cuts slivers off both its sides, and keeps these for the small objects that come with
each tensor. A large block that is freed is thus no room for another one of its size.
"""

from bisect import bisect_left, insort
from collections import defaultdict

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
        self._end = 0  # behind it all is free
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
        return self._aligned(num_bytes), *self.allocate_objects()

    def allocate_objects(self) -> tuple[int, ...]:
        """Return the addresses of the small objects alone: of a block that lies elsewhere."""
        self._release()
        return tuple(map(self._small, OBJECTS))

    def _release(self) -> None:
        for blocks in sorted(self._freed, reverse=True):
            for block in blocks:
                self._free(block)
        self._freed.clear()

    def leave(self, num_bytes: int) -> None:
        """Allocate a small object that stays, so that its neighbours never become one hole."""
        self._left.append(self._small(num_bytes))

    @property
    def resident(self) -> int:
        """Bytes that it takes: of the pages that were used since it was trimmed."""
        return min(self.reach, self._num_pages * _PAGE)

    def trim(self) -> None:
        """Free what was left, and return all free pages to the kernel, as ``malloc_trim`` does."""
        self._release()
        for block in self._left:
            self._free(block)
        self._left.clear()
        self._join_fast()
        self.reach = self._end
        self._pages, self._num_pages = bytearray(), 0
        for block, size in self._sizes.items():
            self._touch(block, size)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a block fits without a longer heap: where malloc looks before it maps memory."""
        self._release()
        self._join_fast()
        largest = self._by_size[-1][0] if self._by_size else 0
        behind = 0 if self._trims else self.reach - self._end
        return max(largest, behind) >= _size_of(num_bytes) + ALIGNMENT + _LEAST

    def _touch(self, start: int, size: int) -> None:
        first, last = start // _PAGE, (start + size - 1) // _PAGE + 1
        if len(self._pages) < last:
            self._pages.extend(bytes(last - len(self._pages)))
        self._num_pages += last - first - self._pages.count(1, first, last)
        self._pages[first:last] = b"\1" * (last - first)

    def free(self, blocks: tuple[int, ...]) -> None:
        """Free what ``allocate`` returned."""
        self._freed.append(blocks)

    def _small(self, num_bytes: int) -> int:
        size = _size_of(num_bytes)
        kept = self._kept[size]
        block = kept.pop() if kept else self._take(size)
        self._touch(block, size)
        return block

    def _aligned(self, num_bytes: int) -> int:
        """As glibc's ``_int_memalign``: what lies before and behind the block is freed."""
        size = _size_of(num_bytes)
        block = self._take(size + ALIGNMENT + _LEAST)
        found = self._sizes[block]
        # The caller's part begins _GRAIN bytes behind the start of a block.
        if (before := -(block + _GRAIN) % ALIGNMENT) > 0:
            before += ALIGNMENT if before < _LEAST else 0
            self._sizes[block], found = before, found - before
            self._sizes[block + before] = found
            self._free(block)
            block += before
        if found > size + _LEAST:
            self._sizes[block], self._sizes[block + size] = size, found - size
            self._free(block + size)
        self._touch(block, self._sizes[block])
        return block

    def _take(self, size: int) -> int:
        """Return a block of ``size`` or a little more: of the smallest hole, or from the end."""
        if size >= _SMALL:
            self._join_fast()
        at = bisect_left(self._by_size, (size, -1))
        if at == len(self._by_size) and self._fast:
            self._join_fast()
            at = bisect_left(self._by_size, (size, -1))
        if at == len(self._by_size):
            start, self._end = self._end, self._end + size
            self.reach = max(self.reach, self._end)
        else:
            start = self._by_size[at][1]
            rest = self._unlink(start) - size
            if rest < _LEAST:
                size += rest
            else:
                self._link(start + size, rest)
        self._sizes[start] = size
        return start

    def _free(self, block: int) -> None:
        size = self._sizes[block]
        kept = self._kept[size]
        if size <= _MAX_KEPT and len(kept) < _NUM_KEPT:
            kept.append(block)
        elif size <= _FAST:
            self._fast.append(block)
        else:
            self._join(block)
            if size > _JOINING:
                self._join_fast()

    def _join_fast(self) -> None:
        for block in self._fast:
            self._join(block)
        self._fast.clear()

    def _join(self, block: int) -> None:
        """Make a block a hole, joined with the holes beside it, or part of the free end."""
        stop = block + self._sizes.pop(block)
        if stop in self._holes:
            stop += self._unlink(stop)
        if block in self._starts:
            block = self._starts[block]
            self._unlink(block)
        if stop == self._end:
            self._end = block
            if self._trims and block + _UNTRIMMED < len(self._pages) * _PAGE:
                gone = -(-(block + _UNTRIMMED) // _PAGE)
                self._num_pages -= self._pages.count(1, gone)
                del self._pages[gone:]
        else:
            self._link(block, stop - block)

    def _link(self, start: int, size: int) -> None:
        self._holes[start], self._starts[start + size] = size, start
        insort(self._by_size, (size, start))

    def _unlink(self, start: int) -> int:
        size = self._holes.pop(start)
        del self._starts[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        return size


def _size_of(num_bytes: int) -> int:
    return max(_LEAST, -(-(num_bytes + _HEADER) // _GRAIN) * _GRAIN)
