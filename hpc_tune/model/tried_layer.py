"""Whether a layer of transformers computes what one of ours does: both are tried on a few values.

The name of a class tells nothing for certain, and its source may change with a version. Where the
two differ, or the layer cannot be tried, transformers' own runs.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


def make_like(module: nn.Module, **parts: nn.Module | nn.Parameter) -> nn.Module:
    """Return a layer of the class of ``module``, with its plain attributes, made of ``parts``."""
    layer = type(module).__new__(type(module))
    nn.Module.__init__(layer)
    for name, value in vars(module).items():
        if not name.startswith("_") and name != "forward":
            layer.__dict__[name] = value
    for name, part in parts.items():
        setattr(layer, name, part)
    return layer


def find_equal_layers(
    blocks: Iterable[nn.Module],
    may_be: Callable[[nn.Module], bool],
    make: Callable[[nn.Module, torch.Generator], tuple[nn.Module, torch.Tensor]],
    forward: Forward,
    agree: Callable[[torch.Tensor, torch.Tensor], bool],
) -> list[nn.Module]:
    """Return the layers of ``blocks`` that ``may_be`` and whose class computes as ``forward`` does.

    ``make`` returns a layer like one of them (see ``make_like``), and an input; the results of the
    class's own forward and of ``forward`` must ``agree``. Layers of one class with the same plain
    attributes are tried once.
    """
    tried: dict[tuple[Any, ...], bool] = {}
    found = []
    for layer in (part for block in blocks for part in block.modules() if may_be(part)):
        key = type(layer), layer.training, *_plain_attributes(layer)
        if key not in tried:
            tried[key] = _computes_as(layer, make, forward, agree)
        if tried[key]:
            found.append(layer)
    return found


def _plain_attributes(layer: nn.Module) -> list[tuple[str, Any]]:
    """Return what tells a layer from others of its class: values, or which object it is."""
    return [
        (name, value if isinstance(value, (int, float, str, type(None))) else id(value))
        for name, value in vars(layer).items()
        if not name.startswith("_")
    ]


def _computes_as(
    module: nn.Module,
    make: Callable[[nn.Module, torch.Generator], tuple[nn.Module, torch.Tensor]],
    forward: Forward,
    agree: Callable[[torch.Tensor, torch.Tensor], bool],
) -> bool:
    with _disable_current_modes(), torch.no_grad():
        layer, x = make(module, torch.Generator().manual_seed(0))
        layer.train(module.training)
        try:
            return agree(type(module).forward(layer, x), forward(layer, x))
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return False
