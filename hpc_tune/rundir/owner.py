"""A run directory belongs to one job at a time: ``live.json`` in it names the job.

    another's file -> it is touched, or its process is there?             -> refused
                   -> its process is gone, or silent for LOCK_STALE_S?        -> taken over
    one's own      -> touched by a thread of rank 0 while the run lives   -> removed at its end

Hosts' clocks may differ: ages are between two times that the same file system has given.

Beside that: start.json, what a refused start removes again, what another user may go on with, and
which run a mistyped path may mean.
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

from hpc_tune.cluster.schedulers import find_job
from hpc_tune.errors import EXIT_FAILED, ConfigError, HpcTuneError
from hpc_tune.files import may_read, may_write, missing_permission, write_file
from hpc_tune.log import log
from hpc_tune.rundir import facts, outcome
from hpc_tune.rundir.json_lines import EVENTS, RESOLVED_CONFIG, STARTING_CONFIG
from hpc_tune.units import list_some
from hpc_tune.world import liveness
from hpc_tune.world.processes import seconds_from_boot
from hpc_tune.world.stop import process_start_s

LIVE_FILE = "live.json"
_UNKNOWN_INODE = -1  # a file system that does not answer says nothing of a folder
EndRun = Callable[[HpcTuneError], None]


class InUseError(ConfigError):
    """The run directory is another job's, and this job must write nothing into it."""


class MovedError(InUseError):
    """The run directory is not where it was; what has its name now is not this job's."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(
            f"run.dir={run_dir} was renamed, removed or replaced while the run was writing into "
            "it, so the run ends here. Its checkpoints are in the original folder: give that "
            "its name back, or name it as run.dir, and rerun the same command to resume"
        )


@dataclass(frozen=True)
class Owner:
    """Rank 0 of a job. ``nonce`` is the start's own; ``place`` is where its pid means something,
    and where ``folder``, the run directory's whole path, does.

    ``job`` and ``restart`` are the scheduler's number and how often it has started that again.
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
        """Return such as ``"job 17 on host n1, pid 4711, since 2026-11-25 21:05:00"``."""
        job = f"job {self.job}" if self.job else "a run"
        since = datetime.fromtimestamp(self.since_s).isoformat(" ", "seconds")
        return f"{job} on host {self.host}, pid {self.pid}, since {since}"


def make_owner(nonce: str, run_dir: Path, environ: Mapping[str, str] = os.environ) -> Owner:
    """Return this process as the owner of ``run_dir``."""
    job = find_job(environ)
    return Owner(
        nonce,
        socket.gethostname(),
        os.getpid(),
        _process_start(os.getpid()) or "",
        _pid_scope(),
        str(run_dir.resolve()),
        "" if job is None else job.id,
        "0" if job is None else job.restart_count,
        process_start_s(),
    )


def is_owner_alive(owner: Owner, me: Owner) -> bool | None:
    """Tell whether the job of ``owner`` lives, None where this process cannot know."""
    if owner.place == me.place:
        if _process_start(owner.pid) != owner.start:
            return False
        return True if owner.folder == me.folder else None  # or the mark came with a copy
    if owner.job and owner.job == me.job and owner.restart != me.restart:
        return False  # the scheduler starts a job again when it has ended
    return None


