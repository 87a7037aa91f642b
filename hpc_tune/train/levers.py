"""What the governor can do about memory: a lever for each action, on every rank alike."""

import os
from pathlib import Path

from hpc_tune.data.loader import Loader
from hpc_tune.memory.device import give_back_cache
from hpc_tune.memory.host import own_bytes, trim_heap
from hpc_tune.memory.policy import Action, Lever
from hpc_tune.units import format_bytes


def loader_levers(loader: Loader, data_file: Path) -> dict[Action, Lever]:
    """Return the levers of a loader that reads ``data_file`` and has its whole micro-batches."""
    micro_size = loader.micro_size

    def trim(_: int) -> str:
        before = own_bytes()
        trim_heap()
        give_back_cache()
        _drop_page_cache(data_file)
        return f"{format_bytes(max(0, before - own_bytes()))} given back by rank 0"

    def shrink_buffers(times: int) -> str:
        loader.set_prefetch(0 if times else loader.prefetch_bytes)
        return f"prefetching {'disabled' if times else 'enabled'}"

    def split_micro_batches(times: int) -> str:
        rows = max(1, micro_size >> times)
        loader.set_micro_size(rows)
        return f"micro-batches of {rows} rows"

    return {
        Action.TRIM: Lever(trim),
        Action.SHRINK_BUFFERS: Lever(shrink_buffers),
        Action.SPLIT_MICRO_BATCHES: Lever(split_micro_batches, most=micro_size.bit_length() - 1),
    }


def _drop_page_cache(file: Path) -> None:
    """Drop the page cache of a file that is read again only in the next epoch."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
