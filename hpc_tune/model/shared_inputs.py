"""One cast of the input that several linear layers of a module share, under autocast.

    norm, in fp32 -> cast once -> queries, keys and values; or gate and up
    their gradients, in the dtype of products -> added up in fp32

With master weights in fp32 a norm's result is fp32 too. torch's autocast remembers casts of weights
alone: each layer would cast its input anew, keep a copy of its own for the backward pass, and cast
its gradient to fp32 before these are added up. The values are the same. A compiler finds equal
casts by itself.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def share_casts(blocks: Iterable[nn.Module]) -> int:
    """Let linear layers that a module in ``blocks`` calls with one tensor cast it once.

    Returns how many modules have several such layers. Without autocast nothing is cast.
    """
    found = 0
    for module in (part for block in blocks for part in block.modules()):
        layers = [part for part in module.children() if _may_be_cast(part)]
        if len(layers) > 1:
            shared = _SharedInputs(len(layers))
            for layer in layers:
                layer.register_forward_pre_hook(shared.cast)
            module.register_forward_hook(shared.forget, always_call=True)
            found += 1
    return found


def _may_be_cast(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) and part.weight.dtype == torch.float32


class _SharedInputs:
    """Inputs of a module's linear layers while it runs, and what is left of the casts of each."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        # By the input's id, with the input, so that no other has its id.
        self._casts: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def cast(self, _: nn.Module, args: tuple[Any, ...]) -> Any:
        """Give a layer its input in the dtype of autocast."""
        if not args:  # a call by name, which torch's own cast is left to
            return args
        x, device_type = args[0], args[0].device.type
        if x.dtype != torch.float32 or not torch.is_autocast_enabled(device_type):
            return args
        _, left = self._casts.get(id(x), (x, []))
        if not left:
            dtype = torch.get_autocast_dtype(device_type)
            left = list(_Cast.apply(x, dtype, self._num_layers))
            self._casts[id(x)] = x, left
        return left.pop(), *args[1:]

    def forget(self, *_: Any) -> None:
        """Let go of inputs that not all layers have been called with."""
        self._casts.clear()


class _Cast(torch.autograd.Function):
    """``x`` in another dtype, as ``num`` tensors in the same memory."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dtype: torch.dtype, num: int
    ) -> tuple[torch.Tensor, ...]:
        ctx.dtype = x.dtype
        ctx.set_materialize_grads(False)
        out = x.to(dtype)
        return tuple(out.view_as(out) for _ in range(num))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        # Those of layers that were called; the first sum is in memory of its own.
        first, *others = (grad for grad in reversed(grads) if grad is not None)
        total = first.to(ctx.dtype)
        for grad in others:
            total += grad
        return total, None, None
