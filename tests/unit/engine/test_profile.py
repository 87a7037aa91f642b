from types import SimpleNamespace

import pytest
import torch

from hpc_tune.engine.profile import StepBreakdown, compute_and_copy_seconds, format_table

CPU, GPU = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA


def event(key, cpu_us=0.0, gpu_us=0.0, device=CPU, annotation=False):
    return SimpleNamespace(
        key=key,
        self_cpu_time_total=cpu_us,
        self_device_time_total=gpu_us,
        device_type=device,
        is_user_annotation=annotation,
    )


def shares(rank, compute_s, messages_s, step_s=2.0):
    return StepBreakdown(rank, f"node-{rank}", compute_s, messages_s, 0.1, 0.05, step_s)


def test_operators_of_a_cpu_are_compute_or_copies_and_no_other_event_is():
    events = [
        event("aten::mm", 3e6),
        event("## Call CompiledFxGraph f3 ##", 1e6),
        event("aten::copy_", 0.5e6),
        event("aten::clone", 0.25e6),
        event("step 3", 9e6, annotation=True),
        event("gloo:all_reduce", 7e6),
        event("_LowRankBackward", 2e6),
    ]
    assert compute_and_copy_seconds(events, is_on_gpu=False) == (4.0, 0.75)


def test_kernels_of_a_gpu_are_compute_copies_or_messages_and_its_host_does_not_count():
    events = [
        event("sm90_gemm", gpu_us=5e6, device=GPU),
        event("Memcpy HtoD (Pinned -> Device)", gpu_us=1e6, device=GPU),
        event("ncclDevKernel_AllReduce", gpu_us=4e6, device=GPU),
        event("step 3", gpu_us=9e6, device=GPU, annotation=True),
        event("aten::mm", cpu_us=8e6, gpu_us=5e6),
    ]
    assert compute_and_copy_seconds(events, is_on_gpu=True) == (5.0, 1.0)


def test_what_is_left_of_the_step_is_idle_and_never_less_than_nothing():
    assert shares(0, 1.0, 0.5).idle_s == pytest.approx(0.35)
    assert shares(0, 1.5, 1.5).idle_s == 0


def test_the_rank_that_the_others_wait_for_is_named():
    header, *rows = format_table([shares(0, 1.0, 0.6), shares(1, 1.6, 0.0), shares(2, 1.02, 0.58)])
    assert header.split() == [
        *("rank", "host", "compute", "messages", "copies", "data", "idle", "step")
    ]
    assert rows[1].split() == ["1", "node-1", "1.600", "0.000", "0.100", "0.050", "0.250", "2.000"]
    [verdict] = rows[3:]
    assert verdict.startswith("rank 1 on node-1 works 1.52 x as long as the median rank")


def test_ranks_that_work_alike_and_a_rank_alone_are_not_blamed():
    assert len(format_table([shares(0, 1.0, 0.5), shares(1, 1.05, 0.45)])) == 3
    assert len(format_table([shares(0, 1.0, 0.0)])) == 2
