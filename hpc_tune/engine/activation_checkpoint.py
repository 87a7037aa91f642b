"""Activation checkpointing: what a decoder block keeps for its backward pass.

    recompute=none       everything that autograd saves
    recompute=selective  the results of matmuls and attention, and the block's input
    recompute=full       the block's input

The rest is recomputed in the backward pass, bit for bit (arXiv:1604.06174, selective:
arXiv:2205.05198). Only a block's ``forward`` is replaced: the block's hooks (in which FSDP2 gathers
weights) are not run again, and parameter names stay as they are.
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
from hpc_tune.world.pinned import release_pinned_cache, split_into_blocks

P = ParamSpec("P")
T = TypeVar("T")
Forward = Callable[..., Any]
MakeSavingContext = Callable[[tuple[Any, ...]], AbstractContextManager[Any]]
RecomputeLevel = Literal["none", "selective", "full"]
# What selective recompute keeps: the results of matmuls. By name, because torch knows the 4-bit
# matmuls only once bitsandbytes is imported. Batched matmuls are left out: they give the T x T
# scores of attention that is not fused, the largest tensors of all.
_MATMUL_FIRST_OPERAND = {
    "aten.mm.default": 0,
    "aten.addmm.default": 1,
    "aten._scaled_mm.default": 0,
    "aten._grouped_mm.default": 0,
    "transformers.grouped_mm_fallback.default": 0,
}
_SAVED_OPS = frozenset(
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
# The widest MLPs expand their input 8 times (Gemma), adapters expand 16 to 4096 and more.
MAX_SAVED_EXPANSION = 8
_SELECTIVE_MODES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


def null_saving_context(_args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Return a context in which autograd saves a block's arguments without moving them."""
    return nullcontext()


def checkpoint_blocks(
    blocks: Sequence[nn.Module],
    recompute: RecomputeLevel,
    saving_context: MakeSavingContext = null_saving_context,
) -> None:
    """Replace the ``forward`` of decoder blocks with one that recomputes as ``recompute`` says.

    Blocks of one class share one function, so ``compile_blocks`` compiles it once.
    ``saving_context`` returns the context in which a block's arguments are saved, unless compiled.
    """
    if recompute == "none":
        return
    wrappers: dict[Forward, Forward] = {}
    for block in blocks:
        if recompute == "selective":
            _clone_before_clipping(block)
        class_forward = type(block).forward
        if class_forward not in wrappers:
            wrappers[class_forward] = _with_recompute(class_forward, recompute, saving_context)
        block.forward = types.MethodType(wrappers[class_forward], block)


def make_recompute_actions(
    blocks: Sequence[nn.Module],
    configured: RecomputeLevel,
    saving_context: MakeSavingContext = null_saving_context,
) -> dict[Action, ActionHandle]:
    """Return the governor's action that recomputes whole blocks, without the compiler.

    There is none if ``configured`` (parallel.recompute) is full. ``blocks`` are as trained: after
    ``checkpoint_blocks``, compiled or not. ``saving_context``: as in ``checkpoint_blocks``.
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
            checkpoint_blocks(blocks, "full", saving_context)
        return f"activations are recomputed: {'full' if times else configured}"

    return {Action.RECOMPUTE: ActionHandle(recompute)}


def disable_dispatch_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``function`` to run outside torch's dispatch modes, such as that of selective recompute,
    which counts the operations of a block, or FakeTensorMode.
    """

    @functools.wraps(function)
    def run_outside_modes(*args: P.args, **kwargs: P.kwargs) -> T:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run_outside_modes


