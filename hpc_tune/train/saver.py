"""All ranks save together: the store's protocol, the engine's tensors, the manifest's state.
Ranks agree on errors between steps; an error is never raised on one rank alone."""

import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Generic, Literal, TypeVar

from hpc_tune.checkpoint.export import assemble_adapter_folder
from hpc_tune.checkpoint.state import RunState
from hpc_tune.checkpoint.store import Store
from hpc_tune.checkpoint.writer import (
    CheckpointWriter,
    CudaStagingDevice,
    PinnedBlockPool,
    SaveReport,
    SaveReports,
    StagingDevice,
    choose_staging_bytes,
    total_block_bytes,
)
from hpc_tune.config.schema import CheckpointConfig
from hpc_tune.engine.base import Engine
from hpc_tune.errors import CheckpointError, HpcTuneError
from hpc_tune.faults import NO_FAULTS, Faults
from hpc_tune.log import log
from hpc_tune.memory.policy import Action, ActionHandle
from hpc_tune.model.regions import Region, WrittenFile
from hpc_tune.rundir import facts
from hpc_tune.rundir.facts import StartHistory
from hpc_tune.rundir.json_lines import EventsWriter
from hpc_tune.step.size import MOMENT_NAMES
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model
from hpc_tune.units import format_seconds
from hpc_tune.world.comm import Comm, ResumePoint

T = TypeVar("T")
FIRST_SAVE_GUESS_S = 5.0  # until one has been measured
OPTIMIZER_STATE_PREFIXES = tuple(f"{part}." for part in MOMENT_NAMES)
_POLL_S = 0.02


@dataclass(frozen=True)
class WriteOptions:
    """How a rank writes. The save fails if the file system accepts no byte for ``limit_s``.

    ``can_allocate(bytes)``: whether there is memory for copies. ``device(kept)`` returns what
    copies tensors from the engine's GPU, if there is one, into blocks that are kept between saves.
    ``owns_folder()``: whether this job still owns the run directory. ``faults`` are for tests.
    """

    limit_s: float
    can_allocate: Callable[[int], bool] = lambda num_bytes: True
    device: Callable[[PinnedBlockPool], StagingDevice] | None = None
    owns_folder: Callable[[], bool] = lambda: True
    faults: Faults = NO_FAULTS


@dataclass(frozen=True)
class _CommittedCheckpoint:
    """A committed checkpoint, its bytes, and the seconds from the start of the save to its end."""

    path: Path
    num_bytes: int
    save_s: float


@dataclass
class _RunningSave:
    """A save in progress: the writer of this rank's part, and the task that reports or commits."""

    state: RunState
    folder: Path
    began_s: float
    writer: CheckpointWriter
    task: "_ThreadTask[_CommittedCheckpoint | None]"


