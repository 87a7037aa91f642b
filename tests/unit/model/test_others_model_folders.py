"""Model folders as other tools leave them: weights twice, an adapter inside, wrapped names."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hpc_tune.checkpoint.export import copy_tokenizer, export_merged
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import DataError
from hpc_tune.model.build import build
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.language import read_config, read_language_config
from hpc_tune.model.tokenizer import load_tokenizer
from hpc_tune.model.weights import SHARD_INDEX_FILE, index_model_directory
from hpc_tune.train.data import describe_unknown_stop_token
from hpc_tune.train.model import prepare_model_dir
from tests.support.training import give_manifest

FULL = TuneConfig(method="full")
NORM = "model.norm.weight"


@pytest.fixture
def model(tmp_path):
    write_tiny_model(tmp_path / "model")
    return tmp_path / "model"


def shards(model, *files):
    """Write files of tensors beside what there is, and their index."""
    weight_map = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        save_file(tensors, model / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
    text = json.dumps({"metadata": {}, "weight_map": weight_map})
    (model / SHARD_INDEX_FILE).write_text(text)


def read_norm(index):
    values = torch.empty(index.shapes[NORM])
    index.fill(values, NORM)
    return values


def stock_norm(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).model.norm.weight.data


def test_of_a_whole_file_and_shards_the_one_that_transformers_loads_is_read_and_the_other_named(
    model,
):
    shards(
        model,
        {n: torch.full_like(t, 0.5) for n, t in load_file(model / "model.safetensors").items()},
    )
    built = build(model, torch.float32, FULL, 0)
    assert torch.equal(read_norm(built.index), stock_norm(model))
    assert read_norm(built.index).unique().tolist() == [1.0]
    assert SHARD_INDEX_FILE in " ".join(built.unused_parts)


def test_an_index_that_names_the_whole_file_leaves_nothing_unread(model):
    names = load_file(model / "model.safetensors")
    text = json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")})
    (model / SHARD_INDEX_FILE).write_text(text)
    index = index_model_directory(model)
    assert index.ignored_weights == ()
    assert index.shapes.keys() == names.keys()


def test_a_tensor_in_two_shards_is_the_one_that_transformers_takes(model):
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    shards(model, tensors, {NORM: tensors[NORM] + 2})
    assert torch.equal(read_norm(index_model_directory(model)), stock_norm(model))


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "base_model.model."])
def test_names_behind_what_was_put_around_the_model_are_told(model, prefix):
    tensors = load_file(model / "model.safetensors")
    save_file(
        {prefix + name: tensor for name, tensor in tensors.items()}, model / "model.safetensors"
    )
    with pytest.raises(
        DataError, match=rf"{prefix}model\.\S+ is there: the model was saved inside a wrapper"
    ):
        build(model, torch.float32, FULL, 0)


def test_weights_in_another_form_are_named(model):
    (model / "model.safetensors").rename(model / "consolidated.safetensors")
    with pytest.raises(DataError, match=r"consolidated.safetensors is not in transformers' form"):
        index_model_directory(model)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "adapter_config.json",
            '{"base_model_name_or_path": "org/base"}',
            "an adapter of org/base",
        ),
        ("adapter_config.json", "{}", "an adapter of its base"),
        ("model-Q4_K_M.gguf", "GGUF", "GGUF files are not read"),
        ("notes.txt", "", "is it a model directory?"),
    ],
)
def test_a_folder_without_a_config_says_what_it_is(tmp_path, name, text, said):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match="no config.json in it") as refused:
        read_config(tmp_path)
    assert said in str(refused.value)


def test_a_model_beside_which_an_adapter_lies_is_refused(model):
    save_file({"a": torch.ones(1)}, model / "adapter_model.safetensors")
    (model / "adapter_config.json").write_text("{}")
    with pytest.raises(DataError, match="an adapter is in the folder too"):
        prepare_model_dir(str(model), None, model)


def test_a_merged_model_needs_neither_code_nor_an_adapter_of_its_base(model, tmp_path):
    tokens_BT = torch.arange(5, 15).unsqueeze(0)
    config = json.loads((model / "config.json").read_text())
    code = {"AutoConfig": "configuration_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    (model / "config.json").write_text(json.dumps(config | {"auto_map": code}))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    auto = {"auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(settings | auto))
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "/nowhere"}')
    odd = '{"do_sample": false, "temperature": 0.9}'  # save_pretrained refuses to write it
    (model / "generation_config.json").write_text(odd)
    (tmp_path / "step").mkdir()
    shutil.copy(model / "model.safetensors", tmp_path / "step" / "rank-00000.safetensors")
    give_manifest(tmp_path / "step")
    out = export_merged(tmp_path / "step", FULL, model, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.float32)
    assert loaded(tokens_BT).logits.isfinite().all()
    assert (out / "generation_config.json").read_text() == odd
    copy_tokenizer(model, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == settings


def test_a_window_in_which_no_token_sees_any_is_refused(model):
    config = json.loads((model / "config.json").read_text())
    for window in (0, -1):
        odd = config | {"model_type": "mistral", "sliding_window": window}
        (model / "config.json").write_text(json.dumps(odd))
        with pytest.raises(DataError, match=f"sliding_window is {window}.*write null"):
            read_language_config(model)


def test_answers_that_end_where_no_other_tool_stops_are_told(model):
    tokenizer = load_tokenizer(model)
    end = tokenizer.eos_token_id
    config = json.loads((model / "config.json").read_text())
    assert describe_unknown_stop_token(tokenizer, model) is None
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end - 1)
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": end - 1}))
    why = describe_unknown_stop_token(tokenizer, model)
    assert why is not None
    assert f"{tokenizer.convert_ids_to_tokens(end)}, {end}, to eos" in why
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [end - 1, end]}))
    assert describe_unknown_stop_token(tokenizer, model) is None


def test_whole_numbers_whose_scale_nothing_names_are_no_weights(model):
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = (100 * tensors[name]).to(torch.int8)
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(DataError, match=rf"quantized \(an unknown method, such as in {name}\)"):
        index_model_directory(model)


def test_the_mark_that_some_editors_put_before_a_template_is_not_learned(model, tmp_path):
    own = load_tokenizer(model).chat_template
    (tmp_path / "chat.jinja").write_text(own, encoding="utf-8-sig")
    assert load_tokenizer(model, str(tmp_path / "chat.jinja")).chat_template == own
