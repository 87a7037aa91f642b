"""Exports of mixtures of experts: what stock transformers and peft make of them."""

import json
import re

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_tune.checkpoint.export import export_adapter, export_merged
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import build
from hpc_tune.model.language import auto_model_class
from hpc_tune.model.load import use_init_adapter
from hpc_tune.model.loss import find_decoder
from hpc_tune.model.stock_reference import write_small_model
from hpc_tune.model.weights import index_model_directory
from tests.support.mixtures import write_mixture
from tests.support.older_transformers import since, skip_without
from tests.unit.checkpoint.test_export import TOKENS_BT, stock, trained

ATTENTION = TuneConfig(method="lora", rank=4, alpha=6.0)
EXPERTS = TuneConfig(method="lora", rank=4, alpha=6.0, targets=["all-linear", "experts"])
ROUTERS = TuneConfig(
    method="lora", rank=4, alpha=6.0, targets=["q_proj", "experts", "gate"], expert_rank=3
)
FULL = TuneConfig(method="full")
FAMILIES = ("mixtral", "qwen2_moe", "gpt_oss", "granitemoe", "deepseek_v3")


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    return {family: write_mixture(family, folder / family) for family in FAMILIES}


@torch.no_grad()
def logits(model):
    lm = model.causal_lm() if hasattr(model, "causal_lm") else model
    return lm(input_ids=TOKENS_BT, use_cache=False).logits


