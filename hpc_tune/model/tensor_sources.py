"""Where the values of a tensor are stored in files, and how a region of it is read.

    PlainTensor   as it is: whole in one safetensors file, or as boxes in several
    ScaledTensor  in float8, with scales
    Mxfp4Stack    in MXFP4, with scales: a stack of experts
    JoinedTensor  as several tensors, each stored in one of these ways: a layer's experts one by one

A rank reads only the part of a tensor that it keeps, a few MiB at a time: no whole tensor is ever
assembled unless it is kept.

Shapes, mostly: E experts, I inner features (2I where gate and up are joined), H hidden features.
"""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hpc_tune.errors import DataError, HpcTuneError, find_remedy

PIECE_BYTES = 16 << 20  # of anonymous memory while reading or writing; larger is not faster
# Called with the bytes of host memory about to be allocated.
ReserveFunction = Callable[[int], None]


def reserve_nothing(num_bytes: int) -> None:
    """Accept an allocation of ``num_bytes`` without watching a memory limit."""


# -- A box of a tensor: the part of it that a file or a rank holds.


@dataclass(frozen=True)
class Box:
    """The region of a tensor that starts at ``offset`` and has ``shape``."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def cover_tensor(cls, shape: tuple[int, ...]) -> "Box":
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def num_values(self) -> int:
        """The number of values in it."""
        return math.prod(self.shape)

    @property
    def end(self) -> tuple[int, ...]:
        """Where it ends along each dim."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def is_within(self, full_shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of that shape contains it; values from files may be anything."""
        return len(self.offset) == len(self.shape) == len(full_shape) and all(
            type(o) is int and type(f) is int and o >= 0 and o + n <= f
            for o, n, f in zip(self.offset, self.shape, full_shape, strict=True)
        )

    def overlap(self, other: "Box") -> "Box | None":
        """Return the intersection of both boxes, or None if it is empty."""
        start = tuple(map(max, self.offset, other.offset))
        shape = tuple(b - a for a, b in zip(start, map(min, self.end, other.end), strict=True))
        return Box(start, shape) if all(n > 0 for n in shape) else None

    def slices(self, origin: tuple[int, ...] = ()) -> tuple[slice, ...]:
        """Return the box's index in a part that begins at ``origin``, or in the whole tensor."""
        start = origin or (0,) * len(self.offset)
        return tuple(
            slice(a - o, b - o) for a, b, o in zip(self.offset, self.end, start, strict=True)
        )


@dataclass(frozen=True)
class TensorSource(ABC):
    """A tensor that can be read; ``file`` is the location that messages name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path

    @abstractmethod
    def fill(
        self, local_tensor: torch.Tensor, offset: tuple[int, ...], reserve: ReserveFunction
    ) -> None:
        """Read the region at ``offset`` with ``local_tensor``'s shape into it, in its dtype.

        The region must be within the tensor.

        Raises:
            HpcTuneError: if its bytes cannot be read.
        """

    def read(self, box: Box) -> torch.Tensor:
        """Return a box of the tensor, in its dtype."""
        values = torch.empty(box.shape, dtype=self.dtype)
        self.fill(values, box.offset, reserve_nothing)
        return values


# -- Tensors that are stored in files as they are.


class TensorFiles:
    """Safetensors files to read from; problems with a file are raised as ``error``."""

    def __init__(self, error: type[HpcTuneError]) -> None:
        """Open nothing yet."""
        self.error = error
        self._open: tuple[Path, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open file when pickled: another rank opens files of its own."""
        return self.__dict__ | {"_open": None}

    def open(self, file: Path) -> Any:
        """Open ``file``, or return it if it is the one last opened: successive tensors share it."""
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = file, safe_open(file, "pt")
        return self._open[1]

    def close(self) -> None:
        """Close the file, so that the next ``open`` sees changes made to it since."""
        self._open = None


@dataclass(frozen=True)
class StoredBox:
    """A box of one tensor, and where it is on disk."""

    file: Path
    stored_name: str
    box: Box


