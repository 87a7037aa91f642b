"""How a world fails: immediately, on every rank, with one line that names the lost ranks.

    an error, in any thread of a rank -> end_world -> one rank reports -> every rank dies

The table in world/watch.py lists what leads here, by which sign and after how long.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from hpc_tune.cluster.launchers import PROCESS_PREFIXES, rank_hint
from hpc_tune.errors import (
    EXIT_FAILED,
    DiskError,
    GoneError,
    HpcTuneError,
    LostHostError,
    RemoteError,
    ResumableStop,
    StalledError,
    WorldError,
    first_line,
)
from hpc_tune.log import print_line
from hpc_tune.units import list_some
from hpc_tune.world import liveness
from hpc_tune.world.comm import Comm, Peer, StoreKeys
from hpc_tune.world.processes import is_alive, list_ancestors

FAILURE_KEY = "failed"  # the subject in the store that tells which rank has reported first
# Seen by all ranks of a host, and in memory, so that access cannot hang.
_REPORT_MARKER_FOLDER, _REPORT_MARKER_PREFIX = Path("/dev/shm"), "hpc_tune-reported-"
_MAX_REPORT_MARKER_AGE_S = 600.0  # far more than passes between the ends of two ranks
_MAX_REASON_CHARS, _MAX_NAMED_RANKS = 300, 8  # per line: characters, and ranks or hosts
# How gloo, the store and NCCL say that another rank, or the path to it, is gone.
_BROKEN_CONNECTION_PHRASES = (
    "connection closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "socket closed",
    "peer closed",
    "remote process exited",
    "failed to recv",
    "failed to send",
    "timed out",
    "collective operation timeout",
    "ncclremoteerror",
    "ncclsystemerror",
    "ncclinternalerror",
    "nccl communicator was aborted",
)
_TIMEOUT_PHRASES = ("timed out", "timing out")
# NCCL's words for a fault of this rank itself, which it raises as the same kind of error.
_LOCAL_FAULT_PHRASES = ("ncclunhandledcudaerror", "ncclinvalidargument", "ncclinvalidusage")


@dataclass(frozen=True)
class Failure:
    """What one rank reports for the world: one line, ``prefix`` (such as "error: ") and ``reason``.

    ``facts`` go into outcome.json with it. ``details`` are a traceback and the messages of other
    libraries, None if the line says everything.
    """

    prefix: str
    reason: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    details: str | None = None


def end_world_on_uncaught_error(comm: Comm | None) -> None:
    """Make an uncaught exception end the world, instead of hanging in MPI's Finalize."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        end_world(comm, error)

    sys.excepthook = hook


def end_world(
    comm: Comm | None,
    error: BaseException,
    report: Callable[[Comm | None, BaseException], int] | None = None,
) -> NoReturn:
    """Report once for the world what went wrong and end every rank.

    ``report`` replaces the default way to report, and returns the exit code.
    """
    exit_code = (report or _report_error)(comm, error)
    liveness.die(rank_label(comm), exit_code)


def _report_error(comm: Comm | None, error: BaseException) -> int:
    exit_code = find_exit_code(error)
    if (failure := claim_failure_report(comm, error)) is not None:
        print_failure(failure)
        announce_exit(comm, exit_code)
    return exit_code


def find_exit_code(error: BaseException) -> int:
    """Return the exit code of a rank that ends with this error."""
    return error.exit_code if isinstance(error, HpcTuneError) else EXIT_FAILED


def print_failure(failure: Failure) -> None:
    """Print what one rank reports for the world, followed by its details."""
    print_line(f"{failure.prefix}{failure.reason}")
    if failure.details is not None:
        print_line(failure.details)


