"""Inputs of recomputed blocks in pinned host memory, copied beside what is computed.

    forward     input of block i -> its buffer, while block i is computed; block i + 1 waits for it
    backward    block i runs again: the input of block i - 1 comes back meanwhile

All copies are in one stream, in the order in which they are asked for, so a buffer is free for the
next input as soon as its last one has been asked back. The device waits, the host never: an input
is let go of when the stream that computes has been told to wait for its copy. ``record_stream``
would keep its memory until the host sees that the copy has ended, and the host is far ahead.

Buffers have ``PIECE_BYTES``, and of an input what is left over: torch takes a power of two for each
(``world/pinned.py``), which for a whole input may be twice as much.
"""

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from hpc_tune.engine.base import EngineSettings
from hpc_tune.memory.policy import Action, ActionHandle
from hpc_tune.world.pinned import empty_pinned_cache, round_up_bytes

LONG_ROW_TOKENS = 4096  # shorter rows leave little to move
PIECE_BYTES = 64 << 20  # copied in a millisecond


class OffloadedInputs:
    """The inputs of one engine's blocks. ``is_on``: they are moved, else kept where they are.

    ``buffer_bytes``: of all buffers there are, those of the fullest step so far. ``counts_only``:
    for a trace, which has no host memory: inputs are dropped, and come back without values.
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
        self._free: dict[int, list[torch.Tensor | None]] = defaultdict(list)  # pieces by bytes
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
        moved = _Offloaded(x, self._last)
        x = x.contiguous()
        for num_bytes in moved.piece_bytes:
            piece = self._take_piece(num_bytes)
            moved.pieces.append(piece)
            weakref.finalize(moved, self._free[num_bytes].append, piece)
        self._leaving = x, self._copy(moved.on_host, moved.cut(x))
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
            moved.returning = x, self._copy(moved.cut(x), moved.on_host)

    def _let_go(self) -> None:
        """Let the stream that computes wait for the copy under way, and forget its source."""
        if self._leaving is not None and self._leaving[1] is not None:
            torch.cuda.current_stream(self._device).wait_event(self._leaving[1])
        self._leaving = None

    def _copy(self, to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> Any:
        """Begin copies behind what has been asked for so far; return their end, None if it is."""
        if self.counts_only:
            return None
        if self._stream is None:
            for to_piece, piece in zip(to, source, strict=True):
                to_piece.copy_(piece)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for to_piece, piece in zip(to, source, strict=True):
                to_piece.copy_(piece, non_blocking=True)
            return self._stream.record_event()

    def _take_piece(self, num_bytes: int) -> torch.Tensor | None:
        if waiting := self._free[num_bytes]:
            return waiting.pop()
        self.buffer_bytes += num_bytes
        if self.counts_only:
            return None
        is_pinned = self._device.type == "cuda"
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)


class _Offloaded:
    """An input that was moved, and the one that was moved before it.

    ``returning``: it on the device, and the event at which it is there.
    """

    def __init__(self, x: torch.Tensor, before: "weakref.ref[_Offloaded] | None") -> None:
        self.shape, self.dtype, self.num_bytes = x.shape, x.dtype, x.nbytes
        self.before = before
        self.pieces: list[torch.Tensor | None] = []
        self.returning: tuple[torch.Tensor, Any] | None = None

    @property
    def piece_bytes(self) -> list[int]:
        """The bytes of each of its buffers."""
        whole, rest = divmod(self.num_bytes, PIECE_BYTES)
        return [PIECE_BYTES] * whole + [round_up_bytes(rest)] * (rest > 0)

    @property
    def on_host(self) -> list[torch.Tensor]:
        """Its values in its buffers."""
        pieces = zip(self.pieces, self._lengths, strict=True)
        return [piece.view(self.dtype)[:num] for piece, num in pieces if piece is not None]

    def cut(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return contiguous values like these by the buffer that they have."""
        return x.view(-1).split(self._lengths)

    @property
    def _lengths(self) -> list[int]:
        most = PIECE_BYTES // self.dtype.itemsize
        whole, rest = divmod(self.num_bytes // self.dtype.itemsize, most)
        return [most] * whole + [rest] * (rest > 0)