@dataclass(frozen=True)
class PlainTensor(TensorSource):
    """A tensor stored as boxes in files; most tensors are whole in one file."""

    pieces: tuple[StoredBox, ...]
    files: TensorFiles = field(repr=False)

    def fill(
        self, local_tensor: torch.Tensor, offset: tuple[int, ...], reserve: ReserveFunction
    ) -> None:
        """See ``TensorSource``; at most ``PIECE_BYTES`` of a file are in anonymous memory."""
        pieces = [piece for piece in self.pieces if piece.box.num_values]
        if len({piece.box.offset for piece in pieces}) < len(pieces):
            raise self.files.error(
                f"{pieces[0].file.parent}: {self.name} has several regions at the same place, so "
                "values of others are missing: it was saved wrongly, and cannot be used; resume "
                "from another checkpoint (checkpoint.resume=PATH)"
            )
        target = Box(offset, tuple(local_tensor.shape))
        covered = sum(self._copy_overlap(piece, local_tensor, target, reserve) for piece in pieces)
        if covered != local_tensor.numel():
            raise self.files.error(
                f"{self.file.parent}: {self.name} has only {covered} of the {local_tensor.numel()} "
                "values that this rank needs; a file is missing"
            )

    def map_pages(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor that *is* the file's pages, shared by all processes of the node.

        Return None if the file has another dtype or only pieces. Do not write to the tensor.
        """
        piece, *others = self.pieces
        if others or piece.box.shape != self.shape or self.dtype != dtype:
            return None
        try:
            # safetensors maps a file privately and copies nothing on the CPU.
            tensor: torch.Tensor = self.files.open(piece.file).get_tensor(piece.stored_name)
        except (SafetensorError, OSError) as error:
            raise self._make_read_error(piece, error) from None
        return tensor

    def _copy_overlap(
        self, piece: StoredBox, local_tensor: torch.Tensor, target: Box, reserve: ReserveFunction
    ) -> int:
        """Copy a piece's overlap with ``target`` to ``local_tensor``; return how many values."""
        if (overlap := piece.box.overlap(target)) is None:
            return 0
        try:
            handle = self.files.open(piece.file)
            stored_slice = handle.get_slice(piece.stored_name)
            if local_tensor.dim() == 0:
                local_tensor.copy_(handle.get_tensor(piece.stored_name))
                return 1
            for rows in _cut_into_row_pieces(overlap):
                part = local_tensor[rows.slices(target.offset)]
                # The pages of ``local_tensor`` first touched here, and the file's.
                reserve(2 * part.nbytes)
                part.copy_(stored_slice[rows.slices(piece.box.offset)])
        except (SafetensorError, OSError) as error:
            raise self._make_read_error(piece, error) from None
        return overlap.num_values

    def _make_read_error(self, piece: StoredBox, error: Exception) -> HpcTuneError:
        reason = explain_open_failure(piece.file)
        return self.files.error(
            reason or f"{piece.file}: {piece.stored_name} cannot be read: {error}"
        )


def explain_open_failure(file: Path) -> str | None:
    """Return why an existing file cannot be opened: safetensors would say that it is missing."""
    try:
        with file.open("rb"):
            return None
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}{find_remedy(error)}"


