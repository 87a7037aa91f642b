"""What would be another training is refused; what changes the meaning of one is marked."""

import json
import shlex
import subprocess
import sys

import pytest
import torch
import yaml
from transformers import get_scheduler

from hpc_tune import cli
from hpc_tune.config.optim import OptimConfig
from hpc_tune.convert import convert as command
from hpc_tune.engine.adamw import learning_rate
from hpc_tune.errors import EXIT_USER, ConfigError
from tests.support.converting import line_of, on_four_ranks, settings, theirs

FACTORY = """
model_name_or_path: /models/m
stage: sft
finetuning_type: lora
lora_target: q_proj, v_proj
dataset: mine
template: mine
learning_rate: 1.0e-4
max_steps: 60
lr_scheduler_type: cosine
warmup_steps: 10
"""
TUNE = """
model: {_component_: torchtune.models.mistral.lora_mistral_7b, lora_attn_modules: [q_proj, v_proj]}
tokenizer: {_component_: torchtune.models.mistral.mistral_tokenizer, max_seq_len: 256}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: /models/m}
dataset:
  _component_: torchtune.datasets.chat_dataset
  source: json
  data_files: /data/chats.json
batch_size: 2
optimizer: {_component_: torch.optim.AdamW, lr: 1e-4}
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
epochs: 1
"""
AXOLOTL = """
base_model: /models/m
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_modules: [q_proj, v_proj]
datasets: [{path: /data/chats.jsonl, type: chat_template}]
learning_rate: 1e-4
"""
REWARDS, TEACHER, IMAGES = "training on rewards", "distillation", "images, sound or video"
LOSS, NO_LOSS = "a loss on preferences with no counterpart", "whose loss the config does not name"


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        *((FACTORY, {"stage": stage}, REWARDS) for stage in ("rm", "ppo")),
        *((FACTORY, {"stage": "dpo", "pref_loss": f}, LOSS) for f in ("hinge", "kto_pair")),
        (FACTORY, {"stage": "dpo", "pref_bco_weight": 0.5}, LOSS),
        (FACTORY, {"template": "qwen2_vl"}, IMAGES),
        (FACTORY, {"template": "llava"}, IMAGES),
        (FACTORY, {"image_max_pixels": 262144}, IMAGES),
        (FACTORY, {"media_dir": "pictures"}, IMAGES),
        (TUNE, {"loss___component_": "torchtune.rlhf.loss.RSOLoss"}, LOSS),
        (TUNE, {"loss___component_": "torchtune.rlhf.loss.IPOLoss"}, LOSS),
        (TUNE, {"loss___component_": "torchtune.rlhf.loss.PPOLoss"}, REWARDS),
        (TUNE, {"dataset___component_": "torchtune.datasets.preference_dataset"}, NO_LOSS),
        (TUNE, {"kd_ratio": 0.5}, TEACHER),
        (TUNE, {"teacher_model": {"_component_": "t.mistral.mistral_7b"}}, TEACHER),
        (TUNE, {"model___component_": "torchtune.models.llama3_2_vision.big"}, IMAGES),
        (TUNE, {"dataset___component_": "torchtune.datasets.multimodal.vqa_dataset"}, IMAGES),
        (TUNE, {"model": None, "policy_model": {"_component_": "t.mistral_7b"}}, REWARDS),
        *((AXOLOTL, {"rl": kind}, REWARDS) for kind in ("grpo", "gdpo", "ebft")),
        *((AXOLOTL, {"rl": "dpo", "dpo_loss_type": f}, LOSS) for f in ("hinge", ["bco_pair"])),
        (AXOLOTL, {"rl": "dpo", "reward_model": True}, REWARDS),
        (AXOLOTL, {"datasets": [{"path": "a.jsonl", "field_chosen": "good"}]}, NO_LOSS),
        (AXOLOTL, {"kd_trainer": True}, TEACHER),
        (AXOLOTL, {"plugins": ["axolotl.integrations.kd.KDPlugin"]}, TEACHER),
        (AXOLOTL, {"processor_type": "AutoProcessor"}, IMAGES),
        (AXOLOTL, {"plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"]}, "diffusion"),
    ],
)
def test_a_config_for_another_training_is_refused_in_one_message(
    tmp_path, capsys, text, changes, words
):
    source, out = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    source.write_text(yaml.safe_dump(theirs(text, **changes)))
    assert cli.main(["convert", str(source), "--out", str(out)]) == EXIT_USER
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert words in said.err
    assert "Stay with " in said.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (FACTORY, {"stage": "pt", "image_max_pixels": None, "pref_beta": 0.1}),
        (FACTORY, {"template": "qwen3_nothink"}),
        (AXOLOTL, {"rl": None, "reward_model": False, "kd_trainer": False}),
        (AXOLOTL, {"rl": False, "trl": {"beta": 0.1}}),
        (TUNE, {"model___component_": "torchtune.models.llama3_2.lora_llama3_2_1b"}),
    ],
)
def test_what_is_switched_off_refuses_nothing(text, changes):
    assert command.convert(theirs(text, **changes), 1).tool


