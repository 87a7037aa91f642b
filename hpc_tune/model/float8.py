"""float8: a frozen base in 8 bits (tune.base_dtype=fp8), and matmuls in float8 (train.float8).

A frozen base has float8 values, with a scale for each row.

    w_OI = scale_O * code_OI    codes in e4m3, |code| <= 448; scale: the least power of two for that

Scaling by powers of two is exact, so values are the same in bf16 and fp32, and rounded only once. A
row's scale is stored behind its codes, so whoever holds a row can dequantize it: weights are
sharded by rows, and a rank reads only the rows that it keeps.

On a GPU with float8 matmuls, these are used: the rows of the input (in the backward pass, of the
gradient) are scaled and cast like the rows of the weight, and the result is multiplied by both
scales (arXiv:2209.05433 for the formats, arXiv:2405.18710 for scales of rows). Elsewhere the weight
is dequantized for each matmul, and nothing else is rounded to float8.

Shapes: N tokens of all rows, I and O features in and out, E experts, C bytes of a row.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hpc_tune.errors import ConfigError, first_line
from hpc_tune.model.config_json import ShapeIndex
from hpc_tune.model.tensor_sources import PIECE_BYTES, ReserveFunction, reserve_nothing
from hpc_tune.model.weights import TensorIndex, adapted_layer
from hpc_tune.world.device import find_architecture

FLOAT8_DTYPE = torch.float8_e4m3fn
_MAX_CODE = torch.finfo(FLOAT8_DTYPE).max
_MANTISSA_MASK = (1 << 23) - 1  # the bits of an fp32 that are not sign or exponent
_SCALE_BYTES = 16  # the fp32 scale, four times: keeps rows of codes aligned for float8 matmuls
_DIM_ALIGNMENT = 16  # float8 matmuls need both dimensions of a weight to be multiples of this
_MIN_ROW_MAX = 2.0**-100  # lower bound for the largest value of a row
MAX_TRIAL_ERROR = 0.01  # error relative to the norm: results are rounded to bf16


class Float8Linear(nn.Linear):
    """A frozen linear layer whose ``weight`` holds the bytes of its rows, O x C."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        """Take shape, bias and device from ``linear``; ``dtype`` is that of computation."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.compute_dtype = dtype
        self.multiplies_float8 = False
        packed_weight = torch.empty(
            self.out_features,
            _row_bytes(self.in_features),
            dtype=torch.uint8,
            device=linear.weight.device,
        )
        self.weight = nn.Parameter(packed_weight, requires_grad=False)
        self.bias = linear.bias

    @property
    def num_values(self) -> int:
        """Number of values of the weight."""
        return self.out_features * self.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias; only x gets a gradient."""
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        cast_x = x.to(self.compute_dtype)
        out: torch.Tensor = _Float8Matmul.apply(self, cast_x, self.weight, bias)
        return out.to(x.dtype)

    def unpack(self, packed_OC: torch.Tensor) -> torch.Tensor:
        """Return the values of the weight, O x I, or of some of its rows."""
        return _dequantize_packed_weight(packed_OC, self.in_features, self.compute_dtype)

    def linear_output(
        self, rows: "Float8Rows", packed_OC: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiply float8 rows by the weight; return N x O."""
        codes_OI, scales_O1 = _split_packed_weight(packed_OC, self.in_features)
        return _scaled_matmul(rows, codes_OI.t(), scales_O1.t(), self.compute_dtype, bias)

    def input_gradient(self, grad_NO: torch.Tensor, packed_OC: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the input, N x I, from that of the output, N x O.

        The scales of the weight's rows vary along the features that are summed over, so the
        output's gradient is multiplied by them before it is cast.
        """
        codes_OI, scales_O1 = _split_packed_weight(packed_OC, self.in_features)
        rows = quantize_float8_rows(_multiply_by_powers_of_two(grad_NO, scales_O1.t()))
        ones_1I = scales_O1.new_ones(1, self.in_features)
        columns = codes_OI.t().contiguous().t()  # hardware reads along the summed dimension
        return _scaled_matmul(rows, columns, ones_1I, self.compute_dtype)

    @torch.no_grad()
    def fill(
        self,
        local_tensor: torch.Tensor,
        offset: tuple[int, ...],
        index: TensorIndex | ShapeIndex,
        stored_name: str,
        reserve: ReserveFunction = reserve_nothing,
    ) -> None:
        """Fill ``local_tensor`` with packed rows of ``stored_name``, from row ``offset[0]`` on.

        Raises:
            DataError: if the weight lacks these rows or has NaN or inf, or its file is damaged.
        """
        _fill_rows(local_tensor, (), offset[0], self.in_features, index, stored_name, reserve)


class Float8Stack(nn.Module):
    """Unpacks the bytes of a stack of experts, E x O x C, which stay a parameter of the experts."""

    def __init__(self, stack: torch.Tensor, dtype: torch.dtype) -> None:
        """Take the shape of ``stack``; ``dtype`` is that of computation."""
        super().__init__()
        self.shape, self.compute_dtype = stack.shape, dtype

    @property
    def packed_shape(self) -> tuple[int, int, int]:
        """Shape of the bytes."""
        return *self.shape[:2], _row_bytes(self.shape[2])

    @property
    def num_values(self) -> int:
        """Number of values of the stack."""
        return self.shape.numel()

    def unpack(self, packed_EOC: torch.Tensor) -> torch.Tensor:
        """Return the values of a stack, or of some of its experts."""
        return _dequantize_packed_weight(packed_EOC, self.shape[2], self.compute_dtype)

    @torch.no_grad()
    def fill(
        self,
        local_tensor: torch.Tensor,
        offset: tuple[int, ...],
        index: TensorIndex | ShapeIndex,
        stored_name: str,
        reserve: ReserveFunction = reserve_nothing,
    ) -> None:
        """Fill ``local_tensor`` with packed experts of ``stored_name``, from ``offset[0]`` on.

        Raises:
            DataError: as ``Float8Linear.fill`` does.
        """
        for i in range(len(local_tensor)):
            matrix_index = (offset[0] + i,)
            _fill_rows(local_tensor[i], matrix_index, 0, self.shape[2], index, stored_name, reserve)


class Float8Rows:
    """Rows in float8, N x K, and the scale of each, N x 1."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.codes, self.scales = codes, scales


def quantize_float8_rows(values_NK: torch.Tensor) -> Float8Rows:
    """Scale each row to the range of float8 and cast it."""
    largest_N1 = torch.linalg.vector_norm(
        values_NK, float("inf"), dim=1, keepdim=True, dtype=torch.float32
    )
    least_N1 = largest_N1.clamp(min=_MIN_ROW_MAX) / _MAX_CODE
    # Round up to a power of two: a nonzero mantissa carries into the exponent.
    bits_N1 = (least_N1.view(torch.int32) + _MANTISSA_MASK) & ~_MANTISSA_MASK
    scales_N1 = bits_N1.view(torch.float32)
    return Float8Rows(
        _multiply_by_powers_of_two(values_NK, scales_N1.reciprocal()).to(FLOAT8_DTYPE), scales_N1
    )


def use_float8_matmuls(blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Let each ``Float8Linear`` in ``blocks`` multiply in float8 if the device can.

    Layers with a dimension that is not a multiple of 16 are left out: the hardware requires
    multiples.
    """
    layers = [m for block in blocks for m in block.modules() if isinstance(m, Float8Linear)]
    if not layers or explain_missing_float8_matmuls(device, layers[0].compute_dtype):
        return
    for layer in layers:
        layer.multiplies_float8 = _has_aligned_dims(layer)


def _has_aligned_dims(layer: nn.Linear) -> bool:
    return all(dim % _DIM_ALIGNMENT == 0 for dim in (layer.in_features, layer.out_features))


@functools.cache
def explain_missing_float8_matmuls(device: torch.device, dtype: torch.dtype) -> str:
    """Return why a device does not multiply in float8; "" if it does and a trial was right."""
    architecture = find_architecture(device)
    if architecture is None:
        return "this device is not a GPU"
    if not architecture.has_float8:
        return f"{architecture} has no float8 matmuls"
    if architecture.gfx.startswith("gfx94"):
        return f"{architecture} has another float8 format (e4m3fnuz)"
    if dtype == torch.float32:
        return "model.dtype=fp32"
    try:
        gap = measure_float8_error(device, dtype)
    except Exception as error:  # noqa: BLE001 - a torch or a driver without these matmuls
        return f"float8 matmuls fail here ({first_line(error)})"
    return "" if gap <= MAX_TRIAL_ERROR else f"float8 matmuls are off by {gap:.1e} of the norm here"


def measure_float8_error(device: torch.device, dtype: torch.dtype) -> float:
    """Return the error of float8 matmuls against fp32 ones of the same values, by the norm."""
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(shape, generator=generator) for shape in ((48, 64), (32, 64), (48, 32))]
    x_NI, w_OI, grad_NO = (values.to(device, dtype) for values in samples)
    layer = Float8Linear(nn.Linear(64, 32, bias=False, device=device, dtype=dtype), dtype)
    layer.weight.data.copy_(pack_float8(w_OI))
    rows = quantize_float8_rows(x_NI)
    values_OI = _dequantize_packed_weight(layer.weight, 64, torch.float32)
    _, scales_O1 = _split_packed_weight(layer.weight, 64)
    grads = quantize_float8_rows(_multiply_by_powers_of_two(grad_NO, scales_O1.t()))
    exact = (
        _dequantize_rows(rows) @ values_OI.t(),
        _dequantize_rows(grads) @ (values_OI / scales_O1),
    )
    results = layer.linear_output(rows, layer.weight), layer.input_gradient(grad_NO, layer.weight)
    gaps = [
        (result.float() - expected).norm() / expected.norm()
        for result, expected in zip(results, exact, strict=True)
    ]
    return float(torch.stack(gaps).max())


def pack_float8(values_OI: torch.Tensor) -> torch.Tensor:
    """Quantize rows of values; return their bytes."""
    rows = quantize_float8_rows(values_OI.float())
    num_rows, width = values_OI.shape
    packed_weight = values_OI.new_zeros(num_rows, _row_bytes(width), dtype=torch.uint8)
    packed_weight[:, :width] = rows.codes.view(torch.uint8)
    packed_weight[:, -_SCALE_BYTES:].view(torch.float32).copy_(
        rows.scales.expand(-1, _SCALE_BYTES // 4)
    )
    return packed_weight


class _Float8Matmul(torch.autograd.Function):
    """x @ weight.T + bias for a packed weight."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: Float8Linear,
        x: torch.Tensor,
        packed_OC: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(packed_OC)
        if not layer.multiplies_float8:
            return F.linear(x, layer.unpack(packed_OC), bias)
        out_NO = layer.linear_output(quantize_float8_rows(x.flatten(0, -2)), packed_OC, bias)
        return out_NO.view(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        [packed_OC], layer = ctx.saved_tensors, ctx.layer
        if not layer.multiplies_float8:
            return None, grad @ layer.unpack(packed_OC), None, None
        grad_NI = layer.input_gradient(grad.flatten(0, -2), packed_OC)
        return None, grad_NI.view(*grad.shape[:-1], layer.in_features), None, None


def _scaled_matmul(
    rows: Float8Rows,
    codes_KO: torch.Tensor,
    scales_1O: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    if len(rows.codes) == 0:
        return rows.codes.new_zeros(0, codes_KO.shape[1], dtype=dtype)
    matmul: Callable[..., torch.Tensor] = torch._scaled_mm
    return matmul(
        rows.codes,
        codes_KO,
        scale_a=rows.scales,
        scale_b=scales_1O.contiguous(),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def _row_bytes(width: int) -> int:
    return -(-width // _DIM_ALIGNMENT) * _DIM_ALIGNMENT + _SCALE_BYTES


def _split_packed_weight(
    packed_weight: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and the scales of rows of ``width`` values, both as views."""
    codes = packed_weight[..., :width].view(FLOAT8_DTYPE)
    return codes, packed_weight[..., -_SCALE_BYTES:].view(torch.float32)[..., :1]


def _dequantize_packed_weight(
    packed_weight: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    codes, scales = _split_packed_weight(packed_weight, width)
    return _multiply_by_powers_of_two(codes.to(dtype), scales)


def _multiply_by_powers_of_two(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply by powers of two, which is exact in each dtype."""
    return values * scales.to(values.dtype)


def _dequantize_rows(rows: Float8Rows) -> torch.Tensor:
    return rows.codes.float() * rows.scales


def _fill_rows(
    local_tensor: torch.Tensor,
    matrix_index: tuple[int, ...],
    start: int,
    width: int,
    index: TensorIndex | ShapeIndex,
    stored_name: str,
    reserve: ReserveFunction,
) -> None:
    """Fill ``local_tensor`` with rows from ``start`` on of a stack's matrix ``matrix_index``."""
    step = max(1, PIECE_BYTES // (4 * width))
    for first in range(0, len(local_tensor), step):
        num_rows = min(step, len(local_tensor) - first)
        piece = torch.empty((*(1 for _ in matrix_index), num_rows, width), dtype=torch.float32)
        offset = (*matrix_index, start + first, 0)
        index.fill(piece, stored_name, offset, reserve)
        index.require_finite(piece, stored_name, offset)
        local_tensor[first : first + num_rows].copy_(
            pack_float8(piece.view(num_rows, width).to(local_tensor.device))
        )


# -- float8 matmuls by torchao (train.float8), with a base that is not stored in 8 bits.
#
# Weights and activations are scaled and cast for each matmul. Only the base's linear layers inside
# the decoder blocks are converted: adapters are too small to gain from it, and the output head is
# too sensitive to rounding. Weights do not change in memory or in checkpoints.


def check_float8(device: torch.device) -> None:
    """Check that this rank's device and installation can compute in float8.

    Raises:
        ConfigError: if they cannot, with what to do.
    """
    advice = "set train.float8=false (model.dtype=bf16 is the fastest that it can do)"
    requirement = (
        "train.float8=true needs a GPU with float8 matmuls (NVIDIA's H100, L40, RTX 40 or later, "
        "AMD's MI300 or later)"
    )
    architecture = find_architecture(device)
    if architecture is None:
        raise ConfigError(f"{requirement}, and this rank computes on {device}; {advice}")
    if not architecture.has_float8:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"{requirement}; {name} has {architecture}; {advice}")
    try:
        import torchao.float8  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"train.float8=true needs torchao, which cannot be imported ({first_line(error)}); "
            "install it with pip install 'hpc_tune[float8]', or set train.float8=false"
        ) from None


def convert_to_torchao_float8(
    blocks: Sequence[nn.Module], excluded_layers: Collection[nn.Module] = (), emulate: bool = False
) -> int:
    """Convert the blocks' base layers to float8 matmuls; return the number of converted layers.

    ``excluded_layers`` (``find_unquantized_layers``) are skipped: routers among them would choose
    experts by 8-bit scores. So are layers with a dimension that is not a multiple of 16. Works on
    the meta device and inside peft's layers, and does not rename parameters. ``emulate`` rounds to
    float8 without the hardware, for tests.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    # Padding is for eager matmuls with an odd number of tokens; compiled ones need none, since they
    # do not compute the gradient of a frozen weight.
    config = Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    for block in blocks:
        convert_to_float8_training(
            block,
            module_filter_fn=lambda module, name: (
                module not in excluded_layers and _is_convertible_linear(module, name)
            ),
            config=config,
        )
    return sum(isinstance(m, Float8Linear) for block in blocks for m in block.modules())


def _is_convertible_linear(module: nn.Module, name: str) -> bool:
    return type(module) is nn.Linear and not adapted_layer(name) and _has_aligned_dims(module)
