"""Ends the world when training stands still for run.timeout, and names the rank that is late.

    each rank            a thread looks every few seconds whether the main thread moves
    one that stood still asks all through the store where they are -> names who has not come
    each rank            another thread answers, and keeps what its collectives did last

torch's limit on a collective of NCCL (``nccl_errors``) counts while a job is suspended, and has no
word about the rank that is missing. So the groups' own limit is ``STEP_MARGIN_S`` later.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hpc_tune.errors import HpcTuneError, StalledError
from hpc_tune.world import liveness
from hpc_tune.world.comm import Comm, Peer
from hpc_tune.world.failure import find_dead_peers

if TYPE_CHECKING:
    from torch.distributed import Store
import errno
import hashlib
import selectors
import socket
from collections.abc import Set

from hpc_tune.errors import (
    EXIT_FAILED,
    GoneError,
    LostHostError,
    RemoteError,
    WorldError,
)
from hpc_tune.world.failure import gone_error, list_ranks
from hpc_tune.world.processes import is_alive
from hpc_tune.world.rendezvous import local_addresses

_STALL_KEY = "hpc_tune/stalled"
_COLLECTIVES_PATH = f"{os.sep}torch{os.sep}distributed{os.sep}"
_PACKAGE_PATH = f"{Path(__file__).parents[1]}{os.sep}"


@dataclass(frozen=True)
class RankProgress:
    """Where a rank is: how many parts of training it has entered, the newest, a line of code.

    ``waits``: it is in a collective.
    """

    entered: int
    activity: str
    line: str
    waits: bool


class StepLimit:
    """Watches the main thread in ``over``; ``lost`` ends the world, and is called in a thread."""

    def __init__(
        self,
        comm: Comm,
        limit_s: float,
        lost: Callable[[HpcTuneError], None],
        keep_trace: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Stand still for ``limit_s`` at most. ``keep_trace`` writes a file and returns its folder,
        if there is anything to write.
        """
        self._comm, self._limit_s, self._end_world = comm, limit_s, lost
        self._keep_trace = keep_trace
        self._every_s = every_s = min(liveness.STEP_LOOK_EVERY_S, limit_s / liveness.STEP_NUM_LOOKS)
        ends_if_still = liveness.make_stall_check(self._stall_sign, limit_s, every_s, self._end)
        self._watcher = liveness.Watcher("step-limit", every_s, ends_if_still, self._answer)
        self._num_entered, self._activity = 0, "the first step"
        self._send_lock = threading.Lock()
        self._has_sent = False
        self._trace: str | None = None

    def enter(self, doing: str) -> None:
        """Begin a part of training, which all ranks begin in the same order."""
        self._num_entered, self._activity = self._num_entered + 1, doing
        self._comm.begin(doing)

    def over(self) -> contextlib.AbstractContextManager[None]:
        """Watch the block, which all ranks are in; a rank by itself waits for nobody."""
        return self._watcher.over() if self._comm.world.size > 1 else contextlib.nullcontext()

    def _stall_sign(self) -> tuple[object, ...]:
        """Return what changes while the main thread does anything but wait in one place."""
        frame = _main_frame()
        place = (self._num_entered, id(frame), frame.f_lasti if frame is not None else 0)
        if self._comm.device.type != "cpu":
            return place  # it spins while it waits for a GPU
        main = threading.main_thread().ident or 0
        return *place, time.clock_gettime_ns(time.pthread_getcpuclockid(main))

    def _end(self, wait_s: float | None = None) -> None:
        wait_s = 2 * (3 * self._every_s + liveness.LEAVE_LIMIT_S) if wait_s is None else wait_s
        own = self._comm.world.rank
        places = {own: self._own_progress()}
        # The store may be behind a cut network.
        asking = threading.Thread(target=self._gather_progress, args=(places,), daemon=True)
        asking.start()
        asking.join(wait_s)
        liveness.exit_soon()
        if not self._watcher.is_over:
            gone = {peer.rank for peer in find_dead_peers(self._comm)}
            roster, doing = self._comm.roster, self._activity
            first = self._comm.store_rank
            if own != first and asking.is_alive():  # the others may well answer
                places |= {peer.rank: places[own] for peer in roster if peer.rank != first}
            self._end_world(stalled_error(places, roster, doing, self._limit_s, gone, self._trace))

    def _gather_progress(self, places: dict[int, RankProgress]) -> None:
        """Fill ``places`` with those of the ranks that answer, and let them keep their traces."""
        store, left = self._comm.store, set(range(self._comm.world.size))
        until_s = time.monotonic() + 2 * self._every_s + 1.0
        with contextlib.suppress(RuntimeError):
            store.set(_STALL_KEY, "")
            self._tell()
            while left and time.monotonic() < until_s:
                for rank in sorted(left):
                    if store.check([f"{_STALL_KEY}/{rank}"]):
                        place, has_trace = json.loads(store.get(f"{_STALL_KEY}/{rank}"))
                        places[rank] = RankProgress(**place)
                        left -= {rank} if has_trace else set()
                time.sleep(0.1)

    def _answer(self) -> bool:
        try:
            if not self._comm.store.check([_STALL_KEY]):
                return False
            self._tell()
        except RuntimeError:  # the store is gone with its rank
            pass
        return True

    def _tell(self) -> None:
        """Tell once where this rank is, and again when its trace is there: that may take longer."""
        with self._send_lock:
            if not self._has_sent:
                self._has_sent = True
                key, place = f"{_STALL_KEY}/{self._comm.world.rank}", asdict(self._own_progress())
                self._comm.store.set(key, json.dumps([place, False]))
                self._trace = self._keep_trace()
                self._comm.store.set(key, json.dumps([place, True]))

    def _own_progress(self) -> RankProgress:
        frame, line, waits = _main_frame(), "", False
        while frame is not None and not line:
            code = frame.f_code
            if code.co_filename.startswith(_PACKAGE_PATH):
                file = code.co_filename.removeprefix(_PACKAGE_PATH)
                line = f"hpc_tune/{file}:{frame.f_lineno} in {code.co_name}"
            waits = waits or _COLLECTIVES_PATH in code.co_filename
            frame = frame.f_back
        return RankProgress(self._num_entered, self._activity, line, waits)


