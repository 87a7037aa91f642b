"""The memory governor of a run: all ranks agree on memory levels and take the same action.

    peaks of a step -> levels of this rank -> counted over ranks at the boundary -> decide_action
    step that ran out of a device's memory -> CRITICAL -> the same

Each rank decides by the same counts and the same ladder, so all ranks do the same thing.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

from hpc_tune.data.loader import Loader
from hpc_tune.log import log
from hpc_tune.memory.device import empty_caches
from hpc_tune.memory.host import own_bytes, trim_heap
from hpc_tune.memory.monitor import MemoryMonitor, MemorySample, MemoryShortage
from hpc_tune.memory.policy import (
    Action,
    ActionDecision,
    ActionHandle,
    Level,
    PolicyState,
    decide_action,
    decide_after_device_oom,
    next_actions_after_oom,
)
from hpc_tune.rundir.json_lines import EventsWriter
from hpc_tune.rundir.outcome import PreviousRun
from hpc_tune.units import format_bytes
from hpc_tune.world.comm import Comm

MORE_MEMORY_ADVICE = (
    "ask for more memory or nodes; python -m hpc_tune plan predicts what each phase needs"
)
_PRESSURE_LEVELS = tuple(Level)[1:]
_ACTION_DESCRIPTIONS = {
    Action.SHRINK_BUFFERS: "reads less data ahead",
    Action.SAVE_IN_PIECES: "waits for its saves",
    Action.SPLIT_MICRO_BATCHES: "uses smaller micro-batches",
    Action.RECOMPUTE: "recomputes activations",
    Action.USE_MORE_PIECES: "computes MLPs in more pieces of a row",
    Action.OFFLOAD_ACTIVATIONS: "keeps activations in host memory",
    Action.MOVE_OPTIMIZER: "keeps the optimizer's state in host memory",
}


class Governor:
    """Acts on memory pressure, or only reports it (memory.governor=observe)."""

    def __init__(
        self,
        comm: Comm,
        monitor: MemoryMonitor,
        events: EventsWriter,
        memory_actions: Mapping[Action, ActionHandle],
        previous_run: PreviousRun,
    ) -> None:
        """Repeat the actions of ``previous_run``, and take one rung more if memory ended it."""
        self._comm, self._monitor, self._events = comm, monitor, events
        self._memory_actions = memory_actions
        self._policy = PolicyState()
        self._levels = (Level.CALM, Level.CALM)
        self._reported_level = Level.CALM
        self._sample: MemorySample | None = None
        self._failed_allocation: str | None = None
        if monitor.mode != "on":
            return
        actions = {action.value: action for action in Action}
        taken_actions = tuple(
            actions[name] for name in previous_run.actions if actions.get(name) in memory_actions
        )
        self._policy = PolicyState(taken_actions)
        if previous_run.exhausted_memory is not None:
            taken_actions = next_actions_after_oom(
                taken_actions, self._available_actions(previous_run.exhausted_memory)
            )
        self._policy = PolicyState(
            taken_actions,
            num_permanent_actions=0
            if monitor.device is None
            else _count_permanent_actions(taken_actions),
        )
        for action in dict.fromkeys(self._policy.taken_actions):
            self._apply_taken_action(action)
        if self._policy.taken_actions:
            log.info(
                "memory  actions of the last run stay in effect: %s", ", ".join(self.actions_taken)
            )

    @property
    def actions_taken(self) -> list[str]:
        """The actions taken that are still in effect, in order."""
        return [action.value for action in self._policy.taken_actions]

    @property
    def handles_device_oom(self) -> bool:
        """Whether the governor is on and has a device, so that it handles out-of-memory steps."""
        return self._monitor.mode == "on" and self._monitor.device is not None

    def observe(self, sample: MemorySample | None) -> None:
        """Take in the memory peaks of the last step."""
        self._failed_allocation = None
        if sample is not None:
            self._sample = sample
            self._levels = self._monitor.update_levels(sample)

    def observe_out_of_memory(self, failed_allocation: str) -> None:
        """Note that this rank's device ran out of memory; ``failed_allocation`` describes how."""
        self._failed_allocation, self._sample = failed_allocation, self._monitor.take_peaks()
        self._levels = (self._levels[0], Level.CRITICAL)

    def status(self) -> tuple[float, ...]:
        """Return this rank's part of the boundary's sums: 1.0 for each level it has reached."""
        return tuple(
            float(own_level >= level) for own_level in self._levels for level in _PRESSURE_LEVELS
        )

    def act_on_levels(self, level_counts: Sequence[float], step: int) -> MemoryShortage | None:
        """Act on the ranks' levels; return the shortage if the run must leave. Collective."""
        host, device = (
            Level(sum(count > 0 for count in level_counts[start : start + len(_PRESSURE_LEVELS)]))
            for start in (0, len(_PRESSURE_LEVELS))
        )
        level, decision = max(host, device), None
        if self._monitor.mode == "on":
            self._policy, decision = self._decide_action(host, device)
        if decision is None and level == self._reported_level:
            return None
        local_fill = self._local_memory_usage("device" if device >= host else "host")
        worst = max(self._comm.gather(local_fill), key=lambda share: share.used_fraction)
        if level != self._reported_level:
            self._reported_level = level
            self._report(step, worst, f"memory is {level.description}", level=level.name.lower())
        if decision is None:
            return None
        if decision.action == Action.STOP_RUN:
            trend = "; it grows" if level == Level.WILL_EXCEED else "; it stays there"
            trend = "" if worst.memory_shortage.memory == "device" else trend
            return replace(
                worst.memory_shortage,
                words=f"{worst.memory_shortage.words}{trend}. {self.advice(worst.memory_shortage)}",
            )
        self._perform_action(decision, step, worst)
        return None

    def advice(self, shortage: MemoryShortage) -> str:
        """Return what the next start will do about the shortage, or what the user can do."""
        taken = self._policy.taken_actions
        coming = next_actions_after_oom(taken, self._available_actions(shortage.memory))[
            len(taken) :
        ]
        if not coming:
            return f"No further memory-saving action is available: {MORE_MEMORY_ADVICE}"
        words = [
            _ACTION_DESCRIPTIONS[action] for action in coming if action in _ACTION_DESCRIPTIONS
        ]
        names = ", ".join(action.value for action in coming)
        return f"The next start {', '.join(words) or 'gives freed memory back'} ({names})"

    def _decide_action(
        self, host: Level, device: Level
    ) -> tuple[PolicyState, ActionDecision | None]:
        if device == Level.CRITICAL and host < Level.WILL_EXCEED:
            return decide_after_device_oom(self._policy, self._available_actions("device"))
        level = max(host, device)
        exhausted_memory = [
            memory_kind
            for memory_kind, kind_level in (("host", host), ("device", device))
            if kind_level == level
        ]
        return decide_action(self._policy, level, self._available_actions(*exhausted_memory))

    def _available_actions(self, *exhausted_memory: str) -> frozenset[Action]:
        """Return the actions that can still free ``exhausted_memory``: "host", "device" or both.

        Without a device, actions that would free device memory free host memory.
        """
        taken_actions, memory_kinds = self._policy.taken_actions, {*exhausted_memory}
        if self._monitor.device is None:
            memory_kinds.add("device")
        return frozenset(
            action
            for action, handle in self._memory_actions.items()
            if action.freed_memory in memory_kinds
            and taken_actions.count(action) < handle.max_times
        )

    def _apply_taken_action(self, action: Action) -> str:
        """Apply an action as often as the ladder has taken it; describe the resulting setting."""
        return self._memory_actions[action].apply_times(self._policy.taken_actions.count(action))

    def _local_memory_usage(self, memory_kind: Literal["host", "device"]) -> "_MemoryUsage":
        """Return how full this rank's memory is; host memory if there is no device."""
        sample = self._sample
        if sample is None:
            return _MemoryUsage(0.0, self._monitor.host_shortage(0), {}, "")
        used_fraction = sample.host_bytes / sample.host_limit_bytes
        shortage = self._monitor.host_shortage(sample.host_bytes)
        text = (
            f"{shortage.host}: host {_format_fraction(sample.host_bytes, sample.host_limit_bytes)}"
        )
        memory_fields = {key: value for key, value in asdict(sample).items() if key != "device"}
        if (device := sample.device) is not None:
            text += f", device {_format_fraction(device.used_bytes, device.limit_bytes)}"
            memory_fields |= {f"device_{key}": value for key, value in asdict(device).items()}
            if memory_kind == "device":
                used_fraction = device.used_bytes / device.limit_bytes
                shortage = self._monitor.device_shortage(device)
        if self._failed_allocation is not None:
            used_fraction, text = inf, f"{text}, {self._failed_allocation}"
            shortage = replace(
                shortage, words=f"{shortage.words}; an allocation failed: {self._failed_allocation}"
            )
        return _MemoryUsage(used_fraction, shortage, memory_fields, text)

    def _perform_action(self, decision: ActionDecision, step: int, worst: "_MemoryUsage") -> None:
        result = self._apply_taken_action(decision.action)
        self._monitor.reset_growth()
        self._report(step, worst, result, action=decision.action.value, way=decision.way)

    def _report(self, step: int, worst: "_MemoryUsage", text: str, **fields: str) -> None:
        message = f"{worst.text}: {text}"
        memory_fields = {**fields, "message": message, **worst.memory_fields}
        self._events.write("governor", step, worst.memory_shortage.rank, **memory_fields)
        log.info("step %d: memory: %s", step, message)


