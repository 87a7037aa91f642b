"""Fault injection: what fails in a run, and where. An argument of ``train.run.run``, for tests.

A run calls these functions at fixed points, like the failpoints of FreeBSD's fail(9). They may
raise, wait, allocate memory, or end the process.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import Any, Literal

FaultPoint = Literal["boundary", "step", "extremes", "save"]


def _do_nothing(*_: object) -> None:
    pass


def _return_level(level: str) -> str:
    return level


@dataclass(frozen=True)
class Faults:
    """The faults of a run; none by default.

    ``join`` forms the world instead of ``world.bootstrap.bootstrap``.

    ``at(place, step)`` is called by the loop: before the ranks agree on what to do (boundary),
    before the engine's work (step), before the extremes of all ranks are computed (extremes), and
    before a save of that step begins (save).

    ``compute(rows)`` is called by the native engine before each micro-batch, also in evaluation,
    where gradients are off.

    ``write(index, copies)`` is called by the thread that writes a checkpoint, before each piece of
    the rank's values, with the piece's number and the live set of the numbers already copied.

    ``level(name)`` gets the level of host memory after each step and returns the one to act on,
    both by their names in ``memory.policy.Level``.

    ``device`` replaces the memory of this rank's device, as a ``memory.device.DeviceMemory``.
    ``sample_period_s`` replaces the monitor's time between two samples of memory.
    ``offloads_without_gpu`` allows offloading without a GPU, from the host to the host.
    """

    join: Callable[..., Any] | None = None
    at: Callable[[FaultPoint, int], None] = _do_nothing
    compute: Callable[[int], None] = _do_nothing
    write: Callable[[int, Set[int]], None] = _do_nothing
    level: Callable[[str], str] = _return_level
    device: Any = None
    sample_period_s: float | None = None
    offloads_without_gpu: bool = False


NO_FAULTS = Faults()
