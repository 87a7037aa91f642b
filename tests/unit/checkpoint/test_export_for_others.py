"""Exports for those who load them elsewhere: with older peft, by the base's name, in fp16."""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hpc_tune.checkpoint.export import export_adapter, export_merged
from hpc_tune.checkpoint.export_metadata import BaseModelName, find_base_model_name
from hpc_tune.checkpoint.gguf_file import export_gguf
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import CheckpointError, DataError
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.tokenizer import load_tokenizer
from tests.unit.checkpoint.test_export import (
    METHODS,
    close,
    logits,
    read_all,
    stock,
    trained,
    write_llama,
)
from tests.unit.model.test_float8_checkpoints import stored

LORA = METHODS["lora"]
# The fields of LoraConfig in peft 0.6 (2023); use_dora came with 0.9.
OLD_FIELDS = {
    *("peft_type", "auto_mapping", "base_model_name_or_path", "revision", "task_type"),
    *("inference_mode", "r", "target_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out"),
    *("bias", "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern"),
    *("rank_pattern", "alpha_pattern"),
}
REVISION = "7e27bd9f95328f0f3b08261d1252705110c806f8"


def config_of(out):
    return json.loads((out / "adapter_config.json").read_text())


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("targets", ["all-linear", ["v_proj", "q_proj"]])
def test_adapter_config_has_only_fields_that_peft_of_years_ago_takes(tmp_path, method, targets):
    """Versions up to 0.13 end with a TypeError at any field that they do not know."""
    tune = TuneConfig(method=method, rank=4, alpha=6.0, targets=targets)
    write_tiny_model(tmp_path / "base")
    ours = trained(tmp_path / "base", tune, tmp_path / "step")
    out = export_adapter(tmp_path / "step", tune, tmp_path / "base", tmp_path / "out")
    config = config_of(out)
    assert config.keys() - OLD_FIELDS == ({"use_dora"} if method == "dora" else set())
    assert config["target_modules"] == sorted(config["target_modules"])
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (4, 6.0, "CAUSAL_LM")
    assert type(config["lora_alpha"]) is int, "Ollama reads no 6.0"
    wrapped = PeftModel.from_pretrained(stock(tmp_path / "base"), out).eval()
    assert close(logits(wrapped), logits(ours))


def write_gpt2(base):
    """A small GPT-2 with the tokenizer that it was published with: a vocabulary and merges."""
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 300}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes)).save_pretrained(base)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*letters, "he", "<|endoftext|>"])}
    (base / "vocab.json").write_text(json.dumps(vocabulary))
    (base / "merges.txt").write_text("#version: 0.2\nh e\n")


