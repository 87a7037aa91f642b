"""The thread that writes while training goes on."""

import os
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from hpc_tune.checkpoint.writer import Writer
from hpc_tune.errors import CheckpointError
from hpc_tune.model import regions
from tests.support.regions import regions_of

BYTES = 4 * 1000  # of one of the tensors


def tensors(num=8):
    return {f"t{i}": torch.full((1000,), float(i)) for i in range(num)}


def finished(writer, limit_s=120.0):
    until_s = time.monotonic() + limit_s
    while not writer.over:
        assert time.monotonic() < until_s
        time.sleep(0.005)
    return writer.result()


@pytest.mark.parametrize("budget", [0, 3 * BYTES, 100 * BYTES])
def test_what_is_written_is_what_was_there_at_the_start(tmp_path, budget):
    live = tensors()
    writer = Writer({tmp_path / "a.safetensors": regions_of(live)}, budget)
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

    writer = Writer({pipe: regions_of(tensors())}, 3 * BYTES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", to)
        writer.release(0.2)
    assert copied == [BYTES] * 3
    with pipe.open("rb") as reader:  # let the thread go
        assert len(reader.read()) > 8 * BYTES
    with pytest.raises(CheckpointError, match="no byte was written for 0 s; the file system hangs"):
        finished(writer)


@pytest.mark.full  # of times
def test_one_large_tensor_that_is_written_slowly_is_no_hung_file_system(tmp_path, monkeypatch):
    monkeypatch.setattr(regions, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(regions, "SYNC_BYTES", 1 << 16)
    os.mkfifo(tmp_path / "pipe")
    writer = Writer({tmp_path / "pipe": regions_of({"w": torch.zeros(1 << 18)})}, 0)
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
    assert [w.name for w in finished(Writer(files, 0))] == ["1.safetensors", "2.safetensors"]
    assert finished(Writer({}, 0)) == []


def test_an_error_of_the_thread_is_raised_where_the_result_is_asked_for(tmp_path):
    writer = Writer({tmp_path / "no" / "folder": regions_of(tensors(1))}, 0)
    writer.release(10.0)
    with pytest.raises(CheckpointError, match="cannot be written"):
        finished(writer)


def test_a_full_disk_is_such_an_error(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    with pytest.raises(CheckpointError, match="No space left"):
        finished(Writer({tmp_path / "full": regions_of(tensors(2000))}, 0))
