"""GPUs that a job was granted, or a node has, and that torch does not find: faked nodes."""

import os
from types import SimpleNamespace

import pytest

from hpc_tune.cluster.unused_gpus import (
    TorchBuild,
    count_present_gpus,
    find_granted_gpus,
    find_unused_gpus,
)
from hpc_tune.errors import WorldError
from hpc_tune.world.device import VisibleGpus, check_devices, pick_device
from hpc_tune.world.discover import World

CPU = TorchBuild("2.13.0+cpu")
CUDA_12, CUDA_13 = TorchBuild("2.11.0", cuda="12.8"), TorchBuild("2.13.0", cuda="13.0")
ROCM = TorchBuild("2.10.0+rocm7.0", rocm="7.0")
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,1", "SLURM_GPUS_ON_NODE": "2"}
NVRM = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Release Build\nGCC version: 12.2.0"


def put(root, path, text=""):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def nvidia(root, driver="580.95.05", files=True):
    for number in range(2):
        put(root, f"proc/driver/nvidia/gpus/0000:{number}7:00.0/information", "Model: NVIDIA H100")
        if files:
            put(root, f"dev/nvidia{number}")
    put(root, "proc/driver/nvidia/version", NVRM.format(driver))


def amd(root, kfd=True):
    for node, gpu_id in enumerate(("0", "51234", "51235")):  # the first is of the CPUs
        put(root, f"sys/class/kfd/kfd/topology/nodes/{node}/gpu_id", f"{gpu_id}\n")
    put(root, "sys/module/amdgpu/version", "6.16.6\n")
    if kfd:
        put(root, "dev/kfd")


def intel(root):
    for card, kind in (("card0", "0x038000"), ("card1", "0x030000")):  # the second of a laptop
        put(root, f"sys/class/drm/{card}/device/vendor", "0x8086\n")
        put(root, f"sys/class/drm/{card}/device/class", f"{kind}\n")


def nothing(root):
    pass


