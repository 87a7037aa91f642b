"""LoRA layers in as few passes over the activations as their arithmetic allows.

    y = x W^T + bias + s (x A^T) B^T                       LoRA; QLoRA unpacks W from 4 bits
    y = m / |W + s B A| (x W^T + s (x A^T) B^T) + bias     DoRA (arXiv:2402.09353)

peft casts ``x`` to the adapters' fp32, computes the adapter's output, scales it and adds it: these
are passes over tensors as wide as the layer, forward and backward, and several of these tensors are
kept for the backward pass. Here adapters are cast to the dtype of ``x``, their output is
accumulated inside the matmul (BLAS's alpha and beta), and only ``x`` and the low-rank ``x A^T`` are
kept. With dropout, ``x A^T`` takes ``x`` after dropout.

Layers that share an input (queries, keys and values; gate and up) are computed together when the
first of them is called: their A's are one matrix, and the gradient of the input is accumulated by
the matmuls. The last section keeps cast adapters and DoRA's norms between two updates.

Shapes: N tokens of all rows, I and O features in and out, R the rank, S the sum of the ranks of the
layers that share an input.
"""

import types
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from hpc_tune.model.float8 import quantize_float8_rows

# Names of sibling layers that are called with the same input.
SAME_INPUT_LAYERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class LoraGroup:
    """Layers that share an input, or a single layer.

    ``a_SI`` and ``bs_OR`` are their A's and scaled B's, if ``AdapterCopies`` keeps copies.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = list(layers)
        self.a_SI: torch.Tensor | None = None
        self.bs_OR: list[torch.Tensor] = []
        self._input: torch.Tensor | None = None
        self._pending_outputs: dict[int, torch.Tensor] = {}
        self._num_shared_calls = self._num_unshared_calls = 0  # calls since ``decide_sharing``
        self._shares_input = True

    def linear_output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Return the output of layer ``index``; the first call with an input computes them all."""
        if not self._shares_input:
            return _compute_outputs(self.layers[index : index + 1], x, None)[0]
        if len(self.layers) == 1:
            return _compute_outputs(self.layers, x, self)[0]
        is_computed = self._input is x and index in self._pending_outputs
        if not torch.compiler.is_compiling():
            self._num_shared_calls += is_computed
            self._num_unshared_calls += bool(self._pending_outputs) and not is_computed
        if not is_computed:
            outputs = _compute_outputs(self.layers, x, self)
            self._input, self._pending_outputs = x, dict(enumerate(outputs))
        out_NO = self._pending_outputs.pop(index)
        if not self._pending_outputs:
            self._input = None
        return out_NO

    def decide_sharing(self) -> None:
        """Compute layers separately from now on if most calls did not share the previous input.

        To be called between steps: recomputation must do the same as the first pass.
        """
        self._shares_input &= self._num_unshared_calls <= self._num_shared_calls
        self._num_shared_calls = self._num_unshared_calls = 0
        self.forget_outputs()

    def forget_outputs(self) -> None:
        """Drop results that no layer has taken, for example after an interrupted pass."""
        self._input, self._pending_outputs = None, {}


def use_lora_linear(blocks: Iterable[nn.Module], shares_inputs: bool = False) -> list[LoraGroup]:
    """Replace the forward of each LoRA layer in ``blocks``; return the groups of layers.

    ``shares_inputs``: compute layers that share an input together. A layer's base, A and B must be
    gathered when it is called; with ``shares_inputs``, the tensors of its whole group must be. This
    holds within an FSDP2 unit; ZeRO-3 gathers the tensors of each layer when it is called.
    """
    groups = []
    for block in blocks:
        layers = {path: m for path, m in block.named_modules() if _is_lora(m)}
        for members in (
            _group_by_input(layers) if shares_inputs else [[one] for one in layers.values()]
        ):
            groups.append(group := LoraGroup(members))
            for index, layer in enumerate(members):
                layer.lora_group, layer.lora_index = group, index
                layer.forward = types.MethodType(_lora_forward, layer)
    return groups


def adapter_weight(layer: Any, factor: str) -> nn.Parameter:
    """Return a layer's A (R x I) or B (O x R)."""
    weight: nn.Parameter = getattr(layer, f"lora_{factor}")["default"].weight
    return weight


