"""Routed experts with frozen weights, and adapters on them, in products grouped by expert.

    tokens sorted by expert -> h = x U + s (x A) B -> act = gate(h) -> y = act D + s (act A) B
    -> out = sum of weight * y over the experts of a token

peft adds its adapters to whole stacks of experts in each forward pass, and makes a dense gradient
of each in the backward pass. Here adapters are products with the sorted tokens, as the experts are.
Kept for the backward pass are the tokens as they came, h, and the narrow x A and act A: gating is
done again, and the gradient of a routing weight is that of act, times act.

Experts that transformers decorates (``use_experts_implementation``) are replaced, in all its
variants but with a norm behind the experts; others keep their own forward, and peft's around it.

Shapes: T tokens, K experts of a token, S = T K rows sorted by expert, E experts, I and O features
in and out of a product, M between the two, R the rank, padded to whole rows of 16 bytes.
"""

import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

ROW_BYTES = 16  # what a grouped product wants a row to be a multiple of
_WRAPPERS = "wrappers_of_stacks"
_DECORATED = {"has_gate", "has_bias", "has_post_expert_norm", "is_transposed"}


def use_grouped_experts(blocks: Iterable[nn.Module], compiled: bool = False) -> int:
    """Replace the forward of the frozen routed experts in ``blocks``; return how many there were.

    Stacks and adapters must be whole when the experts are called, as in ``use_lora_linear``. In
    blocks that are ``compiled`` theirs stay outside of the graph.
    """
    parts: list[Any] = [part for block in blocks for part in block.modules()]
    wrappers = [part for part in parts if hasattr(part, "parameter_name")]
    replaced = 0
    for experts in filter(is_decorated, parts):
        mine = {w.parameter_name: w for w in wrappers if w.get_base_layer() is experts}
        if not (_is_frozen(experts) and mine.keys() <= {*stack_names(experts)}):
            continue
        # Not as parts of the experts: they are around them.
        experts.__dict__[_WRAPPERS] = tuple(mine.get(name) for name in stack_names(experts))
        experts.forward = types.MethodType(_forward, experts)
        if compiled:
            experts.forward = torch.compiler.disable(experts.forward)
        for wrapper in mine.values():
            wrapper.forward = types.MethodType(_inside, wrapper)
        replaced += 1
    return replaced


def is_decorated(part: Any) -> bool:
    """Whether a module is routed experts that are computed here where they are frozen."""
    return vars(part).keys() >= _DECORATED and not part.has_post_expert_norm


def _is_frozen(part: nn.Module) -> bool:
    return not any(p.requires_grad for p in part.parameters(recurse=False))


def stack_names(experts: Any) -> tuple[str, str]:
    """Return the names of the stacks that take the tokens, and what is between the products."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def packing_name(stack: str) -> str:
    """Return the name of the module that unpacks a stack, where it is in 4 bits."""
    return f"{stack}_packing"


def _inside(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Be the forward of peft's wrapper: the experts inside add its adapter themselves."""
    return self.base_layer(*args, **kwargs)


@dataclass(frozen=True)
class _Layer:
    """A block's routed experts, and peft's wrappers of their two stacks, None without adapters."""

    experts: Any
    wrappers: tuple[Any, ...]

    def stacks(self) -> list[torch.Tensor]:
        """Return both stacks as the module has them."""
        return [getattr(self.experts, name) for name in stack_names(self.experts)]

    def factors(self) -> list[torch.Tensor | None]:
        """Return A and B of both stacks as peft has them."""
        found: list[torch.Tensor | None] = []
        for one in self.wrappers:
            if one is None:
                found += [None, None]
            else:
                found += [one.lora_A["default"].weight, one.lora_B["default"].weight]
        return found

    def product(
        self, i: int, stacks: Sequence[torch.Tensor], factors: Sequence[torch.Tensor | None]
    ) -> "_Product":
        """Return the first or second product, of what ``stacks`` and ``factors`` gave.

        A stack in 4 bits is made whole for it: the bytes of its values in the computed dtype.
        """
        name, stack = stack_names(self.experts)[i], stacks[i]
        packing = getattr(self.experts, packing_name(name), None)
        if packing is not None:
            stack = packing.unpack(stack)
        weight_EIO = stack if self.experts.is_transposed else stack.transpose(1, 2)
        bias = getattr(self.experts, f"{name}_bias") if self.experts.has_bias else None
        a, b = factors[2 * i : 2 * i + 2]
        if a is None or b is None:
            return _Product(weight_EIO, bias, None)
        scale = self.wrappers[i].scaling["default"]
        return _Product(weight_EIO, bias, _Adapter.of(a, b, scale, weight_EIO))

    def gate(self, h_SM: torch.Tensor) -> torch.Tensor:
        """Return what goes into the second product."""
        act = self.experts._apply_gate if self.experts.has_gate else self.experts.act_fn
        act_SM: torch.Tensor = act(h_SM)
        return act_SM


