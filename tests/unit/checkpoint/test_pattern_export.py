"""Patterns of ranks and scales on a language model that is one part of a model."""

import re

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig

from hpc_tune.checkpoint.export import export_adapter, export_merged
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import build
from hpc_tune.model.language import auto_model_class
from hpc_tune.model.stock_reference import write_small_model
from tests.unit.checkpoint.test_export import TOKENS_BT, trained


@torch.no_grad()
def logits(model):
    lm = model.causal_lm() if hasattr(model, "causal_lm") else model
    return lm(input_ids=TOKENS_BT, use_cache=False).logits


@pytest.mark.parametrize("setting", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_exports_would_not_know_is_refused_and_the_advised_one_is_kept(
    tmp_path, setting
):
    config, base = AutoConfig.for_model("gemma3"), tmp_path / "base"
    base.mkdir()
    write_small_model(config, base)

    def tune_of(pattern):
        more = {"targets": ["q_proj"], setting: {pattern: 2}}
        return TuneConfig(method="lora", rank=4, alpha=6.0, **more)

    with pytest.raises(ConfigError, match=rf"{setting}: model\.layers\.0.* only one of") as said:
        build(base, torch.float32, tune_of("model.layers.0.self_attn.q_proj"), 0)
    (advised,) = re.findall(r"as (\S+) does$", str(said.value))
    assert advised == "layers.0.self_attn.q_proj"
    tune = tune_of(advised)
    module = trained(base, tune, tmp_path / "step")
    adapter = export_adapter(tmp_path / "step", tune, base, tmp_path / "adapter")
    merged = export_merged(tmp_path / "step", tune, base, tmp_path / "merged")
    of_class = auto_model_class(config)
    models = [
        of_class.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (base, base, merged)
    ]
    first = logits(models[0])
    for model in (PeftModel.from_pretrained(models[1], adapter).eval(), models[2]):
        assert torch.allclose(logits(model), logits(module), atol=1e-5)
    assert not torch.allclose(first, logits(module), atol=1e-3)
