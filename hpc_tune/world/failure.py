"""How a world fails: immediately, on every rank, with one line that names the lost ranks.

A plain exit on failure hangs for ever in MPI's Finalize while peers wait, so every exit here is
MPI's Abort or ``os._exit``. The causes: a time limit, a parent that disappears, an exception.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from hpc_tune.cluster.launchers import PROCESS_NAMES, rank_hint
from hpc_tune.errors import (
    EXIT_FAILED,
    DiskError,
    GoneError,
    HpcTuneError,
    RemoteError,
    ResumableStop,
    WorldError,
    first_line,
)
from hpc_tune.log import print_line
from hpc_tune.world import liveness
from hpc_tune.world.processes import ancestors, is_alive

if TYPE_CHECKING:
    from hpc_tune.world.comm import Comm, Peer

_MAX_REASON, _MAX_NAMED = 300, 8  # characters, ranks or hosts: a line
# How gloo, the store and NCCL show that another rank, or the way to it, is gone.
_BROKEN_SIGNS = (
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
_TIMEOUT_SIGNS = ("timed out", "timing out")
# NCCL's words for a fault of this rank's own, which it raises as the same kind of error.
_LOCAL_FAULT_SIGNS = ("ncclunhandledcudaerror", "ncclinvalidargument", "ncclinvalidusage")


def die(comm: "Comm | None", exit_code: int = EXIT_FAILED) -> NoReturn:
    """End the whole world now with this exit code; never returns."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # Absent, or half imported where the limit ran out inside MPI_Init.
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and hasattr(mpi, "COMM_WORLD"):
        if comm is not None:
            who = f"rank {comm.world.rank} on {comm.world.hostname}"
        else:
            who = f"rank {rank_hint(os.environ)}"

        def give_up() -> None:
            print_line(f"{who}: MPI's Abort did not end it, exiting")
            os._exit(exit_code)

        liveness.run_after(liveness.ABORT_LIMIT_S, give_up)
        time.sleep(liveness.DRAIN_S)
        if mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.COMM_WORLD.Abort(exit_code)
    os._exit(exit_code)


@dataclass(frozen=True)
class Failure:
    """What one rank tells for the world: ``reason``, one line, after ``who`` tells it.

    ``facts`` belong beside it into outcome.json. ``details`` are a traceback and the words of other
    libraries, None where the line says all.
    """

    who: str
    reason: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    details: str | None = None


def report_failure(comm: "Comm | None", error: BaseException) -> Failure | None:
    """Return what this rank should tell about its error, or ``None`` if another rank reports.

    One rank reports for the world: the first that adds to a counter in the store, or, where the
    store died with its rank, the first on each host. A rank that only lost a connection waits for
    the one with the cause.
    """
    if isinstance(error, RemoteError):
        return None
    if isinstance(error, OSError):
        error = DiskError.of(error, comm.activity[0] if comm else "starting") or error
    if comm is None:
        if rank_hint(os.environ) > 0:
            time.sleep(liveness.FIRST_REPORT_S)
        return _describe_failure(
            f"rank {rank_hint(os.environ)} on {socket.gethostname()}", error, None
        )
    gone = _wait_for_lost_ranks(comm) if is_broken_connection(error) else []
    store_is_gone = any(peer.rank == comm.store_rank for peer in gone)
    if not _is_first_to_report(comm, store_is_gone):
        return None
    if gone:
        details = _format_traceback(error)
        error = gone_error(gone, comm.roster, comm.activity[0])
        return Failure("error: ", str(error), error.facts, details)
    return _describe_failure(f"rank {comm.world.rank} on {comm.world.hostname}", error, comm)


def gone_error(gone: "Sequence[Peer]", roster: "Sequence[Peer]", doing: str) -> GoneError:
    """Return the error that names ranks that have ended, by host where a whole one is gone."""
    said, lost_hosts = [], []
    for node in dict.fromkeys(peer.node for peer in gone):
        of_node = [peer for peer in roster if peer.node == node]
        lost = [peer for peer in gone if peer.node == node]
        if len(lost) == len(of_node) and any(peer.node != node for peer in roster):
            lost_hosts.append(lost[0].hostname)
            said.append(f"host {lost[0].hostname} ({list_ranks(lost)})")
        else:
            said += [f"rank {p.rank} (pid {p.pid} on host {p.hostname})" for p in lost]
    verb = "is" if len(said) == 1 else "are"
    if len(said) > _MAX_NAMED:
        said[_MAX_NAMED:] = [f"and {len(said) - _MAX_NAMED} more"]
    facts = {"lost_hosts": lost_hosts, "lost_ranks": [peer.rank for peer in gone]}
    return GoneError(f"{', '.join(said)} {verb} gone while {doing}", facts)


def list_ranks(peers: "Sequence[Peer]") -> str:
    """Return such as ``"ranks 2, 3"``, or ``"ranks 0-127"``."""
    ranks = [peer.rank for peer in peers]
    numbers = ", ".join(map(str, ranks))
    if len(ranks) > _MAX_NAMED and ranks == list(range(ranks[0], ranks[-1] + 1)):
        numbers = f"{ranks[0]}-{ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers}"


def find_dead_peers(comm: "Comm") -> "list[Peer]":
    """Return the ranks of this node whose process is gone or a zombie."""
    own = comm.world
    if not comm.sees_local_pids:
        return []
    return [
        peer
        for peer in comm.roster
        if peer.node == own.node and peer.rank != own.rank and not is_alive(peer.pid)
    ]


