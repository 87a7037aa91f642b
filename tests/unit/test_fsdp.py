"""Sharded weights in a world of one rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hpc_tune.engine.fsdp import release_gathered


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_after_a_pass_without_gradients_nothing_stays_gathered(alone):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(module[0], reshard_after_forward=False)
    fully_shard(module, reshard_after_forward=False)

    def gathered():
        return [not isinstance(weight, DTensor) for weight in module.parameters()]

    with torch.no_grad():
        before = module(torch.ones(2, 4))
        assert all(gathered())
        release_gathered(module)
        assert not any(gathered())
        assert torch.equal(module(torch.ones(2, 4)), before)
