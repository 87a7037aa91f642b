"""A model's decoder blocks: where they are, and the layers in them that are replaced."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hpc_tune.model.lora_linear import use_lora_linear
from hpc_tune.model.loss import LossModel
from hpc_tune.model.rms_norm import use_rms_norm
from hpc_tune.model.swiglu import use_swiglu
from hpc_tune.model.varlen_attention import why_masked


def block_list(model: Any) -> nn.ModuleList:
    """Return the list of the decoder blocks of a ``LossModel``: its largest ``nn.ModuleList``.

    Every causal LM of transformers has one; expert lists are inside of its entries.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


def use_own_layers(
    module: LossModel,
    blocks: Sequence[nn.Module],
    compiled: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Replace layers of ``blocks`` by ones that take fewer passes and keep fewer activations.

    They compute in ``dtype`` on ``device``.
    """
    use_lora_linear(blocks)
    if not compiled:  # a compiler chooses by itself what to keep
        use_swiglu(blocks)
        use_rms_norm(blocks)
    module.within_documents &= not compiled
    if module.within_documents:
        module.has_kernel = not why_masked(module.config, dtype, compiled, device)
