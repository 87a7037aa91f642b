"""Tensors of a model that its files hold in several: the experts of a layer, one by one in files.

    transformers' table of conversions -> JoinedTensor: which stored tensor lies where in the whole
    TensorIndex.fill reads a region of it: of each stored tensor the part that lies there

So a rank reads of each expert what it keeps of the stack, and no stack is ever put together that is
not kept. The table is ``transformers.conversion_mapping``; what it does to tensors is followed here
on shapes and places alone.

Shapes, mostly: E experts, I inner features (2I where gate and up are joined), H hidden features.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from hpc_tune.errors import DataError
from hpc_tune.model.box import Box

if TYPE_CHECKING:
    from hpc_tune.model.weights import TensorIndex


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