def _cut_into_row_pieces(box: Box) -> Iterator[Box]:
    """Cut a box into pieces of as many rows as fit ``PIECE_BYTES`` in fp32, at least one."""
    (first, *offset), (num, *shape) = box.offset, box.shape
    rows = max(1, PIECE_BYTES // max(4 * math.prod(shape), 1))
    for row in range(0, num, rows):
        yield Box((first + row, *offset), (min(rows, num - row), *shape))


# -- Weights that are stored in float8 with scales, dequantized as they are read.
#
#     value[r, c] = stored[r, c] * scale[r // rows of a block, c // columns of a block]
#
# There is one scale per tensor, per row, or per block (DeepSeek-V3's form, arXiv:2412.19437,
# section 3.3).


_ROWS_PER_CHUNK = 128  # rows multiplied by their scales at once, in fp32


@dataclass(frozen=True)
class ScaledTensor(TensorSource):
    """A float8 matrix and its fp32 scales, one for each block of ``rows`` x ``columns``."""

    source: TensorSource
    scales: torch.Tensor
    rows: int
    columns: int

    def fill(
        self, local_tensor: torch.Tensor, offset: tuple[int, ...], reserve: ReserveFunction
    ) -> None:
        """See ``TensorSource``."""
        self.source.fill(local_tensor, offset, reserve)
        rows = torch.arange(offset[0], offset[0] + local_tensor.shape[0]) // self.rows
        columns = torch.arange(offset[1], offset[1] + local_tensor.shape[1]) // self.columns
        for first in range(0, len(rows), _ROWS_PER_CHUNK):
            part = local_tensor[first : first + _ROWS_PER_CHUNK]
            part.copy_(
                part.float() * self.scales[rows[first : first + _ROWS_PER_CHUNK]][:, columns]
            )


# -- Stacks of experts in MXFP4, dequantized as they are read: gpt_oss's published files.
#
#     NAME_blocks uint8 [E, O, G, 16]   two 4-bit values per byte, the low bits first
#     NAME_scales uint8 [E, O, G]       an exponent of two for each 32 values, with 127 added
#     NAME        bf16  [E, 32 G, O]    what transformers makes of them
#
# E experts, O outputs, G groups of 32 inputs. The format: OCP Microscaling Formats (MX) 1.0,
# section 5.3; the order of the values:
# ``transformers.integrations.mxfp4.convert_moe_packed_tensors``.


BLOCK_VALUES, BLOCK_BYTES = 32, 16
_FP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127
# The values of each byte, 256 x 2.
_FP4_VALUES_BY_BYTE = torch.cartesian_prod(
    *[torch.tensor([*_FP4_MAGNITUDES, *(-v for v in _FP4_MAGNITUDES)])] * 2
).flip(1)


@dataclass(frozen=True)
class Mxfp4Stack(TensorSource):
    """A stack of experts in MXFP4: its blocks and its scales."""

    blocks: TensorSource
    scales: TensorSource

    def fill(
        self, local_tensor: torch.Tensor, offset: tuple[int, ...], reserve: ReserveFunction
    ) -> None:
        """See ``TensorSource``."""
        for part in _cut_into_expert_pieces(Box(offset, tuple(local_tensor.shape))):
            local_part = local_tensor[part.slices(offset)]
            reserve(local_part.nbytes + PIECE_BYTES)
            local_part.copy_(self._dequantize(part))

    def _dequantize(self, box: Box) -> torch.Tensor:
        """Return a box of one expert in fp32."""
        (expert, column, row), (_, columns, rows) = box.offset, box.shape
        first, last = column // BLOCK_VALUES, -(-(column + columns) // BLOCK_VALUES)
        offset, shape = (expert, row, first), (1, rows, last - first)
        scales_ROG = self.scales.read(Box(offset, shape))
        blocks = self.blocks.read(Box((*offset, 0), (*shape, BLOCK_BYTES)))
        pairs = _FP4_VALUES_BY_BYTE.index_select(0, blocks.flatten().int())
        powers = torch.pow(2.0, scales_ROG.int() - _EXPONENT_BIAS)
        values_EOI = (pairs.view(*shape, BLOCK_VALUES) * powers.unsqueeze(-1)).flatten(2)
        return values_EOI[..., column - first * BLOCK_VALUES :][..., :columns].transpose(1, 2)


def _cut_into_expert_pieces(target: Box) -> Iterator[Box]:
    """Cut a region of a stack into rows of one expert that take ``PIECE_BYTES`` to read."""
    (expert, column, row), (num_experts, columns, num_rows) = target.offset, target.shape
    rows = max(1, PIECE_BYTES // (12 * (columns + 2 * BLOCK_VALUES)))
    for e in range(expert, expert + num_experts):
        for first in range(row, row + num_rows, rows):
            yield Box((e, column, first), (1, columns, min(rows, row + num_rows - first)))


# -- Tensors of a model that are stored in files as several tensors.
#
# transformers' table of conversions (``transformers.conversion_mapping``) says which. Its
# operations are applied here only to shapes and offsets, not to values.


@dataclass(frozen=True)
class StoredPart:
    """A stored tensor within a joined one: its box there, and how their axes correspond.

    ``axes`` maps each dimension of the joined tensor to one of the stored tensor, or to None for
    the dimension along which the stored tensor is one layer of a stack.
    """

    source: TensorSource
    box: Box
    axes: tuple[int | None, ...]

    @classmethod
    def cover_tensor(cls, source: TensorSource) -> "StoredPart":
        """Return a part that is a whole stored tensor, unchanged."""
        return cls(source, Box.cover_tensor(source.shape), tuple(range(len(source.shape))))

    def view(self, local_tensor: torch.Tensor) -> torch.Tensor:
        """View a region of the joined tensor, within this part, with the stored tensor's axes."""
        for dim in reversed(range(len(self.axes))):
            if self.axes[dim] is None:
                local_tensor = local_tensor.select(dim, 0)
        axes = [axis for axis in self.axes if axis is not None]
        return local_tensor.permute([axes.index(axis) for axis in range(len(axes))])

    def stored_offset(self, box: Box) -> tuple[int, ...]:
        """Return the offset in the stored tensor of a box of the joined one within this part."""
        starts = zip(self.axes, box.offset, self.box.offset, strict=True)
        by_axis = {axis: start - first for axis, start, first in starts if axis is not None}
        return tuple(by_axis[axis] for axis in range(len(by_axis)))


@dataclass(frozen=True)
class JoinedTensor(TensorSource):
    """A tensor of the model that is assembled from stored ones."""

    parts: tuple[StoredPart, ...]

    @classmethod
    def from_parts(cls, shape: tuple[int, ...], parts: Iterable[StoredPart]) -> "JoinedTensor":
        """Join parts; the result has the name, dtype and file of the first part."""
        first, *others = parts
        source = first.source
        return cls(source.name, shape, source.dtype, source.file, (first, *others))

    def fill(
        self, local_tensor: torch.Tensor, offset: tuple[int, ...], reserve: ReserveFunction
    ) -> None:
        """See ``TensorSource``."""
        target = Box(offset, tuple(local_tensor.shape))
        for part in self.parts:
            if (overlap := part.box.overlap(target)) is not None:
                view = part.view(local_tensor[overlap.slices(offset)])
                part.source.fill(view, part.stored_offset(overlap), reserve)


def _find_conversions(model: Any) -> tuple[list[Any], list[Any]]:
    """Return transformers' renamings of a model's tensors, and its other conversions of them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    return renamings, [c for c in conversions if not isinstance(c, WeightRenaming)]


def find_renamed_tensors(model: Any, stored_names: Iterable[str]) -> dict[str, str]:
    """Return the stored name of each tensor, by its name in transformers, if the two differ.

    Tensors that transformers also splits, joins or transposes are left out: see
    ``find_joined_tensors``.
    """
    from transformers.core_model_loading import rename_source_key

    renamed = {}
    renamings, converters = _find_conversions(model)
    for stored_name in sorted(stored_names):
        name, pattern = rename_source_key(stored_name, renamings, converters)
        if pattern is None and name != stored_name:
            renamed[name] = stored_name
    return renamed


def find_names_renamed_again(model: Any, names: Iterable[str]) -> list[str]:
    """Return which of ``names``, names of the whole ``model``, transformers' conversions rename.

    peft applies the conversions to an adapter's names too, and then ignores the renamed tensors.
    """
    from transformers.core_model_loading import rename_source_key

    conversions = _find_conversions(model)
    return [name for name in names if rename_source_key(name, *conversions)[0] != name]


def find_joined_tensors(
    model: Any, stored_tensors: Iterable[TensorSource]
) -> tuple[dict[str, JoinedTensor], dict[str, str]]:
    """Return each tensor that is joined from stored ones, by its name in the whole ``model``.

    Also return the tensors, by name, that transformers makes by operations that are not supported
    here, with the names of these operations.

    Raises:
        DataError: if some experts of a layer are missing, or differ in shape.
    """
    from transformers.core_model_loading import rename_source_key

    renamings, converters = _find_conversions(model)
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    sources: dict[str, dict[str, list[TensorSource]]] = defaultdict(lambda: defaultdict(list))
    model_shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for source in sorted(stored_tensors, key=_natural_sort_key):
        if source.name in model_shapes:  # stored in its final form, as some files do
            continue
        name, pattern = rename_source_key(source.name, renamings, converters)
        if pattern is not None:
            sources[name][pattern].append(source)
    joined_tensors, unsupported_operations = {}, {}
    for name, tensors_by_source in sources.items():
        converter = by_pattern[next(iter(tensors_by_source))]
        operations = {type(operation).__name__ for operation in converter.operations}
        if operations - _OPERATIONS.keys():
            unsupported_operations[name] = " and ".join(sorted(operations - _OPERATIONS.keys()))
            continue
        _require_all_experts(name, tensors_by_source, model_shapes.get(name, ()))
        joined_tensor = _apply_conversion(converter, tensors_by_source, model_shapes.get(name))
        if joined_tensor is not None:
            joined_tensors[name] = replace(joined_tensor, name=name)
    return joined_tensors, unsupported_operations


def _natural_sort_key(source: TensorSource) -> list[tuple[int, str]]:
    """Return a sort key that puts expert 10 after expert 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in source.name.split(".")]


def _apply_conversion(
    converter: Any,
    tensors_by_source: Mapping[str, list[TensorSource]],
    target: tuple[int, ...] | None,
) -> JoinedTensor | None:
    """Apply a conversion to stored tensors; return None if the result is not a single tensor."""
    groups = [
        [
            JoinedTensor.from_parts(source.shape, [StoredPart.cover_tensor(source)])
            for source in tensors_by_source[pattern]
        ]
        for pattern in converter.source_patterns
        if pattern in tensors_by_source
    ]
    for operation in converter.operations:
        groups = _OPERATIONS[type(operation).__name__](operation, groups, target)
    return groups[0][0] if len(groups) == 1 and len(groups[0]) == 1 else None


_TensorGroups = list[list[JoinedTensor]]


def _apply_merge(operation: Any, groups: _TensorGroups, _: Any) -> _TensorGroups:
    """MergeModulelist: stack the tensors of each group."""
    return [[_stack_tensors(group, operation.dim)] for group in groups]


def _stack_tensors(group: list[JoinedTensor], dim: int) -> JoinedTensor:
    layers = []
    for tensor in group:
        shape = (*tensor.shape[:dim], 1, *tensor.shape[dim:])
        parts = (
            StoredPart(
                part.source,
                Box(_replace_item(part.box.offset, dim, 0), _replace_item(part.box.shape, dim, 1)),
                _replace_item(part.axes, dim, None),
            )
            for part in tensor.parts
        )
        layers.append(JoinedTensor.from_parts(shape, parts))
    return _concatenate_tensors(layers, dim)


def _replace_item(values: tuple[Any, ...], dim: int, value: Any) -> tuple[Any, ...]:
    return (*values[:dim], value, *values[dim:])


def _drop_item(values: tuple[Any, ...], dim: int) -> tuple[Any, ...]:
    return (*values[:dim], *values[dim + 1 :])


def _apply_concatenate(operation: Any, groups: _TensorGroups, _: Any) -> _TensorGroups:
    return [[_concatenate_tensors([tensor for group in groups for tensor in group], operation.dim)]]


def _concatenate_tensors(tensors: list[JoinedTensor], dim: int) -> JoinedTensor:
    start, parts, first = 0, [], tensors[0]
    for one in tensors:
        if _drop_item(one.shape, dim) != _drop_item(first.shape, dim):
            raise DataError(
                f"{one.name} has the shape {list(one.parts[0].source.shape)}, but {first.name}, "
                f"which it is stacked with, has {list(first.parts[0].source.shape)}; a file is "
                "damaged or belongs to another model"
            )
        for part in one.parts:
            offset = list(part.box.offset)
            offset[dim] += start
            parts.append(replace(part, box=Box(tuple(offset), part.box.shape)))
        start += one.shape[dim]
    return JoinedTensor.from_parts(_replace_item(_drop_item(first.shape, dim), dim, start), parts)


def _apply_transpose(
    operation: Any, groups: _TensorGroups, target: tuple[int, ...] | None
) -> _TensorGroups:
    """Transpose: swap two axes; with ``check_dims`` only if the shape is not yet ``target``."""

    def swap_axes(values: tuple[Any, ...]) -> tuple[Any, ...]:
        out = list(values)
        first, second = operation.dim0, operation.dim1
        out[first], out[second] = out[second], out[first]
        return tuple(out)

    def transpose_tensor(source: JoinedTensor) -> JoinedTensor:
        if operation.check_dims and source.shape == target:
            return source
        parts = (
            StoredPart(
                p.source, Box(swap_axes(p.box.offset), swap_axes(p.box.shape)), swap_axes(p.axes)
            )
            for p in source.parts
        )
        return JoinedTensor.from_parts(swap_axes(source.shape), parts)

    return [[transpose_tensor(tensor) for tensor in group] for group in groups]


_OPERATIONS: Mapping[str, Callable[[Any, _TensorGroups, Any], _TensorGroups]] = {
    "MergeModulelist": _apply_merge,
    "Concatenate": _apply_concatenate,
    "Transpose": _apply_transpose,
}


def _require_all_experts(
    name: str, tensors_by_source: Mapping[str, list[TensorSource]], target: tuple[int, ...]
) -> None:
    """Refuse a stack with missing experts: the others would be shifted into their places."""
    counts = {
        pattern: len(tensors) for pattern, tensors in tensors_by_source.items() if ".*." in pattern
    }
    if len(target) != 3 or set(counts.values()) <= {target[0]}:
        return
    fewest = min(counts, key=lambda pattern: counts[pattern])
    raise DataError(
        f"{name} has {target[0]} experts by config.json, but the files hold {counts[fewest]} of "
        f"{fewest.replace('.*.', '.N.')}; a file is missing or belongs to another model"
    )
