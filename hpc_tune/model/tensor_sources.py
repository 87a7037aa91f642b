"""Tensors of a model that its files hold in several: the experts of a layer, one by one in files.

    transformers' table of conversions -> JoinedTensor: which stored tensor lies where in the whole
    TensorIndex.fill reads a region of it: of each stored tensor the part that lies there

So a rank reads of each expert what it keeps of the stack, and no stack is ever put together that is
not kept. The table is ``transformers.conversion_mapping``; what it does to tensors is followed here
on shapes and places alone.

Shapes, mostly: E experts, I inner features (2I where gate and up are joined), H hidden features.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hpc_tune.errors import DataError

if TYPE_CHECKING:
    from hpc_tune.model.weights import TensorIndex
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_tune.errors import raise_if_out_of_files
from hpc_tune.model.config_json import read_config_json

if TYPE_CHECKING:
    from hpc_tune.model.weights import TensorIndex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_tune.model.weights import Piece, TensorIndex


# -- A box of a tensor: the values that a file or a rank has of it.


@dataclass(frozen=True)
class Box:
    """``shape`` values of a tensor from ``offset`` on, along each dim."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """Return all of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def num_values(self) -> int:
        """The values in it."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """Where it ends along each dim."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def is_within(self, full_shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of that shape has it; what a file says may be of any type."""
        return len(self.offset) == len(self.shape) == len(full_shape) and all(
            type(o) is int and type(f) is int and o >= 0 and o + n <= f
            for o, n, f in zip(self.offset, self.shape, full_shape, strict=True)
        )

    def overlap(self, other: "Box") -> "Box | None":
        """Return the box of the values that both have; None without any."""
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(b - a for a, b in zip(start, map(min, self.end, other.end), strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def slices(self, origin: tuple[int, ...] = ()) -> tuple[slice, ...]:
        """Return the index of its values in a part that begins at ``origin``, or in the whole."""
        at = origin or (0,) * len(self.offset)
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.offset, self.end, at, strict=True))


@dataclass(frozen=True)
class StoredPart:
    """A stored tensor in a joined one: its name, where it begins there and which axis is which.

    ``axes`` has, for each dimension of the joined tensor, that of the stored one; None where the
    stored one is a single layer of a stack.
    """

    stored: str
    box: Box
    axes: tuple[int | None, ...]

    def view(self, local: torch.Tensor) -> torch.Tensor:
        """Return a region of the joined tensor within this part with the axes of the stored one."""
        for dim in reversed(range(len(self.axes))):
            if self.axes[dim] is None:
                local = local.select(dim, 0)
        kept = [axis for axis in self.axes if axis is not None]
        return local.permute([kept.index(axis) for axis in range(len(kept))])

    def offset_of(self, box: Box) -> tuple[int, ...]:
        """Return where a box of the joined tensor within this part begins in the stored one."""
        starts = zip(self.axes, box.offset, self.box.offset, strict=True)
        by_axis = {axis: start - first for axis, start, first in starts if axis is not None}
        return tuple(by_axis[axis] for axis in range(len(by_axis)))


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor of the model, made of stored ones."""

    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]

    def overlaps(self, wanted: Box) -> Iterator[tuple[StoredPart, Box]]:
        """Yield the parts that have something of ``wanted``, and what."""
        for part in self.parts:
            if (found := part.box.overlap(wanted)) is not None:
                yield part, found


def _find_conversions(model: Any) -> tuple[list[Any], list[Any]]:
    """Return transformers' renamings of a model's tensors, and what else it does to some."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    return renamings, [c for c in conversions if not isinstance(c, WeightRenaming)]


def find_renamed_tensors(model: Any, index: "TensorIndex") -> dict[str, str]:
    """Return the stored name of each tensor that transformers has another name for than its file.

    Those that it would also cut, join or turn are left out: see ``find_joined_tensors``.
    """
    from transformers.core_model_loading import rename_source_key

    renamed = {}
    renamings, converters = _find_conversions(model)
    for stored in sorted(index.stored):
        name, converted = rename_source_key(stored, renamings, converters)
        if converted is None and name != stored:
            renamed[name] = stored
    return renamed