REFUSED = {
    "a CPU build": (CPU, nvidia, {}, "torch 2.13.0+cpu is built for no GPUs; use the torch of"),
    "a CPU build on AMD": (CPU, amd, {}, "is built for no GPUs; use the torch of your centre"),
    "CUDA on AMD": (CUDA_13, amd, {}, "built for CUDA 13.0, and the GPUs here are AMD's; use the"),
    "ROCm on NVIDIA": (ROCM, nvidia, {}, "built for ROCm 7.0, and the GPUs here are NVIDIA's"),
    "an old driver": (
        CUDA_13,
        lambda root: nvidia(root, "550.54.15"),
        {},
        "which needs driver 580.65 or newer, and the node has 550.54.15; use the torch of",
    ),
    "a driver that is new enough": (
        CUDA_12,
        lambda root: nvidia(root, "550.54.15"),
        {},
        "the driver is 550.54.15, and it does not start (no luck)",
    ),
    "hidden by Slurm": (
        CUDA_13,
        nvidia,
        {"CUDA_VISIBLE_DEVICES": "NoDevFiles"},
        "CUDA_VISIBLE_DEVICES=NoDevFiles hides them from this process; start the step with its",
    ),
    "hidden by the device cgroup or a container": (
        CUDA_13,
        lambda root: nvidia(root, files=False),
        {},
        "there is no /dev/nvidia0; start the container with --nv",
    ),
    "a container without ROCm": (
        ROCM,
        lambda root: amd(root, kfd=False),
        {},
        "there is no /dev/kfd; start the container with --rocm",
    ),
    "ROCm does not start": (ROCM, amd, {}, "the driver amdgpu is 6.16.6, and it does not start"),
    "no driver": (CUDA_13, nothing, {}, "no driver of NVIDIA shows one here (/proc/driver/nvidia)"),
    "no driver of AMD": (ROCM, nothing, {}, "no driver of AMD shows one here (/sys/class/kfd)"),
    "Intel": (CPU, intel, {}, "hpc_tune does not support Intel's GPUs (torch.xpu)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_job_that_was_granted_gpus_does_not_compute_on_cpus(tmp_path, name):
    build, node, variables, cause = REFUSED[name]
    node(tmp_path)
    found = find_unused_gpus({**SLURM, **variables}, "n0", build, lambda: "no luck", tmp_path)
    assert found.is_error
    said = "torch finds no GPU on n0, though SLURM_JOB_GPUS=0,1, SLURM_GPUS_ON_NODE=2 says that"
    assert said in found.text
    assert cause in found.text
    assert found.text.endswith("To train on CPUs all the same, set run.device=cpu")


def test_who_may_not_open_the_driver_is_told_of_its_group(tmp_path, monkeypatch):
    amd(tmp_path)
    monkeypatch.setattr(os, "access", lambda file, mode: False)
    found = find_unused_gpus(SLURM, "n0", ROCM, root=tmp_path)
    assert "this user may not open /dev/kfd; ask your centre for the group" in found.text


def test_gpus_that_no_scheduler_has_granted_are_told_of(tmp_path):
    assert find_unused_gpus({}, "n0", CPU, root=tmp_path) is None, "a laptop"
    nvidia(tmp_path)
    alone = find_unused_gpus({}, "n0", CPU, root=tmp_path)
    assert not alone.is_error
    assert alone.text.startswith("this run computes on CPUs, though n0 has 2 NVIDIA GPUs: torch 2.")
    assert find_unused_gpus({"CUDA_VISIBLE_DEVICES": ""}, "n0", CPU, root=tmp_path) is None, (
        "hidden"
    )
    job = find_unused_gpus({"SLURM_JOB_ID": "7"}, "n0", CUDA_13, root=tmp_path)
    assert not job.is_error
    assert "has 2 NVIDIA GPUs: the job asked for none (--gpus-per-node=N)" in job.text


def test_whole_nodes_with_gpus_of_intel_are_refused_though_no_variable_grants_them(tmp_path):
    intel(tmp_path)
    found = find_unused_gpus({"PBS_JOBID": "1.aurora"}, "x1", CPU, root=tmp_path)
    assert found.is_error
    assert "though it has 1 Intel GPU: hpc_tune does not support Intel's GPUs" in found.text


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, ""),
        ({"SLURM_GPUS_ON_NODE": "0", "CUDA_VISIBLE_DEVICES": "-1"}, ""),
        ({"SLURM_JOB_GPUS": "0", "ROCR_VISIBLE_DEVICES": ""}, "SLURM_JOB_GPUS=0"),
        ({"HIP_VISIBLE_DEVICES": "1", "ZE_AFFINITY_MASK": "0.1"}, "HIP_VISIBLE_DEVICES=1, ZE_AFF"),
    ],
)
def test_what_grants_gpus(environ, said):
    granted = find_granted_gpus(environ)
    assert granted.startswith(said)
    assert bool(granted) == bool(said)


def test_a_list_of_gpus_grants_what_stands_in_it(tmp_path):
    file = tmp_path / "gpus"
    environ = {"PBS_GPUFILE": str(file)}
    assert find_granted_gpus(environ) == "", "no such file on this node"
    file.write_text("\n")
    assert find_granted_gpus(environ) == "", "as Torque writes it for a job without GPUs"
    file.write_text("n0-gpu0\n")
    assert find_granted_gpus(environ) == f"PBS_GPUFILE={file}"


def test_variables_of_amd_hide_no_gpu_of_nvidia(tmp_path):
    nvidia(tmp_path)
    environ = {**SLURM, "CUDA_VISIBLE_DEVICES": "0,1", "ROCR_VISIBLE_DEVICES": ""}
    found = find_unused_gpus(environ, "n0", CUDA_13, lambda: "no luck", tmp_path)
    assert "ROCR" not in found.text
    assert "the driver is 580.95.05, and it does not start (no luck)" in found.text


def test_a_node_may_have_gpus_of_several_makers(tmp_path):
    nvidia(tmp_path)
    amd(tmp_path)
    intel(tmp_path)
    assert count_present_gpus(tmp_path) == {"NVIDIA": 2, "AMD": 2, "Intel": 1}


def test_a_run_is_refused_with_the_cause_and_cpu_says_that_it_is_meant(monkeypatch):
    import torch

    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: False))
    monkeypatch.setattr(torch.version, "cuda", None)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    world = World(0, 1, 0, 1, 0, 1, "n0", "srun")
    _, report = pick_device("auto", world, {0: VisibleGpus()})
    with pytest.raises(WorldError, match=r"though SLURM_JOB_GPUS.*built for no GPUs"):
        check_devices([report], is_launched=True)
    _, report = pick_device("cpu", world, {0: VisibleGpus()})
    assert check_devices([report], is_launched=True) is None
