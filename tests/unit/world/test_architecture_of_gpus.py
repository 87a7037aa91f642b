"""What GPUs of both makers can compute, by what torch says of them."""

from types import SimpleNamespace

import pytest
import torch

from hpc_tune.errors import ConfigError
from hpc_tune.model.build import resolve_dtype
from hpc_tune.model.float8 import check_float8
from hpc_tune.model.kernels import explain_expert_loop
from hpc_tune.world.device import GpuArchitecture, find_architecture

GPU = torch.device("cuda", 0)


def shown(monkeypatch, gfx, capability, name):
    """Let torch show an AMD GPU, with the capability that it reports for it."""
    properties = SimpleNamespace(gcnArchName=f"{gfx}:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "7.0.2")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    return find_architecture(GPU)


def can(architecture, environ):
    return {
        "bf16": architecture.has_bf16,
        "tf32": architecture.has_tf32,
        "attention": architecture.has_varlen_attention,
        "float8": architecture.has_float8,
        "groups": architecture.has_grouped_mm(environ),
    }


@pytest.mark.parametrize(
    ("gfx", "capability", "name", "float8"),
    [
        ("gfx90a", (9, 0), "AMD Instinct MI250X", False),
        ("gfx942", (9, 4), "AMD Instinct MI300A", True),
        ("gfx942", (9, 4), "AMD Instinct MI300X", True),
        ("gfx950", (9, 5), "AMD Instinct MI355X", True),
    ],
)
def test_of_amd_the_architecture_counts(monkeypatch, gfx, capability, name, float8):
    found = shown(monkeypatch, gfx, capability, name)
    assert str(found) == f"architecture {gfx}"
    able = {"bf16": True, "tf32": False, "attention": True, "float8": float8}
    assert can(found, {}) == {**able, "groups": False}
    assert can(found, {"ROCM_ALLOW_GROUP_GEMM_CK": "1"}) == {**able, "groups": True}
    assert resolve_dtype("auto", GPU) == torch.bfloat16
    monkeypatch.delenv("ROCM_ALLOW_GROUP_GEMM_CK", raising=False)
    assert explain_expert_loop(torch.bfloat16, GPU).endswith(
        "with ROCM_ALLOW_GROUP_GEMM_CK=1 on gfx90a, gfx942 and gfx950, this is bfloat16 on "
        f"architecture {gfx}"
    )
    if not float8:
        with pytest.raises(ConfigError, match="MI300 or later.; AMD Instinct MI250X has arch"):
            check_float8(GPU)


def test_an_amd_gpu_without_matrix_cores_has_none_of_it(monkeypatch):
    found = shown(monkeypatch, "gfx906", (9, 0), "AMD Instinct MI50")
    assert not any(can(found, {"ROCM_ALLOW_GROUP_GEMM_CK": "1"}).values())
    assert resolve_dtype("auto", GPU) == torch.float32


@pytest.mark.parametrize(
    ("capability", "able"),
    [
        ((7, 5), set()),
        ((8, 0), {"bf16", "tf32", "attention"}),
        ((8, 9), {"bf16", "tf32", "attention", "float8"}),
        ((9, 0), {"bf16", "tf32", "attention", "float8", "groups"}),
        ((12, 0), {"bf16", "tf32", "attention", "float8", "groups"}),
    ],
)
def test_of_nvidia_the_capability_counts(monkeypatch, capability, able):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    found = find_architecture(GPU)
    assert found == GpuArchitecture(capability)
    assert {name for name, has in can(found, {}).items() if has} == able


@pytest.mark.parametrize(
    ("architecture", "has_fp16", "repeats"),
    [
        (GpuArchitecture((6, 1)), False, True),
        (GpuArchitecture((7, 0)), True, True),
        (GpuArchitecture(gfx="gfx90a"), True, False),
        (GpuArchitecture(gfx="gfx906"), True, False),
        (GpuArchitecture(gfx="gfx803"), False, False),
    ],
)
def test_which_gpus_compute_in_fp16_and_with_the_same_bits(architecture, has_fp16, repeats):
    assert architecture.has_fp16 is has_fp16
    assert architecture.has_deterministic_matmul is repeats


def test_a_cpu_has_no_architecture():
    assert find_architecture(torch.device("cpu")) is None