def adapter_scale(layer: Any) -> float:
    """Return the scale of a layer's adapter."""
    return float(layer.scaling["default"])


def matmul_dtype(layer: Any) -> torch.dtype:
    """Return the dtype of a layer's matmuls."""
    base = layer.base_layer
    return base.compute_dtype if _is_packed(base) else base.weight.dtype


def base_weight(layer: Any) -> torch.Tensor:
    """Return the values of a layer's base weight, O x I."""
    base = layer.base_layer
    return base.unpack(base.weight) if _is_packed(base) else base.weight


def _group_by_input(layers: dict[str, Any]) -> list[list[Any]]:
    ungrouped, groups = dict(layers), []
    for path in layers:
        parent, dot, name = path.rpartition(".")
        names = next((names for names in SAME_INPUT_LAYERS if name == names[0]), ())
        siblings = [layers.get(f"{parent}{dot}{sibling}") for sibling in names]
        if names and all(_can_share_input(layer, layers[path]) for layer in siblings):
            groups.append([ungrouped.pop(f"{parent}{dot}{sibling}") for sibling in names])
    return [*groups, *([layer] for layer in ungrouped.values())]


def _can_share_input(layer: Any, first_layer: Any) -> bool:
    return (
        layer is not None
        and _has_matrix_base(layer)
        and layer.base_layer.in_features == first_layer.base_layer.in_features
        and isinstance(layer.lora_dropout["default"], nn.Identity)
        and not layer._forward_pre_hooks
        and matmul_dtype(layer) == matmul_dtype(first_layer)
    )


def _is_lora(layer: Any) -> bool:
    if not hasattr(layer, "lora_A") or list(layer.lora_A) != ["default"]:
        return False
    parts = layer.lora_A["default"], layer.lora_B["default"]
    return (
        isinstance(layer.base_layer, nn.Linear)
        and all(type(part) is nn.Linear and "forward" not in part.__dict__ for part in parts)
        and not any(part.bias is not None for part in parts)
        and (not layer.lora_variant or (is_dora(layer) and _has_matrix_base(layer)))
    )


def is_dora(layer: Any) -> bool:
    """Whether a layer has DoRA's magnitudes."""
    return "default" in (getattr(layer, "lora_magnitude_vector", None) or {})


def _has_matrix_base(layer: Any) -> bool:
    """Whether a layer's base is a plain or packed matrix, with the forward of its class.

    Other bases are called instead: torchao's float8, or a slice that adds its bias after a sum.
    """
    base = layer.base_layer
    return (type(base) is nn.Linear or _is_packed(base)) and "forward" not in base.__dict__


def _lora_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    cast_x = x.to(matmul_dtype(self)) if _is_packed(self.base_layer) else x
    out = (
        _dora_forward(self, cast_x)
        if is_dora(self)
        else self.lora_group.linear_output(self.lora_index, cast_x)
    )
    # Not in the autograd function: its views may not be changed in place, as OLMo (clip_qkv) does.
    return out.view(*x.shape[:-1], out.shape[-1]).to(x.dtype)


def _is_packed(base: Any) -> bool:
    """Whether a base is packed: ``base.unpack`` returns its weight in ``base.compute_dtype``."""
    return hasattr(base, "unpack")