@pytest.mark.parametrize("tune", [ATTENTION, EXPERTS, ROUTERS], ids=["linear", "experts", "router"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_peft_loads_the_adapter_to_the_same_logits(mixtures, tmp_path, family, tune):
    if tune is ROUTERS and family in ("gpt_oss", "granitemoe"):
        pytest.skip("its router has another name")
    if tune is ROUTERS and family == "deepseek_v3":
        tune = tune.model_copy(update={"targets": ["q_a_proj", "experts", "gate"]})
    module = trained(mixtures[family], tune, tmp_path / "step")
    out = export_adapter(tmp_path / "step", tune, mixtures[family], tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(stock(mixtures[family]), out).eval()
    named = {n for n, _ in loaded.named_parameters() if "lora_" in n}
    ours = {n.removeprefix("model.") for n, p in module.named_parameters() if p.requires_grad}
    assert named == ours  # nothing is adapted that we have not trained
    assert torch.allclose(logits(loaded), logits(module), atol=1e-5)
    assert not torch.allclose(logits(stock(mixtures[family])), logits(module), atol=1e-3)


@pytest.mark.parametrize("tune", [EXPERTS, FULL], ids=["experts", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_model_has_the_files_own_names_and_our_logits(mixtures, tmp_path, family, tune):
    base = mixtures[family]
    module = trained(base, tune, tmp_path / "step")
    out = export_merged(tmp_path / "step", tune, base, tmp_path / "merged")
    stored, merged = (index_model_directory(folder) for folder in (base, out))
    assert merged.shapes == stored.shapes
    assert merged.dtypes == stored.dtypes
    model, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.allclose(logits(model.eval()), logits(module), atol=1e-5)
    assert not torch.allclose(logits(stock(base)), logits(module), atol=1e-3)


@pytest.mark.parametrize("named", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("qwen2_moe", "all-linear"),  # of a shared expert
        ("deepseek_v3", ["q_a_proj", "gate_proj", "up_proj", "experts"]),  # and of a dense layer
        ("qwen3_moe", ["q_proj", "gate"]),  # a router that is no linear layer
    ],
)
def test_ranks_and_alphas_of_layers_that_are_named_by_their_weight_are_kept(
    tmp_path, family, targets, named
):
    patterns = {"gate": 2} if "gate" in targets else {"gate_proj": 2}
    patterns |= {"q_a_proj": 3} if "q_a_proj" in targets else {"q_proj": 3}
    more = {"targets": targets, named: patterns}
    tune = TuneConfig(method="lora", rank=8, alpha=6.0, **more)
    base = write_mixture(family, tmp_path / "base")
    module = trained(base, tune, tmp_path / "step")
    ranks = {n: p.shape[0] for n, p in module.named_parameters() if "lora_A" in n}
    of_first = [rank for n, rank in ranks.items() if f".{next(iter(patterns))}.lora_A" in n]
    assert set(of_first) == ({2} if named == "rank_pattern" else {8})
    out = export_adapter(tmp_path / "step", tune, base, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(stock(base), out).eval()
    assert torch.allclose(logits(loaded), logits(module), atol=1e-5)
    assert not torch.allclose(logits(stock(base)), logits(module), atol=1e-3)
    merged = export_merged(tmp_path / "step", tune, base, tmp_path / "merged")
    assert torch.allclose(logits(stock(merged)), logits(module), atol=1e-5)
    again = use_init_adapter(build(base, torch.float32, tune, 0), out)
    assert again.init_index is not None


@pytest.mark.parametrize("named", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_of_a_shared_experts_layer_is_none_of_routed_experts_of_that_name(
    mixtures, tmp_path, named
):
    tune = EXPERTS.model_copy(update={named: {"down_proj": 5}})
    module = trained(mixtures["qwen2_moe"], tune, tmp_path / "step")
    layers = {
        path.partition("mlp.")[2]: layer
        for path, layer in module.named_modules()
        if "layers.0.mlp." in path and hasattr(layer, "lora_A")
    }
    own = layers["shared_expert.down_proj"].lora_A["default"].weight
    assert len(own) == (5 if named == "rank_pattern" else 4)
    for path in ("experts", "experts.base_layer"):
        weight = layers[path].lora_A["default"].weight
        assert len(weight) == 4 // 2 * layers[path].get_base_layer().num_experts
        assert layers[path].scaling["default"] == 6.0 / 4
    merged = export_merged(tmp_path / "step", tune, mixtures["qwen2_moe"], tmp_path / "merged")
    assert torch.allclose(logits(stock(merged)), logits(module), atol=1e-5)
    out = export_adapter(tmp_path / "step", tune, mixtures["qwen2_moe"], tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(stock(mixtures["qwen2_moe"]), out).eval()
    assert torch.allclose(logits(loaded), logits(module), atol=1e-5)


def test_a_pattern_that_marks_its_end_is_known_again(mixtures, tmp_path):
    tune = EXPERTS.model_copy(
        update={"rank_pattern": {"q_proj$": 2, "shared_expert.gate_proj$": 3}}
    )
    trained(mixtures["qwen2_moe"], tune, tmp_path / "step")
    out = export_adapter(tmp_path / "step", tune, mixtures["qwen2_moe"], tmp_path / "adapter")
    built = build(mixtures["qwen2_moe"], torch.float32, tune, 0)
    assert use_init_adapter(built, out).init_index is not None


def test_dora_on_layers_that_peft_takes_for_experts_is_refused_and_the_advice_is_good(
    mixtures, tmp_path
):
    tune = TuneConfig(method="dora", rank=4, alpha=6.0)
    with pytest.raises(
        ConfigError, match=r"layers\.0\.mlp\.\w+_proj.*down_proj, gate_proj"
    ) as said:
        build(mixtures["deepseek_v3"], torch.float32, tune, 0)
    (advice,) = re.findall(r"tune\.targets=\[([\w,]+)\]$", str(said.value))
    tune = tune.model_copy(update={"targets": advice.split(",")})
    module = trained(mixtures["deepseek_v3"], tune, tmp_path / "step")
    out = export_adapter(tmp_path / "step", tune, mixtures["deepseek_v3"], tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(stock(mixtures["deepseek_v3"]), out).eval()
    assert torch.allclose(logits(loaded), logits(module), atol=1e-5)


def test_dora_on_layers_of_families_whose_names_peft_keeps_is_loaded(mixtures, tmp_path):
    """A shared expert has layers of the names that routed experts had."""
    base, tune = mixtures["qwen2_moe"], TuneConfig(method="dora", rank=4, alpha=6.0)
    module = trained(base, tune, tmp_path / "step")
    assert any("shared_expert.gate_proj.lora_A" in name for name, _ in module.named_parameters())
    out = export_adapter(tmp_path / "step", tune, base, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(stock(base), out).eval()
    assert torch.allclose(logits(loaded), logits(module), atol=1e-5)


def test_experts_have_a_rank_of_their_own_and_the_scale_of_the_others(mixtures, tmp_path):
    trained(mixtures["mixtral"], EXPERTS, tmp_path / "step")
    out = export_adapter(tmp_path / "step", EXPERTS, mixtures["mixtral"], tmp_path / "adapter")
    config = json.loads((out / "adapter_config.json").read_text())
    stacks = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    assert config["target_parameters"] == stacks
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert config["rank_pattern"] == dict.fromkeys(stacks, 2)  # 4 / 2 experts per token
    assert config["alpha_pattern"] == dict.fromkeys(stacks, 3.0)
    shapes = {n: tuple(t.shape) for n, t in load_file(out / "adapter_model.safetensors").items()}
    layer = "base_model.model.model.layers.0.mlp.experts"
    assert shapes[f"{layer}.lora_A.weight"][0] == shapes[f"{layer}.lora_B.weight"][1] == 2 * 6


def test_a_rank_of_experts_without_adapters_on_experts_is_refused(mixtures):
    tune = TuneConfig(method="lora", expert_rank=4)
    with pytest.raises(ConfigError, match=r"expert_rank=4 has no effect.*\[all-linear, experts\]"):
        build(mixtures["mixtral"], torch.float32, tune, 0)


@since("5.20", "has a projector as wide as the published one: no small model")
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_a_layer_whose_gate_and_up_lie_apart_in_files_is_merged(tmp_path, method):
    """MiniMax-M3's dense layers: one linear layer of the model, two tensors of its files."""
    base = tmp_path / "base"
    base.mkdir()
    config = AutoConfig.for_model("minimax_m3_vl")
    write_small_model(config, base)
    tune = TuneConfig(method=method, rank=4, alpha=6.0, targets=["gate_up_proj"])
    module = trained(base, tune, tmp_path / "step")
    out = export_merged(tmp_path / "step", tune, base, tmp_path / "merged")
    models = [
        auto_model_class(config).from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (out, base)
    ]
    merged, first = map(logits, models)
    assert torch.allclose(merged, logits(module), atol=1e-4)
    assert not torch.allclose(merged, first, atol=1e-2)


@pytest.mark.parametrize(
    ("family", "tune"),
    [
        ("mistral_large4", EXPERTS),
        pytest.param("mistral_large4", FULL, marks=pytest.mark.full),
        pytest.param("mistral4", EXPERTS, marks=pytest.mark.full),
        pytest.param("mistral4", FULL, marks=pytest.mark.full),
    ],
    ids=["mistral_large4-experts", "mistral_large4-full", "mistral4-experts", "mistral4-full"],
)
def test_a_mistral_large_4_is_merged_as_its_files_are(tmp_path, family, tune):
    """Its files have short names, each expert by itself, and parts for images beside."""
    skip_without(family)
    base = tmp_path / "base"
    base.mkdir()
    config = AutoConfig.for_model(family)
    write_small_model(config, base)
    module = trained(base, tune, tmp_path / "step")
    lm = module.causal_lm()  # its class is that of the whole model, and wants more than its decoder
    with torch.no_grad():
        hidden = find_decoder(lm)(input_ids=TOKENS_BT, use_cache=False).last_hidden_state
        ours = lm.get_output_embeddings()(hidden)
    if cap := getattr(config.get_text_config(), "final_logit_softcapping", None):
        ours = cap * torch.tanh(ours / cap)
    out = export_merged(tmp_path / "step", tune, base, tmp_path / "merged")
    stored, merged = (index_model_directory(folder) for folder in (base, out))
    assert merged.shapes == stored.shapes
    assert merged.dtypes == stored.dtypes
    model, report = auto_model_class(config).from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert torch.allclose(logits(model.eval()), ours, atol=1e-4)
    first = auto_model_class(config).from_pretrained(base, dtype=torch.float32).eval()
    assert not torch.allclose(logits(first), ours, atol=1e-2)


def test_an_adapter_on_the_experts_of_a_part_for_language_is_what_peft_loads(tmp_path):
    """Gemma 4 with experts: its blocks have dense layers beside them, and one lies beside all."""
    config = AutoConfig.for_model("gemma4")
    text = config.get_text_config()
    text.enable_moe_block, text.num_experts, text.top_k_experts = True, 8, 2
    text.moe_intermediate_size = 32
    base = tmp_path / "base"
    base.mkdir()
    write_small_model(config, base)
    module = trained(base, EXPERTS, tmp_path / "step")
    out = export_adapter(tmp_path / "step", EXPERTS, base, tmp_path / "adapter")
    models = [auto_model_class(config).from_pretrained(base, dtype=torch.float32) for _ in "ab"]
    loaded = PeftModel.from_pretrained(models[0], out).eval()
    assert torch.allclose(logits(loaded), logits(module), atol=1e-4)
    assert not torch.allclose(logits(models[1].eval()), logits(module), atol=1e-2)


@pytest.mark.parametrize(("family", "lost"), [("laguna", 3), ("hy_v3", 0)])
def test_adapters_that_peft_passes_over_are_said(tmp_path, caplog, family, lost):
    """Of Laguna's shared experts, which transformers renames although they have their own name."""
    base = tmp_path / "base"
    base.mkdir()
    write_small_model(AutoConfig.for_model(family), base)
    module = trained(base, EXPERTS, tmp_path / "step")
    with caplog.at_level("WARNING", logger="hpc_tune"):
        out = export_adapter(tmp_path / "step", EXPERTS, base, tmp_path / "adapter")
    assert (f"peft does not load {lost} of the adapters" in caplog.text) == (lost > 0)
    loaded = PeftModel.from_pretrained(stock(base), out).eval()
    assert torch.allclose(logits(loaded), logits(module), atol=1e-4) == (lost == 0)
