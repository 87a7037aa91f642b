"""Samples host and device memory in a thread, without collectives or device synchronization.

    every 0.1 s   host bytes -> peak of the interval; if the limit is about to be reached -> leave
    every step    ``level`` of host and device, which the ranks agree on and act upon (policy.py)

The thread samples faster where usage is near the limit and higher than in any step before, and it
adjusts RLIMIT_DATA, so that an allocation fails instead of the kernel killing the process.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from hpc_tune.faults import NO_FAULTS, Faults
from hpc_tune.memory.device import DeviceMemory, DeviceSample
from hpc_tune.memory.host import (
    HostLimit,
    HostUsage,
    PrivateMemoryLimit,
    find_host_limit,
    memory_pressure,
    own_bytes,
    shm_bytes,
    swapped_bytes,
)
from hpc_tune.memory.policy import (
    GROWTH_WINDOW_STEPS,
    RETRY_WINDOW_STEPS,
    Level,
    Phase,
    device_level,
    free_bytes_below_level,
    growth_bytes_per_step,
    host_level,
    must_stop_run,
    reserved_bytes,
)
from hpc_tune.units import format_bytes, format_quantity
from hpc_tune.world.liveness import HEARTBEAT_EVERY_S

_SAMPLE_PERIOD_S = 0.1
_NEAR_LIMIT_PERIOD_S = 0.02
_NEAR_LIMIT_SHARE = 0.7
_RATE_WINDOW_S = 0.5
_PLAN_ERROR_SHARE = 0.1
MonitorMode = Literal["on", "observe", "off"]


@dataclass(frozen=True)
class MemorySample:
    """The peaks of an interval, and some figures at its end.

    Peaks: ``host_bytes``, what counts against the limit on host memory, and ``device``, of this
    rank's GPU if any. At the end: ``ranks_bytes`` is the usage of this job's ranks on the node,
    ``own_bytes`` that of this rank; the rest is the launcher's, tmpfs and other tenants'.
    ``swap_bytes`` are of all processes under the limit, ``shm_bytes`` of the node. ``stalled`` is
    the share of the last ten seconds in which a task waited for memory, 0 to 1, None if unknown.
    """

    host_bytes: int
    host_limit_bytes: int
    ranks_bytes: int
    own_bytes: int
    swap_bytes: int
    shm_bytes: int
    stalled: float | None
    device: DeviceSample | None


@dataclass(frozen=True)
class MemoryShortage:
    """Why a run cannot continue: the bytes in use of a memory (``need``), its limit (``had``), what
    the run was doing (``phase``), the rank and the host; ``words`` is the message.
    """

    need: int
    had: int
    phase: str
    rank: int
    host: str
    words: str
    memory: Literal["host", "device"] = "host"


class HeartbeatWriter(Protocol):
    """Writes a file that shows what a run did when it was killed; see ``rundir/outcome.py``."""

    def beat(self, phase: str, usage_bytes: int) -> None:
        """Write what the run is doing and how many bytes the node uses."""

    def close(self) -> None:
        """Remove it: the run has not been killed."""


class MemoryMonitor:
    """Samples memory in the background between ``start`` and ``close``."""

    def __init__(
        self,
        host_limit: int | None,
        device: DeviceMemory | None = None,
        mode: MonitorMode = "on",
        rank: int = 0,
        host: str = "this host",
        pids: Sequence[int] = (),
        heartbeat: HeartbeatWriter | None = None,
        faults: Faults = NO_FAULTS,
    ) -> None:
        """Find the limit on host memory, which ``host_limit`` (bytes) can only lower.

        ``device`` is None if the rank computes in host memory. ``pids`` are the process ids of the
        job's ranks on this node. ``heartbeat`` is written every few seconds.
        """
        self.limit: HostLimit = find_host_limit(host_limit)
        self._phase, self._activity = Phase.START, "starting"
        self._peaks_by_phase: dict[Phase, int] = {}
        self.mode: MonitorMode = mode
        self._faults, self._period_s = faults, faults.sample_period_s or _SAMPLE_PERIOD_S
        self.device, self._rank, self._host = device, rank, host
        self._pids = tuple(pids) or (os.getpid(),)
        self._usage, self._usage_lock = HostUsage(self.limit, pids=self._pids), threading.Lock()
        self._heartbeat, self._heartbeat_s = heartbeat, float("-inf")
        self._stop_run: Callable[[MemoryShortage], None] | None = None
        self._peak_host = self._known_peak = self._expected_peak = 0
        self._recent_samples: deque[tuple[float, int]] = deque()
        self._peaks: deque[int] = deque(maxlen=GROWTH_WINDOW_STEPS)
        self._host_level = self._device_level = Level.CALM
        self._retries: int | None = None
        self._recent_retries: deque[bool] = deque(maxlen=RETRY_WINDOW_STEPS)
        self._private_limit: PrivateMemoryLimit | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory monitor", daemon=True)

    def start(self, stop_run: Callable[[MemoryShortage], None] | None = None) -> None:
        """Begin to sample; ``stop_run`` ends all ranks, and is called from the thread."""
        self._stop_run = stop_run
        if self.mode != "off":
            self._thread.start()

    def limit_private_memory(self) -> None:
        """From now on make allocations fail that would exceed the limit, if the mode is "on".

        Not for use while loading: files are mapped over memory that is allocated but never touched.
        """
        if self.mode == "on":
            self._private_limit = PrivateMemoryLimit()

    def enter(self, phase: Phase, activity: str, writes_heartbeat: bool = False) -> None:
        """Begin a phase of the memory plan, or a part of it; ``activity`` is for messages.

        ``writes_heartbeat`` writes it into the heartbeat immediately instead of within a few
        seconds.
        """
        self._phase, self._activity = phase, activity
        if writes_heartbeat:
            self._heartbeat_s = float("-inf")

    @property
    def peaks(self) -> dict[Phase, int]:
        """The peak of this rank's anonymous memory in each phase so far, in bytes."""
        return dict(self._peaks_by_phase)

    def used_bytes(self) -> int:
        """Return the bytes of host memory that count against the limit now."""
        with self._usage_lock:
            return self._usage.used_bytes()

    def take_peaks(self) -> MemorySample | None:
        """Return the peaks since the last call; None when switched off."""
        if self.mode == "off":
            return None
        host_bytes, self._peak_host = max(self._peak_host, self.used_bytes()), 0
        rank_bytes = own_bytes()
        self._record_peak(rank_bytes)
        return MemorySample(
            host_bytes,
            self.limit.num_bytes,
            self.ranks_bytes(),
            rank_bytes,
            swapped_bytes(self.limit),
            shm_bytes(),
            memory_pressure(self.limit),
            self.device.sample() if self.device is not None else None,
        )

    def update_levels(self, sample: MemorySample) -> tuple[Level, Level]:
        """Return the levels of host and device for the step whose peaks are ``sample``."""
        self._known_peak = max(self._known_peak, sample.host_bytes)
        self._peaks.append(sample.host_bytes)
        self._host_level = host_level(
            self._host_level,
            sample.host_bytes,
            sample.host_limit_bytes,
            growth_bytes_per_step(self._peaks),
        )
        if (device := sample.device) is not None:
            previous_retries = device.retries if self._retries is None else self._retries
            self._recent_retries.append(device.retries > previous_retries)
            self._retries = device.retries
            self._device_level = device_level(
                self._device_level, device.used_bytes, device.limit_bytes, self._recent_retries
            )
        return Level[self._faults.level(self._host_level.name)], self._device_level

    def expect_usage(self, num_bytes: int) -> None:
        """Let usage grow to the ``num_bytes`` predicted for a step without ending the run.

        A tenth more is allowed, since predictions err, but nothing beyond where TIGHT begins.
        """
        calm_bytes = free_bytes_below_level(0, self.limit.num_bytes, Level.TIGHT)
        self._expected_peak = min(int((1 + _PLAN_ERROR_SHARE) * num_bytes), calm_bytes)

    def reset_growth(self) -> None:
        """Restart the growth estimate: an action has changed memory usage."""
        self._peaks.clear()

    def can_allocate(self, num_bytes: int) -> bool:
        """Whether host memory may be allocated now; if not, the caller works piece by piece."""
        if self.mode != "on":
            return True
        free_bytes = free_bytes_below_level(self.used_bytes(), self.limit.num_bytes)
        return num_bytes <= free_bytes // len(self._pids)

    def require_free_bytes(self, num_bytes: int) -> None:
        """Stop the run if ``num_bytes`` more on each rank of this node would leave too little free.

        For allocations that grow faster than memory is sampled.
        """
        stop_run = self._stop_run
        if self.mode != "on" or stop_run is None:
            return
        usage_bytes, limit = self.used_bytes(), self.limit.num_bytes
        if usage_bytes + num_bytes * len(self._pids) > limit - reserved_bytes(limit):
            shortage = self.host_shortage(usage_bytes)
            message = f"{shortage.words}; {format_bytes(num_bytes)} more on each rank would not fit"
            stop_run(replace(shortage, words=message))

    def host_shortage(self, usage_bytes: int) -> MemoryShortage:
        """Return how much of the host's memory this run needs and has."""
        limit, num_ranks = self.limit.num_bytes, len(self._pids)
        message = (
            f"host memory of {self._host}: {format_bytes(usage_bytes)} of {format_bytes(limit)} "
            f"({self.limit.source}) in use while {self._activity}, "
            f"{format_bytes(self.ranks_bytes())} of it by this job's "
            f"{format_quantity(num_ranks, 'rank')} there"
        )
        return MemoryShortage(usage_bytes, limit, self._activity, self._rank, self._host, message)

    def device_shortage(self, sample: DeviceSample) -> MemoryShortage:
        """Return how much of its device's memory this rank needs and has."""
        usage_bytes, limit, activity = sample.used_bytes, sample.limit_bytes, self._activity
        message = (
            f"device memory of rank {self._rank} on {self._host}: {format_bytes(usage_bytes)} "
            f"of {format_bytes(limit)} in use while {activity}; the allocator holds "
            f"{format_bytes(sample.reserved_bytes)}, everything else takes "
            f"{format_bytes(sample.others_bytes)}"
        )
        return MemoryShortage(
            usage_bytes, limit, activity, self._rank, self._host, message, "device"
        )

    def device_utilization(self) -> float | None:
        """Return the share of the last sampling period in which the device was busy, 0 to 1.

        None without a device, if it does not say, or when switched off.
        """
        if self.mode == "off" or self.device is None:
            return None
        return self.device.utilization()

    def close(self) -> None:
        """Stop sampling."""
        self._stop.set()
        self._stop_run = None
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            self._usage.close()
        if self._private_limit is not None:
            self._private_limit.lift()
        if self._heartbeat is not None:
            self._heartbeat.close()

    def _record_peak(self, num_bytes: int) -> None:
        peaks, phase = self._peaks_by_phase, self._phase
        peaks[phase] = max(peaks.get(phase, 0), num_bytes)

    def ranks_bytes(self) -> int:
        """Return the anonymous and shared bytes of this job's ranks on this node now."""
        return sum(own_bytes(pid=pid) for pid in self._pids)

    def _run(self) -> None:
        period_s = self._period_s
        while not self._stop.wait(period_s):
            # Mapped bytes first: if memory grows in between, the limit is too low, not too high.
            anonymous_bytes, mapped_bytes = self._usage.private_bytes()
            usage_bytes, now_s = self.used_bytes(), time.monotonic()
            self._peak_host = max(self._peak_host, usage_bytes)
            self._record_peak(anonymous_bytes)
            is_near = usage_bytes > max(self._known_peak, _NEAR_LIMIT_SHARE * self.limit.num_bytes)
            period_s = _NEAR_LIMIT_PERIOD_S if is_near else self._period_s
            if self._heartbeat is not None and now_s - self._heartbeat_s > HEARTBEAT_EVERY_S:
                self._heartbeat.beat(self._activity, usage_bytes)
                self._heartbeat_s = now_s
            if self.mode == "on":
                self._stop_if_near_limit(usage_bytes, mapped_bytes, now_s)

    def _stop_if_near_limit(self, usage_bytes: int, mapped_bytes: int, now_s: float) -> None:
        self._recent_samples.append((now_s, usage_bytes))
        while now_s - self._recent_samples[0][0] > _RATE_WINDOW_S:
            self._recent_samples.popleft()
        limit = self.limit.num_bytes
        if self._private_limit is not None:
            self._private_limit.set(
                mapped_bytes, (limit - reserved_bytes(limit) - usage_bytes) // len(self._pids)
            )
        known_peak = max(self._known_peak, self._expected_peak)
        stop_run = self._stop_run  # once: close() may take it away meanwhile
        if stop_run is not None and must_stop_run(self._recent_samples, limit, known_peak):
            shortage = self.host_shortage(usage_bytes)
            message = f"{shortage.words}; the limit would have been reached within a second"
            stop_run(replace(shortage, words=message))
            self._stop_run = None
