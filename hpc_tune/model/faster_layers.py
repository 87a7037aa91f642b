"""RMS norms, SwiGLU MLPs and shared casts that are faster than transformers', used if a trial on a
few values shows that they compute the same.

The name of a class proves nothing, and its source may change between versions. If the results
differ, or the layer cannot be tried, transformers' own code runs.
"""

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

ForwardFunction = Callable[[Any, torch.Tensor], torch.Tensor]


def make_layer_like(module: nn.Module, **parts: nn.Module | nn.Parameter) -> nn.Module:
    """Return a new layer of ``module``'s class, with its plain attributes but these ``parts``."""
    layer = type(module).__new__(type(module))
    nn.Module.__init__(layer)
    for name, value in vars(module).items():
        if not name.startswith("_") and name != "forward":
            layer.__dict__[name] = value
    for name, part in parts.items():
        setattr(layer, name, part)
    return layer


def find_replaceable_layers(
    blocks: Iterable[nn.Module],
    is_candidate: Callable[[nn.Module], bool],
    make_trial: Callable[[nn.Module, torch.Generator], tuple[nn.Module, torch.Tensor]],
    forward: ForwardFunction,
    outputs_agree: Callable[[torch.Tensor, torch.Tensor], bool],
) -> list[nn.Module]:
    """Return the layers of ``blocks`` that pass ``is_candidate`` and compute as ``forward`` does.

    ``make_trial`` returns a small layer like the given one (see ``make_layer_like``) and an input;
    ``outputs_agree`` must hold for the results of its class's forward and of ``forward``. Layers of
    one class with the same plain attributes are tried once.
    """
    trial_results: dict[tuple[Any, ...], bool] = {}
    layers = []
    for layer in (part for block in blocks for part in block.modules() if is_candidate(part)):
        key = type(layer), layer.training, *_plain_attributes(layer)
        if key not in trial_results:
            trial_results[key] = _computes_same_output(layer, make_trial, forward, outputs_agree)
        if trial_results[key]:
            layers.append(layer)
    return layers


def _plain_attributes(layer: nn.Module) -> list[tuple[str, Any]]:
    """Return what distinguishes a layer from others of its class: values, or ids of objects."""
    return [
        (name, value if isinstance(value, (int, float, str, type(None))) else id(value))
        for name, value in vars(layer).items()
        if not name.startswith("_")
    ]


def _computes_same_output(
    module: nn.Module,
    make_trial: Callable[[nn.Module, torch.Generator], tuple[nn.Module, torch.Tensor]],
    forward: ForwardFunction,
    outputs_agree: Callable[[torch.Tensor, torch.Tensor], bool],
) -> bool:
    with _disable_current_modes(), torch.no_grad():
        layer, x = make_trial(module, torch.Generator().manual_seed(0))
        layer.train(module.training)
        try:
            return outputs_agree(type(module).forward(layer, x), forward(layer, x))
        except (AttributeError, TypeError, ValueError, RuntimeError):
            return False


# -- RMS norms (arXiv:1910.07467) in fewer passes over the activations than autograd's.
#
#     y = x / sqrt(mean(x^2) + eps) * weight
#
# Computed in fp32 and rounded where transformers rounds. Only ``x`` is kept for the backward pass,
# in its own dtype; autograd would keep it in fp32, and the normalized values too. On a GPU,
# ``F.rms_norm`` is one kernel per pass; it keeps no more, and rounds once, after the weight. On a
# CPU it is not a fused kernel.


# The share of 16-bit results that must be equal. Rounded elsewhere, about a third would differ.
_MIN_EQUAL_SHARE = 0.95


def use_faster_rms_norm(blocks: Iterable[nn.Module], uses_torch: bool = False) -> int:
    """Replace the forward of each RMS norm of Llama's form in ``blocks``; return their number.

    ``uses_torch``: use ``F.rms_norm`` instead of our own.
    """
    forward = _torch_rms_norm_forward if uses_torch else _rms_norm_forward
    norms = find_replaceable_layers(
        blocks, _may_be_rms_norm, _make_rms_norm_trial, _rms_norm_forward, _outputs_agree
    )
    for part in norms:
        part.forward = types.MethodType(forward, part)
    return len(norms)


