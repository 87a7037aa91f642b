"""Norms and biases: by their names too, since a family may give them two dimensions.

Cohere's norms of heads are [heads, dim], gpt-oss's biases of experts [experts, dim].
"""

import re

import torch

# As transformers' Trainer (get_decay_parameter_names), which knows them by name alone.
_NORM = re.compile(r"layernorm|rmsnorm|(^|[._])norm(\.|$)")


def is_vector(name: str, parameter: torch.Tensor) -> bool:
    """Whether the parameter ``name`` is of a norm, or has one dimension at most."""
    return parameter.dim() < 2 or _NORM.search(name.lower()) is not None


def has_weight_decay(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay is meant for it: neither a norm nor a bias."""
    return not is_vector(name, parameter) and "bias" not in name.lower()
