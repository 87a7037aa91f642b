"""Some of the ranks in another order as a world of its own, and the others outside."""

import json
import os
import signal
import sys
import time

import pytest

from tests.support.ranks import HANG_S, find_mpirun, mpirun, rank_environment, started

PROGRAM = """
import json, os, sys, time
from hpc_tune import log
from hpc_tune.config.schema import RunSettings
from hpc_tune.world.bootstrap import bootstrap, shutdown
from hpc_tune.world.bootstrap import release_idle_ranks, regroup, wait_as_idle_rank
import torch
import torch.distributed as dist

ranks = json.loads(os.environ["RANKS"])
first = bootstrap(RunSettings(device="cpu", threads=1))
log.configure_logging(first.world.rank)
outside = first.world.size - len(ranks) if first.world.rank == 0 else 0
inside = regroup(first, ranks, 60.0)
if inside is None:
    print(json.dumps({"outside": first.world.rank, "pid": os.getpid()}), flush=True)
    sys.exit(wait_as_idle_rank(first))
total = torch.ones(3) * first.world.rank
dist.all_reduce(total)
told = {
    "was": first.world.rank, "pid": os.getpid(), "is": inside.world.rank,
    "world": str(inside.world), "sum": total.tolist(),
    "roster": [[p.rank, p.node, p.pid] for p in inside.roster],
    "gathered": inside.gather(first.world.rank),
    "from_last": inside.broadcast(first.world.rank, src=len(ranks) - 1),
    "mesh": dist.init_device_mesh("cpu", (len(ranks),)).get_group().size(),
}
print(json.dumps(told), flush=True)
time.sleep(float(os.environ["WORK_S"]))
if os.environ["FAILS"] == str(inside.world.rank):
    raise RuntimeError("planted")
inside.barrier("the work")
shutdown(inside)
release_idle_ranks(first.store, outside, int(os.environ["CODE"]))
sys.exit(int(os.environ["CODE"]))
"""


def environment(ranks, code=0, work_s=0.0, fails=""):
    words = {"RANKS": json.dumps(ranks), "CODE": str(code), "WORK_S": str(work_s), "FAILS": fails}
    return words


def told(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("n", "ranks"),
    [(4, [2, 0]), (1, [0]), (2, [1, 0]), (4, [0, 1, 2, 3]), (4, [0]), (3, [2, 0, 1])],
)
def test_some_ranks_in_any_order_are_a_world_of_their_own(n, ranks):
    done = mpirun(n, ["-c", PROGRAM], env=environment(ranks))
    assert done.returncode == 0, done.stderr
    rows = told(done.stdout)
    inside = sorted((row for row in rows if "is" in row), key=lambda row: row["is"])
    assert sorted(row["outside"] for row in rows if "outside" in row) == sorted(
        {*range(n)} - {*ranks}
    )
    assert [row["was"] for row in inside] == ranks
    for place, row in enumerate(inside):
        size = len(ranks)
        assert row["world"].startswith(f"rank {place}/{size} node 0/1 local {place}/{size}")
        assert row["sum"] == [sum(ranks)] * 3
        assert row["roster"] == [[i, 0, one["pid"]] for i, one in enumerate(inside)]
        assert row["gathered"] == ranks
        assert row["from_last"] == ranks[-1]
        assert row["mesh"] == size


@pytest.mark.full
def test_those_outside_leave_with_the_exit_code_of_the_run():
    done = mpirun(3, ["-c", PROGRAM], env=environment([0, 2], code=75))
    assert done.returncode == 75, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_those_outside_leave_when_a_rank_inside_fails():
    done = mpirun(3, ["-c", PROGRAM], env=environment([0, 2], fails="1", work_s=0.5))
    assert done.returncode not in (0, 75)
    assert done.stderr.count("error: rank 1") == 1, done.stderr
    assert "RuntimeError: planted" in done.stderr


@pytest.mark.full
def test_nobody_stays_when_a_rank_inside_is_killed():
    argv = [find_mpirun(), "-np", "3", sys.executable, "-c", PROGRAM]
    with started(argv, rank_environment(3, environment([0, 2], work_s=100.0))) as job:
        rows = [json.loads(job.stdout.readline()) for _ in range(3)]
        os.kill(next(row["pid"] for row in rows if row.get("is") == 0), signal.SIGKILL)
        job.communicate(timeout=HANG_S)
        assert job.returncode != 0
        for row in rows:
            until_s = time.monotonic() + HANG_S
            while os.path.exists(f"/proc/{row['pid']}") and time.monotonic() < until_s:
                time.sleep(0.1)
            assert not os.path.exists(f"/proc/{row['pid']}"), row
