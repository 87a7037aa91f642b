"""Choose the implementation of each part of a decoder block: one decision for a device.

                  CPU                 CPU, compiled    GPU                 GPU, compiled
    attention     tiles               mask             varlen              varlen
    its windows   mask                mask             varlen              varlen
    norms         own                 transformers     F.rms_norm          transformers
    SwiGLU        own                 transformers     own                 transformers
    LoRA          own                 own              own                 own

If a GPU's kernel does not take a model's heads, or is wrong, masks are used. A compiler fuses norms
and SwiGLU, and chooses which activations to keep. Without a compiler, torch has a fused norm for
GPUs only, and no fused SwiGLU; our own keeps one tensor fewer. torch 2.11 to 2.13 are alike here.

Experts are grouped matmuls everywhere. On a GPU torch has a kernel for these only in bf16, from
Hopper on; elsewhere (on AMD too, unless ROCM_ALLOW_GROUP_GEMM_CK=1) it reads the numbers of rows
from the device and multiplies expert by expert.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from hpc_tune.config.schema import TrainConfig
from hpc_tune.model import varlen_attention
from hpc_tune.model.config_json import value_shared_by_layers
from hpc_tune.model.varlen_attention import DTYPES, HEAD_DIM_MULTIPLE, MAX_HEAD_DIM
from hpc_tune.world.device import GpuArchitecture, find_architecture

Implementation = Literal["own", "F.rms_norm", "transformers"]
_CHECKED_WINDOW_TOKENS = 70  # the window's edge falls inside the kernel's blocks, at varying places
_ATTENTION_DESCRIPTIONS = {
    "varlen": "varlen (torch.nn.attention.varlen)",
    "tiles": "document by document (hpc_tune's tiles)",
    "mask": "with a mask of tokens x tokens for each packed row",
}


@dataclass(frozen=True)
class Kernels:
    """The implementations that compute a model's decoder blocks.

    ``attention``: for packed rows. ``window``: for layers with a sliding window, None if the model
    has none. ``mask_reason``: why one of these two uses a T x T mask, "" if neither does, or only
    windows on a CPU, which always do. ``lora``: for adapters, None without adapters.
    ``expert_loop_reason``: why the experts of a mixture are multiplied one by one, "" if they are
    not. ``flash_attention``: what torch calls instead of its own attention kernel, "" if nothing.
    """

    attention: Literal["varlen", "tiles", "mask"]
    window: Literal["varlen", "mask"] | None
    norm: Implementation
    swiglu: Implementation
    lora: Literal["own"] | None = "own"
    mask_reason: str = ""
    expert_loop_reason: str = ""
    flash_attention: str = ""

    def __str__(self) -> str:
        """Describe the implementations in words, for the log of a run's start."""
        attention = _ATTENTION_DESCRIPTIONS[self.attention]
        attention += f" by {self.flash_attention}" if self.flash_attention else ""
        if self.window == "mask" and self.attention != "mask":
            attention += ", sliding windows with a mask of tokens x tokens"
        reason = f": {self.mask_reason}" if self.mask_reason else ""
        lora = f", LoRA {self.lora}" if self.lora else ""
        slow = f", experts in a loop: {self.expert_loop_reason}" if self.expert_loop_reason else ""
        return f"attention {attention}{reason}; norms {self.norm}, SwiGLU {self.swiglu}{lora}{slow}"


def choose_kernels(
    device_type: str,
    compiled: bool,
    has_windows: bool,
    mask_reason: str = "",
    window_mask_reason: str = "",
) -> Kernels:
    """Return what computes a model's blocks on a device.

    ``has_windows``: the model has layers with a sliding window. ``mask_reason``: why attention
    cannot run by document on the device; ``window_mask_reason``: why a GPU's kernel takes no
    sliding window.
    """
    on_gpu = device_type == "cuda"
    norm: Implementation = "transformers" if compiled else "F.rms_norm" if on_gpu else "own"
    swiglu: Implementation = "transformers" if compiled else "own"
    if not on_gpu and compiled:
        mask_reason = mask_reason or "train.compile=true"
    if mask_reason:
        return Kernels(
            "mask", "mask" if has_windows else None, norm, swiglu, mask_reason=mask_reason
        )
    if not on_gpu:
        return Kernels("tiles", "mask" if has_windows else None, norm, swiglu)
    if has_windows and window_mask_reason:
        return Kernels("varlen", "mask", norm, swiglu, mask_reason=window_mask_reason)
    return Kernels("varlen", "varlen" if has_windows else None, norm, swiglu)


