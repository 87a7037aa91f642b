"""SwiGLU MLPs (arXiv:2002.05202) that keep one tensor less per block for the backward pass.

    y = down(silu(gate(x)) * up(x))

Autograd keeps the gate for silu, and its result and ``up`` for the product. Here the backward pass
recomputes silu, which takes less time than reading its result: only gate and ``up`` are kept. The
same operations on the same values give the same bits.
"""

import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hpc_tune.model.tried_layer import find_equal_layers, make_like

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_WIDTH, _SCALE = 16, 8.0  # of the values that it is tried on: a limit of them would show


def use_swiglu(blocks: Iterable[nn.Module]) -> int:
    """Replace the forward of each plain SwiGLU MLP in ``blocks``; return how many there were."""
    layers = find_equal_layers(
        blocks, _may_be_swiglu, _make_swiglu_trial, _swiglu_forward, torch.equal
    )
    for part in layers:
        part.forward = types.MethodType(_swiglu_forward, part)
    return len(layers)


def _may_be_swiglu(module: Any) -> bool:
    activation = getattr(module, "act_fn", None)
    is_silu = isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
    has_parts = {*_PROJECTIONS} <= module._modules.keys() <= {*_PROJECTIONS, "act_fn"}
    has_more = module._parameters or module._buffers or "forward" in module.__dict__
    return is_silu and has_parts and not has_more


def _make_swiglu_trial(module: Any, chance: torch.Generator) -> tuple[nn.Module, torch.Tensor]:
    parts = {name: nn.Linear(_WIDTH, _WIDTH, device="cpu") for name in _PROJECTIONS}
    for part in parts.values():
        for values in part.parameters():
            values.normal_(generator=chance)
    x = _SCALE * torch.randn(4, _WIDTH, generator=chance, device="cpu")
    return make_like(module, act_fn=module.act_fn, **parts), x


def _swiglu_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = self.down_proj(_SwiGlu.apply(self.gate_proj(x), self.up_proj(x)))
    return out


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        grad_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, F.silu(gate).mul_(grad)