def is_broken_connection(error: BaseException) -> bool:
    """Tell whether the error is how torch.distributed shows that a peer is gone."""
    if not isinstance(error, RuntimeError | OSError) or isinstance(error, HpcTuneError):
        return False
    text = f"{type(error).__name__} {error}".lower()
    if any(sign in text for sign in _LOCAL_FAULT_SIGNS):
        return False
    return "Dist" in type(error).__name__ or any(sign in text for sign in _BROKEN_SIGNS)


@contextlib.contextmanager
def time_limit(what: str, seconds: float, hint: str, who: str) -> Iterator[None]:
    """End the world if the block is not done in time, and print who waited for what."""

    def expire() -> None:
        print_line(f"{who}: waited {seconds:.0f} s for {what}; {hint}")
        die(None)

    timer = liveness.run_after(seconds, expire)
    try:
        yield
    finally:
        timer.cancel()
        # A thread that still runs at the interpreter's end and drops the last reference to a
        # process group there aborts the process.
        timer.join(1.0)


def watch_launcher(who: str) -> None:
    """End this rank when its parent or its launcher is gone: a killed mpirun orphans its ranks."""
    parent = os.getppid()
    # The nearest, such as mpirun behind a shell script.
    launcher = next((pid for pid, name in ancestors() if name.startswith(PROCESS_NAMES)), None)

    def look() -> None:
        if os.getppid() != parent or (launcher is not None and not is_alive(launcher)):
            # The other end of stderr may be closed.
            with contextlib.suppress(OSError, ValueError):
                print_line(f"{who}: the launcher is gone, exiting")
            os._exit(EXIT_FAILED)

    liveness.Watcher("launcher-watch", liveness.LAUNCHER_LOOK_EVERY_S, look).start()


def end_world_on_uncaught(comm: "Comm | None") -> None:
    """Make an exception that nobody caught end the world, instead of hanging in MPI's Finalize."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        end_world(comm, error)

    sys.excepthook = hook


def end_world(comm: "Comm | None", error: BaseException) -> NoReturn:
    """Report once for the world what went wrong and end every rank."""
    told = report_failure(comm, error)
    if told is not None:
        print_line(f"{told.who}{told.reason}")
        if told.details is not None:
            print_line(told.details)
    code = error.exit_code if isinstance(error, HpcTuneError) else EXIT_FAILED
    if told is not None:
        announce_exit(comm, code)
    die(comm, code)


def announce_exit(comm: "Comm | None", exit_code: int) -> None:
    """Tell the ranks of other hosts that this one has reported why the world ends."""
    if comm is not None and comm.watch is not None:
        comm.watch.leave(exit_code)


def _describe_failure(who: str, error: BaseException, comm: "Comm | None") -> Failure:
    if isinstance(error, ResumableStop):
        return Failure(f"{who}: ", str(error))
    if isinstance(error, HpcTuneError):
        facts = error.facts if isinstance(error, WorldError) else {}
        return Failure(f"error on {who}: ", str(error), facts)
    while_ = "" if comm is None else f" while {comm.activity[0]}"
    named = f"{type(error).__name__}: {first_line(error)}"[:_MAX_REASON]
    if not is_broken_connection(error):
        return Failure(
            "error: ", f"{who} failed{while_}: {named}", details=_format_traceback(error)
        )
    wrong = "lost the connection to another rank"
    if any(word in str(error).lower() for word in _TIMEOUT_SIGNS):
        wrong = "had no answer from another rank within run.timeout"
    return Failure("error: ", f"{who} {wrong}{while_}: {named}", details=_format_traceback(error))


def _format_traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()


def _wait_for_lost_ranks(comm: "Comm") -> "list[Peer]":
    elsewhere = [peer.node for peer in comm.roster if peer.node != comm.world.node]
    others_know = len(elsewhere) > len(set(elsewhere)) or (
        elsewhere and comm.world.rank != comm.store_rank
    )
    until_s = time.monotonic()
    until_s += liveness.OTHERS_REPORT_WITHIN_S if others_know else liveness.DEATH_SHOWS_WITHIN_S
    while time.monotonic() < until_s:
        if dead := find_dead_peers(comm):
            return dead
        ended = comm.watch.ended_ranks() if comm.watch is not None else set()
        if ended:
            return [peer for peer in comm.roster if peer.rank in ended]
        time.sleep(0.01)
    return []


def _is_first_to_report(comm: "Comm", store_is_gone: bool) -> bool:
    if comm.world.size == 1:
        return True
    if store_is_gone:
        return _is_first_on_host(comm.nonce)
    answer: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            answer.append(comm.store.add("hpc_tune/failed", 1) == 1)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(liveness.STORE_LIMIT_S)
    return answer[0] if answer else _is_first_on_host(comm.nonce)


def _is_first_on_host(nonce: str) -> bool:
    # A rank that has reported elsewhere may have ended the world, and here rank 0 went first.
    time.sleep(liveness.OTHERS_END_WITHIN_S)
    # An abstract socket name can be taken once per host and vanishes with its owner.
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0hpc_tune/failed/{nonce}")
    except OSError:
        claim.close()
        return False
    claim.detach()
    return True
