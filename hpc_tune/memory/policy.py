"""The policy of the memory governor: pure functions of usage and of the actions taken before.

    peaks of the last steps, limit -> level (hysteresis, forecast) -> decide_action -> an action

The ladder's actions are taken in order, from those that cost nothing to leaving with a checkpoint.
Cheap actions begin at TIGHT, those that cost speed at HIGH; after each action the policy waits for
one step, whose peak shows what it saved. After many calm steps the last action is undone, and the
next one after twice as many, so that a run does not oscillate between two states. If a step runs
out of device memory, the next action that frees some is taken at once
(``decide_after_device_oom``).

Between step boundaries only ``must_stop_run`` decides, by whether the limit would be reached before
this process could act.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum, StrEnum
from itertools import accumulate, combinations, pairwise
from statistics import median
from typing import Literal


class Phase(StrEnum):
    """The phases in which a run's memory is planned and measured; files and messages use them."""

    START = "start"
    DATA = "data"
    LOAD = "load"
    REFERENCE = "reference"
    COMPILE = "compile"
    FIRST_STEP = "first step"
    STEADY = "steady"
    EVALUATE = "evaluate"
    SAVE_GATHERED = "save"
    SAVE_WAITING = "save, training waits"
    SAVE_IN_BACKGROUND = "save, in the background"
    MERGE = "merge, in one process"


class Level(IntEnum):
    """How near the limit is. WILL_EXCEED: it would be reached before the next step and save end.

    A device is CRITICAL when a step has run out of its memory, and never WILL_EXCEED.
    """

    CALM = 0
    TIGHT = 1
    HIGH = 2
    CRITICAL = 3
    WILL_EXCEED = 4

    @property
    def description(self) -> str:
        """The level in words, for messages such as "memory is tight"."""
        return "about to run out" if self == Level.WILL_EXCEED else self.name.lower()


class Action(Enum):
    """The memory-saving actions, in order: the level each begins at, and the memory it frees."""

    TRIM = "trim", Level.TIGHT, "any"
    SHRINK_BUFFERS = "shrink_buffers", Level.TIGHT, "host"
    SAVE_IN_PIECES = "save_in_pieces", Level.TIGHT, "host"
    SPLIT_MICRO_BATCHES = "split_micro_batches", Level.HIGH, "device"
    RECOMPUTE = "recompute", Level.HIGH, "device"
    USE_MORE_PIECES = "more_pieces", Level.HIGH, "device"
    OFFLOAD_ACTIVATIONS = "offload_activations", Level.HIGH, "device"
    MOVE_OPTIMIZER = "move_optimizer", Level.HIGH, "device"
    STOP_RUN = "leave", Level.CRITICAL, "any"

    level: Level
    freed_memory: Literal["any", "host", "device"]

    def __new__(
        cls, name: str, level: Level, freed_memory: Literal["any", "host", "device"]
    ) -> "Action":
        """Make the name alone the enum's value."""
        action = object.__new__(cls)
        action._value_, action.level, action.freed_memory = name, level, freed_memory
        return action


@dataclass(frozen=True)
class ActionHandle:
    """How an action is applied between two steps, in the same way on every rank.

    ``apply_times(times)`` makes it apply that many times in total, 0 undoes it; it returns in words
    what applies then. More than ``max_times`` times would free nothing more.
    """

    apply_times: Callable[[int], str]
    max_times: int = 1


@dataclass(frozen=True)
class FillLimits:
    """How full a memory may get, as shares of its limit: the only table of these shares.

    ``target_share``: plans advise to fill it up to here, and the search for a micro-batch size
    does. A plan that needs more than ``max_share`` is refused. ``level_thresholds``: where the
    governor's levels begin; on the way down a level ends only ``level_hysteresis`` below that.
    """

    target_share: float
    max_share: float
    level_thresholds: Mapping[Level, float]
    level_hysteresis: float

    def allows(self, num_bytes: int, limit: int) -> bool:
        """Return whether a plan may need ``num_bytes``."""
        return num_bytes <= self.max_share * limit


