"""RMS norms (arXiv:1910.07467) in fewer passes over the activations than autograd's.

    y = x / sqrt(mean(x^2) + eps) * weight

Computed in fp32 and rounded where transformers rounds. Only ``x`` is kept for the backward pass, in
its own dtype; autograd keeps it in fp32, and the normalised values too. A GPU has one kernel for
each pass, ``F.rms_norm``, which keeps as much, and rounds once, behind the weight; on a CPU that is
no kernel of its own.
"""

import inspect
import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_STOCK = """\
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)
"""


def use_rms_norm(blocks: Iterable[nn.Module], torchs: bool = False) -> int:
    """Replace the forward of each RMS norm of Llama's form in ``blocks``; return how many.

    ``torchs``: by ``F.rms_norm``.
    """
    forward = _torchs_forward if torchs else _forward
    norms = [part for block in blocks for part in block.modules() if _is_plain(part)]
    for part in norms:
        part.forward = types.MethodType(forward, part)
    return len(norms)


def _is_plain(module: Any) -> bool:
    if not type(module).__name__.endswith("RMSNorm") or "forward" in module.__dict__:
        return False
    try:
        return inspect.getsource(type(module).forward).endswith(_STOCK)
    except (OSError, TypeError):  # made without a file
        return False


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != self.weight.dtype:
        stock: torch.Tensor = type(self).forward(self, x)
        return stock
    out: torch.Tensor = _RmsNorm.apply(x, self.weight, self.variance_epsilon)
    return out


def _torchs_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != self.weight.dtype:
        stock: torch.Tensor = type(self).forward(self, x)
        return stock
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
