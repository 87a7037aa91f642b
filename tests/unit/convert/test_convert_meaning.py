"""What would be another training is refused; what changes the meaning of one is marked."""

import json
import shlex
import subprocess
import sys

import pytest
import torch
from transformers import get_scheduler

from hpc_tune.config.optim import OptimConfig
from hpc_tune.convert import convert as command
from hpc_tune.engine.adamw import learning_rate
from hpc_tune.errors import ConfigError
from tests.support.converting import (
    AXOLOTL_DPO,
    AXOLOTL_KTO,
    AXOLOTL_LORA,
    AXOLOTL_ORPO,
    FACTORY_DPO,
    FACTORY_KTO,
    FACTORY_LORA,
    TUNE_LORA,
    line_of,
    on_four_ranks,
    settings,
    theirs,
)


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (FACTORY_LORA, {"stage": "pt", "image_max_pixels": None, "pref_beta": 0.1}),
        (FACTORY_LORA, {"template": "qwen3_nothink"}),
        (AXOLOTL_LORA, {"rl": None, "reward_model": False, "kd_trainer": False}),
        (AXOLOTL_LORA, {"rl": False, "trl": {"beta": 0.1}}),
        (TUNE_LORA, {"model___component_": "torchtune.models.llama3_2.lora_llama3_2_1b"}),
    ],
)
def test_what_is_switched_off_refuses_nothing(text, changes):
    assert command.convert_config(theirs(text, **changes), 1).tool


@pytest.mark.parametrize("name", ["alpaca_dataset", "alpaca_cleaned_dataset"])
def test_that_alpacas_preamble_is_lost_is_said_and_starred(name):
    for files in ("/data/a.json", None):
        changes = {"dataset___component_": f"torchtune.datasets.{name}"}
        changes |= {"dataset__source": None} if files is None else {}
        converted = command.convert_config(
            theirs(TUNE_LORA, dataset__data_files=files, **changes), 1
        )
        line = line_of(converted.unsupported_keys, "dataset._component_")
        assert "Below is an instruction" in line
        assert line in converted.to_do


def test_a_remark_is_said_once_with_all_its_keys():
    changes = {"logging_steps": 10, "plot_loss": True, "use_galore": True, "galore_rank": 128}
    changes |= {"cache_dir": None, "tokenized_path": None, "other_key": None}
    converted = command.convert_config(theirs(FACTORY_LORA, **changes), 2)
    assert "logging_steps, plot_loss: metrics.jsonl" in line_of(converted.ignored_keys, "plot_loss")
    assert line_of(converted.unsupported_keys, "use_galore").startswith(
        "use_galore = true, galore_rank = 128:"
    )
    for group in (converted.mapped_keys, converted.ignored_keys, converted.unsupported_keys):
        remarks = [line.remark for line in group]
        assert len(remarks) == len(set(remarks))
    titles = [line for line in command.format_report(converted, ()) if line.endswith(")")]
    number = sum(len(line.keys) for line in converted.ignored_keys)
    assert f"decided by hpc_tune itself ({number})" in titles
    assert number > len(converted.ignored_keys)


RECORDS = [{"text": f"{number}: ü\u2028\n[x]"} for number in range(40)]


@pytest.mark.parametrize("is_array", [True, False], ids=["array", "lines"])
@pytest.mark.parametrize(
    ("text", "changes", "key", "kept"),
    [
        (FACTORY_LORA, {"max_samples": 7}, "max_samples", slice(7)),
        (FACTORY_LORA, {"max_samples": 70}, "max_samples", slice(70)),
        (TUNE_LORA, {"dataset__split": "train[:5%]"}, "dataset.split", slice(2)),
        (TUNE_LORA, {"dataset__split": "train[10:30]"}, "dataset.split", slice(10, 30)),
        (AXOLOTL_LORA, {"shards": 4, "shards_idx": 1}, "datasets.0.shards", slice(1, None, 4)),
        (AXOLOTL_LORA, {"skip": 3}, "datasets.0.skip", slice(3, None)),
    ],
)
def test_the_command_for_a_part_of_the_data_gives_it(tmp_path, text, changes, key, kept, is_array):
    data = tmp_path / "my data.json"
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)
    data.write_text(json.dumps(RECORDS, indent=2) if is_array else lines, encoding="utf-8")
    if text == AXOLOTL_LORA:
        changes = {"datasets": [{"path": str(data), "type": "completion", **changes}]}
    elif text == TUNE_LORA:
        changes = {"dataset__data_files": str(data), **changes}
    line = line_of(command.convert_config(theirs(text, **changes), 1).unsupported_keys, key)
    shown = line[line.index("python -c") : line.index(" > part.jsonl")]
    shown = shown.replace(" FILE", f" {shlex.quote(str(data))}")
    shown = shown.replace("python", shlex.quote(sys.executable), 1)
    done = subprocess.run(["sh", "-c", shown], capture_output=True, check=True, timeout=60)
    got = [json.loads(row) for row in done.stdout.decode().split("\n") if row]
    assert got == RECORDS[kept]