# At the host's limit the kernel kills processes.
HOST_LIMITS = FillLimits(
    target_share=0.85,
    max_share=0.97,
    level_thresholds={Level.CALM: 0.0, Level.TIGHT: 0.85, Level.HIGH: 0.92, Level.CRITICAL: 0.97},
    level_hysteresis=0.04,
)
# At a device's limit the allocator frees its cache, and then raises an error that is caught. So a
# full device is no danger, and only these events lead above TIGHT: see ``device_level``.
DEVICE_LIMITS = FillLimits(
    target_share=0.97,
    max_share=0.97,
    level_thresholds={Level.CALM: 0.0, Level.TIGHT: 0.99},
    level_hysteresis=0.01,
)
# Shares of a rank's memory, for arithmetic before it takes any.
MIN_PLANNED_MEMORY_SHARE = 0.5  # a run needs no plan if an upper bound of its usage is below this
MODEL_STATE_MEMORY_SHARE = 0.6  # for weights, gradients, optimizer state; the rest: activations
MEASURED_STATE_MEMORY_SHARE = 0.5  # the same, for the few blocks that layout=auto measures
COMPILE_MEMORY_SHARE = 1 / 8  # for workers of torch.compile
RETRY_WINDOW_STEPS = 8
_MIN_RETRIED_STEPS = 3  # of the window: an evaluation or a longer batch may cause one alone
_ACTIONS = tuple(Action)[1:-1]  # TRIM and STOP_RUN are always possible
_MIN_FORECAST_SHARE = 0.6  # of the limit: the first steps grow too, by optimizer state and caches
_FORECAST_STEPS = 20  # the level is HIGH if the limit would be reached within these steps
_STEPS_TO_SAFETY = 3  # this one, one until the ranks agree, and a save for which training waits
GROWTH_WINDOW_STEPS = 8
_CALM_STEPS = 50
_MAX_CALM_STEPS = 3200
_REACTION_S = 0.5  # from a sample to the end of a process: sampling, outcome.json, Abort
_MIN_SLOPES = 3
_TRIMMED_SHARE = 3 / 8  # at each end; more than one slope of three, which may be one allocation
_RESERVE_SHARE, _MIN_RESERVE_BYTES = 0.01, 8 << 20


@dataclass(frozen=True)
class PolicyState:
    """The state of the policy, the same on all ranks.

    ``taken_actions``: the actions in effect, in the order taken; the first
    ``num_permanent_actions`` of them are never undone. ``is_settling``: the last action's effect is
    awaited. ``patience``: the calm steps after which the last action is undone.
    """

    taken_actions: tuple[Action, ...] = ()
    is_trimmed: bool = False
    is_settling: bool = False
    calm_steps: int = 0
    patience: int = _CALM_STEPS
    num_permanent_actions: int = 0


@dataclass(frozen=True)
class ActionDecision:
    """An action to take, or to undo."""

    action: Action
    way: Literal["do", "undo"] = "do"


def growth_bytes_per_step(peaks: Iterable[int]) -> float:
    """Return by how many bytes peaks grow per step; 0 with fewer than GROWTH_WINDOW_STEPS.

    The smaller of two medians: of the differences between neighbors, which ignores one jump (a
    longer batch), and of the slopes between all pairs (Theil and Sen), which ignores oscillation.
    """
    recent_peaks = list(enumerate(list(peaks)[-GROWTH_WINDOW_STEPS:]))
    if len(recent_peaks) < GROWTH_WINDOW_STEPS:
        return 0.0
    slopes = [(j - i, (b - a) / (j - i)) for (i, a), (j, b) in combinations(recent_peaks, 2)]
    between_neighbors = median(slope for distance, slope in slopes if distance == 1)
    return max(0.0, min(between_neighbors, median(slope for _, slope in slopes)))


def host_level(
    previous_level: Level,
    used_bytes: int,
    limit: int,
    growth: float = 0.0,
    fill_limits: FillLimits = HOST_LIMITS,
) -> Level:
    """Return the level for a step's peak, given the level before and the growth per step."""
    share = used_bytes / limit
    level = max(lev for lev, bound in fill_limits.level_thresholds.items() if share >= bound)
    old_level = min(previous_level, max(fill_limits.level_thresholds))
    if (
        old_level > level
        and share >= fill_limits.level_thresholds[old_level] - fill_limits.level_hysteresis
    ):
        level = old_level
    if growth > 0 and share >= _MIN_FORECAST_SHARE:
        steps_left = (limit - reserved_bytes(limit) - used_bytes) / growth
        if steps_left < _STEPS_TO_SAFETY:
            return Level.WILL_EXCEED
        if steps_left < _FORECAST_STEPS:
            level = max(level, Level.HIGH)
    return level


def device_level(
    previous_level: Level, used_bytes: int, limit: int, step_retries: Sequence[bool]
) -> Level:
    """Return the level of a device for a step's peak, given the level before.

    ``step_retries``: for each of the last RETRY_WINDOW_STEPS steps, whether the allocator had to
    free its cache. If that persists, every step is slower, and the next longer batch may not fit.
    """
    if sum(step_retries) >= _MIN_RETRIED_STEPS and step_retries[-1]:
        return Level.HIGH
    if any(step_retries):
        return Level.TIGHT
    return host_level(previous_level, used_bytes, limit, fill_limits=DEVICE_LIMITS)


def decide_action(
    policy_state: PolicyState, level: Level, available_actions: Collection[Action]
) -> tuple[PolicyState, ActionDecision | None]:
    """Return the policy's state after this step boundary, and the decision.

    ``available_actions`` are the actions that can still save memory; an action that was taken is
    among them only if it can be taken again.
    """
    if level == Level.WILL_EXCEED:
        return policy_state, ActionDecision(Action.STOP_RUN)
    if level == Level.CALM:
        return _undo_if_calm(policy_state)
    policy_state = replace(policy_state, calm_steps=0)
    if policy_state.is_settling:
        return replace(policy_state, is_settling=False), None
    if not policy_state.is_trimmed:
        return replace(policy_state, is_trimmed=True, is_settling=True), ActionDecision(Action.TRIM)
    action = next((a for a in _ACTIONS if a in available_actions and level >= a.level), None)
    if action is not None:
        taken_actions = (*policy_state.taken_actions, action)
        policy_state = replace(policy_state, taken_actions=taken_actions, is_settling=True)
        return policy_state, ActionDecision(action)
    if level == Level.CRITICAL:
        return policy_state, ActionDecision(Action.STOP_RUN)
    return policy_state, None


