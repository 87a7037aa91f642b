"""Tensor parallelism: each rank of the axis holds a slice of every matrix (arXiv:1909.08053).

    the model's own plan (``read_tp_plan``) -> slices of parameters on the meta device
    -> hooks that sum activations after rowwise layers and gradients before columnwise ones

Slices are plain tensors, so attention, adapters and FSDP2 work on them as on a smaller model;
``BuiltModel.slices`` keeps each slice's place in its full tensor, for reading and writing.

LoRA follows its layer. Columnwise (W split by rows): A whole, B split by rows. Rowwise (W split by
columns): A split by columns, B whole, and B's output joins the layer's own partial sum, so that
adapters add no message. An A or B that is whole sees part of the work on each rank: its gradient is
a partial sum, which the engine sums over the axis.

Shapes: B rows, T tokens, D features, N tokens that carry loss, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hpc_tune.engine.activation_checkpoint import disable_dispatch_modes
from hpc_tune.engine.counted_collectives import CountedCollectives
from hpc_tune.model.build import BuiltModel, Slice
from hpc_tune.model.dropout import RowDropout
from hpc_tune.model.loss import find_decoder, scale_logits
from hpc_tune.step.slices import (
    EXPERTS_STYLE,
    find_tp_style,
    has_gathered_input,
    list_stack_slices,
    read_tp_plan,
    unwrap_adapters,
)


@dataclass(frozen=True)
class TensorAxis:
    """The ranks that hold the slices of one copy, and their collectives."""

    group: dist.ProcessGroup
    collectives: CountedCollectives

    @property
    def rank(self) -> int:
        """This rank's number on the axis."""
        return self.group.rank()

    @property
    def size(self) -> int:
        """The number of ranks on the axis."""
        return self.group.size()

    def all_reduce(self, x: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Return the sum (or another reduction) of all ranks' ``x``."""
        total = x.clone(memory_format=torch.contiguous_format)
        self.collectives.all_reduce(total, self.group, op)
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' ``x`` concatenated along the last dimension."""
        return torch.cat(self.collectives.all_gather(x, self.group), dim=-1)


@disable_dispatch_modes  # a plan's fake tensors cannot be given memory in place
def slice_model(built: BuiltModel, axis: TensorAxis) -> tuple[BuiltModel, frozenset[str]]:
    """Cut the meta model's matrices to this rank's slices, and add hooks for the sums.

    Returns the model and the names of the trained parameters whose gradients are partial sums.
    """
    slicer = _ParameterSlicer(axis)
    lm = built.module.causal_lm()
    decoder, plan = find_decoder(lm), read_tp_plan(built.config)
    hooked_parents: set[nn.Module] = set()
    for name, module in list(decoder.named_modules()):
        style = find_tp_style(name, plan)
        if style == "replicated_with_grad_allreduce":
            slicer.partial |= set(module.parameters())
        elif style == EXPERTS_STYLE:
            slicer.slice_experts(module, built.config, name)
        elif style is not None and style.startswith("colwise"):
            slicer.slice_colwise(module, gathers_output=style == "colwise_gather_output")
            if has_gathered_input(name, style):
                module.register_forward_pre_hook(_make_input_gradient_hook(axis), with_kwargs=True)
                continue
            parent = decoder.get_submodule(name.rpartition(".")[0])
            if parent not in hooked_parents:
                hooked_parents.add(parent)
                parent.register_forward_pre_hook(_make_input_gradient_hook(axis), with_kwargs=True)
        elif style is not None:
            slicer.slice_rowwise(module, splits_input=style == "rowwise_split_input")
    if built.module.is_first_stage:
        slicer.slice_embedding(lm.get_input_embeddings())
    if built.module.is_last_stage:
        slicer.slice_head(lm.get_output_embeddings())
        built.module.token_loss = functools.partial(_vocab_parallel_losses, axis)
    named_params = list(built.module.named_parameters())
    slices = {n: slicer.slices[p] for n, p in named_params if p in slicer.slices}
    partial = frozenset(n for n, p in named_params if p.requires_grad and p in slicer.partial)
    return dataclasses.replace(built, slices=slices), partial


class _ParameterSlicer:
    """Replaces parameters with slices and records where each lies."""

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis
        self.slices: dict[nn.Parameter, Slice] = {}
        self.partial: set[nn.Parameter] = set()
        self._sliced_params: dict[nn.Parameter, nn.Parameter] = {}

    def slice_colwise(self, layer: Any, gathers_output: bool) -> None:
        """W's rows and the bias are split; the output is this rank's features."""
        base, adapters = unwrap_adapters(layer)
        self._replace_by_slice(base, "weight", 0)
        self._replace_by_slice(base, "bias", 0)
        for a, b in adapters:
            self.partial.add(a.weight)
            self._replace_by_slice(b, "weight", 0)
        if gathers_output:
            _hook_output(layer, lambda y: _GatherOutputs.apply(y, self._axis))

    def slice_rowwise(self, layer: Any, splits_input: bool) -> None:
        """W's columns are split; partial outputs are summed after adding the adapters'."""
        base, adapters = unwrap_adapters(layer)
        self._replace_by_slice(base, "weight", 1)
        for a, b in adapters:
            self._replace_by_slice(a, "weight", 1)
            self.partial.add(b.weight)
        for dropout in getattr(layer, "lora_dropout", nn.ModuleDict()).values():
            if isinstance(dropout, RowDropout):
                dropout.set_feature_slice(self._axis.rank, self._axis.size)
        if splits_input:
            layer.register_forward_pre_hook(lambda _, x: (_SplitInputs.apply(x[0], self._axis),))

        def sum_output(_module: nn.Module, _inputs: Any, y: torch.Tensor) -> torch.Tensor:
            total: torch.Tensor = _SumOutputs.apply(y, self._axis)
            return total if base.bias is None else total + base.bias.to(y.dtype)

        if base.bias is not None:  # it must be added once, after the sum
            base.forward = lambda x: F.linear(x, base.weight)
        layer.output_sum = layer.register_forward_hook(sum_output), sum_output

    def slice_experts(self, layer: Any, config: Any, path: str) -> None:
        """Split each expert's inner features; the outputs are partial sums.

        Gradients of the input and of the router weights that scale experts' outputs are partial
        sums too; the latter, few numbers, are summed in fp32 whatever dtype the model gives them.
        """
        for stack, dim, num_parts in list_stack_slices(layer, config, path):
            self._replace_by_slice(stack.owner, stack.name, dim, num_parts)
            for sliced_layer, whole_layer, adapter_dim in stack.list_adapter_slices(dim):
                self._replace_by_slice(sliced_layer, "weight", adapter_dim, num_parts)
                self.partial.add(whole_layer.weight)

        def sum_gradients(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            hidden, *other_args = args
            floats = (isinstance(a, torch.Tensor) and a.is_floating_point() for a in other_args)
            weights = (
                _SumGradient.apply(a, self._axis, torch.float32) if is_float else a
                for a, is_float in zip(other_args, floats, strict=True)
            )
            return (_SumGradient.apply(hidden, self._axis), *weights)

        layer.register_forward_pre_hook(sum_gradients)
        _hook_output(layer, lambda y: _SumOutputs.apply(y, self._axis))

    def slice_embedding(self, layer: Any) -> None:
        """Each rank holds the vectors of some tokens and returns zeros for all others."""
        self._replace_by_slice(layer, "weight", 0)
        start, num_rows = self.slices[layer.weight].start, layer.weight.shape[0]
        padding = layer.padding_idx
        layer.padding_idx = (
            padding - start if padding is not None and 0 <= padding - start < num_rows else None
        )
        lookup = layer.forward

        def forward(ids_BT: torch.Tensor) -> torch.Tensor:
            local_BT = ids_BT - start
            is_local_BT = (local_BT >= 0) & (local_BT < num_rows)
            vectors_BTD = lookup(local_BT.clamp(0, num_rows - 1)) * is_local_BT.unsqueeze(-1)
            return _SumOutputs.apply(vectors_BTD, self._axis)  # type: ignore[no-any-return]

        layer.forward = forward

    def slice_head(self, layer: Any) -> None:
        """Each rank computes the logits of some tokens; see ``_vocab_parallel_losses``."""
        self.slice_colwise(layer, gathers_output=False)
        layer.first_token = self.slices[unwrap_adapters(layer)[0].weight].start

    def _replace_by_slice(self, owner: Any, name: str, dim: int, num_parts: int = 1) -> None:
        full = getattr(owner, name)
        if full is None:
            return
        if full not in self.slices and full not in self._sliced_params:
            rank, size, length = self._axis.rank, self._axis.size, full.shape[dim] // num_parts
            start, stop = length * rank // size, length * (rank + 1) // size
            local = full.detach().narrow(dim, 0, num_parts * (stop - start))
            sliced_param = nn.Parameter(torch.empty_like(local), full.requires_grad)
            self.slices[sliced_param] = Slice(dim, start, tuple(full.shape), num_parts)
            self._sliced_params[full] = sliced_param
        setattr(owner, name, self._sliced_params.get(full, full))


def _hook_output(layer: nn.Module, change: Callable[[torch.Tensor], Any]) -> None:
    layer.register_forward_hook(lambda _module, _inputs, output: change(output))


def _make_input_gradient_hook(axis: TensorAxis) -> Callable[..., Any]:
    """Return a hook for the parent of columnwise layers: one sum for all that share an input."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (_SumGradient.apply(args[0], axis), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": _SumGradient.apply(kwargs["hidden_states"], axis)}

    return hook


class _SumGradient(torch.autograd.Function):
    """Identity; backward, all-reduces the ranks' partial gradients, in ``dtype`` if given."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, axis: TensorAxis, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        ctx.axis, ctx.dtype = axis, dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        total = ctx.axis.all_reduce(grad.to(ctx.dtype or grad.dtype))
        return total.to(grad.dtype), None, None


class _SumOutputs(torch.autograd.Function):
    """All-reduces the ranks' partial sums; backward, each rank gets the same gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
        return axis.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, None


class _GatherOutputs(torch.autograd.Function):
    """Concatenates the ranks' features; backward, each rank takes its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
        ctx.axis = axis
        return axis.all_gather(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad.chunk(ctx.axis.size, -1)[ctx.axis.rank], None


class _SplitInputs(torch.autograd.Function):
    """Each rank takes its features; backward, they are concatenated again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: TensorAxis) -> torch.Tensor:
        ctx.axis = axis
        return x.chunk(axis.size, -1)[axis.rank]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.axis.all_gather(grad), None


def _vocab_parallel_losses(
    axis: TensorAxis, hidden_ND: torch.Tensor, head: Any, labels_N: torch.Tensor, config: Any
) -> torch.Tensor:
    """Return N cross-entropies; each rank computes the logits of a part of the vocabulary.

    Three numbers per token are all-reduced: maximum, sum of exponentials, label's logit.
    """
    logits_NV = scale_logits(head(_SumGradient.apply(hidden_ND, axis)).float(), config)
    losses_N: torch.Tensor = _VocabParallelCrossEntropy.apply(
        logits_NV, labels_N - head.first_token, axis
    )
    return losses_N


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross-entropy of N tokens over logits whose columns are spread over a group."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: torch.Tensor, local_labels_N: torch.Tensor, axis: TensorAxis
    ) -> torch.Tensor:
        is_local_N = (local_labels_N >= 0) & (local_labels_N < logits_NV.shape[1])
        index_N1 = local_labels_N.clamp(0, logits_NV.shape[1] - 1).unsqueeze(1)
        max_N = axis.all_reduce(logits_NV.amax(1), dist.ReduceOp.MAX)
        shifted_NV = logits_NV - max_N.unsqueeze(1)
        label_N = shifted_NV.gather(1, index_N1).squeeze(1) * is_local_N
        exp_NV = shifted_NV.exp_()
        sums_2N = axis.all_reduce(torch.stack([exp_NV.sum(1), label_N]))
        ctx.save_for_backward(exp_NV.div_(sums_2N[0].unsqueeze(1)), index_N1, is_local_N)
        return sums_2N[0].log() - sums_2N[1]

    @staticmethod
    def backward(ctx: Any, grad_N: torch.Tensor) -> Any:  # type: ignore[override]
        probability_NV, index_N1, is_local_N = ctx.saved_tensors
        grad_NV = probability_NV.scatter_add(
            1, index_N1, -is_local_N.to(probability_NV.dtype).unsqueeze(1)
        )
        return grad_NV * grad_N.unsqueeze(1), None, None