def exclude_from_recompute(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` so that selective recompute does not count its operations.

    Selective recompute finds what it kept by counting a block's operations, and fails if the
    recomputation has others than the first pass, as when only one of the two gathers weights.
    """

    @functools.wraps(function)
    def run_outside_modes(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(_get_current_dispatch_mode(), _SELECTIVE_MODES):
            return function(*args, **kwargs)
        with _pop_mode_temporarily():
            return function(*args, **kwargs)

    return run_outside_modes


def _with_recompute(
    forward: Forward, recompute: RecomputeLevel, saving_context: MakeSavingContext
) -> Forward:
    options: dict[str, Any] = {"use_reentrant": False}
    if recompute == "selective":
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, _recompute_policy
        )
    blocks_without_rng: WeakSet[nn.Module] = WeakSet()

    def forward_with_recompute(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run a block, to be run again in the backward pass with the same random numbers, if any.

        Its first pass in a training step shows whether it draws any; if not, no RNG state is saved.
        """
        if not torch.is_grad_enabled():
            return forward(self, *args, **kwargs)
        all_kwargs = {**options, **kwargs}
        if torch.compiler.is_compiling():
            # The batch is an argument here; to bind it as the current one would break the graph.
            return checkpoint(forward, self, *args, **all_kwargs)
        run = batch_context.bind(forward)
        if self in blocks_without_rng:
            with saving_context(args):
                return checkpoint(run, self, *args, preserve_rng_state=False, **all_kwargs)
        state_before = _random_state(*args)
        with saving_context(args):
            out = checkpoint(run, self, *args, **all_kwargs)
        if _random_state(*args) == state_before:
            blocks_without_rng.add(self)
        return out

    return forward_with_recompute


def _clone_before_clipping(block: nn.Module) -> None:
    """Make a block that clips queries, keys and values in place (OLMo) clip copies instead.

    Otherwise the kept matmul results would be clipped ones, which have other gradients.
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
    """Return the RNG states of the CPU and of the devices of ``args``."""
    with _disable_current_modes():  # a plan's tensors are fake, these are not
        states = [torch.get_rng_state()]
        if torch.cuda.is_initialized():
            states += get_device_states(*args)[1]
        return [state.numpy().tobytes() for state in states]


def _recompute_policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = (name := str(operator)) in _SAVED_OPS
    if (first := _MATMUL_FIRST_OPERAND.get(name)) is not None:
        is_saved = _is_worth_saving(*args[first : first + 2])
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


def _is_worth_saving(left_MK: torch.Tensor, right_KN: torch.Tensor) -> bool:  # or a KN per group
    """Whether a matmul makes rows of K values at most ``MAX_SAVED_EXPANSION`` times as long (N).

    An adapter's second matmul has only the adapter's rank as K, and as many output values as the
    base layer: if those were kept too, selective would keep more than none.
    """
    return MAX_SAVED_EXPANSION * right_KN.shape[-2] >= right_KN.shape[-1]


# -- Inputs of recomputed blocks in pinned host memory, copied while blocks are computed.
#
#     forward     input of block i -> its buffer, while block i is computed; block i + 1 waits
#     backward    block i is recomputed, while the input of block i - 1 is copied back
#
# All copies run on one stream, in the order of the requests, so a buffer is free for the next input
# as soon as the copy back of its last one is enqueued. The device waits, the host never does: an
# input is released once the compute stream has been told to wait for its copy. ``record_stream``
# would keep its memory until the host sees that the copy has ended, and the host is far ahead.
#
# A buffer is a few blocks of pinned memory, each of a power of two bytes: torch would round a
# single allocation up to the next power of two.


LONG_ROW_TOKENS = 4096  # shorter rows have little to offload


class OffloadedInputs:
    """The inputs of one engine's blocks. ``is_on``: they are offloaded, else they stay in place.

    ``buffer_bytes``: of all existing buffers, which the fullest step so far needed, in whole
    blocks of memory. ``is_dry_run``: for a trace, which has no host memory: inputs are dropped,
    and come back without values.
    """

    def __init__(self, settings: EngineSettings) -> None:
        device = settings.device
        self.is_dry_run = False
        self.buffer_bytes = 0
        self._device, self._row_tokens = device, settings.row_tokens
        self._can_offload = device.type == "cuda" or settings.faults.offloads_without_gpu
        self._can_offload &= not settings.train.compiles
        self.is_on = self._is_configured = (
            settings.parallel.offload_activations and self._can_offload
        )
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._reserve = settings.reserve
        # Blocks by their bytes.
        self._free_blocks: dict[int, list[torch.Tensor | None]] = defaultdict(list)
        self._pending_copy: tuple[torch.Tensor, Any] | None = None
        self._last_input: weakref.ref[_OffloadedTensor] | None = None

    def memory_actions(self) -> dict[Action, ActionHandle]:
        """Return the action that offloads inputs, if that is off and possible and rows are long.

        The governor's ladder recomputes blocks before that: without recompute, nothing is moved.
        """
        if not self._can_offload or self._is_configured or self._row_tokens < LONG_ROW_TOKENS:
            return {}

        def move(times: int) -> str:
            self.is_on = bool(times)
            if not times:
                self._free_blocks.clear()
                self.buffer_bytes = 0
                release_pinned_cache()
            return f"inputs of blocks are kept on the {'host' if times else 'device'}"

        return {Action.OFFLOAD_ACTIVATIONS: ActionHandle(move)}

    def reset_at_each_pass(self, stage: nn.Module) -> None:
        """Make each pass through a stage prefetch only its own inputs."""
        stage.register_forward_pre_hook(lambda *_: self._begin_pass())

    def _begin_pass(self) -> None:
        self._last_input = None

    def saving_context(self, args: tuple[Any, ...]) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the first of ``args`` is offloaded when autograd saves it."""
        if not self.is_on or not args or not isinstance(args[0], torch.Tensor):
            return contextlib.nullcontext()
        shape = args[0].shape

        def pack(x: torch.Tensor) -> Any:
            return self._offload_input(x) if x.shape == shape and x.is_floating_point() else x

        return torch.autograd.graph.saved_tensors_hooks(pack, self._copy_back)

    def wait_for_copies(self) -> None:
        """Make later work on the device wait for all copies, as after a pass that was aborted."""
        self._pending_copy = self._last_input = None
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _offload_input(self, x: torch.Tensor) -> "_OffloadedTensor":
        self._release_copied_input()
        x, sizes = x.detach().contiguous(), split_into_blocks(x.nbytes)
        offloaded = _OffloadedTensor(x, [self._take_block(n) for n in sizes], self._last_input)
        weakref.finalize(offloaded, self._return_blocks, sizes, offloaded.blocks)
        parts, host_parts = offloaded.pair_with_blocks(x)
        self._pending_copy = x, self._copy(host_parts, parts)
        self._last_input = weakref.ref(offloaded)
        return offloaded

    def _copy_back(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _OffloadedTensor):
            return packed  # type: ignore[no-any-return]
        self._release_copied_input()
        self._begin_copy_back(packed)
        previous_input = packed.previous() if packed.previous is not None else None
        if previous_input is not None:
            self._begin_copy_back(previous_input)
        assert packed.device_copy is not None, "its copy back has begun"
        (x, end_event), packed.device_copy = packed.device_copy, None
        if end_event is not None:
            torch.cuda.current_stream(self._device).wait_event(end_event)
        return x

    def _begin_copy_back(self, offloaded: "_OffloadedTensor") -> None:
        if offloaded.device_copy is None:
            x = torch.empty(offloaded.shape, dtype=offloaded.dtype, device=self._device)
            offloaded.device_copy = x, self._copy(*offloaded.pair_with_blocks(x))

    def _release_copied_input(self) -> None:
        """Make the compute stream wait for the copy under way, and release the copy's source."""
        if self._pending_copy is not None and self._pending_copy[1] is not None:
            torch.cuda.current_stream(self._device).wait_event(self._pending_copy[1])
        self._pending_copy = None

    def _copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> Any:
        """Enqueue copies behind the work so far; return the event of their end, None if none."""
        if self._stream is not None and targets:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
        return self._stream.record_event() if self._stream is not None and targets else None

    def _take_block(self, num_bytes: int) -> torch.Tensor | None:
        if free_blocks := self._free_blocks[num_bytes]:
            return free_blocks.pop()
        self.buffer_bytes += num_bytes
        if self.is_dry_run:
            return None
        self._reserve(num_bytes)
        is_pinned = self._device.type == "cuda"
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)

    def _return_blocks(self, sizes: Sequence[int], blocks: Sequence[torch.Tensor | None]) -> None:
        for size, block in zip(sizes, blocks, strict=True):
            self._free_blocks[size].append(block)


class _OffloadedTensor:
    """An input that was moved to ``blocks``, and the one that was moved before it.

    ``device_copy``: its tensor on the device, once copied back, and the event of the copy's end.
    """

    def __init__(
        self,
        x: torch.Tensor,
        blocks: Sequence[torch.Tensor | None],
        previous: "weakref.ref[_OffloadedTensor] | None",
    ) -> None:
        self.shape, self.dtype, self.blocks = x.shape, x.dtype, blocks
        self.previous = previous
        self.device_copy: tuple[torch.Tensor, Any] | None = None

    def pair_with_blocks(self, x: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the bytes of contiguous ``x`` and their places in the blocks; nothing in a trace.

        Both are lists with one part per block.
        """
        blocks = [block for block in self.blocks if block is not None]
        remaining_bytes = x.view(-1).view(torch.uint8) if blocks else x
        parts = []
        for block in blocks:
            parts.append(remaining_bytes[: len(block)])
            remaining_bytes = remaining_bytes[len(block) :]
        return parts, [block[: len(part)] for block, part in zip(blocks, parts, strict=True)]