@pytest.mark.parametrize(("split", "part"), [("train[:5%]", ":round(their number*5/100)")])
def test_a_part_of_a_file_of_another_kind_is_named_without_a_command(split, part):
    changes = {"dataset__data_files": "/d/a.parquet", "dataset__split": split}
    line = line_of(
        command.convert_config(theirs(TUNE_LORA, **changes), 1).unsupported_keys, "dataset.split"
    )
    assert f"write records {part} of /d/a.parquet" in line
    assert "python -c" not in line


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (TUNE_LORA, {"dataset__split": "train[:95%]"}),
        (
            TUNE_LORA,
            {"dataset__split": "train[:95%]"}
            | {"dataset_val": {"_component_": "torchtune.datasets.chat_dataset"}}
            | {"dataset_val__source": "json", "dataset_val__data_files": "/data/chats.jsonl"}
            | {"dataset_val__split": "train[95%:]", "run_val_every_n_steps": 9},
        ),
        (
            AXOLOTL_LORA,
            {"datasets": [{"path": "/d/a.jsonl", "split": "train[:95%]"}]}
            | {"val_set_size": None, "eval_steps": None},
        ),
    ],
)
def test_a_part_that_leaves_a_rest_is_what_eval_fraction_does(text, changes):
    converted = command.convert_config(theirs(text, **changes), 1)
    came = settings(converted)
    assert came["data.eval_fraction"] == 0.05
    assert came["data.path"].startswith("/d")
    assert came.get("data.eval_path") is None
    assert came.get("train.eval_every_steps") == changes.get("run_val_every_n_steps")
    assert not any("split" in note for note in converted.to_do)


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_the_last_step_of_a_run_of_known_length_has_their_rate(name):
    length = {"max_steps": 60, "warmup_steps": 10, "warmup_ratio": None}
    came = on_four_ranks(FACTORY_LORA, {"lr_scheduler_type": name, **length})
    optim = OptimConfig(
        **{key.removeprefix("optim."): v for key, v in came.items() if key.startswith("optim.")}
    )
    adamw = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1e-4)
    theirs_of = get_scheduler(name, adamw, 10, 60)
    rates = []
    for _ in range(60):
        rates.append(theirs_of.get_last_lr()[0])
        adamw.step()
        theirs_of.step()
    ours = [learning_rate(optim, step, 60) for step in range(60)]
    assert ours[-1] == pytest.approx(rates[-1], rel=1e-3)
    assert ours[-1] > 0
    if name == "linear":  # the same line, from the top of the warm-up on
        assert ours[10:] == pytest.approx(rates[10:], rel=1e-3)


def directory(folder, names, is_indexed):
    folder.mkdir()
    weights = {f"model.layers.0.part.{name}.weight": "a.safetensors" for name in names}
    weights |= {"model.embed_tokens.weight": "a.safetensors", "model.norm.weight": "b"}
    if is_indexed:
        text = json.dumps({"weight_map": weights})
        (folder / "model.safetensors.index.json").write_text(text)
    else:
        header = json.dumps({name: {"dtype": "F32"} for name in weights}).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return str(folder)


@pytest.mark.parametrize("is_indexed", [True, False])
@pytest.mark.parametrize(
    ("text", "key", "model"),
    [
        (FACTORY_LORA, "lora_target", "model_name_or_path"),
        (TUNE_LORA, "model.lora_attn_modules", "checkpointer__checkpoint_dir"),
        (AXOLOTL_LORA, "lora_target_modules", "base_model"),
    ],
)
def test_targets_that_the_model_does_not_have_are_named(tmp_path, text, key, model, is_indexed):
    fused = directory(tmp_path / "fused", ["qkv_proj", "o_proj"], is_indexed)
    changes = {key.replace(".", "__"): ["q_proj", "v_proj"]}
    converted = command.convert_config(theirs(text, **changes, **{model: fused}), 1)
    line = line_of(converted.unsupported_keys, key)
    assert "has no layers q_proj, v_proj" in line
    assert "some of lm_head, o_proj, qkv_proj" in line
    assert line in converted.to_do
    plain = directory(tmp_path / "plain", ["q_proj", "k_proj", "v_proj"], is_indexed)
    came = on_four_ranks(text, {**changes, model: plain})
    assert came["tune.targets"] == ["q_proj", "v_proj"]


def test_config_json_tells_the_layers_where_there_are_no_weights(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "phi3"}')
    changes = {"model_name_or_path": str(tmp_path)}
    line = line_of(
        command.convert_config(theirs(FACTORY_LORA, **changes), 1).unsupported_keys, "lora_target"
    )
    assert "gate_up_proj" in line
    (tmp_path / "config.json").write_text('{"model_type": "of my own"}')
    assert on_four_ranks(FACTORY_LORA, changes)["tune.targets"] == ["q_proj", "v_proj"]


def test_layers_that_a_builder_splits_and_the_files_do_not_are_one_target():
    changes = {"model___component_": "torchtune.models.phi3.lora_phi3_mini"}
    changes |= {"model__lora_attn_modules": ["q_proj", "v_proj"]}
    converted = command.convert_config(theirs(TUNE_LORA, **changes), 1)
    assert settings(converted)["tune.targets"] == ["qkv_proj"]
    line = line_of(converted.mapped_keys, "model.lora_attn_modules")
    assert "one adapter" in line
    assert "k_proj" in line
    assert line in converted.to_do


