"""When ranks collect garbage."""

import gc
import os
import subprocess
import sys
import weakref

import pytest

from hpc_tune.memory import host
from hpc_tune.train.control import StepStatus
from hpc_tune.train.metrics import RankUsage, UsageByRank
from tests.support.training import PREPARED


class Node:
    """An object that is garbage in a circle."""

    def __init__(self):
        self.me = self


@pytest.fixture(autouse=True)
def collected():
    gc.collect()
    yield
    gc.collect()


def test_what_a_rank_has_made_and_freed_is_not_due():
    with host.defer_garbage_collection():
        for _ in range(3 * host._COLLECTION_THRESHOLD):
            _ = [[]]
        assert not host.is_garbage_collection_due()


def test_garbage_in_circles_is_due_and_waits_for_the_boundary():
    with host.defer_garbage_collection():
        first = weakref.ref(Node())
        for _ in range(host._COLLECTION_THRESHOLD):
            Node()
        assert host.is_garbage_collection_due()
        assert first() is not None
        gc.collect()
        assert first() is None
        assert not host.is_garbage_collection_due()


def test_a_rank_that_comes_to_no_boundary_collects_at_last():
    with host.defer_garbage_collection():
        first = weakref.ref(Node())
        for _ in range(host._FORCED_COLLECTION_THRESHOLD):
            Node()
        assert first() is None


def test_after_training_all_is_collected_as_before():
    before, held = gc.get_threshold(), Node()
    was = weakref.ref(held)
    with host.defer_garbage_collection():
        del held
    gc.collect()
    assert was() is None
    assert gc.get_threshold() == before


def test_all_ranks_collect_if_one_has_garbage():
    class Two:
        """What this rank says, and one that has garbage and nothing else."""

        def gather_elementwise(self, values):
            return [[float(value), float(i == 7)] for i, value in enumerate(values)]

    own = StepStatus(9.0, 1.0, 2.0, 6.0, False, False, 3.0, False, (4.0, 5.0))
    status, beside = own.exchange(Two(), RankUsage(7.0, 8.0, 9.0, 0.5))
    assert beside == UsageByRank([7.0, 0.0], [8.0, 0.0], [9.0, 0.0], [0.5, 0.0])
    assert status == StepStatus(9.0, 1.0, 2.0, 6.0, 0.0, 0.0, 3.0, 1.0, (4.0, 5.0))


STEPS = """
import gc, sys
from hpc_tune.config.load import load_config
from hpc_tune.faults import Faults
from hpc_tune.train.run import run
from hpc_tune.memory import host

host._COLLECTION_THRESHOLD = 2000
within, found, due = [False], [], []
gc.callbacks.append(lambda phase, info: phase == "start" and found.append(within[0]))


def at(place, step):
    within[0] = place == "step"
    due.append(place == "boundary" and host.is_garbage_collection_due())


code = run(load_config(None, sys.argv[1:]), faults=Faults(at=at))
print(code, sum(due) > 0, any(found), len(found) >= sum(due))
"""


@pytest.mark.full
def test_a_run_collects_between_steps_alone(tmp_path):
    settings = ["data.seq_len=128", "data.eval_path=null", "batch.global_size=4"]
    settings += ["batch.micro_size=1", "train.max_steps=12", "run.report=false"]
    settings += ["parallel.recompute=selective", "run.tensorboard=false", f"run.dir={tmp_path}"]
    settings += [f"data.cache={PREPARED}"]
    done = subprocess.run(
        [sys.executable, "-c", STEPS, *settings, "run.threads=1"],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        timeout=280,
    )
    assert done.stdout.split()[-4:] == ["0", "True", "False", "True"], done.stderr
