"""A frozen base model whose blocks store their weights as packed bytes: 4-bit, or float8.

    nn.Linear on meta -> a packed layer on meta -> (sharded, allocated) -> packed while it is read
    a stack of experts -> a stack of their bytes, and a module that unpacks them

Each kind of layer or stack has ``num_values``, ``compute_dtype``, ``unpack(packed)``, which returns
the values, and ``fill``, which reads and packs what a rank holds.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError, first_line
from hpc_tune.model.config_json import ShapeIndex
from hpc_tune.model.experts import find_expert_modules
from hpc_tune.model.float8 import Float8Linear, Float8Stack
from hpc_tune.model.grouped_experts import (
    can_group_experts,
    stack_names,
    unpacker_module_name,
    use_grouped_experts,
)
from hpc_tune.model.layers import find_blocks, find_unquantized_layers
from hpc_tune.model.tensor_sources import PIECE_BYTES, ReserveFunction, reserve_nothing
from hpc_tune.model.weights import TensorIndex

# -- The 4-bit base of QLoRA (arXiv:2305.14314): NF4 with double quantization, by bitsandbytes.
#
#     nn.Linear on meta -> FourBitLinear on meta -> sharded, allocated -> quantized as it is read
#     a stack of experts -> a stack of their bytes, and a FourBitStack that unpacks them
#
# A weight of n values takes n / 2 bytes of packed codes, which may be sharded, and the scales of
# its blocks of 64 values, about n / 63 bytes, which every rank holds whole. Each expert of a stack
# is quantized by itself and its scales follow its codes, so a rank needs only its own experts.


BLOCK_SIZE = 64  # values that share a scale
SCALES_BLOCK_SIZE = 256  # scales that share a scale of their own
_SCALE_NAMES = ("scales", "scales_of_scales", "scales_mean", "scales_code")
_MAX_KERNEL_VALUES = 1 << 30  # the kernel counts in 32 bits


class FourBitLinear(nn.Linear):
    """A frozen linear layer whose ``weight`` holds two 4-bit codes per byte, of shape (n / 2, 1).

    All of its scales are stored as bytes, fp32 ones bit for bit, so that casting a model to another
    dtype leaves them intact. bitsandbytes' own layer hides its scales outside the module's state,
    unseen by the meta device and by byte counts, and on CPUs with AVX512 it evaluates in bf16
    whatever its dtype is.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        """Take the shape, the bias and the device of ``linear``; compute in ``dtype``."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype = dtype
        num_scales = -(-self.num_values // BLOCK_SIZE)
        sizes = {
            "scales": num_scales,
            "scales_of_scales": 4 * -(-num_scales // SCALES_BLOCK_SIZE),
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
        """The number of values in the weight."""
        return self.out_features * self.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias; only x gets a gradient."""
        from bitsandbytes import matmul_4bit

        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        cast_x = x.to(self.compute_dtype)
        if self.weight.device.type == "cpu" and self.in_features % BLOCK_SIZE:
            out: torch.Tensor = _FourBitMatmul.apply(self, cast_x, self.weight)
            out = out if bias is None else out + bias
        else:
            shape = (self.out_features, self.in_features)
            # Transposed, as bitsandbytes before 0.50 expects it.
            weight_t = self.weight.t()
            out = matmul_4bit(cast_x, weight_t, quant_state=self._quant_state(shape), bias=bias)
        return out.to(x.dtype)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the values of the whole weight.

        They are unpacked as rows of one block each: bitsandbytes' AVX512 kernel finds a row's first
        scale by counting whole blocks per row, and takes wrong ones where a block spans two rows.
        """
        from bitsandbytes.functional import dequantize_4bit

        num_rows = 1 if self.num_values % BLOCK_SIZE else self.num_values // BLOCK_SIZE
        state = self._quant_state((num_rows, self.num_values // num_rows))
        return dequantize_4bit(packed, state).view(self.out_features, self.in_features)

    @torch.no_grad()
    def fill(
        self,
        local_tensor: torch.Tensor,
        offset: tuple[int, ...],
        index: TensorIndex | ShapeIndex,
        stored_name: str,
        reserve: ReserveFunction = reserve_nothing,
    ) -> None:
        """Read, quantize and pack the weight ``stored_name``.

        ``local_tensor`` holds this rank's packed bytes, from ``offset`` on. Every rank reads all
        values, since the scales depend on all of them.

        Raises:
            DataError: if the weight is too small, has NaN or inf, or its file is damaged.
        """
        start, scales = offset[0], []
        matrix = _StoredMatrix(index, stored_name, self.out_features, self.in_features)
        for place, codes, absmax in matrix.quantize_pieces(
            self.compute_dtype, local_tensor.device, reserve
        ):
            scales.append(absmax)
            begin, end = (
                max(place, start),
                min(place + codes.shape[0], start + local_tensor.shape[0]),
            )
            if begin < end:
                local_tensor[begin - start : end - start].copy_(codes[begin - place : end - place])
        values = _quantize_scales(torch.cat(scales))
        for name, value in zip(_SCALE_NAMES, values, strict=True):
            self.get_buffer(name).copy_(value)

    def _quant_state(self, shape: tuple[int, int]) -> Any:
        from bitsandbytes.functional import QuantState

        scales: Any = self._buffers
        return QuantState(
            absmax=scales["scales"],
            shape=torch.Size(shape),
            blocksize=BLOCK_SIZE,
            quant_type="nf4",
            dtype=self.compute_dtype,
            offset=scales["scales_mean"].view(torch.float32)[0],
            state2=QuantState(
                absmax=scales["scales_of_scales"].view(torch.float32),
                blocksize=SCALES_BLOCK_SIZE,
                code=scales["scales_code"].view(torch.float32),
                dtype=torch.float32,
            ),
        )


class _FourBitMatmul(torch.autograd.Function):
    """x @ weight.T with a packed weight, which is unpacked again in each pass and not kept."""

    @staticmethod
    def forward(
        ctx: Any, layer: FourBitLinear, x: torch.Tensor, packed: torch.Tensor
    ) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(packed)
        return F.linear(x, layer.unpack(packed))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        [packed] = ctx.saved_tensors
        return None, grad @ ctx.layer.unpack(packed), None


class FourBitStack(nn.Module):
    """The format of a packed stack of experts; the bytes stay the experts' own parameter.

    The bytes are E x 1 x ``expert_bytes``. A row holds two codes per byte, padded to a whole block;
    one byte per block for its scale; then in fp32 a scale for each 256 of these, and their mean.
    """

    def __init__(self, stack: torch.Tensor, dtype: torch.dtype) -> None:
        """Take the shape and device of ``stack``; compute in ``dtype``."""
        super().__init__()
        self.shape, self.compute_dtype = stack.shape, dtype
        self.num_scales = -(-stack[0].numel() // BLOCK_SIZE)
        num_groups = -(-self.num_scales // SCALES_BLOCK_SIZE)
        self.section_bytes = (self.num_scales * BLOCK_SIZE // 2, self.num_scales, 4 * num_groups, 4)
        code = torch.empty(4 * 256, dtype=torch.uint8, device=stack.device)
        self.register_buffer("scales_code", code, persistent=False)

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert, rounded up to a multiple of 16."""
        return -(-sum(self.section_bytes) // 16) * 16

    @property
    def packed_shape(self) -> tuple[int, int, int]:
        """Shape of the packed bytes."""
        return self.shape[0], 1, self.expert_bytes

    @property
    def num_values(self) -> int:
        """The number of values in the stack."""
        return self.shape.numel()

    def unpack(self, packed_E1N: torch.Tensor) -> torch.Tensor:
        """Return the values of the experts in ``packed_E1N``: the whole stack or some of it."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        codes, scales, outer_scales, mean, *_ = packed_E1N[:, 0].split(
            [*self.section_bytes, self.expert_bytes - sum(self.section_bytes)], dim=1
        )
        code = self.get_buffer("scales_code").view(torch.float32)
        scales_EB = code[scales.int()]
        outer_scales_EB = _view_as_fp32(outer_scales).repeat_interleave(SCALES_BLOCK_SIZE, 1)[
            :, : self.num_scales
        ]
        scales_EB = scales_EB.mul_(outer_scales_EB).add_(_view_as_fp32(mean))
        step = max(1, _MAX_KERNEL_VALUES // (self.num_scales * BLOCK_SIZE))
        experts = [
            dequantize_4bit(
                piece_EN.reshape(-1, 1),
                QuantState(
                    scales_EB[first : first + step].flatten(),
                    shape=torch.Size((len(piece_EN), self.num_scales * BLOCK_SIZE)),
                    blocksize=BLOCK_SIZE,
                    quant_type="nf4",
                    dtype=self.compute_dtype,
                ),
            )
            for first, piece_EN in zip(range(0, len(codes), step), codes.split(step), strict=True)
        ]
        out_EN = experts[0] if len(experts) == 1 else torch.cat(experts)
        return out_EN[:, : self.shape[1] * self.shape[2]].reshape(-1, *self.shape[1:])

    @torch.no_grad()
    def fill(
        self,
        local_tensor: torch.Tensor,
        offset: tuple[int, ...],
        index: TensorIndex | ShapeIndex,
        stored_name: str,
        reserve: ReserveFunction = reserve_nothing,
    ) -> None:
        """Read, quantize and pack the stack ``stored_name``.

        ``local_tensor`` holds the packed bytes of this rank's experts, from ``offset`` on.

        Raises:
            DataError: as ``FourBitLinear.fill`` does.
        """
        for i in range(len(local_tensor)):
            matrix = _StoredMatrix(
                index, stored_name, self.shape[1], self.shape[2], (offset[0] + i,)
            )
            row, scales = local_tensor[i, 0].zero_(), []
            for position, codes, absmax in matrix.quantize_pieces(
                self.compute_dtype, local_tensor.device, reserve
            ):
                scales.append(absmax)
                row[position : position + len(codes)].copy_(codes.flatten())
            *parts, _ = _quantize_scales(torch.cat(scales))
            position = self.section_bytes[0]
            for values in parts:
                row[position : position + len(values)].copy_(values)
                position += len(values)
        # The table is the same for any scales.
        *_, code = _quantize_scales(torch.ones(1, device=local_tensor.device))
        self.get_buffer("scales_code").copy_(code)


def _view_as_fp32(bytes_EN: torch.Tensor) -> torch.Tensor:
    return bytes_EN.clone().view(torch.float32)  # the copy is aligned for fp32


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


@dataclass(frozen=True)
class _StoredMatrix:
    """A stored matrix, or one of a stored stack, in which ``stack_index`` is (its index,)."""

    index: TensorIndex | ShapeIndex
    stored_name: str
    num_rows: int
    num_columns: int
    stack_index: tuple[int, ...] = ()

    def quantize_pieces(
        self, dtype: torch.dtype, device: torch.device, reserve: ReserveFunction
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Read about ``PIECE_BYTES`` at a time; yield a piece's place, its packed codes and scales.

        The place is that of its first byte among the packed bytes of the whole matrix.

        Raises:
            DataError: if values are missing, NaN or inf, or their file is damaged.
        """
        from bitsandbytes.functional import quantize_4bit

        # Pieces end at the ends of blocks.
        unit = BLOCK_SIZE // math.gcd(BLOCK_SIZE, self.num_columns)
        step = max(unit, PIECE_BYTES // (4 * self.num_columns) // unit * unit)
        for first in range(0, self.num_rows, step):
            shape = (
                *(1 for _ in self.stack_index),
                min(step, self.num_rows - first),
                self.num_columns,
            )
            piece, offset = torch.empty(shape, dtype=dtype), (*self.stack_index, first, 0)
            self.index.fill(piece, self.stored_name, offset, reserve)
            self.index.require_finite(piece, self.stored_name, offset)
            codes, state = quantize_4bit(piece.to(device), blocksize=BLOCK_SIZE, quant_type="nf4")
            yield first * self.num_columns // 2, codes, state.absmax


def _quantize_scales(scales: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Quantize scales; return the bytes of their codes, scales, mean and code table."""
    from bitsandbytes.functional import quantize_blockwise

    mean = scales.mean()
    codes, state = quantize_blockwise(scales - mean, blocksize=SCALES_BLOCK_SIZE)
    parts = (codes, state.absmax, mean.reshape(1), state.code)
    return tuple(values.contiguous().view(torch.uint8) for values in parts)


# -- Both kinds of packed bases.


PackedLinear = FourBitLinear | Float8Linear
PackedStack = FourBitStack | Float8Stack
PackedLayer = PackedLinear | PackedStack


def pack_base(model: Any, tune: TuneConfig, dtype: torch.dtype) -> None:
    """Pack the frozen weights of the decoder blocks, on the meta device.

    Call it after peft, which looks at the shapes of whole weights. It packs all linear layers
    except ``find_unquantized_layers``, and stacks of experts that ``grouped_experts`` computes.

    Raises:
        ConfigError: if bitsandbytes is needed, but is not installed or cannot be imported.
    """
    in_4_bits = tune.method == "qlora"
    if in_4_bits:
        require_bitsandbytes()
    blocks = find_blocks(model)
    plain_layers = find_unquantized_layers(model, blocks)
    for owner in list(blocks.modules()):
        for name, child in list(owner.named_children()):
            if (
                type(child) is nn.Linear
                and not child.weight.requires_grad
                and child not in plain_layers
            ):
                layer_class = FourBitLinear if in_4_bits else Float8Linear
                setattr(owner, name, layer_class(child, dtype))
    # Some families (Jamba) read a layer's weight directly, unless the config says, as for models
    # that transformers has quantized, that the weight is not a plain matrix.
    model.config._is_quantized = True
    for experts in filter(can_group_experts, blocks.modules()):
        for name in stack_names(experts):
            values = experts.get_parameter(name)
            stack = FourBitStack(values, dtype) if in_4_bits else Float8Stack(values, dtype)
            experts.add_module(unpacker_module_name(name), stack)
            packed = torch.empty(stack.packed_shape, dtype=torch.uint8, device="meta")
            experts.register_parameter(name, nn.Parameter(packed, requires_grad=False))
    use_grouped_experts(blocks)


def find_packed_weights(module: nn.Module) -> Iterator[tuple[str, PackedLayer]]:
    """Yield the name of each packed weight of a model, with the layer that unpacks it."""
    for path, layer in module.named_modules():
        if isinstance(layer, PackedLinear):
            yield f"{path}.weight", layer
        elif isinstance(layer, PackedStack):
            yield path.removesuffix(unpacker_module_name("")), layer


def unpack_linears(module: nn.Module) -> nn.Module:
    """Replace packed linear layers by plain ones of the same values; return the module."""
    packed_layers = [(path, m) for path, m in module.named_modules() if isinstance(m, PackedLinear)]
    for path, layer in packed_layers:
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        plain.weight = nn.Parameter(layer.unpack(layer.weight), requires_grad=False)
        plain.bias = layer.bias
        module.set_submodule(path, plain)
    return module


def unpacked_stack_bytes(module: nn.Module) -> int:
    """Return the bytes of frozen experts that are not packed, because they are not decorated."""
    params = (p for _, part in find_expert_modules(module) for p in part.parameters(recurse=False))
    return sum(p.nbytes for p in params if not p.requires_grad and p.is_floating_point())


def scale_bytes(layer: PackedLayer) -> int:
    """Return the bytes of a layer's scales that are stored outside its packed bytes."""
    return sum(buffer.numel() for buffer in layer._buffers.values() if buffer is not None)
