"""Gradients of the trained weights: flat buffers, their all-reduce, their norm.

backward pass -> a piece of a buffer is complete -> its all-reduce begins -> ... -> all have ended
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpc_tune.engine.counted_collectives import CountedCollectives
from hpc_tune.engine.mesh import Mesh
from hpc_tune.model.build import BuiltModel
from hpc_tune.model.regions import local_region
from hpc_tune.model.tensor_sources import ReserveFunction, reserve_nothing
from hpc_tune.step.plan import GRADIENT_BUCKET_BYTES, StepPlan

_FP64_CHUNK_VALUES = 1 << 22


@dataclass(frozen=True)
class TrainedWeight:
    """One trained parameter of this rank.

    ``has_partial_grad``: its gradient is still to be summed over the tensor axis. ``num_copies``:
    how many ranks hold the same values. ``is_tied``: it is the last stage's copy of the embedding,
    which the first stage owns. ``writes_checkpoint``: this rank writes it into checkpoints.
    ``is_expert_parallel``: it belongs to experts that are spread over ranks of the shard axis.
    """

    name: str
    stage: BuiltModel
    parameter: nn.Parameter
    has_partial_grad: bool
    num_copies: int
    is_tied: bool
    writes_checkpoint: bool
    is_expert_parallel: bool = False

    @property
    def saved_name(self) -> str:
        """Its name in checkpoints."""
        return self.stage.saved_names[self.name]

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP2 shards it over the ranks and reduces its gradient."""
        return isinstance(self.parameter, DTensor)

    @property
    def local_grad(self) -> torch.Tensor:
        """This rank's part of its gradient."""
        assert self.parameter.grad is not None
        return local_region(self.parameter.grad)[0]


def list_trained_weights(
    stage: BuiltModel, mesh: Mesh, partial_grad_names: frozenset[str]
) -> list[TrainedWeight]:
    """Describe the trained parameters of an allocated stage, in the model's order."""
    layout, coordinates, trained_weights = mesh.layout, mesh.coordinates, []
    for name, parameter in stage.module.named_parameters():
        if not parameter.requires_grad:
            continue
        is_sharded, is_sliced = isinstance(parameter, DTensor), name in stage.slices
        is_distributed = is_sliced and layout.expert > 1
        copy_size = layout.expert if is_distributed else 1  # ranks of the shard axis per full copy
        num_copies = layout.replicate
        num_copies *= 1 if is_sharded else layout.shard // copy_size
        num_copies *= 1 if is_sliced else layout.tensor
        is_tied = not stage.module.is_first_stage and stage.saved_names[name] == stage.tied_name
        writes_checkpoint = (
            coordinates.replicate == 0
            and (is_sharded or coordinates.shard < copy_size)
            and (is_sliced or coordinates.tensor == 0)
            and not is_tied
        )
        first_fields = (name, stage, parameter, name in partial_grad_names)
        trained_weights.append(
            TrainedWeight(*first_fields, num_copies, is_tied, writes_checkpoint, is_distributed)
        )
    return trained_weights


@dataclass(frozen=True)
class Bucket:
    """Gradients of replicated weights that are all-reduced together.

    ``grads`` is one flat buffer of the weights' dtype, of which every gradient is a view.
    """

    grads: torch.Tensor
    group: dist.ProcessGroup | None
    num_copies: int
    is_tied: bool
    parameters: Sequence[nn.Parameter]


class OverlappedAllReduce:
    """All-reduces a bucket piece by piece while the last backward pass of a step still runs.

    A backward pass computes gradients from the end of the model to its beginning, and pieces are
    cut in that order. All ranks begin them in this order, whatever their own backward passes do: a
    piece waits for those before it, and pieces that are left, as on a rank without a backward pass,
    begin at the end. For layouts whose backward passes send no other messages.
    """

    def __init__(
        self, bucket: Bucket, group: dist.ProcessGroup, collectives: CountedCollectives
    ) -> None:
        """Watch the bucket's parameters; ``group`` is the bucket's."""
        self._group, self._collectives = group, collectives
        self._pieces: list[torch.Tensor] = []
        self._params_per_piece: list[int] = []  # parameters of each piece
        self._num_missing: list[int] = []
        self._works: list[dist.Work | None] = []
        self._is_last = False
        itemsize, stop = bucket.grads.itemsize, bucket.grads.numel()
        start, num_params = stop, 0
        for parameter in reversed(bucket.parameters):
            start, num_params = start - parameter.numel(), num_params + 1
            parameter.register_post_accumulate_grad_hook(
                functools.partial(self._handle_gradient, len(self._pieces))
            )
            if (stop - start) * itemsize >= GRADIENT_BUCKET_BYTES or start == 0:
                self._pieces.append(bucket.grads[start:stop])
                self._params_per_piece.append(num_params)
                stop, num_params = start, 0

    def begin(self) -> None:
        """Send pieces as soon as the coming backward pass, the step's last, completes them."""
        self._num_missing, self._is_last = list(self._params_per_piece), True

    def finish(self) -> None:
        """Begin the pieces that have not begun yet, and wait for all."""
        self._is_last = False
        for piece in self._pieces[len(self._works) :]:
            self._works.append(self._collectives.begin_all_reduce(piece, self._group))
        self._collectives.finish(self._works)
        self._works.clear()

    def _handle_gradient(self, piece_index: int, parameter: torch.Tensor) -> None:
        if not self._is_last:
            return
        self._num_missing[piece_index] -= 1
        while (index := len(self._works)) < len(self._pieces) and self._num_missing[index] == 0:
            self._works.append(self._collectives.begin_all_reduce(self._pieces[index], self._group))


