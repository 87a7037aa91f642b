"""Who watches what in a run, and how a world that cannot continue is ended, on every rank.

Each row is an event: the sign that shows it; who acts, in its own thread; after how long, as
settings and constants of world/liveness.py; and what is printed, once for all ranks, with the exit
code of each rank.

HostWatch in world/watch.py: a host is down or cut off
    sign    its kernel answers no TCP probe on the connection that each rank has with rank 0
    who     rank 0, which tells the others first; if it is cut off, every rank on the other side
    after   run.host_timeout; a rank that cannot report exits FAILURE_REPORT_LIMIT_S later
    prints  "host n2 (ranks 2, 3) has not answered in 20 s ...", exit code 1
HostWatch in world/watch.py: a rank has ended without a report
    sign    its connection has closed, and rank 0 tells the others which rank's
    who     every live rank; most have noticed the loss in a collective before
    after   RANK_END_REPORT_LIMIT_S, or EMPTY_NODE_REPORT_DELAY_S if no rank of its node is left
    prints  "rank 2 (pid 70 on host n1) is gone while ...", exit code 1
HostWatch in world/watch.py: a rank has reported why the world ends
    sign    its exit code, sent on the connection
    who     every other rank
    after   at once
    prints  nothing more; the exit code of the report
StallWatch in world/watch.py: training stands still
    sign    the main thread's line of code and CPU time, looked at every STEP_CHECK_EVERY_S
    who     each rank that sees it; when asked, all ranks write to the store where they are
    after   run.timeout; torch's own limit is TORCH_TIMEOUT_MARGIN_S later
    prints  "...: no progress for 1800 s (run.timeout): rank 2 ... has not arrived", exit code 1
RollCall in world/watch.py: a process is stopped, or hangs outside of Python, whatever the ranks do
    sign    the rank's thread does not answer rank 0's calls, or the store does not answer
    who     rank 0, which has the store; for rank 0 itself, the others
    after   GIL_TIMEOUT_FACTOR x run.timeout
    prints  "rank 2 (pid 70 on n1) does not answer while ...", exit code 1
HangWatch in world/liveness.py: a rank hangs in work that it does alone
    sign    CPU time and bytes read, its own and its children's, looked at every HANG_CHECK_EVERY_S
    who     that rank; if a library holds the interpreter's lock, faulthandler
    after   run.timeout; GIL_TIMEOUT_FACTOR x that with the lock held
    prints  "...: nothing was read or computed for 1800 s ...", or a traceback; exit code 1
NcclWatch in world/nccl.py: NCCL has an error, or one of its collectives is late
    sign    the error that torch keeps in each group, looked at every NCCL_CHECK_EVERY_S
    who     each rank that sees it, unless HostWatch has ended the world
    after   NCCL_CAUSE_LIMIT_S; a collective is late TORCH_TIMEOUT_MARGIN_S after run.timeout
    prints  "NCCL has lost its connection to another rank while ...", exit code 1
StartupWatchdog in train/exit.py: a request to stop, before the first step is over
    sign    a signal, the STOP file, the end of the time limit; looked at every STOP_CHECK_EVERY_S
    who     each rank that sees it and has not stopped by itself
    after   STOP_GRACE_S
    prints  "stopped while ... (SIGTERM). Rerun the same command ...", exit code 75
watch_launcher in world/failure.py: the launcher, or the parent of this rank, is gone
    sign    their processes, looked at every LAUNCHER_CHECK_EVERY_S
    who     each rank, for itself
    after   at once
    prints  "rank 2 on n1: the launcher is gone, exiting", exit code 1
time_limit in world/liveness.py: a wait for the others does not end
    sign    the block does not finish
    who     each rank that waits
    after   START_LIMIT_S and START_LIMIT_PER_RANK_S, or run.start_timeout; SHUTDOWN_LIMIT_S at end
    prints  "rank 2 on n1: waited 300 s for all ranks to start; ...", exit code 1
RunLock in rundir/owner.py: another job has taken the run directory over, or it was moved
    sign    live.json names the owner, who touches it every LOCK_TOUCH_EVERY_S
    who     rank 0
    after   the next touch; an owner counts as dead after LOCK_STALE_S, or if it is known to be
    prints  "run.dir=... was taken over by ...", exit code 2
HeartbeatFile in rundir/outcome.py: a run has died without a report
    sign    the first rank of each node writes a file every HEARTBEAT_EVERY_S
    who     `report`, `inspect` and the next start, which look at the directory
    after   LATE_HEARTBEAT_S the run counts as late, after DEAD_HEARTBEAT_S as dead
    prints  how the run was last seen

memory/monitor.py watches how full memory is, and supervise.py what is left of a job.
"""

