"""LoRA layers in as few passes over the activations as their arithmetic allows.

    y = x W^T + bias + s (x A^T) B^T

peft computes the adapter's output, scales it and adds it: three passes over tensors as wide as the
layer, forward and backward, of which two are kept for the backward pass. Here both adapter products
are accumulated by the matrix product (BLAS's alpha and beta), and only ``x`` and the low-rank
``x A^T`` are kept. Adapters are cast to the dtype of ``x``, not ``x`` to theirs.

Shapes: N tokens of all rows, I and O features in and out, R the rank.
"""

import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode


def use_lora_linear(blocks: Iterable[nn.Module]) -> int:
    """Replace the forward of each plain LoRA layer in ``blocks``; return how many there were.

    Not replaced: layers with dropout, with DoRA's magnitude, or on a base that is more than a
    matrix (4 bits, float8). The base and both adapters must be whole tensors when the layer is
    called, as they are within an FSDP2 unit; ZeRO-3 gathers them at the call of each.
    """
    layers = [layer for block in blocks for layer in block.modules() if _is_plain(layer)]
    for layer in layers:
        layer.forward = types.MethodType(_forward, layer)
    return len(layers)


def _is_plain(layer: Any) -> bool:
    if not hasattr(layer, "lora_A") or list(layer.lora_A) != ["default"]:
        return False
    parts = (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"])
    return (
        all(type(part) is nn.Linear and "forward" not in part.__dict__ for part in parts)
        and isinstance(layer.lora_dropout["default"], nn.Identity)
        and not layer.lora_variant
        and not any(adapter.bias is not None for adapter in parts[1:])
    )


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    base, a, b = self.base_layer, self.lora_A["default"], self.lora_B["default"]
    out_NO: torch.Tensor = _LoraLinear.apply(
        x, base.weight, base.bias, a.weight, b.weight, self.scaling["default"]
    )
    # Not in the function: its view may not be changed in place, as OLMo does (clip_qkv).
    return out_NO.view(*x.shape[:-1], -1)


class _LoraLinear(torch.autograd.Function):
    """The layer's output; backward, the gradients of ``x``, A and B, and none of the base."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        a_RI: torch.Tensor,
        b_OR: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        x_NI = x.flatten(0, -2)
        low_rank_NR = x_NI @ a_RI.to(x.dtype).t()
        ctx.save_for_backward(x_NI, low_rank_NR, weight_OI, a_RI, b_OR)
        ctx.scale, ctx.shape = scale, x.shape
        b_RO = (scale * b_OR).to(x.dtype).t()
        # A mode is selective recompute or a trace: both know the product as addmm, and what they
        # keep must not be changed in place.
        adapter_NO = (
            low_rank_NR @ b_RO if bias_O is None else torch.addmm(bias_O, low_rank_NR, b_RO)
        )
        is_traced = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
        add = torch.addmm if is_traced else torch.Tensor.addmm_
        return add(adapter_NO, x_NI, weight_OI.t())

    @staticmethod
    def backward(ctx: Any, grad_NO: torch.Tensor) -> Any:  # type: ignore[override]
        x_NI, low_rank_NR, weight_OI, a_RI, b_OR = ctx.saved_tensors
        dtype = grad_NO.dtype
        grad_NR = grad_NO @ (ctx.scale * b_OR).to(dtype)
        grad_a = (grad_NR.t() @ x_NI).to(a_RI.dtype)
        grad_b = (ctx.scale * (grad_NO.t() @ low_rank_NR)).to(b_OR.dtype)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_NO @ weight_OI).addmm_(grad_NR, a_RI.to(dtype))
            grad_x = grad_x.view(ctx.shape)
        return grad_x, None, None, grad_a, grad_b, None
