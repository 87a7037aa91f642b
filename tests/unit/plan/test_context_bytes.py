"""What a device holds beside tensors, by the groups that send."""

from types import SimpleNamespace

import pytest

from hpc_tune.plan.hardware import Machine
from hpc_tune.plan.memory_model import (
    GPU_CONTEXT_BYTES,
    NCCL_GROUP_BYTES,
    NVLS_BYTES,
    fits_without_plan,
    gpu_overhead_bytes,
    max_step_bytes,
)
from hpc_tune.step.layout import Layout, num_process_groups
from hpc_tune.step.size import ModelSize

GIB = 1 << 30


@pytest.mark.parametrize(
    ("layout", "uses_fsdp", "num"),
    [
        (Layout(1, 1), False, 0),
        (Layout(8, 1), False, 1),  # the world's alone
        (Layout(1, 8), True, 1),
        (Layout(2, 4), True, 3),  # world, shard, replicate
        (Layout(2, 4), False, 1),  # DeepSpeed's ranks, say
        (Layout(1, 1, 8), False, 1),
        (Layout(4, 1, 2), False, 3),  # world, tensor, the copies of a slice
        (Layout(2, 1, 1, 4), False, 2),  # world, the copies of a stage
        (Layout(1, 8, expert=4), True, 3),  # world, experts spread, experts sharded
    ],
)
def test_groups_of_several_ranks_are_counted_once(layout, uses_fsdp, num):
    assert num_process_groups(layout, uses_fsdp) == num


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(8, 1), 0),
        (Layout(1, 1, 1, 2), 0),  # the ends are the world
        (Layout(1, 1, 1, 4), 1),
        (Layout(2, 1, 1, 2), 1),
    ],
)
def test_the_ends_of_a_pipeline_that_train_one_weight_have_a_group(layout, more):
    assert (
        num_process_groups(layout, False, trains_tied_embedding=True)
        == num_process_groups(layout, False) + more
    )


@pytest.mark.parametrize(
    ("ranks", "device", "groups", "wanted"),
    [
        (1, 80 * GIB, 0, GPU_CONTEXT_BYTES),
        (4, 80 * GIB, 1, GPU_CONTEXT_BYTES + NCCL_GROUP_BYTES),
        (8, 80 * GIB, 3, GPU_CONTEXT_BYTES + 3 * NCCL_GROUP_BYTES + NVLS_BYTES),
        (8, 40 * GIB, 3, GPU_CONTEXT_BYTES + 3 * NCCL_GROUP_BYTES),  # older than Hopper
    ],
)
def test_nccl_takes_memory_for_each_group_and_once_for_nvls(ranks, device, groups, wanted):
    assert gpu_overhead_bytes(Machine(1, ranks, device, 512 * GIB), groups) == wanted


def test_a_device_that_the_context_fills_is_never_said_to_have_room():
    layout, tiny = Layout(1, 8), Machine(1, 8, 3 * GIB, 64 * GIB)
    beside = gpu_overhead_bytes(tiny, num_process_groups(layout, uses_fsdp=True))
    assert beside > GPU_CONTEXT_BYTES
    model = SimpleNamespace(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
    most = max_step_bytes(ModelSize(0, 100, 0, 400), layout, model, 0, tiny)
    assert most >= beside
    assert not fits_without_plan(most, tiny)
