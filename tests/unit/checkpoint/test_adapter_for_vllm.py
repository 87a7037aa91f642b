"""Adapters by the rules of vLLM's LoRA loader (vllm/lora/peft_helper.py, utils.py and models.py).

vLLM itself is not installed here. It takes r, lora_alpha and target_modules as required; refuses
modules_to_save, biases and DoRA; scales by lora_alpha / r; and reads tensors that are named
base_model.model.LAYER.lora_A.weight and .lora_B.weight, of layers whose last name it expects.
"""

import json
import re

import pytest
from safetensors.torch import load_file

from hpc_tune.checkpoint.export import export_adapter
from hpc_tune.config.tune import TuneConfig
from hpc_tune.model.builtin import TINY_CONFIG, write_tiny_model
from tests.unit.checkpoint.test_export import trained

LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def exported(tmp_path, **settings):
    """Return (adapter_config.json, the tensors) of an adapter of rank 4."""
    tune = TuneConfig(rank=4, alpha=6.0, **settings)
    write_tiny_model(tmp_path / "base")
    trained(tmp_path / "base", tune, tmp_path / "step")
    out = export_adapter(tmp_path / "step", tune, tmp_path / "base", tmp_path / "out")
    config = json.loads((out / "adapter_config.json").read_text())
    return config, load_file(out / "adapter_model.safetensors")


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "up_proj"]])
def test_settings_and_tensors_are_those_that_vllm_takes(tmp_path, targets):
    config, tensors = exported(tmp_path, targets=targets)
    assert config["peft_type"] == "LORA"
    assert (config["r"], config["lora_alpha"]) == (4, 6.0)
    assert (config["bias"], config["modules_to_save"]) == ("none", None)
    others = ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern")  # it has their defaults
    assert not config.keys() & set(others)
    assert isinstance(config["target_modules"], list)
    wanted = LINEAR if targets == "all-linear" else set(targets)
    assert set(config["target_modules"]) == wanted
    layers = {}
    for name, tensor in tensors.items():
        found = re.fullmatch(
            r"base_model\.model\.(model\.layers\.\d+\..*)\.lora_(A|B)\.weight", name
        )
        assert found, f"{name} is not a name that vLLM reads"
        layers.setdefault(found[1], {})[found[2]] = tuple(tensor.shape)
    assert {layer.rpartition(".")[2] for layer in layers} == wanted
    assert len(layers) == len(wanted) * TINY_CONFIG["num_hidden_layers"]
    for shapes in layers.values():
        assert (shapes["A"][0], shapes["B"][1]) == (4, 4)


def test_a_dora_adapter_says_that_it_is_one_which_vllm_refuses(tmp_path):
    config, _ = exported(tmp_path, method="dora")
    assert config["use_dora"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, None),
        ({"rslora": True}, "tune.rslora"),
        ({"rank_pattern": {"q_proj": 2}}, "tune.rank_pattern"),
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3.0}}, None),
    ],
)
def test_scales_that_others_than_peft_may_not_know_are_told_of(tmp_path, caplog, settings, named):
    with caplog.at_level("WARNING", logger="hpc_tune"):
        exported(tmp_path, **settings)
    assert ("alpha / rank = 1.5" in caplog.text) == (named is not None)
    assert named is None or f"with {named}, some layers are not scaled" in caplog.text
