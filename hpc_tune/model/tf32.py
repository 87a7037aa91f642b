"""TF32: GPUs multiply fp32 matrices faster with 10 bits of each factor's mantissa instead of 23."""

from typing import Any

import torch
from torch import nn

from hpc_tune.config.schema import TrainConfig
from hpc_tune.world.architecture import Architecture


def multiplies_in_tf32(
    train: TrainConfig, dtype: torch.dtype, architecture: Architecture | None
) -> bool:
    """Whether a model of ``dtype`` is to be multiplied in TF32 on a GPU; None stands for a CPU."""
    is_possible = dtype == torch.float32 and architecture is not None and architecture.has_tf32
    return is_possible and train.tf32 and not train.deterministic


def use_tf32(module: nn.Module) -> None:
    """Multiply fp32 matrices in TF32, but for those of rotary positions.

    Where transformers computes those as a product of positions and frequencies, they would be
    wrong: TF32 has no whole number between 2,048 and 2,050.
    """
    # The one of torch's two interfaces that torch.compile reads; it raises if they are mixed.
    torch.set_float32_matmul_precision("high")
    for part in module.modules():
        if any(name.endswith("inv_freq") for name, _ in part.named_buffers(recurse=False)):
            part.register_forward_pre_hook(_switch_tf32_off)
            part.register_forward_hook(_switch_tf32_on, always_call=True)


def _switch_tf32_off(*_: Any) -> None:
    torch.set_float32_matmul_precision("highest")


def _switch_tf32_on(*_: Any) -> None:
    torch.set_float32_matmul_precision("high")
