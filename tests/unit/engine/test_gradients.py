"""The sum of squares that a gradient's norm comes from."""

import pytest
import torch

from hpc_tune.engine.gradients import _sum_squares_fp64, _sum_squares_fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_few_kernels_of_a_device_sum_what_a_host_sums_in_fp64(dtype):
    torch.manual_seed(0)
    grads = [torch.randn(shape).mul_(1e-3).to(dtype) for shape in ((300, 200), (7,), (1,), (90, 2))]
    wanted = sum(grad.double().square().sum() for grad in grads)
    assert float(sum(map(_sum_squares_fp64, grads))) == pytest.approx(float(wanted), rel=1e-12)
    assert float(_sum_squares_fused(grads)) == pytest.approx(float(wanted), rel=1e-5)
