"""Tensors that transformers loads in fp32 whatever the dtype of the model, kept so here too."""

from typing import Any

import torch
from torch import nn


def keep_fp32(model: Any, dtype: torch.dtype, is_full: bool) -> None:
    """Give a model of ``dtype`` on the meta device fp32 tensors where its family wants them.

    Such as the biases that DeepSeek-V3's routers choose by: rounded to bf16 they are further apart
    than the scores that they are added to, so that other experts would be chosen. With ``is_full``
    parameters keep their dtype, which is that of what is trained.
    """
    from transformers.core_model_loading import build_glob_alternation

    kept = [name for name, own in model._get_dtype_plan(dtype).items() if own != dtype]
    if not kept:
        return
    is_kept = build_glob_alternation(kept)[0].search
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and is_kept(f"{path}.{name}"):
                module._buffers[name] = buffer.to(torch.float32)
        if is_full or isinstance(module, nn.Linear):  # adapters are made for the model's dtype
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if is_kept(f"{path}.{name}"):
                parameter.data = parameter.data.to(torch.float32)


def find_fp32_linears(model: Any) -> list[nn.Module]:
    """Return the linear layers that a family wants in fp32, which stock tools do not quantise."""
    from transformers.core_model_loading import build_glob_alternation

    lists = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    names = [name for kept in lists for name in getattr(model, kept, None) or ()]
    is_kept = build_glob_alternation(names)[0].search if names else lambda _: None
    return [
        module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and is_kept(f"{path}.weight")
    ]
