"""A GPU's memory as the driver and the allocator count it, without synchronizing the device."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hpc_tune.errors import first_line
from hpc_tune.log import log

_DEVICE_ERROR_KEYWORDS = ("cuda", "hip error", "cublas", "hipblas")


@dataclass(frozen=True)
class DeviceSample:
    """Bytes of one device since the last sample.

    ``used_bytes`` is the peak of tensors plus ``others_bytes``: what this process's allocator does
    not hold (the driver's context, libraries, other processes). ``allocated_bytes``: tensors now.
    ``reserved_bytes``: the most that the allocator held, with cache and fragmentation. Since the
    process began, ``retries`` times the allocator freed its cache and tried an allocation again,
    and ``ooms`` allocations failed.
    """

    used_bytes: int
    limit_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    others_bytes: int
    retries: int
    ooms: int


class DeviceMemory(Protocol):
    """The memory of the device that a rank computes on, if that is not the host's."""

    def sample(self) -> DeviceSample:
        """Return the peak since the last call, and begin the next interval."""

    def utilization(self) -> float | None:
        """Return the busy share of the last sampling period, 0 to 1, if known."""


class GpuMemory:
    """A GPU of torch.cuda, from NVIDIA or AMD."""

    def __init__(self, device: torch.device) -> None:
        """Ask about ``device``."""
        self._device, self._has_utilization = device, True

    def sample(self) -> DeviceSample:
        """See ``DeviceMemory``."""
        device = self._device
        stats: dict[str, Any] = torch.cuda.memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
        other_bytes = max(0, total - free - stats["reserved_bytes.all.current"])
        share = torch.cuda.get_per_process_memory_fraction(device)
        torch.cuda.reset_peak_memory_stats(device)
        return DeviceSample(
            stats["allocated_bytes.all.peak"] + other_bytes,
            min(total, int(share * total) + other_bytes),
            stats["allocated_bytes.all.current"],
            stats["reserved_bytes.all.peak"],
            other_bytes,
            stats["num_alloc_retries"],
            stats["num_ooms"],
        )

    def utilization(self) -> float | None:
        """See ``DeviceMemory``; None for good once the driver's management library fails.

        It does for MIG instances, for vGPUs, at some sites, and without its Python package.
        """
        if not self._has_utilization:
            return None
        try:
            return float(torch.cuda.utilization(self._device)) / 100
        except Exception as error:  # noqa: BLE001 - NVMLError and AmdSmiException are no RuntimeError
            self._has_utilization = False
            log.info("metrics have no device_util: %s", first_line(error))
            return None


def find_device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a GPU; None for a CPU, which uses host memory."""
    return GpuMemory(device) if device.type == "cuda" else None


def empty_caches() -> None:
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
        "allocate memory" in text or "out of memory" in text or "blas_status_alloc_failed" in text
    )


def is_device_oom(error: BaseException) -> bool:
    """Whether an allocation failed on a device, in the allocator or in a library."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(
        word in text for word in _DEVICE_ERROR_KEYWORDS
    )


def describe_failed_allocation(error: BaseException) -> str:
    """Return which allocation failed: the first two sentences of torch's long line."""
    return ". ".join(first_line(error).rstrip(".").split(". ")[:2])
