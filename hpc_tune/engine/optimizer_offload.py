"""Optimizer state offloaded to the host; the update copies it to the device piece by piece.

AdamW updates one parameter after the other, so beside weights and gradients the device holds the
two moments of one parameter. The arithmetic is torch's own, bit for bit.

On the host the moments of a sharded parameter are plain tensors, this rank's part: a ``DTensor``
would move them back to the device of its mesh. They are pinned, since a GPU copies pageable memory
at half the rate and keeps the host waiting; in blocks that they share, see ``world/pinned.py``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from hpc_tune.engine.adamw import MOMENT_NAMES
from hpc_tune.world.pinned import empty_pinned_cache, empty_pinned_like


class OffloadedState:
    """Runs the steps of an AdamW whose moments are on the host; ``close`` moves them back."""

    def __init__(self, optimizer: torch.optim.AdamW) -> None:
        """Move the moments to the host."""
        self._optimizer = optimizer
        states = [optimizer.state[parameter] for _, parameter in self._parameters()]
        for state in states:
            state |= {name: _local(state[name]) for name in MOMENT_NAMES}
        away = [
            (state, name)
            for state in states
            for name in MOMENT_NAMES
            if state[name].device.type != "cpu"
        ]
        for (state, name), on_host in zip(
            away, empty_pinned_like([state[name] for state, name in away]), strict=True
        ):
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
        empty_pinned_cache()

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
            moment.copy_(updated, non_blocking=True)  # the step waits for the device at its end


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _distribute_like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return this rank's part as a tensor that is laid out as ``parameter`` is."""
    if not isinstance(parameter, DTensor):
        return local
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        local,
        mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
