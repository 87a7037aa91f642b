"""The flat buffers in which ZeRO keeps weights, as boxes of the tensors they are cut from.

ZeRO concatenates flattened tensors and gives each rank a run of consecutive values. Such a run
consists of a few boxes (the rest of a row, whole rows, the start of a row), and model files and
checkpoints are read and written by boxes. So each rank reads and writes its own values and nothing
is gathered. Private attributes of DeepSpeed's (0.19.8) optimizers are used only in this file.

    FlatSpan: values [start, start + length) of a tensor, at ``buffer_start`` of a flat buffer
    split_into_boxes: the boxes of such a run, in the order of the values
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpc_tune.engine.activation_checkpoint import disable_dispatch_modes
from hpc_tune.engine.adamw import initial_state
from hpc_tune.model.build import BuiltModel
from hpc_tune.model.config_json import ShapeIndex
from hpc_tune.model.load import make_initial_values
from hpc_tune.model.regions import Region
from hpc_tune.model.tensor_sources import Box, ReserveFunction, reserve_nothing
from hpc_tune.model.weights import TensorIndex


@dataclass(frozen=True)
class FlatSpan:
    """The run of ``length`` values from ``start`` of the flattened tensor ``name`` of ``shape``."""

    name: str
    shape: tuple[int, ...]
    start: int
    length: int
    buffer_start: int

    def iter_boxes(self) -> Iterator[tuple[slice, Box]]:
        """Yield the place in the buffer, and the box, of each box that makes up the run."""
        buffer_start = self.buffer_start
        for box in split_into_boxes(self.shape, self.start, self.start + self.length):
            yield slice(buffer_start, buffer_start + box.num_values), box
            buffer_start += box.num_values


@dataclass(frozen=True)
class Partition:
    """One flat fp32 buffer that this rank's optimizer updates, and what lies in it.

    ``number`` is the buffer's index in the optimizer.
    """

    number: int
    flat: torch.Tensor
    spans: tuple[FlatSpan, ...]


def split_into_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that make up the values [start, stop) of a tensor.

    They come in the order of the values; a matrix gives at most three.
    """
    if start >= stop:
        return
    if len(shape) < 2:
        yield Box((start,) * len(shape), (stop - start,) * len(shape))
        return
    row_size = math.prod(shape[1:])
    first, last = -(-start // row_size), stop // row_size
    if first > last:  # within one row
        first, last = last, last
        yield from _boxes_in_row(shape, last, start - last * row_size, stop - last * row_size)
        return
    if start < first * row_size:
        yield from _boxes_in_row(shape, first - 1, start - (first - 1) * row_size, row_size)
    if first < last:
        row_shape = tuple(shape[1:])
        yield Box((first, *(0,) * len(row_shape)), (last - first, *row_shape))
    if last * row_size < stop:
        yield from _boxes_in_row(shape, last, 0, stop - last * row_size)


def _boxes_in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in split_into_boxes(shape[1:], start, stop):
        yield Box((row, *box.offset), (1, *box.shape))


def fill_span(
    index: TensorIndex | ShapeIndex,
    name: str,
    span: FlatSpan,
    flat: torch.Tensor,
    reserve: ReserveFunction = reserve_nothing,
) -> None:
    """Read the values of a span from the tensor ``name`` into their place in ``flat``.

    Raises:
        HpcTuneError: if the tensor on disk has no such region or cannot be read.
    """
    for flat_slice, box in span.iter_boxes():
        index.fill(flat[flat_slice].view(box.shape), name, box.offset, reserve)


def fill_parameter(
    built: BuiltModel,
    name: str,
    flat: torch.Tensor,
    shape: tuple[int, ...],
    start: int,
    reserve: ReserveFunction,
) -> None:
    """Fill ``flat`` with a parameter's initial values from ``start`` on, and with 0 beyond its end.

    Raises:
        HpcTuneError: if the file is damaged or of another model, or a value is NaN or inf.
    """
    numel = math.prod(shape)
    length = max(0, min(flat.numel(), numel - start))
    flat[length:].zero_()
    span = FlatSpan(name, shape, start, length, 0)
    if (source := built.locate_initial_values(name)) is not None:
        fill_span(*source, span, flat, reserve)
        _require_finite(*source, span, flat)
    else:
        flat[:length].copy_(
            make_initial_values(built, name, shape).view(-1)[start : start + length]
        )


def _require_finite(
    index: TensorIndex | ShapeIndex, name: str, span: FlatSpan, flat: torch.Tensor
) -> None:
    for flat_slice, box in span.iter_boxes():
        index.require_finite(flat[flat_slice].view(box.shape), name, box.offset)


def span_regions(
    name: str, span: FlatSpan, read_values: Callable[[], torch.Tensor]
) -> Iterator[Region]:
    """Yield the regions of a span, written as ``name``; ``read_values`` gives the flat buffer."""
    for number, (flat_slice, box) in enumerate(span.iter_boxes()):
        stored_name = f"{name}#{number}" if number else ""
        read_slice = partial(_slice_values, read_values, flat_slice)
        yield Region(name, torch.float32, box, span.shape, read_slice, stored_name)


def _slice_values(read_values: Callable[[], torch.Tensor], flat_slice: slice) -> torch.Tensor:
    return read_values().detach()[flat_slice]


def find_partitions(
    zero_optimizer: Any, stage: int, trained_params: Mapping[str, nn.Parameter]
) -> tuple[Partition, ...]:
    """Return which values of the ``trained_params`` tensors this rank's optimizer updates."""
    names = {parameter: name for name, parameter in trained_params.items()}
    partitions = []
    if stage == 3:
        for number, group in enumerate(zero_optimizer.fp16_groups):
            spans, buffer_start = [], 0
            for p in group:
                part_numel = p.partition_numel()
                start = part_numel * dist.get_rank()
                length = min(part_numel, p.ds_numel - start)  # the last ranks' parts may be padding
                if length > 0:
                    spans.append(FlatSpan(names[p], tuple(p.ds_shape), start, length, buffer_start))
                buffer_start += part_numel
            flat = zero_optimizer.fp32_partitioned_groups_flat[number]
            partitions.append(Partition(number, flat, tuple(spans)))
        return tuple(partitions)
    for number, group in enumerate(zero_optimizer.bit16_groups):
        spans = []
        for p in group:
            if (mapping := p._hp_mapping) is not None:
                start, length = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
                buffer_start = mapping.hp_fragment_address.start
                spans.append(FlatSpan(names[p], tuple(p.shape), start, length, buffer_start))
        flat = zero_optimizer.single_partition_of_fp32_groups[number]
        partitions.append(Partition(number, flat, tuple(spans)))
    return tuple(partitions)


class PartitionReader:
    """Reads partitions; of those on NVMe, only one at a time is in memory."""

    def __init__(self, zero_optimizer: Any, stage: int) -> None:
        self._zero_optimizer, self._stage = zero_optimizer, stage
        self._held_index: int | None = None

    def read_values(self, partition: Partition, state_name: str) -> torch.Tensor:
        """Return the weights (``state_name`` is empty) or a part of the optimizer state."""
        if (
            _is_swapped(self._zero_optimizer, self._stage, partition)
            and self._held_index != partition.number
        ):
            self.release()
            self._zero_optimizer._optimizer_states_and_gradient_swap_in(partition.number)
            self._held_index = partition.number
        if not state_name:
            return partition.flat
        state = self._zero_optimizer.optimizer.state.get(partition.flat)
        return state[state_name] if state else torch.zeros_like(partition.flat)

    def release(self) -> None:
        """Free the memory of the partition that was read from NVMe."""
        if self._held_index is not None:
            self._zero_optimizer._release_swap_buffers(self._held_index)
            self._held_index = None


@contextmanager
def edit_optimizer_state(
    zero_optimizer: Any, stage: int, partition: Partition, reserve: ReserveFunction
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield a partition's optimizer state; the block may write to it and to the partition's buffer.

    At the end of the block, stage 3's weights are updated from the buffer.
    """
    is_swapped = _is_swapped(zero_optimizer, stage, partition)
    if is_swapped:
        zero_optimizer._optimizer_states_and_gradient_swap_in(partition.number)
    state = zero_optimizer.optimizer.state.setdefault(partition.flat, {})
    if not state:
        state.update(initial_state(partition.flat.detach(), reserve))
    yield state
    if stage == 3:
        zero_optimizer._reassign_or_swap_out_partitioned_parameters(partition.number)
    if is_swapped:
        zero_optimizer._optimizer_states_and_gradient_swap_out(partition.number)


def saving_weights_by_reference() -> Any:
    """Return a context in which autograd saves a reference to each weight instead of its values.

    A linear layer saves a view of its weight for the backward pass, which would keep the gathered
    weight of stage 3 in memory on every rank. DeepSpeed gathers it again in time.
    """

    def pack(tensor: torch.Tensor) -> Any:
        weight = tensor if tensor._base is None else tensor._base
        if not hasattr(weight, "ds_id"):
            return tensor
        start = tensor.storage_offset() - weight.storage_offset()
        return weight, tensor.shape, tensor.stride(), start

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        weight, shape, stride, start = packed
        values = weight.data
        return values.as_strided(shape, stride, values.storage_offset() + start)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def drop_gradients(zero_optimizer: Any, stage: int) -> None:
    """Discard what backward passes have left since the last update."""
    zero_optimizer.zero_grad(set_to_none=True)
    is_offloaded = zero_optimizer.offload_optimizer if stage == 3 else zero_optimizer.cpu_offload
    if is_offloaded:
        zero_optimizer.reset_cpu_buffers()
    if stage < 3:
        zero_optimizer._release_preflattened_grad_buffers()
        zero_optimizer.micro_step_id = -1
        for key in list(zero_optimizer.averaged_gradients):
            zero_optimizer.averaged_gradients[key] = zero_optimizer.all_grad_tensors[key] = None
    elif not is_offloaded:
        zero_optimizer.averaged_gradients = {}


def release_gathered_parameters(zero_optimizer: Any) -> None:
    """Leave each rank only its own part of stage 3's weights."""
    zero_optimizer._partition_all_parameters()


def prevent_prefetching(zero_optimizer: Any) -> None:
    """Make stage 3 read weights from NVMe only as they are needed.

    DeepSpeed 0.19 prefetches until no buffer is left for the weight that is needed: for the passes
    of an evaluation that has ended, or for a tied weight twice.
    """
    coordinator = zero_optimizer.parameter_offload.get_param_coordinator()
    coordinator._PartitionedParameterCoordinator__prefetch_nvme = False


def hide_gathers_from_recompute(zero_optimizer: Any) -> None:
    """Hide stage 3's gathering of weights from selective recompute.

    Selective recompute counts the operations within a block, and fails if the forward pass gathers
    a weight that is still there when the block is recomputed, or the other way around.
    """
    coordinator = zero_optimizer.parameter_offload.get_param_coordinator()
    for name in ("fetch_sub_module", "release_sub_module"):
        setattr(coordinator, name, disable_dispatch_modes(getattr(coordinator, name)))


def _is_swapped(zero_optimizer: Any, stage: int, partition: Partition) -> bool:
    return stage == 3 and bool(zero_optimizer._swappable_optimizer_subgroup(partition.number))