def find_late_ranks(places: Mapping[int, RankProgress], size: int) -> list[int]:
    """Return the ranks that the others wait for; none where all wait in the same place.

    Those that do not answer, or else those that are behind, or else those in no collective.
    """
    if missing := [rank for rank in range(size) if rank not in places]:
        return missing
    most = max(place.entered for place in places.values())
    if behind := [rank for rank in range(size) if places[rank].entered < most]:
        return behind
    busy = [rank for rank in range(size) if not places[rank].waits]
    return busy if len(busy) < size else []


def stalled_error(
    places: Mapping[int, RankProgress],
    roster: Sequence[Peer],
    doing: str,
    limit_s: float,
    gone: set[int],
    trace: str | None,
) -> StalledError:
    """Return the error that names who is late, of what all answered to a rank at ``doing``.

    ``gone``: processes that are known to have ended. ``trace``: where the ranks' collectives are.
    """
    late = find_late_ranks(places, len(roster))
    said = [_describe_late_rank(roster[rank], places.get(rank), rank in gone) for rank in late[:4]]
    if len(late) > len(said):
        said.append(f"and {len(late) - len(said)} more")
    if not late:
        lines = sorted({place.line for place in places.values()})
        said = [f"all ranks are at {', '.join(lines)}: look at the network and the devices"]
    words = f"{doing}: no progress for {limit_s:.0f} s (run.timeout): {'; '.join(said)}"
    facts: dict[str, object] = {"during": doing, "late_ranks": late}
    if trace is not None:
        words += f". The last collectives of each rank are in {trace}, for torchfrtrace"
        facts["trace"] = trace
    return StalledError(words, facts)


def _describe_late_rank(peer: Peer, place: RankProgress | None, is_gone: bool) -> str:
    who = f"rank {peer.rank} (pid {peer.pid} on {peer.hostname})"
    if is_gone:
        return f"{who} is gone"
    if place is None:
        return f"{who} does not answer: its process is stopped, or hangs outside of Python"
    return f"{who} has not arrived: it is at {place.activity}, {place.line}"


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


