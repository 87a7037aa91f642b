"""Decodes weights in 4 bits in plain torch, as bitsandbytes documents its format."""

from typing import Any

import torch
from torch import nn

# QLoRA (arXiv:2305.14314), appendix E: one of these times the largest value of its block of 64.
CODEBOOK = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


def values_of(packed: torch.Tensor, state: Any) -> torch.Tensor:
    """Return the values of packed codes; the first of two is in the upper half of a byte.

    ``state``: bitsandbytes' own, with doubly quantized scales.
    """
    codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1).flatten().long()
    large = state.state2.absmax.repeat_interleave(256)[: state.absmax.numel()]
    scales = state.state2.code[state.absmax.flatten().long()] * large + state.offset
    num_values = state.shape.numel()
    values = torch.tensor(CODEBOOK)[codes[:num_values]]
    return (values * scales.repeat_interleave(64)[:num_values]).view(state.shape)


def unpack_linears(model: nn.Module) -> None:
    """Replace bitsandbytes' linear layers with plain ones of the same values.

    Its kernel for CPUs with AVX512 uses wrong scales if rows are not whole blocks of 64.
    """
    from bitsandbytes.nn import Linear4bit

    for name, layer in list(model.named_modules()):
        if isinstance(layer, Linear4bit):
            linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
            linear.weight = nn.Parameter(values_of(layer.weight.data, layer.weight.quant_state))
            linear.bias = layer.bias
            model.set_submodule(name, linear.requires_grad_(False))
