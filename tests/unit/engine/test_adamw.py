import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from hpc_tune.config.schema import OptimConfig
from hpc_tune.engine.adamw import for_batch, learning_rate, make_adamw


def rates(total_steps, **values):
    optim = OptimConfig(lr=8.0, **values)
    return [learning_rate(optim, step, total_steps) for step in range(total_steps)]


@pytest.mark.parametrize(
    ("values", "total_steps", "wanted"),
    [
        ({"schedule": "constant"}, 3, [8, 8, 8]),
        ({"schedule": "constant", "warmup_steps": 4}, 6, [2, 4, 6, 8, 8, 8]),
        ({"schedule": "linear", "min_lr_ratio": 0.0}, 5, [8, 6, 4, 2, 0]),
        ({"schedule": "linear", "min_lr_ratio": 0.5}, 5, [8, 7, 6, 5, 4]),
        (
            {"schedule": "linear", "warmup_steps": 2, "min_lr_ratio": 0.0},
            7,
            [4, 8, 8, 6, 4, 2, 0],
        ),
        # 4 (1 + cos(pi t)) at t = 0, 1/3, 2/3, 1
        ({"schedule": "cosine", "min_lr_ratio": 0.0}, 4, [8, 6, 2, 0]),
        ({"schedule": "cosine", "min_lr_ratio": 0.5}, 4, [8, 7, 5, 4]),
        (
            {"schedule": "cosine", "warmup_steps": 1, "min_lr_ratio": 0.0},
            5,
            [8, 8, 6, 2, 0],
        ),
        ({"schedule": "cosine"}, 1, [8]),
        ({"schedule": "cosine", "warmup_steps": 2}, 3, [4, 8, 8]),
        ({"schedule": "linear", "warmup_steps": 4}, 2, [2, 4]),
        ({"schedule": "constant", "warmup_ratio": 0.5}, 6, [8 / 3, 16 / 3, 8, 8, 8, 8]),
        ({"schedule": "constant", "warmup_ratio": 0.5}, 3, [4, 8, 8]),
        ({"schedule": "constant", "warmup_ratio": 0.0}, 100, [8] * 100),
        ({"schedule": "constant"}, 33, [8] * 33),
        ({"schedule": "constant"}, 100, [8 / 3, 16 / 3, *[8] * 98]),
    ],
)
def test_the_learning_rate_follows_the_table(values, total_steps, wanted):
    assert rates(total_steps, **values) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("values", "global_size", "wanted"),
    [
        ({}, 256, 8.0),
        ({"reference_batch": 64}, 64, 8.0),
        ({"reference_batch": 64}, 256, 16.0),
        ({"reference_batch": 64}, 16, 4.0),
        ({"reference_batch": 64, "batch_scaling": "linear"}, 256, 32.0),
    ],
)
def test_the_rate_follows_the_batch_where_a_reference_is_given(values, global_size, wanted):
    assert for_batch(OptimConfig(lr=8.0, **values), global_size).lr == pytest.approx(wanted)


@pytest.mark.parametrize("ratio", [0.0, 0.03, 0.1, 0.25, 0.333, 0.9])
def test_a_share_is_as_many_steps_as_for_transformers(ratio, tmp_path):
    arguments = TrainingArguments(str(tmp_path), warmup_steps=ratio, use_cpu=True)
    for steps in (1, 7, 10, 30, 33, 70, 1000):
        ours = OptimConfig(warmup_ratio=ratio).num_warmup_steps(steps)
        assert ours == arguments.get_warmup_steps(steps)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_last_step_has_the_lowest_rate_and_nothing_goes_below_it(schedule):
    optim = OptimConfig(lr=1.0, schedule=schedule, warmup_steps=10, min_lr_ratio=0.1)
    falling = [learning_rate(optim, step, 100) for step in range(9, 151)]
    assert falling[0] == 1.0
    assert falling[99 - 9] == pytest.approx(0.1)
    assert min(falling) == pytest.approx(0.1)
    assert falling[: 99 - 9] == sorted(falling[: 99 - 9], reverse=True)
    assert falling[150 - 9] == pytest.approx(0.1)


def test_matrices_decay_and_vectors_do_not():
    matrix, vector = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(4))
    adamw = make_adamw([vector, matrix], OptimConfig(lr=0.1, weight_decay=0.5))
    for parameter in (matrix, vector):
        parameter.grad = torch.zeros_like(parameter)
    adamw.step()
    assert torch.allclose(matrix, torch.full((2, 3), 1 - 0.1 * 0.5))
    assert torch.equal(vector, torch.ones(4))


def test_the_state_is_there_before_the_first_step_and_a_step_is_plain_adamw():
    torch.manual_seed(0)
    mine, plain = (nn.Parameter(torch.full((3, 2), 0.5)) for _ in range(2))
    optim = OptimConfig(lr=0.01, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.1)
    adamw = make_adamw([mine], optim)
    assert {k: v.numel() for k, v in adamw.state[mine].items()} == {
        "step": 1,
        "exp_avg": 6,
        "exp_avg_sq": 6,
    }
    reference = torch.optim.AdamW([plain], lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for _ in range(5):
        mine.grad = torch.randn(3, 2)
        plain.grad = mine.grad.clone()
        adamw.step()
        reference.step()
    assert torch.allclose(mine, plain, rtol=1e-6)


def test_the_moments_of_each_parameter_are_announced():
    parameters, announced = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(5))], []
    make_adamw(parameters, OptimConfig(lr=1.0), announced.append)
    assert announced == [2 * 6 * 4, 2 * 5 * 4]


def test_only_vectors_make_one_group():
    adamw = make_adamw([nn.Parameter(torch.ones(3))], OptimConfig(lr=1.0, weight_decay=0.5))
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.0]
