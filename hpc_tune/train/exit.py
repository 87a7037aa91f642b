"""How a run ends early: with an error, or asked to stop before the first step.

join_world, ending_world_on_error   the scopes of a run: an error in one is reported once and
                                    ends every rank
startup_watchdog    stops the phases before the first step, which cannot check the stop flag
MemoryShortageHandler
                    stops a run that runs out of memory between two steps: the monitor's thread sees
                    the limit near, or an allocation fails; exit code 75, and the run can be resumed
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hpc_tune.config.schema import MemoryConfig, RunSettings
from hpc_tune.errors import (
    EXIT_FAILED,
    EXIT_USER_ERROR,
    ConfigError,
    DiskError,
    GoneError,
    InterruptError,
    LostHostError,
    MemoryBudgetError,
    RemoteError,
    ResumableStop,
)
from hpc_tune.faults import Faults
from hpc_tune.log import configure_logging, log, print_line
from hpc_tune.memory.device import (
    describe_failed_allocation,
    find_device_memory,
    is_device_oom,
    is_out_of_memory,
)
from hpc_tune.memory.host import find_host_limit
from hpc_tune.memory.monitor import MemoryMonitor, MemoryShortage
from hpc_tune.packages import explain_import_failure
from hpc_tune.rundir import outcome
from hpc_tune.rundir.facts import append_failure_details
from hpc_tune.rundir.json_lines import EVENTS_FILE, EventsWriter
from hpc_tune.rundir.outcome import Outcome, stopped_outcome
from hpc_tune.rundir.owner import PREPARED_FOLDER, InUseError, release_lock, remove_new_files
from hpc_tune.train.governor import MORE_MEMORY_ADVICE, Governor, memory_outcome_facts
from hpc_tune.units import format_bytes, format_seconds
from hpc_tune.world import liveness
from hpc_tune.world.bootstrap import bootstrap
from hpc_tune.world.comm import Comm, ResumePoint
from hpc_tune.world.failure import (
    Failure,
    announce_exit,
    claim_failure_report,
    end_world,
    find_exit_code,
    is_broken_connection,
    print_failure,
)
from hpc_tune.world.processes import release_spare_files
from hpc_tune.world.stop import StopFlag, process_start_s


@contextmanager
def join_world(
    settings: RunSettings, run_dir: Path | None, join: Callable[..., Comm] | None = None
) -> Iterator[Comm]:
    """Join the world for a block; an error in the block ends every rank.

    ``join`` replaces ``bootstrap`` in tests.
    """
    with ending_world_on_error(None, run_dir):
        comm = (join or bootstrap)(settings, partial(fail_run, run_dir=run_dir))
        configure_logging(comm.world.rank)
    with ending_world_on_error(comm, run_dir):
        yield comm


@contextmanager
def ending_world_on_error(comm: Comm | None, run_dir: Path | None) -> Iterator[None]:
    """End every rank if an error is raised in the block; see ``fail_run``."""
    try:
        yield
    except KeyboardInterrupt:
        fail_run(comm, InterruptError(), run_dir)
    except Exception as error:
        reason = explain_import_failure(error)  # of a package: ranks import some late
        fail_run(comm, error if reason is None else ConfigError(reason), run_dir)


@contextmanager
def startup_watchdog(
    comm: Comm, stop: StopFlag, run_dir: Path, resume_point: ResumePoint
) -> Iterator["StartupWatchdog"]:
    """Watch ``stop`` in a block until the watchdog is closed; raise the cause of its errors."""
    watchdog = StartupWatchdog(comm, stop, run_dir, resume_point)
    try:
        with raising_cause(watchdog.cause_of):
            yield watchdog
    finally:
        watchdog.close()


@contextmanager
def raising_cause(cause_of: Callable[[BaseException], BaseException]) -> Iterator[None]:
    """Replace an error raised in the block with its cause."""
    try:
        yield
    except Exception as error:
        cause = cause_of(error)
        if cause is error:
            raise
        raise cause from None


def fail_run(comm: Comm | None, error: BaseException, run_dir: Path | None) -> NoReturn:
    """Report the error once for the whole world, write outcome.json, and end every rank."""
    release_spare_files()
    run_dir = None if isinstance(error, InUseError) else run_dir
    if isinstance(error, OSError):
        error = (
            DiskError.from_os_error(error, comm.activity[0] if comm is not None else "starting")
            or error
        )
    end_world(comm, error, partial(_report_and_release, run_dir=run_dir))


def _report_and_release(comm: Comm | None, error: BaseException, run_dir: Path | None) -> int:
    _clean_up_refused_start(comm, error, run_dir)
    code, has_reported = _report_error(comm, error, run_dir)
    # The rank that reports ends the world, perhaps before rank 0 can do anything more.
    if comm is not None and run_dir is not None and (has_reported or comm.is_rank_0):
        release_lock(run_dir, comm.nonce)
    return code


def _clean_up_refused_start(comm: Comm | None, error: BaseException, run_dir: Path | None) -> None:
    """Remove the files that a refused start made in the run directory, and report what remains.

    Only rank 0 does this, since other hosts may see another folder.
    """
    if comm is None or not comm.is_rank_0 or run_dir is None:
        return
    files, is_refused = comm.resume_point.initial_files, find_exit_code(error) == EXIT_USER_ERROR
    if files is not None and is_refused and (leftovers := remove_new_files(run_dir, files)):
        words = "prepared data" if leftovers == [PREPARED_FOLDER] else ", ".join(leftovers)
        print_line(f"this start left {words} in run.dir={run_dir}")


def _report_error(
    comm: Comm | None, error: BaseException, run_dir: Path | None
) -> tuple[int, bool]:
    """Print and write the error unless another rank does; return the exit code, and whether this
    rank reported it.

    The first report of a start stays in outcome.json, and every rank exits with its code.
    """
    code = find_exit_code(error)
    first_code = _first_reported_code(comm, error, run_dir)
    if first_code is not None and _may_be_consequence(error):
        return first_code, False
    is_urgent = isinstance(error, ResumableStop) and bool(error.facts)
    writes = is_urgent and first_code is None
    if writes:  # a rank that is short of memory writes this before anything that takes time
        _write_outcome(_make_outcome(comm, error, Failure("", ""), code), run_dir, comm)
    failure = claim_failure_report(comm, error)
    if failure is None:
        time.sleep(0 if is_urgent else liveness.SILENT_RANK_WAIT_S)
        first_code = None if writes else _first_reported_code(comm, error, run_dir)
        return code if first_code is None else first_code, writes
    if first_code is None and not is_urgent:  # claim_failure_report took time: look again
        first_code = _first_reported_code(comm, error, run_dir)
        if first_code is not None and _may_be_consequence(error):
            return first_code, False
    failure = _print_failure(_add_checkpoint_advice(failure, comm, error), comm, run_dir)
    if first_code is None and not is_urgent:
        _write_outcome(_make_outcome(comm, error, failure, code), run_dir, comm)
    announce_exit(comm, code if first_code is None else first_code)
    return code if first_code is None else first_code, True


def _print_failure(failure: Failure, comm: Comm | None, run_dir: Path | None) -> Failure:
    """Print the failure and write its details to a file; return it with the file's name."""
    if failure.details is not None:
        rank = 0 if comm is None else comm.world.rank
        details_file = append_failure_details(failure.details, run_dir, rank)
        if details_file is not None:
            facts = {**failure.facts, "details": str(details_file)}
            failure = Failure(failure.prefix, f"{failure.reason} Details: {details_file}", facts)
    print_failure(failure)
    return failure


