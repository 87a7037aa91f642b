"""The adapter with its experts one by one, as vLLM reads it for most families.

vLLM itself is not installed here. It scales by lora_alpha / r for all layers, and takes each
expert's matrices by the names that the model's own files have for them.
"""

import json
import re

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from torch import nn

from hpc_tune.checkpoint.export import export_adapter
from hpc_tune.config.tune import TuneConfig
from tests.support.mixtures import write_mixture
from tests.unit.checkpoint.test_export import stock, trained
from tests.unit.checkpoint.test_mixture_export import logits

PREFIX = "base_model.model."
TUNE = TuneConfig(method="lora", rank=4, alpha=6.0, targets=["all-linear", "experts", "gate"])
FUSED = TUNE.model_copy(update={"targets": ["all-linear", "experts"]})
# Of each family, the last names of its layers with adapters.
ONE_BY_ONE = {
    "mixtral": "gate k_proj o_proj q_proj v_proj w1 w2 w3",
    "qwen2_moe": "down_proj gate gate_proj k_proj o_proj q_proj up_proj v_proj",
    "deepseek_v3": "down_proj gate gate_proj kv_a_proj_with_mqa kv_b_proj o_proj q_a_proj q_b_proj "
    "up_proj",
}
# Where files hold stacks: which of them has an expert's matrix of a name, and where.
EVEN, ODD, ALL = slice(0, None, 2), slice(1, None, 2), slice(None)
FIRST, SECOND = slice(0, 48), slice(48, None)
STACKED = {
    "gpt_oss": {
        "gate_proj": ("experts.gate_up_proj", EVEN),
        "up_proj": ("experts.gate_up_proj", ODD),
        "down_proj": ("experts.down_proj", ALL),
    },
    "granitemoe": {
        "w1": ("input_linear.weight", FIRST),
        "w3": ("input_linear.weight", SECOND),
        "w2": ("output_linear.weight", ALL),
    },
}


def exported(base, tune, folder):
    """Return our module, and the settings and the deltas of the folder of its single experts."""
    module = trained(base, tune, folder / "step")
    out = export_adapter(folder / "step", tune, base, folder / "adapter")
    twin = out.with_name("adapter-per-expert")
    config = json.loads((twin / "adapter_config.json").read_text())
    tensors = load_file(twin / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    suffix = ".lora_A.weight"
    layers = [name.removesuffix(suffix) for name in tensors if name.endswith(suffix)]
    assert len(tensors) == 2 * len(layers)
    deltas = {
        layer.removeprefix(PREFIX): scale
        * (tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"])
        for layer in layers
    }
    return module, config, deltas


def merged(base, deltas):
    """Add them to the tensors of a base's file; return its logits by stock transformers."""
    file = base / "model.safetensors"
    tensors = load_file(file)
    for layer, delta in deltas.items():
        tensors[f"{layer}.weight"] += delta
    save_file(tensors, file, metadata={"format": "pt"})
    return logits(stock(base))


@pytest.mark.parametrize("family", ONE_BY_ONE)
def test_added_to_the_files_own_matrices_it_gives_our_logits(tmp_path, family):
    """Each of its layers is a tensor of the base's files; nothing else is needed to merge it."""
    base = write_mixture(family, tmp_path / "base")
    module, config, deltas = exported(base, TUNE, tmp_path)
    assert config["target_modules"] == ONE_BY_ONE[family].split()
    assert not config.get("target_parameters")
    assert torch.allclose(merged(base, deltas), logits(module), atol=1e-5)


@pytest.mark.parametrize("family", STACKED)
def test_added_to_the_experts_of_stacks_it_gives_our_logits(tmp_path, family):
    base = write_mixture(family, tmp_path / "base")
    module, config, deltas = exported(base, FUSED, tmp_path)
    file, matrices = base / "model.safetensors", STACKED[family]
    tensors = load_file(file)
    for layer, delta in deltas.items():
        if f"{layer}.weight" in tensors:
            tensors[f"{layer}.weight"] += delta
            continue
        path, expert, name = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)", layer).groups()
        stack, outputs = matrices[name]
        weight = tensors[f"{path}.{stack}"][int(expert)]
        (weight.t() if family == "gpt_oss" else weight)[outputs] += delta
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.allclose(logits(stock(base)), logits(module), atol=1e-5)
    # Their rank is 4 / 2 experts per token, and their scale that of the others.
    names = "|".join(sorted(matrices))
    assert config["rank_pattern"] == {rf"experts\.\d+\.({names})": 2}
    assert config["alpha_pattern"] == {rf"experts\.\d+\.({names})": 3.0}


def test_the_root_of_the_rank_is_in_alpha(tmp_path):
    """Some versions of vLLM forget it for experts."""
    base = write_mixture("mixtral", tmp_path / "base")
    tune = FUSED.model_copy(update={"rslora": True})
    module, config, deltas = exported(base, tune, tmp_path)
    assert "use_rslora" not in config
    assert config["lora_alpha"] == 6.0 * 4**0.5
    assert torch.allclose(merged(base, deltas), logits(module), atol=1e-5)
    (rank,), (alpha,) = config["rank_pattern"].values(), config["alpha_pattern"].values()
    assert alpha / rank == pytest.approx(config["lora_alpha"] / config["r"])


def layers_of_peft(folder):
    """Let stock peft adapt linear layers of the adapter's own names; return them by these."""
    tensors = load_file(folder / "adapter_model.safetensors")
    root = nn.Module()
    for name in (n for n in tensors if n.endswith(".lora_A.weight")):
        layer = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        outputs = len(tensors[name.replace("lora_A", "lora_B")])
        *parents, last = layer.split(".")
        owner = root
        for part in parents:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        owner.add_module(last, nn.Linear(tensors[name].shape[1], outputs))
    inject_adapter_in_model(LoraConfig.from_pretrained(folder), root)
    return {path: m for path, m in root.named_modules() if hasattr(m, "lora_A")}, tensors


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize(
    "patterns",
    [
        {},
        {"rank_pattern": {"q_proj": 3}},
        {"alpha_pattern": {"q_proj": 2.0}},
        {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"layers.0.self_attn.*": 2.0}},
        {"rank_pattern": {"mlp.gate": 3}, "alpha_pattern": {"k_proj": 2.0}},  # other names in files
        {"expert_rank": 4},
    ],
)
def test_stock_peft_takes_its_ranks_and_scales_from_its_settings(tmp_path, patterns, rslora):
    base = write_mixture("mixtral", tmp_path / "base")
    tune = TUNE.model_copy(update={"rslora": rslora, **patterns})
    module, config, _ = exported(base, tune, tmp_path)
    assert "use_rslora" not in config
    layers, tensors = layers_of_peft(tmp_path / "adapter-per-expert")
    deltas = {}
    for path, layer in layers.items():
        a, b = (tensors[f"{PREFIX}{path}.lora_{part}.weight"] for part in "AB")
        assert layer.r["default"] == len(a)
        deltas[path] = layer.scaling["default"] * (b @ a)
    assert 2 * len(deltas) == len(tensors)
    assert torch.allclose(merged(base, deltas), logits(module), atol=1e-5)


def test_an_adapter_on_no_expert_has_no_second_folder(tmp_path):
    base = write_mixture("mixtral", tmp_path / "base")
    tune = TuneConfig(method="lora", rank=4)
    trained(base, tune, tmp_path / "step")
    export_adapter(tmp_path / "step", tune, base, tmp_path / "adapter")
    assert not (tmp_path / "adapter-per-expert").exists()
