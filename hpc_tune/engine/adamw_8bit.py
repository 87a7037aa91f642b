"""AdamW with moments kept in 8 bits (arXiv:2110.02861), with torchao's blocks, codes and step.

    256 values of a moment as codes and one scale -> fp32 -> a step of AdamW -> codes and a scale

torchao compiles all of that for each parameter shape. Here a table lookup finds the codes, a few
blocks at a time: nothing is compiled, and no temporary is as large as a parameter.

Blocks are cut from this rank's part of a parameter, one after the other. If the rows of a matrix
are a multiple of 256 values, as in most models, no block spans two rows, so shards of rows have the
same blocks as the whole matrix.

Checkpoints hold the moments in fp32, for any layout and any AdamW. Moments that were quantized in
the same blocks are restored bit for bit (``quantize_exactly``); other blocks are quantized again.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hpc_tune.config.schema import OptimConfig
from hpc_tune.engine.activation_checkpoint import disable_dispatch_modes
from hpc_tune.engine.adamw import initial_state, local_tensor, make_adamw, parameter_groups
from hpc_tune.errors import ConfigError, first_line
from hpc_tune.model.build import BuiltModel, LocalRegion
from hpc_tune.model.regions import Region
from hpc_tune.model.tensor_sources import PIECE_BYTES, Box, ReserveFunction, reserve_nothing
from hpc_tune.model.weights import TensorIndex
from hpc_tune.step.size import MOMENT_NAMES, VALUES_PER_8BIT_BLOCK, has_8bit_moments

_BLOCKS_AT_ONCE = 1 << 12  # dequantized at one time: 4 MiB of fp32 of each moment
_MIN_SCALE = 1e-12  # torchao's


def require_torchao() -> None:
    """Import torchao's optimizers, which takes seconds.

    Raises:
        ConfigError: if they are not installed or cannot be imported.
    """
    try:
        import torchao.optim.adam  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"optim.name=adamw_8bit needs torchao, which cannot be imported ({first_line(error)}); "
            "install it with pip install 'hpc_tune[adamw8bit]', or use optim.name=adamw"
        ) from None


def require_single_slices(stage: BuiltModel) -> None:
    """Check that this rank's part of each trained tensor is one region, whose blocks can be saved.

    Raises:
        ConfigError: for fused experts, of which a rank of parallel.tensor has two slices, and for
            adapters on experts spread by parallel.expert, which have a slice per adapter rank.
    """
    for name, parameter in stage.module.named_parameters():
        cut = stage.slices.get(name)
        if cut is not None and cut.num_parts > 1 and parameter.requires_grad:
            raise ConfigError(
                f"optim.name=adamw_8bit with parallel.tensor or parallel.expert > 1: "
                f"{stage.saved_names[name]} is cut into {cut.num_parts} slices for each rank, and "
                "moments in 8 bits need one slice; use parallel.shard or parallel.pipeline, or "
                "optim.name=adamw"
            )


@dataclass(frozen=True)
class CodeTable:
    """What codes mean: the 256 ``values``, ascending, and the lower border of all but the first."""

    values: torch.Tensor
    borders: torch.Tensor

    @classmethod
    def make_on_device(cls, signed: bool, device: torch.device) -> "CodeTable":
        """Return torchao's table on a device."""
        values, borders = _compute_table(signed)
        return cls(torch.tensor(values, device=device), torch.tensor(borders, device=device))


@functools.cache
@disable_dispatch_modes
def _compute_table(signed: bool) -> tuple[list[float], list[float]]:
    """Return torchao's values and the smallest numbers that it maps to the codes 1 to 255.

    torchao's quantization makes eight passes over all values. One lookup among these borders, found
    by bisection over the fp32 numbers, gives the same codes.
    """
    from torchao.optim.quant_utils import create_dynamic_map, quantize_8bit_with_qmap

    values = torch.tensor(create_dynamic_map(signed=signed), dtype=torch.float32)
    low, high = values[:-1].clone(), values[1:].clone()
    codes = torch.arange(1, 256)
    for _ in range(64):
        middle = _midpoints(low, high)
        is_reached = quantize_8bit_with_qmap(middle, values) >= codes
        high = torch.where(is_reached, middle, high)
        low = torch.where(is_reached, low, middle)
    return values.tolist(), high.tolist()


