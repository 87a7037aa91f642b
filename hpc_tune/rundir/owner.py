"""A run directory belongs to one job at a time: its lock file ``live.json`` names the job.

    another job's file -> it is still touched, or its process lives              -> refused
                       -> its process is gone, or it is silent for LOCK_STALE_S  -> taken over
    this job's file    -> touched by a thread of rank 0 while the run lives      -> removed at end

Hosts' clocks may differ, so ages are differences of two times from the same file system.

Also here: start.json, the files that a refused start removes again, permissions to resume another
user's run, and which run a mistyped path may mean.
"""

import contextlib
import difflib
import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hpc_tune.cluster.schedulers import find_job
from hpc_tune.errors import EXIT_FAILED, ConfigError, HpcTuneError
from hpc_tune.files import describe_missing_permission, may_read, may_write, write_file
from hpc_tune.log import log
from hpc_tune.rundir import facts, outcome
from hpc_tune.rundir.json_lines import EVENTS_FILE, RESOLVED_CONFIG, STARTING_CONFIG
from hpc_tune.units import list_some
from hpc_tune.world import liveness
from hpc_tune.world.processes import process_start_after_boot_s
from hpc_tune.world.stop import process_start_s

LOCK_FILE = "live.json"
_UNKNOWN_INODE = -1  # the file system did not answer
EndRunCallback = Callable[[HpcTuneError], None]


class InUseError(ConfigError):
    """The run directory belongs to another job, and this job must write nothing into it."""


