"""Special layers of a model, its decoder blocks, and the layers that are replaced in these.

Some linear layers are not called like other linear layers. They get no adapters and are not
quantized, since the replacements by peft or bitsandbytes would be wrong. This holds on every
device, since a run may resume anywhere:

- A fused kernel takes the weight as it is. If mamba_ssm is installed, Mamba 2's kernel includes the
  output projection, and Mamba 1's all projections after the first: an adapter would silently not be
  trained (https://github.com/huggingface/peft/issues/2274 and 2556), and 4-bit codes would be taken
  for weights.
- The matmul is grouped: each group of inputs has its own part of the weight (DeepSeek V4).
- An indexer of sparse attention (DeepSeek V3.2, GLM-5) chooses keys by scores that get no gradient;
  some cast to the dtype of a weight, which is that of bytes for 4-bit codes.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hpc_tune.model.experts import find_routers
from hpc_tune.model.faster_layers import share_input_casts, use_faster_rms_norm, use_faster_swiglu
from hpc_tune.model.float8 import use_float8_matmuls
from hpc_tune.model.grouped_experts import use_grouped_experts
from hpc_tune.model.kernels import choose_model_kernels
from hpc_tune.model.lora_linear import AdapterCopies, use_lora_linear
from hpc_tune.model.loss import LossModel
from hpc_tune.model.packed_attention import find_indexers

# -- Tensors that transformers loads in fp32 whatever the model's dtype; they are fp32 here too.


def keep_fp32_tensors(model: Any, dtype: torch.dtype, is_full: bool) -> None:
    """Make tensors of a meta-device model of ``dtype`` fp32, if its family wants them in fp32.

    For example the biases by which DeepSeek-V3's routers choose: bf16 steps of them are larger than
    the gaps between the scores that they are added to, so other experts would be chosen.
    Linear layers' parameters keep their dtype; with ``is_full`` all do, since they are trained.
    """
    from transformers.core_model_loading import build_glob_alternation

    fp32_names = [name for name, target in model._get_dtype_plan(dtype).items() if target != dtype]
    if not fp32_names:
        return
    is_kept = build_glob_alternation(fp32_names)[0].search
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
    """Return the linear layers that a family wants in fp32; stock tools do not quantize them."""
    from transformers.core_model_loading import build_glob_alternation

    attributes = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    names = [name for attribute in attributes for name in getattr(model, attribute, None) or ()]
    is_kept = build_glob_alternation(names)[0].search if names else lambda _: None
    return [
        module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and is_kept(f"{path}.weight")
    ]


# -- Linear layers that are not called like other linear layers.


# Not Jamba's Mamba 1: with norms between its projections, it calls each and has another slow form.
_MAMBA_1_CLASSES = ("MambaMixer", "FalconMambaMixer")


def find_unquantized_layers(model: nn.Module, blocks: nn.Module) -> set[nn.Module]:
    """Return the layers that stay as they are when a model's decoder ``blocks`` are quantized.

    These are the blocks' routers and linear layers that are not called like others, and all linear
    layers of the model that its family keeps in fp32.
    """
    paths = {*find_routers(blocks), *find_unreplaceable_linears(blocks)}
    return {*find_fp32_linears(model), *(blocks.get_submodule(path) for path in paths)}


def find_unreplaceable_linears(model: nn.Module) -> Iterator[str]:
    """Yield the paths of linear layers that are not called like other linear layers."""
    indexer_layers = {layer for indexer in find_indexers(model) for layer in indexer.modules()}
    for path, module in model.named_modules():
        parameter_names = module._parameters.keys()
        if {"A_log", "D", "dt_bias"} <= parameter_names:
            yield f"{path}.out_proj"
        elif type(module).__name__ in _MAMBA_1_CLASSES:
            yield from (f"{path}.{name}" for name in ("x_proj", "dt_proj", "out_proj"))
        elif isinstance(module, nn.Linear) and (
            hasattr(module, "n_groups") or module in indexer_layers
        ):
            yield path


# -- Norms and biases, recognized by name too, since a family may give them two dimensions.
#
# Cohere's norms of heads are [heads, dim], gpt-oss's biases of experts [experts, dim].


# As in transformers' Trainer (get_decay_parameter_names), which goes by the name only.
_NORM_NAME = re.compile(r"layernorm|rmsnorm|(^|[._])norm(\.|$)")


def is_vector(name: str, parameter: torch.Tensor) -> bool:
    """Whether the parameter ``name`` belongs to a norm, or has at most one dimension."""
    return parameter.dim() < 2 or _NORM_NAME.search(name.lower()) is not None


def has_weight_decay(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies to a parameter: it is neither a norm nor a bias."""
    return not is_vector(name, parameter) and "bias" not in name.lower()


# -- A model's decoder blocks: where they are, and the layers in them that are replaced.


def find_blocks(model: Any) -> nn.ModuleList:
    """Return the list of the decoder blocks of a ``LossModel``: its largest ``nn.ModuleList``.

    Every causal LM of transformers has one; lists of experts are inside its entries.
    """
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))


def use_faster_layers(
    module: LossModel,
    blocks: Sequence[nn.Module],
    compiled: bool,
    dtype: torch.dtype,
    device: torch.device,
    adapter_copies: AdapterCopies | None = None,
    shares_inputs: bool = False,
) -> None:
    """Replace layers of ``blocks`` by what ``kernels.py`` chooses for ``dtype`` on ``device``.

    The new layers take fewer passes and keep fewer activations. ``adapter_copies``: from an engine
    that reports changes of adapters. ``shares_inputs``: see ``use_lora_linear``.
    """
    mask_reason = "" if module.uses_document_attention else "its attention needs it"
    kernels = choose_model_kernels(module.config, dtype, compiled, device, mask_reason)
    use_float8_matmuls(blocks, device)
    groups = use_lora_linear(blocks, shares_inputs)
    if adapter_copies is not None:
        adapter_copies.keep_copies(blocks, groups)
    use_grouped_experts(blocks, compiled)
    if not compiled:
        share_input_casts(blocks)
    if kernels.swiglu == "own":
        use_faster_swiglu(blocks)
    if kernels.norm != "transformers":
        use_faster_rms_norm(blocks, uses_torch=kernels.norm == "F.rms_norm")
    module.uses_document_attention = kernels.attention != "mask"
    module.has_varlen_kernel = kernels.attention == "varlen"
    module.kernel_has_windows = kernels.window == "varlen"