@dataclass(frozen=True)
class _MemoryUsage:
    """How full one rank's memory is: the share in use, and the figures."""

    used_fraction: float
    memory_shortage: MemoryShortage
    memory_fields: Mapping[str, Any]
    text: str


def _count_permanent_actions(taken_actions: Sequence[Action]) -> int:
    """Return how many of ``taken_actions`` at the start are never undone: all up to the last one
    that frees device memory, since without it the device may run out and end the run.
    """
    return max(
        (number for number, a in enumerate(taken_actions, 1) if a.freed_memory == "device"),
        default=0,
    )


def _format_fraction(used: int, limit: int) -> str:
    return f"{format_bytes(used)} of {format_bytes(limit)}"


def memory_outcome_facts(shortage: MemoryShortage, actions_taken: Sequence[str]) -> dict[str, Any]:
    """Return the facts in outcome.json about a run that stopped because memory was short."""
    memory_fields = {key: value for key, value in asdict(shortage).items() if key != "words"}
    return {**memory_fields, "governor": list(actions_taken)}


def make_loader_actions(
    loader: Loader, data_files: Sequence[Path], release_memory: Callable[[], None] = lambda: None
) -> dict[Action, ActionHandle]:
    """Return the actions of a loader that reads ``data_files``; its micro-batches are still whole.

    ``release_memory`` frees memory that other parts keep for reuse.
    """
    micro_size = loader.micro_size

    def trim(_: int) -> str:
        bytes_before = own_bytes()
        release_memory()
        trim_heap()
        empty_caches()
        for file in data_files:
            _drop_page_cache(file)
        return f"{format_bytes(max(0, bytes_before - own_bytes()))} given back by rank 0"

    def shrink_buffers(times: int) -> str:
        loader.set_prefetch(0 if times else loader.prefetch_bytes)
        return f"prefetching {'disabled' if times else 'enabled'}"

    def split_micro_batches(times: int) -> str:
        rows = max(1, micro_size >> times)
        loader.set_micro_size(rows)
        return f"micro-batches of {rows} rows"

    return {
        Action.TRIM: ActionHandle(trim),
        Action.SHRINK_BUFFERS: ActionHandle(shrink_buffers),
        Action.SPLIT_MICRO_BATCHES: ActionHandle(
            split_micro_batches, max_times=micro_size.bit_length() - 1
        ),
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
