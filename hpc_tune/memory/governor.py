"""Watches host and device memory from a thread: no collectives, no waiting for the device.

It samples ten times per second and keeps the worst of the interval, so that a peak between two
steps is seen.
"""

import threading
from dataclasses import dataclass

import torch

from hpc_tune.memory.host import HostLimit, find_limit, used_bytes

PERIOD_S = 0.1


@dataclass(frozen=True)
class MemorySample:
    """Bytes in use and their limits: of the node's host memory, and of this rank's GPU if any."""

    host_bytes: int
    host_limit_bytes: int
    device_bytes: int | None
    device_limit_bytes: int | None


class Governor:
    """Samples memory in the background between ``start`` and ``close``."""

    def __init__(self, host_limit: int | None, device: torch.device, enabled: bool = True) -> None:
        """Look up the limits. ``host_limit`` (bytes) can lower the machine's own."""
        self._device, self._enabled = device, enabled
        self.limit: HostLimit = find_limit(host_limit)
        self._worst_host = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory governor", daemon=True)

    def start(self) -> None:
        """Begin sampling."""
        if self._enabled:
            self._thread.start()

    def worst(self) -> MemorySample | None:
        """Return the worst sample since the last call; None when switched off."""
        if not self._enabled:
            return None
        host, self._worst_host = max(self._worst_host, used_bytes(self.limit)), 0
        device = device_limit = None
        if self._device.type == "cuda":
            device = torch.cuda.max_memory_reserved(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            device_limit = torch.cuda.get_device_properties(self._device).total_memory
        return MemorySample(host, self.limit.num_bytes, device, device_limit)

    def device_utilization(self) -> float | None:
        """Return the share of the last sampling period in which the GPU worked, 0 to 1.

        None without a GPU, or where the driver's management library is not installed.
        """
        if not self._enabled or self._device.type != "cuda":
            return None
        try:
            return torch.cuda.utilization(self._device) / 100
        except (ModuleNotFoundError, RuntimeError):
            return None

    def close(self) -> None:
        """Stop sampling."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self._worst_host = max(self._worst_host, used_bytes(self.limit))