def decide_after_device_oom(
    policy_state: PolicyState, available_actions: Collection[Action]
) -> tuple[PolicyState, ActionDecision]:
    """Return the policy's state and the decision after a step that ran out of a device's memory.

    The step is run again, so there is no time to see what another action saves. This action and all
    before it are never undone: the memory is needed, and running out elsewhere would end the run.
    """
    action = next((a for a in _ACTIONS if a in available_actions), None)
    if action is None:
        return policy_state, ActionDecision(Action.STOP_RUN)
    taken_actions = (*policy_state.taken_actions, action)
    policy_state = PolicyState(taken_actions, True, True, num_permanent_actions=len(taken_actions))
    return policy_state, ActionDecision(action)


def next_actions_after_oom(
    taken_actions: tuple[Action, ...], available_actions: Collection[Action]
) -> tuple[Action, ...]:
    """Return the actions for the start after memory ended a run.

    They are ``taken_actions``, then all cheap actions and the next costly one among
    ``available_actions``, the actions that can save more memory.
    """
    cheap_actions = [a for a in _ACTIONS if a.level == Level.TIGHT and a in available_actions]
    costly_actions = [a for a in _ACTIONS if a.level == Level.HIGH and a in available_actions]
    return (*taken_actions, *cheap_actions, *costly_actions[:1])


def must_stop_run(samples: Sequence[tuple[float, int]], limit: int, known_peak: int) -> bool:
    """Whether the limit would be reached before this process could act.

    ``samples`` are (seconds, bytes used) of the last half second. Usage up to ``known_peak``, the
    peak of a completed step or the one that the plan predicts, is no reason to stop.
    """
    used_bytes = samples[-1][1]
    if used_bytes <= known_peak:
        return False
    growth = sustained_growth_bytes_per_s(samples) * _REACTION_S
    return used_bytes + growth >= limit - reserved_bytes(limit)


def sustained_growth_bytes_per_s(samples: Sequence[tuple[float, int]]) -> float:
    """Return the bytes per second by which memory grows, 0 with too few samples.

    The smaller of two rates. First, the trimmed mean of the slopes between neighbors, weighted by
    time, over the middle quarter only: one allocation, however large, is over when sampled. Second,
    the growth over all samples less their maximum drawdown, the deepest fall from a peak: memory
    that has fallen as far as it rises now oscillates, wherever in a cycle samples begin and end.
    """
    pairs = [(t - s, (b - a) / (t - s)) for (s, a), (t, b) in pairwise(samples) if t > s]
    if len(pairs) < _MIN_SLOPES:
        return 0.0
    used_bytes = [num_bytes for _, num_bytes in samples]
    drawdown = max(
        peak - low for peak, low in zip(accumulate(used_bytes, max), used_bytes, strict=True)
    )
    whole_s, seen_s, middle = samples[-1][0] - samples[0][0], 0.0, 0.0
    from_s, to_s = _TRIMMED_SHARE * whole_s, (1 - _TRIMMED_SHARE) * whole_s
    for span_s, rate in sorted(pairs, key=lambda pair: -pair[1]):
        middle += rate * max(0.0, min(seen_s + span_s, to_s) - max(seen_s, from_s))
        seen_s += span_s
    return max(
        0.0, min(middle / (to_s - from_s), (used_bytes[-1] - used_bytes[0] - drawdown) / whole_s)
    )


def reserved_bytes(limit: int) -> int:
    """Return how many bytes below the limit stay free, for usage that samples miss."""
    return max(int(limit * _RESERVE_SHARE), _MIN_RESERVE_BYTES)


def free_bytes_below_level(used_bytes: int, limit: int, threshold_level: Level = Level.HIGH) -> int:
    """Return the bytes of host memory that may be allocated before ``threshold_level`` begins."""
    return max(0, int(limit * HOST_LIMITS.level_thresholds[threshold_level]) - used_bytes)


def _undo_if_calm(policy_state: PolicyState) -> tuple[PolicyState, ActionDecision | None]:
    calm_state = replace(
        policy_state, is_trimmed=False, is_settling=False, calm_steps=policy_state.calm_steps + 1
    )
    if (
        len(policy_state.taken_actions) == policy_state.num_permanent_actions
        or calm_state.calm_steps < policy_state.patience
    ):
        return calm_state, None
    undone_state = replace(
        calm_state,
        taken_actions=policy_state.taken_actions[:-1],
        calm_steps=0,
        patience=min(2 * policy_state.patience, _MAX_CALM_STEPS),
    )
    return undone_state, ActionDecision(policy_state.taken_actions[-1], "undo")
