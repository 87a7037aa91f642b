"""What GPUs reach, for tools/gpu_cost.py: rates of large kernels, not of data sheets.

``matmul``: flop/s of large matmuls that run alone, by dtype. Data sheets promise 989 Tflop/s (bf16)
for an H100, of which cuBLAS reaches about 640 at its power limit with random values; figures of
other cards are scaled likewise where none were published. ``attention``: flop/s of a causal forward
and a backward pass with heads of 128 (FlashAttention 2: arXiv:2307.08691, figure 7). FlashAttention
3, available on Hopper only, is 1.5 to 2 and 1.5 to 1.75 times as fast there, by its paper
(arXiv:2407.08608): ``FLASH_3`` is near the lower ends. ``link_bytes_per_s``: what nccl-tests calls
the bus bandwidth of large messages within a node. None of it was measured by this project.
"""

from dataclasses import dataclass

import torch

_BF16, _FP32 = torch.bfloat16, torch.float32
_FP8 = torch.float8_e4m3fn
MIN_KERNEL_US = 2.0  # of any kernel, however small, until its results can be read
FLASH_3 = (1.6, 1.5)
THIN_SHARE = 0.6  # of the memory's rate: what matmuls with a side of 16 to 64 reach


@dataclass(frozen=True)
class Card:
    """A GPU. ``bytes_per_s``: its memory's rate in large copies, about 90% of the data sheet's.

    ``launch_us``: what the host takes to launch a kernel from Python, autograd included.
    """

    name: str
    bytes_per_s: float
    matmul: dict[torch.dtype, float]
    attention: tuple[float, float]
    link_bytes_per_s: float
    launch_us: float = 7.0

    @property
    def multiplies_e4m3(self) -> bool:
        """Whether it multiplies the float8 type of tune.base_dtype=fp8; AMD's MI300 does not."""
        return _FP8 in self.matmul and self.name != "MI300X"


CARDS = {
    "h100": Card(
        "H100 SXM", 3.0e12, {_BF16: 640e12, _FP8: 1000e12, _FP32: 45e12}, (335e12, 290e12), 350e9
    ),
    "h200": Card(
        "H200", 4.3e12, {_BF16: 640e12, _FP8: 1000e12, _FP32: 45e12}, (335e12, 290e12), 350e9
    ),
    "a100": Card("A100 SXM", 1.8e12, {_BF16: 250e12, _FP32: 17e12}, (190e12, 160e12), 230e9),
    "b200": Card(
        "B200", 7.2e12, {_BF16: 1500e12, _FP8: 2700e12, _FP32: 60e12}, (400e12, 330e12), 700e9
    ),
    "mi300x": Card(
        "MI300X", 4.3e12, {_BF16: 600e12, _FP8: 950e12, _FP32: 90e12}, (300e12, 220e12), 310e9
    ),
}


def matmul_rate(card: Card, dtype: torch.dtype) -> float:
    """Return the flop/s of matmuls in ``dtype``; a card without fp8 units computes it in bf16."""
    if dtype.itemsize == 1:  # both kinds of float8
        dtype = _FP8
    if dtype in card.matmul:
        return card.matmul[dtype]
    return card.matmul[_BF16 if dtype.itemsize <= 2 else _FP32]
