"""Optimizer state that waits on the host and visits the device a piece at a time.

AdamW's update takes one parameter after the other, so beside the weights and gradients the device
holds the two moments of one of them. The arithmetic is torch's own, value for value.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from hpc_tune.engine.adamw import MOMENTS


class OffloadedState:
    """Does the steps of an AdamW whose moments are on the host; ``close`` brings them back."""

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
                self._update(group, parameter)

    def close(self) -> None:
        """Bring the moments back to their parameters' devices."""
        for _, parameter in self._parameters():
            state = self._optimizer.state[parameter]
            for name in MOMENTS:
                state[name] = _to(state[name], parameter.device)

    def _parameters(self) -> Iterator[tuple[dict[str, Any], torch.nn.Parameter]]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                yield group, parameter

    @torch.no_grad()
    def _update(self, group: dict[str, Any], parameter: torch.nn.Parameter) -> None:
        state = self._optimizer.state[parameter]
        waiting = [_local(state[name]) for name in MOMENTS]
        visiting = [moment.to(parameter.device) for moment in waiting]
        assert parameter.grad is not None
        beta1, beta2 = group["betas"]
        adamw(
            [_local(parameter)],
            [_local(parameter.grad)],
            [visiting[0]],
            [visiting[1]],
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
        for moment, new in zip(waiting, visiting, strict=True):
            moment.copy_(new)


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