class RunLock:
    """The mark of this job in a run directory, from ``acquire`` to ``close``; rank 0's alone."""

    def __init__(
        self,
        run_dir: Path,
        me: Owner,
        lost: EndRun,
        touch_every_s: float = liveness.LOCK_TOUCH_EVERY_S,
        silent_s: float = liveness.LOCK_STALE_S,
    ) -> None:
        """``lost`` is called from a thread if another job takes ``run_dir`` over."""
        self._path, self._own, self._end_run = run_dir / LIVE_FILE, me, lost
        self._touch_every_s, self._silent_s = touch_every_s, silent_s
        self._watcher = liveness.Watcher("live-mark", touch_every_s, self._renew_lock)
        self._folder: int | None = None

    def acquire(self) -> None:
        """Acquire the run directory for this job, and renew the lock while it runs.

        Raises:
            InUseError: if it is another job's, naming that. OSError: if the file system refuses.
        """
        first_s: float | None = None
        while not self._create_lock_file():
            seen = _read_owner(self._path)
            if seen is None:
                continue
            owner, touched_s, age_s = seen
            lives = None if owner is None else is_owner_alive(owner, self._own)
            if lives or (first_s is not None and touched_s != first_s):
                raise InUseError(
                    f"run.dir={self._path.parent} is in use by {owner or 'another job'}: choose "
                    "another run.dir, or wait until that run has ended"
                )
            if lives is False or age_s > self._silent_s:
                self._take_over(owner)
                continue
            if first_s is None:
                first_s = touched_s
                log.info(
                    "run.dir=%s was in use by %s %.0f s ago: "
                    "checking for %.0f s whether it still is",
                    self._path.parent,
                    owner or "another job",
                    age_s,
                    self._silent_s - age_s,
                )
            time.sleep(min(liveness.LOCK_LOOK_EVERY_S, self._touch_every_s))
        self._watcher.start()

    def is_taken_over(self) -> bool:
        """Tell whether another job has taken the folder over."""
        return read_nonce(self._path) not in (None, self._own.nonce)

    def remember_folder(self) -> None:
        """Remember, on any rank, which folder it is that has the name of the run directory."""
        self._folder = _folder_inode(self._path.parent)

    def cause_of(self, error: BaseException) -> BaseException:
        """Return why something failed: that the run directory was moved, or ``error`` itself."""
        moved = not isinstance(error, InUseError) and self._has_moved()
        return MovedError(self._path.parent) if moved else error

    def _has_moved(self) -> bool:
        return self._folder is not None and _folder_inode(self._path.parent) not in (
            self._folder,
            _UNKNOWN_INODE,
        )

    def close(self) -> None:
        """Give the folder back, if this rank has taken it."""
        self._watcher.close()
        if self._watcher.has_started:
            release_run(self._path.parent, self._own.nonce)

    def _create_lock_file(self) -> bool:
        """Write the file if there is none; tell whether it is this job's."""
        try:
            file = self._path.open("x", encoding="utf-8")
        except FileExistsError:
            return read_nonce(self._path) == self._own.nonce
        try:
            with file:
                json.dump(asdict(self._own), file)
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
        return True

    def _take_over(self, owner: Owner | None) -> None:
        log.info("run.dir=%s: %s ended without releasing it", self._path.parent, owner or "another")
        write_file(self._path, json.dumps(asdict(self._own)))
        time.sleep(liveness.LOCK_SETTLE_S)

    def _renew_lock(self) -> bool:
        watcher, settle_s = self._watcher, liveness.LOCK_SETTLE_S
        if self._has_moved() and not watcher.wait(settle_s) and self._has_moved():
            self._end_run(MovedError(self._path.parent))
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
    """Return the job whose mark is in ``run_dir`` and was touched in the last minutes."""
    with contextlib.suppress(OSError):
        return _recent_owner(run_dir)
    return None


def is_free(run_dir: Path) -> bool:
    """Whether no job has touched a mark in ``run_dir`` lately; False where nobody can tell."""
    with contextlib.suppress(OSError):  # such as a disk that is full, with a run at work
        return _recent_owner(run_dir) is None
    return False


def _recent_owner(run_dir: Path) -> Owner | None:
    owner, _, age_s = _read_owner(run_dir / LIVE_FILE) or (None, 0.0, 0.0)
    return owner if age_s <= liveness.LOCK_STALE_S else None


