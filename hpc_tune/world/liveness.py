"""The limits of all watches, explained by the table in world/watch.py, and their shared code."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Literal, NoReturn

import psutil

from hpc_tune.errors import EXIT_FAILED, HpcTuneError, WorldError
from hpc_tune.log import print_line

# Whoever ends the world has this long to report, perhaps to a store or a file system that does not
# answer. With the default run.host_timeout of 20 s all ranks have exited within 30.
FAILURE_REPORT_LIMIT_S = 6.0
GIL_TIMEOUT_FACTOR = 2  # x run.timeout: a library that holds Python's lock may still be reading

# HostWatch
NUM_KEEPALIVE_PROBES = 3  # a lost packet or two are no outage; each has a quarter of the limit
CONNECT_LIMIT_S = 30.0
HELLO_LIMIT_S = 2.0
HOST_LOSS_SETTLE_S = 0.15  # the ranks of a lost host end one after the other
# By then a live rank on rank 0's host has reported; a launcher may end this rank soon after.
NEIGHBORS_REPORT_LIMIT_S = 0.4
# Within seconds of a rank's end, ranks of its node report it, and its launcher ends the others.
RANK_END_REPORT_LIMIT_S = 10.0
# If no rank is left there to report; the main thread may know more before.
EMPTY_NODE_REPORT_DELAY_S = 1.0
# Less than a rank waits before it exits after it hears of another's end.
JOINT_END_WINDOW_S = 0.5

# HangWatch; within a short limit it looks NUM_HANG_CHECKS times
HANG_CHECK_EVERY_S, NUM_HANG_CHECKS = 1.0, 10

# StallWatch and RollCall
STEP_CHECK_EVERY_S, NUM_STEP_CHECKS = 5.0, 20
TORCH_TIMEOUT_MARGIN_S = 60.0  # torch ends a collective later: it does not know who is missing

# NcclWatch
NCCL_CHECK_EVERY_S = 1.0
NCCL_CAUSE_LIMIT_S = 12.0  # more than RANK_END_REPORT_LIMIT_S
MIN_SUSPENSION_GAP_S = 30.0  # between two looks: no thread of a busy rank is that late

# StartupWatchdog
STOP_CHECK_EVERY_S = 0.2
STOP_GRACE_S = 5.0  # for phases that check the flag themselves
STOP_MARGIN_S = STOP_GRACE_S + 2.0  # before the time limit

# watch_launcher
LAUNCHER_CHECK_EVERY_S = 1.0

# time_limit
START_LIMIT_S = 300.0  # how long a probe waits for all ranks; a start uses run.start_timeout
START_LIMIT_PER_RANK_S = 0.2  # NCCL connects thousands of ranks in 10 to 60 s
SHUTDOWN_LIMIT_S = 300.0
CONTROL_TIMEOUT_S = 6 * 3600.0  # one rank may prepare data or save for hours while the others wait

# RunLock
LOCK_TOUCH_EVERY_S = 10.0
LOCK_STALE_S = 120.0  # a busy rank's thread may be late, and so may a file's time on other hosts
LOCK_VISIBILITY_LIMIT_S = 30.0  # on another host
LOCK_SETTLE_S = 0.5  # then two starts that take over at once both see which of them was last
LOCK_CHECK_EVERY_S = 1.0

# HeartbeatFile
HEARTBEAT_EVERY_S = 5.0
LATE_HEARTBEAT_S = 12.0
DEAD_HEARTBEAT_S = 30.0

# Who reports how a world fails
STORE_LIMIT_S = 2.0
ABORT_LIMIT_S = 5.0
OUTPUT_DRAIN_S = 0.2  # Hydra drops what a rank printed just before the Abort of any rank
DEATH_NOTICE_LIMIT_S = 0.3  # a dying process closes its connections a little before it is gone
OTHER_RANKS_REPORT_LIMIT_S = 1.5  # rank 0, or a rank on the dead rank's node, can name it
OTHER_RANKS_END_LIMIT_S = 0.1  # a launcher ends the ranks of a node one after the other
# Before there is a world, rank 0 reports first and its end ends the others.
RANK_0_REPORT_LIMIT_S = 1.5
SILENT_RANK_WAIT_S = 5.0  # for the rank that reports to end the world


class Watcher:
    """Calls each of ``checks`` at ``start`` and then every ``every_s`` seconds, in its own thread.

    A thread ends when its check returns True; all threads end after ``close``.
    """

    def __init__(self, name: str, every_s: float, *checks: Callable[[], bool | None]) -> None:
        self._name, self._every_s, self._checks = name, every_s, checks
        self._closed, self._close_lock = threading.Event(), threading.Lock()
        self.has_started = False

    @property
    def is_closed(self) -> bool:
        """Whether it is closed."""
        return self._closed.is_set()

    def start(self) -> None:
        """Start the threads."""
        self.has_started = True
        for check in self._checks:
            threading.Thread(target=self._run, args=(check,), name=self._name, daemon=True).start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Check during the block."""
        self.start()
        try:
            yield
        finally:
            self.close()

    def wait(self, seconds: float) -> bool:
        """Wait within a check; tell whether the watcher was closed meanwhile."""
        return self._closed.wait(seconds)

    def run_unless_closed(self, action: Callable[[], object]) -> None:
        """Call ``action`` unless closed; ``close`` waits until it returns."""
        with self._close_lock:
            if not self.is_closed:
                action()

    def close(self) -> None:
        """Stop checking."""
        with self._close_lock:
            self._closed.set()

    def _run(self, check: Callable[[], bool | None]) -> None:
        while not self.is_closed and not check():
            self._closed.wait(self._every_s)


