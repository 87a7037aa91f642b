"""What depends on adapters alone, made once per update: copies to multiply with, DoRA's norms.

A step's micro-batches and its recomputation take the same values of these. Engines that do not say
when adapters change have neither: each layer casts its adapters when it is called.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hpc_tune.model.lora_linear import (
    LoraGroup,
    adapter_scale,
    adapter_weight,
    base_weight,
    is_dora,
    matmul_dtype,
    row_norms,
    row_squares,
)


class AdapterCopies:
    """Adapters in the dtype of products, as views of one buffer for each dtype.

    B's are scaled, and the A's of layers that share an input lie behind each other, as one matrix.
    """

    def __init__(self) -> None:
        self._all: list[LoraGroup] = []
        self._groups: list[LoraGroup] = []  # those that are copied
        self._version, self._copied = 0, -1

    @property
    def version(self) -> int:
        """Another number after each change of adapters."""
        return self._version

    def keep(self, blocks: Sequence[nn.Module], groups: Iterable[LoraGroup]) -> None:
        """Keep copies for groups of layers in ``blocks``, and the norms of DoRA's.

        Adapters in the dtype of products are taken as they are.
        """
        self._all += groups
        self._groups = [
            g
            for g in self._all
            if matmul_dtype(g.layers[0]) != adapter_weight(g.layers[0], "A").dtype
        ]
        for block in blocks:
            layers = [part for part in block.modules() if hasattr(part, "lora_group")]
            if norms := [RowNorms(layer, self) for layer in layers if is_dora(layer)]:
                # A hook of the block: FSDP2 has gathered its weights, and no graph has it.
                block.register_forward_pre_hook(lambda *_, norms=norms: _update(norms))

    def changed(self) -> None:
        """Say that adapters have other values now."""
        self._version += 1

    def forget_results(self) -> None:
        """Let go of what a pass that was broken off has left."""
        for group in self._all:
            group.forget()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy all adapters if they have changed; to be called before the passes of a step."""
        for group in self._all:
            group.settle_sharing()
        if self._copied == self._version or not self._groups:
            return
        if self._copied < 0:
            self._copy_adapters()
        self._copied = self._version
        layers = [layer for group in self._groups for layer in group.layers]
        a_views = [
            view
            for group in self._groups
            for view in _full_tensor(group.a_SI).split(
                [len(adapter_weight(m, "A")) for m in group.layers]
            )
        ]
        torch._foreach_copy_(a_views, [adapter_weight(layer, "A").detach() for layer in layers])
        scaled = torch._foreach_mul(
            [adapter_weight(layer, "B").detach() for layer in layers],
            [adapter_scale(m) for m in layers],
        )
        torch._foreach_copy_([b_OR for group in self._groups for b_OR in group.bs_OR], scaled)

    def _copy_adapters(self) -> None:
        for dtype in {matmul_dtype(group.layers[0]) for group in self._groups}:
            groups = [g for g in self._groups if matmul_dtype(g.layers[0]) == dtype]
            sizes = [
                sum(adapter_weight(layer, part).numel() for layer in group.layers)
                for group in groups
                for part in "AB"
            ]
            device = adapter_weight(groups[0].layers[0], "A").device
            parts = iter(torch.empty(sum(sizes), dtype=dtype, device=device).split(sizes))
            for group in groups:
                group.a_SI = next(parts).view(-1, adapter_weight(group.layers[0], "A").shape[1])
                shapes = [adapter_weight(layer, "B").shape for layer in group.layers]
                of_layers = next(parts).split([shape.numel() for shape in shapes])
                group.bs_OR = [b.view(s) for b, s in zip(of_layers, shapes, strict=True)]


class RowNorms:
    """The norms of DoRA's rows in one layer, of the adapters' last change."""

    def __init__(self, layer: Any, copies: AdapterCopies) -> None:
        self._layer, self._copies = layer, copies
        self._of_version = -1
        self._squares_O: torch.Tensor | None = None
        layer.row_norms_O = None

    def update(self) -> None:
        """Compute them anew if adapters have changed; the base's weight must be whole."""
        if self._of_version == self._copies.version:
            return
        if self._squares_O is None:
            self._squares_O = row_squares(base_weight(self._layer))
        self._of_version = self._copies.version
        norms_O = row_norms(self._layer, self._squares_O)
        if self._layer.row_norms_O is None:
            self._layer.row_norms_O = norms_O
        else:
            self._layer.row_norms_O.copy_(norms_O)


def _update(norms: Sequence[RowNorms]) -> None:
    for of_layer in norms:
        of_layer.update()


def _full_tensor(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor
