"""AdamW over the trained parameters, and the learning-rate schedule."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from hpc_tune.config.schema import OptimConfig
from hpc_tune.model.layers import has_weight_decay
from hpc_tune.model.tensor_sources import ReserveFunction, reserve_nothing
from hpc_tune.model.weights import is_lora_b
from hpc_tune.step.size import MOMENT_NAMES, NUM_MOMENTS
from hpc_tune.world.pinned import empty_pinned_like, release_pinned_cache


def with_scaled_lr(optim: OptimConfig, global_size: int) -> OptimConfig:
    """Return the settings with ``lr`` scaled from optim.reference_batch to ``global_size`` rows."""
    if optim.reference_batch is None:
        return optim
    ratio = global_size / optim.reference_batch
    scale = math.sqrt(ratio) if optim.batch_scaling == "sqrt" else ratio
    return optim.model_copy(update={"lr": optim.peak_lr * scale})


def learning_rate(optim: OptimConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step ``step`` (the first is 0) of ``total_steps``.

    Linear warmup from lr / warmup steps, then constant, or down to min_lr_ratio x lr at the last
    step: linear, one half cosine or several (arXiv:1608.03983), or stable then linear
    (arXiv:2404.06395).
    """
    lr, warmup = optim.peak_lr, optim.num_warmup_steps(total_steps)
    if step < warmup:
        return lr * (step + 1) / warmup
    num_steps = max(1, total_steps - 1 - warmup)
    num_done = min(num_steps, step - warmup)
    match optim.schedule:
        case "constant":
            return lr
        case "linear":
            share = 1.0 - num_done / num_steps
        case "cosine":
            share = _half_cosine(num_done / num_steps)
        case "cosine_with_restarts":
            cycles = 1 + (optim.restarts or 1)
            progress = num_done * cycles % num_steps / num_steps if num_done < num_steps else 1.0
            share = _half_cosine(progress)
        case "wsd":
            share = min(1.0, (num_steps - num_done) / max(1, optim.num_decay_steps(total_steps)))
    return lr * (optim.min_lr_ratio + (1.0 - optim.min_lr_ratio) * share)


def _half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def make_adamw(
    named_params: Sequence[tuple[str, nn.Parameter]],
    optim: OptimConfig,
    reserve: ReserveFunction = reserve_nothing,
) -> torch.optim.AdamW:
    """Return a fused AdamW with its state allocated: two moments in each parameter's dtype."""
    adamw = make_stateless_adamw(parameter_groups(named_params, optim), optim)
    for _, parameter in named_params:
        adamw.state[parameter] = initial_state(parameter, reserve)
    return adamw


def parameter_groups(
    named_params: Iterable[tuple[str, nn.Parameter]], optim: OptimConfig
) -> list[dict[str, Any]]:
    """Return AdamW's groups, each with the ``lr_ratio`` that multiplies its learning rate.

    Matrices get weight decay; norms, biases and vectors (magnitudes) do not. LoRA's B and vectors
    get optim.lora_b_ratio, as in peft's ``create_loraplus_optimizer``. Parameters that FSDP2 shards
    are in groups of their own: the fused update does not accept a mixture.
    """
    groups: dict[tuple[bool, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in named_params:
        is_faster = optim.lora_b_ratio != 1 and (parameter.dim() < 2 or is_lora_b(name))
        key = (not has_weight_decay(name, parameter), is_faster, isinstance(parameter, DTensor))
        groups.setdefault(key, []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": 0.0 if is_spared else optim.weight_decay,
            "lr_ratio": optim.lora_b_ratio if is_faster else 1.0,
        }
        for (is_spared, is_faster, _), parameters in sorted(
            groups.items(), key=lambda item: item[0]
        )
    ]


def set_lr(adamw: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of each group for the coming update."""
    for group in adamw.param_groups:
        group["lr"] = lr * group["lr_ratio"]


def make_stateless_adamw(groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.AdamW:
    """Return a fused AdamW over ``groups``, without state until its first step."""
    return torch.optim.AdamW(
        groups, lr=optim.peak_lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, fused=True
    )


def initial_state(
    parameter: torch.Tensor, reserve: ReserveFunction = reserve_nothing
) -> dict[str, torch.Tensor]:
    """Return AdamW's state of one parameter before its first step."""
    if parameter.device.type == "cpu":
        reserve(NUM_MOMENTS * local_tensor(parameter).nbytes)
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, **{name: torch.zeros_like(parameter) for name in MOMENT_NAMES}}


# -- Optimizer state offloaded to the host; the update copies it to the device piece by piece.
#
# AdamW updates one parameter after the other, so besides weights and gradients the device holds the
# moments of only one parameter. The arithmetic is torch's own, bit for bit.
#
# On the host the moments of a sharded parameter are plain tensors with this rank's part: a
# ``DTensor`` would move them back to the device of its mesh. They are pinned, since a GPU copies
# pageable memory at half the rate and makes the host wait; they share blocks of pinned memory, see
# ``world/pinned.py``.


class OffloadedAdamW:
    """Runs an AdamW whose moments are on the host; ``close`` moves them back."""

    def __init__(self, optimizer: torch.optim.AdamW) -> None:
        """Move the moments to the host."""
        self._optimizer = optimizer
        states = [optimizer.state[parameter] for _, parameter in self._parameters()]
        for state in states:
            state |= {name: local_tensor(state[name]) for name in MOMENT_NAMES}
        pairs = [(state, name) for state in states for name in MOMENT_NAMES]
        on_device = [(state, name) for state, name in pairs if state[name].device.type != "cpu"]
        pinned_moments = empty_pinned_like([state[name] for state, name in on_device])
        for (state, name), on_host in zip(on_device, pinned_moments, strict=True):
            state[name] = on_host.copy_(state[name])

    def step(self) -> None:
        """Update every parameter that has a gradient, as ``torch.optim.AdamW.step`` would."""
        for group, parameter in self._parameters():
            if parameter.grad is not None:
                self._update(group, parameter, parameter.grad)

    def close(self) -> None:
        """Move the moments back to their parameters' devices."""
        for _, parameter in self._parameters():
            state = self._optimizer.state[parameter]
            for name in MOMENT_NAMES:
                state[name] = _distribute_like(parameter, state[name].to(parameter.device))
        release_pinned_cache()

    def _parameters(self) -> Iterator[tuple[dict[str, Any], torch.nn.Parameter]]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield group, parameter

    @torch.no_grad()
    def _update(
        self, group: dict[str, Any], parameter: torch.nn.Parameter, grad: torch.Tensor
    ) -> None:
        state = self._optimizer.state[parameter]
        on_host = [state[name] for name in MOMENT_NAMES]
        on_device = [moment.to(parameter.device, non_blocking=True) for moment in on_host]
        beta1, beta2 = group["betas"]
        adamw(
            [local_tensor(parameter)],
            [local_tensor(grad)],
            [on_device[0]],
            [on_device[1]],
            [],
            [state["step"]],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for moment, new_moment in zip(on_host, on_device, strict=True):
            moment.copy_(new_moment, non_blocking=True)  # the end of the step waits for the device


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor as a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _distribute_like(parameter: torch.Tensor, local_values: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a tensor that is distributed like ``parameter``."""
    if not isinstance(parameter, DTensor):
        return local_values
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local_values,
        mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