class RunDirMovedError(InUseError):
    """The run directory was moved; what has its name now does not belong to this job."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(
            f"run.dir={run_dir} was renamed, removed or replaced while the run was writing into "
            "it, so the run ends here. Its checkpoints are in the original folder: rename that "
            "back, or set run.dir to its new name, and rerun the same command to resume"
        )


@dataclass(frozen=True)
class Owner:
    """The process of rank 0 of a job.

    ``nonce``: unique to the start of the run. ``start`` and ``since_s``: when the process started,
    in clock ticks since boot and in seconds since the epoch. ``place``: the scope in which its pid
    and ``folder``, the absolute path of the run directory, are valid. ``job`` and ``restart``: the
    scheduler's id of the job, and how often the scheduler has restarted it.
    """

    nonce: str
    host: str
    pid: int
    start: str
    place: str
    folder: str
    job: str
    restart: str
    since_s: float

    def __str__(self) -> str:
        """Describe the owner: ``"job 17 on host n1, pid 4711, since 2026-11-25 21:05:00"``."""
        job = f"job {self.job}" if self.job else "a run"
        timestamp = datetime.fromtimestamp(self.since_s).isoformat(" ", "seconds")
        return f"{job} on host {self.host}, pid {self.pid}, since {timestamp}"


_OWNER_ADAPTER = TypeAdapter(Owner)


def make_owner(nonce: str, run_dir: Path, environ: Mapping[str, str] = os.environ) -> Owner:
    """Return this process as the owner of ``run_dir``."""
    job = find_job(environ)
    return Owner(
        nonce,
        socket.gethostname(),
        os.getpid(),
        _process_start_ticks(os.getpid()) or "",
        _pid_scope(),
        str(run_dir.resolve()),
        "" if job is None else job.id,
        "0" if job is None else job.restart_count,
        process_start_s(),
    )


def is_owner_alive(owner: Owner, this_owner: Owner) -> bool | None:
    """Return whether the job of ``owner`` lives; None if this process cannot know."""
    if owner.place == this_owner.place:
        if _process_start_ticks(owner.pid) != owner.start:
            return False
        # The lock may have come with a copy.
        return True if owner.folder == this_owner.folder else None
    if owner.job and owner.job == this_owner.job and owner.restart != this_owner.restart:
        return False  # the scheduler restarts a job only after it has ended
    return None


class RunLock:
    """This job's lock on a run directory, from ``acquire`` to ``close``; rank 0 acquires it."""

    def __init__(
        self,
        run_dir: Path,
        this_owner: Owner,
        on_lost: EndRunCallback,
        touch_every_s: float = liveness.LOCK_TOUCH_EVERY_S,
        silent_s: float = liveness.LOCK_STALE_S,
    ) -> None:
        """``on_lost`` is called from a thread if another job takes ``run_dir`` over."""
        self._path, self._this_owner, self._end_run = run_dir / LOCK_FILE, this_owner, on_lost
        self._touch_every_s, self._silent_s = touch_every_s, silent_s
        self._watcher = liveness.Watcher("run-lock", touch_every_s, self._renew_lock)
        self._inode: int | None = None

    def acquire(self) -> None:
        """Acquire the run directory for this job, and renew the lock while it runs.

        Raises:
            InUseError: if it belongs to another job, which is named. OSError: if the file system
                refuses.
        """
        first_touched_s: float | None = None
        while not self._create_lock_file():
            lock_state = _read_owner(self._path)
            if lock_state is None:
                continue
            owner, touched_s, age_s = lock_state
            is_alive = None if owner is None else is_owner_alive(owner, self._this_owner)
            if is_alive or (first_touched_s is not None and touched_s != first_touched_s):
                raise InUseError(
                    f"run.dir={self._path.parent} is in use by {owner or 'another job'}: choose "
                    "another run.dir, or wait until that run has ended"
                )
            if is_alive is False or age_s > self._silent_s:
                self._take_over(owner)
                continue
            if first_touched_s is None:
                first_touched_s = touched_s
                log.info(
                    "run.dir=%s was in use by %s %.0f s ago: "
                    "waiting up to %.0f s to see whether it still is",
                    self._path.parent,
                    owner or "another job",
                    age_s,
                    self._silent_s - age_s,
                )
            time.sleep(min(liveness.LOCK_CHECK_EVERY_S, self._touch_every_s))
        self._watcher.start()

    def is_taken_over(self) -> bool:
        """Return whether another job has taken over the folder."""
        return read_nonce(self._path) not in (None, self._this_owner.nonce)

    def remember_folder_inode(self) -> None:
        """Remember the inode of the run directory, to detect that it was moved; for any rank."""
        self._inode = _folder_inode(self._path.parent)

    def cause_of(self, error: BaseException) -> BaseException:
        """Return ``RunDirMovedError`` if the folder was moved and so caused ``error``, else it."""
        has_moved = not isinstance(error, InUseError) and self._has_moved()
        return RunDirMovedError(self._path.parent) if has_moved else error

    def _has_moved(self) -> bool:
        return self._inode is not None and _folder_inode(self._path.parent) not in (
            self._inode,
            _UNKNOWN_INODE,
        )

    def close(self) -> None:
        """Release the folder, if this rank has acquired it."""
        self._watcher.close()
        if self._watcher.has_started:
            release_lock(self._path.parent, self._this_owner.nonce)

    def _create_lock_file(self) -> bool:
        """Create the lock file if there is none; return whether it is this job's."""
        try:
            file = self._path.open("x", encoding="utf-8")
        except FileExistsError:
            return read_nonce(self._path) == self._this_owner.nonce
        try:
            with file:
                json.dump(asdict(self._this_owner), file)
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _take_over(self, owner: Owner | None) -> None:
        log.info("run.dir=%s: %s ended without releasing it", self._path.parent, owner or "another")
        write_file(self._path, json.dumps(asdict(self._this_owner)))
        time.sleep(liveness.LOCK_SETTLE_S)

    def _renew_lock(self) -> bool:
        watcher, settle_s = self._watcher, liveness.LOCK_SETTLE_S
        if self._has_moved() and not watcher.wait(settle_s) and self._has_moved():
            self._end_run(RunDirMovedError(self._path.parent))
            return True
        if self.is_taken_over() and not watcher.is_closed:
            owner = (_read_owner(self._path) or (None,))[0]
            self._end_run(
                InUseError(
                    f"run.dir={self._path.parent} was taken over by {owner or 'another job'}, "
                    f"which had seen no sign of this one for {self._silent_s:.0f} s"
                )
            )
            return True
        with contextlib.suppress(OSError):  # the checkpointer reports a file system that hangs
            os.utime(self._path)
        return False


def find_owner(run_dir: Path) -> Owner | None:
    """Return the job whose lock in ``run_dir`` was touched within LOCK_STALE_S, if any."""
    with contextlib.suppress(OSError):
        return _recent_owner(run_dir)
    return None


def is_free(run_dir: Path) -> bool:
    """Whether no job has touched a lock in ``run_dir`` recently; False if that is unknown."""
    with contextlib.suppress(OSError):  # such as a full disk, on which a run may be alive
        return _recent_owner(run_dir) is None
    return False


def _recent_owner(run_dir: Path) -> Owner | None:
    owner, _, age_s = _read_owner(run_dir / LOCK_FILE) or (None, 0.0, 0.0)
    return owner if age_s <= liveness.LOCK_STALE_S else None


def has_owner_died(run_dir: Path) -> bool:
    """Whether the job that has locked ``run_dir`` is known to be gone."""
    with contextlib.suppress(OSError, ValueError):
        owner = _OWNER_ADAPTER.validate_json((run_dir / LOCK_FILE).read_bytes())
        return is_owner_alive(owner, make_owner("", run_dir)) is False
    return False


