"""Watches host and device memory from a thread: no collectives, no waiting for the device.

    every 0.1 s   host bytes -> worst of the interval; would the limit be reached first? -> leave
    every step    ``level`` of host and device, which the ranks agree on and act upon (policy.py)

A thread samples faster where memory is higher than a whole step ever was and near the limit, and
moves the limit that makes an allocation fail which the kernel would answer with a kill.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from hpc_tune.faults import NO_FAULTS, Faults
from hpc_tune.memory.device import DeviceSample, sample_device
from hpc_tune.memory.host import (
    HostLimit,
    Usage,
    find_limit,
    own_bytes,
    shm_bytes,
    stalled_share,
    swapped_bytes,
)
from hpc_tune.memory.policy import (
    GROWTH_WINDOW,
    Level,
    growth_per_step,
    level_of,
    must_leave,
    reserve_of,
    room_of,
)
from hpc_tune.memory.rlimit import PrivateMemoryLimit
from hpc_tune.units import format_bytes

_PERIOD_S = 0.1
_NEAR_PERIOD_S = 0.02
_NEAR_SHARE = 0.7
_WINDOW_S = 0.5
_PLAN_ERROR = 0.1
_HEARTBEAT_EVERY_S = 5.0
Mode = Literal["on", "observe", "off"]


@dataclass(frozen=True)
class MemorySample:
    """The worst of an interval.

    Bytes in use and their limits: of the node's host memory, and of this rank's GPU if any.
    ``ranks_bytes`` is what this job's ranks on the node take of it now, ``own_bytes`` this rank;
    the rest is the launcher's, tmpfs and other tenants'. ``swap_bytes`` and ``shm_bytes`` are the
    node's, ``stalled`` the share of the last ten seconds in which a task waited for memory, where
    the kernel tells it.
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
class Need:
    """Why a run cannot go on: the bytes it needs and has, in which phase, on which rank and host;
    and the same in words.
    """

    need: int
    had: int
    phase: str
    rank: int
    host: str
    words: str


class Heartbeat(Protocol):
    """What keeps a file for whoever looks after a death; see ``rundir/heartbeat.py``."""

    def beat(self, phase: str, used: int) -> None:
        """Say what the run does and how many bytes the node uses."""

    def close(self) -> None:
        """End it: the run ends by itself."""


