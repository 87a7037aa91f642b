"""When a pipeline's rank posts its receives, on a CPU and on a GPU."""

import pytest
import torch
import torch.distributed as dist

from hpc_tune.batch import costliest_batch
from hpc_tune.engine import pipeline_parallel
from hpc_tune.engine.counted_collectives import CountedCollectives
from hpc_tune.engine.pipeline_parallel import Pipeline, connect_stages
from hpc_tune.step.layout import Layout


class Done:
    def wait(self):
        pass

    def is_completed(self):
        return True


def events_of(device, monkeypatch, num_micro=4):
    """Return what the middle rank of three does in a step: receives by number, and passes."""
    events = []

    def irecv(buffer, source, group):
        events.append("receive")
        return Done()

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "irecv", irecv)
    monkeypatch.setattr(dist, "isend", lambda *_: Done())
    monkeypatch.setattr(CountedCollectives, "counted", lambda *_: pytest.MonkeyPatch.context())
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **_: empty(*shape))
    layout = Layout(1, 1, 1, 3, 1)
    edges = {(edge, kind): None for edge in (0, 1) for kind in ("forward", "backward")}
    collectives = CountedCollectives(torch.device("cpu"))
    pipeline = Pipeline([None], layout, edges, torch.device(device), 8, torch.float32, collectives)

    def forward(chunk, batch, hidden_BTD):
        events.append("forward")
        return hidden_BTD * 2

    def backward(chunk, is_last, out, grad_BTD):
        events.append("backward")
        out.backward(grad_BTD)

    pipeline.train([costliest_batch(1, 4)] * num_micro, forward, backward)
    return events


def test_on_a_gpu_no_receive_is_queued_before_a_pass_that_does_not_need_it(monkeypatch):
    """It would wait on several of the card's processors while that pass computes."""
    events = events_of("cuda", monkeypatch)
    assert events.count("receive") == 8
    assert events == [e for step in events[1::2] for e in ("receive", step)]


def test_on_a_cpu_receives_are_posted_ahead(monkeypatch):
    events = events_of("cpu", monkeypatch)
    assert events[:3] == ["receive"] * 3
    assert events.count("receive") == 8
    assert pipeline_parallel.LOOKAHEAD["cpu"] == 2


@pytest.mark.parametrize(
    ("rank", "is_ring", "num"), [(0, False, 2), (1, False, 4), (0, True, 4), (3, True, 4)]
)
def test_each_edges_group_is_connected_before_the_next_is_made(monkeypatch, rank, is_ring, num):
    """NCCL may hang where many connect at once."""
    events, zeros = [], torch.zeros
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: events.append("made"))
    for name in ("send", "recv"):
        monkeypatch.setattr(dist, name, lambda *_: events.append("message"))
    monkeypatch.setattr(torch, "zeros", lambda *shape, **_: zeros(*shape))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: events.append("sent"))
    monkeypatch.setattr(
        pipeline_parallel, "mirror_group_creation", lambda _: events.append("aside")
    )
    edges = connect_stages(Layout(1, 1, 1, 4), is_ring, torch.device("cuda"))
    assert len(edges) == num
    assert [e for e in events if e != "aside"] == ["made", "message", "sent"] * num
    assert len(events) - 3 * num == (6 if is_ring else 4) - num  # all ranks take part in each round