def claim_failure_report(comm: Comm | None, error: BaseException) -> Failure | None:
    """Return what this rank should report about its error, or ``None`` if another rank reports.

    One rank reports for the world: the first that adds to a counter in the store, or, if the store
    does not answer, the first on each host. A rank that only lost a connection first waits a
    little: another may know the cause, or it sees which rank is gone.
    """
    if isinstance(error, RemoteError):
        return None
    if isinstance(error, OSError):
        error = DiskError.from_os_error(error, comm.activity[0] if comm else "starting") or error
    if comm is None:
        if rank_hint(os.environ) > 0:
            time.sleep(liveness.RANK_0_REPORT_LIMIT_S)
        return _describe_failure(rank_label(None), error, None)
    gone_ranks = _wait_for_lost_ranks(comm) if is_broken_connection(error) else []
    store_is_gone = any(peer.rank == comm.store_rank for peer in gone_ranks)
    if not _is_first_to_report(comm, store_is_gone):
        return None
    if gone_ranks:
        details = _format_traceback(error)
        error = ended_ranks_error(gone_ranks, comm.roster, comm.activity[0])
        return Failure("error: ", str(error), error.facts, details)
    return _describe_failure(rank_label(comm), error, comm)


def ended_ranks_error(
    gone_ranks: Sequence[Peer], roster: Sequence[Peer], operation: str
) -> GoneError:
    """Return the error that names the ranks that have ended, or their host if all of it is gone."""
    names, lost_hosts = [], []
    for node in dict.fromkeys(peer.node for peer in gone_ranks):
        node_peers = [peer for peer in roster if peer.node == node]
        lost_peers = [peer for peer in gone_ranks if peer.node == node]
        if len(lost_peers) == len(node_peers) and any(peer.node != node for peer in roster):
            lost_hosts.append(lost_peers[0].hostname)
            names.append(f"host {lost_peers[0].hostname} ({format_ranks(lost_peers)})")
        else:
            names += [f"rank {p.rank} (pid {p.pid} on host {p.hostname})" for p in lost_peers]
    verb = "is" if len(names) == 1 else "are"
    facts = {"lost_hosts": lost_hosts, "lost_ranks": [peer.rank for peer in gone_ranks]}
    return GoneError(
        f"{list_some(names, _MAX_NAMED_RANKS, ', ')} {verb} gone while {operation}", facts
    )


@dataclass(frozen=True)
class RankProgress:
    """Where a rank is: how many parts of training it has entered, the latest, its line of code.

    ``waits``: whether it is in a collective.
    """

    entered: int
    activity: str
    line: str
    waits: bool


def find_late_ranks(progress_by_rank: Mapping[int, RankProgress], num_ranks: int) -> list[int]:
    """Return the ranks that the others wait for; none if all wait in one place or none waits.

    These are the ranks that do not answer, else the ranks behind, else the ranks in no collective.
    """
    if missing := [r for r in range(num_ranks) if r not in progress_by_rank]:
        return missing
    max_entered = max(progress.entered for progress in progress_by_rank.values())
    if behind_ranks := [r for r in range(num_ranks) if progress_by_rank[r].entered < max_entered]:
        return behind_ranks
    busy_ranks = [r for r in range(num_ranks) if not progress_by_rank[r].waits]
    return busy_ranks if len(busy_ranks) < num_ranks else []


def stalled_error(
    progress_by_rank: Mapping[int, RankProgress],
    roster: Sequence[Peer],
    operation: str,
    limit_s: float,
    gone_ranks: set[int],
    trace_folder: str | None,
) -> StalledError:
    """Return the error that names the late ranks; ``operation``: what this rank waits in.

    ``progress_by_rank``: where the ranks that answered are. ``gone_ranks``: ranks known to have
    ended. ``trace_folder``: the folder of the traces of collectives, if any.
    """
    late_ranks = find_late_ranks(progress_by_rank, len(roster))
    texts = [
        _describe_late_rank(roster[rank], progress_by_rank.get(rank), rank in gone_ranks)
        for rank in late_ranks
    ]
    if not late_ranks:
        lines = sorted({progress.line for progress in progress_by_rank.values()})
        texts = [f"all ranks are at {', '.join(lines)}: look at the network and the devices"]
    words = (
        f"{operation}: no progress for {limit_s:.0f} s (run.timeout): {list_some(texts, 4, '; ')}"
    )
    facts: dict[str, object] = {"during": operation, "late_ranks": late_ranks}
    if trace_folder is not None:
        words += f". The last collectives of each rank are in {trace_folder}, for torchfrtrace"
        facts["trace"] = trace_folder
    return StalledError(words, facts)


