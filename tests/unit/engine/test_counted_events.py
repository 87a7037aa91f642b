"""A step never reads CUDA events of work that may still be under way."""

import pytest
import torch

from hpc_tune.config.load import load_config
from hpc_tune.engine.counted_collectives import CountedCollectives
from hpc_tune.engine.native import NativeEngine
from hpc_tune.train.run import run
from hpc_tune.world import liveness
from tests.support.many_runs import StopAfter
from tests.support.training import SMALL, losses, rows


class Event:
    """As CUDA's: its time can be read once its work is done, which only a sync makes sure of."""

    under_way: list["Event"] = []

    def __init__(self, enable_timing=False):
        assert enable_timing
        self.is_done = False

    def record(self):
        self.is_done = False
        Event.under_way.append(self)

    def elapsed_time(self, end):
        if not (self.is_done and end.is_done):
            raise RuntimeError("CUDA error: device not ready")
        return 1.0


@pytest.fixture
def events(monkeypatch):
    """Make collectives count as on a GPU, whose work is done where a value comes to the host."""
    made, item, tolist = CountedCollectives.__init__, torch.Tensor.item, torch.Tensor.tolist

    def init(self, device):
        made(self, device)
        self._cuda = True

    def syncing(read):
        def sync(tensor):
            for event in Event.under_way:
                event.is_done = True
            Event.under_way.clear()
            return read(tensor)

        return sync

    monkeypatch.setattr(CountedCollectives, "__init__", init)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "item", syncing(item))
    monkeypatch.setattr(torch.Tensor, "tolist", syncing(tolist))
    Event.under_way.clear()

    def fail(who, code):
        pytest.fail(f"the run ended with {code}")  # and not this process

    monkeypatch.setattr(liveness, "die", fail)


def test_the_first_step_after_a_row_was_tried_reads_nothing_of_it(events, tmp_path, monkeypatch):
    """A forward pass of a sharded model gathers; in a world of one FSDP2 does without."""
    forward = NativeEngine._forward

    def gathering(engine, *what):
        with engine._collectives.counted("all_gather", 1):
            return forward(engine, *what)

    monkeypatch.setattr(NativeEngine, "_forward", gathering)
    settings = [*SMALL, "data.path=builtin:pydocs:heldout", "train.max_steps=2"]
    settings += ["batch.micro_size=auto"]
    settings.append(f"run.dir={tmp_path / 'run'}")
    assert run(load_config(None, settings), StopAfter(None)) == 0
    assert len(losses(tmp_path / "run")) == 2
    assert min(rows(tmp_path / "run", "comm_s").values()) > 0, "or no event was recorded"


def test_what_is_no_step_records_nothing(events):
    """A pass over all rows would keep two events for each message, which nobody reads."""
    collectives = CountedCollectives(torch.device("cpu"))
    with collectives.counted("all_gather", 3):
        pass
    with pytest.raises(RuntimeError, match="not ready"):
        collectives.pop_totals()
    torch.zeros(()).item()
    collectives.pop_totals()
    with collectives.counting_paused():
        for _ in range(3):
            with collectives.counted("all_gather", 3):
                pass
        collectives.count("all_reduce", 7)
        assert collectives._events == []
    with collectives.counted("all_gather", 5):
        pass
    torch.zeros(()).item()
    assert collectives.pop_totals() == ({"all_gather": 5}, 1e-3)