def find_names_renamed_again(model: Any, names: Iterable[str]) -> list[str]:
    """Return those of the names that a whole ``model`` has which transformers' table renames.

    peft takes the names of an adapter through it, too, and passes over these.
    """
    from transformers.core_model_loading import rename_source_key

    conversions = _find_conversions(model)
    return [name for name in names if rename_source_key(name, *conversions)[0] != name]


def find_joined_tensors(model: Any, index: "TensorIndex") -> Mapping[str, JoinedTensor]:
    """Return, by its name in the whole ``model``, each tensor that is joined of stored ones.

    Those that transformers makes in a way that is not followed here are left out, and noted in the
    ``index``.

    Raises:
        DataError: if the experts of a layer are not all there, or differ in shape.
    """
    from transformers.core_model_loading import rename_source_key

    renamings, converters = _find_conversions(model)
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    sources: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for stored in sorted(index.stored, key=_natural_sort_key):
        if stored in own:  # in its final form, as files may have it too
            continue
        name, pattern = rename_source_key(stored, renamings, converters)
        if pattern is not None:
            sources[name][pattern].append(stored)
    joined = {}
    for name, by_source in sources.items():
        converter = by_pattern[next(iter(by_source))]
        operations = {type(operation).__name__ for operation in converter.operations}
        if operations - _OPERATIONS.keys():
            index.unfollowed[name] = " and ".join(sorted(operations - _OPERATIONS.keys()))
            continue
        _require_all_experts(name, by_source, own.get(name, ()))
        found = _convert(converter, by_source, index, own.get(name))
        if found is not None:
            joined[name] = found
    return joined


