"""Which blocks of pinned memory hold which tensors."""

import random

import pytest
import torch

from hpc_tune.world import pinned
from hpc_tune.world.pinned import (
    empty_pinned_like,
    next_power_of_two,
    pinned_blocks_bytes,
    split_into_blocks,
)

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("num_bytes", "block"), [(0, 0), (1, 1), (4096, 4096), (4097, 8192), (5 * MIB, 8 * MIB)]
)
def test_a_request_is_rounded_up_to_a_power_of_two(num_bytes, block):
    assert next_power_of_two(num_bytes) == block


def moments_of(hidden, inner, keys, blocks, vocab, shards):
    """Bytes of the moments of a model like Llama or Qwen in fp32 on each of so many ranks."""
    of_block = [hidden * hidden] * 2 + [hidden * keys] * 2 + [hidden * inner] * 3 + [hidden] * 2
    of_all = of_block * blocks + [vocab * hidden] * 2 + [hidden]
    return 2 * [4 * num // shards for num in of_all]


@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize(
    ("shape", "each"),
    [
        ((4096, 14336, 1024, 32, 128256), 1.10),  # Llama 3 8B
        ((8192, 28672, 1024, 80, 128256), 1.11),  # Llama 3 70B
        ((3584, 18944, 512, 28, 152064), 1.90),  # Qwen2.5 7B
        ((5120, 27648, 1024, 64, 152064), 1.80),  # Qwen2.5 32B
        ((5120, 32768, 1024, 40, 131072), 1.57),  # Mistral Small 24B
    ],
)
def test_moments_of_published_models_take_what_they_have(shape, each, shards):
    sizes = moments_of(*shape, shards)
    assert sum(map(next_power_of_two, sizes)) / sum(sizes) == pytest.approx(each, abs=0.01)
    assert pinned_blocks_bytes(sizes) < 1.005 * sum(sizes)


def test_blocks_are_of_powers_of_two_and_larger_than_four_gib_for_a_larger_tensor_alone():
    for sizes in ([3 * GIB] * 6 + [5 * GIB] * 3, [GIB + 1] * 9, [9 * GIB, 1]):
        blocks, _ = pinned._pack_into_blocks(sizes)
        assert all(next_power_of_two(block) == block for block in blocks)
        assert max(blocks) <= max(4 * GIB, next_power_of_two(max(sizes)))
        assert sum(blocks) <= sum(map(next_power_of_two, sizes))


def test_tensors_of_any_sizes_share_no_byte_and_take_no_more_than_each_by_itself():
    draw = random.Random(0)
    for _ in range(500):
        choices = [0, 150 * MIB, 5 * GIB, int(draw.lognormvariate(14, 3)), draw.randint(1, 100)]
        sizes = [draw.choice(choices) for _ in range(draw.randint(0, 60))]
        blocks, places = pinned._pack_into_blocks(sizes)
        assert [place is not None for place in places] == [size > 0 for size in sizes]
        spans = sorted(
            (place.block, place.offset, place.offset + size)
            for place, size in zip(places, sizes, strict=True)
            if place is not None
        )
        assert all(offset % 64 == 0 and end <= blocks[n] for n, offset, end in spans)
        for (block, _, end), (after, begins, _) in zip(spans, spans[1:], strict=False):
            assert block != after or end <= begins
        assert sum(blocks) <= sum(map(next_power_of_two, sizes)) + MIB
        assert pinned_blocks_bytes(sizes) == sum(blocks)


def test_what_is_carved_has_the_shapes_and_dtypes_and_holds_its_values(monkeypatch):
    empty, made = torch.empty, []

    def on_host(*args, pin_memory=False, **more):
        if pin_memory:
            made.append(args[0])
        return empty(*args, **more)

    monkeypatch.setattr(torch, "empty", on_host)
    wanted = [
        torch.randn(1000, 7),
        torch.randn(33).bfloat16(),
        torch.ones(0, 4),
        torch.tensor(2.0),
        torch.arange(5),
        torch.randn(64, 3).t(),
    ]
    found = empty_pinned_like(wanted)
    for one, values in zip(found, wanted, strict=True):
        one.copy_(values)
    for one, values in zip(found, wanted, strict=True):
        assert one.is_contiguous()
        assert one.dtype == values.dtype
        assert torch.equal(one, values)
    assert made == [next_power_of_two(sum(values.nbytes for values in wanted))]


@pytest.mark.parametrize(
    ("num_bytes", "blocks"),
    [
        (0, []),
        (1, [64]),
        (4096, [4096]),
        (5 * MIB, [4 * MIB, MIB]),
        (7 * GIB, [4 * GIB, 2 * GIB, GIB]),
        (45 * MIB, [32 * MIB, 8 * MIB, 4 * MIB, 2 * MIB]),
    ],
)
def test_what_may_lie_in_several_blocks_needs_little_more_than_itself(num_bytes, blocks):
    assert split_into_blocks(num_bytes) == blocks


def test_blocks_of_any_size_hold_it_with_a_sixteenth_more():
    for num_bytes in (*range(1025, 9000, 7), *(hidden << 20 for hidden in range(65, 129))):
        blocks = split_into_blocks(num_bytes)
        assert num_bytes <= sum(blocks) <= num_bytes * 17 / 16 + 64
        assert len(blocks) <= 6
        assert sum(blocks[:-1]) < num_bytes
