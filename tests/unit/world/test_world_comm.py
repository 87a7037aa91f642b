"""What a rank does alone holds no collective: another that has failed would never join it."""

import errno
import os
import re
from dataclasses import replace

import pytest
import torch

from hpc_tune.errors import DataError, DiskError
from hpc_tune.world.comm import Comm
from hpc_tune.world.discover import World

WORLD = World(0, 1, 0, 1, 0, 1, "n0", "single")


def comm():
    device = torch.device("cpu")
    return Comm(WORLD, device, None, (), None, "nonce", threads=1, sees_local_pids=True)


@pytest.mark.parametrize(
    "collective",
    [
        lambda c: c.sum([1.0]),
        lambda c: c.max([1.0]),
        lambda c: c.broadcast(1),
        lambda c: c.barrier("all"),
        lambda c: c.agree_on_error(None, "loading"),
        lambda c: c.run_and_agree("loading", int),
        lambda c: c.run_on_rank_0("loading", int),
        lambda c: replace(c, threads=2).sum([1.0]),
    ],
)
def test_a_collective_where_a_rank_may_fail_alone_is_refused_by_name(collective):
    one = comm()
    with pytest.raises(AssertionError, match="a collective within 'reading the weights'"):
        one.run_and_agree("reading the weights", lambda: collective(one))
    collective(one)  # it is none any more


def test_it_may_be_called_again_after_an_error():
    one = comm()

    def fail():
        raise DataError("cut off")

    with pytest.raises(DataError):
        one.run_and_agree("reading the weights", fail)
    assert one.run_and_agree("reading the weights", lambda: 7) == 7


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk_is_an_error_that_all_ranks_agree_on(number):
    def fail():
        raise OSError(number, os.strerror(number), "runs/x/metrics.jsonl")

    said = f"runs/x/metrics.jsonl cannot be written: {os.strerror(number)}. Make room"
    with pytest.raises(DiskError, match=re.escape(said)):
        comm().run_and_agree("opening the metrics", fail)

    def fail_to_write():  # as write() does, which knows no name
        raise OSError(number, os.strerror(number))

    said = f"opening the metrics: {os.strerror(number)}. Make room, or choose a run.dir"
    with pytest.raises(DiskError, match=re.escape(said)):
        comm().run_and_agree("opening the metrics", fail_to_write)


@pytest.mark.parametrize(("number", "limit"), [(errno.EFBIG, "ulimit -f"), (errno.EDQUOT, "quota")])
def test_a_limit_of_the_job_or_the_user_is_told_by_its_name(number, limit):
    def fail():
        raise OSError(number, os.strerror(number), "runs/x/metrics.jsonl")

    said = f"runs/x/metrics.jsonl cannot be written: {os.strerror(number)}. "
    with pytest.raises(DiskError, match=f"{re.escape(said)}.*{limit}"):
        comm().run_and_agree("opening the metrics", fail)


def test_another_error_of_a_file_is_none_of_a_full_disk():
    def fail():
        raise FileNotFoundError(errno.ENOENT, "no such file", "x")

    with pytest.raises(FileNotFoundError):
        comm().run_and_agree("opening the metrics", fail)


def test_what_a_rank_does_is_known_where_it_fails():
    one, seen = comm(), []
    one.begin("training step 7")
    one.run_and_agree("writing a checkpoint", lambda: seen.append(one.activity[0]))
    assert (seen, one.activity) == (["writing a checkpoint"], ["training step 7"])

    def fail():
        raise DataError("cut off")

    with pytest.raises(DataError):
        one.run_and_agree("reading the weights", fail)
    assert one.activity == ["reading the weights"]
