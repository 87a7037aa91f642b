"""The connections that tell of lost hosts, in one process: who hears what, and when nobody does."""

import queue
import socket
import time
from types import SimpleNamespace

import pytest

from hpc_tune.errors import GoneError, RemoteError
from hpc_tune.world import liveness, watch
from hpc_tune.world.comm import Peer
from hpc_tune.world.watch import HostWatch

NUM_RANKS = 3


class World:
    """Ranks of one process, each on a host of its own; ``heard`` is who was told of what."""

    def __init__(self):
        self.heard = queue.Queue()
        self.store = {}
        roster = tuple(Peer(rank, rank, f"n{rank}", 1) for rank in range(NUM_RANKS))
        self.watches = [self.start(rank, roster) for rank in range(NUM_RANKS)]
        until_s = time.monotonic() + 120
        while len(self.watches[0]._ranks) < NUM_RANKS - 1:
            assert time.monotonic() < until_s
            time.sleep(0.01)

    def start(self, rank, roster):
        store = SimpleNamespace(set=self.store.__setitem__, get=self.store.__getitem__)
        world = SimpleNamespace(rank=rank, size=NUM_RANKS, node=rank, hostname=f"n{rank}")
        comm = SimpleNamespace(
            world=world, is_rank_0=rank == 0, roster=roster, store=store, nonce="abc"
        )
        comm.activity = ["training step 7"]
        lost = lambda comm, error: self.heard.put((comm.world.rank, error))  # noqa: E731
        return HostWatch(comm, "127.0.0.1", 20.0, lost)

    def connection(self, rank):
        """Return a rank's end of its connection to rank 0."""
        [peer] = self.watches[rank]._ranks
        return peer

    def end(self):
        for one in self.watches:
            one.close()


@pytest.fixture
def world(monkeypatch):
    monkeypatch.setattr(liveness, "EMPTY_NODE_REPORT_DELAY_S", 1.5)
    # The timer would end the tests' own process, however long it is.
    monkeypatch.setattr(liveness, "exit_soon", lambda: None)
    made = World()
    yield made
    made.end()


def test_a_clean_end_is_heard_by_nobody(world):
    world.end()
    assert [one._thread.is_alive() for one in world.watches] == [False] * NUM_RANKS
    time.sleep(0.5)
    assert world.heard.empty()


def test_a_rank_that_ends_without_a_word_ends_the_world_and_its_host_is_named(world):
    """Rank 0 hears it, and tells those that it still reaches."""
    world.connection(2).shutdown(socket.SHUT_RDWR)
    heard = {}
    while len(heard) < NUM_RANKS:  # on a busy machine a rank may say it again before another does
        rank, error = world.heard.get(timeout=10)
        heard.setdefault(rank, error)
    assert isinstance(heard[0], GoneError)
    assert str(heard[0]) == "host n2 (rank 2) is gone while training step 7"
    assert heard[0].facts == {"lost_hosts": ["n2"], "lost_ranks": [2]}
    assert isinstance(heard[1], GoneError | RemoteError)


@pytest.mark.parametrize("reporter", [0, 2])
def test_a_rank_that_has_said_why_the_world_ends_is_not_gone_and_its_code_is_everybodys(
    world, reporter
):
    world.watches[reporter].announce_exit(75)
    others = {0, 1, 2} - {reporter}
    heard = dict(world.heard.get(timeout=10) for _ in others)
    assert heard.keys() == others
    assert [type(error) for error in heard.values()] == [RemoteError] * 2
    assert {error.exit_code for error in heard.values()} == {75}
    assert {world.watches[rank].reported_exit_code for rank in others} == {75}


def test_ranks_that_leave_when_they_are_told_are_not_named_as_gone(world):
    world.watches[0]._end_times_s = {2: 100.0, 1: 101.2}
    assert world.watches[0].ended_ranks() == {2}
    world.watches[0]._end_times_s = {2: 100.0, 1: 100.1}
    assert world.watches[0].ended_ranks() == {1, 2}
    world.watches[0]._end_times_s = {}


