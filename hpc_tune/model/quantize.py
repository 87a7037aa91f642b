"""The 4-bit base of QLoRA (arXiv:2305.14314): NF4 with double quantisation, by bitsandbytes.

    nn.Linear on meta -> FourBitLinear on meta -> (sharded, allocated) -> quantised while it is read

A weight of n values is n / 2 bytes of packed codes, which may be sharded, and the scales of its
blocks of 64 values, about n / 63 bytes, which every rank holds whole.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hpc_tune.errors import ConfigError, first_line
from hpc_tune.model.experts import routers_of
from hpc_tune.model.shapes import ShapeIndex
from hpc_tune.model.weights import PIECE_BYTES, Reserve, TensorIndex, reserve_nothing

BLOCK = 64  # values that share a scale
SCALES_BLOCK = 256  # scales that share a scale of their own


class FourBitLinear(nn.Linear):
    """A frozen linear layer whose ``weight`` holds two 4-bit codes per byte, of shape (n / 2, 1).

    All of its scales are bytes: the fp32 ones are kept as their bits, so that casting a model to
    another dtype leaves them whole. bitsandbytes' own layer hides its scales from the module, where
    the meta device and the count of bytes cannot see them, and on CPUs with AVX512 it evaluates in
    bf16 whatever its dtype is.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        """Take the shape, the bias and the device of ``linear``; ``dtype`` is computed in."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype = dtype
        num_scales = -(-self.num_values // BLOCK)
        sizes = {
            "scales": num_scales,
            "scales_of_scales": 4 * -(-num_scales // SCALES_BLOCK),
            "scales_mean": 4,
            "scales_code": 4 * 256,
        }
        device = linear.weight.device
        packed = torch.empty(-(-self.num_values // 2), 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        for name, size in sizes.items():
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
            self.register_buffer(name, buffer, persistent=False)

    @property
    def num_values(self) -> int:
        """Values of the weight."""
        return self.out_features * self.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias; the backward pass reaches x alone."""
        from bitsandbytes import matmul_4bit

        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        out = matmul_4bit(
            x.to(self.compute_dtype), self.weight, quant_state=self._state(), bias=bias
        )
        return out.to(x.dtype)

    def _state(self) -> Any:
        from bitsandbytes.functional import QuantState

        scales: Any = self._buffers
        return QuantState(
            absmax=scales["scales"],
            shape=torch.Size((self.out_features, self.in_features)),
            blocksize=BLOCK,
            quant_type="nf4",
            dtype=self.compute_dtype,
            offset=scales["scales_mean"].view(torch.float32)[0],
            state2=QuantState(
                absmax=scales["scales_of_scales"].view(torch.float32),
                blocksize=SCALES_BLOCK,
                code=scales["scales_code"].view(torch.float32),
                dtype=torch.float32,
            ),
        )


def quantize_linears(blocks: nn.Module, dtype: torch.dtype) -> None:
    """Replace every linear layer inside of the decoder blocks but routers, on the meta device.

    Raises:
        ConfigError: if bitsandbytes is not installed or cannot be imported.
    """
    require_bitsandbytes()
    routers = set(routers_of(blocks).values())
    for owner in list(blocks.modules()):
        for name, child in list(owner.named_children()):
            if type(child) is nn.Linear and child not in routers:
                setattr(owner, name, FourBitLinear(child, dtype))


def require_bitsandbytes() -> None:
    """Import bitsandbytes, which takes seconds.

    Raises:
        ConfigError: if it is not installed or cannot be imported.
    """
    try:
        import bitsandbytes  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(
            "tune.method=qlora needs bitsandbytes, which cannot be imported "
            f"({first_line(error)}); install it with pip install 'hpc_tune[qlora]', or use "
            "tune.method=lora"
        ) from None


def four_bit_layers(module: nn.Module) -> Iterator[tuple[str, FourBitLinear]]:
    """Yield the 4-bit layers of a model by the name of their weight."""
    for path, layer in module.named_modules():
        if isinstance(layer, FourBitLinear):
            yield f"{path}.weight", layer


def scale_bytes(layer: FourBitLinear) -> int:
    """Return the bytes of a layer's scales."""
    return sum(buffer.numel() for buffer in layer._buffers.values() if buffer is not None)


@torch.no_grad()
def fill_packed(
    layer: FourBitLinear,
    local: torch.Tensor,
    start: int,
    index: TensorIndex | ShapeIndex,
    stored: str,
    reserve: Reserve = reserve_nothing,
) -> None:
    """Read, quantise and pack the weight ``stored``, ``PIECE_BYTES`` of values at a time.

    ``local`` is this rank's part of the packed bytes, from byte ``start`` on. Every rank reads all
    values, since the scales depend on all of them.

    Raises:
        DataError: if the weight has another shape, is NaN or inf, or its file is damaged.
    """
    from bitsandbytes.functional import quantize_4bit, quantize_blockwise

    rows, width = layer.out_features, layer.in_features
    # A piece ends where a block of values ends.
    unit = BLOCK // math.gcd(BLOCK, width)
    step = max(unit, PIECE_BYTES // (4 * width) // unit * unit)
    scales = []
    for first in range(0, rows, step):
        piece = torch.empty(min(step, rows - first), width, dtype=layer.compute_dtype)
        index.fill(piece, stored, (first, 0), reserve)
        index.require_finite(piece, stored, (first, 0))
        packed, state = quantize_4bit(piece.to(local.device), blocksize=BLOCK, quant_type="nf4")
        scales.append(state.absmax)
        at = first * width // 2
        begin, end = max(at, start), min(at + packed.shape[0], start + local.shape[0])
        if begin < end:
            local[begin - start : end - start].copy_(packed[begin - at : end - at])
    all_scales = torch.cat(scales)
    mean = all_scales.mean()
    codes, state = quantize_blockwise(all_scales - mean, blocksize=SCALES_BLOCK)
    for name, values in (
        ("scales", codes),
        ("scales_of_scales", state.absmax),
        ("scales_mean", mean.reshape(1)),
        ("scales_code", state.code),
    ):
        layer.get_buffer(name).copy_(values.contiguous().view(torch.uint8))
