"""Which messages of FSDP2 a GPU waits for: streams whose clocks go by what they do."""

from types import SimpleNamespace

import pytest
import torch

from hpc_tune import torch_versions
from hpc_tune.engine.counted_collectives import (
    CountedCollectives,
    FsdpAllGather,
    FsdpReduceScatter,
    ReduceScatterWaits,
    time_fsdp_waits,
    time_group_waits,
)


class Gpu:
    """Its streams, each with the second at which it has done what it was given."""

    def __init__(self):
        self.now_s = {"compute": 0.0, "gather": 0.0, "scatter": 0.0}
        self.current = "compute"

    def works(self, seconds):
        self.now_s[self.current] += seconds

    def waits(self, other):
        self.now_s[self.current] = max(self.now_s[self.current], self.now_s[other])


@pytest.fixture
def gpu(monkeypatch):
    made = Gpu()

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at_s = made.now_s[made.current]

        def elapsed_time(self, end):
            return 1e3 * (end.at_s - self.at_s)

    def sends(*_):
        made.works(2.0)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch_versions, "all_gather", sends)
    monkeypatch.setattr(torch_versions, "reduce_scatter", sends)
    return made


class Unit:
    """What FSDP2 does for a unit, as far as streams see it."""

    def __init__(self, gpu, collectives, context=None, sums=None):
        self._gpu, self._all_gather_result = gpu, None
        self._all_gather_comm = FsdpAllGather(collectives)
        self._reduce_scatter_comm = FsdpReduceScatter(collectives)
        self.comm_ctx = context or SimpleNamespace(reduce_scatter_states=[])
        time_group_waits(self, collectives, sums or ReduceScatterWaits(collectives))

    def gather(self):
        self._gpu.current = "gather"
        self._all_gather_comm(torch.zeros(8), torch.zeros(4), SimpleNamespace(size=lambda: 2))
        self._gpu.current, self._all_gather_result = "compute", "there"

    def wait_for_unshard(self):
        if self._all_gather_result:
            self._gpu.waits("gather")
            self._gpu.works(0.25)  # the copy out, which is no message
            self._all_gather_result = None

    def reshard(self):
        pass

    def post_backward(self):
        self._gpu.works(0.5)  # gradients of earlier micro-batches are added
        self.reshard()
        if (states := self.comm_ctx.reduce_scatter_states) is not None:
            waits = bool(states)
            states.clear()
        else:  # as of an older torch
            waits, self.comm_ctx.reduce_scatter_state = self.comm_ctx.reduce_scatter_state, None
        if waits:
            self._gpu.waits("scatter")
        self._gpu.works(0.25)  # the copy in
        self._gpu.current = "scatter"
        self._gpu.waits("compute")
        self._reduce_scatter_comm(
            torch.zeros(4), torch.zeros(8), SimpleNamespace(size=lambda: 2), None
        )
        self._gpu.current = "compute"
        state = SimpleNamespace(event=object())
        if states is not None:
            states.append(state)
        else:
            self.comm_ctx.reduce_scatter_state = state

    def finalize_backward(self):
        self._gpu.waits("scatter")


@pytest.mark.parametrize(
    ("compute_s", "waited_s"), [(5.0, 0.0), (2.0, 0.0), (1.5, 0.5), (0.0, 2.0)]
)
def test_a_gather_takes_the_time_that_compute_does_not_hide(gpu, compute_s, waited_s):
    collectives = CountedCollectives(torch.device("cuda"))
    unit = Unit(gpu, collectives)
    unit.gather()
    gpu.works(compute_s)
    unit.wait_for_unshard()
    unit.wait_for_unshard()  # it is there
    gpu.works(3.0)
    unit.post_backward()
    gpu.works(compute_s)
    unit.finalize_backward()
    sent, comm_s = collectives.pop_totals()
    assert comm_s == pytest.approx(2 * waited_s)
    assert sent == {"all_gather": 16, "reduce_scatter": 16}


@pytest.mark.parametrize("states", [[], None], ids=["several", "one"])
@pytest.mark.parametrize(
    ("compute_s", "waited_s"), [(5.0, 0.0), (1.5, 0.0), (1.0, 0.5), (0.0, 1.5)]
)
def test_a_sum_of_gradients_takes_the_time_that_the_next_units_backward_does_not_hide(
    gpu, compute_s, waited_s, states
):
    """Of 2 s each, 0.5 s of which the next unit's own additions hide, in both of two steps."""
    collectives = CountedCollectives(torch.device("cuda"))
    context = SimpleNamespace(reduce_scatter_states=states, reduce_scatter_state=None)
    sums = ReduceScatterWaits(collectives)
    units = [Unit(gpu, collectives, context, sums) for _ in range(4)]
    for _ in range(2):
        for unit in units:
            gpu.works(compute_s)
            unit.post_backward()
        gpu.works(10.0)
        for unit in units:
            unit.finalize_backward()
        context.reduce_scatter_state = None
        if states:
            states.clear()
        sent, comm_s = collectives.pop_totals()
        assert comm_s == pytest.approx(3 * waited_s)
        assert sent == {"reduce_scatter": 4 * 16}


def test_outside_of_a_step_nothing_is_timed(gpu):
    collectives = CountedCollectives(torch.device("cuda"))
    unit = Unit(gpu, collectives)
    with collectives.counting_paused():
        unit.gather()
        unit.wait_for_unshard()
        unit.post_backward()
        unit.post_backward()
        unit.finalize_backward()
    assert collectives._events == []
    unit.gather()
    with collectives.counting_paused():
        unit.wait_for_unshard()
    unit.wait_for_unshard()
    assert collectives.pop_totals()[1] == 0.0


def test_a_unit_without_weights_of_its_own_has_nothing_to_time():
    """As an older torch has it: one parameter group, or None."""
    module = torch.nn.Linear(1, 1)
    module._get_fsdp_state = lambda: SimpleNamespace(_fsdp_param_group=None)
    time_fsdp_waits(module, CountedCollectives(torch.device("cuda")))
