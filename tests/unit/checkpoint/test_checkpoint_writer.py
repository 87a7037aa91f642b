"""The thread that writes while training goes on."""

import hashlib
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load, load_file

from hpc_tune.checkpoint import writer as writer_module
from hpc_tune.checkpoint.writer import (
    CheckpointWriter,
    CudaStagingDevice,
    PinnedBlockPool,
    choose_staging_bytes,
    split_into_pieces,
    total_block_bytes,
)
from hpc_tune.errors import CheckpointError
from hpc_tune.model import regions
from tests.support.regions import regions_of

BYTES = 4 * 1000  # of one of the tensors


def tensors(num=8):
    return {f"t{i}": torch.full((1000,), float(i)) for i in range(num)}


def finished(writer, limit_s=120.0):
    until_s = time.monotonic() + limit_s
    while not writer.has_ended:
        assert time.monotonic() < until_s
        time.sleep(0.005)
    return writer.result()


@pytest.mark.parametrize("budget", [0, 3 * BYTES, 100 * BYTES])
def test_what_is_written_is_what_was_there_at_the_start(tmp_path, budget):
    live = tensors()
    writer = CheckpointWriter({tmp_path / "a.safetensors": regions_of(live)}, budget)
    writer.release(10.0)
    for tensor in live.values():
        tensor.fill_(-1.0)
    [written] = finished(writer)
    assert written.num_bytes == (tmp_path / "a.safetensors").stat().st_size
    found = load_file(tmp_path / "a.safetensors")
    assert {name: t.unique().tolist() for name, t in found.items()} == {
        f"t{i}": [float(i)] for i in range(8)
    }


