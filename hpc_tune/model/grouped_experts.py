"""Routed experts and their adapters, computed by matmuls that are grouped by expert.

    tokens sorted by expert -> h = x U + s (x A) B -> act = gate(h) -> y = act D + s (act A) B
    -> out = sum of weight * y over the experts of a token

peft adds its adapters to whole stacks of experts in each forward pass, and makes a dense gradient
of each stack in the backward pass. Here adapters multiply the sorted tokens, as the experts do.
The tokens, h, and the narrow x A and act A are kept for the backward pass. It recomputes the
gating; the gradient of a routing weight is act times the gradient of act. transformers keeps each
token once for each of its experts, h, act and y. torch's grouped matmuls ignore autocast: under it
trained weights are cast for each matmul, and tokens once.

Experts that transformers decorates (``use_experts_implementation``) are replaced in all variants,
except with a norm after the experts; others keep their own forward, inside peft's.

In 16 bits on a CPU, adapters are computed in fp32, since their matmuls are narrow
(``grouped_matmul.py``).

Shapes: T tokens, K experts of a token, S rows sorted by expert (T K, and padding), E experts, I and
O features in and out of a matmul, M between the two, R the rank, padded to whole rows of 16 bytes.
"""

import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hpc_tune.model.grouped_matmul import ROW_ALIGNMENT_BYTES, SortedRows

_WRAPPERS_ATTRIBUTE = "wrappers_of_stacks"
_DECORATOR_FIELDS = {"has_gate", "has_bias", "is_transposed"}


def use_grouped_experts(blocks: Iterable[nn.Module], is_compiled: bool = False) -> int:
    """Replace the forward of the routed experts in ``blocks``; return how many were replaced.

    Stacks and adapters must be gathered when the experts are called, as in ``use_lora_linear``. In
    ``is_compiled`` blocks the experts stay outside the graph.
    """
    parts: list[Any] = [part for block in blocks for part in block.modules()]
    wrappers = [part for part in parts if hasattr(part, "parameter_name")]
    num_replaced = 0
    for experts in filter(can_group_experts, parts):
        wrappers_by_name = {w.parameter_name: w for w in wrappers if w.get_base_layer() is experts}
        if not wrappers_by_name.keys() <= {*stack_names(experts)}:
            continue
        # Not as submodules: the wrappers are around the experts.
        experts.__dict__[_WRAPPERS_ATTRIBUTE] = tuple(
            wrappers_by_name.get(name) for name in stack_names(experts)
        )
        experts.forward = types.MethodType(_experts_forward, experts)
        if is_compiled:
            experts.forward = torch.compiler.disable(experts.forward)
        for wrapper in wrappers_by_name.values():
            wrapper.forward = types.MethodType(_call_base, wrapper)
        num_replaced += 1
    return num_replaced


def can_group_experts(part: Any) -> bool:
    """Whether a module is routed experts that are computed here.

    Experts followed by a norm are not; before 5.20, transformers has no such experts.
    """
    has_norm = getattr(part, "has_post_expert_norm", False)
    return vars(part).keys() >= _DECORATOR_FIELDS and not has_norm


def stack_names(experts: Any) -> tuple[str, str]:
    """Return the names of the stacks of the first matmul (of tokens) and of the second one."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def unpacker_module_name(stack: str) -> str:
    """Return the name of the module that unpacks a stack of 4 or 8 bits."""
    return f"{stack}_packing"


def _call_base(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Serve as forward of peft's wrapper: the experts inside add the adapter themselves."""
    return self.base_layer(*args, **kwargs)


