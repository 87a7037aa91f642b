"""How much of the machine other processes take while tools/bench.py measures.

    CPU seconds of the cores that this process may use - its own and those of all that it started
    = CPU seconds of others; over the cores' seconds that is their share

The hypervisor's are others too (steal). Children that have ended are in their parent's figures.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

QUIET, DISTURBED = 0.05, 0.10  # others' share until which one begins; above which one repeats
WINDOW_S = 2.0  # the share over less is coarse: the kernel counts in hundredths of a second


@dataclass(frozen=True)
class Reading:
    """The CPU seconds that others have had since the machine's start, at a ``time`` since 1970."""

    time: float
    others_s: float


def read_others(pid: int | None = None) -> Reading:
    """Read both now; others are all but ``pid``, else this process, and what it started."""
    cores, now = psutil.cpu_times(percpu=True), time.time()
    mine = [cores[core] for core in os.sched_getaffinity(0) if core < len(cores)]
    busy_s = sum(c.user + c.nice + c.system + c.irq + c.softirq + c.steal for c in mine)
    top = psutil.Process(pid)
    # A child that ends in between is in its parent's figures, which are therefore read last.
    for one in (*reversed(top.children(recursive=True)), top):
        with contextlib.suppress(psutil.NoSuchProcess):
            own = one.cpu_times()
            busy_s -= own.user + own.system + own.children_user + own.children_system
    return Reading(now, busy_s)


def share_between(readings: Sequence[Reading], begin: float, end: float) -> float:
    """Return others' share of the cores from the last reading before ``begin`` to the first after
    ``end``.
    """
    first = [one for one in readings if one.time <= begin][-1:] or readings[:1]
    last = [one for one in readings if one.time >= end][:1] or readings[-1:]
    passed_s = last[0].time - first[0].time
    if passed_s <= 0:
        return 0.0
    taken = (last[0].others_s - first[0].others_s) / passed_s / len(os.sched_getaffinity(0))
    return min(1.0, max(0.0, taken))


def wait_for_quiet(
    limit_s: float,
    look: Callable[[], Reading] = read_others,
    pause: Callable[[float], object] = time.sleep,
) -> bool:
    """Wait until others take little, ``limit_s`` seconds at most; return whether they do.

    Says so if they do not.
    """
    readings = [look()]
    while True:
        pause(WINDOW_S)
        readings.append(look())
        share = share_between(readings[-2:], readings[-2].time, readings[-1].time)
        waited_s = readings[-1].time - readings[0].time
        if share < QUIET:
            return True
        if waited_s >= limit_s:
            print(
                f"not quiet after {waited_s:.0f} s: other processes take {share:.0%} of the cores,"
                f" expected less than {QUIET:.0%}; measuring all the same",
                flush=True,
            )
            return False
