import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from hpc_tune.world.device import (
    enable_expandable_segments,
    gpus_can_map_memory,
    read_allocator_settings,
    unread_alloc_conf_warning,
)

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
    enable_expandable_segments(environ, device, lambda: can_map)
    assert environ == found


# Prints whether torch was there when the allocator was set up, and what it has read then.
STARTS = """
import sys
from hpc_tune.config.schema import RunSettings
from hpc_tune.world import bootstrap as start

expand, seen = start.enable_expandable_segments, []

def watched(environ, wanted):
    seen.append("torch" in sys.modules)
    expand(environ, "cuda", lambda: True)

start.enable_expandable_segments = watched
start.bootstrap(RunSettings(device="cpu"))
import torch
print(seen, torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
    reason="torch 2.9 does not tell what its allocator has read where there is no GPU",
)
def test_they_do_before_torch_is_imported():
    kept = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-c", STARTS], capture_output=True, text=True, env=kept, timeout=240
    )
    assert done.stdout.strip() == f"[False] {SET}", done.stderr


@pytest.mark.parametrize(
    ("environ", "settings", "is_told"),
    [
        ({"PYTORCH_ALLOC_CONF": SET}, {"expandable_segments": True}, False),
        ({"PYTORCH_ALLOC_CONF": SET}, {"expandable_segments": False}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": f"a:1,{SET}"}, {"expandable_segments": False}, True),
        ({"PYTORCH_ALLOC_CONF": "a:1"}, {"expandable_segments": False}, False),
        ({}, {"expandable_segments": False}, False),
        ({"PYTORCH_ALLOC_CONF": SET}, {}, False),
    ],
)
def test_what_torch_has_not_read_is_told_of(environ, settings, is_told, monkeypatch):
    snapshot = {"segments": [], "allocator_settings": settings}
    monkeypatch.setattr("torch.cuda.memory._snapshot", lambda: snapshot)
    assert bool(unread_alloc_conf_warning(environ, read_allocator_settings())) == is_told


def test_a_torch_that_does_not_tell_what_it_has_read_is_believed(monkeypatch):
    monkeypatch.delattr("torch.cuda.memory._snapshot")
    assert read_allocator_settings() == {}


def test_a_machine_without_a_driver_maps_nothing(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("hpc_tune.world.device.ctypes.CDLL", missing)
    assert not gpus_can_map_memory()


@pytest.mark.parametrize("can_map", [(), (1,), (0,), (1, 1), (1, 0)])
def test_memory_is_mapped_where_each_gpu_can(monkeypatch, can_map):
    def write(place, value):
        place._obj.value = value
        return 0

    driver = SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGetCount=lambda num: write(num, len(can_map)),
        cuDeviceGet=write,
        cuDeviceGetAttribute=lambda found, which, device: write(found, can_map[device.value]),
    )
    monkeypatch.setattr("hpc_tune.world.device.ctypes.CDLL", lambda name: driver)
    assert gpus_can_map_memory() == (can_map in [(1,), (1, 1)])


READS = """
import os
import hpc_tune.train.run
import torch
from hpc_tune.world.device import enable_expandable_segments

enable_expandable_segments(os.environ, "cuda", lambda: True)
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
