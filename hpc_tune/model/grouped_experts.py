"""Routed experts with frozen weights, and adapters on them, in products grouped by expert.

    tokens sorted by expert -> h = x U + s (x A) B -> act = gate(h) -> y = act D + s (act A) B
    -> out = sum of weight * y over the experts of a token

peft adds its adapters to whole stacks of experts in each forward pass, and makes a dense gradient
of each in the backward pass. Here adapters are products with the sorted tokens, as the experts are.
Kept for the backward pass are the tokens as they came, h, and the narrow x A and act A: gating is
done again, and the gradient of a routing weight is that of act, times act.

Experts that transformers decorates (``use_experts_implementation``) are replaced, in all its
variants but with a norm behind the experts; others keep their own forward, and peft's around it.

On a CPU a product in 16 bits has a kernel for each number of rows, which takes as long to make as
five products: there an expert's rows are padded to one of few numbers, and adapters, whose products
are narrow, are computed in fp32, which needs no such kernels.

Shapes: T tokens, K experts of a token, S rows sorted by expert (T K, and padding), E experts, I and
O features in and out of a product, M between the two, R the rank, padded to whole rows of 16 bytes.
"""

import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

ROW_BYTES = 16  # what a grouped product wants a row to be a multiple of
MIN_STEP, STEPS = 16, 4  # a padded expert's rows: a multiple of 16, at least 4 numbers per octave
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
    """Behind which row each expert's end, and in which row each token is for its experts."""

    ends_E: torch.Tensor
    places_TK: torch.Tensor
    num_rows: int

    @classmethod
    def of(cls, index_TK: torch.Tensor, num_experts: int, dtype: torch.dtype) -> "_Rows":
        """Sort tokens by expert; in 16 bits on a CPU, with padding behind those of each."""
        expert_S, order_S = torch.sort(index_TK.flatten(), stable=True)
        numbers_E = torch.arange(num_experts, device=expert_S.device)
        ends_E = torch.searchsorted(expert_S, numbers_E, right=True, out_int32=True)
        sorted_S, num_rows = torch.arange(len(order_S), device=order_S.device), len(order_S)
        # In a trace experts have no numbers of tokens: it knows no padding.
        if _is_padded(index_TK, dtype):
            counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1))
            padded_E = torch.tensor([padded(count) for count in counts_E.tolist()])
            more_E = (padded_E - counts_E).cumsum(0)
            sorted_S += (more_E - padded_E + counts_E)[expert_S]
            ends_E, num_rows = (ends_E + more_E).int(), num_rows + int(more_E[-1])
        places_S = torch.empty_like(order_S)
        places_S[order_S] = sorted_S
        return cls(ends_E, places_S.view_as(index_TK), num_rows)

    def tokens(self) -> torch.Tensor:
        """Return which token each row is of; of padding, the first one."""
        token_S = self.places_TK.new_zeros(self.num_rows)
        num_tokens, num_chosen = self.places_TK.shape
        numbers_TK = torch.arange(num_tokens, device=token_S.device).unsqueeze(1)
        places_S = self.places_TK.flatten()
        return token_S.scatter_(0, places_S, numbers_TK.expand(-1, num_chosen).flatten())

    def experts(self) -> torch.Tensor:
        """Return which expert each row is for."""
        numbers_S = torch.arange(self.num_rows, device=self.ends_E.device, dtype=torch.int32)
        return torch.searchsorted(self.ends_E, numbers_S, right=True)

    def spread(self, weights_TK: torch.Tensor) -> torch.Tensor:
        """Return the weight of each row, S x 1; of padding, 0."""
        weight_S = weights_TK.new_zeros(self.num_rows)
        return weight_S.scatter_(0, self.places_TK.flatten(), weights_TK.flatten()).unsqueeze(1)

    def clear_padding(self, x_SI: torch.Tensor) -> None:
        """Make rows of padding zero, so that nothing in them can overflow."""
        if self.num_rows > self.places_TK.numel():
            is_padding_S = torch.ones(self.num_rows, dtype=torch.bool)
            is_padding_S[self.places_TK.flatten()] = False
            x_SI.index_fill_(0, is_padding_S.nonzero().squeeze(1), 0.0)

    def sum_of(self, y_SO: torch.Tensor, weights_TK: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum of each token's rows, times their weights, in one pass."""
        return F.embedding_bag(self.places_TK, y_SO, mode="sum", per_sample_weights=weights_TK)

    def times(self, x_SI: torch.Tensor, weight_EIO: torch.Tensor) -> torch.Tensor:
        """Return each row times the matrix of its expert."""
        out_SO: torch.Tensor
        if _is_grouped(x_SI, weight_EIO):
            out_SO = F.grouped_mm(x_SI, weight_EIO, offs=self.ends_E)
        else:
            out_SO = torch.ops.transformers.grouped_mm_fallback(x_SI, weight_EIO, self.ends_E)
        return out_SO

    def gradient(
        self, low_SR: torch.Tensor, wide_SN: torch.Tensor, weight_ERN: torch.Tensor
    ) -> torch.Tensor:
        """Return, for each expert, the sum of its rows' outer products, in the shape of a weight.

        The narrow side first: the other way round takes up to five times as long on a CPU.
        """
        out_ERN: torch.Tensor
        if _is_grouped(low_SR, weight_ERN):
            out_ERN = F.grouped_mm(low_SR.t(), wide_SN, offs=self.ends_E)
        else:
            _, out_ERN = torch.ops.transformers.grouped_mm_fallback_backward(
                low_SR, weight_ERN, self.ends_E, wide_SN
            )
        return out_ERN


def padded(num_rows: int) -> int:
    """Return as how many rows a CPU computes an expert's in 16 bits: at most a quarter more, or 16.

    Up to 64 a row is nearly free: reading an expert takes as long as computing 36 rows.
    """
    step = max(MIN_STEP, (1 << num_rows.bit_length()) // 2 // STEPS)
    return -(-num_rows // step) * step


def _is_padded(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        tensor.device.type == "cpu" and dtype.itemsize == 2 and not isinstance(tensor, FakeTensor)
    )


def _is_grouped(x: torch.Tensor, weight_EIO: torch.Tensor) -> bool:
    """Whether torch has a grouped product for these; in traces it knows bf16 alone."""
    dtypes = {torch.bfloat16} if isinstance(x, FakeTensor) else {torch.bfloat16, torch.float32}
    each = ROW_BYTES // x.dtype.itemsize
    return x.dtype in dtypes and not any(width % each for width in weight_EIO.shape[1:])


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
        if weight_EIO.device.type == "cpu":
            dtype = torch.promote_types(dtype, torch.float32)
        a_ERI = a.to(dtype).view(num_experts, -1, a.shape[1])
        b_ORE = (scale * b).to(dtype).view(b.shape[0], -1, num_experts)
        rank = a_ERI.shape[1]
        padding = -rank % (ROW_BYTES // dtype.itemsize)
        a_EIR = F.pad(a_ERI, (0, 0, 0, padding)).transpose(1, 2)
        b_ERO = F.pad(b_ORE.permute(2, 1, 0), (0, 0, 0, padding)).contiguous()
        return cls(a_EIR, b_ERO, scale, rank)

    def as_peft(
        self, grad_a_ERI: torch.Tensor, grad_b_ERO: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gradients in the shapes that peft has A and B in."""
        grad_a = grad_a_ERI[:, : self.rank].flatten(0, 1)
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
            out_SO = out_SO + self.bias_EO.index_select(0, rows.experts())
        if self.adapter is None:
            return out_SO, None
        low_SR = rows.times(x_SI.to(self.adapter.a_EIR.dtype), self.adapter.a_EIR)
        more_SO = rows.times(low_SR, self.adapter.b_ERO)
        # Selective recompute keeps the product with W, which must not be changed in place then.
        is_traced = _get_current_dispatch_mode() is not None
        sum_SO = torch.add(out_SO, more_SO) if is_traced else out_SO.add_(more_SO)
        return sum_SO.to(x_SI.dtype), low_SR

    def backward(
        self,
        x_SI: torch.Tensor | None,
        low_SR: torch.Tensor | None,
        grad_SO: torch.Tensor,
        rows: _Rows,
    ) -> tuple[torch.Tensor, _Gradients]:
        """Return the gradients of x, and of A and B as peft has them; ``x_SI`` is for A alone."""
        grad_SI = rows.times(grad_SO, self.weight_EIO.transpose(1, 2))
        if self.adapter is None or low_SR is None or x_SI is None:
            return grad_SI, (None, None)
        a_ERI, b_ERO = self.adapter.a_EIR.transpose(1, 2), self.adapter.b_ERO
        grad_SO = grad_SO.to(b_ERO.dtype)
        grad_b = rows.gradient(low_SR, grad_SO, b_ERO)
        grad_SR = rows.times(grad_SO, b_ERO.transpose(1, 2))
        del grad_SO
        grad_a = rows.gradient(grad_SR, x_SI.to(a_ERI.dtype), a_ERI)
        return grad_SI.add_(rows.times(grad_SR, a_ERI)), self.adapter.as_peft(grad_a, grad_b)


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
        dtype = up.weight_EIO.dtype
        rows = _Rows.of(index_TK, len(up.weight_EIO), dtype)
        x_SI = x_TI.index_select(0, rows.tokens()).to(dtype)
        rows.clear_padding(x_SI)
        h_SM, low_up_SR = up.forward(x_SI, rows)
        del up, x_SI
        down = layer.product(1, stacks, factors)
        y_SO, low_down_SR = down.forward(layer.gate(h_SM), rows)
        kept = (x_TI, weights_TK, rows.ends_E, rows.places_TK, h_SM, low_up_SR, low_down_SR)
        ctx.save_for_backward(*kept, *stacks, *factors)
        ctx.layer = layer
        return rows.sum_of(y_SO, weights_TK.to(dtype)).to(x_TI.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TO: torch.Tensor) -> Any:  # type: ignore[override]
        x_TI, weights_TK, ends_E, places_TK, h_SM, low_up_SR, low_down_SR, *weights = (
            ctx.saved_tensors
        )
        stacks, factors = weights[:2], weights[2:]
        rows, dtype = _Rows(ends_E, places_TK, len(h_SM)), h_SM.dtype
        token_S = rows.tokens()
        with torch.enable_grad():
            h_SM = h_SM.detach().requires_grad_()
            gated_SM = ctx.layer.gate(h_SM)
        act_SM = gated_SM.detach()
        # The gradient is that of y before it is weighted: the weight is put on what is narrower.
        weight_S1 = rows.spread(weights_TK.to(dtype))
        grad_SO = grad_TO.index_select(0, token_S).to(dtype)
        low_down_SR = None if low_down_SR is None else low_down_SR * weight_S1
        down = ctx.layer.product(1, stacks, factors)
        grad_SM, of_down = down.backward(act_SM * weight_S1, low_down_SR, grad_SO, rows)
        grad_weight_S = (grad_SM * act_SM).sum(1)
        if down.bias_EO is not None:
            grad_weight_S += (grad_SO * down.bias_EO.index_select(0, rows.experts())).sum(1)
        del down, grad_SO, act_SM
        [grad_h_SM] = torch.autograd.grad(gated_SM, h_SM, grad_SM.mul_(weight_S1))
        up = ctx.layer.product(0, stacks, factors)
        x_SI = x_TI.index_select(0, token_S).to(dtype) if up.adapter else None
        grad_SI, of_up = up.backward(x_SI, low_up_SR, grad_h_SM, rows)
        grad_TI = rows.sum_of(grad_SI).to(x_TI.dtype)
        grad_TK = grad_weight_S[places_TK].to(weights_TK.dtype)
        of_factors = [
            None if grad is None else grad.to(factor.dtype)
            for grad, factor in zip((*of_up, *of_down), factors, strict=True)
        ]
        return None, grad_TI, None, grad_TK, *of_factors
