"""Pinned host memory, which a GPU copies by itself, without the overhead of torch's allocator.

    sizes of tensors -> few blocks of powers of two -> each tensor is a view of a block

torch rounds each request for pinned memory up to a power of two and never splits a block: a tensor
of 2^n + 1 bytes takes 2^(n+1). Freed blocks stay cached for requests that round to the same size,
until ``torch._C._host_emptyCache`` (ATen/core/CachingHostAllocator.h, ``allocate`` and ``free``,
torch 2.9 to 2.14). Therefore the tensors here share blocks whose sizes need no rounding.

PYTORCH_ALLOC_CONF has pinned_max_round_threshold_mb, above which torch does not round. It is not
used here: torch 2.9 and 2.10 do not know it, and 2.13 may serve a request from a cached block that
is smaller than the request (https://github.com/pytorch/pytorch/pull/192722).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

_ALIGNMENT = 64  # bytes, enough for values of any dtype and for a processor's vectors
_MIN_SPLIT_BYTES = 1 << 20  # a smaller rest is rounded up to a power of two, not split further
_MAX_BLOCK_BYTES = 4 << 30  # takes two seconds to allocate; only a larger tensor exceeds it


@dataclass(frozen=True)
class BlockOffset:
    """Where in which block a tensor begins, in bytes."""

    block: int
    offset: int


def next_power_of_two(num_bytes: int) -> int:
    """Return the size of the block that torch allocates for a request, in bytes."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes > 0 else 0


def split_into_blocks(num_bytes: int) -> list[int]:
    """Return the sizes of blocks that hold ``num_bytes`` in all, and at most 1/16 or 63 bytes more.

    For data that may be spread over several blocks: each is a power of two, the largest is first.
    """
    step = max(_ALIGNMENT, next_power_of_two(num_bytes) // 32)
    remaining_bytes, blocks = math.ceil(num_bytes / step) * step, []
    while remaining_bytes:
        blocks.append(1 << (remaining_bytes.bit_length() - 1))
        remaining_bytes -= blocks[-1]
    return blocks


def pinned_blocks_bytes(sizes: Iterable[int]) -> int:
    """Return the bytes that ``empty_pinned_like`` allocates for tensors of these sizes in bytes."""
    return sum(_pack_into_blocks([*sizes])[0])


def empty_pinned_like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return contiguous tensors of these shapes and dtypes in pinned memory, without values."""
    sizes, places = _pack_into_blocks([tensor.nbytes for tensor in tensors])
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
    return [
        _view(blocks[place.block], place.offset, tensor)
        if place is not None
        else torch.empty(tensor.shape, dtype=tensor.dtype)
        for tensor, place in zip(tensors, places, strict=True)
    ]


def release_pinned_cache() -> None:
    """Return unused blocks to the system; torch would otherwise keep them for good."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch._C._host_emptyCache()


def _view(block: torch.Tensor, offset: int, template: torch.Tensor) -> torch.Tensor:
    return block[offset : offset + template.nbytes].view(template.dtype).view(template.shape)


def _pack_into_blocks(sizes: Sequence[int]) -> tuple[list[int], list[BlockOffset | None]]:
    """Return the sizes of blocks, and each tensor's place in them; None for an empty tensor.

    The largest tensors come first, and smaller ones fill the gaps. Each round tries one block for
    all that is left, then fills a block of half that size and continues; the smallest sum wins.
    """
    unplaced = sorted((n for n, size in enumerate(sizes) if size), key=lambda n: -sizes[n])
    places: list[BlockOffset | None] = [None] * len(sizes)
    blocks: list[tuple[int, dict[int, int]]] = []  # blocks: bytes, and offsets of tensors
    best: list[tuple[int, dict[int, int]]] = []
    while unplaced:
        total_bytes = next_power_of_two(sum(_align(sizes[n]) for n in unplaced))
        largest = next_power_of_two(sizes[unplaced[0]])
        max_bytes = max(_MAX_BLOCK_BYTES, largest)
        if total_bytes <= max_bytes:
            candidate = [*blocks, _fill_block(total_bytes, unplaced, sizes)]
            if not best or sum(size for size, _ in candidate) < sum(size for size, _ in best):
                best = candidate
        if total_bytes <= max(_MIN_SPLIT_BYTES, largest):
            break
        blocks.append(_fill_block(min(max_bytes, max(total_bytes // 2, largest)), unplaced, sizes))
        unplaced = [n for n in unplaced if n not in blocks[-1][1]]
    for block, (_, offsets) in enumerate(best):
        for number, offset in offsets.items():
            places[number] = BlockOffset(block, offset)
    return [size for size, _ in best], places


def _fill_block(
    block_size: int, tensor_indices: Sequence[int], sizes: Sequence[int]
) -> tuple[int, dict[int, int]]:
    """Return a block with the offsets of the unplaced tensors that fit into it."""
    offsets: dict[int, int] = {}
    offset = 0
    for number in tensor_indices:
        if offset + sizes[number] <= block_size:
            offsets[number] = offset
            offset += _align(sizes[number])
    return block_size, offsets


def _align(num_bytes: int) -> int:
    return math.ceil(num_bytes / _ALIGNMENT) * _ALIGNMENT
