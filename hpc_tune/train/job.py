"""A job: everything around the training of a run, from its directory to its outcome."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hpc_tune.autotune.candidates import Candidate
from hpc_tune.checkpoint.store import Store
from hpc_tune.config.load import write_resolved_config
from hpc_tune.config.schema import RunConfig, RunSettings
from hpc_tune.errors import ConfigError, find_remedy
from hpc_tune.faults import Faults
from hpc_tune.log import log, log_to_file
from hpc_tune.memory.monitor import MemoryMonitor
from hpc_tune.rundir import outcome
from hpc_tune.rundir.json_lines import EVENTS_FILE, RESOLVED_CONFIG, STARTING_CONFIG, EventsWriter
from hpc_tune.rundir.outcome import PreviousRun
from hpc_tune.rundir.owner import (
    RunLock,
    list_run_files,
    make_owner,
    require_permissions,
    require_shared_dir,
)
from hpc_tune.trackers import require_trackers
from hpc_tune.train.exit import (
    MemoryShortageHandler,
    StartupWatchdog,
    fail_run,
    make_monitor,
    raising_cause,
    startup_watchdog,
)
from hpc_tune.world.comm import Comm, ResumePoint
from hpc_tune.world.liveness import HangWatch
from hpc_tune.world.nccl import TRACE_FOLDER, write_collectives_trace
from hpc_tune.world.stop import StopFlag, process_start_s
from hpc_tune.world.watch import RollCall, StallWatch

LOGS_FOLDER = "logs"


@dataclass(frozen=True)
class Job:
    """A job. ``config`` holds the user's settings, with the layout that parallel=auto chose:
    checkpoints store them, and a resumed run compares its settings with the stored ones.

    ``setup_comm`` ends the world if a rank hangs in its local work; ``step_comm`` is the same with
    the timeout of steps. ``previous_run``: how the last run in ``dir`` ended. ``candidate``: the
    layout that parallel=auto chose from measurements of this machine.
    """

    config: RunConfig
    setup_comm: Comm
    step_comm: Comm
    dir: Path
    previous_run: PreviousRun
    store: Store
    events: EventsWriter
    monitor: MemoryMonitor
    shortage_handler: MemoryShortageHandler
    resume_point: ResumePoint
    owner: RunLock
    stop: StopFlag
    watchdog: StartupWatchdog
    candidate: Candidate | None
    faults: Faults

    def make_stall_watch(self) -> StallWatch:
        """Return a watchdog that ends the world if training makes no progress."""
        comm, on_gpu = self.step_comm, self.setup_comm.device.type == "cuda"
        on_failure = partial(fail_run, self.setup_comm, run_dir=self.dir)
        writer = partial(write_collectives_trace, self.dir / TRACE_FOLDER, comm.world.rank, on_gpu)
        return StallWatch(comm, self.config.run.timeout, on_failure, writer)


@contextmanager
def open_job(
    config: RunConfig, comm: Comm, stop: StopFlag, candidate: Candidate | None, faults: Faults
) -> Iterator[Job]:
    """Lock the run directory and run the memory monitor for a block. Collective.

    The watchdog, the lock and the memory exit replace errors of the block with their causes.

    Raises:
        ConfigError: if the directory cannot be written, is not shared, or is in use by another job.
        MemoryBudgetError: see ``make_monitor``.
    """
    run_dir, is_rank_0 = Path(config.run.dir), comm.is_rank_0
    resume_point = comm.resume_point
    with startup_watchdog(comm, stop, run_dir, resume_point) as watchdog:
        on_failure = partial(fail_run, comm, run_dir=run_dir)
        comm = replace(comm, hang_watch=HangWatch(config.run.timeout, on_failure))
        saves = config.checkpoint
        store = Store(run_dir / "checkpoints", saves.keep, saves.keep_every, saves.keep_best)
        owner = RunLock(run_dir, make_owner(comm.nonce, run_dir), on_failure)
        resume_point.initial_files = comm.run_on_rank_0(
            "looking at the run directory", lambda: list_run_files(run_dir)
        )
        last = comm.run_on_rank_0(
            "making the run directory",
            lambda: _prepare_run_dir(
                run_dir, owner, config.run, partial(write_resolved_config, config)
            ),
        )
        _require_shared_run_dir(comm, run_dir)
        owner.remember_folder_inode()
        events = comm.run_and_agree(
            "opening the events", lambda: EventsWriter(run_dir / EVENTS_FILE if is_rank_0 else None)
        )
        monitor = comm.run_and_agree(
            "reading the memory limits", lambda: make_monitor(config.memory, comm, run_dir, faults)
        )
        training = comm.with_step_timeout()
        shortage_handler = MemoryShortageHandler(training, monitor, run_dir, resume_point)
        own_log = log_to_file(run_dir / LOGS_FOLDER / f"rank-{comm.world.rank}.txt")
        with own_log, raising_cause(owner.cause_of), raising_cause(shortage_handler.cause_of):
            if is_rank_0 and last.death:
                log.warning(last.death)
                events.write("warning", message=last.death, began_s=process_start_s())
            monitor.start(shortage_handler.stop)
            try:
                with RollCall(comm, config.run.timeout, on_failure).watching():
                    yield Job(
                        *(config, comm, training, run_dir, last, store, events),
                        *(monitor, shortage_handler, resume_point, owner, stop, watchdog),
                        *(candidate, faults),
                    )
            finally:
                if is_rank_0:
                    with suppress(OSError):
                        (run_dir / STARTING_CONFIG).unlink()


def _prepare_run_dir(
    run_dir: Path, owner: RunLock, run: RunSettings, write_settings: Callable[[Path], None]
) -> PreviousRun:
    """Make and lock the run directory; fail now, not at the first save, if it is not writable.

    The settings of an existing run are kept until nothing can refuse this start any more.
    """
    require_trackers(run)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        require_permissions(run_dir)
        owner.acquire()
        last = outcome.read_previous_run(run_dir)
        (run_dir / outcome.HEARTBEAT_FOLDER).mkdir(exist_ok=True)
        outcome.clear_heartbeats(run_dir)
        outcome.reserve_outcome_space(run_dir)
        write_settings(run_dir / STARTING_CONFIG)
        if not (run_dir / RESOLVED_CONFIG).exists():
            write_settings(run_dir / RESOLVED_CONFIG)
    except OSError as error:
        raise ConfigError(
            f"run.dir={run_dir} cannot be written: {error.strerror or error}{find_remedy(error)}; "
            "choose a folder on a file system that this job may write to and that has free space"
        ) from None
    return last


def _require_shared_run_dir(comm: Comm, run_dir: Path) -> None:
    if comm.world.num_nodes == 1:
        return
    is_first_of_node = comm.world.local_rank == 0 and not comm.is_rank_0
    check = partial(require_shared_dir, run_dir, comm.nonce, comm.roster[0].hostname)
    comm.run_and_agree("checking the run directory", check if is_first_of_node else lambda: None)
