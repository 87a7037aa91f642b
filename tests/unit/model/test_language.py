"""Language models that are a part of a model for images, too: beside transformers' whole models."""

import json
import re
import shutil

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from hpc_tune.checkpoint.export import export_adapter, export_merged
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import DataError
from hpc_tune.model.build import build
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.language import auto_model_class, read_config, read_language_config
from hpc_tune.model.load import (
    allocate,
    load_trained_parameters,
    load_weights,
    use_init_adapter,
    use_whole_model_names,
)
from hpc_tune.model.stock_reference import write_small_model
from hpc_tune.model.weights import index_checkpoint
from tests.support.mixtures import write_mixture
from tests.support.older_transformers import since, skip_without
from tests.unit.checkpoint.test_export import METHODS, trained
from tests.unit.model.test_model_build import loaded, our_loss, row, stock_loss

SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
KINDS = {
    "gemma3": {},
    "gemma4": {},  # without images; a linear layer lies beside its blocks
    "mistral3": {},  # a head of its own, though config.json says tied
    "qwen2_5_vl": {"text_config": {"rope_parameters": SECTIONS}},
    "qwen3_5": {},  # of text alone, which transformers has a class for
    "qwen3_5-whole": {"architectures": ["Qwen3_5ForConditionalGeneration"]},  # as it is published
    "llama4-whole": {"architectures": ["Llama4ForConditionalGeneration"]},
    "nemotron_h_omni": {},  # its language model is with its head one part
    "smolvlm": {},
}


@pytest.fixture(scope="module", params=KINDS)
def base(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    kind = request.param.removesuffix("-whole")
    skip_without(kind)
    write_small_model(AutoConfig.for_model(kind, **KINDS[request.param]), folder)
    is_whole = "architectures" in KINDS[request.param]
    assert not is_whole or any("visi" in name or "visual" in name for name in stored(folder))
    write_tiny_model(folder / "tiny")
    for file in (folder / "tiny").glob("tokenizer*"):
        shutil.copyfile(file, folder / file.name)
    return folder


def stored(directory):
    return {n: t for file in directory.glob("*.safetensors") for n, t in load_file(file).items()}


def stock(directory, like=None):
    config = read_config(like or directory)
    named = (config.architectures or [""])[0]
    auto = getattr(transformers, named) if named else auto_model_class(config)
    return auto.from_pretrained(directory, dtype=torch.float32).eval()


def docs():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 256, (length,), generator=generator) for length in (9, 20)]


def near(a, b):
    return abs(a - b) <= 1e-5 * abs(b)


def both_losses(module, model):
    return [sum(our_loss(module, row(one)) for one in docs()), stock_loss(model, docs())]


def test_the_loss_is_that_of_the_whole_model(base):
    ours, wanted = both_losses(loaded(base).module, stock(base))
    assert near(ours, wanted)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_what_is_merged_is_the_whole_model_with_its_other_parts_as_they_were(
    base, tmp_path, method
):
    module = trained(base, METHODS[method], tmp_path / "step")
    out = export_merged(tmp_path / "step", METHODS[method], base, tmp_path / "out")
    ours, merged = both_losses(module, stock(out, base))
    assert near(ours, merged)
    assert not near(ours, stock_loss(stock(base), docs()))
    before, after = stored(base), stored(out)
    assert before.keys() == after.keys()
    unused_parts = [name for name in before if "vision" in name or "visual" in name]
    assert unused_parts or re.search("qwen3_5|gemma4", str(base))
    assert all(torch.equal(before[name], after[name]) for name in unused_parts)


def test_an_adapter_fits_the_whole_model_and_changes_its_language_model_alone(base, tmp_path):
    module = trained(base, METHODS["lora"], tmp_path / "step")
    out = export_adapter(tmp_path / "step", METHODS["lora"], base, tmp_path / "adapter")
    wrapped = PeftModel.from_pretrained(stock(base), out).eval()
    ours, theirs = both_losses(module, wrapped)
    assert near(ours, theirs)
    adapted = {name for name, _ in wrapped.named_parameters() if "lora_A" in name}
    saved = {name for name in load_file(out / "adapter_model.safetensors") if "lora_A" in name}
    assert {name.replace(".default", "") for name in adapted} == saved
    targets = json.loads((out / "adapter_config.json").read_text())["target_modules"]
    assert isinstance(targets, list), "SGLang takes no pattern"


