import pytest
import torch
from torch import nn

from hpc_tune.errors import ConfigError
from hpc_tune.model.float8 import check_float8, convert_to_torchao_float8
from hpc_tune.model.layers import find_blocks, find_unquantized_layers


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
    with pytest.raises(
        ConfigError, match="needs a GPU with float8 .* A100 has compute capability 8.0"
    ):
        check_float8(torch.device("cuda"))


def test_base_layers_inside_of_adapters_are_converted_and_nothing_else():
    pytest.importorskip("torchao")
    from torchao.float8.float8_linear import Float8Linear

    model = block_with_adapters()
    names = list(dict(model.named_parameters()))
    exact = model(x := torch.randn(8, 32)).detach()
    assert convert_to_torchao_float8([model], emulate=True) == 1
    converted = [n for n, m in model.named_modules() if isinstance(m, Float8Linear)]
    # 24 is no multiple of 16, which the hardware asks for; adapters stay what they are.
    assert [name.removeprefix("base_model.model.") for name in converted] == ["0.base_layer"]
    assert list(dict(model.named_parameters())) == names
    rounded = model(x)
    rounded.sum().backward()
    assert 0 < (rounded - exact).abs().max() < 0.1 * exact.abs().max()
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    assert trained == {n for n in names if "lora_" in n}


# Families whose routers are linear layers of their own, by how their paths end.
ROUTERS = {
    "dbrx": "ffn.router.layer",
    "hunyuan_v1_moe": "mlp.gate.wg",
    "jamba": "feed_forward.router",
}


@pytest.mark.parametrize("family", ROUTERS)
def test_routers_choose_by_scores_of_all_their_digits(family):
    pytest.importorskip("torchao")
    from torchao.float8.float8_linear import Float8Linear
    from transformers import AutoConfig, AutoModelForCausalLM

    attention = {"kv_n_heads": 2, "rope_theta": 1e4}
    sizes = {
        "dbrx": {"ffn_config": {"ffn_hidden_size": 64}, "attn_config": attention},
        "hunyuan_v1_moe": {"num_experts": 16, "moe_topk": 2, "head_dim": 16},
        "jamba": {
            **{"num_experts": 16, "mamba_dt_rank": 16, "attn_layer_period": 2},
            "attn_layer_offset": 1,
        },
    }
    common = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if family == "dbrx":
        common = {"d_model": 64, "n_heads": 4, "n_layers": 2}
    said = common | sizes[family]
    config = AutoConfig.for_model(family, vocab_size=64, pad_token_id=0, **said)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    blocks = find_blocks(model)
    routers = [n for n, m in model.named_modules() if n.endswith(ROUTERS[family])]
    assert (
        convert_to_torchao_float8(
            list(blocks), find_unquantized_layers(model, blocks), emulate=True
        )
        > 2
    )
    converted = [n for n, m in model.named_modules() if isinstance(m, Float8Linear)]
    assert routers
    assert not [name for name in converted if name in routers]
