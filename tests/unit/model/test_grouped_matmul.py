"""Products grouped by expert, where torch's kernel leaves memory as it was, or is wrong.

A CPU stands for the GPU: its kernel is right, and wrapped by what others do.
"""

from types import SimpleNamespace

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 - it makes torch.ops.transformers

from hpc_tune import torch_versions
from hpc_tune.log import log
from hpc_tune.model import grouped_matmul
from hpc_tune.model.grouped_matmul import (
    CHECKED_ROWS_PER_EXPERT,
    compare_kernel_with_loop,
    grouped_kernel_fault,
)
from hpc_tune.train.model import Model

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def told(monkeypatch):
    texts = []
    monkeypatch.setattr(log, "warning", lambda text, *values: texts.append(text % values))
    grouped_kernel_fault.cache_clear()
    yield texts
    grouped_kernel_fault.cache_clear()


def leaves_memory(product, garbage):
    """Return a product of which gradients of experts without rows are what memory had."""

    def kernel(x, weight, offs):
        out = product(x, weight, offs=offs)
        if weight.dim() == 2:
            out[torch.diff(offs, prepend=offs.new_zeros(1)) == 0] = garbage
        return out

    return kernel


def sorted_rows(*counts):
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor(counts).cumsum(0).int()
    low, wide = (torch.randn(sum(counts), size, generator=generator) for size in (8, 16))
    return low, wide, torch.zeros(len(counts), 8, 16), ends


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 3.0])
def test_an_expert_without_rows_has_a_gradient_of_zero_whatever_memory_had(garbage, monkeypatch):
    low, wide, weight, ends = sorted_rows(0, 3, 0, 0, 5, 0)
    wanted = grouped_matmul.grouped_weight_gradient(low, wide, weight, ends)
    kernel = leaves_memory(torch_versions.grouped_mm, garbage)
    monkeypatch.setattr(torch_versions, "grouped_mm", kernel)
    monkeypatch.setattr(grouped_matmul, "_may_skip_empty_experts", lambda x: True)
    found = grouped_matmul.grouped_weight_gradient(low, wide, weight, ends)
    assert torch.equal(found, wanted)
    assert [bool(grad.any()) for grad in found] == [False, True, False, False, True, False]