def _may_be_rms_norm(module: Any) -> bool:
    if not type(module).__name__.endswith("RMSNorm") or "forward" in module.__dict__:
        return False
    if module._parameters.keys() != {"weight"} or module.weight is None or module._modules:
        return False
    return module.weight.dim() == 1 and hasattr(module, "variance_epsilon")


def _make_rms_norm_trial(module: Any, rng: torch.Generator) -> tuple[nn.Module, torch.Tensor]:
    """Return a norm of 64 weights, and rows of large and of small values."""
    weight = torch.randn(64, generator=rng, device="cpu", dtype=torch.bfloat16)
    x = torch.randn(16, 64, generator=rng, device="cpu")
    x *= torch.logspace(-4, 2, len(x), device="cpu")[:, None]
    return make_layer_like(module, weight=nn.Parameter(weight)), x.bfloat16()


def _outputs_agree(stock_out: torch.Tensor, new_out: torch.Tensor) -> bool:
    is_near = torch.allclose(stock_out.float(), new_out.float(), rtol=2e-2, atol=1e-6)
    equal_share = (stock_out == new_out).float().mean().item()
    return stock_out.dtype == new_out.dtype and is_near and equal_share >= _MIN_EQUAL_SHARE


def _rms_norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != self.weight.dtype:
        stock_out: torch.Tensor = type(self).forward(self, x)
        return stock_out
    out: torch.Tensor = _RmsNormFunction.apply(x, self.weight, self.variance_epsilon)
    return out


def _torch_rms_norm_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != self.weight.dtype:
        stock_out: torch.Tensor = type(self).forward(self, x)
        return stock_out
    # It computes in fp32 internally. Since torch 2.12, autocast on a GPU would also make fp32
    # copies of x and of the result, even if both are in 16 bits.
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


class _RmsNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        x_fp32 = x.float()
        mean_square = torch.linalg.vector_norm(x_fp32, dim=-1, keepdim=True).square_()
        inverse_rms = mean_square.mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse_rms)
        # Not in place on x_fp32: if x is in fp32, that is x itself.
        return (x_fp32 * inverse_rms).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight, inverse_rms = ctx.saved_tensors
        x_fp32, grad_weight = x.float(), None
        if ctx.needs_input_grad[1]:
            normalized = (x_fp32 * inverse_rms).to(x.dtype)
            grad_weight = (grad * normalized).flatten(0, -2).sum(0)
        # dx = g / rms - x (g . x) / (rms^3 D), where g is the gradient of the normalized values
        grad_normalized = (grad * weight).float()
        x_coefficient = torch.linalg.vecdot(grad_normalized, x_fp32).unsqueeze(-1)
        x_coefficient *= inverse_rms**3 / x.shape[-1]
        grad_x = grad_normalized.mul_(inverse_rms).addcmul_(x_fp32, x_coefficient, value=-1)
        return grad_x.to(x.dtype), grad_weight, None


# -- SwiGLU MLPs (arXiv:2002.05202) that keep one tensor fewer per block for the backward pass.
#
#     y = down(silu(gate(x)) * up(x))
#
# Autograd keeps the gate for silu, and silu's result and ``up`` for the multiplication. Here the
# backward pass recomputes silu, which is faster than reading its result, so only gate and ``up``
# are kept. The same operations on the same values give the same bits.


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_TRIAL_WIDTH, _TRIAL_SCALE = 16, 8.0  # of the trial's input: large values would reveal a clamp


def use_faster_swiglu(blocks: Iterable[nn.Module]) -> int:
    """Replace the forward of each plain SwiGLU MLP in ``blocks``; return how many there were."""
    layers = find_replaceable_layers(
        blocks, _may_be_swiglu, _make_swiglu_trial, _swiglu_forward, torch.equal
    )
    for part in layers:
        part.forward = types.MethodType(_swiglu_forward, part)
    return len(layers)


