"""AdamW over the trained parameters, and the learning-rate schedule."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpc_tune.config.schema import OptimConfig
from hpc_tune.model.weights import Reserve, reserve_nothing

MOMENTS = ("exp_avg", "exp_avg_sq")  # of a parameter, by torch's names


def for_batch(optim: OptimConfig, global_size: int) -> OptimConfig:
    """Return the settings with ``lr`` scaled from optim.reference_batch to ``global_size`` rows."""
    if optim.reference_batch is None:
        return optim
    ratio = global_size / optim.reference_batch
    scale = math.sqrt(ratio) if optim.batch_scaling == "sqrt" else ratio
    return optim.model_copy(update={"lr": optim.peak_lr * scale})


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step ``step`` (the first is 0) of ``total_steps``.

    Linear warm-up from lr/steps of warm-up, then constant, linear or half a cosine
    (arXiv:1608.03983) down to min_lr_ratio x lr at the last step.
    """
    lr, warmup = optim.peak_lr, optim.num_warmup_steps(total_steps)
    if step < warmup:
        return lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    match optim.schedule:
        case "constant":
            return lr
        case "linear":
            share = 1.0 - progress
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * share)


def make_adamw(
    parameters: Sequence[nn.Parameter],
    optim: OptimConfig,
    reserve: Reserve = reserve_nothing,
) -> torch.optim.AdamW:
    """Return a fused AdamW whose state is allocated now: two moments of each value's dtype."""
    adamw = adamw_of(weight_decay_groups(parameters, optim), optim)
    for parameter in parameters:
        adamw.state[parameter] = first_state(parameter, reserve)
    return adamw


def weight_decay_groups(
    parameters: Sequence[nn.Parameter], optim: OptimConfig
) -> list[dict[str, Any]]:
    """Return AdamW's groups: matrices get weight decay, vectors (norms, biases) do not."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def adamw_of(groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.AdamW:
    """Return a fused AdamW over ``groups``, without state until its first step."""
    return torch.optim.AdamW(
        groups, lr=optim.peak_lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True
    )


def first_state(
    parameter: torch.Tensor, reserve: Reserve = reserve_nothing
) -> dict[str, torch.Tensor]:
    """Return AdamW's state of one parameter before its first step."""
    if parameter.device.type == "cpu":
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        reserve(len(MOMENTS) * local.nbytes)
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, **{name: torch.zeros_like(parameter) for name in MOMENTS}}
