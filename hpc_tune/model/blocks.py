"""What distributed code needs to know of a model, as data: its decoder blocks."""

from torch import nn


def decoder_blocks(model: nn.Module, num_layers: int) -> list[nn.Module]:
    """Return the decoder blocks, in order: the longest ``nn.ModuleList`` of ``num_layers`` entries.

    Raises:
        AssertionError: if the model has no such list; every causal LM of transformers has one.
    """
    lists: list[nn.ModuleList] = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    assert lists, f"{type(model).__name__} has no list of {num_layers} decoder blocks"
    largest = max(lists, key=_num_values)
    return list(largest)


def _num_values(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