@dataclass(frozen=True)
class _ExpertLayer:
    """A block's routed experts, and peft's wrappers of their two stacks, None without adapters."""

    experts: Any
    wrappers: tuple[Any, ...]

    def stacks(self) -> list[torch.Tensor]:
        return [getattr(self.experts, name) for name in stack_names(self.experts)]

    def biases(self) -> list[torch.Tensor | None]:
        """Return the biases of both matmuls, each None without one."""
        names = stack_names(self.experts)
        return [
            getattr(self.experts, f"{n}_bias") if self.experts.has_bias else None for n in names
        ]

    def lora_factors(self) -> list[torch.Tensor | None]:
        """Return A and B of both stacks in peft's layout."""
        factors: list[torch.Tensor | None] = []
        for wrapper in self.wrappers:
            if wrapper is None:
                factors += [None, None]
            else:
                factors += [wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight]
        return factors

    def weights(self) -> list[torch.Tensor | None]:
        """Return stacks, biases and LoRA factors in the order that ``make_matmul`` takes."""
        return [*self.stacks(), *self.biases(), *self.lora_factors()]

    def make_matmul(
        self,
        matmul_index: int,
        weights: Sequence[torch.Tensor | None],
        dtype: torch.dtype | None = None,
    ) -> "_ExpertMatmul":
        """Return the first (``matmul_index`` = 0) or second matmul, in ``dtype`` or its stack's.

        A packed stack is unpacked for it: this takes the bytes of its values in the compute dtype.
        """
        stack, bias, (a, b) = (
            weights[matmul_index],
            weights[2 + matmul_index],
            weights[4 + 2 * matmul_index : 6 + 2 * matmul_index],
        )
        assert stack is not None
        packing = getattr(
            self.experts, unpacker_module_name(stack_names(self.experts)[matmul_index]), None
        )
        if packing is not None:
            stack = packing.unpack(stack)
        stack = stack.to(dtype)
        bias = None if bias is None else bias.to(stack.dtype)
        weight_EIO = stack if self.experts.is_transposed else stack.transpose(1, 2)
        adapter = None
        if a is not None and b is not None:
            adapter = _ExpertAdapter.from_peft(
                a, b, self.wrappers[matmul_index].scaling["default"], weight_EIO
            )
        return _ExpertMatmul(weight_EIO, bias, adapter)

    def apply_gate(self, h_SM: torch.Tensor) -> torch.Tensor:
        """Return the input of the second matmul."""
        act = self.experts._apply_gate if self.experts.has_gate else self.experts.act_fn
        act_SM: torch.Tensor = act(h_SM)
        return act_SM


