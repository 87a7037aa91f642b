import pytest
import torch
from torch import nn

from hpc_tune.engine.float8 import check_float8, use_float8
from hpc_tune.errors import ConfigError


def block_with_adapters():
    """Return a block whose base layers sit inside of peft's, as tune.method=lora builds it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 24))
    model = get_peft_model(block, LoraConfig(r=16, target_modules=["0", "2"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


def test_a_cpu_is_told_what_to_do():
    with pytest.raises(ConfigError, match="needs a GPU .* this rank computes on cpu; set train"):
        check_float8(torch.device("cpu"))


def test_an_older_gpu_is_told_what_it_has(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    with pytest.raises(ConfigError, match="needs compute capability 8.9 .* A100 has 8.0"):
        check_float8(torch.device("cuda"))


def test_base_layers_inside_of_adapters_are_converted_and_nothing_else():
    pytest.importorskip("torchao")
    from torchao.float8.float8_linear import Float8Linear

    model = block_with_adapters()
    names = list(dict(model.named_parameters()))
    exact = model(x := torch.randn(8, 32)).detach()
    assert use_float8([model], emulate=True) == 1
    converted = [n for n, m in model.named_modules() if isinstance(m, Float8Linear)]
    # 24 is no multiple of 16, which the hardware asks for; adapters stay what they are.
    assert [name.removeprefix("base_model.model.") for name in converted] == ["0.base_layer"]
    assert list(dict(model.named_parameters())) == names
    rounded = model(x)
    rounded.sum().backward()
    assert 0 < (rounded - exact).abs().max() < 0.1 * exact.abs().max()
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    assert trained == {n for n in names if "lora_" in n}
