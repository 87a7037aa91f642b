"""Weights that are stored in float8 with scales, dequantised as they are read.

    value[r, c] = stored[r, c] * scale[r // rows of a block, c // columns of a block]

One scale for a tensor, one for each row, or one for each block (DeepSeek-V3's form,
arXiv:2412.19437, section 3.3). Checkpoints that are quantised in another way are refused, naming
the method.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpc_tune.errors import DataError, raise_if_out_of_files
from hpc_tune.model.config_json import read_config_json

if TYPE_CHECKING:
    from hpc_tune.model.weights import TensorIndex

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # in config.json or a part of it
_ROWS_AT_ONCE = 128  # as many are multiplied at once, in fp32
_SCALE_SUFFIXES = ("_scale_inv", "_scale")  # behind the weight's name; both are multiplied with
_INPUT_SCALE_SUFFIXES = (".activation_scale", ".input_scale", ".k_scale", ".v_scale")  # of serving


@dataclass(frozen=True)
class Float8Scale:
    """The scales of a matrix, fp32, and how many rows and columns of it each is for."""

    values: torch.Tensor
    rows: int
    columns: int

    def multiply(self, local: torch.Tensor, offset: tuple[int, ...]) -> None:
        """Multiply the region of the matrix that begins at ``offset``, in place."""
        rows = torch.arange(offset[0], offset[0] + local.shape[0]) // self.rows
        columns = torch.arange(offset[1], offset[1] + local.shape[1]) // self.columns
        for first in range(0, len(rows), _ROWS_AT_ONCE):
            part = local[first : first + _ROWS_AT_ONCE]
            part.copy_(part.float() * self.values[rows[first : first + _ROWS_AT_ONCE]][:, columns])


def take_scales(index: "TensorIndex", directory: Path) -> Mapping[str, Float8Scale]:
    """Return the scale of each float8 tensor, and remove scales from the index.

    Such tensors are bf16 in the index from then on.

    Raises:
        DataError: if a float8 tensor has no scale, or one of a shape that does not fit, or is no
        matrix.
    """
    quantised = [name for name, dtype in index.dtypes.items() if dtype in FLOAT8]
    block = read_quantization(directory).get("weight_block_size")
    scales = {}
    for name in quantised:
        if len(index.shapes[name]) > 2:
            raise DataError(
                f"{directory}: {name}: a stack of matrices in float8, {list(index.shapes[name])}: "
                "they are read only where files hold each matrix by itself. Take the model in bf16"
            )
        beside = next((name + end for end in _SCALE_SUFFIXES if name + end in index.shapes), None)
        if beside is None:
            raise DataError(
                f"{directory}: {name} is stored in float8 without a scale, such as "
                f"{name}{_SCALE_SUFFIXES[0]}; take the model in bf16"
            )
        scales[name] = _read_scale(index, directory, name, beside, block)
    for name in quantised:
        index.dtypes[name] = torch.bfloat16
    unused = [n for n in index.shapes if n.endswith(_INPUT_SCALE_SUFFIXES)] if quantised else []
    for name in [*(name + end for name in quantised for end in _SCALE_SUFFIXES), *unused]:
        for table in (index.shapes, index.dtypes, index.pieces):
            table.pop(name, None)
    return scales


def read_quantization(directory: Path) -> dict[str, Any]:
    """Return quantization_config of a directory's config.json, or of a part; empty without one."""
    try:
        config = read_config_json(directory)
    except (OSError, ValueError) as error:
        raise_if_out_of_files(error)
        return {}
    parts = [config, *config.values()] if isinstance(config, dict) else []
    found = [part.get(key) for part in parts if isinstance(part, dict) for key in QUANTIZATION_KEYS]
    return next((settings for settings in found if isinstance(settings, dict)), {})


def refuse_unknown_quantisation(index: "TensorIndex", directory: Path) -> None:
    """Refuse what is quantised in another way than float8 with scales, or MXFP4.

    Raises:
        DataError: naming the method.
    """
    settings = read_quantization(directory)
    method = str(settings.get("quant_method") or "an unknown method")
    marks = (".qweight", ".weight_packed", ".absmax", "_blocks", ".SCB", ".weight_format")
    packed = [
        name
        for name, dtype in index.dtypes.items()
        if name.endswith(marks) or (name.endswith(".weight") and not dtype.is_floating_point)
    ]
    is_read = index.packed or any(dtype in FLOAT8 for dtype in index.dtypes.values())
    if packed:
        raise DataError(
            f"{directory}: its weights are quantised ({method}, such as in {packed[0]}); hpc_tune "
            "trains on bf16, fp16, fp32, float8 and MXFP4 checkpoints. Take the one that it was "
            "made from, with tune.method=qlora if memory is short"
        )
    if settings and not is_read:
        raise DataError(
            f"{directory}/config.json says that weights are quantised ({method}), but none has a "
            "quantised form that is known here. If they are whole, as a tool that merges or "
            "dequantises may leave them, remove quantization_config from it; if not, take the "
            "checkpoint that this one was made from"
        )


def _read_scale(
    index: "TensorIndex", directory: Path, name: str, beside: str, block: Any
) -> Float8Scale:
    rows, columns = (*index.shapes[name], 1)[:2]
    stored = torch.empty(index.shapes[beside], dtype=torch.float32)
    index.fill(stored, beside)
    shape = tuple(stored.shape)
    if stored.numel() == 1:
        return Float8Scale(stored.view(1, 1), rows, columns)
    if shape in ((rows,), (rows, 1)):
        return Float8Scale(stored.view(rows, 1), 1, columns)
    by_block = isinstance(block, list | tuple) and len(block) == 2
    if by_block and shape == (math.ceil(rows / block[0]), math.ceil(columns / block[1])):
        return Float8Scale(stored, *block)
    raise DataError(
        f"{directory}: {beside} has the shape {list(shape)}, which does not fit a matrix of "
        f"{rows} x {columns} in blocks of {block}"
    )