class Saver:
    """Writes checkpoints, one at a time, while training continues.

        start      rank 0 makes the folder, and a thread on every rank begins to write
        written    a thread of each rank reports to a thread of rank 0 (SaveReports)
        committed  by rank 0's thread after all reports: it writes the manifest and renames
        known      to all ranks at the next step boundary

    So a checkpoint exists as soon as its bytes are written, however long the current step takes and
    even if that step fails. The ranks learn of it in the exchange at each step boundary, and no
    collective waits for a slow file system. The collective methods: ``start``,
    ``add_evaluation``, ``complete_if_done``, ``finish``.
    """

    def __init__(
        self,
        comm: Comm,
        store: Store,
        engine: Engine,
        events: EventsWriter,
        settings: CheckpointConfig,
        write_options: WriteOptions,
        resume_point: ResumePoint,
        pack: Callable[[Path, Sequence[str]], list[WrittenFile]] | None,
    ) -> None:
        """Save as ``settings`` say. ``pack`` makes a checkpoint's adapter folder from its weight
        files.
        """
        self._pack, self._resume_point = pack, resume_point
        self._comm, self._store, self._engine, self._events = comm, store, engine, events
        self._settings, self._writing = settings, write_options
        self._background = settings.background and engine.saves_in_background
        self._in_pieces, self._block_pool = False, PinnedBlockPool()
        self._committed_step = resume_point.step or 0
        self._save: _RunningSave | None = None
        self._blocked_s = self._blocked_since_s = 0.0
        self._last_progress, self._last_progress_s = -1, 0.0
        self.last_save_s = FIRST_SAVE_GUESS_S
        self._waits_s: list[float] = []

    @property
    def memory_actions(self) -> dict[Action, ActionHandle]:
        """The memory-saving actions that the governor may apply to saves."""
        return {Action.SAVE_IN_PIECES: ActionHandle(self._set_save_in_pieces)}

    def release_staging_blocks(self) -> None:
        """Free the memory kept from the last save's copies; the next save allocates it again."""
        self._block_pool.release()

    @property
    def committed_step(self) -> int:
        """The step of the newest checkpoint that all ranks know of, 0 before the first."""
        return self._committed_step

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._save is not None

    @property
    def is_blocking(self) -> bool:
        """Whether training waits until a save is done."""
        return self._in_pieces or not self._background

    def pop_waits_s(self) -> list[float]:
        """Return how long this rank waited for each save that has finished since the last call."""
        waits_s, self._waits_s = self._waits_s, []
        return waits_s

    def start(self, state: RunState) -> None:
        """Begin to save the engine's tensors with ``state``; if ``is_blocking``, wait for the end.

        Raises:
            CheckpointError: on every rank, if any rank cannot write and checkpoint.required is set.
        """
        began_s, self._blocked_s = time.monotonic(), 0.0
        with self._count_blocked_time():
            try:
                folder, name = self._comm.run_on_rank_0(
                    "making a checkpoint folder",
                    lambda: (self._store.begin(state.step), os.urandom(8).hex()),
                )
            except HpcTuneError as error:
                self._handle_failed_save(state.step, error)
                return
            writer = self._start_writer(self._regions_by_file(folder))
            reports = SaveReports(self._comm, name)
            task = _ThreadTask(lambda task: self._report_or_commit(save, reports, task))
            save = self._save = _RunningSave(state, folder, began_s, writer, task)
            self._last_progress, self._last_progress_s = -1, began_s
            task.start()
        if self.is_blocking:
            self.finish()

    def add_evaluation(self, state: RunState) -> None:
        """Add the held-out loss in ``state`` to the checkpoint of its step, if there is one.

        A stop may have interrupted the evaluation that this one replaces.
        """
        if state.eval_loss is not None:
            changes = {
                "eval_loss": state.eval_loss,
                "evals": state.evals,
                "held_out": state.held_out,
            }
            self._comm.run_on_rank_0(
                "adding an evaluation to a checkpoint",
                lambda: self._store.change_state(state.step, changes),
            )

    def wait_until_weights_may_change(self) -> None:
        """Wait until all weights and optimizer state of a running save are copied or written."""
        if self._save is not None:
            with self._count_blocked_time():
                self._save.writer.release(self._writing.limit_s)

    def status(self) -> float:
        """Return what this rank adds to the next boundary's sum.

        That is 1 if this rank has done its part (rank 0: the commit), else 0. If its report or the
        commit failed, it is the number of ranks, so that all ranks learn of the error. A save that
        has written nothing for ``WriteOptions.limit_s`` is made to fail here.
        """
        if (save := self._save) is None:
            return 1.0
        if save.task.done:
            return 1.0 if save.task.error is None else float(self._comm.world.size)
        progress, now_s = save.writer.progress + save.task.progress, time.monotonic()
        if progress != self._last_progress:
            self._last_progress, self._last_progress_s = progress, now_s
        elif now_s - self._last_progress_s > (limit_s := self._writing.limit_s):
            reason = f"no byte was written for {limit_s:.0f} s: the file system hangs"
            if not save.writer.has_ended:
                save.writer.cancel(reason)  # its task then reports that to rank 0
            else:
                save.task.cancel(reason)
        return 0.0

    def complete_if_done(self, num_done: float) -> None:
        """Complete the current save if all ranks have done their part.

        ``num_done`` is the sum of ``status`` over all ranks.

        Raises:
            CheckpointError: on every rank, if any rank failed and checkpoint.required is set.
        """
        with self._count_blocked_time():
            self._record_finished_save(num_done)

    def finish(self) -> None:
        """Wait until a running save is committed. Raises like ``complete_if_done``."""
        with self._count_blocked_time():
            while self.is_saving:
                [num_done] = self._comm.sum([self.status()])
                self._record_finished_save(num_done)
                if self.is_saving:
                    time.sleep(_POLL_S)

    def _set_save_in_pieces(self, times: int) -> str:
        """Let training wait for later saves, which then copy nothing."""
        self._in_pieces = times > 0
        self._block_pool.keep_between_saves(not self.is_blocking)
        return "training waits for saves" if self._in_pieces else "saves run in the background"

    def _start_writer(self, regions_by_file: dict[Path, list[Region]]) -> CheckpointWriter:
        write_options, block_pool, budget = self._writing, self._block_pool, 0
        device = write_options.device(block_pool) if write_options.device is not None else None
        if not self.is_blocking:
            total = total_block_bytes([r for regions in regions_by_file.values() for r in regions])
            requested_bytes, on_device = self._settings.staging_bytes, device is not None
            budget = choose_staging_bytes(
                requested_bytes, total, on_device, write_options.can_allocate, block_pool.num_bytes
            )
            if budget < total and block_pool.num_bytes:  # cannot copy all: kept blocks are useless
                block_pool.release()
        return CheckpointWriter(regions_by_file, budget, write_options.faults, device)

    @contextmanager
    def _count_blocked_time(self) -> Iterator[None]:
        self._blocked_since_s = time.monotonic()
        yield
        self._blocked_s += time.monotonic() - self._blocked_since_s

    def _record_finished_save(self, num_done: float) -> None:
        if self._save is None or num_done < self._comm.world.size:
            return
        save, self._save = self._save, None
        try:
            own_result = self._comm.run_and_agree("saving a checkpoint", save.task.result)
        except HpcTuneError as error:
            save.writer.cancel(str(error))
            self._handle_failed_save(save.state.step, error)
            return
        checkpoint = self._comm.broadcast(own_result)
        assert checkpoint is not None
        self._committed_step = self._resume_point.step = save.state.step
        self.last_save_s = checkpoint.save_s
        blocked_s = self._blocked_s + time.monotonic() - self._blocked_since_s
        self._waits_s.append(blocked_s)
        self._events.write(
            "checkpoint",
            save.state.step,
            path=str(checkpoint.path),
            bytes=checkpoint.num_bytes,
            save_s=round(checkpoint.save_s, 3),
            blocked_s=round(blocked_s, 3),
        )

    def _regions_by_file(self, folder: Path) -> dict[Path, list[Region]]:
        """Return this rank's regions by file; optimizer state and adapters go to separate files."""
        regions, file = self._engine.regions(), f"{self._comm.world.rank:05d}.safetensors"
        parts = {folder / f"rank-{file}": regions}
        if self._pack is not None:
            is_state = [r.name.startswith(OPTIMIZER_STATE_PREFIXES) for r in regions]
            parts = {
                folder / f"{kind}-{file}": list(compress(regions, mask))
                for kind, mask in (("rank", is_state), ("weights", [not s for s in is_state]))
            }
        return {path: part for path, part in parts.items() if part}

    def _report_or_commit(
        self,
        save: _RunningSave,
        reports: SaveReports,
        task: "_ThreadTask[_CommittedCheckpoint | None]",
    ) -> _CommittedCheckpoint | None:
        """Report this rank's files to rank 0; on rank 0, commit the files of all. Runs in a thread.

        Raises:
            CheckpointError: on rank 0, if any rank failed to write or the commit fails; on any
                rank, if the store with the reports is gone.
        """
        try:
            own_report = SaveReport(tuple(save.writer.result()))
        except CheckpointError as error:
            own_report = SaveReport(error=str(error))
        if not self._comm.is_rank_0:
            reports.send(own_report)
            return None
        is_committed = False
        try:
            all_reports = reports.collect(own_report, task.raise_if_canceled)
            _require_no_write_errors(all_reports)
            files = [file for report in all_reports for file in report.files]
            path, files = self._commit(save, files, task)
            is_committed = True
        finally:
            if not is_committed and not task.done:  # after a cancel, another save may write there
                self._store.abandon(save.folder)
        self._resume_point.step = save.state.step  # in case the run ends before the next boundary
        num_bytes = sum(file.num_bytes for file in files)
        return _CommittedCheckpoint(path, num_bytes, time.monotonic() - save.began_s)

    def _commit(
        self,
        save: _RunningSave,
        files: list[WrittenFile],
        task: "_ThreadTask[_CommittedCheckpoint | None]",
    ) -> tuple[Path, list[WrittenFile]]:
        def raise_if_obsolete() -> None:
            task.raise_if_canceled()
            if not self._writing.owns_folder():
                raise CheckpointError(f"{save.folder}: another job has taken the run directory")

        if self._pack is not None:
            weights = [f.name for f in files if f.name.startswith("weights-")]
            other_files = [f for f in files if f.name not in weights]
            files = other_files + self._pack(save.folder, weights)
        task.raise_if_canceled()
        state = save.state.to_json()
        return self._store.commit(save.folder, state, files, raise_if_obsolete), files

    def _handle_failed_save(self, step: int, error: HpcTuneError) -> None:
        if self._settings.required:
            raise error
        self._events.write("warning", step, message=f"not saved: {error}")
        if self._comm.is_rank_0:
            log.warning("step %d was not saved, training continues: %s", step, error)


