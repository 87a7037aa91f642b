"""What a run does about memory: the governor's levels, agreed by all ranks and acted upon.

    step's worst -> levels of this rank -> counted over the ranks at the boundary -> decide -> lever

Each rank decides by the same counts and the same ladder, so all do the same thing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpc_tune.log import log
from hpc_tune.memory.monitor import MemorySample, Monitor, Need
from hpc_tune.memory.policy import Action, Decision, Ladder, Level, Lever, decide, lower
from hpc_tune.rundir.json_lines import Events
from hpc_tune.rundir.previous import Previous
from hpc_tune.units import format_bytes
from hpc_tune.world.comm import Comm

MORE_MEMORY = "ask for more memory or nodes; python -m hpc_tune plan predicts what each phase needs"
_LEVELS = tuple(Level)[1:]


class Governor:
    """Acts on memory pressure, or only reports it (memory.governor=observe)."""

    def __init__(
        self,
        comm: Comm,
        monitor: Monitor,
        events: Events,
        levers: Mapping[Action, Lever],
        previous: Previous,
    ) -> None:
        """Take the actions of the ``previous`` run again, and one rung more if memory ended it."""
        self._comm, self._monitor, self._events, self._levers = comm, monitor, events, levers
        self._ladder = Ladder()
        self._levels = (Level.CALM, Level.CALM)
        self._reported = Level.CALM
        self._sample: MemorySample | None = None
        if monitor.mode != "on":
            return
        actions = {action.value: action for action in Action}
        taken = tuple(actions[name] for name in previous.actions if actions.get(name) in levers)
        self._ladder = Ladder(taken)
        if previous.ended_for_memory:
            self._ladder = Ladder(lower(taken, self._available()))
        for action in dict.fromkeys(self._ladder.taken):
            self._pull(action)
        if self._ladder.taken:
            log.info("memory  actions of the last run stay in effect: %s", ", ".join(self.taken))

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
            available = self._available(
                host=host == level,
                device=device == level or self._comm.device.type == "cpu",
            )
            self._ladder, decision = decide(self._ladder, level, available)
        if decision is None and level == self._reported:
            return None
        worst = max(self._comm.gather(self._own_share()), key=lambda share: share.full)
        if level != self._reported:
            self._reported = level
            self._report(step, worst, f"memory is {level.name.lower()}", level=level.name.lower())
        if decision is None:
            return None
        if decision.action == Action.LEAVE:
            why = "it grows" if level == Level.DOOMED else "it stays there"
            return replace(worst.need, words=f"{worst.need.words}; {why}. {self.advice()}")
        self._do(decision, step, worst)
        return None

    def advice(self) -> str:
        """Return what the next start does, or what the user can do."""
        taken = self._ladder.taken
        coming = lower(taken, self._available())[len(taken) :]
        if not coming:
            return f"Nothing is left to be given up: {MORE_MEMORY}"
        return f"The next start begins with {', '.join(action.value for action in coming)}"

    def _available(self, host: bool = True, device: bool = True) -> frozenset[Action]:
        """Return what can still free memory of the host, or of the device."""
        taken, frees = self._ladder.taken, {"host": host, "device": device}
        return frozenset(
            action
            for action, lever in self._levers.items()
            if frees.get(action.frees) and taken.count(action) < lever.most
        )

    def _pull(self, action: Action) -> str:
        """Let an action hold as often as the ladder says; return in words what holds now."""
        return self._levers[action].pull(self._ladder.taken.count(action))

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
        result = self._pull(decision.action)
        self._monitor.forget()
        self._report(step, worst, result, action=decision.action.value, way=decision.way)

    def _report(self, step: int, worst: "_Share", text: str, **fields: str) -> None:
        message = f"{worst.text}: {text}"
        facts = {**fields, "message": message, **worst.facts}
        self._events.write("governor", step, worst.need.rank, **facts)
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


def facts_of(need: Need, taken: Sequence[str]) -> dict[str, Any]:
    """Return what outcome.json says of a run that left for want of memory."""
    facts = {key: value for key, value in asdict(need).items() if key != "words"}
    return {**facts, "governor": list(taken)}