def _describe_late_rank(peer: Peer, progress: RankProgress | None, is_gone: bool) -> str:
    process = _describe_process(peer)
    if is_gone:
        return f"{process} is gone"
    if progress is None:
        return f"{process} does not answer: its process is stopped, or hangs outside of Python"
    return f"{process} has not arrived: it is at {progress.activity}, {progress.line}"


def _describe_process(peer: Peer) -> str:
    return f"rank {peer.rank} (pid {peer.pid} on {peer.hostname})"


def unresponsive_ranks_error(peers: Sequence[Peer], operation: str, limit_s: float) -> StalledError:
    """Return the error that names ranks without any thread that answers."""
    verb = "does" if len(peers) == 1 else "do"
    return StalledError(
        f"{list_some(map(_describe_process, peers), 4, ', ')} {verb} not answer while {operation}, "
        f"for {limit_s:.0f} s ({liveness.GIL_TIMEOUT_FACTOR} x run.timeout): a process is stopped, "
        "or hangs outside of Python",
        {"late_ranks": [peer.rank for peer in peers]},
    )


def lost_host_error(
    lost_peers: Sequence[Peer], own_host: str, operation: str, limit_s: float
) -> LostHostError:
    """Return the error that names the host of ``lost_peers``, which are all of its ranks."""
    host = lost_peers[0].hostname
    return LostHostError(
        f"host {host} ({format_ranks(lost_peers)}) has not answered in {limit_s:.0f} s "
        f"(run.host_timeout) while {operation}: it is down, or the network between it and "
        f"{own_host} is cut",
        {"lost_hosts": [host], "lost_ranks": [peer.rank for peer in lost_peers]},
    )


def format_ranks(peers: Sequence[Peer]) -> str:
    """Return such as ``"ranks 2, 3"``, or ``"ranks 0-127"``."""
    ranks = [peer.rank for peer in peers]
    numbers = ", ".join(map(str, ranks))
    if len(ranks) > _MAX_NAMED_RANKS and ranks == list(range(ranks[0], ranks[-1] + 1)):
        numbers = f"{ranks[0]}-{ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"


def find_dead_peers(comm: Comm) -> list[Peer]:
    """Return the ranks of this node whose process is gone or a zombie."""
    world = comm.world
    if not comm.sees_local_pids:
        return []
    return [
        peer
        for peer in comm.roster
        if peer.node == world.node and peer.rank != world.rank and not is_alive(peer.pid)
    ]


def is_broken_connection(error: BaseException) -> bool:
    """Tell whether the error is one that torch.distributed raises when a peer is gone."""
    if not isinstance(error, RuntimeError | OSError) or isinstance(error, HpcTuneError):
        return False
    text = f"{type(error).__name__} {error}".lower()
    if any(p in text for p in _LOCAL_FAULT_PHRASES):
        return False
    return "Dist" in type(error).__name__ or any(p in text for p in _BROKEN_CONNECTION_PHRASES)


def watch_launcher(label: str) -> None:
    """End this rank when its parent or its launcher is gone: a killed mpirun orphans its ranks."""
    parent = os.getppid()
    # The nearest launcher process, such as mpirun behind a shell script.
    launcher = next(
        (pid for pid, name in list_ancestors() if name.startswith(PROCESS_PREFIXES)), None
    )

    def exit_if_launcher_gone() -> None:
        if os.getppid() != parent or (launcher is not None and not is_alive(launcher)):
            # The other end of stderr may be closed.
            with contextlib.suppress(OSError, ValueError):
                print_line(f"{label}: the launcher is gone, exiting")
            os._exit(EXIT_FAILED)

    liveness.Watcher(
        "launcher-watch", liveness.LAUNCHER_CHECK_EVERY_S, exit_if_launcher_gone
    ).start()