def test_what_is_neither_told_nor_known_is_named_once():
    converted = command.convert_config(theirs(TUNE_LORA, checkpointer__checkpoint_dir=None), 1)
    missing = f"model.path: replace {command.PLACEHOLDER}, since their config does not say it"
    assert converted.further_notes == (missing,)
    with pytest.raises(ConfigError, match="expected a training config"):
        command.convert_config({"policy_model": "x"}, 1)


def test_what_is_learned_from_text_alone_is_taken_over():
    text = theirs(AXOLOTL_LORA, datasets=None, max_steps=9)
    dataset = {"path": "/data/books", "text_column": "body"}
    for text["pretraining_dataset"] in (dataset, [dataset]):
        came = settings(command.convert_config(text, 4))
        assert (came["data.path"], came["data.columns"]) == ("/data/books", {"body": "text"})


def test_a_secret_in_a_config_is_not_printed():
    converted = command.convert_config(theirs(AXOLOTL_LORA, comet_api_key="s3cret"), 1)
    assert "s3cret" not in "\n".join(command.format_report(converted, converted.to_do))
    assert line_of(converted.unsupported_keys, "comet_api_key") is not None


def test_data_held_out_twice_is_one_message():
    changes = {"test_datasets": [{"path": "held.jsonl"}]}
    with pytest.raises(ConfigError, match="both say what is held out"):
        command.convert_config(theirs(AXOLOTL_LORA, **changes), 1)


@pytest.mark.parametrize(
    ("text", "changes", "key", "is_starred"),
    [
        (FACTORY_DPO, {"adapter_name_or_path": "./sft"}, "adapter_name_or_path", True),
        (
            FACTORY_DPO,
            {"adapter_name_or_path": "./sft", "ref_model_adapters": "./sft"},
            "adapter_name_or_path",
            False,
        ),
        (
            FACTORY_DPO,
            {"adapter_name_or_path": "./sft", "pref_loss": "simpo"},
            "adapter_name_or_path",
            False,
        ),
        (AXOLOTL_DPO, {"lora_model_dir": "./sft"}, "lora_model_dir", True),
        (AXOLOTL_ORPO, {"lora_model_dir": "./sft"}, "lora_model_dir", False),
    ],
)
def test_that_a_first_adapter_belongs_to_the_reference_here_is_said(text, changes, key, is_starred):
    converted = command.convert_config(theirs(text, **changes), 1)
    line = line_of(converted.mapped_keys, key)
    assert ("the reference is the model with this adapter" in line) is is_starred
    assert (line in converted.to_do) is is_starred
    assert settings(converted)["tune.init_from"] == "./sft"


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        (FACTORY_DPO, "cutoff_len", "both answers of a pair"),
        (FACTORY_KTO, "stage", "KL is taken over the whole step"),
        (AXOLOTL_KTO, "rl", "KL is taken over the whole step"),
    ],
)
def test_where_a_value_means_something_else_it_is_said(text, key, words):
    assert words in line_of(command.convert_config(theirs(text), 1).mapped_keys, key)
    others = command.convert_config(theirs(FACTORY_DPO, pref_ftx=0.1), 1)
    assert line_of(others.mapped_keys, "pref_ftx").endswith("tune.sft_weight = 0.1")  # the same


def test_what_they_add_by_default_is_written_out():
    converted = command.convert_config(theirs(AXOLOTL_DPO, rl="simpo"), 1)
    assert "micro-batch" in line_of(converted.mapped_keys, "cpo_alpha")
    assert "(their default)" in line_of(converted.mapped_keys, "simpo_gamma")


@pytest.mark.parametrize(
    ("text", "method", "key", "value"),
    [
        (text, method, key, value)
        for texts, methods, keys in (
            (
                (FACTORY_DPO, FACTORY_KTO, FACTORY_DPO.replace("stage: dpo", "stage: sft")),
                ({"finetuning_type": "lora"}, {"finetuning_type": "full"}),
                {"additional_target": "embed_tokens"},
            ),
            (
                (AXOLOTL_DPO, AXOLOTL_ORPO, AXOLOTL_KTO),
                (
                    {"adapter": "qlora"},
                    {"adapter": "lora", "load_in_4bit": None},
                    {"adapter": None},
                ),
                {"lora_modules_to_save": ["embed_tokens"], "peft_trainable_token_indices": [5]},
            ),
        )
        for text in texts
        for method in methods
        for key, value in keys.items()
    ],
)
def test_what_is_trained_beside_adapters_is_left_out_without_them(text, method, key, value):
    is_full = method in ({"finetuning_type": "full"}, {"adapter": None})
    converted = command.convert_config(theirs(text, **method, **{key: value}), 1)
    names = {"tune.modules_to_save", "tune.trainable_tokens"} & settings(converted).keys()
    assert len(names) == (not is_full)
    where = converted.ignored_keys if is_full else converted.mapped_keys
    assert line_of(where, key) is not None