def require_shared_dir(
    run_dir: Path, nonce: str, host: str, limit_s: float = liveness.LOCK_VISIBILITY_LIMIT_S
) -> None:
    """Refuse a run directory in which this host does not see the lock that ``host`` has written.

    Each node would save into a folder of its own, and no start would find all files.

    Raises:
        ConfigError: if the lock does not appear in time.
    """
    until_s = time.monotonic() + limit_s
    while read_nonce(run_dir / LOCK_FILE) != nonce:
        if time.monotonic() > until_s:
            raise ConfigError(
                f"run.dir={run_dir} on {socket.gethostname()} is not the folder of that name on "
                f"{host}, where rank 0 is; choose one on a file system that all nodes share"
            )
        time.sleep(0.1)


def release_lock(run_dir: Path, nonce: str) -> None:
    """Remove the lock of the start with this nonce; any rank may do so when all end."""
    if read_nonce(run_dir / LOCK_FILE) == nonce:
        with contextlib.suppress(OSError):
            (run_dir / LOCK_FILE).unlink()


def read_nonce(path: Path) -> str | None:
    """Return the nonce in a lock file; None if it cannot be read."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["nonce"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _read_owner(path: Path) -> tuple[Owner | None, float, float] | None:
    """Return the owner named in the lock file, when it was last touched, and how long ago.

    The owner is None if the content is not valid. Return None if the file is gone.
    """
    try:
        with path.open("rb") as file:
            touched_s, text = os.fstat(file.fileno()).st_mtime, file.read()
    except FileNotFoundError:
        return None
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".now-") as new_file:
        now_s = os.fstat(new_file.fileno()).st_mtime
    try:
        return _OWNER_ADAPTER.validate_json(text), touched_s, now_s - touched_s
    except ValueError:
        return None, touched_s, now_s - touched_s


def _folder_inode(folder: Path) -> int | None:
    """Return a folder's inode, which survives renaming; None without a folder."""
    try:
        return folder.stat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return _UNKNOWN_INODE


