import os
import subprocess
import sys

import pytest
import torch

from hpc_tune.world.allocator import can_map_memory, expand_segments
from hpc_tune.world.device import visible_gpus

SET = "expandable_segments:True"


@pytest.mark.parametrize(
    ("environ", "device", "can_map", "found"),
    [
        ({}, "auto", True, {"PYTORCH_ALLOC_CONF": SET}),
        ({}, "cuda", True, {"PYTORCH_ALLOC_CONF": SET}),
        ({}, "auto", False, {}),  # no NVIDIA GPU, or one that cannot map memory
        ({}, "cpu", True, {}),
        *(
            ({name: "max_split_size_mb:64"}, "auto", True, {name: "max_split_size_mb:64"})
            for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
        ),
    ],
)
def test_segments_expand_on_gpus_that_map_memory_unless_the_user_said_otherwise(
    environ, device, can_map, found
):
    expand_segments(environ, device, lambda: can_map)
    assert environ == found


def test_they_do_before_torch_is_asked_for_a_device(monkeypatch):
    order = []
    monkeypatch.setattr(
        "hpc_tune.world.device.expand_segments", lambda *_: order.append("segments")
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: order.append("device") or False)
    visible_gpus("auto")
    assert order == ["segments", "device"]


def test_a_machine_without_a_driver_maps_nothing(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("hpc_tune.world.allocator.ctypes.CDLL", missing)
    assert not can_map_memory()


READS = """
import os
import hpc_tune.train.run
import torch
from hpc_tune.world.allocator import expand_segments

expand_segments(os.environ, "cuda", lambda: True)
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
    reason="torch 2.9 and 2.10 do not tell how their allocator is set",
)
def test_torch_that_is_imported_already_reads_it_still():
    kept = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-c", READS], capture_output=True, text=True, env=kept, timeout=240
    )
    assert done.stdout.strip() == SET, done.stderr