def test_the_trial_has_experts_without_rows_at_both_ends_and_in_between():
    assert CHECKED_ROWS_PER_EXPERT[0] == CHECKED_ROWS_PER_EXPERT[-1] == 0
    assert 0 in CHECKED_ROWS_PER_EXPERT[2:-2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_of_a_cpu_passes(dtype, told):
    assert grouped_kernel_fault(CPU, dtype) == ""
    assert not told


def test_memory_that_is_filled_afterwards_is_no_fault(monkeypatch):
    kernel = leaves_memory(torch_versions.grouped_mm, torch.nan)
    monkeypatch.setattr(torch_versions, "grouped_mm", kernel)
    assert "the gradient of weights by nan" in grouped_kernel_fault(CPU, torch.bfloat16)
    grouped_kernel_fault.cache_clear()
    monkeypatch.setattr(grouped_matmul, "_may_skip_empty_experts", lambda x: True)
    assert grouped_kernel_fault(CPU, torch.bfloat16) == ""


def one_row_off(product):
    def kernel(x, weight, offs):
        counts = torch.diff(offs, prepend=offs.new_zeros(1))
        return product(x, weight, offs=offs - (counts == 40).int())

    return kernel


def unwritten_result(product):
    def kernel(x, weight, offs):
        out = product(x, weight, offs=offs)
        if weight.dim() == 3:
            out[-1] = torch.nan
        return out

    return kernel


def refuses(product):
    def kernel(x, weight, offs):
        raise RuntimeError("grouped gemm is not supported here\nmore")

    return kernel


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (one_row_off, "it differs from a loop over experts in its result by"),
        (unwritten_result, "in its result by nan, its result with transposed weights by nan"),
        (refuses, "torch's grouped matmul fails here (grouped gemm is not supported here)"),
    ],
)
def test_a_wrong_kernel_is_told_of_once_and_experts_are_multiplied_one_by_one(
    wrong, words, monkeypatch, told
):
    low, wide, weight, ends = sorted_rows(0, 40, 5, 0)
    by_kernel = [
        grouped_matmul.grouped_matmul(low, weight.normal_(), ends),
        grouped_matmul.grouped_weight_gradient(low, wide, weight, ends),
    ]
    monkeypatch.setattr(torch_versions, "grouped_mm", wrong(torch_versions.grouped_mm))
    monkeypatch.setattr(
        grouped_matmul,
        "_is_kernel_refused",
        lambda x: bool(grouped_kernel_fault(CPU, torch.float32)),
    )
    by_loop = [
        grouped_matmul.grouped_matmul(low, weight, ends),
        grouped_matmul.grouped_weight_gradient(low, wide, weight, ends),
    ]
    for one, other in zip(by_loop, by_kernel, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert len(told) == 1
    assert words in told[0]
    assert told[0].startswith("experts are computed in a loop: ")


def test_the_trial_is_left_out_of_what_a_dispatch_mode_sees():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.autocast("cpu", torch.bfloat16):
        gaps = compare_kernel_with_loop(CPU, torch.float32)
    assert counter.get_total_flops() == 0
    assert max(gaps.values()) < 1e-6


def test_a_run_tries_the_product_on_a_gpu_at_its_start_and_says_why_not(monkeypatch):
    tried = []
    monkeypatch.setattr("hpc_tune.train.model.is_mixture_of_experts", lambda module: True)
    monkeypatch.setattr("hpc_tune.train.model.choose_model_kernels", lambda *_: _kernels("varlen"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(
        grouped_matmul, "grouped_kernel_fault", lambda *of: tried.append(of) or "it is wrong"
    )
    module = SimpleNamespace(uses_document_attention=True, needs_mask=False)
    config = SimpleNamespace(model_type="mixtral")
    built = SimpleNamespace(module=module, config=config, dtype=torch.bfloat16)
    settings = SimpleNamespace(
        tune=SimpleNamespace(method="lora"), train=SimpleNamespace(compiles=False)
    )
    model = Model(built, None, settings)
    assert str(model.choose_kernels(GPU)).endswith("experts in a loop: it is wrong")
    assert tried == [(GPU, torch.bfloat16)]
    assert model.choose_kernels(CPU).expert_loop_reason == ""


def _kernels(attention):
    from hpc_tune.model.kernels import Kernels

    return Kernels(attention, None, "F.rms_norm", "own")


@pytest.mark.parametrize("rows", [1, 7, 16, 100])
@pytest.mark.parametrize("counts", [(3, 0, 20, 0, 5, 9), (0, 40, 0), (37,)])
def test_a_product_with_too_many_values_for_the_kernel_is_cut_between_rows(
    rows, counts, monkeypatch
):
    low, wide, weight, ends = sorted_rows(*counts)
    weight.normal_()
    wanted = [
        grouped_matmul.grouped_matmul(wide, weight.transpose(1, 2), ends),
        grouped_matmul.grouped_weight_gradient(low, wide, weight, ends),
    ]
    most, product, seen = rows * 16 + 15, torch_versions.grouped_mm, []

    def kernel(x, other, offs):
        assert x.numel() <= most
        assert other.dim() == 3 or other.numel() <= most
        assert int(offs[-1]) == max(x.shape[0] if other.dim() == 3 else other.shape[0], 0)
        out = product(x, other, offs=offs)
        assert other.dim() == 2 or out.numel() <= most
        seen.append(offs)
        return out

    monkeypatch.setattr(torch_versions, "grouped_mm", kernel)
    monkeypatch.setattr(grouped_matmul, "_max_kernel_values", lambda x: most)
    found = [
        grouped_matmul.grouped_matmul(wide, weight.transpose(1, 2), ends),
        grouped_matmul.grouped_weight_gradient(low, wide, weight, ends),
    ]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    assert len(seen) == 2 * -(-sum(counts) // rows)


def test_what_the_kernel_of_a_gpu_counts_has_32_bits():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        for rows, pieces in ((524_287, 1), (524_288, 2), (8 * 65_536 * 2, 3)):
            x = torch.empty(rows, 4096, dtype=torch.bfloat16, device="cuda")
            found = grouped_matmul._split_rows(x, 4096)
            assert len(found) == pieces
            assert max(end - begin for begin, end in found) * 4096 < 2**31
        on_cpu = torch.empty(524_288, 4096, dtype=torch.bfloat16)
        assert grouped_matmul._split_rows(on_cpu, 4096) == [(0, 524_288)]