def open_saver(job: Job, model: Model, engine: Engine) -> Saver:
    """Return the saver of the trained values of ``engine`` into the run directory."""
    tune, pack = model.config.tune, None
    if tune.method != "full":
        pack = partial(assemble_adapter_folder, tune=tune, base=model.built.directory)
    write_options = WriteOptions(
        job.config.run.timeout,
        job.monitor.can_allocate,
        CudaStagingDevice if job.setup_comm.device.type == "cuda" else None,
        lambda: not job.owner.is_taken_over(),
        job.faults,
    )
    common = (job.step_comm, job.store, engine, job.events, job.config.checkpoint)
    return Saver(*common, write_options, job.resume_point, pack)


def _require_no_write_errors(reports: Sequence[SaveReport]) -> None:
    for rank, report in enumerate(reports):
        if report.error is not None:
            raise CheckpointError(f"rank {rank}: {report.error}" if rank else report.error)


class _ThreadTask(Generic[T]):
    """Work in a separate thread, from ``start`` on; the work gets the task as its argument."""

    def __init__(self, work: Callable[["_ThreadTask[T]"], T]) -> None:
        self.done = False
        self.progress = 0
        self.error: HpcTuneError | None = None
        self._result: T | None = None
        self._result_lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, args=(work,), name="checkpoint-commit", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def raise_if_canceled(self) -> None:
        """Record progress; raise in the thread if the work was canceled."""
        self.progress += 1
        if self.done:
            raise self.error or CheckpointError("the save was given up")

    def cancel(self, reason: str) -> None:
        """Mark the task as failed, unless it has ended."""
        self._set_result(None, CheckpointError(reason))

    def result(self) -> T:
        """Return the result of the work, or raise its error. Work that has not ended is abandoned,
        since another rank has failed.
        """
        self._set_result(None, None)
        if self.error is not None:
            raise self.error
        return self._result  # type: ignore[return-value]

    def _run(self, work: Callable[["_ThreadTask[T]"], T]) -> None:
        try:
            self._set_result(work(self), None)
        except HpcTuneError as error:
            self._set_result(None, error)
        except Exception as error:  # a thread's error must reach the loop
            self._set_result(None, CheckpointError(f"a checkpoint cannot be committed: {error!r}"))

    def _set_result(self, result: T | None, error: HpcTuneError | None) -> None:
        with self._result_lock:
            if not self.done:
                self._result, self.error, self.done = result, error, True