# -- Finds ranks whose process is stopped, or hangs outside of Python, whatever the ranks do.
#
#     rank 0      calls by a number in the store, again and again
#     every rank  a thread answers with that number
#
#     an answer is missing for too long    -> rank 0 ends the world and names who is silent
#     the store does not answer for that   -> the others do, and name rank 0
#
# In training ``step_limit`` asks sooner, and knows who is late. Before it a rank may work alone for
# hours while the others wait, and only its threads tell that it lives.


_ROLL_KEY = "hpc_tune/roll"


class RollCall:
    """Calls the ranks of ``comm`` in ``over``; ``lost`` ends the world, in a thread."""

    def __init__(self, comm: Comm, limit_s: float, lost: Callable[[HpcTuneError], None]) -> None:
        """Treat as stopped who does not answer for twice ``limit_s``, in seconds."""
        self._comm, self._limit_s, self._end_world = comm, liveness.GIL_FACTOR * limit_s, lost
        self._every_s = every_s = min(liveness.STEP_LOOK_EVERY_S, limit_s / liveness.STEP_NUM_LOOKS)
        self._num_store_answers = self._last_answer = 0
        # The others wait for the store to answer no more.
        ends_if_silent = liveness.make_stall_check(
            lambda: self._num_store_answers,
            self._limit_s,
            every_s,
            partial(self._end, [comm.store_rank]),
        )
        has_store = comm.world.rank == comm.store_rank
        look = partial(self._stop_if_store_gone, self._call) if has_store else ends_if_silent
        self._watcher = liveness.Watcher(
            "roll-call", every_s, partial(self._stop_if_store_gone, self._answer), look
        )

    def over(self) -> AbstractContextManager[None]:
        """Call and answer during the block."""
        return self._watcher.over() if self._comm.world.size > 1 else nullcontext()

    def _stop_if_store_gone(self, look: Callable[[], bool]) -> bool:
        try:
            return look()
        except RuntimeError:  # the store is gone with its rank
            self._watcher.close()
            return True

    def _answer(self) -> bool:
        number = self._comm.store.add(_ROLL_KEY, 0)
        self._num_store_answers += 1
        if number > self._last_answer:
            self._comm.store.set(f"{_ROLL_KEY}/{self._comm.world.rank}", str(number))
            self._last_answer = number
        return False

    def _call(self) -> bool:
        """Call all ranks, and end the world if one does not answer; for the one
        that has the store.
        """
        store, own = self._comm.store, self._comm.world.rank
        number = store.add(_ROLL_KEY, 1)
        silent = [rank for rank in range(self._comm.world.size) if rank != own]
        for _ in range(round(self._limit_s / self._every_s)):
            if self._watcher.wait(self._every_s):
                return True
            silent = [rank for rank in silent if _read_answer(store, rank) < number]
            if not silent:
                return self._watcher.wait(self._limit_s / 4 - self._every_s)
        self._end(silent)
        return True

    def _end(self, silent: list[int]) -> None:
        peers = [self._comm.roster[rank] for rank in silent]
        said = [f"rank {peer.rank} (pid {peer.pid} on {peer.hostname})" for peer in peers[:4]]
        if len(peers) > len(said):
            said.append(f"{len(peers) - len(said)} more")
        verb = "does" if len(peers) == 1 else "do"
        if not self._watcher.is_over:
            self._end_world(
                StalledError(
                    f"{', '.join(said)} {verb} not answer while {self._comm.activity[0]}, for "
                    f"{self._limit_s:.0f} s ({liveness.GIL_FACTOR} x run.timeout): a process is "
                    "stopped, or hangs outside of Python",
                    {"late_ranks": silent},
                )
            )


def _read_answer(store: "Store", rank: int) -> int:
    key = f"{_ROLL_KEY}/{rank}"
    return int(store.get(key)) if store.check([key]) else 0