@pytest.mark.parametrize(
    ("text", "changes", "key"),
    [
        (FACTORY, {}, "template"),
        (FACTORY, {"mask_history": True}, "mask_history"),
        (FACTORY, {"enable_thinking": False}, "enable_thinking"),
        (FACTORY, {"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        (FACTORY, {"use_galore": True}, "use_galore"),
        (FACTORY, {"optim": "adafactor"}, "optim"),
        (FACTORY, {"use_dft_loss": True}, "use_dft_loss"),
        (FACTORY, {"default_system": "You are."}, "default_system"),
        (FACTORY, {"pissa_init": True}, "pissa_init"),
        (FACTORY, {"disable_shuffling": True}, "disable_shuffling"),
        (FACTORY, {"resume_from_checkpoint": "saves/a"}, "resume_from_checkpoint"),
        (FACTORY, {"my_own_key": 3}, "my_own_key"),
        (TUNE, {"optimizer___component_": "torch.optim.SGD"}, "optimizer._component_"),
        (TUNE, {"tokenizer__prompt_template": "t.MyTemplate"}, "tokenizer.prompt_template"),
        (TUNE, {"dataset__new_system_prompt": "You are."}, "dataset.new_system_prompt"),
        (TUNE, {"quantizer": {"groupsize": 32}}, "quantizer.groupsize"),
        (TUNE, {"shuffle": False}, "shuffle"),
        (TUNE, {"dataset__filter_fn": "mine"}, "dataset.filter_fn"),
        (TUNE, {"my_own_key": 3}, "my_own_key"),
    ],
)
def test_a_key_that_changes_the_meaning_has_a_star(text, changes, key):
    converted = command.convert(theirs(text, **changes), 1)
    assert line_of(converted.left, key) in converted.to_do
    assert f"* {line_of(converted.left, key)}" in command.report_lines(converted, converted.to_do)


def test_text_that_no_template_writes_has_no_star_for_it():
    converted = command.convert(theirs(FACTORY, stage="pt"), 1)
    assert "no template" in line_of(converted.decided, "template")


@pytest.mark.parametrize("name", ["alpaca_dataset", "alpaca_cleaned_dataset"])
def test_that_alpacas_preamble_is_lost_is_said_and_starred(name):
    for files in ("/data/a.json", None):
        changes = {"dataset___component_": f"torchtune.datasets.{name}"}
        changes |= {"dataset__source": None} if files is None else {}
        converted = command.convert(theirs(TUNE, dataset__data_files=files, **changes), 1)
        line = line_of(converted.left, "dataset._component_")
        assert "Below is an instruction" in line
        assert line in converted.to_do


def test_a_remark_is_said_once_with_all_its_keys():
    changes = {"logging_steps": 10, "plot_loss": True, "use_galore": True, "galore_rank": 128}
    changes |= {"cache_dir": None, "tokenized_path": None, "other_key": None}
    converted = command.convert(theirs(FACTORY, **changes), 2)
    assert "logging_steps, plot_loss: metrics.jsonl" in line_of(converted.decided, "plot_loss")
    assert line_of(converted.left, "use_galore").startswith("use_galore = true, galore_rank = 128:")
    for group in (converted.taken, converted.decided, converted.left):
        remarks = [line.remark for line in group]
        assert len(remarks) == len(set(remarks))
    titles = [line for line in command.report_lines(converted, ()) if line.endswith(")")]
    number = sum(len(line.keys) for line in converted.decided)
    assert f"decided by hpc_tune itself ({number})" in titles
    assert number > len(converted.decided)


RECORDS = [{"text": f"{number}: ü\u2028\n[x]"} for number in range(40)]


@pytest.mark.parametrize("is_array", [True, False], ids=["array", "lines"])
@pytest.mark.parametrize(
    ("text", "changes", "key", "kept"),
    [
        (FACTORY, {"max_samples": 7}, "max_samples", slice(7)),
        (FACTORY, {"max_samples": 70}, "max_samples", slice(70)),
        (TUNE, {"dataset__split": "train[:5%]"}, "dataset.split", slice(2)),
        (TUNE, {"dataset__split": "train[10:30]"}, "dataset.split", slice(10, 30)),
        (AXOLOTL, {"shards": 4, "shards_idx": 1}, "datasets.0.shards", slice(1, None, 4)),
        (AXOLOTL, {"skip": 3}, "datasets.0.skip", slice(3, None)),
    ],
)
def test_the_command_for_a_part_of_the_data_gives_it(tmp_path, text, changes, key, kept, is_array):
    data = tmp_path / "my data.json"
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS)
    data.write_text(json.dumps(RECORDS, indent=2) if is_array else lines, encoding="utf-8")
    if text == AXOLOTL:
        changes = {"datasets": [{"path": str(data), "type": "completion", **changes}]}
    elif text == TUNE:
        changes = {"dataset__data_files": str(data), **changes}
    line = line_of(command.convert(theirs(text, **changes), 1).left, key)
    shown = line[line.index("python -c") : line.index(" > part.jsonl")]
    shown = shown.replace(" FILE", f" {shlex.quote(str(data))}")
    shown = shown.replace("python", shlex.quote(sys.executable), 1)
    done = subprocess.run(["sh", "-c", shown], capture_output=True, check=True, timeout=60)
    got = [json.loads(row) for row in done.stdout.decode().split("\n") if row]
    assert got == RECORDS[kept]


@pytest.mark.parametrize(("split", "part"), [("train[:5%]", ":round(their number*5/100)")])
def test_a_part_of_a_file_of_another_kind_is_named_without_a_command(split, part):
    changes = {"dataset__data_files": "/d/a.parquet", "dataset__split": split}
    line = line_of(command.convert(theirs(TUNE, **changes), 1).left, "dataset.split")
    assert f"write records {part} of /d/a.parquet" in line
    assert "python -c" not in line


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        (TUNE, {"dataset__split": "train[:95%]"}),
        (
            TUNE,
            {"dataset__split": "train[:95%]"}
            | {"dataset_val": {"_component_": "torchtune.datasets.chat_dataset"}}
            | {"dataset_val__source": "json", "dataset_val__data_files": "/data/chats.json"}
            | {"dataset_val__split": "train[95%:]", "run_val_every_n_steps": 9},
        ),
        (AXOLOTL, {"datasets": [{"path": "/d/a.jsonl", "split": "train[:95%]"}]}),
    ],
)
def test_a_part_that_leaves_a_rest_is_what_eval_fraction_does(text, changes):
    converted = command.convert(theirs(text, **changes), 1)
    came = settings(converted)
    assert came["data.eval_fraction"] == 0.05
    assert came["data.path"].startswith("/d")
    assert came.get("data.eval_path") is None
    assert came.get("train.eval_every_steps") == changes.get("run_val_every_n_steps")
    assert not any("split" in note for note in converted.to_do)


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_the_last_step_of_a_run_of_known_length_has_their_rate(name):
    came = on_four_ranks(FACTORY, {"lr_scheduler_type": name})
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
        (FACTORY, "lora_target", "model_name_or_path"),
        (TUNE, "model.lora_attn_modules", "checkpointer__checkpoint_dir"),
        (AXOLOTL, "lora_target_modules", "base_model"),
    ],
)
def test_targets_that_the_model_does_not_have_are_named(tmp_path, text, key, model, is_indexed):
    fused = directory(tmp_path / "fused", ["qkv_proj", "o_proj"], is_indexed)
    converted = command.convert(theirs(text, **{model: fused}), 1)
    line = line_of(converted.left, key)
    assert "has no layers q_proj, v_proj" in line
    assert "some of lm_head, o_proj, qkv_proj" in line
    assert line in converted.to_do
    plain = directory(tmp_path / "plain", ["q_proj", "k_proj", "v_proj"], is_indexed)
    assert settings(command.convert(theirs(text, **{model: plain}), 1))["tune.targets"] == [
        "q_proj",
        "v_proj",
    ]