def choose_model_kernels(
    config: Any,
    dtype: torch.dtype,
    compiled: bool,
    device: torch.device | None = None,
    mask_reason: str = "",
) -> Kernels:
    """Return what computes the blocks of a model with this transformers configuration.

    ``dtype``: of attention; ``mask_reason``: why attention cannot run by document on any device. On
    a GPU, the architecture is looked up and the kernel is tried; a ``device`` of None stands for
    the GPU of a plan.
    """
    has_windows = any(layer_windows(config))
    if device is not None and device.type != "cuda":
        return choose_kernels(device.type, compiled, has_windows, mask_reason)
    reason = mask_reason or _explain_unsupported_heads(config, dtype)
    window_mask_reason, flash_attention = "", ""
    if not reason and device is not None:
        architecture = find_architecture(device)
        if architecture is not None and not architecture.has_varlen_attention:
            reason = f"torch has no such kernel for a GPU of {architecture}"
        else:
            kernel_args = (device, dtype, _head_size(config), _query_heads_per_key_head(config))
            reason = varlen_attention.varlen_kernel_fault(*kernel_args)
            if has_windows and not reason:
                window_mask_reason = varlen_attention.varlen_kernel_fault(
                    *kernel_args, window=_CHECKED_WINDOW_TOKENS
                )
            if not reason and architecture is not None and architecture.capability is not None:
                window = _CHECKED_WINDOW_TOKENS if has_windows and not window_mask_reason else None
                flash_attention = varlen_attention.use_flash_attention(*kernel_args, window)
    return replace(
        choose_kernels("cuda", compiled, has_windows, reason, window_mask_reason),
        flash_attention=flash_attention,
    )


def explain_unsupported_document_parts(
    config: Any, dtype: torch.dtype, device: torch.device
) -> str:
    """Return why a GPU's kernel takes no parts of documents; "" if it does, or is not used.

    A part has only its last tokens as queries: ranks that share a row gather its keys.
    """
    if device.type != "cuda" or _explain_unsupported_heads(config, dtype):
        return ""
    kernel_args = device, dtype, _head_size(config), _query_heads_per_key_head(config)
    return varlen_attention.varlen_kernel_fault(*kernel_args, queries_are_partial=True)


def _query_heads_per_key_head(config: Any) -> int:
    heads: int = config.num_attention_heads
    return heads // (value_shared_by_layers(config, "num_key_value_heads") or heads)


def explain_expert_loop(dtype: torch.dtype, device: torch.device) -> str:
    """Return why a device multiplies experts in ``dtype`` one by one; "" if it does not."""
    architecture = find_architecture(device)
    if architecture is None or (dtype == torch.bfloat16 and architecture.has_grouped_mm()):
        return ""
    condition = "from compute capability 9.0 on"
    if architecture.gfx:
        condition = "with ROCM_ALLOW_GROUP_GEMM_CK=1 on gfx90a, gfx942 and gfx950"
    name = str(dtype).removeprefix("torch.")
    return f"torch has grouped matmuls in bfloat16 {condition}, this is {name} on {architecture}"


def layer_windows(config: Any) -> list[int | None]:
    """Return the tokens in each layer's sliding window, None for a layer without one."""
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _explain_unsupported_heads(config: Any, dtype: torch.dtype) -> str:
    """Return why the variable-length kernel does not take a model's heads; "" if it does."""
    if dtype not in DTYPES:
        dtype_name = str(dtype).removeprefix("torch.")
        return f"the kernel takes bfloat16 and float16, not {dtype_name}"
    if not isinstance(value_shared_by_layers(config, "num_attention_heads"), int):
        return "its layers differ in their heads"
    size = _head_size(config)
    if size > MAX_HEAD_DIM or size % HEAD_DIM_MULTIPLE:
        return (
            f"the kernel takes heads of up to {MAX_HEAD_DIM} values, in multiples of 8, not {size}"
        )
    return ""


def _head_size(config: Any) -> int:
    """Return the size of a head: the larger one, if values differ from queries and keys."""
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    nope_dim, rope_dim, value_dim = (getattr(config, name, None) or 0 for name in names)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(max(nope_dim + rope_dim, value_dim) or head_dim)


# -- TF32: GPUs multiply fp32 matrices faster with 10 bits of each factor's mantissa instead of 23.


def multiplies_in_tf32(
    train: TrainConfig, dtype: torch.dtype, architecture: GpuArchitecture | None
) -> bool:
    """Whether a model of ``dtype`` uses TF32 matmuls; an ``architecture`` of None is a CPU."""
    is_possible = dtype == torch.float32 and architecture is not None and architecture.has_tf32
    return is_possible and train.tf32 and not train.deterministic


def use_tf32(module: nn.Module) -> None:
    """Multiply fp32 matrices in TF32, except for rotary positions.

    transformers may compute these as a matmul of positions and frequencies, which would be wrong in
    TF32: it has no whole number between 2,048 and 2,050.
    """
    # torch has two interfaces for this; torch.compile reads this one and raises if they are mixed.
    torch.set_float32_matmul_precision("high")
    for part in module.modules():
        if any(name.endswith("inv_freq") for name, _ in part.named_buffers(recurse=False)):
            part.register_forward_pre_hook(_switch_tf32_off)
            part.register_forward_hook(_switch_tf32_on, always_call=True)


def _switch_tf32_off(*_: Any) -> None:
    torch.set_float32_matmul_precision("highest")


def _switch_tf32_on(*_: Any) -> None:
    torch.set_float32_matmul_precision("high")