def _dora_forward(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return DoRA's output; with dropout, DoRA takes d = dropout(x), and the base alone x - d.

    As in peft: x W^T + (m / norm - 1) d W^T + m / norm s (d A^T) B^T.
    """
    base, magnitude = layer.base_layer, layer.lora_magnitude_vector["default"].weight
    norms_O = layer.__dict__.get("row_norms_O")
    if norms_O is None:
        norms_O = adapted_row_norms(layer)
    x_after_dropout = layer.lora_dropout["default"](x)
    if x_after_dropout is x:
        direction_NO = layer.lora_group.linear_output(layer.lora_index, x)
        return cast(
            torch.Tensor, _ScaleByMagnitude.apply(direction_NO, magnitude, norms_O, base.bias)
        )
    direction_NO = _compute_outputs([layer], x_after_dropout, None, applies_dropout=False)[0]
    scaled_NO: torch.Tensor = _ScaleByMagnitude.apply(direction_NO, magnitude, norms_O, None)
    return scaled_NO + base(x - x_after_dropout).flatten(0, -2)


@torch.no_grad()
def adapted_row_norms(layer: Any, squares_O: torch.Tensor | None = None) -> torch.Tensor:
    """Return |w + s b A| for each row w of the base weight and b of B: [O], in fp32 or more exact.

    |w + s b A|^2 = |w|^2 + 2 s (w A^T) b + s^2 b (A A^T) b: one narrow matmul with W, if
    ``squares_O``, the |w|^2, are given.
    """
    weight_OI, a_RI = base_weight(layer), adapter_weight(layer, "A")
    if squares_O is None:
        squares_O = squared_row_norms(weight_OI)
    scaled_OR = adapter_scale(layer) * adapter_weight(layer, "B").to(squares_O.dtype)
    cross_OR = (weight_OI @ a_RI.to(weight_OI.dtype).t()).to(squares_O.dtype)
    gram_RR = (a_RI @ a_RI.t()).to(squares_O.dtype)
    added_O = (scaled_OR * (2 * cross_OR + scaled_OR @ gram_RR)).sum(1)
    return (squares_O + added_O).clamp_(min=0).sqrt_()


@torch.no_grad()
def squared_row_norms(weight_OI: torch.Tensor) -> torch.Tensor:
    """Return the squared norm of each row, in fp32 or a more exact dtype."""
    dtype = torch.promote_types(weight_OI.dtype, torch.float32)
    return torch.linalg.vector_norm(weight_OI, dim=1, dtype=dtype).square_()


def _compute_outputs(
    layers: Sequence[Any], x: torch.Tensor, group: LoraGroup | None, applies_dropout: bool = True
) -> Sequence[torch.Tensor]:
    """Return the outputs of layers for one input, NO each; for DoRA before magnitude and bias."""
    x_after_dropout = layers[0].lora_dropout["default"](x) if applies_dropout else x
    if not _has_matrix_base(layers[0]):
        [layer] = layers
        out_NO = layer.base_layer(x).flatten(0, -2)
        adapters = adapter_weight(layer, "A"), adapter_weight(layer, "B")
        return [_AddAdapter.apply(out_NO, x_after_dropout, *adapters, adapter_scale(layer))]
    a_SI: torch.Tensor | None = None
    bs_OR: Sequence[Any] = [None] * len(layers)
    if group is not None and group.a_SI is not None and group.a_SI.dtype == x.dtype:
        a_SI, bs_OR = group.a_SI, group.bs_OR
    layer_tensors: list[Any] = []
    for layer, b_OR in zip(layers, bs_OR, strict=True):
        base = layer.base_layer
        bias = None if is_dora(layer) or base.bias is None else base.bias.to(x.dtype)
        layer_tensors += [
            base.weight,
            bias,
            adapter_weight(layer, "A"),
            adapter_weight(layer, "B"),
            b_OR,
        ]
    packed_bases = tuple(
        layer.base_layer if _is_packed(layer.base_layer) else None for layer in layers
    )
    scales = tuple(map(adapter_scale, layers))
    outs = _LoraLinearsFunction.apply(
        x,
        None if x_after_dropout is x else x_after_dropout,
        packed_bases,
        scales,
        a_SI,
        *layer_tensors,
    )
    return [outs] if isinstance(outs, torch.Tensor) else cast("tuple[torch.Tensor, ...]", outs)


def _is_traced() -> bool:
    """Whether selective recompute or a trace is active.

    Both recognize the matmul as addmm, and what they keep must not be changed in place.
    """
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None


def _unpack_weight(packed_base: Any, weight: torch.Tensor) -> torch.Tensor:
    return weight if packed_base is None else packed_base.unpack(weight)


def _multiplies_float8(packed_bases: Sequence[Any]) -> bool:
    return all(getattr(layer, "multiplies_float8", False) for layer in packed_bases)


def _input_gradient(
    packed_bases: Sequence[Any],
    weights: Sequence[torch.Tensor],
    grads_NO: Sequence[torch.Tensor],
    adapter_factors: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Return the gradient of the input, NI: of the base's matmuls and that of ``adapter_factors``.

    The latter comes first if possible: large matmuls are compute-bound, so that reading the tensor
    that they add to costs nothing.
    """
    in_float8 = _multiplies_float8(packed_bases)
    grad_x: torch.Tensor | None = None
    if adapter_factors is not None and not in_float8:
        grad_x = torch.mm(*adapter_factors)
    for layer, weight, grad_NO in zip(packed_bases, weights, grads_NO, strict=True):
        if in_float8:
            grad_NI = layer.input_gradient(grad_NO, weight)
            grad_x = grad_NI if grad_x is None else grad_x.add_(grad_NI)
        elif grad_x is None:
            grad_x = grad_NO @ _unpack_weight(layer, weight)
        else:
            grad_x = grad_x.addmm_(grad_NO, _unpack_weight(layer, weight))
    assert grad_x is not None
    if adapter_factors is not None and in_float8:
        grad_x = grad_x.addmm_(*adapter_factors)
    return grad_x


def _cast_adapters(
    dtype: torch.dtype, a_s: Sequence[torch.Tensor], b_s: Sequence[torch.Tensor], scales: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return all A's as one matrix, and each B scaled, in ``dtype``."""
    a_SI = a_s[0].to(dtype) if len(a_s) == 1 else torch.cat([a.to(dtype) for a in a_s])
    return a_SI, [(scale * b).to(dtype) for scale, b in zip(scales, b_s, strict=True)]


class _LoraLinearsFunction(torch.autograd.Function):
    """Computes the outputs of layers for one input; gradients reach the input and each A and B.

    ``x_after_dropout`` is ``x`` after dropout, None without dropout; ``packed_bases`` has the
    base of each layer whose weight is packed, else None. ``a_SI``: all A's in the dtype of ``x`` if
    copies are kept, else None. For each layer follow weight, bias, A, B, and the scaled B in that
    dtype if copies are kept, else None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        x_after_dropout: torch.Tensor | None,
        packed_bases: tuple[Any, ...],
        scales: tuple[float, ...],
        a_SI: torch.Tensor | None,
        *layer_tensors: Any,
    ) -> Any:
        weights, biases, a_s, b_s = (layer_tensors[i::5] for i in range(4))
        bs_OR: Sequence[torch.Tensor] = layer_tensors[4::5]
        x_NI = x.flatten(0, -2)
        lora_x_NI = x_NI if x_after_dropout is None else x_after_dropout.flatten(0, -2)
        ctx.is_kept = a_SI is not None
        copies = () if a_SI is None else (a_SI, *bs_OR)
        if a_SI is None:
            a_SI, bs_OR = _cast_adapters(x.dtype, a_s, b_s, scales)
        low_NS = lora_x_NI @ a_SI.t()
        ctx.ranks = [a.shape[0] for a in a_s]
        add = torch.addmm if _is_traced() else torch.Tensor.addmm_
        rows = quantize_float8_rows(x_NI) if _multiplies_float8(packed_bases) else None
        outs = []
        for i, low_NR in enumerate(low_NS.split(ctx.ranks, 1)):
            b_RO, bias = bs_OR[i].t(), biases[i]
            if rows is not None:
                base_NO = packed_bases[i].linear_output(rows, weights[i], bias)
                outs.append(add(base_NO, low_NR, b_RO))
                continue
            adapter_NO = low_NR @ b_RO if bias is None else torch.addmm(bias, low_NR, b_RO)
            outs.append(add(adapter_NO, x_NI, _unpack_weight(packed_bases[i], weights[i]).t()))
        dropout_inputs = () if x_after_dropout is None else (lora_x_NI,)
        ctx.save_for_backward(x_NI, low_NS, *weights, *a_s, *b_s, *copies, *dropout_inputs)
        ctx.packed_bases, ctx.scales, ctx.shape = packed_bases, scales, x.shape
        ctx.drops = x_after_dropout is not None
        return tuple(outs) if len(outs) > 1 else outs[0]

    @staticmethod
    def backward(ctx: Any, *grads_NO: torch.Tensor) -> Any:  # type: ignore[override]
        x_NI, low_NS, *rest = ctx.saved_tensors
        num, dtype = len(ctx.ranks), grads_NO[0].dtype
        weights, a_s, b_s = (rest[i * num : (i + 1) * num] for i in range(3))
        extra = rest[3 * num :]
        lora_x_NI = extra.pop() if ctx.drops else x_NI
        a_SI, bs_OR = (
            (extra[0], extra[1:]) if ctx.is_kept else _cast_adapters(dtype, a_s, b_s, ctx.scales)
        )
        low_grads = [grad_NO @ b_OR for grad_NO, b_OR in zip(grads_NO, bs_OR, strict=True)]
        grad_NS = low_grads[0] if num == 1 else torch.cat(low_grads, 1)
        grads_a = (grad_NS.t() @ lora_x_NI).split(ctx.ranks)
        layer_grads: list[Any] = []
        for i, low_NR in enumerate(low_NS.split(ctx.ranks, 1)):
            grad_b = (ctx.scales[i] * (grads_NO[i].t() @ low_NR)).to(b_s[i].dtype)
            layer_grads += [None, None, grads_a[i].to(a_s[i].dtype), grad_b, None]
        grad_x = grad_lora_x = None
        if ctx.needs_input_grad[0]:
            adapter_factors = None if ctx.drops else (grad_NS, a_SI)
            grad_x = _input_gradient(ctx.packed_bases, weights, grads_NO, adapter_factors).view(
                ctx.shape
            )
        if ctx.needs_input_grad[1]:
            grad_lora_x = (grad_NS @ a_SI).view(ctx.shape)
        return grad_x, grad_lora_x, None, None, None, *layer_grads


class _AddAdapter(torch.autograd.Function):
    """``out_NO`` plus an adapter's output for ``x_after_dropout``; the base is called by itself."""

    @staticmethod
    def forward(
        ctx: Any,
        out_NO: torch.Tensor,
        x_after_dropout: torch.Tensor,
        a_RI: torch.Tensor,
        b_OR: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        lora_x_NI = x_after_dropout.flatten(0, -2)
        low_NR = lora_x_NI @ a_RI.to(x_after_dropout.dtype).t()
        ctx.save_for_backward(lora_x_NI, low_NR, a_RI, b_OR)
        ctx.scale, ctx.shape = scale, x_after_dropout.shape
        return torch.addmm(out_NO, low_NR, (scale * b_OR).to(x_after_dropout.dtype).t())

    @staticmethod
    def backward(ctx: Any, grad_NO: torch.Tensor) -> Any:  # type: ignore[override]
        lora_x_NI, low_NR, a_RI, b_OR = ctx.saved_tensors
        dtype = grad_NO.dtype
        grad_NR = grad_NO @ (ctx.scale * b_OR).to(dtype)
        grad_a = (grad_NR.t() @ lora_x_NI).to(a_RI.dtype)
        grad_b = (ctx.scale * (grad_NO.t() @ low_NR)).to(b_OR.dtype)
        grad_lora_x = None
        if ctx.needs_input_grad[1]:
            grad_lora_x = (grad_NR @ a_RI.to(dtype)).view(ctx.shape)
        return grad_NO, grad_lora_x, grad_a, grad_b, None


class _ScaleByMagnitude(torch.autograd.Function):
    """``direction_NO`` times magnitude / norm per feature, plus a bias; norms are constant.

    The factors stay in fp32; the products are rounded once, before the bias is added.
    """

    @staticmethod
    def forward(
        ctx: Any,
        direction_NO: torch.Tensor,
        magnitude_O: torch.Tensor,
        norms_O: torch.Tensor,
        bias_O: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(direction_NO, magnitude_O, norms_O)
        out_NO = _scale_features(direction_NO, magnitude_O / norms_O)
        return out_NO if bias_O is None else out_NO.add_(bias_O)

    @staticmethod
    def backward(ctx: Any, grad_NO: torch.Tensor) -> Any:  # type: ignore[override]
        direction_NO, magnitude_O, norms_O = ctx.saved_tensors
        sums_O = (grad_NO * direction_NO).sum(0, dtype=norms_O.dtype)
        grad_magnitude = (sums_O / norms_O).to(magnitude_O.dtype)
        return _scale_features(grad_NO, magnitude_O / norms_O), grad_magnitude, None, None


def _scale_features(values_NO: torch.Tensor, factors_O: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return (values_NO * factors_O).to(values_NO.dtype)
    return torch.mul(values_NO, factors_O, out=torch.empty_like(values_NO))


# -- Values that change only with adapters, made once per update: cast copies, and DoRA's norms.
#
# A step's micro-batches and recomputation use the same values. Engines that do not report changes
# of adapters have neither: each layer casts its adapters when it is called.


class AdapterCopies:
    """Adapters in the dtype of matmuls, as views of one buffer for each dtype.

    B's are scaled; the A's of layers that share an input lie one after the other, as one matrix.
    """

    def __init__(self) -> None:
        self._all_groups: list[LoraGroup] = []
        self._groups: list[LoraGroup] = []  # those that are copied
        self._version, self._copied_version = 0, -1

    @property
    def version(self) -> int:
        """A number that changes with each change of adapters."""
        return self._version

    def keep_copies(self, blocks: Sequence[nn.Module], groups: Iterable[LoraGroup]) -> None:
        """Keep copies for ``groups``, and the norms of the DoRA layers in ``blocks``.

        Adapters that already have the dtype of the matmuls are not copied.
        """
        self._all_groups += groups
        self._groups = [
            g
            for g in self._all_groups
            if matmul_dtype(g.layers[0]) != adapter_weight(g.layers[0], "A").dtype
        ]
        for block in blocks:
            layers = [part for part in block.modules() if hasattr(part, "lora_group")]
            if norms := [DoraRowNorms(layer, self) for layer in layers if is_dora(layer)]:
                # A hook of the block: FSDP2 has gathered its weights, and no graph contains it.
                block.register_forward_pre_hook(lambda *_, norms=norms: _update_norms(norms))

    def mark_changed(self) -> None:
        """Record that the values of adapters have changed."""
        self._version += 1

    def forget_results(self) -> None:
        """Drop results that an interrupted pass has left."""
        for group in self._all_groups:
            group.forget_outputs()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy all adapters if they have changed; to be called before the passes of a step."""
        for group in self._all_groups:
            group.decide_sharing()
        if self._copied_version == self._version or not self._groups:
            return
        if self._copied_version < 0:
            self._allocate_copies()
        self._copied_version = self._version
        layers = [layer for group in self._groups for layer in group.layers]
        a_views = [
            view
            for group in self._groups
            for view in _require_tensor(group.a_SI).split(
                [len(adapter_weight(m, "A")) for m in group.layers]
            )
        ]
        torch._foreach_copy_(a_views, [adapter_weight(layer, "A").detach() for layer in layers])
        scaled_bs = torch._foreach_mul(
            [adapter_weight(layer, "B").detach() for layer in layers],
            [adapter_scale(m) for m in layers],
        )
        torch._foreach_copy_([b_OR for group in self._groups for b_OR in group.bs_OR], scaled_bs)

    def _allocate_copies(self) -> None:
        for dtype in {matmul_dtype(group.layers[0]) for group in self._groups}:
            groups = [g for g in self._groups if matmul_dtype(g.layers[0]) == dtype]
            sizes = [
                sum(adapter_weight(layer, part).numel() for layer in group.layers)
                for group in groups
                for part in "AB"
            ]
            device = adapter_weight(groups[0].layers[0], "A").device
            parts = iter(torch.empty(sum(sizes), dtype=dtype, device=device).split(sizes))
            for group in groups:
                group.a_SI = next(parts).view(-1, adapter_weight(group.layers[0], "A").shape[1])
                shapes = [adapter_weight(layer, "B").shape for layer in group.layers]
                flat_bs = next(parts).split([shape.numel() for shape in shapes])
                group.bs_OR = [b.view(s) for b, s in zip(flat_bs, shapes, strict=True)]


class DoraRowNorms:
    """The norms of DoRA's rows in one layer, as of the adapters' last change."""

    def __init__(self, layer: Any, copies: AdapterCopies) -> None:
        self._layer, self._copies = layer, copies
        self._norms_version = -1
        self._squares_O: torch.Tensor | None = None
        layer.row_norms_O = None

    def update(self) -> None:
        """Recompute the norms if adapters have changed; the base's weight must be gathered."""
        if self._norms_version == self._copies.version:
            return
        if self._squares_O is None:
            self._squares_O = squared_row_norms(base_weight(self._layer))
        self._norms_version = self._copies.version
        norms_O = adapted_row_norms(self._layer, self._squares_O)
        if self._layer.row_norms_O is None:
            self._layer.row_norms_O = norms_O
        else:
            self._layer.row_norms_O.copy_(norms_O)


def _update_norms(norms: Sequence[DoraRowNorms]) -> None:
    for layer_norms in norms:
        layer_norms.update()


def _require_tensor(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor
