"""The doctor on real GPUs: two ranks on one of them, and what it tells of all."""

import json
import sys

import pytest
import torch

from tests.support.ranks import HANG_S, mpirun, rank_environment, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DOCTOR = ["-m", "hpc_tune", "doctor"]


def test_two_ranks_that_see_the_same_gpu_are_named(tmp_path):
    extra = {"CUDA_VISIBLE_DEVICES": "0"}
    done = mpirun(2, [*DOCTOR, f"run.dir={tmp_path}"], timeout=HANG_S, env=extra)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ranks 0, 1 on " in done.stderr
    assert "share one GPU (" in done.stderr


def test_a_gpu_is_told_with_its_uuid_and_place(tmp_path):
    argv = [sys.executable, *DOCTOR, "--json", f"run.dir={tmp_path}"]
    done = run_ranks(argv, rank_environment(1, {"CUDA_VISIBLE_DEVICES": "0"}), 120)
    told = json.loads(done.stdout)
    [rank] = told["ranks"]
    assert rank["device_uuid"] == str(torch.cuda.get_device_properties(0).uuid)
    assert rank["nccl"]
    products = rank["products"]
    assert (products["error"], products["num_wrong"], products["num_differing"]) == ("", 0, 0)
    assert products["num_checked"] > 10
    assert products["flops_per_s"] > 5e12
    pytest.importorskip("pynvml")
    assert rank["device_uuid"] in [gpu["uuid"] for gpu in rank["topology"]["gpus"]]
