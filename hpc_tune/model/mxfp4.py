"""Stacks of experts in MXFP4, dequantised as they are read: gpt_oss's published files.

    NAME_blocks uint8 [E, O, G, 16]   two values of 4 bits in a byte, the low ones first
    NAME_scales uint8 [E, O, G]       one power of two for each 32 values, with 127 added
    NAME        bf16  [E, 32 G, O]    what transformers makes of them

E experts, O outputs, G groups of 32 inputs. The format: OCP Microscaling Formats (MX) 1.0, section
5.3; the order of the values: ``transformers.integrations.mxfp4.convert_moe_packed_tensors``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpc_tune.errors import DataError
from hpc_tune.model.box import Box

if TYPE_CHECKING:
    from hpc_tune.model.weights import Piece, TensorIndex

BLOCKS, _SCALES = "_blocks", "_scales"
_BLOCK_VALUES, _BLOCK_BYTES = 32, 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
# The values of each byte, 256 x 2.
_PAIRS = torch.cartesian_prod(*[torch.tensor([*_MAGNITUDES, *(-v for v in _MAGNITUDES)])] * 2).flip(
    1
)


@dataclass(frozen=True)
class Mxfp4Stack:
    """Where the blocks and the scales of a stack are in the files."""

    blocks: "Piece"
    scales: "Piece"

    def parts_of(self, wanted: Box, num_bytes: int) -> list[Box]:
        """Cut a region of the stack into such that take ``num_bytes`` each while they are read."""
        (expert, column, row), (num_experts, columns, num_rows) = wanted.offset, wanted.shape
        rows = max(1, num_bytes // (12 * (columns + 2 * _BLOCK_VALUES)))
        return [
            Box((e, column, first), (1, columns, min(rows, row + num_rows - first)))
            for e in range(expert, expert + num_experts)
            for first in range(row, row + num_rows, rows)
        ]

    def read(self, part: Box, stored: Callable[["Piece", Box], torch.Tensor]) -> torch.Tensor:
        """Return a part of the stack in fp32; ``stored`` reads boxes of what the files hold."""
        (expert, column, row), (_, columns, rows) = part.offset, part.shape
        first, last = column // _BLOCK_VALUES, -(-(column + columns) // _BLOCK_VALUES)
        offset, shape = (expert, row, first), (1, rows, last - first)
        scales_ROG = stored(self.scales, Box(offset, shape))
        blocks = stored(self.blocks, Box((*offset, 0), (*shape, _BLOCK_BYTES)))
        pairs = _PAIRS.index_select(0, blocks.flatten().int())
        powers = torch.pow(2.0, scales_ROG.int() - _BIAS)
        values_EOI = (pairs.view(*shape, _BLOCK_VALUES) * powers.unsqueeze(-1)).flatten(2)
        return values_EOI[..., column - first * _BLOCK_VALUES :][..., :columns].transpose(1, 2)


def take_mxfp4_stacks(index: "TensorIndex", directory: Path) -> Mapping[str, Mxfp4Stack]:
    """Return the stacks that are stored in MXFP4, and put them in the place of their blocks.

    They are bf16 in the index from then on.

    Raises:
        DataError: if scales are missing or do not fit their blocks.
    """
    found = {}
    for blocks in [n for n, dtype in index.dtypes.items() if _is_packed(n, dtype, index.shapes[n])]:
        name = blocks.removesuffix(BLOCKS)
        scales = name + _SCALES
        shape = index.shapes[blocks]
        beside = (index.shapes.get(scales), index.dtypes.get(scales))
        if beside != (shape[:-1], torch.uint8):
            has = "no such tensor is there" if beside[0] is None else f"found {list(beside[0])}"
            raise DataError(
                f"{directory}: {blocks} has the shape {list(shape)}, so {scales} should be uint8 "
                f"of the shape {list(shape[:-1])}; {has}. A file is missing or damaged, copy it "
                "again"
            )
        found[name] = Mxfp4Stack(index.pieces[blocks][0], index.pieces[scales][0])
        for table in (index.shapes, index.dtypes, index.pieces):
            table.pop(blocks, None)
            table.pop(scales, None)
        experts, rows, groups, _ = shape
        index.shapes[name] = (experts, groups * _BLOCK_VALUES, rows)
        index.dtypes[name] = torch.bfloat16
        index.pieces[name] = [found[name].blocks]  # where messages say that it is
    return found


def _is_packed(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    is_uint8 = name.endswith(BLOCKS) and dtype is torch.uint8
    return is_uint8 and len(shape) == 4 and shape[-1] == _BLOCK_BYTES
