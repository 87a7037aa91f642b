import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_tune.engine.counted_collectives import CountedCollectives
from hpc_tune.engine.zero import state
from hpc_tune.engine.zero.engine import _set_up_deepspeed
from hpc_tune.engine.zero.state import FlatSpan, fill_span, span_regions, split_into_boxes
from hpc_tune.errors import ConfigError
from hpc_tune.model.regions import write_regions
from hpc_tune.model.weights import index_checkpoint


@pytest.mark.parametrize(
    ("start", "stop", "wanted"),
    [
        (0, 12, [((0, 0), (3, 4))]),
        (4, 8, [((1, 0), (1, 4))]),
        (1, 3, [((0, 1), (1, 2))]),
        (3, 9, [((0, 3), (1, 1)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]),
        (6, 12, [((1, 2), (1, 2)), ((2, 0), (1, 4))]),
        (2, 6, [((0, 2), (1, 2)), ((1, 0), (1, 2))]),
        (5, 5, []),
    ],
)
def test_a_run_of_values_of_a_3_by_4_matrix_as_boxes(start, stop, wanted):
    assert [(box.offset, box.shape) for box in split_into_boxes((3, 4), start, stop)] == wanted


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_the_boxes_hold_the_values_of_the_run_in_their_order(shape, data):
    values = torch.arange(int(torch.Size(shape).numel())).view(shape)
    start = data.draw(st.integers(0, values.numel()))
    stop = data.draw(st.integers(start, values.numel()))
    found = []
    for box in split_into_boxes(shape, start, stop):
        assert len(box.offset) == len(box.shape) == len(shape)
        cut = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
        found += values[cut].flatten().tolist()
    assert found == list(range(start, stop))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16])
@pytest.mark.parametrize("shape", [(5, 3), (7,), (2, 3, 4), ()])
def test_what_ranks_write_of_their_runs_any_other_number_of_ranks_reads(tmp_path, size, shape):
    whole = torch.randn(shape)
    for rank, flat in enumerate(whole.flatten().tensor_split(size)):
        start = sum(len(part) for part in whole.flatten().tensor_split(size)[:rank])
        # The run lies in the middle of a flat buffer.
        buffer = torch.cat([torch.full((2,), 7.0), flat, torch.full((1,), 7.0)])
        span = FlatSpan("w", shape, start, len(flat), 2)
        if found := list(span_regions("exp_avg.w", span, lambda buffer=buffer: buffer)):
            write_regions(tmp_path / f"rank-{rank:05d}.safetensors", found)
    index = index_checkpoint(tmp_path)
    assert index.shapes == {"exp_avg.w": shape}
    out = torch.empty(shape)
    index.fill(out, "exp_avg.w")
    assert torch.equal(out, whole)
    middle = FlatSpan("w", shape, whole.numel() // 3, whole.numel() // 2, 1)
    flat = torch.zeros(middle.length + 2)
    fill_span(index, "exp_avg.w", middle, flat)
    assert torch.equal(flat[1:-1], whole.flatten()[middle.start : middle.start + middle.length])
    assert flat[0] == flat[-1] == 0


def test_without_deepspeed_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(
        ConfigError, match="python -m pip install deepspeed or, in an environment on top"
    ):
        _set_up_deepspeed(
            torch.device("cpu"), CountedCollectives(torch.device("cpu")), needs_aio=False
        )


def test_deepspeed_has_the_private_methods_that_are_called():
    stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3").DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    text = Path(state.__file__).read_text()
    called = set(re.findall(r"zero_optimizer\.(_\w+)\(", text))
    assert len(called) == 7
    assert called <= {*dir(stage3), *dir(DeepSpeedZeroOptimizer)}
    [prefetch] = re.findall(r"coordinator\.(_\w+) =", text)
    assert prefetch in inspect.getsource(PartitionedParameterCoordinator).replace(
        "self.__", "self._PartitionedParameterCoordinator__"
    )