def _midpoints(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return fp32 numbers between ``low`` and ``high``, or ``high`` where there are none."""
    middle = ((low.double() + high.double()) / 2).float()
    return torch.where((middle > low) & (middle < high), middle, high)


@dataclass(frozen=True)
class QuantizedMoment:
    """A moment in blocks of 256 values: codes of shape (blocks, 256), and a scale per block."""

    codes: torch.Tensor
    scales: torch.Tensor
    table: CodeTable

    @classmethod
    def zeros(cls, num_values: int, signed: bool, device: torch.device) -> "QuantizedMoment":
        """Return a moment of zeros."""
        table = CodeTable.make_on_device(signed, device)
        num_blocks = num_values // VALUES_PER_8BIT_BLOCK
        scales = torch.full((num_blocks,), _MIN_SCALE, device=device)
        zero = torch.full((num_blocks, VALUES_PER_8BIT_BLOCK), 127 if signed else 0, device=device)
        return cls(zero.to(torch.uint8), scales, table)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors that hold it in memory."""
        return self.codes, self.scales

    def blocks(self, block_range: slice) -> "QuantizedMoment":
        """Return a view of some blocks."""
        return replace(self, codes=self.codes[block_range], scales=self.scales[block_range])

    def values(self) -> torch.Tensor:
        """Return the fp32 values."""
        return self._dequantize(self.codes, self.scales)

    def quantize(self, values: torch.Tensor) -> None:
        """Quantize ``values``, of shape (blocks, 256)."""
        scales = values.abs().amax(-1).clip(_MIN_SCALE)
        self.codes.copy_(self._nearest_codes(values, scales))
        self.scales.copy_(scales)

    def quantize_exactly(self, values: torch.Tensor) -> None:
        """Quantize what ``values()`` returned, so that it returns the same values again.

        If a block's value of largest magnitude is positive, its code 255 means 1, so it is the
        scale. If negative, its code 0 means -0.993: the scale is their quotient or a neighbor.
        """
        self.quantize(values)
        wrong = (self.values() != values).any(-1)
        largest = values.abs().amax(-1) / -self.table.values[0]
        for scales in (largest, *(torch.nextafter(largest, largest * k) for k in (0, 2))):
            if not wrong.any():
                return
            codes = self._nearest_codes(values, scales)
            fits = wrong & (self._dequantize(codes, scales) == values).all(-1)
            self.codes[fits], self.scales[fits] = codes[fits], scales[fits]
            wrong &= ~fits

    def _nearest_codes(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        scaled_values = values / scales.unsqueeze(-1)
        codes = torch.bucketize(scaled_values, self.table.borders, out_int32=True, right=True)
        return codes.to(torch.uint8)

    def _dequantize(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return self.table.values[codes.int()] * scales.unsqueeze(-1)


class AdamW8Bit(torch.optim.Optimizer):
    """AdamW that quantizes the moments of large parameters between its steps."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient, some blocks at a time."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(group, self.state[parameter], parameter, parameter.grad)


def make_optimizer(
    named_params: Sequence[tuple[str, nn.Parameter]],
    optim: OptimConfig,
    reserve: ReserveFunction = reserve_nothing,
) -> torch.optim.Optimizer:
    """Return the AdamW that optim.name selects, with its state allocated."""
    if not optim.is_8bit:
        return make_adamw(named_params, optim, reserve)
    defaults = {"lr": optim.peak_lr, "betas": (optim.beta1, optim.beta2), "eps": optim.eps}
    optimizer = AdamW8Bit(parameter_groups(named_params, optim), defaults)
    for _, parameter in named_params:
        optimizer.state[parameter] = _initial_state(parameter, reserve)
    return optimizer


def _initial_state(parameter: torch.Tensor, reserve: ReserveFunction) -> dict[str, Any]:
    num_values, device = local_tensor(parameter).numel(), parameter.device
    # By the whole parameter's size, so that every layout makes the same choice.
    is_large = has_8bit_moments(parameter.numel())
    if not is_large or not num_values or num_values % VALUES_PER_8BIT_BLOCK:
        return dict(initial_state(parameter, reserve))
    if device.type == "cpu":
        reserve(len(MOMENT_NAMES) * (num_values + 4 * num_values // VALUES_PER_8BIT_BLOCK))
    state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device=device)}
    for name in MOMENT_NAMES:
        state[name] = QuantizedMoment.zeros(num_values, name == MOMENT_NAMES[0], device)
    return state


def _update(
    group: dict[str, Any], state: dict[str, Any], parameter: torch.Tensor, grad: torch.Tensor
) -> None:
    state["step"] += 1
    average, squares = (state[name] for name in MOMENT_NAMES)
    weights, grads, step = local_tensor(parameter), local_tensor(grad), state["step"]
    if not isinstance(average, QuantizedMoment):
        _take_step(group, step, weights, grads, local_tensor(average), local_tensor(squares))
        return
    weights, grads = weights.view(-1, VALUES_PER_8BIT_BLOCK), grads.view(-1, VALUES_PER_8BIT_BLOCK)
    for start in range(0, len(weights), _BLOCKS_AT_ONCE):
        block_range = slice(start, start + _BLOCKS_AT_ONCE)
        block_moments = [moment.blocks(block_range) for moment in (average, squares)]
        values = [moment.values() for moment in block_moments]
        _take_step(group, step, weights[block_range], grads[block_range], *values)
        for moment, new_values in zip(block_moments, values, strict=True):
            moment.quantize(new_values)


def _take_step(
    group: dict[str, Any],
    step: torch.Tensor,
    weights: torch.Tensor,
    grads: torch.Tensor,
    *moments: torch.Tensor,
) -> None:
    """Update weights and moments in place, with torchao's fp32 arithmetic."""
    from torchao.optim.adam import single_param_adam

    lr, (beta1, beta2) = torch.tensor(group["lr"], dtype=torch.float32), group["betas"]
    rates = lr, beta1, beta2, group["weight_decay"], group["eps"]
    single_param_adam(
        weights, grads, step, *moments, None, *rates, IS_ADAMW=True, BF16_STOCHASTIC_ROUND=False
    )


def moment_regions(name: str, moment: QuantizedMoment, region: LocalRegion) -> Iterator[Region]:
    """Yield the fp32 regions, some rows each, of the part of a moment that ``region`` describes."""
    for number, (box, blocks) in enumerate(_cut_rows(moment, region.box)):
        values = functools.partial(_values_in_shape, blocks, box.shape)
        stored_name = f"{name}:{number}"
        yield Region(name, torch.float32, box, region.full_shape, values, stored_name)


def _values_in_shape(blocks: QuantizedMoment, shape: tuple[int, ...]) -> torch.Tensor:
    return blocks.values().view(shape)


def fill_moment(
    moment: QuantizedMoment,
    region: LocalRegion,
    index: TensorIndex,
    name: str,
    reserve: ReserveFunction = reserve_nothing,
) -> None:
    """Read the part of a moment that ``region`` describes.

    Raises:
        CheckpointError: if the tensor on disk is too small for that part or cannot be read.
    """
    for box, blocks in _cut_rows(moment, region.box):
        values = torch.empty(box.shape, device=moment.codes.device)
        index.fill(values, name, box.offset, reserve)
        blocks.quantize_exactly(values.view(-1, VALUES_PER_8BIT_BLOCK))


def _cut_rows(moment: QuantizedMoment, local_box: Box) -> Iterator[tuple[Box, QuantizedMoment]]:
    """Cut a moment into runs of rows of whole blocks, if possible at most ``PIECE_BYTES`` of fp32.

    ``local_box``: the box of the tensor that this rank has.
    """
    rows, width = local_box.shape[0], math.prod(local_box.shape[1:])
    unit = VALUES_PER_8BIT_BLOCK // math.gcd(VALUES_PER_8BIT_BLOCK, width)
    piece_rows = max(unit, PIECE_BYTES // (4 * width) // unit * unit)
    for start in range(0, rows, piece_rows):
        stop = min(start + piece_rows, rows)
        box = Box(
            (local_box.offset[0] + start, *local_box.offset[1:]),
            (stop - start, *local_box.shape[1:]),
        )
        first, last = (row * width // VALUES_PER_8BIT_BLOCK for row in (start, stop))
        yield box, moment.blocks(slice(first, last))
