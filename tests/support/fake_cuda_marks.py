"""Skips what needs a CUDA device that is not there, where torch leaves no room for one."""

import shutil

import pytest
import torch

from hpc_tune.packages import parse_release

needs_fake_cuda = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.skipif(
        parse_release(torch.__version__) < (2, 10),
        reason="torch 2.9 does not let a device guard derive from its no-op guard",
    ),
    pytest.mark.skipif(
        torch.backends.cuda.is_built(),
        reason="a torch for GPUs registers its own hooks where the fake device puts its own",
    ),
]


def skip_without_fake_cuda(test):
    """Skip one test where ``needs_fake_cuda`` says so, which a whole file has as ``pytestmark``."""
    for mark in needs_fake_cuda:
        test = mark(test)
    return test
