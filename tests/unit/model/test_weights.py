import hashlib
import json
import math
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hpc_tune.errors import CheckpointError, DataError
from hpc_tune.model import regions, tensor_sources, weights
from hpc_tune.model.regions import Region, local_region, write_regions
from hpc_tune.model.tensor_sources import Box
from hpc_tune.model.weights import index_files, index_model_directory
from tests.support.ranks import HANG_S
from tests.support.regions import regions_of

DTYPES = list(weights.DTYPE_NAMES)


def part_of(name, full, box):
    """The region of ``full`` inside ``box`` (slices), as a rank would write it."""
    part = full[box]
    held = Box(tuple(b.start for b in box), tuple(part.shape))
    return Region(name, full.dtype, held, tuple(full.shape), part.contiguous)


def sample(shape, dtype):
    generator = torch.Generator().manual_seed(math.prod(shape))
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 4
    return values > 0 if dtype is torch.bool else values.abs().to(dtype)


@st.composite
def cut_tensors(draw):
    """A shape, a split of it into boxes along one dim, and a box to read."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = sorted({0, shape[dim], *draw(st.lists(st.integers(0, shape[dim]), max_size=3))})
    boxes = [
        tuple(slice(a, b) if d == dim else slice(0, n) for d, n in enumerate(shape))
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    starts = [draw(st.integers(0, n - 1)) for n in shape]
    stops = [draw(st.integers(s + 1, n)) for s, n in zip(starts, shape, strict=True)]
    return tuple(shape), boxes, tuple(map(slice, starts, stops))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut_tensors(), st.sampled_from([4, 40, 16 << 20]))
def test_any_box_read_from_any_pieces_is_the_slice(tmp_path, monkeypatch, case, piece_bytes):
    monkeypatch.setattr(tensor_sources, "PIECE_BYTES", piece_bytes)
    shape, boxes, wanted = case
    full = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    files = [tmp_path / f"rank-{i}.safetensors" for i in range(len(boxes))]
    for file, box in zip(files, boxes, strict=True):
        write_regions(file, [part_of("w", full, box)])
    index = index_files(files)
    assert index.shapes["w"] == shape
    local = torch.full_like(full[wanted], -1).contiguous()
    index.fill(local, "w", tuple(b.start for b in wanted))
    assert torch.equal(local, full[wanted])


def test_a_region_is_filled_into_a_strided_tensor(tmp_path):
    full = torch.randn(6, 4)
    save_file({"w": full}, tmp_path / "model.safetensors")
    target = torch.zeros(4, 6).t()
    index_model_directory(tmp_path).fill(target, "w")
    assert torch.equal(target, full)


def test_each_piece_is_announced_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_sources, "PIECE_BYTES", 32)
    save_file({"w": torch.ones(5, 4)}, tmp_path / "model.safetensors")
    local, announced = torch.zeros(5, 4), []

    def reserve(num_bytes):
        announced.append((num_bytes, int(local.sum())))

    index_model_directory(tmp_path).fill(local, "w", reserve=reserve)
    # Twice the bytes of two rows, two rows and one; with the values that were there already.
    assert announced == [(64, 0), (64, 8), (32, 16)]


def test_a_tensor_without_dims_and_one_without_values_are_read(tmp_path):
    save_file({"x": torch.tensor(2.5), "e": torch.empty(0, 3)}, tmp_path / "model.safetensors")
    index = index_model_directory(tmp_path)
    scalar, empty = torch.zeros(()), torch.empty(0, 3)
    index.fill(scalar, "x")
    index.fill(empty, "e")
    assert scalar.item() == 2.5


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_the_dtype_is_converted_as_torch_does(tmp_path, stored, wanted):
    full = sample((33, 5), stored)
    save_file({"w": full}, tmp_path / "model.safetensors")
    local = torch.zeros(10, 5, dtype=wanted)
    index_model_directory(tmp_path).fill(local, "w", (20, 0))
    assert torch.equal(local, full[20:30].to(wanted))


def test_a_directory_of_several_files_is_one_index(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "model-2.safetensors")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    index = index_model_directory(tmp_path)
    assert index.shapes == {"a": (2,), "b": (3,)}


def test_a_missing_shard_is_named(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(DataError, match=r"model-2\.safetensors: no such file"):
        index_model_directory(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", 3])
def test_an_index_names_files_of_its_own_folder_only(tmp_path, name):
    index = {"weight_map": {"a": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match="not in this folder|not a safetensors index"):
        index_model_directory(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 5}', "{}"])
def test_an_index_that_is_none_is_named(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(DataError, match=r"index\.json: not a safetensors index"):
        index_model_directory(tmp_path)


@pytest.mark.parametrize("left", [0, 7, 60, -1])
def test_a_truncated_file_is_refused_before_anything_is_read(tmp_path, left):
    file = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(100)}, file)
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(DataError, match="not a whole safetensors file"):
        index_model_directory(tmp_path)


def test_a_file_that_shrinks_after_it_was_indexed_is_refused(tmp_path):
    file = tmp_path / "rank-0.safetensors"
    write_regions(file, regions_of({"w": torch.ones(100)}))
    index = index_files([file], CheckpointError)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="w cannot be read"):
        index.fill(torch.zeros(100), "w")


def test_pickled_weights_are_refused_with_the_way_out(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(DataError, match=r"only \.bin .*save_pretrained"):
        index_model_directory(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no model\.safetensors"):
        index_model_directory(tmp_path)


@pytest.mark.parametrize(
    ("shape", "offset"), [((5, 3), ()), ((4, 4), ()), ((4,), ()), ((2, 3), (3, 0)), ((4, 3, 1), ())]
)
def test_a_region_that_is_not_in_the_tensor_is_refused_with_both_shapes(tmp_path, shape, offset):
    save_file({"w": torch.ones(4, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"w has shape \[4, 3\], which has no region of shape"):
        index_model_directory(tmp_path).fill(torch.zeros(shape), "w", offset)


def test_a_region_of_which_a_piece_is_missing_is_refused_with_the_count(tmp_path):
    full = torch.ones(4, 3)
    write_regions(tmp_path / "rank-0.safetensors", [part_of("w", full, (slice(0, 3), slice(0, 3)))])
    index = index_files([tmp_path / "rank-0.safetensors"], CheckpointError)
    index.fill(torch.zeros(3, 3), "w")
    with pytest.raises(CheckpointError, match="w has only 6 of the 9 values"):
        index.fill(torch.zeros(3, 3), "w", (1, 0))


def test_a_tensor_of_which_one_place_was_saved_twice_is_refused(tmp_path):
    """The values may be as many as are needed, and others missing."""
    full, files = torch.ones(4, 3), [tmp_path / f"rank-{n}.safetensors" for n in range(2)]
    for file in files:
        write_regions(file, [part_of("w", full, (slice(0, 2), slice(0, 3)))])
    index = index_files(files, CheckpointError)
    with pytest.raises(CheckpointError, match="w has several regions at the same place"):
        index.fill(torch.zeros(4, 3), "w")


def test_ranks_that_hold_nothing_of_a_small_tensor_leave_it_whole(tmp_path):
    """A row over three shards: the second and the third have none of it, at the same place."""
    full, files = torch.ones(1, 3), [tmp_path / f"rank-{n}.safetensors" for n in range(3)]
    for file, rows in zip(files, (slice(0, 1), slice(1, 1), slice(1, 1)), strict=True):
        write_regions(file, [part_of("w", full, (rows, slice(0, 3)))])
    found = torch.zeros(1, 3)
    index_files(files, CheckpointError).fill(found, "w")
    assert torch.equal(found, full)


def test_a_large_file_goes_to_the_disk_stretch_by_stretch(tmp_path, monkeypatch):
    monkeypatch.setattr(regions, "PIECE_BYTES", 1 << 12)
    monkeypatch.setattr(regions, "SYNC_BYTES", 3 << 12)
    stretches = []
    real = regions._write_back
    monkeypatch.setattr(regions, "_write_back", lambda *a: (stretches.append(a[1:]), real(*a)))
    w = torch.randn(50, 1024)
    written = write_regions(tmp_path / "w.safetensors", regions_of({"w": w}))
    assert torch.equal(load_file(tmp_path / "w.safetensors")["w"], w)
    assert written.num_bytes == (tmp_path / "w.safetensors").stat().st_size
    dones, beguns, positions = zip(*stretches, strict=True)
    assert dones == (0, 0, *positions[:-2])
    assert beguns == (0, *positions[:-1])
    assert len(positions) == 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_is_read_by_stock_safetensors(tmp_path, dtype):
    tensors = {
        "matrix": sample((7, 5), dtype),
        "vector": sample((3,), dtype),
        "scalar": sample((), dtype),
        "transposed": sample((4, 6), dtype).t(),
    }
    file = tmp_path / "x.safetensors"
    write_regions(file, regions_of(tensors))
    stock = load_file(file)
    assert stock.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert stock[name].dtype == dtype
        assert torch.equal(stock[name].float(), tensor.float())


@pytest.mark.parametrize("piece_bytes", [1, 24, 16 << 20])
def test_size_and_hash_are_those_of_the_file(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(regions, "PIECE_BYTES", piece_bytes)
    file = tmp_path / "x.safetensors"
    written = write_regions(file, regions_of({"a": torch.randn(9, 9), "b": torch.ones(5)}))
    content = file.read_bytes()
    assert written.name == "x.safetensors"
    assert written.num_bytes == len(content)
    assert written.sha256 == hashlib.sha256(content).hexdigest()
    header_bytes = int.from_bytes(content[:8], "little")
    assert header_bytes % 8 == 0, "tensors are to be aligned"
    assert len(content) == 8 + header_bytes + 4 * (81 + 5)


def test_a_whole_tensor_needs_no_offset_in_the_header_and_a_part_has_it(tmp_path):
    file = tmp_path / "x.safetensors"
    full = torch.arange(12.0).view(4, 3)
    part = part_of("part", full, (slice(1, 3), slice(0, 3)))
    write_regions(file, [*regions_of({"whole": full}), part])
    header = json.loads(file.read_bytes()[8 : 8 + int.from_bytes(file.read_bytes()[:8], "little")])
    assert header["__metadata__"] == {
        "format": "pt",
        weights.OFFSETS_KEY: '{"part": [1, 0]}',
        weights.FULL_SHAPES_KEY: '{"part": [4, 3]}',
    }


def test_values_are_asked_for_one_tensor_at_a_time(tmp_path):
    made = []

    def values():
        assert not any(array() is not None for array in made), "the one before is still held"
        array = np.ones(4, np.float32)
        made.append(weakref.ref(array))  # a tensor's storage keeps the array that it is made of
        return torch.from_numpy(array)

    regions = [Region.cover_tensor(name, torch.float32, (4,), values) for name in ("a", "b", "c")]
    write_regions(tmp_path / "x.safetensors", regions)
    assert load_file(tmp_path / "x.safetensors").keys() == {"a", "b", "c"}


def test_a_block_is_hashed_while_it_is_written(tmp_path, monkeypatch):
    """The hash waits until some of the block is written, the rest of which waits for the hash."""
    begun, partly_written = threading.Event(), threading.Event()
    waited = []

    class Digest:
        def update(self, block):
            if len(block) > 1 << 20:
                begun.set()
                waited.append(partly_written.wait(10.0))

        def hexdigest(self):
            return ""

    monkeypatch.setattr(regions.hashlib, "sha256", Digest)
    os.mkfifo(tmp_path / "pipe")

    def write():
        with pytest.raises(CheckpointError, match="Invalid argument"):  # of syncing a pipe
            write_regions(tmp_path / "pipe", regions_of({"w": torch.ones(1 << 20)}))

    writing = threading.Thread(target=write)
    writing.start()
    with (tmp_path / "pipe").open("rb") as reader:
        reader.read(1 << 16)
        partly_written.set()
        waited.append(begun.wait(10.0))
        reader.read()
    writing.join()
    assert waited == [True, True]


def test_a_file_that_cannot_be_written_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="/dev/full cannot be written: .*No space left"):
        write_regions(Path("/dev/full"), regions_of({"w": torch.ones(3)}))


def test_a_mapped_tensor_is_the_files_and_writing_it_leaves_the_file_alone(tmp_path):
    full = torch.randn(5, 3)
    file = tmp_path / "model.safetensors"
    save_file({"w": full}, file)
    content = file.read_bytes()
    pages = index_model_directory(tmp_path).map_pages("w", torch.float32)
    assert torch.equal(pages, full)
    pages.zero_()
    assert file.read_bytes() == content


def test_what_must_be_converted_or_put_together_is_not_mapped(tmp_path):
    full = torch.randn(4, 3)
    for rank in (0, 1):
        box = (slice(2 * rank, 2 * rank + 2), slice(0, 3))
        write_regions(tmp_path / f"rank-{rank}.safetensors", [part_of("w", full, box)])
    files = sorted(tmp_path.glob("rank-*"))
    assert index_files(files).map_pages("w", torch.float32) is None
    assert index_files(files[:1]).map_pages("w", torch.float32) is None
    write_regions(tmp_path / "whole.safetensors", regions_of({"w": full}))
    whole = index_files([tmp_path / "whole.safetensors"])
    assert whole.map_pages("w", torch.bfloat16) is None
    assert torch.equal(whole.map_pages("w", torch.float32), full)


def test_a_plain_tensor_is_its_own_region():
    tensor = torch.ones(2, 3)
    local, offset = local_region(tensor)
    assert local is tensor
    assert offset == (0, 0)


READ = """
import sys, threading
from pathlib import Path
import torch
from hpc_tune.model.weights import index_model_directory
index = index_model_directory(Path(sys.argv[1]))
local = torch.zeros({shape}, dtype=torch.{wanted})
def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
before, peak, done = anonymous(), 0, threading.Event()
def watch():
    global peak
    while not done.wait(0.001):
        peak = max(peak, anonymous())
thread = threading.Thread(target=watch)
thread.start()
index.fill(local, "w", {offset})
done.set()
thread.join()
print(max(peak, anonymous()) - before)
"""


@pytest.mark.parametrize(
    ("full", "offset", "shape"),
    [
        pytest.param((4096, 8192), (0, 0), (4096, 8192), marks=pytest.mark.full),
        ((4096, 8192), (0, 2048), (4096, 2048)),
        pytest.param((2, 2048, 8192), (0, 0, 0), (2, 2048, 8192), marks=pytest.mark.full),
    ],
    ids=["whole", "columns", "stacked"],
)
def test_reading_takes_little_anonymous_memory_beside_the_result(tmp_path, full, offset, shape):
    """128 MB of fp32 on disk into bf16 (touched before): 48 MB is enough, whatever the box."""
    write_regions(tmp_path / "model.safetensors", regions_of({"w": torch.zeros(full)}))
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            READ.format(shape=shape, wanted="bfloat16", offset=offset),
            str(tmp_path),
        ],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    # The zeros of ``local`` are touched only when they are written.
    own_bytes = 2 * math.prod(shape)
    assert int(done.stdout) < own_bytes + (48 << 20)
