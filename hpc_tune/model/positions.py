"""Rotary frequencies that depend on a text's length, fixed for all texts.

transformers computes them for the longest text of a micro-batch (longrope: two sets of frequencies;
dynamic NTK, arXiv:2309.00071: one for each length), so a text's loss would depend on the others of
its micro-batch. Here the frequencies are those of ``data.seq_len`` tokens, of pairs those of the
longest text that is learned, as in a server that is started for texts of that length.
"""

from typing import Any

import torch
from torch import nn

_UNSCALED = "default"  # to transformers: frequencies that never change


def has_length_scaling(config: Any) -> bool:
    """Whether transformers would scale this model's positions by the text's length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parts = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    kinds = [str(part.get("rope_type", "")) for part in parts]
    return any(kind == "longrope" or "dynamic" in kind for kind in kinds)


def llama3_divisors(config: Any) -> torch.Tensor:
    """Return by what Llama 3's scaling divides each rotary frequency of a transformers config."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(len(scaled), dtype=torch.float32) / len(scaled)
    return 1.0 / (config.rope_parameters["rope_theta"] ** exponents) / scaled


def fix_positions(module: nn.Module, seq_len: int) -> None:
    """Give every rotary embedding the frequencies for ``seq_len`` tokens, for good."""
    layers: Any = module.modules()
    for rotary in layers:
        kinds = getattr(rotary, "rope_type", None)
        by_layer: dict[str | None, str] = kinds if isinstance(kinds, dict) else {None: str(kinds)}
        for layer, kind in by_layer.items():
            if kind != "longrope" and "dynamic" not in kind:
                continue
            device = next(rotary.buffers()).device
            last_BT = torch.tensor([[seq_len - 1]], device=device)
            options = {} if layer is None else {"layer_type": layer}
            rotary(torch.zeros((), device=device), last_BT, **options)
            by_layer[layer] = _UNSCALED
        if isinstance(kinds, str) and by_layer[None] != kinds:
            rotary.rope_type = by_layer[None]
