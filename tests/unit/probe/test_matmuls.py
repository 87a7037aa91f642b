"""Products of matrices: what is exact, what is found wrong, and when the host waits for a GPU."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpc_tune.probe.matmuls import (
    MatmulBenchmark,
    MatmulResult,
    exact_matrices,
    format_flops,
    measure_matmuls,
    time_matmuls,
)
from tests.support.fake_cuda_marks import skip_without_fake_cuda
from tests.support.ranks import HANG_S, python, rank_environment, run_ranks

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_exact_product_is_that_of_fp64_and_each_part_of_its_sums_is_exact(dtype):
    left, right, product = (m.double() for m in exact_matrices(256, dtype, CPU))
    assert torch.equal(left @ right, product)
    assert product.abs().min() == 5
    assert product.abs().max() == 45, "bf16 has all integers to 256"
    for begin in range(0, 256, 64):  # as a library may cut the common side
        part = left[:, begin : begin + 64] @ right[begin : begin + 64]
        assert part.abs().max() <= 45
    assert left.abs().max() > 30, "all bits of small integers are tried"


def test_a_cpu_multiplies_correctly():
    work = MatmulBenchmark(CPU)
    work.warm_up()
    found = time_matmuls(work, 0.05, lambda: None)
    assert (found.dtype, found.size, found.error) == ("fp32", 768, "")
    assert found.num_checked >= 2
    assert not found.is_wrong
    assert found.flops_per_s == pytest.approx(2 * 768**3 / found.median_s)
    assert found.slowest_s >= found.median_s > 0


class Broken:
    """Multiplies, and adds ``error`` to one value of each exact product from the third on."""

    def __init__(self, error):
        self.error, self.num_exact = error, 0

    def __call__(self, left, right, out):
        torch.mm(left, right, out=out)
        if left.shape[0] == 256:
            self.num_exact += 1
            if self.num_exact >= 3:
                out[17, 3] += self.error


@pytest.mark.parametrize("error", [1.0, 2.0**-16, float("nan")])
def test_one_wrong_value_of_a_product_is_found(error):
    work = MatmulBenchmark(CPU, Broken(error))
    work.warm_up()
    found = time_matmuls(work, 0.05, lambda: None)
    assert found.num_wrong == found.num_checked - 1
    assert found.is_wrong


def comm_of(**more):
    """A world of one on a CPU."""
    world = SimpleNamespace(rank=0, label="rank 0 on n0", **more)
    return SimpleNamespace(device=CPU, world=world, barrier=lambda what, limit_s: None)


@pytest.mark.parametrize("fails_at", [1, 6])
def test_an_error_is_told_and_the_other_ranks_are_met(fails_at):
    calls, met = [], []

    def multiply(left, right, out):
        calls.append(1)
        if len(calls) >= fails_at:
            raise RuntimeError("CUDA error: out of memory\nCompile with ...")
        torch.mm(left, right, out=out)

    comm = comm_of()
    comm.barrier = lambda what, limit_s: met.append(what)
    found = measure_matmuls(comm, 0.3, multiply)
    assert found.error == "CUDA error: out of memory"
    assert (found.flops_per_s, len(met)) == (0.0, 1)


def test_threads_are_as_before_and_nothing_is_measured_in_no_time():
    threads = torch.get_num_threads()
    found = measure_matmuls(comm_of(), 0.02)
    assert found.flops_per_s > 0
    assert torch.get_num_threads() == threads
    assert measure_matmuls(comm_of(), 0.0) is None


def test_speeds_are_written_as_people_do():
    assert [format_flops(n) for n in (712.4e12, 19.52e12, 38.21e9, 0.5e9)] == [
        *("712 TFLOP/s", "19.5 TFLOP/s", "38.2 GFLOP/s", "0.5 GFLOP/s")
    ]


@skip_without_fake_cuda
def test_a_gpu_is_waited_for_between_batches_alone():
    words = [*python(cold=True), "-m", "tests.support.fake_cuda_products"]
    done = run_ranks(words, rank_environment(1), HANG_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["in_batch"] == told["races"] == []
    assert told["warming"] == ["an event is waited for in probe/matmuls.py wait"]
    found = MatmulResult(**told["found"])
    assert told["waits"] == {
        "an event is waited for in probe/matmuls.py wait": found.num_checked,
        "values are read in probe/matmuls.py count_wrong_results": 1,
    }
    assert (found.dtype, found.size) == ("bf16", 8192)
    assert found.flops_per_s == 2 * 8192**3 / 2e-3
    assert found.loaded["sm_mhz"] == 1755