# -- When a checkpoint is due by the clock, and the interval with every_minutes=auto.
#
# Only rank 0 watches the clock; the ranks agree at the boundary before each step (control.py).


FIRST_SAVE_DUE_S = 300.0  # some launchers leave no time to save; and a failing save shows early
MIN_INTERVAL_S, MAX_INTERVAL_S = 300.0, 7200.0
DEFAULT_INTERVAL_S = 1800.0  # until a save has been measured
# Until the run itself has failed: 419 unplanned interruptions in 54 days of 16,384 GPUs on 2,048
# nodes (The Llama 3 Herd of Models, arXiv:2407.21783, table 5) are one per 264 node-days.
NODE_DAYS_PER_FAILURE = 264.0
_DAY_S = 86400.0
_NUM_RECENT_SAVES = 5  # the median of the newest saves is used
_MIN_LOGGED_CHANGE = 0.1


def best_save_interval_s(wait_s: float, mtbf_s: float) -> float:
    """Return the cheapest seconds between saves: sqrt(2 x wait x time between failures).

    ``wait_s`` is how long training waits for a save, ``mtbf_s`` the mean time between failures of
    all nodes together. Limited to 5 minutes to 2 hours. The formula is from J. W. Young, A first
    order approximation to the optimum checkpoint interval, CACM 17 (1974), and is the first order
    of J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps,
    FGCS 22 (2006), if a save takes far less time than passes between failures.
    """
    return min(max(math.sqrt(2 * wait_s * mtbf_s), MIN_INTERVAL_S), MAX_INTERVAL_S)