def test_release_copies_no_more_than_the_budget(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # the thread waits at its open for a reader
    copied = []
    real = torch.Tensor.to

    def to(self, *args, **more):
        if more.get("copy"):
            copied.append(self.nbytes)
        return real(self, *args, **more)

    writer = CheckpointWriter({pipe: regions_of(tensors())}, 3 * BYTES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", to)
        writer.release(0.2)
    assert copied == [BYTES] * 3
    with pytest.raises(CheckpointError, match="no byte was written for 0 s; the file system hangs"):
        finished(writer)
    with pipe.open("rb") as reader:  # let the thread go, which has no more to write
        assert len(reader.read()) < BYTES


def test_release_copies_a_part_of_a_tensor_that_is_larger_than_the_budget(tmp_path, monkeypatch):
    piece = 1 << 17  # more than a pipe takes without a reader
    monkeypatch.setattr(writer_module, "PIECE_BYTES", piece)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    live = torch.arange(10.0 * (piece // 4))
    before = live.clone()
    writer = CheckpointWriter({pipe: regions_of({"w": live})}, 3 * piece)
    released = threading.Thread(target=writer.release, args=(60.0,))
    released.start()
    with pipe.open("rb") as reader:
        size = reader.read(8)
        content = size + reader.read(int.from_bytes(size, "little") + 7 * piece)
        released.join(20.0)
        assert not released.is_alive()  # the last three pieces are copied
        live.fill_(-1.0)
        content += reader.read()
    assert torch.equal(load(content)["w"], before)


class LazyDevice:
    """Copies nothing before it is waited for."""

    def __init__(self):
        self.copies, self.blocks, self.num_waits, self.held = [], [], 0, None

    def stream(self):
        return nullcontext()

    def block(self):
        block = torch.zeros(writer_module.PIECE_BYTES, dtype=torch.uint8)
        self.blocks.append(weakref.ref(block))
        return block

    def copy(self, values, destination):
        self.copies.append((values, destination))

    def wait(self):
        self.num_waits += 1
        while self.copies:
            values, destination = self.copies.pop()
            destination.copy_(values)

    def close(self):
        self.held = sum(block() is not None for block in self.blocks)


def test_the_update_waits_for_nothing_but_the_copies_of_a_device(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "PIECE_BYTES", 3 * BYTES)
    pipe, device, live = tmp_path / "pipe", LazyDevice(), tensors()
    os.mkfifo(pipe)  # nothing can be written before it has a reader
    writer = CheckpointWriter({pipe: regions_of(live)}, 9 * BYTES, device=device)
    writer.release(60.0)
    assert not writer.has_ended
    assert device.num_waits == 1
    for tensor in live.values():
        tensor.fill_(-1.0)
    with pipe.open("rb") as reader:
        content = reader.read()
    assert {name: t.unique().tolist() for name, t in load(content).items()} == {
        f"t{i}": [float(i)] for i in range(8)
    }
    with pytest.raises(CheckpointError, match="Invalid argument"):  # of syncing a pipe
        finished(writer)


def test_a_device_that_may_not_copy_all_copies_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "PIECE_BYTES", 3 * BYTES)
    device = LazyDevice()
    writer = CheckpointWriter({tmp_path / "a": regions_of(tensors())}, 9 * BYTES - 1, device=device)
    writer.release(60.0)
    finished(writer)
    assert (device.blocks, device.num_waits) == ([], 0)


def test_a_file_is_the_same_whoever_copies(tmp_path, monkeypatch):
    mixed = {
        "a": torch.randn(1001).bfloat16(),
        "b": torch.randn(7, 3),
        "c": torch.randn(5000).bfloat16(),
        "d": torch.arange(3000),
    }
    found = []
    for number, (piece_bytes, device) in enumerate([(1 << 24, None), (4096, LazyDevice())]):
        monkeypatch.setattr(writer_module, "PIECE_BYTES", piece_bytes)
        [written] = finished(
            CheckpointWriter({tmp_path / str(number): regions_of(mixed)}, 1 << 20, device=device)
        )
        content = (tmp_path / str(number)).read_bytes()
        assert written.sha256 == hashlib.sha256(content).hexdigest()
        found.append(content)
    assert found[0] == found[1]
    assert torch.equal(load(found[0])["c"], mixed["c"])


def test_a_devices_memory_is_given_back_when_nothing_holds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "PIECE_BYTES", 2 * BYTES)
    device = LazyDevice()
    finished(CheckpointWriter({tmp_path / "a": regions_of(tensors())}, 8 * BYTES, device=device))
    until_s = time.monotonic() + 60.0
    while device.held is None and time.monotonic() < until_s:
        time.sleep(0.005)
    assert (len(device.blocks), device.held) == (4, 0)


def test_pieces_are_all_values_and_share_no_byte_of_a_block(monkeypatch):
    monkeypatch.setattr(writer_module, "PIECE_BYTES", 4096)
    mixed = {"a": torch.ones(5, dtype=torch.bfloat16), "b": torch.ones(0), "c": torch.ones(3000)}
    saved = regions_of(mixed)
    pieces = list(split_into_pieces(saved))
    for number, region in enumerate(saved):
        mine = [piece for piece in pieces if piece.region == number]
        assert [i for p in mine for i in range(p.start, p.stop)] == list(range(region.box.shape[0]))
    spans = [(4096 * p.block + p.offset, p.num_bytes) for p in pieces]
    assert all(at + size <= after for (at, size), (after, _) in zip(spans, spans[1:], strict=False))
    assert all(piece.offset + piece.num_bytes <= 4096 for piece in pieces)
    assert all(piece.offset % 16 == 0 for piece in pieces)
    # 10 bytes, 6 to the next multiple of 16, and 12,000 more: three blocks.
    assert total_block_bytes(saved) == 3 * 4096
    assert total_block_bytes([]) == 0


ROOM, MIB = 1 << 30, 1 << 20


@pytest.mark.parametrize(
    ("wanted", "total", "on_device", "copied"),
    [
        ("auto", ROOM, True, ROOM),
        ("auto", ROOM + 1, True, 256 * MIB),
        ("auto", ROOM, False, 256 * MIB),
        (300 * MIB, ROOM, True, 300 * MIB),
        (2 * ROOM, 2 * ROOM, True, 0),
        (2 * ROOM, ROOM, False, 2 * ROOM),  # no more is asked for than there is
    ],
)
def test_how_much_is_copied_for_a_save(wanted, total, on_device, copied):
    assert choose_staging_bytes(wanted, total, on_device, lambda size: size <= ROOM) == copied


def test_nothing_is_copied_where_there_is_no_memory():
    assert choose_staging_bytes("auto", ROOM, True, lambda size: False) == 0


def test_copies_need_no_more_memory_than_the_last_save_has_left():
    asked = []
    found = choose_staging_bytes("auto", 5, True, lambda size: not asked.append(size), kept_bytes=3)
    assert (found, asked) == (5, [2])
    assert choose_staging_bytes("auto", 5, True, lambda size: size == 0, kept_bytes=9) == 5


def test_no_more_blocks_are_kept_than_one_save_had(monkeypatch):
    """A save on a file system that hung may end after the one that followed it."""
    given_back = []
    monkeypatch.setattr(writer_module, "release_pinned_cache", lambda: given_back.append(True))
    monkeypatch.setattr(writer_module.torch, "empty", lambda *_, **__: object())
    kept = PinnedBlockPool()
    first, second = [kept.take(), kept.take()], [kept.take(), kept.take()]
    kept.return_blocks(second)
    assert (kept.num_bytes, given_back) == (2 * writer_module.PIECE_BYTES, [])
    kept.return_blocks(first)
    assert (kept.num_bytes, given_back) == (2 * writer_module.PIECE_BYTES, [True])


def test_blocks_that_a_gpu_may_still_write_to_are_not_kept(monkeypatch):
    stream = SimpleNamespace(wait_stream=lambda _: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(writer_module.torch, "empty", lambda *_, **__: object())
    kept = PinnedBlockPool()
    for waits, num_kept in ((False, 0), (True, 1)):
        device = CudaStagingDevice(kept)
        device.block()
        if waits:
            device.wait()
        device.close()
        assert kept.num_bytes == num_kept * writer_module.PIECE_BYTES


@pytest.mark.full  # of times
def test_one_large_tensor_that_is_written_slowly_is_no_hung_file_system(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(regions, "SYNC_BYTES", 1 << 16)
    os.mkfifo(tmp_path / "pipe")
    writer = CheckpointWriter({tmp_path / "pipe": regions_of({"w": torch.zeros(1 << 18)})}, 0)
    released = threading.Thread(target=writer.release, args=(1.0,))
    released.start()
    received = 0
    with (tmp_path / "pipe").open("rb") as reader:
        while some := reader.read(1 << 16):
            received += len(some)
            time.sleep(0.25)
    released.join()
    assert received > 1 << 20
    with pytest.raises(CheckpointError, match="Invalid argument"):  # of syncing a pipe
        finished(writer)


def test_several_files_are_written_in_order(tmp_path):
    files = {tmp_path / f"{n}.safetensors": regions_of(tensors(n)) for n in (1, 2)}
    assert [w.name for w in finished(CheckpointWriter(files, 0))] == [
        "1.safetensors",
        "2.safetensors",
    ]
    assert finished(CheckpointWriter({}, 0)) == []


def test_an_error_of_the_thread_is_raised_where_the_result_is_asked_for(tmp_path):
    writer = CheckpointWriter({tmp_path / "no" / "folder": regions_of(tensors(1))}, 0)
    writer.release(10.0)
    with pytest.raises(CheckpointError, match="cannot be written"):
        finished(writer)


class BrokenDevice(LazyDevice):
    """Fails before the first byte is written."""

    def __init__(self, place):
        super().__init__()
        self.place = place

    def stream(self):
        return self.fail("stream") or super().stream()

    def wait(self):
        return self.fail("wait") or super().wait()

    def fail(self, place):
        if place == self.place:
            raise RuntimeError("the device is lost")


@pytest.mark.parametrize("place", ["stream", "wait"])
def test_an_error_before_the_first_file_is_such_an_error(tmp_path, place):
    for files in ({tmp_path / "a": regions_of(tensors())}, {}):
        writer = CheckpointWriter(files, 1 << 30, device=BrokenDevice(place))
        writer.release(10.0)
        with pytest.raises(CheckpointError, match="the device is lost"):
            finished(writer)


def test_a_full_disk_is_such_an_error(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="No space left"):
        finished(CheckpointWriter({tmp_path / "full": regions_of(tensors(2000))}, 0))


class GpusOfThreads:
    """Which GPU each thread has, as in CUDA: at first number 0, and a context once it is set."""

    def __init__(self):
        self.here, self.with_context = threading.local(), {3}

    def now(self):
        return getattr(self.here, "number", 0)

    def set(self, gpu):
        self.here.number = torch.device(gpu).index
        self.with_context.add(self.here.number)

    def maybe_set(self, number):
        before, self.here.number = self.now(), number
        return before

    def stream(self, device=None):
        number = self.now() if device is None else torch.device(device).index
        return SimpleNamespace(
            **{"device": torch.device("cuda", number), "wait_stream": lambda _: None},
            **{"stream_id": 0, "device_index": number, "device_type": 1},
        )

    def set_stream(self, stream_id, device_index, device_type):
        if self.now() != device_index:
            self.set(f"cuda:{device_index}")


def test_a_save_makes_no_context_on_another_gpu(monkeypatch):
    """torch's own ``cuda.stream`` goes back to what was the thread's GPU, and so to the first."""
    gpus = GpusOfThreads()
    for name, stand_in in {
        **{"is_available": lambda: True, "current_device": gpus.now, "set_device": gpus.set},
        **{"current_stream": gpus.stream, "Stream": lambda: gpus.stream("cuda:3")},
        **{"_set_stream_by_id": gpus.set_stream, "_exchange_device": gpus.maybe_set},
        "_maybe_exchange_device": gpus.maybe_set,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    device = CudaStagingDevice(PinnedBlockPool())

    def copy():
        with device.stream():
            return gpus.now()

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(copy).result() == 3
    assert gpus.with_context == {3}
