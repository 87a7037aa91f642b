"""Activation checkpointing: what a decoder block keeps for its backward pass.

    recompute=none       all that autograd keeps
    recompute=selective  results of its matrix products and of attention, and its input
    recompute=full       its input

The rest is recomputed in the backward pass, to the same bits (arXiv:1604.06174, selective:
arXiv:2205.05198). Only ``forward`` of a block is replaced: the hooks of a block (FSDP2 gathers in
them) are not recomputed, and parameter names stay as they are.
"""

import functools
import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, ParamSpec, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
    get_device_states,
)

from hpc_tune.memory.policy import Action, ActionHandle
from hpc_tune.model.micro_batch import batch_context

P = ParamSpec("P")
T = TypeVar("T")
Forward = Callable[..., Any]
SavingInputs = Callable[[tuple[Any, ...]], AbstractContextManager[Any]]
RecomputeLevel = Literal["none", "selective", "full"]
# What selective recompute keeps: results of matrix products. By name, because torch knows the 4-bit
# products only where bitsandbytes has been imported. Batched products are missing: they are the
# T x T scores of attention that is not fused, the largest of all.
_MATMULS = {
    "aten.mm.default": 0,
    "aten.addmm.default": 1,
    "aten._scaled_mm.default": 0,
    "aten._grouped_mm.default": 0,
    "transformers.grouped_mm_fallback.default": 0,
}
_KEPT_OPS = frozenset(
    (
        *(
            f"aten._scaled_dot_product_{kind}_attention{where}.default"
            for kind, where in (
                ("flash", ""),
                ("flash", "_for_cpu"),
                ("efficient", ""),
                ("cudnn", ""),
                ("fused", "_overrideable"),
            )
        ),
        "hpc_tune.document_attention.default",
        "torch_attn._varlen_attn.default",
        "aten._flash_attention_forward.default",
        "bitsandbytes.gemm_4bit.default",
    )
)
# The widest blocks are 8 x wider inside than outside (Gemma); adapters go from 16 to 4096 and more.
MIN_INNER = 8
_SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


def keep_inputs(_args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Return a context in which autograd saves a block's arguments where they are."""
    return nullcontext()


def checkpoint_blocks(
    blocks: Sequence[nn.Module], recompute: RecomputeLevel, saving: SavingInputs = keep_inputs
) -> None:
    """Replace the ``forward`` of decoder blocks by one that keeps what ``recompute`` says.

    Blocks of one class share one function, which ``compile_blocks`` compiles once. ``saving``: the
    context in which recompute=full saves a block's arguments.
    """
    if recompute == "none":
        return
    checkpointed: dict[Forward, Forward] = {}
    for block in blocks:
        if recompute == "selective":
            _protect_from_clipping(block)
        plain = type(block).forward
        if plain not in checkpointed:
            checkpointed[plain] = _with_recompute(plain, recompute, saving)
        block.forward = types.MethodType(checkpointed[plain], block)


def recompute_levers(
    blocks: Sequence[nn.Module], configured: RecomputeLevel, saving: SavingInputs = keep_inputs
) -> dict[Action, ActionHandle]:
    """Return the lever that recomputes all of each block, without the compiler.

    ``blocks`` are as they are trained: with ``checkpoint_blocks``, and compiled or not.
    ``saving``: as there.
    """
    if configured == "full":
        return {}
    forwards = [block.__dict__.get("forward") for block in blocks]

    def recompute(times: int) -> str:
        for block, forward in zip(blocks, forwards, strict=True):
            block.__dict__.pop("forward", None)
            if not times and forward is not None:
                block.forward = forward
        if times:
            checkpoint_blocks(blocks, "full", saving)
        return f"activations are recomputed: {'full' if times else configured}"

    return {Action.RECOMPUTE: ActionHandle(recompute)}


def without_dispatch_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function``, run without torch's dispatch modes, such as selective recompute, which
    counts the operations of a block, or FakeTensorMode.
    """

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> T:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return outside


def outside_recompute(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, whose operations selective recompute does not count.

    It finds what it kept by counting the operations of a block, and fails if the recomputation has
    others than the first pass: gathering weights may be done in the one and not in the other.
    """

    @functools.wraps(function)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(_get_current_dispatch_mode(), _SELECTIVE):
            return function(*args, **kwargs)
        with _pop_mode_temporarily():
            return function(*args, **kwargs)

    return outside


def _with_recompute(forward: Forward, recompute: RecomputeLevel, saving: SavingInputs) -> Forward:
    options: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, _recompute_policy
        )
    without_draws: WeakSet[nn.Module] = WeakSet()

    def recomputed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Preserve the state of random numbers for the recomputation only if a block draws any.

        Whether it does, its first pass of a training step shows; in a graph that costs nothing.
        """
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        more = {**options, **kwargs}
        if torch.compiler.is_compiling():
            # The batch is an argument here, and to make it the current one again would break it.
            return checkpoint(forward, self, *args, **more)
        run = batch_context.bind(forward)
        if self in without_draws:
            with saving(args):
                return checkpoint(run, self, *args, preserve_rng_state=False, **more)
        before = _random_state(*args)
        with saving(args):
            out = checkpoint(run, self, *args, **more)
        if _random_state(*args) == before:
            without_draws.add(self)
        return out

    return recomputed


def _protect_from_clipping(block: nn.Module) -> None:
    """Let a block that clips queries, keys and values in place (OLMo) do so to copies.

    Else the products that are kept would be clipped ones, whose gradients are others.
    """
    parts: Any = block.modules()
    for part in parts:
        config = getattr(part, "config", None)
        if hasattr(part, "q_proj") and getattr(config, "clip_qkv", None) is not None:
            for layer in (part.q_proj, part.k_proj, part.v_proj):
                if _clone_output not in layer._forward_hooks.values():
                    layer.register_forward_hook(_clone_output)


def _clone_output(_layer: nn.Module, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
    return out.clone()


def _random_state(*args: Any) -> list[bytes]:
    """Return the states of the CPU's random numbers and of those of the devices of ``args``."""
    with _disable_current_modes():  # a plan's tensors have no values, these have
        states = [torch.get_rng_state()]
        if torch.cuda.is_initialized():
            states += get_device_states(*args)[1]
        return [state.numpy().tobytes() for state in states]


def _recompute_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = (name := str(operator)) in _KEPT_OPS
    if (first := _MATMULS.get(name)) is not None:
        kept = _is_worth_keeping(*args[first : first + 2])
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _is_worth_keeping(one_MK: torch.Tensor, other_KN: torch.Tensor) -> bool:  # or one KN each
    """Whether a product takes many flops (K) for each of its values (N per row).

    An adapter's second product takes only its rank, for as many values as the base's: keeping those
    would make selective larger than none.
    """
    return MIN_INNER * other_KN.shape[-2] >= other_KN.shape[-1]
