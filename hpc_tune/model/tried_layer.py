"""Whether a layer of transformers computes what one of ours does: both are tried on a few values.

The name of a class tells nothing for certain, and its source may change with a version. Where the
two differ, or the layer cannot be tried, transformers' own runs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


def like(module: nn.Module, **parts: nn.Module | nn.Parameter) -> nn.Module:
    """Return a layer of the class of ``module``, with its plain attributes, made of ``parts``."""
    layer = type(module).__new__(type(module))
    nn.Module.__init__(layer)
    for name, value in vars(module).items():
        if not name.startswith("_") and name != "forward":
            layer.__dict__[name] = value
    for name, part in parts.items():
        setattr(layer, name, part)
    return layer


def computes_as(
    module: nn.Module,
    make: Callable[[torch.Generator], tuple[nn.Module, list[torch.Tensor]]],
    forward: Forward,
    agree: Callable[[torch.Tensor, torch.Tensor], bool],
) -> bool:
    """Try a layer of the class of ``module`` on real values, whatever ``module`` itself has.

    ``make`` returns the layer (see ``like``) and inputs; for each, the results of the class's own
    forward and of ``forward`` must ``agree``.
    """
    with _disable_current_modes(), torch.no_grad():
        layer, inputs = make(torch.Generator().manual_seed(0))
        layer.train(module.training)
        try:
            return all(agree(type(module).forward(layer, x), forward(layer, x)) for x in inputs)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return False
