"""Which models are multiplied in TF32, and what of them is not."""

import pytest
import torch
from torch import nn

from hpc_tune.config.load import load_config
from hpc_tune.model.kernels import multiplies_in_tf32, use_tf32
from hpc_tune.train.startup.describe import describe_arithmetic
from hpc_tune.world.device import GpuArchitecture

AMPERE, TURING, AMD = (
    GpuArchitecture((8, 0)),
    GpuArchitecture((7, 5)),
    GpuArchitecture(gfx="gfx942"),
)


@pytest.mark.parametrize(
    ("words", "dtype", "architecture", "in_tf32"),
    [
        ([], torch.float32, AMPERE, True),
        ([], torch.float32, GpuArchitecture((9, 0)), True),
        ([], torch.float32, TURING, False),
        ([], torch.float32, None, False),
        ([], torch.float32, AMD, False),
        ([], torch.bfloat16, AMPERE, False),
        (["train.tf32=false"], torch.float32, AMPERE, False),
        (["train.deterministic=true"], torch.float32, AMPERE, False),
    ],
)
def test_fp32_models_are_multiplied_in_tf32_where_a_gpu_has_it(words, dtype, architecture, in_tf32):
    train = load_config(None, words).train
    assert multiplies_in_tf32(train, dtype, architecture) == in_tf32
    assert ("TF32" in describe_arithmetic(train, dtype, architecture)) == in_tf32


class Rotary(nn.Module):
    """As in transformers, and notes in which precision it multiplies."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", torch.ones(4), persistent=False)

    def forward(self, positions):
        if positions is None:
            raise ValueError("no positions")
        return torch.get_float32_matmul_precision()


@pytest.fixture
def fast():
    rotary = Rotary()
    use_tf32(nn.Sequential(nn.Linear(2, 2), rotary))
    yield rotary
    torch.set_float32_matmul_precision("highest")


def test_rotary_positions_have_all_digits(fast):
    assert torch.get_float32_matmul_precision() == "high"
    assert fast(torch.ones(1)) == "highest"
    assert torch.get_float32_matmul_precision() == "high"


def test_an_error_in_rotary_positions_leaves_the_precision_as_it_was(fast):
    with pytest.raises(ValueError, match="no positions"):
        fast(None)
    assert torch.get_float32_matmul_precision() == "high"


def test_both_of_torchs_interfaces_say_the_same(fast):
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.allow_tf32