def test_an_adapter_of_a_language_model_by_itself_is_where_training_begins(tmp_path):
    """As the Trainer saves it of Qwen3.5, which it loads without the part for images."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    write_small_model(AutoConfig.for_model("qwen3_5", **KINDS["qwen3_5-whole"]), base)
    module = trained(base, METHODS["lora"], tmp_path / "step")
    export_adapter(tmp_path / "step", METHODS["lora"], base, adapter)
    file = adapter / "adapter_model.safetensors"
    alone = {name.replace(".language_model.", "."): t for name, t in load_file(file).items()}
    assert any(name.startswith("base_model.model.model.layers.0.") for name in alone)
    save_file(alone, file, metadata={"format": "pt"})
    built = use_init_adapter(build(base, torch.float32, METHODS["lora"], 0), adapter)
    allocate(built.module, torch.device("cpu"))
    load_weights(built)
    tokens = row(docs()[1])
    assert near(our_loss(built.module.eval(), tokens), our_loss(module, tokens))


def test_a_checkpoint_of_before_its_model_was_a_part_of_a_whole_is_read(tmp_path):
    base, step = tmp_path / "base", tmp_path / "step"
    base.mkdir()
    write_small_model(AutoConfig.for_model("qwen3_5", **KINDS["qwen3_5-whole"]), base)
    module = trained(base, METHODS["lora"], step)
    now = export_merged(step, METHODS["lora"], base, tmp_path / "now")
    for file in step.glob("rank-*.safetensors"):
        raw = file.read_bytes()
        stop = 8 + int.from_bytes(raw[:8], "little")
        header = raw[8:stop].replace(b".language_model.", b".")
        assert len(header) < stop - 8
        file.write_bytes(raw[:8] + header.ljust(stop - 8) + raw[stop:])
    built = build(base, torch.float32, METHODS["lora"], 0)
    allocate(built.module, torch.device("cpu"))
    load_weights(built)
    load_trained_parameters(built, step)
    wanted = dict(module.named_parameters())
    assert all(torch.equal(p, wanted[n]) for n, p in built.module.named_parameters())
    index = use_whole_model_names(index_checkpoint(step), built.names)
    index.require(f"exp_avg.{name}" for name in built.saved_names.values())
    then = stored(export_merged(step, METHODS["lora"], base, tmp_path / "then"))
    assert all(torch.equal(tensor, then[name]) for name, tensor in stored(now).items())


def test_what_is_left_as_it_is_is_named(base):
    built = build(base, torch.float32, TuneConfig(), 0)
    kind = json.loads((base / "config.json").read_text())["model_type"]
    wanted = {
        "gemma3": {"vision_tower", "multi_modal_projector"},
        "gemma4": set(),
        "mistral3": {"vision_tower", "multi_modal_projector"},
        "llama4": {"vision_model", "multi_modal_projector"},
        "nemotron_h_omni": {"vision_model", "mlp1"},
        "qwen2_5_vl": {"visual"},
        "qwen3_5": {"visual"},
        "qwen3_5_text": set(),
        "smolvlm": {"vision_model", "connector"},
    }
    named = {part.partition(" (")[0].rpartition(".")[2] for part in built.unused_parts}
    assert named == wanted[kind]


@pytest.mark.parametrize("alike", [True, False])
def test_a_head_that_is_stored_beside_its_embedding_is_tied_if_it_is_the_same(tmp_path, alike):
    """transformers does so; a head of its own would be lost in silence."""
    (tmp_path / "base").mkdir()
    write_small_model(AutoConfig.for_model("gemma2"), tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    if not alike:  # in one row, as of a token that was added to the head alone
        head[300] += torch.randn(head[0].shape, generator=torch.Generator().manual_seed(1))
    save_file(tensors | {"lm_head.weight": head}, file, metadata={"format": "pt"})
    module = trained(tmp_path / "base", METHODS["full"], tmp_path / "step")
    ours, wanted = both_losses(loaded(tmp_path / "base").module, stock(tmp_path / "base"))
    assert near(ours, wanted)
    out = export_merged(tmp_path / "step", METHODS["full"], tmp_path / "base", tmp_path / "out")
    ours, merged = both_losses(module, stock(out))
    assert near(ours, merged)
    names = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert ("lm_head.weight" in names) is not alike


REFUSED = since("5.18", "refuses such a config.json")
NAMED = [pytest.param(named, marks=REFUSED) for named in (1, "LlamaForCausalLM", [1], {})]


@pytest.mark.parametrize("named", [*NAMED, []])
def test_classes_that_config_json_does_not_name_as_a_list_are_not_looked_at(tmp_path, named):
    write_tiny_model(tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": named}))
    trained(tmp_path / "base", METHODS["lora"], tmp_path / "step")
    export_adapter(tmp_path / "step", METHODS["lora"], tmp_path / "base", tmp_path / "out")
    assert "AutoModelForCausalLM" in (tmp_path / "out" / "README.md").read_text()


def test_a_model_for_sound_is_refused_by_name(tmp_path):
    AutoConfig.for_model("qwen2_audio").save_pretrained(tmp_path)
    with pytest.raises(DataError, match="a qwen2_audio model has parts for other things than text"):
        read_language_config(tmp_path)


@pytest.mark.parametrize("part", [None, "text_config"])
@pytest.mark.parametrize("name", ["num_hidden_layers", "num_experts"])
def test_a_model_that_would_take_for_ever_to_make_is_refused(tmp_path, part, name):
    """A damaged number: transformers makes one layer after the other until memory is full."""
    said = {name: 10**9} if part is None else {part: {name: 10**9}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **said}))
    with pytest.raises(DataError, match=f"{name}=1,000,000,000, and no model has more than 10,000"):
        read_config(tmp_path)


def test_blocks_behind_the_last_one_are_named_by_their_number(tmp_path):
    """DeepSeek-V3's and GLM-4.5's files end with one that predicts a second token."""
    base = write_mixture("deepseek_v3", tmp_path / "base")
    file = base / "model.safetensors"
    tensors = load_file(file)
    last = max(int(name.split(".")[2]) for name in tensors if ".layers." in name)
    further = {
        name.replace(f".layers.{last}.", f".layers.{last + 1}."): tensor.clone()
        for name, tensor in tensors.items()
        if f".layers.{last}." in name
    }
    save_file(tensors | further | {"mtp.fc.weight": torch.ones(2, 2)}, file)
    built = build(base, torch.float32, TuneConfig(), 0)
    assert built.unused_parts == (
        f"model.layers.{last + 1} ({len(further)} tensors)",
        "mtp (1 tensors)",
    )
