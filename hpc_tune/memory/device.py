"""A GPU's memory as the driver and the allocator count it, without synchronising the device."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class DeviceSample:
    """Bytes of one GPU since the last sample.

    ``used_bytes`` is the peak of tensors plus what this process's allocator does not hold (the
    driver's context, libraries, other processes). ``reserved_bytes`` is what the allocator holds:
    the difference to its tensors is cache and fragmentation. ``retries`` counts allocations that
    succeeded only after the allocator had freed its cache.
    """

    used_bytes: int
    limit_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    others_bytes: int
    retries: int


def sample_device(device: torch.device) -> DeviceSample:
    """Return the peak since the last call, and begin the next interval."""
    stats: dict[str, Any] = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = stats["reserved_bytes.all.current"]
    others = max(0, total - free - reserved)
    peak = stats["allocated_bytes.all.peak"]
    torch.cuda.reset_peak_memory_stats(device)
    return DeviceSample(
        peak + others,
        total,
        stats["allocated_bytes.all.current"],
        stats["reserved_bytes.all.peak"],
        others,
        stats["num_alloc_retries"],
    )


def give_back_cache() -> None:
    """Free the allocators' unused blocks, of the device and of pinned host memory."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on the host or on a device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and (
        "allocate memory" in text or "out of memory" in text
    )