def _natural_sort_key(name: str) -> list[tuple[int, str]]:
    """Return what names are sorted by so that expert 10 comes after expert 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _convert(
    converter: Any,
    by_source: Mapping[str, list[str]],
    index: "TensorIndex",
    wanted: tuple[int, ...] | None,
) -> JoinedTensor | None:
    """Return what a conversion makes of stored tensors, or None if that is not one tensor."""
    groups = [
        [_whole_tensor(stored, index.shapes[stored]) for stored in by_source[pattern]]
        for pattern in converter.source_patterns
        if pattern in by_source
    ]
    for operation in converter.operations:
        groups = _OPERATIONS[type(operation).__name__](operation, groups, wanted)
    return groups[0][0] if len(groups) == 1 and len(groups[0]) == 1 else None


def _whole_tensor(stored: str, shape: tuple[int, ...]) -> JoinedTensor:
    return JoinedTensor(shape, (StoredPart(stored, Box.whole(shape), tuple(range(len(shape)))),))


_Groups = list[list[JoinedTensor]]


def _merge(operation: Any, groups: _Groups, _: Any) -> _Groups:
    """MergeModulelist: the tensors of each group are stacked."""
    return [[_stack(group, operation.dim)] for group in groups]


def _stack(group: list[JoinedTensor], dim: int) -> JoinedTensor:
    layers = []
    for one in group:
        shape = (*one.shape[:dim], 1, *one.shape[dim:])
        parts = (
            StoredPart(
                part.stored,
                Box(_replace_at(part.box.offset, dim, 0), _replace_at(part.box.shape, dim, 1)),
                _replace_at(part.axes, dim, None),
            )
            for part in one.parts
        )
        layers.append(JoinedTensor(shape, tuple(parts)))
    return _concatenate_tensors(layers, dim)


def _replace_at(values: tuple[Any, ...], dim: int, value: Any) -> tuple[Any, ...]:
    return (*values[:dim], value, *values[dim:])


def _drop_at(values: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return (*values[:dim], *values[dim + 1 :])


def _concatenate(operation: Any, groups: _Groups, _: Any) -> _Groups:
    return [[_concatenate_tensors([one for group in groups for one in group], operation.dim)]]


def _concatenate_tensors(tensors: list[JoinedTensor], dim: int) -> JoinedTensor:
    start, parts, first = 0, [], tensors[0]
    for one in tensors:
        if _drop_at(one.shape, dim) != _drop_at(first.shape, dim):
            raise DataError(
                f"{one.parts[0].stored} has the shape {_stored_shape(one)}, and "
                f"{first.parts[0].stored}, which it is stacked with, {_stored_shape(first)}; a "
                "file is damaged or of another model"
            )
        for part in one.parts:
            offset = list(part.box.offset)
            offset[dim] += start
            parts.append(replace(part, box=Box(tuple(offset), part.box.shape)))
        start += one.shape[dim]
    return JoinedTensor(_replace_at(_drop_at(first.shape, dim), dim, start), tuple(parts))


def _stored_shape(one: JoinedTensor) -> list[int]:
    """Return the shape of the first stored tensor of a joined one."""
    part = one.parts[0]
    sizes = sorted((a, n) for a, n in zip(part.axes, part.box.shape, strict=True) if a is not None)
    return [size for _, size in sizes]


def _transpose(operation: Any, groups: _Groups, wanted: tuple[int, ...] | None) -> _Groups:
    """Transpose: two axes change places; with ``check_dims`` only if the shape is not right yet."""

    def swapped(values: tuple[Any, ...]) -> tuple[Any, ...]:
        out = list(values)
        first, second = operation.dim0, operation.dim1
        out[first], out[second] = out[second], out[first]
        return tuple(out)

    def turned(one: JoinedTensor) -> JoinedTensor:
        if operation.check_dims and one.shape == wanted:
            return one
        parts = (
            StoredPart(p.stored, Box(swapped(p.box.offset), swapped(p.box.shape)), swapped(p.axes))
            for p in one.parts
        )
        return JoinedTensor(swapped(one.shape), tuple(parts))

    return [[turned(one) for one in group] for group in groups]


_OPERATIONS: Mapping[str, Callable[[Any, _Groups, Any], _Groups]] = {
    "MergeModulelist": _merge,
    "Concatenate": _concatenate,
    "Transpose": _transpose,
}


def _require_all_experts(
    name: str, by_source: Mapping[str, list[str]], wanted: tuple[int, ...]
) -> None:
    """Refuse a stack without some of its experts, which would be shifted into other places."""
    counts = {pattern: len(stored) for pattern, stored in by_source.items() if ".*." in pattern}
    if len(wanted) != 3 or set(counts.values()) <= {wanted[0]}:
        return
    fewest = min(counts, key=lambda pattern: counts[pattern])
    raise DataError(
        f"{name} has {wanted[0]} experts by config.json, and the files hold {counts[fewest]} of "
        f"{fewest.replace('.*.', '.N.')}; a file is missing or of another model"
    )


# -- Weights that are stored in float8 with scales, dequantised as they are read.
#
#     value[r, c] = stored[r, c] * scale[r // rows of a block, c // columns of a block]
#
# One scale for a tensor, one for each row, or one for each block (DeepSeek-V3's form,
# arXiv:2412.19437, section 3.3). Checkpoints that are quantised in another way are refused, naming
# the method.


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


# -- Stacks of experts in MXFP4, dequantised as they are read: gpt_oss's published files.
#
#     NAME_blocks uint8 [E, O, G, 16]   two values of 4 bits in a byte, the low ones first
#     NAME_scales uint8 [E, O, G]       one power of two for each 32 values, with 127 added
#     NAME        bf16  [E, 32 G, O]    what transformers makes of them
#
# E experts, O outputs, G groups of 32 inputs. The format: OCP Microscaling Formats (MX) 1.0,
# section 5.3; the order of the values:
# ``transformers.integrations.mxfp4.convert_moe_packed_tensors``.


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
