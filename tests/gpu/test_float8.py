"""float8 on the hardware that has it: the same training, with about two digits in each product."""

import pytest
import torch

from hpc_tune.world.device import find_architecture
from tests.support.training import SMALL, losses, train

architecture = find_architecture(torch.device("cuda", 0)) if torch.cuda.is_available() else None
capable = architecture is not None and architecture.has_float8
pytestmark = pytest.mark.skipif(
    not capable, reason="needs a GPU of compute capability 8.9 or later (float8 products)"
)
ON_GPU = [*SMALL, "batch.micro_size=8", "model.dtype=bf16", "train.compile=true", "optim.lr=1e-3"]


@pytest.mark.full
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.timeout(900)
def test_float8_losses_stay_near_those_of_bf16(tmp_path, method):
    pytest.importorskip("torchao")
    for name in ("true", "false"):
        done = train(
            [
                *ON_GPU,
                f"tune.method={method}",
                f"train.float8={name}",
                f"run.dir={tmp_path / name}",
            ],
            timeout=400.0,
        )
        assert done.returncode == 0, done.stderr
    pairs = zip(losses(tmp_path / "true"), losses(tmp_path / "false"), strict=True)
    for eight, sixteen in pairs:
        assert eight == pytest.approx(sixteen, rel=0.02)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_float8_base_is_multiplied_in_float8_and_its_losses_stay_near_those_of_bf16(tmp_path):
    from hpc_tune.model.float8 import explain_missing_float8_matmuls, measure_float8_error

    device = torch.device("cuda", 0)
    assert explain_missing_float8_matmuls(device, torch.bfloat16) == ""
    assert measure_float8_error(device, torch.bfloat16) < 5e-3
    for name, words in {"fp8": ["tune.base_dtype=fp8"], "bf16": []}.items():
        words = [*ON_GPU, "tune.method=lora", *words, f"run.dir={tmp_path / name}"]
        done = train(words, timeout=400.0)
        assert done.returncode == 0, done.stderr
    for eight, sixteen in zip(losses(tmp_path / "fp8"), losses(tmp_path / "bf16"), strict=True):
        assert eight == pytest.approx(sixteen, rel=0.05)


def test_float8_products_are_really_used(tmp_path):
    pytest.importorskip("torchao")
    from torch.profiler import profile

    from hpc_tune.model.float8 import check_float8, convert_to_torchao_float8

    check_float8(torch.device("cuda"))
    block = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False)).cuda().bfloat16()
    block.requires_grad_(False)
    assert convert_to_torchao_float8([block]) == 1
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    with profile() as found:
        block(x).sum().backward()
    assert "aten::_scaled_mm" in {event.key for event in found.key_averages()}
