"""RMS norms (arXiv:1910.07467) in fewer passes over the activations than autograd's.

    y = x / sqrt(mean(x^2) + eps) * weight

Computed in fp32 and rounded where transformers rounds. Only ``x`` is kept for the backward pass, in
its own dtype; autograd keeps it in fp32, and the normalised values too. A GPU has one kernel for
each pass, ``F.rms_norm``, which keeps as much, and rounds once, behind the weight; on a CPU that is
no kernel of its own.
"""

import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hpc_tune.model.tried_layer import find_equal_layers, make_like

# Of results in 16 bits. Rounded in another place, about a third of them would differ.
_EQUAL_SHARE = 0.95


def use_rms_norm(blocks: Iterable[nn.Module], torchs: bool = False) -> int:
    """Replace the forward of each RMS norm of Llama's form in ``blocks``; return how many.

    ``torchs``: by ``F.rms_norm``.
    """
    forward = _torch_forward if torchs else _rms_norm_forward
    norms = find_equal_layers(
        blocks, _may_be_rms_norm, _make_rms_norm_trial, _rms_norm_forward, _agree
    )
    for part in norms:
        part.forward = types.MethodType(forward, part)
    return len(norms)


def _may_be_rms_norm(module: Any) -> bool:
    if not type(module).__name__.endswith("RMSNorm") or "forward" in module.__dict__:
        return False
    if module._parameters.keys() != {"weight"} or module.weight is None or module._modules:
        return False
    return module.weight.dim() == 1 and hasattr(module, "variance_epsilon")


def _make_rms_norm_trial(module: Any, chance: torch.Generator) -> tuple[nn.Module, torch.Tensor]:
    """Return a norm of 64 weights, and rows of large and of small values."""
    weight = torch.randn(64, generator=chance, device="cpu", dtype=torch.bfloat16)
    x = torch.randn(16, 64, generator=chance, device="cpu")
    x *= torch.logspace(-4, 2, len(x), device="cpu")[:, None]
    return make_like(module, weight=nn.Parameter(weight)), x.bfloat16()


def _agree(stock: torch.Tensor, ours: torch.Tensor) -> bool:
    is_near = torch.allclose(stock.float(), ours.float(), rtol=2e-2, atol=1e-6)
    same = (stock == ours).float().mean().item()
    return stock.dtype == ours.dtype and is_near and same >= _EQUAL_SHARE


def _rms_norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != self.weight.dtype:
        stock: torch.Tensor = type(self).forward(self, x)
        return stock
    out: torch.Tensor = _RmsNorm.apply(x, self.weight, self.variance_epsilon)
    return out


def _torch_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != self.weight.dtype:
        stock: torch.Tensor = type(self).forward(self, x)
        return stock
    # It computes in fp32 inside. Since torch 2.12 a GPU's autocast also has copies of x and of the
    # result in fp32, even where both are in 16 bits.
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x_fp32 = x.float()
        mean_square = torch.linalg.vector_norm(x_fp32, dim=-1, keepdim=True).square_()
        inverse = mean_square.mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        # Not x_fp32 in place: of an x in fp32 it is x itself.
        return (x_fp32 * inverse).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight, inverse = ctx.saved_tensors
        x_fp32, grad_weight = x.float(), None
        if ctx.needs_input_grad[1]:
            normalised = (x_fp32 * inverse).to(x.dtype)
            grad_weight = (grad * normalised).flatten(0, -2).sum(0)
        # dx = g / rms - x (g . x) / (rms^3 D), where g is the gradient of the normalised values
        by_norm = (grad * weight).float()
        shared = torch.linalg.vecdot(by_norm, x_fp32).unsqueeze(-1)
        shared *= inverse**3 / x.shape[-1]
        grad_x = by_norm.mul_(inverse).addcmul_(x_fp32, shared, value=-1)
        return grad_x.to(x.dtype), grad_weight, None