def announce_exit(comm: Comm | None, exit_code: int) -> None:
    """Tell the other ranks that this rank has reported why the world ends."""
    if comm is not None and comm.world.size > 1:
        _write_report_marker(comm)
    if comm is not None and comm.watch is not None:
        comm.watch.announce_exit(exit_code)


def _report_marker_path(comm: Comm) -> Path:
    return _REPORT_MARKER_FOLDER / f"{_REPORT_MARKER_PREFIX}{comm.nonce}-{comm.world.node}"


def _write_report_marker(comm: Comm) -> None:
    """Leave an empty file for ranks of this host that fail after this one has exited.

    A later failure on the host removes it; other starts have other names.
    """
    with contextlib.suppress(OSError):
        _report_marker_path(comm).touch()
        for old in _REPORT_MARKER_FOLDER.glob(f"{_REPORT_MARKER_PREFIX}*"):
            with contextlib.suppress(OSError):  # another user's
                if time.time() - old.stat().st_mtime > _MAX_REPORT_MARKER_AGE_S:
                    old.unlink()


def rank_label(comm: Comm | None) -> str:
    """Return a name such as "rank 5 on n2", even if there is no world yet."""
    if comm is None:
        return f"rank {rank_hint(os.environ)} on {socket.gethostname()}"
    return comm.world.label


def _describe_failure(label: str, error: BaseException, comm: Comm | None) -> Failure:
    if isinstance(error, ResumableStop):
        return Failure(f"{label}: ", str(error))
    if isinstance(error, HpcTuneError):
        facts = error.facts if isinstance(error, WorldError) else {}
        return Failure(f"error on {label}: ", str(error), facts)
    while_ = "" if comm is None else f" while {comm.activity[0]}"
    text = f"{type(error).__name__}: {first_line(error)}"[:_MAX_REASON_CHARS]
    if not is_broken_connection(error):
        return Failure(
            "error: ", f"{label} failed{while_}: {text}", details=_format_traceback(error)
        )
    fault = "lost the connection to another rank"
    if any(word in str(error).lower() for word in _TIMEOUT_PHRASES):
        fault = "had no answer from another rank within run.timeout"
    return Failure("error: ", f"{label} {fault}{while_}: {text}", details=_format_traceback(error))


def _format_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()


def _wait_for_lost_ranks(comm: Comm) -> list[Peer]:
    remote_nodes = [peer.node for peer in comm.roster if peer.node != comm.world.node]
    others_know = len(remote_nodes) > len(set(remote_nodes)) or (
        remote_nodes and comm.world.rank != comm.store_rank
    )
    until_s = time.monotonic()
    until_s += liveness.OTHER_RANKS_REPORT_LIMIT_S if others_know else liveness.DEATH_NOTICE_LIMIT_S
    while time.monotonic() < until_s:
        if dead := find_dead_peers(comm):
            return dead
        ended_ranks = comm.watch.ended_ranks() if comm.watch is not None else set()
        if ended_ranks:
            return [peer for peer in comm.roster if peer.rank in ended_ranks]
        time.sleep(0.01)
    return []


def _is_first_to_report(comm: Comm, is_store_gone: bool) -> bool:
    if comm.world.size == 1:
        return True
    if is_store_gone:
        return _is_first_on_host(comm)
    answer: list[bool] = []

    def register_report() -> None:
        with contextlib.suppress(RuntimeError):
            answer.append(StoreKeys(comm.store, FAILURE_KEY).add(1) == 1)

    thread = threading.Thread(target=register_report, daemon=True)
    thread.start()
    thread.join(liveness.STORE_LIMIT_S)
    return answer[0] if answer else _is_first_on_host(comm)


def _is_first_on_host(comm: Comm) -> bool:
    # A rank on another host may have reported and ended the world; here rank 0 just ended first.
    time.sleep(liveness.OTHER_RANKS_END_LIMIT_S)
    # An abstract socket name can be taken once per host and vanishes with its owner, which leaves a
    # mark before that if it has reported.
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0hpc_tune/failed/{comm.nonce}")
    except OSError:
        claim.close()
        return False
    claim.detach()
    return not _report_marker_path(comm).exists()
