"""What distributed code needs to know of a model, as data: its decoder blocks."""

from typing import Any

from torch import nn


def block_list(model: Any) -> nn.ModuleList:
    """Return the list of the decoder blocks of a ``LossModel``: its largest ``nn.ModuleList``.

    Every causal LM of transformers has one; expert lists are inside of its entries.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))
