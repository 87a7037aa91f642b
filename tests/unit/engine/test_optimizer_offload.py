"""AdamW with its moments elsewhere, against torch's own."""

import pytest
import torch
from torch import nn

from hpc_tune.config.schema import OptimConfig
from hpc_tune.engine.adamw import OffloadedAdamW, make_adamw


def trained(seed):
    torch.manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((7, 5), (5,), (3, 2, 4))]
    named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    return parameters, make_adamw(named, OptimConfig(lr=0.01, weight_decay=0.1))


def give_gradients(parameters, step):
    torch.manual_seed(1000 + step)
    for number, parameter in enumerate(parameters):
        parameter.grad = None if (step, number) == (2, 1) else torch.randn_like(parameter)


@pytest.mark.parametrize("moved_at", [0, 3])
@pytest.mark.parametrize("back_at", [5, 99])
def test_the_same_bits_as_a_step_of_adamw(moved_at, back_at):
    (ours, adamw), (theirs, reference) = trained(0), trained(0)
    moved = None
    for step in range(8):
        if step == moved_at:
            moved = OffloadedAdamW(adamw)
        if step == back_at:
            moved.close()
            moved = None
        for parameters in (ours, theirs):
            give_gradients(parameters, step)
        for group in (*adamw.param_groups, *reference.param_groups):
            group["lr"] = 0.01 / (step + 1)
        (moved or adamw).step()
        reference.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
            for name in ("step", "exp_avg", "exp_avg_sq"):
                assert torch.equal(adamw.state[one][name], reference.state[other][name])


def test_values_read_while_they_are_away_are_the_ones_of_now():
    parameters, adamw = trained(1)
    moved = OffloadedAdamW(adamw)
    held = adamw.state[parameters[0]]["exp_avg"]
    give_gradients(parameters, 0)
    moved.step()
    assert torch.equal(held, 0.1 * parameters[0].grad)