def _process_start_ticks(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot; None if it is gone."""
    after_boot_s = process_start_after_boot_s(pid)
    return None if after_boot_s is None else f"{after_boot_s * os.sysconf('SC_CLK_TCK'):.0f}"


def _pid_scope() -> str:
    """Name the scope of pids: this boot of this machine, and the PID namespace of a container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown to {os.getpid()} on {socket.gethostname()}"


# -- start.json: a start that supervise has begun and whose end it has not seen yet.
#
# If the job's first node is lost, or the whole job is killed, supervise dies too. The next
# supervise finds this file, and reports and records how that start ended.


START_FILE = "start.json"
_UNKNOWN_ENDING = "its job was killed, or lost its first node; no more is known"


@dataclass(frozen=True)
class UnfinishedStart:
    """What was known when a start began: fields of its line in starts.jsonl, and its time."""

    fields: dict[str, Any]
    began_s: float


def write_start_file(run_dir: Path, **fields: Any) -> None:
    """Note a start, so that the next supervise can find it. Errors are ignored."""
    with contextlib.suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        write_file(run_dir / START_FILE, json.dumps(fields))


def remove_start_file(run_dir: Path) -> None:
    """Remove the note of a start."""
    with contextlib.suppress(OSError):
        (run_dir / START_FILE).unlink()


def read_unfinished_start(run_dir: Path) -> UnfinishedStart | None:
    """Return the noted start whose end supervise has not seen, if any."""
    try:
        fields = json.loads((run_dir / START_FILE).read_text(encoding="utf-8"))
        began_s = (run_dir / START_FILE).stat().st_mtime
    except (OSError, ValueError, RecursionError):
        return None
    return UnfinishedStart(fields, began_s) if isinstance(fields, dict) else None


def has_run_ended(run_dir: Path) -> bool:
    """Whether no run can still be alive in the folder."""
    return is_free(run_dir) or has_owner_died(run_dir)


def find_start_ending(run_dir: Path, start: UnfinishedStart) -> tuple[str, str, int]:
    """Return the status, the reason and the exit code of a start, as far as they are known."""
    with contextlib.suppress(OSError):
        is_newer = (run_dir / outcome.OUTCOME_FILE).stat().st_mtime >= start.began_s
        if is_newer and (ending := outcome.read_valid_outcome(run_dir)) is not None:
            return ending["status"], ending["reason"], ending["exit_code"]
    return "failed", outcome.read_previous_run(run_dir).death or _UNKNOWN_ENDING, EXIT_FAILED


# -- Which run directory the user may have meant by a path that is not one.


_MAX_HINTS = 3


def similar_runs_hint(path: Path) -> str:
    """Return a hint for a path that is not a run: runs inside it, or with similar names."""
    if path.is_dir():
        newest = sorted(_list_run_dirs(path), key=lambda run: run.stat().st_mtime, reverse=True)
        run_list = ", ".join(map(str, newest[:_MAX_HINTS]))
        return f"; the newest runs in it: {run_list}" if newest else ""
    siblings = {run.name: run for run in _list_run_dirs(path.parent)}
    matches = difflib.get_close_matches(path.name, siblings, n=_MAX_HINTS)
    return f"; did you mean {' or '.join(str(siblings[n]) for n in matches)}?" if matches else ""


def _list_run_dirs(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if (entry / RESOLVED_CONFIG).is_file()]
    except OSError:
        return []


# -- A refused start leaves its run directory as it was, except for files that record the refusal.
#
# list_run_files     what is in the directory when the start begins
# remove_new_files   removes what was added since: logs, settings, a small model; prepared data
#                    stays for the next start, as it may have taken hours


PREPARED_FOLDER = "data"
# Files that record the refusal, and files that the ending start removes itself.
_KEPT_FILE_NAMES = {outcome.OUTCOME_FILE, outcome.RESERVE_FILE, EVENTS_FILE, LOCK_FILE}


def list_run_files(run_dir: Path) -> frozenset[str] | None:
    """Return the names in a run directory: empty if it does not exist; None if it is unreadable."""
    try:
        return frozenset(entry.name for entry in run_dir.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    except OSError:
        return None


def remove_new_files(run_dir: Path, initial_files: frozenset[str]) -> list[str]:
    """Remove what was added to ``run_dir`` since ``initial_files``; return the names of what stays.

    These are prepared data, and what the file system refuses to remove. Files that record the
    refusal stay too, but are not returned.
    """
    prepared_files = list_run_files(run_dir / PREPARED_FOLDER)
    is_prepared = prepared_files is None or any(not name.startswith(".") for name in prepared_files)
    kept_names = {PREPARED_FOLDER} if is_prepared else set()  # otherwise it has only partial files
    for name in {
        *((list_run_files(run_dir) or frozenset()) - initial_files - _KEPT_FILE_NAMES - kept_names),
        STARTING_CONFIG,
    }:
        path = run_dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted((list_run_files(run_dir) or frozenset()) - initial_files - _KEPT_FILE_NAMES)


# -- Whether this user may resume a run that another user has started.


_APPENDED_FOLDERS = ("logs", facts.FAILURES_FOLDER)
_CHANGED_FOLDERS = (
    *_APPENDED_FOLDERS,
    outcome.HEARTBEAT_FOLDER,
    "checkpoints",
    "export",
    "tensorboard",
    "collectives",
)


class RunPermissionError(InUseError):
    """The run directory belongs to another user, and this start must write nothing into it."""


def require_permissions(run_dir: Path) -> None:
    """Check that this user may read and write all files in ``run_dir`` that a start does.

    A missing permission is thus found before anything is changed, and for the files of all ranks.

    Raises:
        RunPermissionError: if not, with the owner of the files and how to grant permission.
    """
    paths = [path for path in _paths_to_write(run_dir) if path.exists() and not may_write(path)]
    paths += [path for path in _paths_to_read(run_dir) if path.exists() and not may_read(path)]
    if not paths:
        return
    raise RunPermissionError(
        f"run.dir={run_dir} is a run that this user may not continue: {list_some(paths, 1)} cannot "
        f"be opened. {describe_missing_permission(paths[0], run_dir)}"
    )


def _paths_to_write(run_dir: Path) -> Iterator[Path]:
    yield run_dir
    yield run_dir / outcome.RESERVE_FILE
    yield from sorted(run_dir.glob("*.jsonl"))
    for name in _CHANGED_FOLDERS:
        yield run_dir / name
    for name in _APPENDED_FOLDERS:
        yield from sorted((run_dir / name).glob("*.txt"))
    yield from sorted((run_dir / "checkpoints").glob("step-*"))  # old ones are removed


def _paths_to_read(run_dir: Path) -> Iterator[Path]:
    yield from sorted(run_dir.glob("checkpoints/step-*/manifest.json"))
    yield from sorted(run_dir.glob("builtin-tiny/*"))
    yield from sorted(run_dir.glob("data/*.h5"))