def has_owner_died(run_dir: Path) -> bool:
    """Whether the job that has marked ``run_dir`` is known to be gone: it ran on this host."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        owner = Owner(**json.loads((run_dir / LIVE_FILE).read_text(encoding="utf-8")))
        return is_owner_alive(owner, make_owner("", run_dir)) is False
    return False


def require_shared_dir(
    run_dir: Path, nonce: str, host: str, limit_s: float = liveness.LOCK_VISIBLE_WITHIN_S
) -> None:
    """Refuse a run directory in which this host does not see the mark that ``host`` has made.

    Each node would save into a folder of its own, and no start would find all of it.

    Raises:
        ConfigError: if it does not show in time.
    """
    until_s = time.monotonic() + limit_s
    while read_nonce(run_dir / LIVE_FILE) != nonce:
        if time.monotonic() > until_s:
            raise ConfigError(
                f"run.dir={run_dir} on {socket.gethostname()} is not the folder of that name on "
                f"{host}, where rank 0 is; choose one on a file system that all nodes share"
            )
        time.sleep(0.1)


def release_run(run_dir: Path, nonce: str) -> None:
    """Remove the mark of the start with this nonce; any rank may, when all end."""
    if read_nonce(run_dir / LIVE_FILE) == nonce:
        with contextlib.suppress(OSError):
            (run_dir / LIVE_FILE).unlink()


def read_nonce(path: Path) -> str | None:
    """Return whose file it is, None where nobody can tell."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["nonce"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read_owner(path: Path) -> tuple[Owner | None, float, float] | None:
    """Return who the file names, when it was touched last, and how long ago that is.

    None where there is none any more.
    """
    try:
        with path.open(encoding="utf-8") as file:
            touched_s, text = os.fstat(file.fileno()).st_mtime, file.read()
    except FileNotFoundError:
        return None
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".now-") as fresh:
        now_s = os.fstat(fresh.fileno()).st_mtime
    try:
        values: Any = json.loads(text)
        return Owner(**values), touched_s, now_s - touched_s
    except (ValueError, TypeError):
        return None, touched_s, now_s - touched_s


def _folder_inode(folder: Path) -> int | None:
    """Return what stays when a folder is renamed; None without a folder, or ``_UNKNOWN_INODE``."""
    try:
        return folder.stat().st_ino
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return _UNKNOWN_INODE


def _process_start(pid: int) -> str | None:
    """Return when a process started, in the kernel's ticks; None if it is gone."""
    after_boot_s = seconds_from_boot(pid)
    return None if after_boot_s is None else f"{after_boot_s * os.sysconf('SC_CLK_TCK'):.0f}"