# -- Detects a host that is down or cut off: every rank holds one idle connection to rank 0.
#
#     a host falls silent -> its ranks' connections time out on rank 0, and rank 0's on its ranks
#     -> rank 0 notifies the ranks of all other hosts -> every rank exits
#
# The ranks send nothing on it: the kernels probe each other (TCP keepalive), and a kernel answers
# for a rank that computes, waits for a disk or is suspended. So this is quick, and never mistakes a
# slow rank, which run.timeout is for. Without it a collective waits for a lost host as long as for
# a slow rank, and mpirun's own daemons for minutes.
#
# On one node of GPUs there are no hosts to lose, but a GPU does not hear of a rank that has ended.
#
# A connection that ends tells that its rank has: rank 0 passes on which, so that every survivor can
# name them, also where none is on their host. A rank that has reported why the world ends says so,
# with its exit code, before it leaves: its end is then no news, and the others leave with that
# code.


EndWorld = Callable[[Comm, HpcTuneError], None]
_ADDRESS_KEY = "hpc_tune/reach"
_LEAVE, _BYE = b"!", b"bye"  # the first with an exit code, once it is reported why
_CHUNK_BYTES = 1 << 16
# The process at the other end has ended, and its host is alive to report it.
_PROCESS_ENDED = (errno.ECONNRESET, errno.EPIPE)