def _add_checkpoint_advice(failure: Failure, comm: Comm | None, error: BaseException) -> Failure:
    """Add the last checkpoint to the report, and what to do if the run can be resumed."""
    step = None if comm is None else comm.resume_point.step
    if find_exit_code(error) != EXIT_FAILED:
        return failure
    sentences = [failure.reason.rstrip(".")]
    if step is not None and "last checkpoint" not in failure.reason.lower():
        sentences.append(f"Last checkpoint: step {step}" if step else "Nothing is saved yet")
    if failure.facts or is_broken_connection(error):
        purpose = "to start again" if step == 0 else "to resume from there" if step else ""
        hosts_note = ", on other hosts too," if failure.facts.get("lost_hosts") else ""
        sentences.append(f"Rerun the same command{hosts_note} {purpose}".rstrip(" ,"))
    facts = dict(failure.facts)
    if comm is not None:
        facts["during"] = comm.activity[0]
    if step is not None:
        facts["last_checkpoint"] = step
    return replace(failure, reason=". ".join(sentences) + ".", facts=facts)


def _first_reported_code(
    comm: Comm | None, error: BaseException, run_dir: Path | None
) -> int | None:
    """Return the exit code that another rank has already reported, or None.

    Both sides of a network split report it; the report of the rank with the store counts.
    """
    report = None
    if run_dir is not None:
        start = None if comm is None else comm.nonce
        report = outcome.read_outcome_of_start(run_dir, start, process_start_s())
    if report is None:  # the file may become visible later than the rank's message arrives
        return None if comm is None or comm.watch is None else comm.watch.reported_exit_code
    has_store = comm is not None and comm.world.rank == comm.store_rank
    is_cut_from = isinstance(error, LostHostError) and has_store
    return None if is_cut_from and report.get("lost_hosts") else int(report["exit_code"])


