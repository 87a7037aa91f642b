"""AdamW over the trained parameters, and the learning-rate schedule."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from hpc_tune.config.schema import OptimConfig


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step ``step`` (the first is 0) of ``total_steps``.

    Linear warm-up from lr/warmup_steps, then constant, linear or half a cosine (arXiv:1608.03983)
    down to min_lr_ratio x lr at the last step.
    """
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    after = (step - optim.warmup_steps) / max(1, total_steps - 1 - optim.warmup_steps)
    progress = min(1.0, after)
    match optim.schedule:
        case "constant":
            return optim.lr
        case "linear":
            share = 1.0 - progress
        case "cosine":
            share = 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim.lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * share)


def make_adamw(parameters: Sequence[nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    """Return a fused AdamW whose state is allocated now: 8 bytes per trained value.

    Matrices get weight decay, vectors (norms, biases, magnitudes) do not.
    """
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        [g for g in groups if g["params"]],
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        fused=True,
    )
    for parameter in parameters:
        adamw.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return adamw