def make_stall_check(
    get_progress: Callable[[], object],
    limit_s: float,
    every_s: float,
    on_stall: Callable[[], object],
) -> Callable[[], bool]:
    """Return a function to call every ``every_s`` seconds. It calls ``on_stall`` and returns True
    once ``get_progress()`` has not changed for ``limit_s`` seconds.

    It counts its calls and reads no clock, so a job that was suspended as a whole does not look
    hung.
    """
    last_mark: object = None
    still_s = 0.0

    def check_progress() -> bool:
        nonlocal last_mark, still_s
        mark = get_progress()
        still_s = still_s + every_s if mark == last_mark else 0.0
        last_mark = mark
        if still_s < limit_s:
            return False
        on_stall()
        return True

    return check_progress


def start_limit_s(start_timeout: float | Literal["auto"], num_ranks: int) -> float:
    """Return the seconds that each part of the start of a world may take."""
    if start_timeout != "auto":
        return start_timeout
    return START_LIMIT_S + START_LIMIT_PER_RANK_S * num_ranks


def run_after(seconds: float, action: Callable[[], object]) -> threading.Timer:
    """Call ``action`` after some time, unless the returned timer is canceled."""
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    return timer


def exit_soon() -> None:
    """End this process after ``FAILURE_REPORT_LIMIT_S``, even if its error is not reported yet."""
    run_after(FAILURE_REPORT_LIMIT_S, lambda: os._exit(EXIT_FAILED))


def die(label: str, exit_code: int) -> NoReturn:
    """End the whole world now with this exit code; never returns. ``label`` is this rank.

    A plain exit would hang forever in MPI's Finalize while peers wait, so this calls MPI's Abort or
    ``os._exit``.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Absent, or half imported if the limit ran out inside MPI_Init.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and hasattr(mpi, "COMM_WORLD"):

        def give_up() -> None:
            print_line(f"{label}: MPI's Abort did not end it, exiting")
            os._exit(exit_code)

        run_after(ABORT_LIMIT_S, give_up)
        time.sleep(OUTPUT_DRAIN_S)
        if mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.COMM_WORLD.Abort(exit_code)
    os._exit(exit_code)


@contextmanager
def time_limit(condition: str, seconds: float, hint: str, label: str) -> Iterator[None]:
    """End the world if the block does not finish in time, and print who waited for what."""

    def expire() -> None:
        print_line(f"{label}: waited {seconds:.0f} s for {condition}; {hint}")
        die(label, EXIT_FAILED)

    timer = run_after(seconds, expire)
    try:
        yield
    finally:
        timer.cancel()
        # A thread that still runs while the interpreter ends, and then drops the last reference to
        # a process group, aborts the process.
        timer.join(1.0)


# -- Ends the world when a rank hangs in work that it does alone, such as reading from a dead disk.
#
# The other ranks do not notice: they wait for hours, since one rank may work that long.
#
# A library that hangs while it holds the interpreter's lock (HDF5, safetensors) stops every other
# Python thread. So the watch sets a timer of faulthandler, which ends the process with a traceback
# when it is not reset in time.


class HangWatch:
    """Watches the main thread in ``watching``; ends the world by ``on_failure`` in a thread."""

    def __init__(self, limit_s: float, on_failure: Callable[[HpcTuneError], None]) -> None:
        """Call it a hang if nothing has been computed or read for ``limit_s`` seconds."""
        self._limit_s, self._end_world = limit_s, on_failure

    @contextmanager
    def watching(self, activity: str) -> Iterator[None]:
        """Watch the block, which does ``activity``."""
        every_s = min(HANG_CHECK_EVERY_S, self._limit_s / NUM_HANG_CHECKS)
        ends_if_still = make_stall_check(
            read_progress, self._limit_s, every_s, partial(self._report_hang, activity)
        )

        def check_progress() -> bool:
            watcher.run_unless_closed(self._reset_timer)
            return ends_if_still()

        watcher = Watcher("hang", every_s, check_progress)
        self._reset_timer()
        try:
            with watcher.watching():
                yield
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _report_hang(self, activity: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        exit_soon()  # reporting it may wait for the same disk
        self._end_world(
            WorldError(
                f"{activity}: nothing was read or computed for {self._limit_s:.0f} s "
                "(run.timeout): check for a file system that hangs"
            )
        )

    def _reset_timer(self) -> None:
        limit_s = GIL_TIMEOUT_FACTOR * self._limit_s
        faulthandler.dump_traceback_later(limit_s, exit=True, file=2)


def inspect_main_thread() -> tuple[FrameType | None, int]:
    """Return the main thread's current frame, and the CPU time that it has used, in ns."""
    main = threading.main_thread().ident or 0  # None before a thread starts
    spent_ns = time.clock_gettime_ns(time.pthread_getcpuclockid(main))
    return sys._current_frames().get(main), spent_ns


def read_progress() -> tuple[float, ...]:
    """Return counters that grow while the main thread, or a child, computes or reads."""
    return (inspect_main_thread()[1], _disk_bytes_read(), *(_cpu_s(pid) for pid in _child_pids()))


def _disk_bytes_read() -> int:
    """Return the bytes that this process has read from disks, mapped pages included."""
    # If the kernel does not count it, psutil has no such method.
    with contextlib.suppress(psutil.Error, OSError, ValueError, AttributeError):
        return psutil.Process().io_counters().read_bytes
    return 0


def _child_pids() -> list[int]:
    # Called every second: psutil's children() would look at every process of the node.
    try:
        return [*map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())]
    except (OSError, ValueError):
        return []


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and of the children that it has waited for."""
    try:
        return sum(psutil.Process(pid).cpu_times()[:4])  # without iowait, the wait for disks
    except (psutil.Error, OSError):
        return 0
