"""Each family of mixtures: read, saved merged and as an adapter, and read again by stock tools."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from hpc_tune.checkpoint.export import export_adapter, export_merged
from hpc_tune.config.tune import TuneConfig
from hpc_tune.model.dropout import disable_dropout
from hpc_tune.model.language import auto_model_class, read_config
from hpc_tune.model.stock_reference import write_small_model
from tests.support.mixtures import write_mixture
from tests.unit.checkpoint.test_export import close, trained
from tests.unit.checkpoint.test_mixture_export import logits

TUNE = TuneConfig(method="lora", rank=4, alpha=6.0, targets=["all-linear", "experts"])
# Jamba passes over an adapter on dt_proj.
OTHER_TARGETS = {"jamba": ["q_proj", "in_proj", "out_proj", "gate_proj", "experts"]}
STACK = r"\.experts\.|(input|output)_linear"
UNNAMED = ("aria", "llama4_text")  # no names are known for their single experts
SMALL = ("qwen3_moe", "granitemoe", "deepseek_v3")
OTHERS = """
afmoe aria deepseek_v2 deepseek_v32 ernie4_5_moe exaone_moe flex_olmo glm4_moe glm4_moe_lite gpt_oss
granitemoehybrid-experts granitemoeshared hunyuan_v1_moe jamba lfm2_moe llama4_text minimax
minimax_m2 mixtral nemotron_h nemotron_h_omni olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_next
"""
FULL = [pytest.param(name, marks=pytest.mark.full) for name in OTHERS.split()]


def write_family(family, directory):
    if family in SMALL:
        return write_mixture(family, directory)
    sys.path.append(str(Path(__file__).parents[3] / "tools"))
    from matrix_models import config_of

    config = config_of(family)
    disable_dropout(config)
    write_small_model(config, directory)
    return directory


def load(directory):
    model, report = auto_model_class(read_config(directory)).from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model.eval()


def stored(directory):
    return {n: t for file in directory.glob("*.safetensors") for n, t in load_file(file).items()}


@pytest.mark.parametrize("family", [*SMALL, *FULL])
def test_files_come_back_as_they_were_but_for_what_was_trained(tmp_path, family):
    base = tmp_path / "base"
    base.mkdir()
    write_family(family, base)
    targets = OTHER_TARGETS.get(family, TUNE.targets)
    tune = TUNE.model_copy(update={"targets": targets})
    module = trained(base, tune, tmp_path / "step")
    what = (tmp_path / "step", tune, base)
    merged = export_merged(*what, tmp_path / "merged")
    adapter = export_adapter(*what, tmp_path / "a")
    before, after, ours = stored(base), stored(merged), logits(module)
    layout = {name: (tensor.shape, tensor.dtype) for name, tensor in before.items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in after.items()} == layout
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert close(logits(load(merged)), ours)
    assert close(logits(PeftModel.from_pretrained(load(base), adapter).eval()), ours)
    twin = tmp_path / "a-per-expert"
    if family in UNNAMED:
        assert not twin.exists()
        return
    config, tensors = json.loads((twin / "adapter_config.json").read_text()), stored(twin)
    scale, adapted = config["lora_alpha"] / config["r"], set()
    for name in (name for name in tensors if name.endswith(".lora_A.weight")):
        layer = name.removesuffix(".lora_A.weight").removeprefix("base_model.model.")
        if f"{layer}.weight" in before:
            delta = scale * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
            adapted.add(f"{layer}.weight")
            wanted = before[f"{layer}.weight"] + delta
            assert torch.allclose(after[f"{layer}.weight"], wanted, atol=1e-6)
    stacks = {name for name in before if before[name].dim() == 3 and re.search(STACK, name)}
    assert adapted <= changed <= adapted | stacks
    assert stacks <= changed