def choose_save_interval(history: StartHistory, num_nodes: int) -> tuple[float, str]:
    """Return the seconds between saves that follow from a run's history, and why (pure)."""
    if not history.waits_s:
        return (
            DEFAULT_INTERVAL_S,
            f"every {format_seconds(DEFAULT_INTERVAL_S)} until a save has been measured",
        )
    wait_s = statistics.median(history.waits_s[-_NUM_RECENT_SAVES:])
    if history.num_failures:
        mtbf_s = history.running_s / history.num_failures
        failures_text = f"{history.num_failures} failure{'s' * (history.num_failures > 1)}"
        reason = f"{failures_text} in {format_seconds(history.running_s)} of this run"
    else:
        mtbf_s = NODE_DAYS_PER_FAILURE * _DAY_S / num_nodes
        nodes = f"{num_nodes} node{'s' * (num_nodes > 1)}"
        reason = f"no failure so far, assumed one in {NODE_DAYS_PER_FAILURE:.0f} node-days, {nodes}"
    interval_s = best_save_interval_s(wait_s, mtbf_s)
    limit = {MIN_INTERVAL_S: ", at least", MAX_INTERVAL_S: ", at most"}.get(interval_s, "")
    limit += f" {format_seconds(interval_s)}" if limit else ""
    return interval_s, (
        f"every {format_seconds(interval_s)}: sqrt(2 x {wait_s:.2g} s that training waits for a "
        f"save x {format_seconds(mtbf_s)} between failures){limit} ({reason})"
    )


class SaveClock:
    """The clock that tells when this start's saves are due."""

    def __init__(
        self, every_minutes: float | Literal["auto"] | None, run_dir: Path, num_nodes: int
    ) -> None:
        """Start the clock; ``"auto"`` also uses the records of earlier starts in ``run_dir``."""
        self._is_auto, self._num_nodes = every_minutes == "auto", num_nodes
        self._interval_s: float | None = None
        self._history, self._began_s = StartHistory(), time.monotonic()
        if self._is_auto:
            self._history = facts.read_start_history(run_dir)
            self._update_interval()
        elif isinstance(every_minutes, int | float):
            self._interval_s = 60.0 * every_minutes
        self._saved_at_s = time.monotonic() - max(0.0, (self._interval_s or 0.0) - FIRST_SAVE_DUE_S)

    @property
    def time_until_due_s(self) -> float:
        """The seconds until a save is due: 0 or less once it is, infinity if never."""
        if self._interval_s is None:
            return math.inf
        return self._saved_at_s + self._interval_s - time.monotonic()

    def record_save_start(self) -> None:
        """Note that a save begins now."""
        self._saved_at_s = time.monotonic()

    def record_wait(self, wait_s: float) -> None:
        """Record how long training waited for a finished save."""
        if self._is_auto:
            self._history = replace(self._history, waits_s=(*self._history.waits_s, wait_s))
            self._update_interval()

    def _update_interval(self) -> None:
        previous_s, ran_s = self._interval_s, time.monotonic() - self._began_s
        history = replace(self._history, running_s=self._history.running_s + ran_s)
        self._interval_s, text = choose_save_interval(history, self._num_nodes)
        if previous_s is None or abs(self._interval_s / previous_s - 1) > _MIN_LOGGED_CHANGE:
            log.info("saves   %s", text)
