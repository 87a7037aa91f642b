"""Inputs of recomputed blocks in pinned host memory, copied beside what is computed.

    forward     input of block i -> its buffer, while block i is computed; block i + 1 waits for it
    backward    block i runs again: the input of block i - 1 comes back meanwhile

All copies are in one stream, in the order in which they are asked for, so a buffer is free for the
next input as soon as its last one has been asked back. The device waits, the host never: an input
is let go of when the stream that computes has been told to wait for its copy. ``record_stream``
would keep its memory until the host sees that the copy has ended, and the host is far ahead.

A buffer is of few blocks of pinned memory, each a power of two: torch would round it up to one.
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hpc_tune.engine.base import EngineSettings
from hpc_tune.memory.policy import Action, ActionHandle
from hpc_tune.world.pinned import empty_pinned_cache, split_into_blocks

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