class Monitor:
    """Samples memory in the background between ``start`` and ``close``.

    ``words`` say what the run does now, for messages and for who looks after a death.
    """

    def __init__(
        self,
        host_limit: int | None,
        device: torch.device,
        mode: Mode = "on",
        rank: int = 0,
        host: str = "this host",
        pids: Sequence[int] = (),
        heartbeat: Heartbeat | None = None,
        faults: Faults = NO_FAULTS,
    ) -> None:
        """Look up the limits. ``host_limit`` (bytes) can lower the machine's own.

        ``pids`` are the ranks that share this node's memory. ``heartbeat`` is told every few
        seconds what the run does and how many bytes the node uses.
        """
        self.limit: HostLimit = find_limit(host_limit)
        self._phase, self.words = "start", "starting"
        self._peaks_by_phase: dict[str, int] = {}
        self.mode: Mode = mode
        self._faults, self._period_s = faults, faults.sample_s or _PERIOD_S
        self._device, self._rank, self._host = device, rank, host
        self._pids = tuple(pids) or (os.getpid(),)
        self._usage, self._reading = Usage(self.limit, pids=self._pids), threading.Lock()
        self._heartbeat, self._heartbeat_s = heartbeat, float("-inf")
        self._leave: Callable[[Need], None] | None = None
        self._worst_host = self._familiar = self._expected = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._peaks: deque[int] = deque(maxlen=GROWTH_WINDOW)
        self._host_level = self._device_level = Level.CALM
        self._retries = 0
        self._private_limit: PrivateMemoryLimit | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory monitor", daemon=True)

    def start(self, leave: Callable[[Need], None] | None = None) -> None:
        """Begin to sample; ``leave`` ends the world, and is called from the thread."""
        self._leave = leave
        if self.mode != "off":
            self._thread.start()

    def limit_private_memory(self) -> None:
        """From now on let allocations fail that would go beyond the limit.

        Not while loading: pages of files are mapped over memory that was never touched.
        """
        if self.mode == "on":
            self._private_limit = PrivateMemoryLimit()

    def enter(self, phase: str, words: str, tell: bool = False) -> None:
        """Begin a phase of the plan, or a next piece of it, ``words`` for a person.

        ``tell`` puts it into the last words at once, and not within a few seconds.
        """
        self._phase, self.words = phase, words
        if tell:
            self._heartbeat_s = float("-inf")

    @property
    def peaks(self) -> dict[str, int]:
        """The most that this rank had of anonymous memory in each phase so far, in bytes."""
        return dict(self._peaks_by_phase)

    def used_bytes(self) -> int:
        """Return the bytes of host memory that count against the limit now."""
        with self._reading:
            return self._usage.used_bytes()

    def worst(self) -> MemorySample | None:
        """Return the worst sample since the last call; None when switched off."""
        if self.mode == "off":
            return None
        host, self._worst_host = max(self._worst_host, self.used_bytes()), 0
        own = own_bytes()
        self._note(own)
        return MemorySample(
            host,
            self.limit.num_bytes,
            self.ranks_bytes(),
            own,
            swapped_bytes(self.limit),
            shm_bytes(),
            stalled_share(self.limit),
            sample_device(self._device) if self._device.type == "cuda" else None,
        )

    def levels(self, sample: MemorySample) -> tuple[Level, Level]:
        """Return the levels of host and device for the step whose worst was ``sample``."""
        self._familiar = max(self._familiar, sample.host_bytes)
        self._peaks.append(sample.host_bytes)
        self._host_level = level_of(
            self._host_level,
            sample.host_bytes,
            sample.host_limit_bytes,
            growth_per_step(self._peaks),
        )
        if (device := sample.device) is not None:
            level = level_of(self._device_level, device.used_bytes, device.limit_bytes)
            if device.retries > self._retries:
                level = max(level, Level.HIGH)
            self._device_level, self._retries = level, device.retries
        return Level[self._faults.level(self._host_level.name)], self._device_level

    def expect(self, num_bytes: int) -> None:
        """Take growth up to the ``num_bytes`` that a step will have in use for no reason to leave.

        A little above is none either, but what pressure begins at is: a plan is no measurement.
        """
        pressed = room_of(0, self.limit.num_bytes, Level.TIGHT)
        self._expected = min(int((1 + _PLAN_ERROR) * num_bytes), pressed)

    def forget(self) -> None:
        """Count growth anew: what was done about memory has changed it."""
        self._peaks.clear()

    def admit(self, num_bytes: int, why: str) -> bool:
        """Tell whether an allocation of host memory may be made now; ``why`` is for the message.

        Where not, the caller goes another, piecewise way.
        """
        if self.mode != "on":
            return True
        return num_bytes <= room_of(self.used_bytes(), self.limit.num_bytes) // len(self._pids)

    def ensure(self, num_bytes: int) -> None:
        """Leave at once where ``num_bytes`` more on each rank of this node would reach the limit.

        For what is allocated faster than is sampled.
        """
        if self.mode != "on" or self._leave is None:
            return
        used, limit = self.used_bytes(), self.limit.num_bytes
        if used + num_bytes * len(self._pids) > limit - reserve_of(limit):
            need = self.need(used)
            words = f"{need.words}; {format_bytes(num_bytes)} more on each would not fit"
            self._leave(replace(need, words=words))

    def need(self, used: int) -> Need:
        """Return, in figures and words, how much of the host's memory this run needs and has."""
        had, num = self.limit.num_bytes, len(self._pids)
        ranks = (
            f"{format_bytes(self.ranks_bytes())} of it by this job's {num} rank{'s' * (num > 1)}"
        )
        words = (
            f"host memory of {self._host}: {format_bytes(used)} of {format_bytes(had)} "
            f"({self.limit.source}) in use while {self.words}, {ranks} there"
        )
        return Need(used, had, self.words, self._rank, self._host, words)

    def device_need(self) -> Need:
        """Return the same of this rank's GPU."""
        seen = sample_device(self._device)
        words = (
            f"device memory of rank {self._rank} on {self._host}: {format_bytes(seen.used_bytes)} "
            f"of {format_bytes(seen.limit_bytes)} in use while {self.words}; the allocator holds "
            f"{format_bytes(seen.reserved_bytes)}, what is not its own takes "
            f"{format_bytes(seen.others_bytes)}"
        )
        return Need(seen.used_bytes, seen.limit_bytes, self.words, self._rank, self._host, words)

    def device_utilization(self) -> float | None:
        """Return the share of the last sampling period in which the GPU worked, 0 to 1.

        None without a GPU, or where the driver's management library is not installed.
        """
        if self.mode == "off" or self._device.type != "cuda":
            return None
        try:
            return torch.cuda.utilization(self._device) / 100
        except (ModuleNotFoundError, RuntimeError):
            return None

    def close(self) -> None:
        """Stop sampling, and let go of who was to be called."""
        self._stop.set()
        self._leave = None
        if self._thread.is_alive():
            self._thread.join(timeout=1.0)
        if not self._thread.is_alive():
            self._usage.close()
        if self._private_limit is not None:
            self._private_limit.lift()
        if self._heartbeat is not None:
            self._heartbeat.close()

    def _note(self, num_bytes: int) -> None:
        peaks, phase = self._peaks_by_phase, self._phase
        peaks[phase] = max(peaks.get(phase, 0), num_bytes)

    def ranks_bytes(self) -> int:
        """Return the anonymous and shared bytes of this job's ranks on this node now."""
        return sum(own_bytes(pid=pid) for pid in self._pids)

    def _run(self) -> None:
        period_s = self._period_s
        while not self._stop.wait(period_s):
            # First what is mapped: the limit is too low and not too high if memory grows between.
            anonymous, mapped = self._usage.own_pages()
            used, now_s = self.used_bytes(), time.monotonic()
            self._worst_host = max(self._worst_host, used)
            self._note(anonymous)
            is_near = used > max(self._familiar, _NEAR_SHARE * self.limit.num_bytes)
            period_s = _NEAR_PERIOD_S if is_near else self._period_s
            if self._heartbeat is not None and now_s - self._heartbeat_s > _HEARTBEAT_EVERY_S:
                self._heartbeat.beat(self.words, used)
                self._heartbeat_s = now_s
            if self.mode == "on":
                self._guard(used, mapped, now_s)

    def _guard(self, used: int, mapped: int, now_s: float) -> None:
        self._recent.append((now_s, used))
        while now_s - self._recent[0][0] > _WINDOW_S:
            self._recent.popleft()
        limit = self.limit.num_bytes
        if self._private_limit is not None:
            self._private_limit.set(mapped, (limit - reserve_of(limit) - used) // len(self._pids))
        familiar = max(self._familiar, self._expected)
        if self._leave is not None and must_leave(self._recent, limit, familiar):
            need = self.need(used)
            words = f"{need.words}; the limit would have been reached within a second"
            self._leave(replace(need, words=words))
            self._leave = None