@dataclass(frozen=True)
class _Rows:
    """Which expert each row is for, and behind which row each expert's end."""

    expert_S: torch.Tensor
    ends_E: torch.Tensor

    def times(self, x_SI: torch.Tensor, weight_EIO: torch.Tensor) -> torch.Tensor:
        """Return each row times the matrix of its expert."""
        out_SO: torch.Tensor
        if _is_grouped(x_SI):
            out_SO = F.grouped_mm(x_SI, weight_EIO, offs=self.ends_E)
        else:
            out_SO = torch.ops.transformers.grouped_mm_fallback(x_SI, weight_EIO, self.ends_E)
        return out_SO

    def backward(
        self, x_SI: torch.Tensor, weight_EIO: torch.Tensor, grad_SO: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of both sides of ``times``."""
        if _is_grouped(x_SI):
            grad_EIO = F.grouped_mm(x_SI.t(), grad_SO, offs=self.ends_E)
            return self.times(grad_SO, weight_EIO.transpose(1, 2)), grad_EIO
        grads: tuple[torch.Tensor, torch.Tensor]
        grads = torch.ops.transformers.grouped_mm_fallback_backward(
            x_SI, weight_EIO, self.ends_E, grad_SO
        )
        return grads


def _is_grouped(x: torch.Tensor) -> bool:
    """Whether torch has a grouped product of this dtype on all devices, and in traces."""
    return x.dtype == torch.bfloat16


@dataclass(frozen=True)
class _Adapter:
    """A and B of each expert, of a padded rank; B has the adapter's scale in it."""

    a_EIR: torch.Tensor
    b_ERO: torch.Tensor
    scale: float
    rank: int

    @classmethod
    def of(
        cls, a: torch.Tensor, b: torch.Tensor, scale: float, weight_EIO: torch.Tensor
    ) -> "_Adapter":
        """Cut what peft has in one matrix each: A's rows by expert, B's columns by rank."""
        num_experts, dtype = len(weight_EIO), weight_EIO.dtype
        a_ERI = a.to(dtype).view(num_experts, -1, a.shape[1])
        b_ORE = (scale * b).to(dtype).view(b.shape[0], -1, num_experts)
        rank = a_ERI.shape[1]
        padding = -rank % (ROW_BYTES // dtype.itemsize)
        a_EIR = F.pad(a_ERI, (0, 0, 0, padding)).transpose(1, 2)
        b_ERO = F.pad(b_ORE.permute(2, 1, 0), (0, 0, 0, padding)).contiguous()
        return cls(a_EIR, b_ERO, scale, rank)

    def as_peft(
        self, grad_a_EIR: torch.Tensor, grad_b_ERO: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gradients in the shapes that peft has A and B in."""
        grad_a = grad_a_EIR.transpose(1, 2)[:, : self.rank].flatten(0, 1)
        grad_b = (self.scale * grad_b_ERO[:, : self.rank]).permute(2, 1, 0).flatten(1)
        return grad_a, grad_b


_Gradients = tuple[torch.Tensor | None, torch.Tensor | None]


@dataclass(frozen=True)
class _Product:
    """x W + bias + (x A) B for each expert."""

    weight_EIO: torch.Tensor
    bias_EO: torch.Tensor | None
    adapter: _Adapter | None

    def forward(self, x_SI: torch.Tensor, rows: _Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the product, and x A."""
        out_SO = rows.times(x_SI, self.weight_EIO)
        if self.bias_EO is not None:
            out_SO = out_SO + self.bias_EO[rows.expert_S]
        if self.adapter is None:
            return out_SO, None
        low_SR = rows.times(x_SI, self.adapter.a_EIR)
        more_SO = rows.times(low_SR, self.adapter.b_ERO)
        # Selective recompute keeps the product with W, which must not be changed in place then.
        is_traced = _get_current_dispatch_mode() is not None
        return out_SO + more_SO if is_traced else out_SO.add_(more_SO), low_SR

    def backward(
        self, x_SI: torch.Tensor, low_SR: torch.Tensor | None, grad_SO: torch.Tensor, rows: _Rows
    ) -> tuple[torch.Tensor, _Gradients]:
        """Return the gradients of x, and of A and B as peft has them."""
        grad_SI = rows.times(grad_SO, self.weight_EIO.transpose(1, 2))
        if self.adapter is None or low_SR is None:
            return grad_SI, (None, None)
        grad_SR, grad_b = rows.backward(low_SR, self.adapter.b_ERO, grad_SO)
        more_SI, grad_a = rows.backward(x_SI, self.adapter.a_EIR, grad_SR)
        return grad_SI.add_(more_SI), self.adapter.as_peft(grad_a, grad_b)


def _forward(
    self: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    layer = _Layer(self, self.__dict__[_WRAPPERS])
    out_TO: torch.Tensor = _GroupedExperts.apply(
        layer, hidden_states, top_k_index, top_k_weights, *layer.factors()
    )
    return out_TO


class _GroupedExperts(torch.autograd.Function):
    """The experts' output; backward, the gradients of tokens, routing weights and adapters."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: _Layer,
        x_TI: torch.Tensor,
        index_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        *factors: torch.Tensor | None,
    ) -> torch.Tensor:
        stacks = layer.stacks()
        up = layer.product(0, stacks, factors)
        expert_S, order_S = torch.sort(index_TK.flatten(), stable=True)
        numbers_E = torch.arange(len(up.weight_EIO), device=expert_S.device)
        ends_E = torch.searchsorted(expert_S, numbers_E, right=True, out_int32=True)
        rows = _Rows(expert_S, ends_E)
        x_SI = x_TI[order_S // index_TK.shape[1]].to(up.weight_EIO.dtype)
        h_SM, low_up_SR = up.forward(x_SI, rows)
        del up, x_SI
        down = layer.product(1, stacks, factors)
        y_SO, low_down_SR = down.forward(layer.gate(h_SM), rows)
        places_S = torch.empty_like(order_S)
        places_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        kept = (x_TI, weights_TK, expert_S, ends_E, order_S, places_S, h_SM, low_up_SR, low_down_SR)
        ctx.save_for_backward(*kept, *stacks, *factors)
        ctx.layer = layer
        y_TKO = y_SO[places_S].view(*index_TK.shape, -1)
        return (y_TKO * weights_TK.unsqueeze(-1)).sum(1).to(x_TI.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TO: torch.Tensor) -> Any:  # type: ignore[override]
        x_TI, weights_TK, expert_S, ends_E, order_S, places_S, *rest = ctx.saved_tensors
        h_SM, low_up_SR, low_down_SR, *weights = rest
        stacks, factors = weights[:2], weights[2:]
        rows, dtype = _Rows(expert_S, ends_E), h_SM.dtype
        token_S = order_S // weights_TK.shape[1]
        with torch.enable_grad():
            h_SM = h_SM.detach().requires_grad_()
            gated_SM = ctx.layer.gate(h_SM)
        act_SM = gated_SM.detach()
        # The gradient is that of y before it is weighted: the weight is put on what is narrower.
        weight_S1 = weights_TK.flatten()[order_S].unsqueeze(1).to(dtype)
        grad_SO = grad_TO[token_S].to(dtype)
        low_down_SR = None if low_down_SR is None else low_down_SR * weight_S1
        down = ctx.layer.product(1, stacks, factors)
        grad_SM, of_down = down.backward(act_SM * weight_S1, low_down_SR, grad_SO, rows)
        grad_weight_S = (grad_SM * act_SM).sum(1)
        if down.bias_EO is not None:
            grad_weight_S += (grad_SO * down.bias_EO[expert_S]).sum(1)
        del down, grad_SO, act_SM
        [grad_h_SM] = torch.autograd.grad(gated_SM, h_SM, grad_SM.mul_(weight_S1))
        up = ctx.layer.product(0, stacks, factors)
        grad_SI, of_up = up.backward(x_TI[token_S].to(dtype), low_up_SR, grad_h_SM, rows)
        grad_TI = grad_SI[places_S].view(*weights_TK.shape, -1).sum(1).to(x_TI.dtype)
        grad_TK = grad_weight_S[places_S].view_as(weights_TK).to(weights_TK.dtype)
        of_factors = [
            None if grad is None else grad.to(factor.dtype)
            for grad, factor in zip((*of_up, *of_down), factors, strict=True)
        ]
        return None, grad_TI, None, grad_TK, *of_factors
