"""Sharded weights in a world of one rank."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hpc_tune.config.schema import OptimConfig
from hpc_tune.engine.adamw import OffloadedAdamW, make_adamw
from hpc_tune.engine.counted_collectives import CountedCollectives, FsdpReduceScatter
from hpc_tune.engine.fsdp import _placement, release_gathered_weights
from hpc_tune.engine.mesh import _SingletonMesh
from hpc_tune.model.load import _gather_weight
from hpc_tune.step.size import MOMENT_NAMES


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
        release_gathered_weights(module)
        assert not any(gathered())
        assert torch.equal(module(torch.ones(2, 4)), before)


def test_moments_that_are_moved_are_plain_tensors_and_shards_again_later(alone):
    """The device that they lie on: test_fake_cuda.py."""
    ended = []
    for moves in (True, False):
        torch.manual_seed(0)
        module = fully_shard(nn.Linear(4, 4))
        weights = list(module.parameters())
        adamw = make_adamw(list(module.named_parameters()), OptimConfig(lr=0.01, weight_decay=0.1))
        moved = OffloadedAdamW(adamw) if moves else None
        for _ in range(2):
            module(torch.ones(2, 4)).square().sum().backward()
            (moved or adamw).step()
        kinds = {type(moment) for moment in _moments(adamw, weights)}
        assert kinds == {torch.Tensor if moves else DTensor}
        if moved is not None:
            moved.close()
        ended.append([t.full_tensor() for t in (*weights, *_moments(adamw, weights))])
    for one, other in zip(*ended, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("replicas", [False, True])
def test_weights_of_one_rank_need_no_group(alone, replicas):
    """Of their own axis: that of their copies has one."""
    torch.manual_seed(0)
    plain = nn.Linear(4, 4)
    sharded = nn.Linear(4, 4)
    sharded.load_state_dict(plain.state_dict())
    if replicas:
        groups = [dist.group.WORLD, None]
        mesh = _SingletonMesh("cpu", torch.tensor([[0]]), groups, ("replicate", "shard"))
    else:
        mesh = _SingletonMesh("cpu", torch.tensor([0]), [None])
    fully_shard(sharded, mesh=mesh)
    collectives = CountedCollectives(torch.device("cpu"))
    sharded.set_custom_reduce_scatter(FsdpReduceScatter(collectives))
    for module in (plain, sharded):
        module(torch.ones(2, 4)).square().sum().backward()
    for one, other in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert isinstance(other, DTensor)
        assert torch.equal(_gather_weight(other.detach()), one)
        assert torch.equal(other.grad.to_local(), one.grad)


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [((4, 6, 8), 2, 0), ((3, 6, 8), 2, 1), ((3, 5, 8), 2, 2), ((3, 5, 7), 2, 0), ((1, 6), 3, 1)],
)
def test_experts_of_a_rank_are_sharded_whole_where_their_number_allows_it(shape, ranks, dim):
    assert _placement(ranks, nn.Parameter(torch.empty(shape))).dim == dim


def _moments(adamw, weights):
    return [adamw.state[weight][name] for weight in weights for name in MOMENT_NAMES]
