"""Activation checkpointing: what a decoder block keeps for its backward pass.

    recompute=none       all that autograd keeps
    recompute=selective  results of its matrix products and of attention, and its input
    recompute=full       its input

The rest is recomputed in the backward pass, to the same bits (arXiv:1604.06174, selective:
arXiv:2205.05198). Only ``forward`` of a block is replaced: the hooks of a block (FSDP2 gathers in
them) are not recomputed, and parameter names stay as they are.
"""

import contextlib
import functools
import types
import weakref
from collections import defaultdict
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

from hpc_tune.engine.base import EngineSettings
from hpc_tune.memory.policy import Action, ActionHandle
from hpc_tune.model.micro_batch import batch_context
from hpc_tune.world.pinned import empty_pinned_cache, split_into_blocks

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


# -- Inputs of recomputed blocks in pinned host memory, copied beside what is computed.
#
#     forward     input of block i -> its buffer, while block i is computed; block i + 1 waits
#     backward    block i runs again: the input of block i - 1 comes back meanwhile
#
# All copies are in one stream, in the order in which they are asked for, so a buffer is free for
# the next input as soon as its last one has been asked back. The device waits, the host never: an
# input is let go of when the stream that computes has been told to wait for its copy.
# ``record_stream`` would keep its memory until the host sees that the copy has ended, and the host
# is far ahead.
#
# A buffer is of few blocks of pinned memory, each a power of two: torch would round it up to one.


LONG_ROW_TOKENS = 4096  # shorter rows leave little to move


class OffloadedInputs:
    """The inputs of one engine's blocks. ``is_on``: they are moved, else kept where they are.

    ``buffer_bytes``: of all buffers there are, those of the fullest step so far, in whole blocks.
    ``counts_only``: for a trace, which has no host memory: inputs are dropped, and come back
    without values.
    """

    def __init__(self, settings: EngineSettings) -> None:
        device = settings.device
        self.counts_only = False
        self.buffer_bytes = 0
        self._device, self._row_tokens = device, settings.row_tokens
        self._can_move = device.type == "cuda" or settings.faults.moves_on_host
        self._can_move &= not settings.train.compiles
        self.is_on = self._asked = settings.parallel.offload_activations and self._can_move
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._reserve = settings.reserve
        self._free: dict[int, list[torch.Tensor | None]] = defaultdict(list)  # blocks by bytes
        self._leaving: tuple[torch.Tensor, Any] | None = None
        self._last: weakref.ref[_Offloaded] | None = None

    def levers(self) -> dict[Action, ActionHandle]:
        """Return the lever that begins to move inputs, where there is a device and rows are long.

        The ladder has blocks recomputed before: without that, nothing is moved.
        """
        if not self._can_move or self._asked or self._row_tokens < LONG_ROW_TOKENS:
            return {}

        def move(times: int) -> str:
            self.is_on = bool(times)
            if not times:
                self._free.clear()
                self.buffer_bytes = 0
                empty_pinned_cache()
            return f"inputs of blocks are kept on the {'host' if times else 'device'}"

        return {Action.OFFLOAD_ACTIVATIONS: ActionHandle(move)}

    def follow(self, stage: nn.Module) -> None:
        """Let each pass of a stage bring back its own inputs alone ahead of time."""
        stage.register_forward_pre_hook(lambda *_: self._begin_pass())

    def _begin_pass(self) -> None:
        self._last = None

    def saving(self, args: tuple[Any, ...]) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the first of ``args`` is moved when autograd saves it."""
        if not self.is_on or not args or not isinstance(args[0], torch.Tensor):
            return contextlib.nullcontext()
        shape = args[0].shape

        def pack(x: torch.Tensor) -> Any:
            return self._move(x) if x.shape == shape and x.is_floating_point() else x

        return torch.autograd.graph.saved_tensors_hooks(pack, self._bring_back)

    def settle(self) -> None:
        """Let what is computed from now on wait for all copies, as after a pass that broke off."""
        self._leaving = self._last = None
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _move(self, x: torch.Tensor) -> "_Offloaded":
        self._let_go()
        x, sizes = x.detach().contiguous(), split_into_blocks(x.nbytes)
        moved = _Offloaded(x, [self._take_block(size) for size in sizes], self._last)
        weakref.finalize(moved, self._give_back, sizes, moved.blocks)
        parts, on_host = moved.pair(x)
        self._leaving = x, self._copy(on_host, parts)
        self._last = weakref.ref(moved)
        return moved

    def _bring_back(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Offloaded):
            return packed  # type: ignore[no-any-return]
        self._let_go()
        self._begin_to_bring(packed)
        before = packed.before() if packed.before is not None else None
        if before is not None:
            self._begin_to_bring(before)
        assert packed.returning is not None, "it has been asked for"
        (x, is_there), packed.returning = packed.returning, None
        if is_there is not None:
            torch.cuda.current_stream(self._device).wait_event(is_there)
        return x

    def _begin_to_bring(self, moved: "_Offloaded") -> None:
        if moved.returning is None:
            x = torch.empty(moved.shape, dtype=moved.dtype, device=self._device)
            moved.returning = x, self._copy(*moved.pair(x))

    def _let_go(self) -> None:
        """Let the stream that computes wait for the copy under way, and forget its source."""
        if self._leaving is not None and self._leaving[1] is not None:
            torch.cuda.current_stream(self._device).wait_event(self._leaving[1])
        self._leaving = None

    def _copy(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> Any:
        """Begin copies behind what has been asked for so far; return their end, None if it is."""
        if self._stream is not None and to:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for part, other in zip(to, source, strict=True):
                part.copy_(other, non_blocking=True)
        return self._stream.record_event() if self._stream is not None and to else None

    def _take_block(self, num_bytes: int) -> torch.Tensor | None:
        if waiting := self._free[num_bytes]:
            return waiting.pop()
        self.buffer_bytes += num_bytes
        if self.counts_only:
            return None
        self._reserve(num_bytes)
        is_pinned = self._device.type == "cuda"
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)

    def _give_back(self, sizes: Sequence[int], blocks: Sequence[torch.Tensor | None]) -> None:
        for size, block in zip(sizes, blocks, strict=True):
            self._free[size].append(block)


class _Offloaded:
    """An input that was moved to ``blocks``, and the one that was moved before it.

    ``returning``: it on the device, and the event at which it is there.
    """

    def __init__(
        self,
        x: torch.Tensor,
        blocks: Sequence[torch.Tensor | None],
        before: "weakref.ref[_Offloaded] | None",
    ) -> None:
        self.shape, self.dtype, self.blocks = x.shape, x.dtype, blocks
        self.before = before
        self.returning: tuple[torch.Tensor, Any] | None = None

    def pair(self, x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the bytes of ``x``, contiguous, and where those are in blocks; nothing in a trace.

        Both in parts of a block each.
        """
        blocks = [block for block in self.blocks if block is not None]
        left = x.view(-1).view(torch.uint8) if blocks else x
        parts = []
        for block in blocks:
            parts.append(left[: len(block)])
            left = left[len(block) :]
        return parts, [block[: len(part)] for block, part in zip(blocks, parts, strict=True)]