def test_config_json_tells_the_layers_where_there_are_no_weights(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "phi3"}')
    changes = {"model_name_or_path": str(tmp_path)}
    line = line_of(command.convert(theirs(FACTORY, **changes), 1).left, "lora_target")
    assert "gate_up_proj" in line
    (tmp_path / "config.json").write_text('{"model_type": "of my own"}')
    assert on_four_ranks(FACTORY, changes)["tune.targets"] == ["q_proj", "v_proj"]


def test_layers_that_a_builder_splits_and_the_files_do_not_are_one_target():
    changes = {"model___component_": "torchtune.models.phi3.lora_phi3_mini"}
    converted = command.convert(theirs(TUNE, **changes), 1)
    assert settings(converted)["tune.targets"] == ["qkv_proj"]
    line = line_of(converted.taken, "model.lora_attn_modules")
    assert "one adapter" in line
    assert "k_proj" in line
    assert line in converted.to_do


def test_what_is_neither_told_nor_known_is_named_once():
    converted = command.convert(theirs(TUNE, checkpointer__checkpoint_dir=None), 1)
    missing = f"model.path: {command.PLACEHOLDER} stands for what their config does not tell"
    assert converted.further == (missing,)
    with pytest.raises(ConfigError, match="expected a training config"):
        command.convert({"policy_model": "x"}, 1)
