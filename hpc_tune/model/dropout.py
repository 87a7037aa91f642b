"""Dropout that does not know how rows are spread over ranks and micro-batches.

A mask is a function of (seed, row of the global stream, layer), so a run that goes on with another
number of ranks, another micro-batch or another engine drops the same values. On a GPU, where the
generator's numbers depend on the size that is asked for, rows must also be padded to the same
width, as packed ones mostly are.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# The rows that are being computed with; the backward pass runs in threads of its own.
_rows: Sequence[int] = ()


@contextmanager
def of_rows(rows: Sequence[int]) -> Iterator[None]:
    """Make ``rows``, indices of the global stream of rows, those that masks are for."""
    global _rows
    before, _rows = _rows, rows
    try:
        yield
    finally:
        _rows = before


def remembering_rows(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward``, to be recomputed later for the rows of now."""
    rows = _rows

    def again(*args: Any, **kwargs: Any) -> Any:
        with of_rows(rows):
            return forward(*args, **kwargs)

    return again


class RowDropout(nn.Module):
    """Sets values to 0 with probability ``p`` and scales the others by 1 / (1 - p)."""

    def __init__(self, p: float, seed: int, layer: str) -> None:
        super().__init__()
        self.p, self._key = p, f"{seed} {layer}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drop values of ``x``, whose first dimension is rows, or rows times tokens."""
        if not self.training:
            return x
        kept = torch.empty_like(x, memory_format=torch.contiguous_format)
        generator = torch.Generator(x.device)
        for row, mask in zip(_rows, kept.view(len(_rows), -1), strict=True):
            digest = hashlib.blake2b(f"{self._key} {row}".encode(), digest_size=7)
            generator.manual_seed(int(digest.hexdigest(), 16))
            mask.bernoulli_(1 - self.p, generator=generator)
        return x * kept.div_(1 - self.p)


def use_row_dropout(model: nn.Module, seed: int) -> None:
    """Replace every ``nn.Dropout`` of the adapters in ``model``."""
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.ModuleDict) and path.endswith(".lora_dropout"):
            for name, inner in module.items():
                if isinstance(inner, nn.Dropout):
                    module[name] = RowDropout(inner.p, seed, f"{path}.{name}")
