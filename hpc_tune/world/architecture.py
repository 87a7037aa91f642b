"""What a GPU can compute, by its architecture: every question of capability is asked here.

torch reports a compute capability for AMD's GPUs too, which is the number of their architecture:
MI250X (gfx90a) has 9.0, as Hopper has, and none of what Hopper brought. So NVIDIA's are known by
capability, AMD's by name.

                     NVIDIA since     AMD
    bf16             8.0              gfx908, gfx90a, gfx942, gfx950 and the later desktop ones
    fp16             7.0              those with bf16, gfx900, gfx906 and gfx10
    TF32             8.0              none
    varlen attention 8.0              gfx90a, gfx942, gfx950, gfx1100, gfx1201 (tried before use)
    float8 products  8.9              gfx942, gfx950, gfx1200, gfx1201 (torch._scaled_mm)
    grouped products 9.0, in bf16     gfx90a, gfx942, gfx950 if ROCM_ALLOW_GROUP_GEMM_CK=1, in bf16
    the same bits    all              none: rocBLAS may add up in any order

Sources: torch/testing/_internal/common_cuda.py of torch 2.13 for attention and float8,
https://github.com/pytorch/pytorch/pull/171140 for grouped products of AMD.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_WITH_BF16 = ("gfx908", "gfx90a", "gfx942", "gfx950", "gfx11", "gfx12")
_WITH_FP16 = (*_WITH_BF16, "gfx900", "gfx906", "gfx10")
_WITH_ATTENTION = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
_WITH_FLOAT8 = ("gfx942", "gfx950", "gfx1200", "gfx1201")
_WITH_GROUPED_MM = ("gfx90a", "gfx942", "gfx950")
# FlashAttention 3 and 4, which torch calls in the place of its own kernel: module and package.
NEWER_ATTENTION = {
    "FA3": ("flash_attn_interface", "flash-attn-3"),
    "FA4": ("flash_attn.cute.interface", "flash-attn-4"),
}
_GROUPED_MM_VARIABLE = "ROCM_ALLOW_GROUP_GEMM_CK"


@dataclass(frozen=True)
class Architecture:
    """The architecture of a GPU: NVIDIA's by ``capability``, AMD's by the name ``gfx``."""

    capability: tuple[int, int] | None = None
    gfx: str = ""

    def __str__(self) -> str:
        """Return it in words."""
        if self.capability is None:
            return f"architecture {self.gfx}"
        return f"compute capability {self.capability[0]}.{self.capability[1]}"

    @property
    def has_bf16(self) -> bool:
        """Whether it computes in bf16, and not by way of fp32."""
        return self._is_supported((8, 0), _WITH_BF16)

    @property
    def has_fp16(self) -> bool:
        """Whether it computes in fp16 faster than in fp32."""
        return self._is_supported((7, 0), _WITH_FP16)

    @property
    def has_deterministic_matmul(self) -> bool:
        """Whether a product of matrices has the same bits each time.

        cuBLAS promises that for one stream
        (https://docs.nvidia.com/cuda/cublas/#results-reproducibility).
        """
        return self.capability is not None

    @property
    def has_tf32(self) -> bool:
        """Whether it multiplies fp32 matrices as TF32 where torch is set to."""
        return self._is_supported((8, 0), ())

    @property
    def has_varlen_attention(self) -> bool:
        """Whether torch's variable-length kernel is made for it."""
        return self._is_supported((8, 0), _WITH_ATTENTION)

    @property
    def newer_attention(self) -> tuple[str, ...]:
        """Which of ``NEWER_ATTENTION`` are made for it, the best first; none on AMD's."""
        if self.capability is None:
            return ()
        return {9: ("FA3", "FA4"), 10: ("FA4",)}.get(self.capability[0], ())

    @property
    def has_float8(self) -> bool:
        """Whether it multiplies matrices in float8."""
        return self._is_supported((8, 9), _WITH_FLOAT8)

    def has_grouped_mm(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether torch has one kernel for the bf16 products of many experts."""
        is_allowed = self.capability is not None or environ.get(_GROUPED_MM_VARIABLE) == "1"
        return is_allowed and self._is_supported((9, 0), _WITH_GROUPED_MM)

    def _is_supported(self, since: tuple[int, int], names: tuple[str, ...]) -> bool:
        if self.capability is not None:
            return self.capability >= since
        return self.gfx.startswith(names)


def find_architecture(device: "torch.device") -> Architecture | None:
    """Return that of a GPU; None for a CPU."""
    import torch

    if device.type != "cuda":
        return None
    if torch.version.hip is None:
        return Architecture(torch.cuda.get_device_capability(device))
    # Such as gfx90a:sramecc+:xnack-.
    name: str = torch.cuda.get_device_properties(device).gcnArchName
    return Architecture(gfx=name.partition(":")[0])