def _pid_scope() -> str:
    """Name what a pid belongs to: this boot of this machine, and the namespace of a container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown to {os.getpid()} on {socket.gethostname()}"


# -- start.json: a start that supervise has begun and whose end it has not seen yet.
#
# If the job's first node is lost, or the whole job is killed, supervise goes with it: the next one
# finds this file, and says and keeps how that start ended.


START_FILE = "start.json"
_UNKNOWN_ENDING = "its job was killed, or lost its first node; no more is known"


@dataclass(frozen=True)
class UnfinishedStart:
    """What was known when a start began: fields of its line in starts.jsonl, and its time."""

    fields: dict[str, Any]
    began_s: float


def note_start(run_dir: Path, **fields: Any) -> None:
    """Note a start. What cannot be written is not there for the next one."""
    with contextlib.suppress(OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        write_file(run_dir / START_FILE, json.dumps(fields))


def forget_start(run_dir: Path) -> None:
    """Remove the note."""
    with contextlib.suppress(OSError):
        (run_dir / START_FILE).unlink()


def read_unfinished_start(run_dir: Path) -> UnfinishedStart | None:
    """Return the start that supervise has not seen end, if there is one."""
    try:
        fields = json.loads((run_dir / START_FILE).read_text(encoding="utf-8"))
        began_s = (run_dir / START_FILE).stat().st_mtime
    except (OSError, ValueError):
        return None
    return UnfinishedStart(fields, began_s) if isinstance(fields, dict) else None


def has_ended(run_dir: Path) -> bool:
    """Whether no run can be at work in the folder any more."""
    return is_free(run_dir) or has_owner_died(run_dir)


def find_start_ending(run_dir: Path, start: UnfinishedStart) -> tuple[str, str, int]:
    """Return the status, the reason and the exit code of a start, as far as it has left them."""
    told = outcome.read_outcome(run_dir)
    if told is not None and (run_dir / outcome.OUTCOME_FILE).stat().st_mtime >= start.began_s:
        return str(told["status"]), str(told["reason"]), int(told["exit_code"])
    return "failed", outcome.read_previous_run(run_dir).death or _UNKNOWN_ENDING, EXIT_FAILED


# -- Which run directories may be meant by a path that is none.


_MAX_HINTS = 3


def similar_runs_hint(path: Path) -> str:
    """Return what to say after a path that is no run: the runs in it, or of similar names."""
    if path.is_dir():
        newest = sorted(_runs_in(path), key=lambda run: run.stat().st_mtime, reverse=True)
        named = ", ".join(map(str, newest[:_MAX_HINTS]))
        return f"; the newest runs in it: {named}" if newest else ""
    beside = {run.name: run for run in _runs_in(path.parent)}
    near = difflib.get_close_matches(path.name, beside, n=_MAX_HINTS)
    return f"; did you mean {' or '.join(str(beside[name]) for name in near)}?" if near else ""


def _runs_in(folder: Path) -> list[Path]:
    try:
        return [entry for entry in folder.iterdir() if (entry / RESOLVED_CONFIG).is_file()]
    except OSError:
        return []


# -- A start that is refused leaves its run directory as it was, but for what tells of it.
#
# before   what is in the directory when the start begins
# fail     removes what has come since: logs, settings, a small model; prepared data stays, for
#          the next start, as hours of work may be in it


PREPARED_FOLDER = "data"
# What tells of the start, and what the start that ends removes itself.
_KEPT_NAMES = {outcome.OUTCOME_FILE, outcome.RESERVE_FILE, EVENTS, LIVE_FILE}


def list_run_files(run_dir: Path) -> frozenset[str] | None:
    """Return what is in a run directory: nothing where there is none; None if it cannot be read."""
    try:
        return frozenset(entry.name for entry in run_dir.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()
    except OSError:
        return None


def remove_new_files(run_dir: Path, before: frozenset[str]) -> list[str]:
    """Remove what is in ``run_dir`` and was not ``before``; return the names of what stays of it.

    Those are prepared data, and what the file system does not let go.
    """
    prepared = list_run_files(run_dir / PREPARED_FOLDER)
    is_prepared = prepared is None or any(not name.startswith(".") for name in prepared)
    kept = {PREPARED_FOLDER} if is_prepared else set()  # else there are parts of files alone
    for name in {
        *((list_run_files(run_dir) or frozenset()) - before - _KEPT_NAMES - kept),
        STARTING_CONFIG,
    }:
        path = run_dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted((list_run_files(run_dir) or frozenset()) - before - _KEPT_NAMES)


# -- Whether this user may go on with a run that another user has begun.


_APPENDED = ("logs", facts.FAILURES_FOLDER)
_CHANGED = (
    *_APPENDED,
    outcome.HEARTBEAT_FOLDER,
    "checkpoints",
    "export",
    "tensorboard",
    "collectives",
)


class AnothersError(InUseError):
    """The run directory is of another user, and nothing of this start's belongs into it."""


def require_permissions(run_dir: Path) -> None:
    """Check that this user may read and write what any start does in ``run_dir``.

    So it is found before anything is changed there, and for the files of all ranks.

    Raises:
        AnothersError: if not, with whose files these are, and how others get the right.
    """
    kept = [path for path in _written_paths(run_dir) if path.exists() and not may_write(path)]
    kept += [path for path in _read_paths(run_dir) if path.exists() and not may_read(path)]
    if not kept:
        return
    raise AnothersError(
        f"run.dir={run_dir} is a run that this user may not continue: {list_some(kept, 1)} cannot "
        f"be opened. {missing_permission(kept[0], run_dir)}"
    )


def _written_paths(run_dir: Path) -> Iterator[Path]:
    yield run_dir
    yield run_dir / outcome.RESERVE_FILE
    yield from sorted(run_dir.glob("*.jsonl"))
    for name in _CHANGED:
        yield run_dir / name
    for name in _APPENDED:
        yield from sorted((run_dir / name).glob("*.txt"))
    yield from sorted((run_dir / "checkpoints").glob("step-*"))  # old ones are removed


def _read_paths(run_dir: Path) -> Iterator[Path]:
    yield from sorted(run_dir.glob("checkpoints/step-*/manifest.json"))
    yield from sorted(run_dir.glob("builtin-tiny/*"))
    yield from sorted(run_dir.glob("data/*.h5"))
