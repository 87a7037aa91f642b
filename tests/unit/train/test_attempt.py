"""A step that runs out of a device's memory, on one rank: given up, answered, run again."""

import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from hpc_tune.config.load import load_config
from hpc_tune.errors import EXIT_DONE, EXIT_RESUMABLE
from hpc_tune.faults import Faults
from hpc_tune.train import attempt, exit
from hpc_tune.train.attempt import Attempts
from hpc_tune.train.run import run
from tests.support.full_device import ERROR, Device, with_room_for
from tests.support.many_runs import StopAfter
from tests.support.training import SMALL, events, losses, outcome, worst_gap

FULL = torch.OutOfMemoryError(ERROR)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Return a function that does a run on a device, and gives its exit code and directory."""

    def fail(comm, code):
        pytest.fail(f"the run ended with {code}")  # and not this process

    monkeypatch.setattr(exit, "die", fail)

    def start(name, faults, *overrides):
        run_dir = tmp_path / name
        settings = [*SMALL, "data.path=builtin:pydocs:heldout", "tune.method=lora"]
        settings += ["tune.dropout=0.1", "train.max_steps=4", "batch.micro_size=8", *overrides]
        settings += [f"run.dir={run_dir}", f"data.cache={tmp_path / 'data'}"]
        return run(load_config(None, settings), StopAfter(None), faults=faults), run_dir

    yield start
    if dist.is_initialized():  # one that has failed leaves it
        dist.destroy_process_group()


def done_in(run_dir):
    return [event["action"] for event in events(run_dir, "governor") if "action" in event]


def test_a_step_is_run_again_one_rung_lower_and_the_losses_are_the_same(train):
    code, calm = train("calm", Faults(device=Device()))
    assert code == EXIT_DONE
    code, full = train("full", with_room_for(2))
    assert code == EXIT_DONE
    assert done_in(full) == ["split_micro_batches"] * 2
    assert worst_gap(losses(full), losses(calm)) < 1e-5


def test_a_step_that_is_repeated_with_nothing_changed_is_the_same_to_the_bit(train):
    """The one lever that is left changes only where the optimizer's state is."""
    once = [True]

    def compute(rows):
        if once:
            once.clear()
            raise FULL

    settings = ("batch.micro_size=1", "parallel.recompute=full")
    _, calm = train("calm", Faults(device=Device(), moves_on_host=True), *settings)
    faults = replace(with_room_for(0), compute=compute)
    code, again = train("again", faults, *settings)
    assert code == EXIT_DONE
    assert done_in(again) == ["move_optimizer"]
    assert losses(again) == losses(calm)


def test_with_nothing_left_it_saves_and_stops_and_says_what_it_needs(train):
    steps = []

    def at(place, step):
        steps.append(step)

    def compute(rows):
        if steps[-1] == 3:
            raise FULL

    code, run_dir = train("full", replace(with_room_for(0), compute=compute, at=at))
    assert code == EXIT_RESUMABLE
    told = outcome(run_dir)
    assert (told["step"], told["memory"], told["status"]) == (2, "device", "stopped")
    assert told["governor"] == [*["split_micro_batches"] * 3, "recompute", "move_optimizer"]
    assert told["reason"].startswith("device memory of rank 0 on ")
    assert "Nothing is left to be given up" in told["reason"]


def test_where_the_governor_only_observes_the_error_is_not_caught(train):
    with pytest.raises(pytest.fail.Exception, match="ended with 1"):
        train("full", with_room_for(2), "memory.governor=observe")


def test_what_the_step_had_allocated_is_free_before_the_cache_is_given_back(train, monkeypatch):
    held, alive = [], []

    class Activations:
        pass

    def compute(rows):
        if rows > 4:
            activations = Activations()
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError(ERROR)

    monkeypatch.setattr(attempt, "give_back_cache", lambda: alive.append(held[-1]() is not None))
    assert train("full", replace(with_room_for(0), compute=compute))[0] == EXIT_DONE
    assert alive == [False]


class Ranks:
    """Stands for the other ranks: how many of them have run out in each attempt."""

    def __init__(self, *others):
        self._others, self.votes = list(others), []

    def sum(self, values):
        self.votes += values
        return [float(values[0]) + self._others.pop(0)]


class Engine:
    """An engine whose step fails before the update, in it, or not at all."""

    def __init__(self, fails=None, repeats_steps=True):
        self._fails, self.repeats_steps, self.has_updated = fails, repeats_steps, False

    def train_step(self, batches, global_tokens, lr, before_update):
        if self._fails == "before":
            raise torch.OutOfMemoryError(ERROR)
        before_update()
        if self._fails == "in the update":
            raise torch.OutOfMemoryError(ERROR)
        self.has_updated = True
        return "a result"


class Governor:
    answers_device = True

    def __init__(self):
        self.seen = []

    def observe_out_of_memory(self, error):
        self.seen.append(error)


@pytest.mark.parametrize(
    ("fails", "others", "result", "vote", "has_updated"),
    [
        (None, 0, "a result", False, True),
        (None, 2, None, False, False),
        ("before", 0, None, True, False),
        ("before", 1, None, True, False),
    ],
)
def test_all_ranks_give_a_step_up_or_none_does(fails, others, result, vote, has_updated):
    ranks, engine, governor = Ranks(others), Engine(fails), Governor()
    attempts = Attempts(ranks, engine, governor, lambda: None)
    assert attempts.step([], 1, 0.1) == result
    assert ranks.votes == [vote], "each rank votes once"
    assert engine.has_updated is has_updated
    assert len(governor.seen) == (fails == "before")


@pytest.mark.parametrize(
    ("engine", "answers"),
    [
        (Engine("in the update"), True),
        (Engine("before", repeats_steps=False), True),
        (Engine("before"), False),
    ],
)
def test_an_error_that_cannot_be_answered_goes_on(engine, answers):
    governor = Governor()
    governor.answers_device = answers
    ranks = Ranks(0)
    with pytest.raises(torch.OutOfMemoryError):
        Attempts(ranks, engine, governor, lambda: None).step([], 1, 0.1)
    assert governor.seen == []


def test_on_cpus_no_vote_is_added_to_a_step():
    governor, ranks, updates = Governor(), Ranks(), []
    governor.answers_device = False
    attempts = Attempts(ranks, Engine(), governor, lambda: updates.append(True))
    assert attempts.step([], 1, 0.1) == "a result"
    assert (ranks.votes, updates) == ([], [True])