import contextlib
import errno
import hashlib
import ipaddress
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path

from hpc_tune.errors import (
    EXIT_FAILED,
    GoneError,
    HpcTuneError,
    LostHostError,
    RemoteError,
    WorldError,
)
from hpc_tune.world import liveness
from hpc_tune.world.comm import Comm, Peer, StoreKeys
from hpc_tune.world.failure import (
    RankProgress,
    ended_ranks_error,
    find_dead_peers,
    lost_host_error,
    stalled_error,
    unresponsive_ranks_error,
)
from hpc_tune.world.processes import is_alive
from hpc_tune.world.rendezvous import local_addresses

EndWorld = Callable[[Comm, HpcTuneError], None]
_COLLECTIVES_PATH = f"{os.sep}torch{os.sep}distributed{os.sep}"
_PACKAGE_PATH = f"{Path(__file__).parents[1]}{os.sep}"
_EXIT_NOTICE = b"!"  # followed by an exit code once the cause is reported
_GOODBYE_MESSAGE = b"bye"
_CHUNK_BYTES = 1 << 16
# The process at the other end has ended, and its host is alive to report it.
_PROCESS_ENDED_ERRNOS = (errno.ECONNRESET, errno.EPIPE)


class StallWatch:
    """Watches the main thread inside ``watching``; calls ``on_failure`` in a thread to end the
    world.

    torch's limit on NCCL collectives also counts while a job is suspended, and does not say which
    rank is missing. So it is set to expire later than this one.
    """

    def __init__(
        self,
        comm: Comm,
        limit_s: float,
        on_failure: Callable[[HpcTuneError], None],
        write_trace: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Allow ``limit_s`` without progress. ``write_trace`` writes a file and returns its folder,
        if there is anything to write.
        """
        self._comm, self._limit_s, self._end_world = comm, limit_s, on_failure
        self._keys, self._keep_trace = StoreKeys(comm.store, "stalled"), write_trace
        self._every_s = every_s = min(
            liveness.STEP_CHECK_EVERY_S, limit_s / liveness.NUM_STEP_CHECKS
        )
        ends_if_still = liveness.make_stall_check(
            self._progress_snapshot, limit_s, every_s, self._report_stall
        )
        self._watcher = liveness.Watcher(
            "stall-watch", every_s, ends_if_still, self._answer_progress_request
        )
        self._num_entered, self._activity = 0, "the first step"
        self._send_lock = threading.Lock()
        self._has_sent = False
        self._trace: str | None = None

    def enter(self, operation: str) -> None:
        """Begin a part of training; all ranks begin the parts in the same order."""
        self._num_entered, self._activity = self._num_entered + 1, operation
        self._comm.begin(operation)

    def watching(self) -> AbstractContextManager[None]:
        """Watch the block, which all ranks are in; a single rank waits for nobody."""
        return self._watcher.watching() if self._comm.world.size > 1 else nullcontext()

    def _progress_snapshot(self) -> tuple[object, ...]:
        """Return what changes while the main thread does anything but wait in one place."""
        frame, spent_ns = liveness.inspect_main_thread()
        position = (self._num_entered, id(frame), frame.f_lasti if frame is not None else 0)
        if self._comm.device.type != "cpu":
            return position  # not CPU time: the thread spins while it waits for a GPU
        return *position, spent_ns

    def _report_stall(self, wait_s: float | None = None) -> None:
        if wait_s is None:
            wait_s = 2 * (3 * self._every_s + liveness.FAILURE_REPORT_LIMIT_S)
        own_rank = self._comm.world.rank
        progress = {own_rank: self._own_progress()}
        # The store may be behind a cut network.
        thread = threading.Thread(target=self._gather_progress, args=(progress,), daemon=True)
        thread.start()
        thread.join(wait_s)
        liveness.exit_soon()
        if not self._watcher.is_closed:
            gone_ranks = {peer.rank for peer in find_dead_peers(self._comm)}
            roster, operation = self._comm.roster, self._activity
            store_rank = self._comm.store_rank
            if own_rank != store_rank and thread.is_alive():  # the others may well answer
                progress |= {
                    peer.rank: progress[own_rank] for peer in roster if peer.rank != store_rank
                }
            self._end_world(
                stalled_error(progress, roster, operation, self._limit_s, gone_ranks, self._trace)
            )

    def _gather_progress(self, progress_by_rank: dict[int, RankProgress]) -> None:
        """Fill ``progress_by_rank`` with the ranks' answers, and let these write their traces."""
        pending_ranks = set(range(self._comm.world.size))
        until_s = time.monotonic() + 2 * self._every_s + 1.0
        with contextlib.suppress(RuntimeError):
            self._keys.set("")
            self._send_progress()
            while pending_ranks and time.monotonic() < until_s:
                for rank in sorted(pending_ranks):
                    if (answer := self._keys.find(rank)) is not None:
                        progress, has_trace = answer
                        progress_by_rank[rank] = RankProgress(**progress)
                        pending_ranks -= {rank} if has_trace else set()
                time.sleep(0.1)

    def _answer_progress_request(self) -> bool:
        try:
            if not self._keys.is_set():
                return False
            self._send_progress()
        except RuntimeError:  # the store is gone with its rank
            pass
        return True

    def _send_progress(self) -> None:
        """Send this rank's place at once, and again once its trace is there: that takes longer."""
        with self._send_lock:
            if not self._has_sent:
                self._has_sent = True
                own_rank, progress = self._comm.world.rank, asdict(self._own_progress())
                self._keys.set([progress, False], own_rank)
                self._trace = self._keep_trace()
                self._keys.set([progress, True], own_rank)

    def _own_progress(self) -> RankProgress:
        (frame, _), line, waits = liveness.inspect_main_thread(), "", False
        while frame is not None and not line:
            code = frame.f_code
            if code.co_filename.startswith(_PACKAGE_PATH):
                file = code.co_filename.removeprefix(_PACKAGE_PATH)
                line = f"hpc_tune/{file}:{frame.f_lineno} in {code.co_name}"
            waits = waits or _COLLECTIVES_PATH in code.co_filename
            frame = frame.f_back
        return RankProgress(self._num_entered, self._activity, line, waits)


class RollCall:
    """Calls the ranks of ``comm`` inside ``watching``; calls ``on_failure`` in a thread to end the
    world.

    The rank with the store repeatedly increases a number in it; a thread of each rank answers it.
    During training ``StallWatch`` asks sooner, and knows who is late. Before training a rank may
    work alone for hours while the others wait, and only its threads show that it is alive.
    """

    def __init__(
        self, comm: Comm, limit_s: float, on_failure: Callable[[HpcTuneError], None]
    ) -> None:
        """Treat a rank as stopped if it does not answer for twice ``limit_s`` seconds."""
        self._comm, self._end_world = comm, on_failure
        self._limit_s = liveness.GIL_TIMEOUT_FACTOR * limit_s
        self._every_s = every_s = min(
            liveness.STEP_CHECK_EVERY_S, limit_s / liveness.NUM_STEP_CHECKS
        )
        self._keys = StoreKeys(comm.store, "roll")
        self._num_store_answers = self._last_answer = 0
        # The other ranks watch whether the store still answers.
        ends_if_silent = liveness.make_stall_check(
            lambda: self._num_store_answers,
            self._limit_s,
            every_s,
            partial(self._report_silent_ranks, [comm.store_rank]),
        )
        has_store = comm.world.rank == comm.store_rank
        look = partial(self._stop_if_store_gone, self._call_ranks) if has_store else ends_if_silent
        self._watcher = liveness.Watcher(
            "roll-call", every_s, partial(self._stop_if_store_gone, self._answer_call), look
        )

    def watching(self) -> AbstractContextManager[None]:
        """Call and answer during the block."""
        return self._watcher.watching() if self._comm.world.size > 1 else nullcontext()

    def _stop_if_store_gone(self, check: Callable[[], bool]) -> bool:
        try:
            return check()
        except RuntimeError:  # the store is gone with its rank
            self._watcher.close()
            return True

    def _answer_call(self) -> bool:
        number = self._keys.add(0)
        self._num_store_answers += 1
        if number > self._last_answer:
            self._keys.set(number, self._comm.world.rank)
            self._last_answer = number
        return False

    def _call_ranks(self) -> bool:
        """Call all ranks, and end the world if one does not answer; for the rank with the store."""
        own_rank, number = self._comm.world.rank, self._keys.add(1)
        silent_ranks = [rank for rank in range(self._comm.world.size) if rank != own_rank]
        for _ in range(round(self._limit_s / self._every_s)):
            if self._watcher.wait(self._every_s):
                return True
            silent_ranks = [rank for rank in silent_ranks if (self._keys.find(rank) or 0) < number]
            if not silent_ranks:
                return self._watcher.wait(self._limit_s / 4 - self._every_s)
        self._report_silent_ranks(silent_ranks)
        return True

    def _report_silent_ranks(self, silent_ranks: list[int]) -> None:
        if not self._watcher.is_closed:
            peers = [self._comm.roster[rank] for rank in silent_ranks]
            self._end_world(unresponsive_ranks_error(peers, self._comm.activity[0], self._limit_s))


class HostWatch:
    """Watches the hosts and ranks of a world until ``close``: one idle connection to rank 0 each.

    The ranks send nothing on it: the kernels probe each other (TCP keepalive), and a kernel answers
    even if its rank computes, waits for a disk or is suspended. So this is quick, and never takes a
    slow rank for a lost one; run.timeout handles those. Without it a collective waits as long for a
    lost host as for a slow rank, and mpirun's own daemons wait for minutes. On one node of GPUs
    there is no other host to lose, but a GPU does not notice that a rank has ended.

    If a connection ends, its rank has ended. Rank 0 tells the others which one, so that every
    survivor can name it, even if none is on its host. A rank that has reported why the world ends
    sends its exit code before it exits; its end is then not reported again.
    """

    def __init__(self, comm: Comm, address: str, limit_s: float, on_failure: EndWorld) -> None:
        """Connect this rank; ``address`` is where all ranks reach rank 0's host.

        ``on_failure`` ends the world. It is called once, in a thread, when a host has not answered
        for ``limit_s`` seconds, or when a rank has ended or has reported why the world ends.

        Raises:
            WorldError: if rank 0 cannot be reached now.
        """
        self._comm, self._limit_s, self._end_world = comm, limit_s, on_failure
        # The ranks' current numbers; connections keep the launcher's numbers.
        self._current_comm, self._launch_ranks = comm, [*range(comm.world.size)]
        self._address = StoreKeys(comm.store, "reach")
        self.reported_exit_code: int | None = None
        self._closed = threading.Event()
        self._hello = hashlib.sha256(f"hpc_tune reach {comm.nonce}".encode()).digest()
        self._wake_read, self._wake_write = socket.socketpair()
        self._ranks: dict[socket.socket, int] = {}
        self._end_times_s: dict[int, float] = {}  # when each rank's connection ended
        self._departed_ranks: set[int] = set()  # ranks that said goodbye
        self._partial_lines: dict[int, bytes] = {}  # of messages, by rank
        listener: socket.socket | None = None
        if comm.is_rank_0:
            listener = _listen(address, comm.world.size, {peer.node for peer in comm.roster} == {0})
            self._address.set([address, listener.getsockname()[1]])
        else:
            self._ranks[self._connect()] = 0
        self._thread = threading.Thread(
            target=self._watch_peers, args=(listener,), name="host-watch", daemon=True
        )
        self._thread.start()

    def ended_ranks(self) -> set[int]:
        """Return the ranks of other hosts that are known to have ended without a report."""
        ranks = self._list_ended_remote_ranks()
        return {rank for rank, launch_rank in enumerate(self._launch_ranks) if launch_rank in ranks}

    def renumber(self, comm: Comm, ranks: Sequence[int]) -> None:
        """Number the ranks as in ``comm`` from now on; ``ranks`` are their previous numbers."""
        self._current_comm, self._launch_ranks = comm, [self._launch_ranks[rank] for rank in ranks]

    def _list_ended_remote_ranks(self) -> set[int]:
        world, now_s = self._comm.world, time.monotonic()
        times_s = self._joint_end_times_s()
        ends_s = {rank: at_s for rank, at_s in times_s.items() if not self._is_on_this_host(rank)}
        if not ends_s or now_s - min(ends_s.values()) < liveness.HOST_LOSS_SETTLE_S:
            return set()
        if world.rank and 0 in ends_s:
            ranks_with_0 = {peer.rank for peer in self._peers_on_node(self._comm.roster[0].node)}
            if ranks_with_0 != {0} and now_s - ends_s[0] < liveness.NEIGHBORS_REPORT_LIMIT_S:
                return set()
            return ranks_with_0 | ends_s.keys()
        return set(ends_s)

    def announce_exit(self, exit_code: int) -> None:
        """Tell the ranks of other hosts that this rank has reported why the world ends."""
        self.reported_exit_code = exit_code
        self._broadcast_line(_EXIT_NOTICE + str(exit_code).encode())

    def close(self) -> None:
        """Stop watching at the end of the world, while all ranks are still alive."""
        self._closed.set()
        self._broadcast_line(_GOODBYE_MESSAGE)
        with contextlib.suppress(OSError):  # it is closed already
            self._wake_write.send(b"x")
        self._thread.join(liveness.HELLO_LIMIT_S + 1.0)

    def _connect(self) -> socket.socket:
        address, port = self._address.get()
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

    def _watch_peers(self, listener: socket.socket | None) -> None:
        with selectors.DefaultSelector() as selector, contextlib.ExitStack() as open_sockets:
            open_sockets.enter_context(self._wake_write)
            for peer in (self._wake_read, *self._ranks, *([listener] if listener else [])):
                selector.register(open_sockets.enter_context(peer), selectors.EVENT_READ, peer)
            num_announced = 0
            while not self._closed.is_set():
                for key, _ in selector.select(self._poll_timeout_s()):
                    ready: socket.socket = key.data
                    if ready is listener:
                        if (new_peer := self._accept_peer(listener)) is not None:
                            open_sockets.enter_context(new_peer)
                            selector.register(new_peer, selectors.EVENT_READ, new_peer)
                    elif ready is not self._wake_read and not self._on_message(ready):
                        selector.unregister(ready)
                if self._comm.is_rank_0 and len(self._end_times_s) > num_announced:
                    num_announced = len(self._end_times_s)
                    self._broadcast_line(json.dumps([*self._end_times_s]).encode())
                if self._seconds_until_report() == 0:
                    self._report_and_exit(
                        self._ended_ranks_error(
                            self._list_ended_remote_ranks() | self._joint_end_times_s().keys()
                        )
                    )
                    return

    def _ended_ranks_error(self, launch_ranks: Set[int]) -> GoneError:
        """Return the error that names ranks that have ended; an idle rank has no current number."""
        roster = self._current_comm.roster
        peers = [roster[rank] for rank, old in enumerate(self._launch_ranks) if old in launch_ranks]
        if not peers:
            roster = self._comm.roster
            peers = [peer for peer in roster if peer.rank in launch_ranks]
        return ended_ranks_error(peers, roster, self._comm.activity[0])

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
        every_s = max(1, int(self._limit_s / (liveness.NUM_KEEPALIVE_PROBES + 1)))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, every_s)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, every_s)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, liveness.NUM_KEEPALIVE_PROBES)

    def _on_message(self, peer: socket.socket) -> bool:
        """Act on a message or the end of a connection; return whether the connection stays open."""
        rank = self._ranks[peer]
        try:
            message = peer.recv(_CHUNK_BYTES)
        except OSError as error:
            if error.errno not in _PROCESS_ENDED_ERRNOS:
                del self._ranks[peer]
                self._report_and_exit(self._lost_host_error(rank))
                return False
            message = b""
        if not message:
            del self._ranks[peer]
            if rank not in self._departed_ranks:
                self._record_ended_ranks([rank])
            return False
        *lines, self._partial_lines[rank] = (self._partial_lines.get(rank, b"") + message).split(
            b"\n"
        )
        for line in lines:
            if line == _GOODBYE_MESSAGE:
                self._departed_ranks.add(rank)
            elif line == _EXIT_NOTICE:
                self._report_and_exit(RemoteError("rank 0 has lost a host", EXIT_FAILED))
            elif line.startswith(_EXIT_NOTICE) and self.reported_exit_code is None:
                self.reported_exit_code = int(line.removeprefix(_EXIT_NOTICE))
                self._report_and_exit(
                    RemoteError("another rank has said why", self.reported_exit_code)
                )
            elif not line.startswith(_EXIT_NOTICE):
                self._record_ended_ranks(json.loads(line))
        return True

    def _joint_end_times_s(self) -> dict[int, float]:
        """Return when the ranks that ended together with the first did; others leave when told."""
        end_times_s = self._end_times_s.copy()
        first_s = min(end_times_s.values(), default=0.0)
        return {
            rank: at_s
            for rank, at_s in end_times_s.items()
            if at_s - first_s < liveness.JOINT_END_WINDOW_S
        }

    def _record_ended_ranks(self, ranks: list[int]) -> None:
        for rank in ranks:
            self._end_times_s.setdefault(rank, time.monotonic())

    def _broadcast_line(self, line: bytes) -> None:
        for peer in [*self._ranks]:
            with contextlib.suppress(OSError):
                peer.send(line + b"\n", socket.MSG_DONTWAIT)

    def _seconds_until_report(self) -> float | None:
        """Return in how many seconds to end the world since ranks have ended, None if none has."""
        now_s = time.monotonic()
        ends_s = [at_s + self._report_limit_s(rank) for rank, at_s in self._end_times_s.items()]
        return max(0.0, min(ends_s) - now_s) if ends_s else None

    def _poll_timeout_s(self) -> float | None:
        """Return when to look again: a process closes its connections before it shows as ended."""
        left_s = self._seconds_until_report()
        is_near = any(self._is_on_this_host(rank) for rank in self._end_times_s)
        return (
            min(left_s, liveness.HOST_LOSS_SETTLE_S) if left_s is not None and is_near else left_s
        )

    def _report_limit_s(self, rank: int) -> float:
        """Return how long to wait for ranks that can report the end of this rank better."""
        comm, peer = self._comm, self._comm.roster[rank]
        if self._is_on_this_host(rank):
            is_dead = comm.sees_local_pids and not is_alive(peer.pid)
            return liveness.HOST_LOSS_SETTLE_S if is_dead else liveness.RANK_END_REPORT_LIMIT_S
        is_node_empty = all(
            neighbor.rank in self._end_times_s for neighbor in self._peers_on_node(peer.node)
        )
        if is_node_empty or rank == 0:
            return liveness.EMPTY_NODE_REPORT_DELAY_S
        return liveness.RANK_END_REPORT_LIMIT_S

    def _peers_on_node(self, node: int) -> list[Peer]:
        return [peer for peer in self._comm.roster if peer.node == node]

    def _is_on_this_host(self, rank: int) -> bool:
        return self._comm.roster[rank].node == self._comm.world.node

    def _lost_host_error(self, rank: int) -> LostHostError:
        peers = self._peers_on_node(self._comm.roster[rank].node)
        ranks = [self._launch_ranks.index(p.rank) for p in peers if p.rank in self._launch_ranks]
        peers = [self._current_comm.roster[rank] for rank in sorted(ranks)] or peers
        own_host, operation = self._comm.world.hostname, self._comm.activity[0]
        return lost_host_error(peers, own_host, operation, self._limit_s)

    def _report_and_exit(self, error: HpcTuneError) -> None:
        if self._closed.is_set():
            return
        liveness.exit_soon()  # reporting may wait for something on the other side of the cut
        if self._comm.is_rank_0:
            code = self.reported_exit_code
            self._broadcast_line(
                _EXIT_NOTICE if code is None else _EXIT_NOTICE + str(code).encode()
            )
        self._end_world(self._current_comm, error)


def _listen(address: str, backlog: int, is_one_node: bool = False) -> socket.socket:
    """Listen on ``address``.

    If the address, which torchrun may have given, is not this host's, or is loopback with several
    nodes, listen on all interfaces, as torchrun's own store does.
    """
    family, _, _, _, sockaddr = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0]
    own_ips = {entry.ip for entry in local_addresses()}
    ip = str(sockaddr[0])
    is_reachable = ip in own_ips and (is_one_node or not ipaddress.ip_address(ip).is_loopback)
    host = ip if is_reachable else ""
    return socket.create_server((host, 0), family=family, backlog=backlog)