def _may_be_swiglu(module: Any) -> bool:
    activation = getattr(module, "act_fn", None)
    is_silu = isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
    has_parts = {*_PROJECTIONS} <= module._modules.keys() <= {*_PROJECTIONS, "act_fn"}
    has_more = module._parameters or module._buffers or "forward" in module.__dict__
    return is_silu and has_parts and not has_more


def _make_swiglu_trial(module: Any, rng: torch.Generator) -> tuple[nn.Module, torch.Tensor]:
    parts = {name: nn.Linear(_TRIAL_WIDTH, _TRIAL_WIDTH, device="cpu") for name in _PROJECTIONS}
    for part in parts.values():
        for values in part.parameters():
            values.normal_(generator=rng)
    x = _TRIAL_SCALE * torch.randn(4, _TRIAL_WIDTH, generator=rng, device="cpu")
    return make_layer_like(module, act_fn=module.act_fn, **parts), x


def _swiglu_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = self.down_proj(_SwiGluFunction.apply(self.gate_proj(x), self.up_proj(x)))
    return out


class _SwiGluFunction(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        grad_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, F.silu(gate).mul_(grad)


# -- One cast of the input that several linear layers of a module share, under autocast.
#
#     norm, in fp32 -> cast once -> queries, keys and values; or gate and up
#     their gradients, in the dtype of matmuls -> added up in fp32
#
# With fp32 master weights a norm's result is fp32 too. torch's autocast caches casts of weights
# only: each layer would cast the input again, keep its own copy for the backward pass, and cast
# its gradient to fp32 before the gradients are added up. The values are the same. A compiler merges
# equal casts by itself.


def share_input_casts(blocks: Iterable[nn.Module]) -> int:
    """Cast an input once for all fp32 linear layers that a module in ``blocks`` calls with it.

    Returns the number of modules with several fp32 linear layers. Without autocast nothing is cast.
    """
    num_modules = 0
    modules: Any = (part for block in blocks for part in block.modules())
    for module in modules:
        layers = [part for part in module.children() if _is_fp32_linear(part)]
        if len(layers) > 1:
            casts = _SharedInputCasts(len(layers))
            for layer in layers:
                layer.register_forward_pre_hook(casts.cast)
            module.register_forward_hook(casts.forget, always_call=True)
            module.forget_casts = casts.forget  # for callers of ``forward``, which runs no hooks
            num_modules += 1
    return num_modules


def _is_fp32_linear(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) and part.weight.dtype == torch.float32


class _SharedInputCasts:
    """Inputs of a module's linear layers while it runs, with the casts that are not yet used."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        # By the input's id; holding the input keeps its id from being reused.
        self._casts: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def cast(self, _: nn.Module, args: tuple[Any, ...]) -> Any:
        """Return a layer's arguments with the input in the dtype of autocast."""
        if not args:  # called with keywords: left to torch's own cast
            return args
        x, device_type = args[0], args[0].device.type
        if x.dtype != torch.float32 or not torch.is_autocast_enabled(device_type):
            return args
        _, unused_casts = self._casts.get(id(x), (x, []))
        if not unused_casts:
            dtype = torch.get_autocast_dtype(device_type)
            unused_casts = list(_CastToViews.apply(x, dtype, self._num_layers))
            self._casts[id(x)] = x, unused_casts
        cast_x = unused_casts.pop()
        if not unused_casts:
            del self._casts[id(x)]
        return cast_x, *args[1:]

    def forget(self, *_: Any) -> None:
        """Drop inputs that not all layers have been called with."""
        self._casts.clear()


class _CastToViews(torch.autograd.Function):
    """``x`` in another dtype, as ``num_views`` tensors in the same memory."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dtype: torch.dtype, num_views: int
    ) -> tuple[torch.Tensor, ...]:
        ctx.dtype = x.dtype
        ctx.set_materialize_grads(False)
        out = x.to(dtype)
        return tuple(out.view_as(out) for _ in range(num_views))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        # Only from layers that were called; ``to`` puts the first one into new memory.
        first, *others = (grad for grad in reversed(grads) if grad is not None)
        total = first.to(ctx.dtype)
        for grad in others:
            total += grad
        return total, None, None