def _may_be_consequence(error: BaseException) -> bool:
    """Whether an error may only be a consequence of another rank's end.

    A launcher ends the other ranks with a signal, after that rank has written its report.
    """
    was_asked = isinstance(error, ResumableStop) and not error.facts
    return was_asked or isinstance(error, GoneError | RemoteError) or is_broken_connection(error)


def _make_outcome(comm: Comm | None, error: BaseException, failure: Failure, code: int) -> Outcome:
    if isinstance(error, ResumableStop):
        return stopped_outcome(error.reason, error.step, error.facts)
    if isinstance(error, InterruptError):
        return Outcome("stopped", "SIGINT, twice", None, code)
    facts: dict[str, Any] = {"error": type(error).__name__}
    if comm is not None:
        facts |= {"rank": comm.world.rank, "host": comm.world.hostname}
    return Outcome("failed", failure.reason, None, code, facts | dict(failure.facts))


def _write_outcome(result: Outcome, run_dir: Path | None, comm: Comm | None) -> None:
    if run_dir is None or not run_dir.is_dir():
        return
    try:
        outcome.write_outcome(result, run_dir, None if comm is None else comm.nonce)
        # The next start replaces outcome.json; this event still lets reports tell how it ended.
        events = EventsWriter(run_dir / EVENTS_FILE)
        rank, began_s = result.facts.get("rank", 0), process_start_s()
        events.write("stop", result.step, rank, reason=result.reason, began_s=began_s)
        events.close()
    except OSError as unwritten:
        print_line(f"the outcome of the run cannot be written: {unwritten}")


