"""What a heap reaches does not depend on what differs between two processes."""

import itertools

from hpc_tune.plan.heap import Heap


def test_the_order_of_blocks_that_are_freed_together_makes_no_difference():
    sizes = (8192, 45056, 16384, 524288)
    reached = set()
    for order in itertools.permutations(range(len(sizes))):
        heap = Heap()
        blocks = [heap.allocate(size) for size in sizes]
        for index in order:
            heap.free(blocks[index])
        for size in (45056, 524288, 520000, 8192):
            heap.allocate(size)
        reached.add(heap.reach)
    assert len(reached) == 1
