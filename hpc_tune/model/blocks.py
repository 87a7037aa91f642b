"""A model's decoder blocks: where they are, and the layers in them that are replaced."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hpc_tune.model.faster_layers import share_casts, use_rms_norm, use_swiglu
from hpc_tune.model.float8_base import use_float8_matmuls
from hpc_tune.model.grouped_experts import use_grouped_experts
from hpc_tune.model.kernels import choose_model_kernels
from hpc_tune.model.lora_linear import AdapterCopies, use_lora_linear
from hpc_tune.model.loss import LossModel


def find_blocks(model: Any) -> nn.ModuleList:
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
    copies: AdapterCopies | None = None,
    shares_inputs: bool = False,
) -> None:
    """Replace layers of ``blocks`` by what ``kernels.py`` chooses for ``dtype`` on ``device``.

    These take fewer passes and keep fewer activations. ``copies``: of an engine that says when
    adapters change. ``shares_inputs``: see ``use_lora_linear``.
    """
    mask_reason = "" if module.within_documents else "its attention needs it"
    kernels = choose_model_kernels(module.config, dtype, compiled, device, mask_reason)
    use_float8_matmuls(blocks, device)
    groups = use_lora_linear(blocks, shares_inputs)
    if copies is not None:
        copies.keep_copies(blocks, groups)
    use_grouped_experts(blocks, compiled)
    if not compiled:
        share_casts(blocks)
    if kernels.swiglu == "own":
        use_swiglu(blocks)
    if kernels.norm != "transformers":
        use_rms_norm(blocks, torchs=kernels.norm == "F.rms_norm")
    module.within_documents = kernels.attention != "mask"
    module.has_kernel = kernels.attention == "varlen"
    module.kernel_has_windows = kernels.window == "varlen"
