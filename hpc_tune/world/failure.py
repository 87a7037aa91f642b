"""How a world fails: immediately, on every rank, with one traceback that names the lost ranks.

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
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from hpc_tune.cluster.launchers import PROCESSES, rank_hint
from hpc_tune.errors import EXIT_FAILED, HpcTuneError, LeavingError, RemoteError
from hpc_tune.world.processes import ancestors, is_alive

if TYPE_CHECKING:
    from hpc_tune.world.comm import Comm, Peer

_STORE_LIMIT_S = 2.0
_ABORT_LIMIT_S = 5.0
_DRAIN_S = 0.2  # Hydra drops what a rank printed just before the Abort of any rank
_DEATH_SHOWS_WITHIN_S = 0.3  # a dying process closes its connections a little before it is gone
_NEIGHBOUR_REPORTS_WITHIN_S = 1.0  # a rank on the dead one's node can name it
_OTHERS_END_WITHIN_S = 0.1  # a launcher ends the ranks of a node one after the other
_FIRST_REPORT_S = 1.5  # before there is a world, rank 0 reports first and its end ends the others
# How gloo, the store and NCCL show that another rank, or the way to it, is gone.
_BROKEN = (
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
_LATE = ("timed out", "timing out")
# NCCL's words for a fault of this rank's own, which it raises as the same kind of error.
_OWN_FAULT = ("ncclunhandledcudaerror", "ncclinvalidargument", "ncclinvalidusage")


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
            print(f"{who}: MPI's Abort did not end it, exiting", file=sys.stderr, flush=True)
            os._exit(exit_code)

        _after(_ABORT_LIMIT_S, give_up)
        time.sleep(_DRAIN_S)
        if mpi.Is_initialized() and not mpi.Is_finalized():
            mpi.COMM_WORLD.Abort(exit_code)
    os._exit(exit_code)


def report_failure(comm: "Comm | None", error: BaseException) -> str | None:
    """Return what this rank should print about its error, or ``None`` if another rank reports.

    One rank reports for the world: the first that adds to a counter in the store, or, where the
    store died with its rank, the first on each host. A rank that only lost a connection waits for
    the one with the cause.
    """
    if isinstance(error, RemoteError):
        return None
    if comm is None:
        if rank_hint(os.environ) > 0:
            time.sleep(_FIRST_REPORT_S)
        return _text(f"rank {rank_hint(os.environ)} on {socket.gethostname()}", error, [])
    dead = _wait_for_dead(comm) if is_broken_connection(error) else []
    store_is_gone = any(peer.rank == 0 for peer in dead)
    if not _reports_first(comm, store_is_gone):
        return None
    return _text(f"rank {comm.world.rank} on {comm.world.hostname}", error, dead)


def dead_peers(comm: "Comm") -> "list[Peer]":
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
    if any(sign in text for sign in _OWN_FAULT):
        return False
    return "Dist" in type(error).__name__ or any(sign in text for sign in _BROKEN)


@contextlib.contextmanager
def time_limit(what: str, seconds: float, hint: str, who: str) -> Iterator[None]:
    """End the world if the block is not done in time, and print who waited for what."""

    def expire() -> None:
        print(f"{who}: waited {seconds:.0f} s for {what}; {hint}", file=sys.stderr, flush=True)
        die(None)

    timer = _after(seconds, expire)
    try:
        yield
    finally:
        timer.cancel()
        # A thread that still runs at the interpreter's end and drops the last reference to a
        # process group there aborts the process.
        timer.join(1.0)


def watch_launcher(who: str, every_s: float = 1.0) -> None:
    """End this rank when its parent or its launcher is gone: a killed mpirun orphans its ranks."""
    parent = os.getppid()
    # The nearest, such as mpirun behind a shell script.
    launcher = next((pid for pid, name in ancestors() if name.startswith(PROCESSES)), None)

    def watch() -> None:
        while True:
            time.sleep(every_s)
            if os.getppid() != parent or (launcher is not None and not is_alive(launcher)):
                # The other end of stderr may be closed.
                with contextlib.suppress(OSError, ValueError):
                    print(f"{who}: the launcher is gone, exiting", file=sys.stderr, flush=True)
                os._exit(EXIT_FAILED)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def end_world_on_uncaught(comm: "Comm | None") -> None:
    """Make an exception that nobody caught end the world, instead of hanging in MPI's Finalize."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        end_world(comm, error)

    sys.excepthook = hook


def end_world(comm: "Comm | None", error: BaseException) -> NoReturn:
    """Report once for the world what went wrong and end every rank."""
    text = report_failure(comm, error)
    if text is not None:
        print(text, file=sys.stderr, flush=True)
    die(comm, error.exit_code if isinstance(error, HpcTuneError) else EXIT_FAILED)


def _after(seconds: float, action: Callable[[], None]) -> threading.Timer:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()
    return timer


def _text(who: str, error: BaseException, dead: "list[Peer]") -> str:
    if isinstance(error, LeavingError):
        return f"{who}: {error}"
    if isinstance(error, HpcTuneError):
        return f"error on {who}: {error}"
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    text = f"{who} failed:\n{lines.rstrip()}"
    for peer in dead:
        text += f"\nrank {peer.rank} (pid {peer.pid} on host {peer.hostname}) is gone"
    if not dead and any(word in str(error).lower() for word in _LATE):
        text += "\nanother rank did not answer within run.timeout"
    return text


def _wait_for_dead(comm: "Comm") -> "list[Peer]":
    elsewhere = [peer.node for peer in comm.roster if peer.node != comm.world.node]
    has_neighbours = len(elsewhere) > len(set(elsewhere))
    limit_s = _NEIGHBOUR_REPORTS_WITHIN_S if has_neighbours else _DEATH_SHOWS_WITHIN_S
    until_s = time.monotonic() + limit_s
    while not (dead := dead_peers(comm)) and time.monotonic() < until_s:
        time.sleep(0.01)
    return dead


def _reports_first(comm: "Comm", store_is_gone: bool) -> bool:
    if comm.world.size == 1:
        return True
    if store_is_gone:
        return _reports_first_on_host(comm.nonce)
    answer: list[bool] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            answer.append(comm.store.add("hpc_tune/failed", 1) == 1)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_STORE_LIMIT_S)
    return answer[0] if answer else _reports_first_on_host(comm.nonce)


def _reports_first_on_host(nonce: str) -> bool:
    # A rank that has reported elsewhere may have ended the world, and here rank 0 went first.
    time.sleep(_OTHERS_END_WITHIN_S)
    # An abstract socket name can be taken once per host and vanishes with its owner.
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0hpc_tune/failed/{nonce}")
    except OSError:
        claim.close()
        return False
    claim.detach()
    return True
