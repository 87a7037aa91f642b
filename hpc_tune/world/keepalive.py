"""Detects a host that is down or cut off: every rank holds one idle connection to rank 0.

    a host falls silent -> its ranks' connections time out on rank 0, and rank 0's on its ranks
    -> rank 0 notifies the ranks of all other hosts -> every rank exits

The ranks send nothing on it: the kernels probe each other (TCP keepalive), and a kernel answers
for a rank that computes, waits for a disk or is suspended. So this is quick, and never mistakes a
slow rank, which run.timeout is for. Without it a collective waits for a lost host as long as for a
slow rank, and mpirun's own daemons for minutes.

On one node of GPUs there are no hosts to lose, but a GPU does not hear of a rank that has ended.

A connection that ends tells that its rank has: rank 0 passes on which, so that every survivor can
name them, also where none is on their host. A rank that has reported why the world ends says so,
with its exit code, before it leaves: its end is then no news, and the others leave with that code.
"""

import contextlib
import errno
import hashlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence, Set

from hpc_tune.errors import (
    EXIT_FAILED,
    GoneError,
    HpcTuneError,
    LostHostError,
    RemoteError,
    WorldError,
)
from hpc_tune.world import liveness
from hpc_tune.world.comm import Comm, Peer
from hpc_tune.world.failure import gone_error, list_ranks
from hpc_tune.world.processes import is_alive
from hpc_tune.world.rendezvous import local_addresses

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
