"""Adapters to begin with: what stock peft and the Hugging Face Trainer have saved."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import build
from hpc_tune.model.builtin import TINY_CONFIG, write_tiny_model
from hpc_tune.model.load import allocate, load_weights, use_init_adapter
from tests.support.mixtures import write_mixture

TOKENS_BT = torch.tensor([[5, 9, 2, 77, 31, 8, 8, 60]])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base") / "tiny"
    write_tiny_model(directory)
    return directory


def stock(tiny, **settings):
    """A stock peft model whose adapters are not what they were at first."""
    torch.manual_seed(3)
    settings = {"r": 4, "lora_alpha": 6.0, "target_modules": "all-linear"} | settings
    base = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def started(tiny, directory, method="lora", **settings):
    """Our model with the adapter of ``directory``."""
    tune = TuneConfig(method=method, rank=4, alpha=6.0, **settings)
    built = build(tiny, torch.float32, tune, 0)
    built = use_init_adapter(built, directory)
    allocate(built.module, torch.device("cpu"))
    load_weights(built)
    return built.module.eval()


@torch.no_grad()
def gap(ours, theirs):
    theirs = theirs.eval()
    logits = [
        model(input_ids=TOKENS_BT, use_cache=False).logits for model in (ours.causal_lm(), theirs)
    ]
    return (logits[0] - logits[1]).abs().max() / logits[1].abs().max()


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_an_adapter_that_peft_saved_is_where_training_begins(tiny, tmp_path, method):
    theirs = stock(tiny, use_dora=method == "dora")
    theirs.save_pretrained(tmp_path)
    assert gap(started(tiny, tmp_path, method), theirs) < 1e-5


def test_a_checkpoint_of_the_trainer_is_where_training_begins(tiny, tmp_path):
    theirs = stock(tiny)
    rows = [{"input_ids": TOKENS_BT[0], "labels": TOKENS_BT[0]}] * 4
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=2, use_cpu=True, report_to=[], learning_rate=1e-2
    )
    Trainer(theirs, arguments, train_dataset=rows).train()
    assert gap(started(tiny, tmp_path / "checkpoint-2"), theirs) < 1e-5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"r": 8}, "r is 8 there, and tune.rank says 4"),
        ({"lora_alpha": 5.0}, "lora_alpha is 5.0 there, and tune.alpha says 6.0"),
        ({"use_dora": True}, "use_dora is True there, and tune.method says False"),
        ({"target_modules": ["q_proj"]}, "it has no base_model.model.model.layers.0."),
    ],
)
def test_an_adapter_of_another_kind_is_refused(tiny, tmp_path, settings, said):
    stock(tiny, **settings).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="tune.init_from=") as refused:
        started(tiny, tmp_path)
    assert said in str(refused.value)


@pytest.mark.parametrize("way", ["pissa", "pissa_niter_4", "olora"])
def test_an_adapter_that_has_changed_its_base_is_refused_by_the_name_of_its_way(
    tiny, tmp_path, way
):
    stock(tiny, init_lora_weights=way).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"init_lora_weights is {way} there"):
        started(tiny, tmp_path)


@pytest.mark.parametrize("way", [False, "gaussian", "orthogonal"])
def test_an_adapter_that_has_begun_otherwise_on_the_same_base_is_taken(tiny, tmp_path, way):
    theirs = stock(tiny, init_lora_weights=way)
    theirs.save_pretrained(tmp_path)
    assert gap(started(tiny, tmp_path), theirs) < 1e-5


def test_an_adapter_of_a_base_of_another_width_is_refused(tiny, tmp_path):
    wider = LlamaForCausalLM(
        LlamaConfig(**TINY_CONFIG | {"hidden_size": 2 * TINY_CONFIG["hidden_size"]})
    )
    settings = LoraConfig(r=4, lora_alpha=6.0, target_modules="all-linear")
    get_peft_model(wider, settings).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"lora_B\.weight has shape .* it is of another base"):
        started(tiny, tmp_path)


def test_an_adapter_that_has_more_than_this_run_is_refused(tiny, tmp_path):
    stock(tiny).save_pretrained(tmp_path)
    tune = TuneConfig(method="lora", rank=4, alpha=6.0, targets=["q_proj"])
    with pytest.raises(ConfigError, match="it has base_model.* which this run does not have"):
        use_init_adapter(build(tiny, torch.float32, tune, 0), tmp_path)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "name the folder that peft's save_pretrained or the Trainer wrote"),
        ({"adapter_model.bin": "x", "adapter_config.json": "{}"}, "is a pickle, which is not read"),
        (
            {"adapter_model.safetensors": "x", "adapter_config.json": "{"},
            "adapter_config.json cannot be read",
        ),
        (
            {"adapter_model.safetensors": "x", "adapter_config.json": "[]"},
            "adapter_config.json cannot be read",
        ),
        (
            {"adapter_model.safetensors": "x", "adapter_config.json": '{"rank_pattern": 8}'},
            "adapter_config.json cannot be read",
        ),
        (
            {
                "adapter_model.safetensors": "x",
                "adapter_config.json": '{"rank_pattern": [["a",8]]}',
            },
            "adapter_config.json cannot be read",
        ),
    ],
)
def test_a_folder_that_holds_no_adapter_is_refused(tiny, tmp_path, files, said):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="tune.init_from") as refused:
        started(tiny, tmp_path)
    assert said in str(refused.value)


def test_the_scaling_that_ranks_are_divided_by_must_be_ours(tiny, tmp_path):
    theirs = stock(tiny, use_rslora=True)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"use_rslora is True there, and tune\.rslora says False"):
        started(tiny, tmp_path)
    assert gap(started(tiny, tmp_path, rslora=True), theirs) < 1e-5


@pytest.mark.parametrize(
    "settings",
    [{"alora_invocation_tokens": [5, 9]}, {"lora_bias": True}, {"a_field_of_tomorrow": 0.5}],
)
def test_what_would_make_of_the_same_tensors_another_adapter_is_refused(tiny, tmp_path, settings):
    stock(tiny).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    with pytest.raises(ConfigError, match=f"{next(iter(settings))} is set there"):
        started(tiny, tmp_path)


def test_patterns_may_be_null_in_an_adapters_config(tiny, tmp_path):
    adapted = stock(tiny)
    adapted.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    nulls = {"rank_pattern": None, "alpha_pattern": None}
    file.write_text(json.dumps(json.loads(file.read_text()) | nulls))
    assert gap(started(tiny, tmp_path), adapted) < 1e-5


def test_an_adapter_that_is_no_lora_is_refused_by_its_name(tiny, tmp_path):
    stock(tiny).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"peft_type": "LOHA"}))
    with pytest.raises(ConfigError, match="peft_type is LOHA there"):
        started(tiny, tmp_path)


def of_mixture(directory, **settings):
    """Write an adapter of stock peft, on the experts of a mixture; return its model."""
    base = AutoModelForCausalLM.from_pretrained(directory)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    fields = {"r": 4, "lora_alpha": 6.0, "target_modules": ["q_proj"], "target_parameters": names}
    model = get_peft_model(base, LoraConfig(**fields | settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


EXPERTS = {"targets": ["q_proj", "experts"]}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_an_adapter_on_experts_that_peft_saved_is_where_training_begins(tmp_path, family):
    """It has one rank for all, and so no pattern for experts."""
    base = write_mixture(family, tmp_path / "base")
    theirs = of_mixture(base)
    theirs.save_pretrained(tmp_path / "adapter")
    ours = started(base, tmp_path / "adapter", expert_rank=4, **EXPERTS)
    assert gap(ours, theirs) < 1e-5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "the rank of experts is 4 there, and tune.expert_rank says 2"),
        (
            {"rank_pattern": {"mlp.experts.gate_up_proj": 2, "mlp.experts.down_proj": 2}},
            "lora_alpha of experts is 6.0 there, and 3.0 here: tune.alpha x expert_rank / rank",
        ),
    ],
)
def test_experts_of_another_rank_or_scale_are_refused_by_the_setting(tmp_path, settings, said):
    base = write_mixture("qwen3_moe", tmp_path / "base")
    of_mixture(base, **settings).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError) as refused:
        started(base, tmp_path / "adapter", expert_rank=2, **EXPERTS)
    assert said in str(refused.value)
    assert "tune.rank_pattern" not in str(refused.value)


def test_an_adapter_with_experts_one_by_one_is_refused_as_such(tmp_path):
    base, folder = write_mixture("qwen3_moe", tmp_path / "base"), tmp_path / "adapter"
    of_mixture(base).save_pretrained(folder)
    name = "base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight"
    save_file({name: torch.ones(4, 64)}, folder / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"a pair of tensors per expert\. Expected peft's form"):
        started(base, folder, expert_rank=4, **EXPERTS)
