"""When a checkpoint is due by the clock, and how far apart they are with every_minutes=auto.

Rank 0 alone looks at it: what it says is agreed at the boundary before each step (control.py).
"""

import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

from hpc_tune.log import log
from hpc_tune.rundir import failures
from hpc_tune.rundir.failures import StartHistory
from hpc_tune.units import format_seconds

FIRST_SAVE_S = 300.0  # some launchers leave no time to save; and a save that fails shows early
MIN_INTERVAL_S, MAX_INTERVAL_S = 300.0, 7200.0
DEFAULT_INTERVAL_S = 1800.0  # until a save has been measured
# Before a run has failed: 419 unplanned interruptions in 54 days of 16,384 GPUs on 2,048 nodes (The
# Llama 3 Herd of Models, arXiv:2407.21783, table 5) are one in 264 days of a node.
NODE_DAYS_PER_FAILURE = 264.0
_DAY_S = 86400.0
_RECENT_SAVES = 5  # the newest, whose median counts
_LOGGED_CHANGE = 0.1


def best_interval_s(wait_s: float, mtbf_s: float) -> float:
    """Return the seconds between saves that cost least: sqrt(2 x wait x time between failures).

    ``wait_s`` is how long training waits for a save, ``mtbf_s`` the mean time between failures of
    all nodes together. Within 5 minutes and 2 hours. The formula is that of J. W. Young, A first
    order approximation to the optimum checkpoint interval, CACM 17 (1974), and the first order of
    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS
    22 (2006), where a save takes far less time than there is between failures.
    """
    return min(max(math.sqrt(2 * wait_s * mtbf_s), MIN_INTERVAL_S), MAX_INTERVAL_S)


def choose_interval(history: StartHistory, num_nodes: int) -> tuple[float, str]:
    """Return the seconds between saves of a run with a history, and why (pure)."""
    if not history.waits_s:
        return (
            DEFAULT_INTERVAL_S,
            f"every {format_seconds(DEFAULT_INTERVAL_S)} until a save has been measured",
        )
    wait_s = statistics.median(history.waits_s[-_RECENT_SAVES:])
    if history.failures:
        mtbf_s = history.running_s / history.failures
        times = f"{history.failures} failure{'s' * (history.failures > 1)}"
        why = f"{times} in {format_seconds(history.running_s)} of this run"
    else:
        mtbf_s = NODE_DAYS_PER_FAILURE * _DAY_S / num_nodes
        nodes = f"{num_nodes} node{'s' * (num_nodes > 1)}"
        why = f"no failure so far: one in {NODE_DAYS_PER_FAILURE:.0f} days of a node, {nodes}"
    interval_s = best_interval_s(wait_s, mtbf_s)
    limit = {MIN_INTERVAL_S: ", at least", MAX_INTERVAL_S: ", at most"}.get(interval_s, "")
    limit += f" {format_seconds(interval_s)}" if limit else ""
    return interval_s, (
        f"every {format_seconds(interval_s)}: sqrt(2 x {wait_s:.2g} s that training waits for a "
        f"save x {format_seconds(mtbf_s)} between failures){limit} ({why})"
    )


class SaveClock:
    """The clock of this start's saves."""

    def __init__(
        self, every_minutes: float | Literal["auto"] | None, run_dir: Path, num_nodes: int
    ) -> None:
        """Begin; with ``"auto"`` what the starts before have left in ``run_dir`` counts."""
        self._is_auto, self._num_nodes = every_minutes == "auto", num_nodes
        self._interval_s: float | None = None
        self._history, self._began_s = StartHistory(), time.monotonic()
        if self._is_auto:
            self._history = failures.read_start_history(run_dir)
            self._update_interval()
        elif isinstance(every_minutes, int | float):
            self._interval_s = 60.0 * every_minutes
        self._saved_at_s = time.monotonic() - max(0.0, (self._interval_s or 0.0) - FIRST_SAVE_S)

    @property
    def due_in_s(self) -> float:
        """The seconds until a save is due: 0 or less once it is, infinity if never."""
        if self._interval_s is None:
            return math.inf
        return self._saved_at_s + self._interval_s - time.monotonic()

    def begin_save(self) -> None:
        """Note that a save begins now."""
        self._saved_at_s = time.monotonic()

    def record_wait(self, wait_s: float) -> None:
        """Take in a save that is there, and for how long training has waited for it."""
        if self._is_auto:
            self._history = replace(self._history, waits_s=(*self._history.waits_s, wait_s))
            self._update_interval()

    def _update_interval(self) -> None:
        ran_s = self._history.running_s + time.monotonic() - self._began_s
        before_s = self._interval_s
        now = choose_interval(replace(self._history, running_s=ran_s), self._num_nodes)
        self._interval_s, text = now
        if before_s is None or abs(self._interval_s / before_s - 1) > _LOGGED_CHANGE:
            log.info("saves   %s", text)