class StartupWatchdog:
    """Ends the world when this rank is asked to stop, until ``close``.

    It covers the phases before the first update of the weights: nothing is lost there, and reading
    data, loading and compiling cannot check the stop flag for minutes. A phase that can check the
    flag gets a few seconds to stop by itself, in an orderly way.
    """

    def __init__(
        self, comm: Comm, stop: StopFlag, run_dir: Path, resume_point: ResumePoint
    ) -> None:
        """Watch ``stop``."""
        self._comm, self._stop, self._run_dir = comm, stop, run_dir
        self._resume_point = resume_point
        self._watcher = liveness.Watcher(
            "startup-watchdog", liveness.STOP_CHECK_EVERY_S, self._stop_if_due
        )
        self._watcher.start()

    def close(self) -> None:
        """Stop watching; never returns if the watchdog is already ending the rank."""
        self._watcher.close()

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the cause of an error: a signal also ends a compiler, so that compiling fails."""
        reason = None if self._watcher.is_closed else self._stop_reason()
        return error if reason is None else self._make_error(reason)

    def _stop_if_due(self) -> None:
        reason = self._stop_reason(liveness.STOP_MARGIN_S)
        if reason is not None and not self._watcher.wait(liveness.STOP_GRACE_S):
            self._watcher.run_unless_closed(
                lambda: fail_run(self._comm, self._make_error(reason), self._run_dir)
            )

    def _make_error(self, reason: str) -> ResumableStop:
        activity, is_too_short = self._comm.activity[0], reason == "time limit"
        words = f"stopped while {activity} ({reason})"
        if is_too_short:
            limit = f"the limit of {format_seconds(self._stop.limit_s)}"
            words = f"{limit} ended while {activity}, before a step was done"
        step = self._resume_point.step
        return ResumableStop(reason, step, explanation=words, can_rerun=not is_too_short)

    def _stop_reason(self, margin_s: float = 0.0) -> str | None:
        return self._stop.reason(margin_s) if self._stop.is_requested(margin_s) else None


def make_monitor(memory: MemoryConfig, comm: Comm, run_dir: Path, faults: Faults) -> MemoryMonitor:
    """Return this rank's monitor; the first rank of each node writes the node's heartbeat.

    Raises:
        MemoryBudgetError: if the node's ranks already use all memory that they may use there.
    """
    world, beat = comm.world, None
    if world.local_rank == 0:
        path = outcome.heartbeat_path(run_dir, world.node)
        beat = outcome.HeartbeatFile(path, world.hostname, find_host_limit(memory.host_limit))
    monitor = MemoryMonitor(
        memory.host_limit,
        faults.device or find_device_memory(comm.device),
        memory.governor,
        world.rank,
        world.hostname,
        [peer.pid for peer in comm.roster if peer.node == world.node],
        beat,
        faults,
    )
    requested_limit, limit = memory.host_limit, monitor.limit
    if monitor.ranks_bytes() >= limit.num_bytes:
        raise MemoryBudgetError(
            f"{limit.source} grants {format_bytes(limit.num_bytes)} of host memory on "
            f"{world.hostname}, and its {world.local_size} ranks use "
            f"{format_bytes(monitor.ranks_bytes())} before the model is loaded; request more "
            "memory, or start fewer ranks per node"
        )
    if world.rank == 0 and requested_limit is not None and limit.num_bytes < requested_limit:
        log.warning(
            "memory.host_limit=%s has no effect: %s grants %s",
            format_bytes(requested_limit),
            limit.source,
            format_bytes(limit.num_bytes),
        )
    return monitor


class MemoryShortageHandler:
    """Ends a run that is short of memory. ``governor``: None before training begins."""

    def __init__(
        self, comm: Comm, monitor: MemoryMonitor, run_dir: Path, resume_point: ResumePoint
    ) -> None:
        self.governor: Governor | None = None
        self._comm, self._monitor = comm, monitor
        self._run_dir, self._resume_point = run_dir, resume_point

    def stop(self, shortage: MemoryShortage) -> None:
        """End the world before the kernel kills it; called by the monitor's thread."""
        fail_run(self._comm, self._make_error(shortage), self._run_dir)

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the cause of an error: a failed allocation becomes a resumable stop."""
        if self._monitor.mode != "on" or not is_out_of_memory(error):
            return error
        device = self._monitor.device
        if device is not None and is_device_oom(error):
            shortage = self._monitor.device_shortage(device.sample())
        else:
            sample = self._monitor.take_peaks()
            shortage = self._monitor.host_shortage(sample.host_bytes if sample else 0)
        words = f"{shortage.words}; an allocation failed: {describe_failed_allocation(error)}"
        return self._make_error(replace(shortage, words=words))

    def _make_error(self, shortage: MemoryShortage) -> ResumableStop:
        advice = f"Before training there is no memory-saving action: {MORE_MEMORY_ADVICE}"
        actions_taken: list[str] = []
        if self.governor is not None:
            advice, actions_taken = self.governor.advice(shortage), self.governor.actions_taken
        step = self._resume_point.step or 0
        reason = f"{shortage.words}. {advice}"
        words = f"stopped before memory ran out while {self._comm.activity[0]}: {reason}"
        return ResumableStop(reason, step, memory_outcome_facts(shortage, actions_taken), words)
