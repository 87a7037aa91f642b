"""What a heap reaches does not depend on what differs between two processes."""

import itertools

from hpc_tune.plan.traced_memory import Heap


def test_the_order_of_blocks_that_are_freed_together_makes_no_difference():
    reached = set()
    for order in itertools.permutations(range(4)):
        heap = Heap()
        pinned = [heap.allocate(500) for _ in range(6)]
        blocks = [heap.allocate(size) for size in (8192, 45056, 16384, 524288)]
        for block in pinned:
            heap.free(block)
        heap.allocate(64)
        for index in order:
            heap.free(blocks[index])
        for size in (45056, 524288, 16384, 8192, 500, 500, 45056, 16384):
            heap.allocate(size)
        reached.add(heap.max_end)
    assert len(reached) == 1, reached


def test_small_objects_that_stay_keep_holes_apart():
    """Blocks that are freed together are one hole, with room for a larger one, but for these."""

    def reach_of(leaves):
        heap, blocks = Heap(), []
        for _ in range(64):
            blocks.append(heap.allocate(1 << 18))
            if leaves:
                heap.allocate_permanent(64)
        for block in blocks:
            heap.free(block)
        heap.allocate(4 << 20)
        return heap.max_end

    assert reach_of(leaves=False) < 17 << 20
    assert reach_of(leaves=True) > 20 << 20


def test_a_hole_has_room_for_a_block_and_the_space_to_align_it():
    heap = Heap()
    block = heap.allocate(1 << 20)
    heap.allocate(1 << 10)
    assert not heap.has_room(1 << 10)
    heap.free(block)
    assert heap.has_room(1000 << 10)
    assert not heap.has_room(1 << 20)


def test_holes_are_returned_by_a_trim_alone_and_then_taken_again():
    heap = Heap(trims=True)
    blocks = [heap.allocate(1 << 19) for _ in range(8)]
    most = heap.resident_bytes
    assert 4 << 20 <= most < (4 << 20) + (1 << 14)
    for block in blocks[1::2]:
        heap.free(block)
    heap.allocate(64)
    assert heap.resident_bytes > most - (1 << 20)  # but for a free end
    heap.trim()
    assert 2 << 20 <= heap.resident_bytes < (2 << 20) + (1 << 16)
    heap.allocate(1 << 18)
    assert heap.resident_bytes > (2 << 20) + (1 << 18)
