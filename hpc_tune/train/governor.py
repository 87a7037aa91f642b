"""What a run does about memory: the governor's levels, agreed by all ranks and acted upon.

    step's worst -> levels of this rank -> counted over the ranks at the boundary -> decide -> lever

Each rank decides by the same counts and the same ladder, so all do the same thing.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hpc_tune.config.schema import MemoryConfig
from hpc_tune.data.loader import PREFETCH_BYTES, Loader
from hpc_tune.engine.base import Engine
from hpc_tune.errors import LeavingError, MemoryBudgetError
from hpc_tune.faults import Faults
from hpc_tune.log import log
from hpc_tune.memory.device import give_back_cache, is_out_of_memory
from hpc_tune.memory.host import find_limit, give_back, own_bytes
from hpc_tune.memory.monitor import MemorySample, Monitor, Need
from hpc_tune.memory.policy import Action, Decision, Ladder, Level, decide, lower
from hpc_tune.rundir import heartbeat
from hpc_tune.rundir.json_lines import Events
from hpc_tune.rundir.previous import Previous
from hpc_tune.train.checkpointing import Checkpointer
from hpc_tune.train.exit import fail
from hpc_tune.units import format_bytes
from hpc_tune.world.comm import Comm

_LEVELS = tuple(Level)[1:]
_HOST_SIDE = frozenset({Action.SHRINK_BUFFERS, Action.SAVE_IN_PIECES})
_DEVICE_SIDE = frozenset({Action.SPLIT_MICRO_BATCHES, Action.RECOMPUTE, Action.MOVE_OPTIMIZER})


def make_monitor(memory: MemoryConfig, comm: Comm, run_dir: Path, faults: Faults) -> Monitor:
    """Return this rank's monitor; the first rank of each node keeps the node's heartbeat.

    Raises:
        MemoryBudgetError: if the processes alone take what the node grants.
    """
    world, beat = comm.world, None
    if world.local_rank == 0:
        path = heartbeat.path_of(run_dir, world.node)
        beat = heartbeat.HeartbeatFile(path, world.hostname, find_limit(memory.host_limit))
    monitor = Monitor(
        memory.host_limit,
        comm.device,
        memory.governor,
        world.rank,
        world.hostname,
        [peer.pid for peer in comm.roster if peer.node == world.node],
        beat,
        faults,
    )
    asked, limit = memory.host_limit, monitor.limit
    if monitor.ranks_bytes() >= limit.num_bytes:
        raise MemoryBudgetError(
            f"{limit.source} grants {format_bytes(limit.num_bytes)} of host memory on "
            f"{world.hostname}, and its {world.local_size} ranks take "
            f"{format_bytes(monitor.ranks_bytes())} before a model is there; grant more, or start "
            "fewer ranks per node"
        )
    if world.rank == 0 and asked is not None and limit.num_bytes < asked:
        log.warning(
            "memory.host_limit=%s has no effect: %s grants %s",
            format_bytes(asked),
            limit.source,
            format_bytes(limit.num_bytes),
        )
    return monitor


class Governor:
    """Acts on memory pressure, or only tells of it (memory.governor=observe)."""

    def __init__(
        self,
        comm: Comm,
        monitor: Monitor,
        run_dir: Path,
        events: Events,
    ) -> None:
        """Work with ``monitor``. ``step`` may be set: what a start now would resume from."""
        self._comm, self._monitor, self._run_dir = comm, monitor, run_dir
        self._events, self.step = events, 0
        self._saver: Checkpointer | None = None
        self._ladder = Ladder()
        self._levels = (Level.CALM, Level.CALM)
        self._told = Level.CALM
        self._sample: MemorySample | None = None
        self._engine: Engine | None = None

    def attach(
        self,
        engine: Engine,
        loader: Loader,
        saver: Checkpointer,
        micro_size: int,
        data_file: Path,
        previous: Previous,
    ) -> None:
        """Know what can be acted upon, and begin where the run before this one had come to.

        Where memory ended that one, this begins one rung lower.
        """
        self._engine, self._loader, self._saver = engine, loader, saver
        self._whole_micro_size, self._data_file = micro_size, data_file
        if self._monitor.mode != "on":
            return
        values = {action.value: action for action in Action}
        taken = tuple(values[name] for name in previous.actions if name in values)
        self._ladder = Ladder(taken)
        if previous.ended_for_memory:
            self._ladder = Ladder(lower(taken, self._available(_HOST_SIDE | _DEVICE_SIDE)))
        for number, action in enumerate(self._ladder.taken):
            self._pull(action, on=True, times=self._ladder.taken[: number + 1].count(action))
        if self._ladder.taken:
            log.info("memory  as the run before left it: %s", ", ".join(self.taken))

    @property
    def micro_size(self) -> int:
        """Rows per micro-batch now."""
        halvings = self._ladder.taken.count(Action.SPLIT_MICRO_BATCHES)
        return max(1, self._whole_micro_size >> halvings)

    @property
    def taken(self) -> list[str]:
        """What was done and holds, in order."""
        return [action.value for action in self._ladder.taken]

    def see(self, sample: MemorySample | None) -> None:
        """Take in the worst of the last step."""
        if sample is not None:
            self._sample = sample
            self._levels = self._monitor.levels(sample)

    def votes(self) -> tuple[float, ...]:
        """Return what this rank adds to the boundary's sum: one for each level it has reached."""
        return tuple(float(own >= level) for own in self._levels for level in _LEVELS)

    def act(self, counts: Sequence[float], step: int) -> Need | None:
        """Do what the ranks' votes ask for; return why to leave, if that is it. Collective."""
        host, device = (
            Level(sum(count > 0 for count in counts[start : start + len(_LEVELS)]))
            for start in (0, len(_LEVELS))
        )
        level = max(host, device)
        decision = None
        if self._monitor.mode == "on":
            sides = (_HOST_SIDE if host == level else frozenset()) | (
                _DEVICE_SIDE if device == level or self._computes_on_host else frozenset()
            )
            self._ladder, decision = decide(self._ladder, level, self._available(sides))
        if decision is None and level == self._told:
            return None
        worst = max(self._comm.gather(self._own_share()), key=lambda share: share.full)
        if level != self._told:
            self._told = level
            self._tell(step, worst, f"memory is {level.name.lower()}", level=level.name.lower())
        if decision is None:
            return None
        if decision.action == Action.LEAVE:
            why = "it grows" if level == Level.DOOMED else "it stays there"
            return replace(worst.need, words=f"{worst.need.words}; {why}. {self._next()}")
        self._do(decision, step, worst)
        return None

    def facts(self, need: Need) -> dict[str, Any]:
        """Return what outcome.json says of a run that left for want of memory."""
        told = {key: value for key, value in asdict(need).items() if key != "words"}
        return {**told, "governor": self.taken}

    def leave_at_once(self, need: Need) -> None:
        """End the world before the kernel does; for the monitor's thread."""
        fail(self._comm, self._leaving(need), self._run_dir)

    def cause_of(self, error: BaseException) -> BaseException:
        """Return what an error means: an allocation that fails is a reason to leave."""
        if self._monitor.mode != "on" or not is_out_of_memory(error):
            return error
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        if isinstance(error, torch.OutOfMemoryError):
            need = self._monitor.device_need()
        else:
            sample = self._monitor.worst()
            need = self._monitor.need(sample.host_bytes if sample else 0)
        return self._leaving(
            replace(need, words=f"{need.words}; an allocation failed: {first_line}")
        )

    def _leaving(self, need: Need) -> LeavingError:
        words = f"{need.words}. {self._next()}"
        step = self._saver.committed_step if self._saver is not None else self.step
        return LeavingError(words, step, self.facts(need))

    def _next(self) -> str:
        """Return what the next start does, or what the user can do."""
        more = "ask for more memory or nodes; python -m hpc_tune plan tells what each phase takes"
        if self._engine is None:
            return f"Before training nothing can be given up: {more}"
        taken = self._ladder.taken
        coming = lower(taken, self._available(_HOST_SIDE | _DEVICE_SIDE))[len(taken) :]
        if not coming:
            return f"Nothing is left to be given up: {more}"
        return f"The next start begins with {', '.join(action.value for action in coming)}"

    @property
    def _computes_on_host(self) -> bool:
        return self._comm.device.type == "cpu"

    def _available(self, sides: frozenset[Action]) -> frozenset[Action]:
        assert self._engine is not None
        can = {Action.SHRINK_BUFFERS, Action.SAVE_IN_PIECES, *self._engine.levers()}
        can -= set(self._ladder.taken)
        if self.micro_size > 1:
            can.add(Action.SPLIT_MICRO_BATCHES)
        return frozenset(can) & sides

    def _own_share(self) -> "_Share":
        sample = self._sample
        if sample is None:
            return _Share(0.0, self._monitor.need(0), {}, "")
        full, need = (
            sample.host_bytes / sample.host_limit_bytes,
            self._monitor.need(sample.host_bytes),
        )
        text = f"{need.host}: host {_of(sample.host_bytes, sample.host_limit_bytes)}"
        facts = {key: value for key, value in asdict(sample).items() if key != "device"}
        if (device := sample.device) is not None:
            full = max(full, device.used_bytes / device.limit_bytes)
            text += f", device {_of(device.used_bytes, device.limit_bytes)}"
            facts |= {f"device_{key}": value for key, value in asdict(device).items()}
        return _Share(full, need, facts, text)

    def _do(self, decision: Decision, step: int, worst: "_Share") -> None:
        before = own_bytes()
        times = self._ladder.taken.count(decision.action)
        said = self._pull(decision.action, decision.way == "do", times)
        self._monitor.forget()
        if decision.action == Action.TRIM:
            said = f"{format_bytes(max(0, before - own_bytes()))} given back by rank 0"
        self._tell(step, worst, said, action=decision.action.value, way=decision.way)

    def _pull(self, action: Action, on: bool, times: int) -> str:
        """Do an action, or undo it; return what it was, in words."""
        assert self._engine is not None
        match action:
            case Action.TRIM:
                give_back()
                give_back_cache()
                _forget_pages(self._data_file)
                return "gave back what was free"
            case Action.SHRINK_BUFFERS:
                self._loader.set_prefetch(0 if on else PREFETCH_BYTES)
                return "steps are built when they are needed" if on else "steps are built ahead"
            case Action.SAVE_IN_PIECES:
                assert self._saver is not None
                self._saver.set_in_pieces(on)
                return "training waits for saves" if on else "saves go on in the background"
            case Action.SPLIT_MICRO_BATCHES:
                rows = max(1, self._whole_micro_size >> times)
                self._loader.set_micro_size(rows)
                return f"micro-batches of {rows} rows"
            case _:
                return self._engine.apply(action, on)

    def _tell(self, step: int, worst: "_Share", said: str, **fields: str) -> None:
        message = f"{worst.text}: {said}"
        rank = worst.need.rank
        self._events.write(
            "governor",
            step,
            rank,
            **fields,
            message=message,
            **worst.facts,
        )
        log.info("step %d: memory: %s", step, message)


@dataclass(frozen=True)
class _Share:
    """How full one rank's memory is: the share in use, and the figures."""

    full: float
    need: Need
    facts: Mapping[str, Any]
    text: str


def _of(used: int, limit: int) -> str:
    return f"{format_bytes(used)} of {format_bytes(limit)}"


def _forget_pages(file: Path) -> None:
    """Drop the page cache of a file that is read again only in the next epoch."""
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError:
        return
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
