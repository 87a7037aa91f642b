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


class Heap:
    """A heap that begins at address 0 and only grows; ``reach`` is its end.

    Left out is what makes no difference to large blocks: the order of equal holes, and that freed
    blocks are sorted into bins only when one is looked for. Blocks that are freed one after another
    are freed from the highest address down, which leaves the most holes: autocast drops its copies
    in the order of a hash table, which is another one each time.
    """

    def __init__(self) -> None:
        self.reach = 0
        self._end = 0  # behind it all is free
        self._sizes: dict[int, int] = {}  # of blocks in use, and of those that are kept
        self._kept: dict[int, list[int]] = defaultdict(list)
        self._fast: list[int] = []  # small blocks that are joined later
        self._holes: dict[int, int] = {}  # start -> size
        self._starts: dict[int, int] = {}  # end -> start
        self._by_size: list[tuple[int, int]] = []
        self._freed: list[tuple[int, ...]] = []  # since the last allocation

    def allocate(self, num_bytes: int) -> tuple[int, ...]:
        """Return the addresses of an aligned block and of the small objects that come with it."""
        for blocks in sorted(self._freed, reverse=True):
            for block in blocks:
                self._free(block)
        self._freed.clear()
        return self._aligned(num_bytes), *map(self._small, OBJECTS)

    def leave(self, num_bytes: int) -> None:
        """Allocate a small object that stays, so that its neighbours never become one hole."""
        self._small(num_bytes)

    def free(self, blocks: tuple[int, ...]) -> None:
        """Free what ``allocate`` returned."""
        self._freed.append(blocks)

    def _small(self, num_bytes: int) -> int:
        size = _size_of(num_bytes)
        kept = self._kept[size]
        return kept.pop() if kept else self._take(size)

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