def wait_for_ended(watch):
    until_s = time.monotonic() + 60
    while not (ended := watch.ended_ranks()):
        assert time.monotonic() < until_s
        time.sleep(0.01)
    return ended


def test_every_survivor_knows_which_ranks_have_ended(world, monkeypatch):
    """Rank 1, on a third host, has no connection to rank 2."""
    monkeypatch.setattr(liveness, "EMPTY_NODE_REPORT_DELAY_S", 3600.0)
    world.connection(2).shutdown(socket.SHUT_RDWR)
    assert [wait_for_ended(world.watches[rank]) for rank in (0, 1)] == [{2}, {2}]


def test_where_rank_0s_host_ends_every_survivor_names_its_ranks(world, monkeypatch):
    """Had one of them lived, it would have ended the world."""
    monkeypatch.setattr(liveness, "EMPTY_NODE_REPORT_DELAY_S", 3600.0)
    roster = (Peer(0, 0, "n0", 1), Peer(1, 0, "n0", 2), Peer(2, 2, "n2", 3))
    world.watches[2]._comm.roster = roster
    for peer in [*world.watches[0]._ranks]:
        peer.shutdown(socket.SHUT_RDWR)
    assert wait_for_ended(world.watches[2]) == {0, 1}


def test_after_the_ranks_are_renumbered_it_is_the_same_host_that_is_named(world):
    """The run goes on as ranks 0, 1 and 2 of the launcher's 1, 2 and 0."""
    launched, host = world.watches[0]._comm.roster, world.watches[0]._comm
    old = [1, 2, 0]
    now = SimpleNamespace(**vars(host))
    now.roster = tuple(
        Peer(rank, node, launched[was].hostname, launched[was].pid)
        for rank, (was, node) in enumerate(zip(old, (0, 1, 2), strict=True))
    )
    world.watches[0].renumber(now, old)
    world.watches[0]._end_times_s = {2: 100.0}
    assert world.watches[0].ended_ranks() == {1}
    assert (
        str(world.watches[0]._ended_ranks_error({2}))
        == "host n2 (rank 1) is gone while training step 7"
    )
    assert world.watches[0]._lost_host_error(2).facts == {"lost_hosts": ["n2"], "lost_ranks": [1]}
    # Of those, the second and the third one are left: the launcher's rank 1 idles.
    last = SimpleNamespace(**vars(host))
    last.roster = tuple(Peer(rank, rank, f"n{was}", 1) for rank, was in enumerate((2, 0)))
    world.watches[0].renumber(last, [1, 2])
    assert world.watches[0].ended_ranks() == {0}
    assert world.watches[0]._ended_ranks_error({2}).facts == {
        "lost_hosts": ["n2"],
        "lost_ranks": [0],
    }
    assert world.watches[0]._ended_ranks_error({1}).facts == {
        "lost_hosts": ["n1"],
        "lost_ranks": [1],
    }
    world.watches[0]._end_times_s = {}


def test_the_kernel_asks_on_both_sides_and_gives_up_within_the_limit(world):
    ends = [world.connection(1), *world.watches[0]._ranks]
    assert len(ends) == NUM_RANKS
    for end in ends:
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle_s, every_s, count = (end.getsockopt(socket.IPPROTO_TCP, one) for one in options)
        assert idle_s + every_s * count == 20


def test_a_stranger_is_sent_away_and_changes_nothing(world):
    place = next(iter(world.watches[0]._ranks)).getsockname()
    for said in (b"", b"x" * 36, world.watches[0]._hello + (99).to_bytes(4, "big")):
        with socket.create_connection(place, timeout=10) as stranger:
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    assert len(world.watches[0]._ranks) == NUM_RANKS - 1
    assert world.heard.empty()


def test_it_listens_on_one_interface_unless_the_address_is_no_own_one():
    with watch._listen("127.0.0.1", 1, is_one_node=True) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with watch._listen("127.0.0.1", 1) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    own = [a.ip for a in watch.local_addresses() if not a.ip.startswith("127.") and "." in a.ip]
    assert own, "this machine has no network but its loopback"
    with watch._listen(own[0], 1) as listener:
        assert listener.getsockname()[0] == own[0]
