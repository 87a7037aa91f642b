"""Ranks that answer no more are named, whatever the others do."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from hpc_tune.world.comm import Peer
from hpc_tune.world.watch import RollCall

ROSTER = tuple(Peer(rank, rank // 2, f"n{rank // 2}", 2**22 + rank) for rank in range(3))


def comm_of(rank, store):
    world = SimpleNamespace(rank=rank, size=3, node=rank // 2)
    comm = SimpleNamespace(
        world=world, is_rank_0=rank == 0, roster=ROSTER, store=store, store_rank=0
    )
    comm.activity = ["loading the model"]
    return comm


def wait_for(told):
    until_s = time.monotonic() + 60
    while not told and time.monotonic() < until_s:
        time.sleep(0.01)
    return told


def test_a_rank_whose_threads_stand_still_is_named_and_one_that_works_is_not():
    store, told = dist.HashStore(), []
    with (
        RollCall(comm_of(0, store), 0.4, told.append).watching(),
        RollCall(comm_of(2, store), 0.4, told.append).watching(),
    ):
        [error] = wait_for(told)
    assert str(error).startswith(
        "rank 1 (pid 4194305 on n0) does not answer while loading the model, for 1 s (2 x run.timeo"
    )
    assert error.facts == {"late_ranks": [1]}


class Stopped(SimpleNamespace):
    """The store of a rank 0 that is stopped: nobody answers."""

    def add(self, key, value):
        threading.Event().wait(3600)


def test_the_others_name_a_rank_0_that_is_stopped_with_its_store():
    told = []
    with RollCall(comm_of(1, Stopped()), 0.4, told.append).watching():
        [error] = wait_for(told)
    assert "rank 0 (pid 4194304 on n0) does not answer" in str(error)


def test_ranks_that_answer_are_called_again_and_again():
    store, told = dist.HashStore(), []
    calls = [RollCall(comm_of(rank, store), 0.4, told.append) for rank in range(3)]
    with calls[0].watching(), calls[1].watching(), calls[2].watching():
        time.sleep(2)
    assert told == []
    assert store.add("hpc_tune/roll", 0) >= 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_is_gone_ends_the_calls_and_tells_nothing(rank):
    def gone(*_):
        raise RuntimeError("Connection reset by peer")

    told = []
    with RollCall(comm_of(rank, SimpleNamespace(add=gone)), 0.1, told.append).watching():
        time.sleep(0.1)
    assert told == []