@dataclass(frozen=True)
class _ExpertAdapter:
    """A and B of each expert, with a padded rank; B includes the adapter's scale."""

    a_EIR: torch.Tensor
    b_ERO: torch.Tensor
    scale: float
    rank: int

    @classmethod
    def from_peft(
        cls, a: torch.Tensor, b: torch.Tensor, scale: float, weight_EIO: torch.Tensor
    ) -> "_ExpertAdapter":
        """Split peft's two matrices: A's rows are ordered by expert, B's columns by rank."""
        num_experts, dtype = len(weight_EIO), weight_EIO.dtype
        if weight_EIO.device.type == "cpu":
            dtype = torch.promote_types(dtype, torch.float32)
        a_ERI = a.to(dtype).view(num_experts, -1, a.shape[1])
        b_ORE = (scale * b).to(dtype).view(b.shape[0], -1, num_experts)
        rank = a_ERI.shape[1]
        padding = -rank % (ROW_ALIGNMENT_BYTES // dtype.itemsize)
        a_EIR = F.pad(a_ERI, (0, 0, 0, padding)).transpose(1, 2)
        b_ERO = F.pad(b_ORE.permute(2, 1, 0), (0, 0, 0, padding)).contiguous()
        return cls(a_EIR, b_ERO, scale, rank)

    def to_peft_gradients(
        self, grad_a_ERI: torch.Tensor, grad_b_ERO: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grad_a = grad_a_ERI[:, : self.rank].flatten(0, 1)
        grad_b = (self.scale * grad_b_ERO[:, : self.rank]).permute(2, 1, 0).flatten(1)
        return grad_a, grad_b


_AdapterGradients = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class _ExpertMatmul:
    """x W + bias + (x A) B for each expert."""

    weight_EIO: torch.Tensor
    bias_EO: torch.Tensor | None
    adapter: _ExpertAdapter | None

    def forward(
        self, x_SI: torch.Tensor, rows: SortedRows
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the result, and x A."""
        out_SO = rows.multiply_by_expert(x_SI, self.weight_EIO)
        if self.bias_EO is not None:
            out_SO = out_SO + self.bias_EO.index_select(0, rows.experts())
        if self.adapter is None:
            return out_SO, None
        low_rank_SR = rows.multiply_by_expert(x_SI.to(self.adapter.a_EIR.dtype), self.adapter.a_EIR)
        adapter_SO = rows.multiply_by_expert(low_rank_SR, self.adapter.b_ERO)
        # Selective recompute keeps the result of W, which must not be changed in place then.
        is_traced = _get_current_dispatch_mode() is not None
        sum_SO = torch.add(out_SO, adapter_SO) if is_traced else out_SO.add_(adapter_SO)
        return sum_SO.to(x_SI.dtype), low_rank_SR

    def backward(
        self,
        x_SI: torch.Tensor | None,
        low_rank_SR: torch.Tensor | None,
        grad_SO: torch.Tensor,
        rows: SortedRows,
    ) -> tuple[torch.Tensor, _AdapterGradients]:
        """Return the gradients of x, and of A and B in peft's layout; only A needs ``x_SI``."""
        grad_SI = rows.multiply_by_expert(grad_SO, self.weight_EIO.transpose(1, 2))
        if self.adapter is None or low_rank_SR is None or x_SI is None:
            return grad_SI, (None, None)
        a_ERI, b_ERO = self.adapter.a_EIR.transpose(1, 2), self.adapter.b_ERO
        grad_SO = grad_SO.to(b_ERO.dtype)
        grad_b = rows.weight_gradient(low_rank_SR, grad_SO, b_ERO)
        grad_SR = rows.multiply_by_expert(grad_SO, b_ERO.transpose(1, 2))
        del grad_SO
        grad_a = rows.weight_gradient(grad_SR, x_SI.to(a_ERI.dtype), a_ERI)
        grad_SI.add_(rows.multiply_by_expert(grad_SR, a_ERI))
        return grad_SI, self.adapter.to_peft_gradients(grad_a, grad_b)

    def weight_gradient(
        self, x_SI: torch.Tensor, grad_SO: torch.Tensor, rows: SortedRows, is_transposed: bool
    ) -> torch.Tensor:
        if is_transposed:
            return rows.weight_gradient(x_SI, grad_SO, self.weight_EIO)
        return rows.weight_gradient(grad_SO, x_SI, self.weight_EIO.transpose(1, 2))


def _experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    layer = _ExpertLayer(self, self.__dict__[_WRAPPERS_ATTRIBUTE])
    out_TO: torch.Tensor = _GroupedExpertsFunction.apply(
        layer, hidden_states, top_k_index, top_k_weights, *layer.weights()
    )
    return out_TO


class _GroupedExpertsFunction(torch.autograd.Function):
    """The experts' output; backward, gradients of tokens, routing weights and trained weights.

    Weights come in the order of ``_ExpertLayer.weights``: two stacks, two biases, A and B of both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layer: _ExpertLayer,
        x_TI: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        *weights: torch.Tensor | None,
    ) -> torch.Tensor:
        up = layer.make_matmul(0, weights, _autocast_dtype(x_TI.device, weights))
        dtype = up.weight_EIO.dtype
        rows = SortedRows.sort_by_expert(index_TK, len(up.weight_EIO), dtype)
        ctx.layer, ctx.x_dtype = layer, x_TI.dtype
        if dtype.itemsize < x_TI.dtype.itemsize:  # a token is cast once, not for each expert
            x_TI = x_TI.to(dtype)
        x_SI = x_TI.index_select(0, rows.tokens()).to(dtype)
        rows.clear_padding(x_SI)
        h_SM, low_up_SR = up.forward(x_SI, rows)
        del up, x_SI
        down = layer.make_matmul(1, weights, dtype)
        y_SO, low_down_SR = down.forward(layer.apply_gate(h_SM), rows)
        tensors = (x_TI, weights_TK, rows.ends_E, rows.row_indices_TK, h_SM, low_up_SR, low_down_SR)
        ctx.save_for_backward(*tensors, *weights)
        return rows.sum_by_token(y_SO, weights_TK.to(dtype)).to(ctx.x_dtype)

    @staticmethod
    def backward(ctx: Any, grad_TO: torch.Tensor) -> Any:  # type: ignore[override]
        x_TI, weights_TK, ends_E, row_indices_TK, h_SM, low_up_SR, low_down_SR, *weights = (
            ctx.saved_tensors
        )
        is_trained, is_transposed = ctx.needs_input_grad[4:], ctx.layer.experts.is_transposed
        rows, dtype = SortedRows(ends_E, row_indices_TK, len(h_SM)), h_SM.dtype
        token_S = rows.tokens()
        with torch.enable_grad():
            h_SM = h_SM.detach().requires_grad_()
            gated_SM = ctx.layer.apply_gate(h_SM)
        act_SM = gated_SM.detach()
        # Routing weights are not multiplied into this gradient, but into narrower tensors.
        weight_S1 = rows.row_weights(weights_TK.to(dtype))
        grad_SO = grad_TO.index_select(0, token_S).to(dtype)
        low_down_SR = None if low_down_SR is None else low_down_SR * weight_S1
        grads: list[torch.Tensor | None] = [None] * len(weights)
        down, weighted_SM = ctx.layer.make_matmul(1, weights, dtype), act_SM * weight_S1
        grad_SM, grads[6:] = down.backward(weighted_SM, low_down_SR, grad_SO, rows)
        if is_trained[1]:
            grads[1] = down.weight_gradient(weighted_SM, grad_SO, rows, is_transposed)
        if is_trained[3]:
            grads[3] = rows.sum_by_expert(grad_SO, weight_S1, down.bias_EO)
        grad_weight_S = (grad_SM * act_SM).sum(1)
        if down.bias_EO is not None:
            grad_weight_S += (grad_SO * down.bias_EO.index_select(0, rows.experts())).sum(1)
        del down, grad_SO, act_SM, weighted_SM
        [grad_h_SM] = torch.autograd.grad(gated_SM, h_SM, grad_SM.mul_(weight_S1))
        up = ctx.layer.make_matmul(0, weights, dtype)
        needs_x = up.adapter or is_trained[0]
        x_SI = x_TI.index_select(0, token_S).to(dtype) if needs_x else None
        grad_SI, grads[4:6] = up.backward(x_SI, low_up_SR, grad_h_SM, rows)
        if is_trained[0]:
            grads[0] = up.weight_gradient(x_SI, grad_h_SM, rows, is_transposed)
        if is_trained[2]:
            grads[2] = rows.sum_by_expert(grad_h_SM, torch.ones_like(weight_S1), up.bias_EO)
        grad_TI = rows.sum_by_token(grad_SI).to(ctx.x_dtype)
        grad_TK = grad_weight_S[row_indices_TK].to(weights_TK.dtype)
        cast_grads = [
            None if grad is None else grad.to(weight.dtype)
            for grad, weight in zip(grads, weights, strict=True)
        ]
        return None, grad_TI, None, grad_TK, *cast_grads


def _autocast_dtype(
    device: torch.device, weights: Sequence[torch.Tensor | None]
) -> torch.dtype | None:
    """Return the dtype of autocast if it is on and a stack is trained, else None."""
    is_cast = torch.is_autocast_enabled(device.type) and any(
        stack is not None and stack.requires_grad for stack in weights[:2]
    )
    return torch.get_autocast_dtype(device.type) if is_cast else None