@pytest.mark.parametrize("names_its_class", [True, False])
def test_a_tokenizer_of_a_vocabulary_and_merges_is_whole_in_every_export(tmp_path, names_its_class):
    """Without a name for its class, transformers goes by the model's type: in config.json alone."""
    base = tmp_path / "base"
    write_gpt2(base)
    if names_its_class:
        (base / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    wanted = load_tokenizer(base)("the hen").input_ids
    assert len(wanted) < len("the hen"), "merges are used"
    trained(base, LORA, tmp_path / "step")
    for write, name in ((export_adapter, "adapter"), (export_merged, "merged")):
        out = write(tmp_path / "step", LORA, base, tmp_path / name)
        assert AutoTokenizer.from_pretrained(out)("the hen").input_ids == wanted
    assert not (base / "tokenizer.json").exists(), "nothing is written into the base"


@pytest.mark.parametrize("further", [{}, {"<|more|>": 300}])
def test_added_tokens_that_the_tokenizer_has_are_no_adapters_own(tmp_path, further):
    base = tmp_path / "base"
    write_tiny_model(base)
    tokens = json.loads((base / "tokenizer.json").read_text())["added_tokens"]
    added = {token["content"]: token["id"] for token in tokens} | further
    (base / "added_tokens.json").write_text(json.dumps(added))
    trained(base, LORA, tmp_path / "step")
    out = export_adapter(tmp_path / "step", LORA, base, tmp_path / "adapter")
    assert (out / "added_tokens.json").exists() == bool(further)
    assert (out / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_a_base_that_has_lost_its_vocabulary_is_refused(tmp_path):
    """transformers makes a tokenizer of a few special tokens of what is left."""
    write_gpt2(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    load_tokenizer(tmp_path)
    for name in ("vocab.json", "merges.txt"):
        (tmp_path / name).unlink()
    with pytest.raises(DataError, match=r"special tokens and no others; tokenizer\.json, or its"):
        load_tokenizer(tmp_path)


CACHED = f"hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/{REVISION}"


HUB = "HuggingFaceTB/SmolLM2-135M"


@pytest.mark.parametrize(
    ("folder", "name", "place", "revision"),
    [
        (CACHED, HUB, HUB, REVISION),
        ("hub/models--gpt2/snapshots/main", "gpt2", "gpt2", None),
        ("models/llama-3-8b", "llama-3-8b", None, None),
        (f"copies/llama/{REVISION}", "llama", None, None),
        (f"SmolLM2/snapshots/{REVISION}", "SmolLM2", None, None),
    ],
)
def test_a_base_has_the_name_that_people_know_it_by(tmp_path, folder, name, place, revision):
    path = tmp_path / folder
    assert find_base_model_name(path) == BaseModelName(name, place or str(path), revision)


def test_a_base_behind_a_link_has_the_links_name_or_the_hubs(tmp_path, monkeypatch):
    for folder in (CACHED, f"store/{REVISION}"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "mine").symlink_to(tmp_path / f"store/{REVISION}")
    (tmp_path / "cached").symlink_to(tmp_path / CACHED)
    assert find_base_model_name(tmp_path / "mine") == BaseModelName("mine", str(tmp_path / "mine"))
    assert find_base_model_name(tmp_path / "cached") == BaseModelName(HUB, HUB, REVISION)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert find_base_model_name(Path()).name == "here"


def test_exports_name_a_base_of_the_hubs_cache_as_the_hub_does(tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed")
    import gguf

    base = tmp_path / CACHED
    write_tiny_model(base)
    trained(base, LORA, tmp_path / "step")
    for write, name in ((export_adapter, "adapter"), (export_gguf, "gguf")):
        out = write(tmp_path / "step", LORA, base, tmp_path / name)
        card = (out / "README.md").read_text()
        assert "base_model: HuggingFaceTB/SmolLM2-135M\n" in card
        assert REVISION not in card
    config = config_of(tmp_path / "adapter")
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M"
    assert config["revision"] == REVISION
    fields = gguf.GGUFReader(tmp_path / "gguf" / "model.gguf").fields
    assert fields["general.name"].contents() == "SmolLM2-135M"


def test_a_merge_that_fp16_cannot_hold_is_refused_by_name_and_written_as_bf16(tmp_path):
    base, tune = tmp_path / "base", TuneConfig(rank=4, alpha=1e9)
    write_llama(base, torch.float16)
    trained(base, tune, tmp_path / "step")
    said = (
        r"proj.weight cannot be merged: its value at \[0, \d+\] would be -?inf in float16.*--dtype"
    )
    with pytest.raises(CheckpointError, match=said):
        export_merged(tmp_path / "step", tune, base, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    out = export_merged(tmp_path / "step", tune, base, tmp_path / "out", dtype=torch.bfloat16)
    merged = read_all(out)
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in merged.values())
    assert max(tensor.abs().max().item() for tensor in merged.values()) > 65504
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert stock(out, torch.bfloat16).dtype == torch.bfloat16


def test_trained_weights_that_fp16_cannot_hold_are_refused_by_name(tmp_path):
    write_llama(tmp_path / "base", torch.float16)
    write_llama(tmp_path / "wide", torch.float32)
    name = "model.layers.1.mlp.up_proj.weight"
    for file in (tmp_path / "wide").glob("*.safetensors"):
        if name in (tensors := load_file(file)):
            tensors[name][3, 2] = 1e5
            save_file(tensors, file)
    trained(tmp_path / "wide", METHODS["full"], tmp_path / "step")
    with pytest.raises(CheckpointError, match=rf"{name} .* \[3, 2\] would be inf in float16"):
        export_merged(tmp_path / "step", METHODS["full"], tmp_path / "base", tmp_path / "out")


def test_a_merged_model_says_nothing_of_how_its_base_was_quantized(tmp_path):
    """A server would look for scales: ModelOpt's file, a part's settings, older names of both."""
    base, settings = tmp_path / "base", {"quant_method": "fp8"}
    stored(base, "tensor", settings, "_scale")
    config = json.loads((base / "config.json").read_text())
    config |= {"compression_config": settings, "part": {"quantization_config": settings, "n": 1}}
    (base / "config.json").write_text(json.dumps(config))
    for name in ("hf_quant_config.json", "quantize_config.json"):
        (base / name).write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    ours = trained(base, LORA, tmp_path / "step")
    out = export_merged(tmp_path / "step", LORA, base, tmp_path / "out")
    text = "".join(file.read_text() for file in out.glob("*.json"))
    assert not re.search("quant_|quantization|compression", text)
    assert json.loads((out / "config.json").read_text())["part"] == {"n": 1}
    assert (logits(stock(out)) - logits(ours)).abs().max() < 0.05 * logits(ours).abs().max()  # bf16
