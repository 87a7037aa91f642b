"""A step that runs out of a device's memory, on one rank: given up, answered, run again."""

import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from hpc_tune.batch import padding_batch
from hpc_tune.config.load import load_config
from hpc_tune.config.optim import OptimConfig
from hpc_tune.engine.adamw import learning_rate
from hpc_tune.errors import EXIT_DONE, EXIT_RESUMABLE
from hpc_tune.faults import Faults
from hpc_tune.train import trainer
from hpc_tune.train.run import run
from hpc_tune.world import liveness
from hpc_tune.world.liveness import Watcher
from tests.support.full_device import ERROR, Device, with_room_for
from tests.support.many_runs import StopAfter
from tests.support.training import SMALL, events, losses, outcome, worst_gap

FULL = torch.OutOfMemoryError(ERROR)


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Return a function that does a run on a device, and gives its exit code and directory."""

    def fail(who, code):
        pytest.fail(f"the run ended with {code}")  # and not this process

    monkeypatch.setattr(liveness, "die", fail)

    def start(name, faults, *overrides):
        run_dir = tmp_path / name
        settings = [*SMALL, "data.path=builtin:pydocs:heldout", "tune.method=lora"]
        settings += ["tune.dropout=0.1", "train.max_steps=4", "batch.micro_size=8", *overrides]
        settings += [f"run.dir={run_dir}"]
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
    _, calm = train("calm", Faults(device=Device(), offloads_without_gpu=True), *settings)
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
    assert "No further memory-saving action is available" in told["reason"]


def test_where_the_governor_only_observes_the_error_is_not_caught(train, monkeypatch):
    started, start = [], Watcher.start
    monkeypatch.setattr(Watcher, "start", lambda self: started.append(self) or start(self))
    with pytest.raises(pytest.fail.Exception, match="ended with 1"):
        train("full", with_room_for(2), "memory.governor=observe")
    for watcher in started:  # which end with their process
        watcher.close()


def test_what_the_step_had_allocated_is_free_before_the_cache_is_given_back(train, monkeypatch):
    held, alive = [], []

    class Activations:
        pass

    def compute(rows):
        if rows > 4:
            activations = Activations()
            held.append(weakref.ref(activations))
            raise torch.OutOfMemoryError(ERROR)

    monkeypatch.setattr(trainer, "empty_caches", lambda: alive.append(held[-1]() is not None))
    assert train("full", replace(with_room_for(0), compute=compute))[0] == EXIT_DONE
    assert alive == [False]


class Ranks:
    """Stands for the other ranks: how many of them have run out in each attempt."""

    def __init__(self, *others):
        self._others, self.votes = list(others), []

    def sum(self, values):
        self.votes.append(values[-1])
        return [*map(float, values[:-1]), float(values[-1]) + self._others.pop(0)]


class Engine:
    """An engine that fails in its passes, in accumulating, in updating, or not at all."""

    def __init__(self, fails=None, can_repeat_steps=True):
        self._fails, self.can_repeat_steps, self.num_updates = fails, can_repeat_steps, 0
        self.num_accumulated = 0

    def objective_sums(self, batches, objective, is_within_step):
        if self._fails == "comparing":
            raise torch.OutOfMemoryError(ERROR)
        yield from ()

    def accumulate(self, batches, global_terms, global_tokens):
        self.num_accumulated += 1
        if self._fails == "waited for":
            raise torch.OutOfMemoryError(ERROR)
        return torch.OutOfMemoryError(ERROR) if self._fails == "accumulating" else None

    def update(self, lr):
        if self._fails == "updating":
            raise torch.OutOfMemoryError(ERROR)
        self.num_updates += 1
        return "a result"


def first_rows(batches):
    return [batch.first_row for batch in batches]


class Loader:
    """The rows of steps, by their number."""

    def __init__(self):
        self.position = 0

    def state(self):
        return self.position

    def restore(self, state):
        self.position = state

    def next_step(self):
        self.position += 1
        return [padding_batch(self.position)]


def trainer_of(ranks, engine, answers=True):
    steps, rates = range(3, 9), OptimConfig(lr=0.1)
    return trainer.Trainer(ranks, engine, Loader(), rates, steps, answers)


@pytest.mark.parametrize(
    ("fails", "others", "has_gradients", "vote"),
    [
        (None, 0, True, False),
        (None, 2, False, False),
        ("accumulating", 0, False, True),
        ("accumulating", 1, False, True),
    ],
)
def test_all_ranks_give_a_step_up_or_none_does(fails, others, has_gradients, vote):
    ranks = Ranks(others)
    trained = trainer_of(ranks, Engine(fails))
    rows = trained.next_batches()
    assert trained.accumulate(rows, 1) is has_gradients
    assert ranks.votes == [vote], "each rank votes once"
    assert bool(trained.out_of_memory_reason) == (fails is not None)
    again = first_rows(trained.next_batches())
    assert (again == first_rows(rows)) is not has_gradients, "the same rows come again"
    assert trained.step == 3


@pytest.mark.parametrize(("fails", "others"), [(None, 1), ("comparing", 0), ("comparing", 1)])
def test_a_rank_without_room_for_mismatched_answers_gives_the_step_up_with_all(fails, others):
    """It tells the others with the sum that they wait for; no gradient is computed by any."""
    ranks, engine = Ranks(others), Engine(fails)
    trained = trainer_of(ranks, engine)
    rows = trained.next_batches()
    labeled = [padding_batch(row.first_row, "labels") for row in rows]
    assert trained.accumulate(labeled, 1) is False
    assert ranks.votes == [fails is not None]
    assert engine.num_accumulated == 0
    assert first_rows(trained.next_batches()) == first_rows(rows)


@pytest.mark.parametrize(
    ("engine", "answers", "form"),
    [
        (Engine("accumulating"), False, "answers"),
        (Engine("waited for"), True, "answers"),
        (Engine("comparing", can_repeat_steps=False), True, "labels"),
        (Engine("comparing"), False, "labels"),
    ],
)
def test_an_error_that_cannot_be_answered_goes_on(engine, answers, form):
    with pytest.raises(torch.OutOfMemoryError):
        trainer_of(Ranks(0), engine, answers).accumulate([padding_batch(0, form)], 1)


def test_an_error_of_an_update_goes_on():
    """Other ranks have begun theirs."""
    trained = trainer_of(Ranks(0), Engine("updating"))
    assert trained.accumulate(trained.next_batches(), 1)
    with pytest.raises(torch.OutOfMemoryError):
        trained.update()


def test_on_cpus_no_vote_is_added_to_a_step():
    ranks, engine = Ranks(), Engine()
    trained = trainer_of(ranks, engine, answers=False)
    assert trained.accumulate(trained.next_batches(), 1)
    assert trained.update() == "a result"
    assert (ranks.votes, engine.num_updates, trained.step, trained.position) == ([], 1, 4, 1)


def test_the_rate_of_a_step_is_that_of_the_schedule():
    rates = OptimConfig(lr=0.1, schedule="linear", warmup_steps=0)
    trained = trainer.Trainer(Ranks(), Engine(), Loader(), rates, range(0, 4), False)
    found = []
    for _ in range(4):
        trained.accumulate(trained.next_batches(), 1)
        trained.update()
        found.append(trained.lr)
    assert found == [learning_rate(rates, step, 4) for step in range(4)]
    assert len(set(found)) == 4
