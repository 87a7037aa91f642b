"""Garbage collection in step with all ranks.

Python collects when a process has made enough objects: each rank at another time, while the others
wait for it in their next collective. Here all ranks do at the boundary at which one of them has
made many.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_MAX_OBJECTS = 100_000  # some 10 MB; selective recompute leaves a hundred for each block's pass
_FORCED_OBJECTS = 10 * _MAX_OBJECTS  # a rank alone collects them, within a step or an evaluation


@contextmanager
def defer_collection() -> Iterator[None]:
    """Leave garbage in a block to those who ask ``is_collection_due``."""
    gc.collect()
    before = gc.get_threshold()
    gc.set_threshold(_FORCED_OBJECTS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def is_collection_due() -> bool:
    """Whether many more objects were made than freed since the last collection."""
    return gc.get_count()[0] > _MAX_OBJECTS
