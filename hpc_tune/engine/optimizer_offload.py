"""Optimizer state offloaded to the host; the update copies it to the device piece by piece.

AdamW updates one parameter after the other, so beside weights and gradients the device holds the
two moments of one parameter. The arithmetic is torch's own, bit for bit.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from hpc_tune.engine.adamw import MOMENTS


class OffloadedState:
    """Runs the steps of an AdamW whose moments are on the host; ``close`` moves them back."""

    def __init__(self, optimizer: torch.optim.AdamW) -> None:
        """Move the moments to the host."""
        self._optimizer = optimizer
        for _, parameter in self._parameters():
            state = optimizer.state[parameter]
            for name in MOMENTS:
                state[name] = _to(state[name], torch.device("cpu"))

    def step(self) -> None:
        """Update every parameter that has a gradient, as ``torch.optim.AdamW.step`` would."""
        for group, parameter in self._parameters():
            if parameter.grad is not None:
                self._update(group, parameter, parameter.grad)

    def close(self) -> None:
        """Move the moments back to their parameters' devices."""
        for _, parameter in self._parameters():
            state = self._optimizer.state[parameter]
            for name in MOMENTS:
                state[name] = _to(state[name], parameter.device)

    def _parameters(self) -> Iterator[tuple[dict[str, Any], torch.nn.Parameter]]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield group, parameter

    @torch.no_grad()
    def _update(
        self, group: dict[str, Any], parameter: torch.nn.Parameter, grad: torch.Tensor
    ) -> None:
        state = self._optimizer.state[parameter]
        on_host = [_local(state[name]) for name in MOMENTS]
        on_device = [moment.to(parameter.device) for moment in on_host]
        beta1, beta2 = group["betas"]
        adamw(
            [_local(parameter)],
            [_local(grad)],
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
        for moment, updated in zip(on_host, on_device, strict=True):
            moment.copy_(updated)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor, or a sharded one's own part, in the memory of ``device``."""
    if not isinstance(tensor, DTensor):
        return tensor.to(device)
    return DTensor.from_local(
        tensor.to_local().to(device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
