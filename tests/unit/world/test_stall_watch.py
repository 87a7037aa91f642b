"""When training counts as standing still, and which rank it names."""

import json
import pickle
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hpc_tune.packages import parse_release
from hpc_tune.world.comm import Peer
from hpc_tune.world.failure import RankProgress, find_late_ranks, stalled_error
from hpc_tune.world.nccl import write_collectives_trace
from hpc_tune.world.watch import StallWatch

ROSTER = tuple(Peer(rank, rank // 2, f"n{rank // 2}", 2**22 + rank) for rank in range(3))


def comm_of(rank=0, size=2, store=None):
    return SimpleNamespace(
        world=SimpleNamespace(rank=rank, size=size, node=0),
        roster=ROSTER[:size],
        store=store or dist.HashStore(),
        store_rank=0,
        device=torch.device("cpu"),
        sees_local_pids=False,
        begin=lambda what: None,
    )


def heard(limit_s, work, comm=None, told=None):
    """What a limit tells of ``work``."""
    told = [] if told is None else told
    limit = StallWatch(comm or comm_of(), limit_s, told.append)
    limit.enter("training step 7")
    with limit.watching():
        work(limit, told)
    return told


@pytest.fixture
def stays(monkeypatch):
    """The process is not ended."""
    monkeypatch.setattr("hpc_tune.world.liveness.exit_soon", lambda: None)


def test_a_rank_that_waits_for_one_that_is_not_there_names_it(stays):
    waiting, woken = socket.socketpair()

    class Told(list):
        def append(self, error):
            super().append(error)
            woken.send(b"x")

    with waiting, woken:
        [error] = heard(0.5, lambda limit, told: waiting.recv(1), told=Told())
    assert str(error).startswith(
        "training step 7: no progress for 0 s (run.timeout): rank 1 (pid 4194305 on n0) does not "
        "answer: its process is stopped, or hangs outside of Python"
    )
    assert error.facts == {"during": "training step 7", "late_ranks": [1]}


def test_where_the_store_does_not_answer_rank_0_is_named_alone(stays):
    """A process that is stopped holds its store, too."""

    class Silent(SimpleNamespace):
        def set(self, key, value):
            threading.Event().wait(3600)

        def check(self, keys):
            return False

    told = []
    limit = StallWatch(comm_of(rank=1, size=3, store=Silent()), 0.1, told.append)
    limit.enter("training step 7")
    limit._report_stall(wait_s=0.2)
    [error] = told
    assert "rank 0 (pid 4194304 on n0) does not answer" in str(error)
    assert error.facts["late_ranks"] == [0]


def test_steps_that_go_on_are_none(stays):
    def steps(limit, told):
        until_s = time.monotonic() + 2
        while time.monotonic() < until_s:
            limit.enter("training step 8")
            time.sleep(0.02)

    assert heard(0.5, steps) == []


def test_one_step_that_computes_for_longer_than_the_limit_is_none(stays):
    def step(limit, told):
        until_s = time.process_time() + 1.5
        values = torch.rand(600, 600)
        while time.process_time() < until_s:
            values @ values

    assert heard(0.5, step) == []


def test_a_rank_by_itself_waits_for_nobody(stays):
    work = lambda limit, told: time.sleep(2)  # noqa: E731
    assert heard(0.2, work, comm_of(size=1)) == []


def test_nothing_is_watched_after_the_block(stays):
    told = []
    with StallWatch(comm_of(), 0.2, told.append).watching():
        pass
    time.sleep(1)
    assert told == []
    assert "stall-watch" not in {thread.name for thread in threading.enumerate()}


def test_a_rank_that_is_asked_answers_where_it_is(stays):
    store = dist.HashStore()
    told = []
    limit = StallWatch(comm_of(rank=1, store=store), 2, told.append)
    limit.enter("beginning step 3")
    with limit.watching():
        store.set("hpc_tune/stalled", "")
        until_s = time.monotonic() + 60
        while not store.check(["hpc_tune/stalled/1"]) and time.monotonic() < until_s:
            time.sleep(0.01)
    place = RankProgress(**json.loads(store.get("hpc_tune/stalled/1"))[0])
    assert (place.entered, place.activity, place.waits) == (1, "beginning step 3", False)
    assert told == []


def at(entered, waits=True, line="hpc_tune/world/comm.py:1 in sum"):
    return RankProgress(entered, f"training step {entered}", line, waits)


@pytest.mark.parametrize(
    ("places", "late"),
    [
        ({0: at(5), 1: at(5), 2: at(5)}, []),
        ({0: at(5), 1: at(5)}, [2]),
        ({0: at(5), 2: at(4)}, [1]),  # one that says nothing may be what the other waits for
        ({0: at(5), 1: at(4), 2: at(5)}, [1]),
        ({0: at(5), 1: at(4), 2: at(4, waits=False)}, [1, 2]),
        ({0: at(5), 1: at(5, waits=False), 2: at(5)}, [1]),
        ({0: at(5, waits=False), 1: at(5, waits=False), 2: at(5, waits=False)}, []),
    ],
)
def test_late_is_who_the_others_wait_for(places, late):
    assert find_late_ranks(places, 3) == late


def test_a_rank_that_is_behind_is_named_with_its_line():
    places = {0: at(5), 1: at(5), 2: at(4, False, "hpc_tune/data/loader.py:8 in next_step")}
    error = stalled_error(places, ROSTER, "training step 5", 1800, set(), "run/collectives")
    assert str(error) == (
        "training step 5: no progress for 1800 s (run.timeout): rank 2 (pid 4194306 on n1) has not "
        "arrived: it is at training step 4, hpc_tune/data/loader.py:8 in next_step. The last "
        "collectives of each rank are in run/collectives, for torchfrtrace"
    )
    assert error.facts == {
        "during": "training step 5",
        "late_ranks": [2],
        "trace": "run/collectives",
    }


def test_ranks_that_all_wait_point_to_the_network():
    error = stalled_error(
        {0: at(5), 1: at(5), 2: at(5)}, ROSTER, "training step 5", 60, set(), None
    )
    assert str(error) == (
        "training step 5: no progress for 60 s (run.timeout): all ranks are at "
        "hpc_tune/world/comm.py:1 in sum: look at the network and the devices"
    )
    assert error.facts == {"during": "training step 5", "late_ranks": []}


def test_a_process_that_has_ended_is_gone():
    error = stalled_error({0: at(5), 1: at(5)}, ROSTER, "training step 5", 60, {2}, None)
    assert "rank 2 (pid 4194306 on n1) is gone" in str(error)


def test_the_trace_of_a_rank_holds_its_collectives(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3))
        folder = write_collectives_trace(tmp_path / "collectives", 5, uses_gpu=False)
    finally:
        dist.destroy_process_group()
    if parse_release(torch.__version__) < (2, 11):
        assert folder is None, "torch 2.9 and 2.10 record none of gloo's collectives"
        assert not (tmp_path / "collectives").exists()
        return
    assert folder == str(tmp_path / "collectives")
    trace = pickle.loads((tmp_path / "collectives/nccl_trace_rank_5").read_bytes())
    assert "gloo:all_reduce" in {entry["profiling_name"] for entry in trace["entries"]}
