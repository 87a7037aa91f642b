"""Packages that do a layer on GPUs are not called for tensors on a CPU."""

import subprocess
import sys

import torch
from torch._subclasses import FakeTensorMode

from hpc_tune.model.transformers_compat import _is_on_gpu
from tests.support.ranks import HANG_S, rank_environment

# What the real one does for a tensor that is not on a GPU.
PACKAGE = """
def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
    raise RuntimeError("Expected x.is_cuda() to be true, but got false.")

causal_conv1d_update = causal_conv1d_fn
"""
TRIAL = """
from transformers import AutoConfig
from transformers.models.lfm2 import modeling_lfm2
import causal_conv1d
from hpc_tune.config.tune import TuneConfig
from hpc_tune.train.startup.architecture_check import check_architecture_cached

def closure(function):
    return [cell.cell_contents for cell in function.__closure__]

assert causal_conv1d.causal_conv1d_fn in closure(modeling_lfm2.causal_conv1d_fn)
layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
proof = check_architecture_cached(AutoConfig.for_model("lfm2", **layers), TuneConfig())
print(repr(proof.loss or proof.adapters))
assert causal_conv1d.causal_conv1d_fn not in closure(modeling_lfm2.causal_conv1d_fn)
"""


def test_a_trial_on_a_cpu_is_of_transformers_own_functions(tmp_path):
    (tmp_path / "causal_conv1d.py").write_text(PACKAGE)
    env = rank_environment(1)
    env |= {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    env["PYTHONPATH"] = f"{tmp_path}:{env.get('PYTHONPATH', '')}"
    argv = [sys.executable, "-c", TRIAL]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "''\n"


def test_a_tensor_of_a_trace_is_on_no_gpu():
    with FakeTensorMode():
        traced = torch.empty(2, device="cuda")
    assert traced.is_cuda
    assert not _is_on_gpu([traced])
    assert not _is_on_gpu([None, torch.empty(2)])