def make_buckets(
    trained_weights: Iterable[TrainedWeight],
    plan: StepPlan,
    mesh: Mesh,
    device: torch.device,
    reserve: ReserveFunction = reserve_nothing,
) -> list[Bucket]:
    """Make the flat buffers: one for all gradients that are all-reduced over the same ranks."""
    groups: dict[tuple[bool, int, bool, bool], list[nn.Parameter]] = {}
    for weight in trained_weights:
        if not weight.is_sharded:
            key = (
                weight.has_partial_grad,
                weight.num_copies,
                weight.is_tied,
                weight.is_expert_parallel,
            )
            groups.setdefault(key, []).append(weight.parameter)
    buckets = []
    for (partial, num_copies, is_tied, is_distributed), parameters in groups.items():
        num_values = sum(p.numel() for p in parameters)
        if device.type == "cpu":
            reserve(num_values * parameters[0].dtype.itemsize)
        flat = torch.zeros(num_values, dtype=parameters[0].dtype, device=device)
        position = 0
        for parameter in parameters:
            parameter.grad = flat[position : position + parameter.numel()].view_as(parameter)
            position += parameter.numel()
        group = mesh.group(*plan.reduction_axes(partial, is_distributed))
        buckets.append(Bucket(flat, group, num_copies, is_tied, parameters))
    return buckets


def sum_squares(
    buckets: Sequence[Bucket],
    sharded_weights: Sequence[TrainedWeight],
    device: torch.device,
    is_distributed: bool,
) -> torch.Tensor:
    """Return the sum of squares of this rank's gradients, an fp64 scalar.

    If ``is_distributed``, weights are spread over ranks, and each one's sum is divided by its
    number of copies, so that the sum over all ranks counts it once. A tied copy is left out.
    """
    pairs = [(b.grads, b.num_copies if is_distributed else 1) for b in buckets if not b.is_tied]
    pairs += [
        (weight.local_grad, weight.num_copies)
        for weight in sharded_weights
        if weight.parameter.grad is not None and not weight.is_tied
    ]
    on_host = torch.zeros((), dtype=torch.float64)
    on_device: dict[int, list[torch.Tensor]] = {}
    for grad, num_copies in pairs:
        if grad.device.type == "cpu":
            on_host += _sum_squares_fp64(grad) / num_copies
        else:
            on_device.setdefault(num_copies, []).append(grad)
    if device.type == "cpu":
        return on_host
    total = torch.zeros((), dtype=torch.float64, device=device)
    if any(grad.device.type == "cpu" for grad, _ in pairs):
        total += on_host.pin_memory().to(device, non_blocking=True)
    for num_copies, grads in on_device.items():
        total += _sum_squares_fused(grads) / num_copies
    return total


def _sum_squares_fused(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the squares with few kernels, within a tensor in fp32.

    A GPU sums blocks of 65,536 values in trees, then their sums, which loses little. fp64 would
    read twice the bytes, from a copy, and run at a fraction of the rate.
    """
    norms = torch._foreach_norm(list(grads), 2, dtype=torch.float32)
    return torch.stack(norms).double().square().sum()


def _sum_squares_fp64(tensor: torch.Tensor) -> torch.Tensor:
    """Sum squares in fp64: torch's fp32 norm of a million values is off by 1e-5 on a CPU.

    In pieces, because torch makes an fp64 copy of its input.
    """
    norms = [
        torch.linalg.vector_norm(piece, dtype=torch.float64)
        for piece in tensor.reshape(-1).split(_FP64_CHUNK_VALUES)
    ]
    return torch.stack(norms).square().sum()