class HostWatch:
    """Watches the hosts and ranks of a world, until ``close``."""

    def __init__(self, comm: Comm, address: str, limit_s: float, lost: EndWorld) -> None:
        """Connect this rank; ``address`` is where all ranks reach rank 0's host.

        ``lost`` ends the world. It is called in a thread, once, when a host has not answered for
        ``limit_s`` seconds.

        Raises:
            WorldError: if rank 0 cannot be reached now.
        """
        self._comm, self._limit_s, self._end_world = comm, limit_s, lost
        # As the ranks are called now, while connections are counted as the launcher has.
        self._now, self._launch_ranks = comm, [*range(comm.world.size)]
        self.reported_code: int | None = None
        self._closed = threading.Event()
        self._hello = hashlib.sha256(f"hpc_tune reach {comm.nonce}".encode()).digest()
        self._wake_read, self._wake_write = socket.socketpair()
        self._ranks: dict[socket.socket, int] = {}
        self._ended: dict[int, float] = {}  # when a rank's connection did
        self._left: set[int] = set()  # with a word
        self._partial_lines: dict[int, bytes] = {}  # of messages, by rank
        listener: socket.socket | None = None
        if comm.is_rank_0:
            listener = _listen(address, comm.world.size, {peer.node for peer in comm.roster} == {0})
            comm.store.set(_ADDRESS_KEY, json.dumps([address, listener.getsockname()[1]]))
        else:
            self._ranks[self._connect()] = 0
        self._thread = threading.Thread(
            target=self._watch, args=(listener,), name="host-watch", daemon=True
        )
        self._thread.start()

    def ended_ranks(self) -> set[int]:
        """Return the ranks of other hosts that are known to have ended without a word."""
        ended = self._ended_on_other_hosts()
        return {rank for rank, launched in enumerate(self._launch_ranks) if launched in ended}

    def renumber(self, comm: Comm, ranks: Sequence[int]) -> None:
        """Name the ranks from now on as ``comm`` does, in which ``ranks`` of the last one are."""
        self._now, self._launch_ranks = comm, [self._launch_ranks[rank] for rank in ranks]

    def _ended_on_other_hosts(self) -> set[int]:
        own, now_s = self._comm.world, time.monotonic()
        together = self._ended_together()
        ended = {rank: at_s for rank, at_s in together.items() if not self._is_on_this_host(rank)}
        if not ended or now_s - min(ended.values()) < liveness.HOST_SETTLE_S:
            return set()
        if own.rank and 0 in ended:
            with_0 = {peer.rank for peer in self._peers_on_node(self._comm.roster[0].node)}
            if with_0 != {0} and now_s - ended[0] < liveness.NEIGHBOURS_REPORT_WITHIN_S:
                return set()
            return with_0 | ended.keys()
        return set(ended)

    def leave(self, exit_code: int) -> None:
        """Tell the ranks of other hosts that this one has said why the world ends."""
        self.reported_code = exit_code
        self._tell(_LEAVE + str(exit_code).encode())

    def close(self) -> None:
        """Stop watching, at the end of the world, when all ranks are there."""
        self._closed.set()
        self._tell(_BYE)
        with contextlib.suppress(OSError):  # it is closed already
            self._wake_write.send(b"x")
        self._thread.join(liveness.HELLO_LIMIT_S + 1.0)

    def _connect(self) -> socket.socket:
        address, port = json.loads(self._comm.store.get(_ADDRESS_KEY))
        try:
            peer = socket.create_connection((address, port), timeout=liveness.CONNECT_LIMIT_S)
            self._enable_keepalive(peer)
            peer.sendall(self._hello + self._comm.world.rank.to_bytes(4, "big"))
        except OSError as error:
            raise WorldError(
                f"{self._comm.world.hostname} cannot reach rank 0 at {address} port {port} "
                f"({error}), though it reached it before: check for a firewall between the nodes"
            ) from error
        peer.settimeout(None)
        return peer

    def _watch(self, listener: socket.socket | None) -> None:
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as open_sockets:
            open_sockets.enter_context(self._wake_write)
            for peer in (self._wake_read, *self._ranks, *([listener] if listener else [])):
                selector.register(open_sockets.enter_context(peer), selectors.EVENT_READ, peer)
            num_told = 0
            while not self._closed.is_set():
                for key, _ in selector.select(self._poll_timeout_s()):
                    ready: socket.socket = key.data
                    if ready is listener:
                        if (new_peer := self._accept_peer(listener)) is not None:
                            open_sockets.enter_context(new_peer)
                            selector.register(new_peer, selectors.EVENT_READ, new_peer)
                    elif ready is not self._wake_read and not self._on_message(ready):
                        selector.unregister(ready)
                if self._comm.is_rank_0 and len(self._ended) > num_told:
                    num_told = len(self._ended)
                    self._tell(json.dumps([*self._ended]).encode())
                if self._seconds_left() == 0:
                    self._leave(
                        self._gone_error(
                            self._ended_on_other_hosts() | self._ended_together().keys()
                        )
                    )
                    return

    def _gone_error(self, launched: Set[int]) -> GoneError:
        """Return the error that names ranks that have ended; one that idles has no number now."""
        roster = self._now.roster
        known = [roster[rank] for rank, old in enumerate(self._launch_ranks) if old in launched]
        if not known:
            roster = self._comm.roster
            known = [peer for peer in roster if peer.rank in launched]
        return gone_error(known, roster, self._comm.activity[0])

    def _accept_peer(self, listener: socket.socket) -> socket.socket | None:
        """Return the connection of a rank of this job, or None if it is another client's."""
        peer = None
        with contextlib.suppress(OSError):
            peer, _ = listener.accept()
            peer.settimeout(liveness.HELLO_LIMIT_S)
            size = len(self._hello) + 4
            hello = peer.recv(size, socket.MSG_WAITALL)
            rank = int.from_bytes(hello[-4:], "big")
            if len(hello) == size and hello[:-4] == self._hello and rank < self._comm.world.size:
                self._enable_keepalive(peer)
                peer.settimeout(None)
                self._ranks[peer] = rank
                return peer
        if peer is not None:
            peer.close()
        return None

    def _enable_keepalive(self, peer: socket.socket) -> None:
        """Let the kernel probe the other host, so that silence is an error within the limit."""
        every_s = max(1, int(self._limit_s / (liveness.NUM_PROBES + 1)))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, liveness.NUM_PROBES)

    def _on_message(self, peer: socket.socket) -> bool:
        """Act on a message of rank 0 or the end of a connection; tell whether it goes on."""
        rank = self._ranks[peer]
        try:
            message = peer.recv(_CHUNK_BYTES)
        except OSError as error:
            if error.errno not in _PROCESS_ENDED:
                del self._ranks[peer]
                self._leave(self._lost_host_error(rank))
                return False
            message = b""
        if not message:
            del self._ranks[peer]
            if rank not in self._left:
                self._note_ended([rank])
            return False
        *lines, self._partial_lines[rank] = (self._partial_lines.get(rank, b"") + message).split(
            b"\n"
        )
        for line in lines:
            if line == _BYE:
                self._left.add(rank)
            elif line == _LEAVE:
                self._leave(RemoteError("rank 0 has lost a host", EXIT_FAILED))
            elif line.startswith(_LEAVE) and self.reported_code is None:
                self.reported_code = int(line.removeprefix(_LEAVE))
                self._leave(RemoteError("another rank has said why", self.reported_code))
            elif not line.startswith(_LEAVE):
                self._note_ended(json.loads(line))
        return True

    def _ended_together(self) -> dict[int, float]:
        """Return when those ranks ended that did with the first: others leave when told."""
        ended = self._ended.copy()
        first_s = min(ended.values(), default=0.0)
        return {
            rank: at_s for rank, at_s in ended.items() if at_s - first_s < liveness.ENDED_TOGETHER_S
        }

    def _note_ended(self, ended: list[int]) -> None:
        for rank in ended:
            self._ended.setdefault(rank, time.monotonic())

    def _tell(self, line: bytes) -> None:
        for peer in [*self._ranks]:
            with contextlib.suppress(OSError):
                peer.send(line + b"\n", socket.MSG_DONTWAIT)

    def _seconds_left(self) -> float | None:
        """Return when this thread ends the world since ranks have ended, None if none has."""
        now_s = time.monotonic()
        ends_s = [at_s + self._report_limit_s(rank) for rank, at_s in self._ended.items()]
        return max(0.0, min(ends_s) - now_s) if ends_s else None

    def _poll_timeout_s(self) -> float | None:
        """Return when to look again: a process closes its connections before it is known to end."""
        left_s = self._seconds_left()
        is_near = any(self._is_on_this_host(rank) for rank in self._ended)
        return min(left_s, liveness.HOST_SETTLE_S) if left_s is not None and is_near else left_s

    def _report_limit_s(self, rank: int) -> float:
        """Return how long those who can name the end of a rank better have for it."""
        comm, peer = self._comm, self._comm.roster[rank]
        if self._is_on_this_host(rank):
            is_dead = comm.sees_local_pids and not is_alive(peer.pid)
            return liveness.HOST_SETTLE_S if is_dead else liveness.GONE_LIMIT_S
        nobody_left = all(other.rank in self._ended for other in self._peers_on_node(peer.node))
        return liveness.NOBODY_LEFT_S if nobody_left or rank == 0 else liveness.GONE_LIMIT_S

    def _peers_on_node(self, node: int) -> list[Peer]:
        return [peer for peer in self._comm.roster if peer.node == node]

    def _is_on_this_host(self, rank: int) -> bool:
        return self._comm.roster[rank].node == self._comm.world.node

    def _lost_host_error(self, rank: int) -> LostHostError:
        own, peer = self._comm.world, self._comm.roster[rank]
        of_host = self._peers_on_node(peer.node)
        places = [self._launch_ranks.index(p.rank) for p in of_host if p.rank in self._launch_ranks]
        of_host = [self._now.roster[rank] for rank in sorted(places)] or of_host
        facts = {"lost_hosts": [peer.hostname], "lost_ranks": [other.rank for other in of_host]}
        return LostHostError(
            f"host {peer.hostname} ({list_ranks(of_host)}) has not answered in {self._limit_s:.0f} "
            f"s (run.host_timeout) while {self._comm.activity[0]}: it is down, or the network "
            f"between it and {own.hostname} is cut",
            facts,
        )

    def _leave(self, error: HpcTuneError) -> None:
        if self._closed.is_set():
            return
        liveness.exit_soon()  # reporting may wait for what is beyond the cut
        if self._comm.is_rank_0:
            code = self.reported_code
            self._tell(_LEAVE if code is None else _LEAVE + str(code).encode())
        self._end_world(self._now, error)


def _listen(address: str, backlog: int, is_one_node: bool = False) -> socket.socket:
    """Listen on ``address``.

    torchrun's may be one that this host does not have, or, of several nodes, its loopback; then
    listen on all interfaces, as torchrun's own store does.
    """
    family, _, _, _, sockaddr = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
    own = {known.ip for known in local_addresses()}
    ip = str(sockaddr[0])
    host = ip if ip in own and (is_one_node or not ip.startswith("127.")) else ""
    return socket.create_server((host, 0), family=family, backlog=backlog)
