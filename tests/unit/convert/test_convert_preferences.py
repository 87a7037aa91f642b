"""Configs of other tools for preferences: what is the same here, what has a star, what is refused.

The configs are shaped as those that the tools ship or document.
"""

import pytest

from hpc_tune.convert import convert as command
from tests.support.converting import line_of, on_four_ranks, settings, theirs

FACTORY_DPO = """
model_name_or_path: /models/m
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
pref_beta: 0.1
pref_loss: sigmoid
dataset: dpo_en_demo
template: llama3
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
num_train_epochs: 3.0
"""
FACTORY_KTO = """
model_name_or_path: /models/m
stage: kto
finetuning_type: lora
lora_target: all
pref_beta: 0.1
kto_rejected_weight: 1.33
dataset: kto_en_demo
template: llama3
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 5.0e-6
"""
AXOLOTL_DPO = """
base_model: /models/m
load_in_4bit: true
chat_template: tokenizer_default
rl: dpo
rl_beta: 0.3
datasets:
  - path: /data/pairs.jsonl
    type: chat_template.default
    field_messages: conversation
    field_chosen: better
    field_rejected: worse
    message_property_mappings: {role: role, content: content}
sequence_len: 4096
adapter: qlora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 4
learning_rate: 0.0002
"""
AXOLOTL_ORPO = """
base_model: /models/m
rl: orpo
orpo_alpha: 0.1
remove_unused_columns: false
datasets: [{path: /data/orpo.jsonl, type: chat_template.argilla}]
sequence_len: 4096
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
micro_batch_size: 1
learning_rate: 0.000008
"""
AXOLOTL_KTO = """
base_model: /models/m
rl: kto
rl_beta: 0.5
kto_desirable_weight: 0.2
kto_undesirable_weight: 1.0
datasets: [{path: /data/labelled.jsonl, type: llama3.ultra}]
sequence_len: 2048
adapter: lora
lora_r: 32
lora_alpha: 64
lora_target_linear: true
learning_rate: 0.00002
"""
TUNE_DPO = """
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: True
  lora_rank: 8
  lora_alpha: 16
  lora_dropout: 0.0
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 1024}
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/m
dataset:
  _component_: torchtune.datasets.stack_exchange_paired_dataset
  source: json
  data_files: /data/ranked.jsonl
batch_size: 4
gradient_accumulation_steps: 8
optimizer: {_component_: torch.optim.AdamW, weight_decay: 0.05, lr: 5e-4}
lr_scheduler: {_component_: t.get_cosine_schedule_with_warmup, num_warmup_steps: 100}
loss: {_component_: torchtune.rlhf.loss.DPOLoss, beta: 0.1, label_smoothing: 0}
epochs: 1
dtype: bf16
device: cuda
"""
TUNE_FULL = """
model: {_component_: torchtune.models.llama3_1.llama3_1_8b}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 1024}
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/m
ref_checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/m/
  model_type: LLAMA3
dataset:
  _component_: torchtune.datasets.preference_dataset
  source: json
  data_files: /data/pairs.jsonl
  column_map: {chosen: chosen_conversations, rejected: rejected_conversations}
  train_on_input: False
batch_size: 4
optimizer: {_component_: torch.optim.AdamW, lr: 1e-6}
loss: {_component_: torchtune.rlhf.loss.DPOLoss, beta: 0.05}
epochs: 1
"""
UNSET = dict.fromkeys(("tune.sft_weight", "tune.gamma", "tune.label_smoothing"))
SFT = {"pref_loss": None, "stage": "sft", "pref_beta": None}


@pytest.mark.parametrize(
    ("text", "changes", "expected"),
    [
        (
            FACTORY_DPO,
            {},
            {"tune.objective": "dpo", "tune.beta": 0.1, "data.seq_len": 4096, "data.packing": False}
            | {"batch.global_size": 32, "optim.lr": 5e-6, **UNSET},
        ),
        (FACTORY_DPO, {"pref_loss": None, "pref_beta": None}, {"tune.objective": "dpo"}),
        (FACTORY_DPO, {"pref_loss": "ipo"}, {"tune.objective": "ipo", **UNSET}),
        (
            FACTORY_DPO,  # whose beta is 0.1 with simpo too
            {"pref_loss": "simpo", "pref_beta": None},
            {"tune.objective": "simpo", "tune.beta": 0.1, "tune.gamma": 0.5},
        ),
        (
            FACTORY_DPO,
            {"pref_loss": "simpo", "pref_beta": 2.0, "simpo_gamma": 1.2},
            {"tune.objective": "simpo", "tune.beta": 2.0, "tune.gamma": 1.2},
        ),
        (FACTORY_DPO, {"pref_loss": "orpo"}, {"tune.objective": "orpo", "tune.beta": 0.1}),
        (FACTORY_DPO, {"pref_ftx": 0.2, "lora_dropout": 0.1}, {"tune.sft_weight": 0.2}),
        (FACTORY_DPO, {"lora_dropout": 0.1}, {"tune.dropout": None}),
        (
            FACTORY_KTO,
            {},
            {"tune.objective": "kto", "tune.undesirable_weight": 1.33, "data.seq_len": 2048}
            | {"tune.desirable_weight": None, **UNSET},
        ),
        (
            AXOLOTL_DPO,
            {},
            {"tune.objective": "dpo", "tune.beta": 0.3, "data.seq_len": 8192, "tune.dropout": None}
            | {
                "data.columns": {
                    "conversation": "messages",
                    "better": "chosen",
                    "worse": "rejected",
                }
            },
        ),
        (AXOLOTL_DPO, {"rl_beta": None}, {"tune.beta": 0.1}),
        (AXOLOTL_DPO, {"rl_beta": None, "dpo_beta": 0.2}, {"tune.beta": 0.2}),
        (AXOLOTL_DPO, {"trl": {"beta": 0.7}}, {"tune.beta": 0.7}),
        (AXOLOTL_DPO, {"dpo_loss_type": "ipo"}, {"tune.objective": "ipo"}),
        (AXOLOTL_DPO, {"rl": "ipo"}, {"tune.objective": "ipo", **UNSET}),
        (
            AXOLOTL_DPO,
            {"dpo_loss_type": ["robust"], "dpo_label_smoothing": 0.1},
            {"tune.objective": "dpo", "tune.label_smoothing": 0.1},
        ),
        (
            AXOLOTL_DPO,
            {"dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [1.0, 0.25]},
            {"tune.objective": "dpo", "tune.sft_weight": 0.25},
        ),
        (AXOLOTL_DPO, {"dpo_loss_type": ["sigmoid", "sft"]}, {"tune.sft_weight": 1.0}),
        (AXOLOTL_DPO, {"rpo_alpha": 0.5}, {"tune.sft_weight": 0.5}),
        (
            AXOLOTL_DPO,  # trl adds the chosen answers' loss unless cpo_alpha is 0
            {"rl": "simpo", "rl_beta": None},
            {"tune.objective": "simpo", "tune.beta": 0.1, "tune.gamma": 0.5, "tune.sft_weight": 1},
        ),
        (
            AXOLOTL_DPO,
            {"rl": "simpo", "rl_beta": 2.5, "simpo_gamma": 1.4, "cpo_alpha": 0.0},
            {"tune.beta": 2.5, "tune.gamma": 1.4, "tune.sft_weight": None},
        ),
        (
            AXOLOTL_ORPO,
            {},
            {"tune.objective": "orpo", "tune.beta": 0.1, "data.path": "/data/orpo.jsonl"},
        ),
        (
            AXOLOTL_KTO,
            {},
            {"tune.objective": "kto", "tune.beta": 0.5, "tune.desirable_weight": 0.2}
            | {"tune.undesirable_weight": 1.0, "data.seq_len": 2048},
        ),
        (
            TUNE_DPO,
            {},
            {"tune.objective": "dpo", "tune.beta": 0.1, "data.seq_len": 2048}
            | {"tune.label_smoothing": None, "batch.global_size": 128}
            | {
                "data.columns": {
                    "question": "prompt",
                    "response_j": "chosen",
                    "response_k": "rejected",
                }
            },
        ),
        (
            TUNE_DPO,
            {"loss": {"_component_": "torchtune.rlhf.loss.SimPOLoss"}},
            {"tune.objective": "simpo", "tune.beta": 2.0, "tune.gamma": 0.5},
        ),
        (
            TUNE_FULL,
            {},
            {"tune.objective": "dpo", "tune.method": "full", "tune.beta": 0.05}
            | {
                "data.columns": {
                    "chosen_conversations": "chosen",
                    "rejected_conversations": "rejected",
                }
            },
        ),
        (FACTORY_DPO, SFT, {"tune.objective": None, "tune.beta": None, "data.seq_len": 2048}),
        (FACTORY_DPO, {"packing": True}, {"data.packing": False}),
        (FACTORY_KTO, {"packing": True}, {"data.packing": False}),
        (FACTORY_DPO, {**SFT, "packing": True}, {"data.packing": True}),
    ],
)
def test_a_config_for_preferences_becomes_ours(text, changes, expected):
    came = on_four_ranks(text, changes)
    assert {key: came.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "changes", "key", "words"),
    [
        (FACTORY_KTO, {"dpo_label_smoothing": 0.1}, "dpo_label_smoothing", "kto does not use it"),
        (
            FACTORY_DPO,
            {"pref_loss": "orpo", "dpo_label_smoothing": 0.1},
            "dpo_label_smoothing",
            "orpo does not use it",
        ),
        *(
            (text, {"excess_length_strategy": strategy}, "excess_length_strategy", "no answer is")
            for text in (AXOLOTL_DPO, AXOLOTL_KTO)
            for strategy in ("truncate", "drop")
        ),
        *(
            (
                AXOLOTL_DPO,
                {"datasets": [{"path": "/data/pairs.jsonl", key: value}]},
                f"datasets.0.{key}",
                "only the answers",
            )
            for key, value in (("roles_to_train", ["user"]), ("train_on_eos", "all"))
        ),
    ],
)
def test_what_preferences_decide_has_no_star(text, changes, key, words):
    converted = command.convert(theirs(text, **changes), 4)
    assert words in line_of(converted.decided, key)
    assert not any(key in line for line in converted.to_do)


@pytest.mark.parametrize(
    ("text", "changes", "key", "words"),
    [
        (FACTORY_DPO, {"dpo_label_smoothing": 0.1}, "dpo_label_smoothing", "cDPO"),
        (FACTORY_DPO, {"pref_loss": "orpo", "pref_ftx": 0.5}, "pref_ftx", "orpo has no further"),
        (FACTORY_KTO, {"pref_ftx": 0.5}, "pref_ftx", "kto has no further"),
        (FACTORY_DPO, {"ld_alpha": 0.5}, "ld_alpha", "in full"),
        (FACTORY_DPO, {"ref_model": "/models/other"}, "ref_model", "no other"),
        (FACTORY_DPO, {"ref_model_adapters": "saves/sft"}, "ref_model_adapters", "tune.init_from"),
        (FACTORY_DPO, {"neftune_noise_alpha": 5}, "neftune_noise_alpha", "no noise"),
        (AXOLOTL_DPO, {"dpo_label_smoothing": 0.1}, "dpo_label_smoothing", "robust DPO"),
        (AXOLOTL_DPO, {"dpo_use_weighting": True}, "dpo_use_weighting", "alike"),
        (AXOLOTL_DPO, {"dpo_norm_loss": True}, "dpo_norm_loss", "sums"),
        (AXOLOTL_ORPO, {"cpo_alpha": 0.5}, "cpo_alpha", "orpo has no further"),
        (
            AXOLOTL_DPO,
            {"dpo_loss_type": ["sigmoid", "sft"], "dpo_loss_weights": [0.8, 0.2]},
            "dpo_loss_weights",
            "divide all weights",
        ),
        (AXOLOTL_KTO, {}, "datasets.0.type", "Jinja file"),
        (TUNE_DPO, {"loss__label_smoothing": 0.1}, "loss.label_smoothing", "cDPO"),
        (TUNE_DPO, {"model__lora_dropout": 0.1}, "model.lora_dropout", "no dropout"),
        (TUNE_DPO, {"dataset__source": None, "dataset__data_files": None}, None, "response_j"),
        (
            TUNE_FULL,
            {"ref_checkpointer__checkpoint_dir": "/models/other"},
            "ref_checkpointer.checkpoint_dir",
            "no other",
        ),
    ],
)
def test_what_changes_the_meaning_has_a_star(text, changes, key, words):
    converted = command.convert(theirs(text, **changes), 4)
    line = line_of(converted.left, key or "dataset._component_")
    assert words in line
    assert line in converted.to_do


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
    converted = command.convert(theirs(text, **changes), 1)
    line = line_of(converted.taken, key)
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
    assert words in line_of(command.convert(theirs(text), 1).taken, key)
    others = command.convert(theirs(FACTORY_DPO, pref_ftx=0.1), 1)
    assert line_of(others.taken, "pref_ftx").endswith("tune.sft_weight = 0.1")  # the same


def test_what_they_add_by_default_is_written_out():
    converted = command.convert(theirs(AXOLOTL_DPO, rl="simpo"), 1)
    assert "micro-batch" in line_of(converted.taken, "cpo_alpha")
    assert "(their default)" in line_of(converted.taken, "simpo_gamma")


@pytest.mark.parametrize(
    "text", [FACTORY_DPO, FACTORY_KTO, AXOLOTL_DPO, AXOLOTL_ORPO, AXOLOTL_KTO, TUNE_DPO, TUNE_FULL]
)
def test_each_key_is_in_one_group(text):
    config = theirs(text)
    converted = command.convert(config, 1)
    groups = (converted.taken, converted.decided, converted.left)
    for key, _ in command.flatten(config, ("datasets",)):
        assert [line_of(lines, key) is not None for lines in groups].count(True) == 1, key


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
    converted = command.convert(theirs(text, **method, **{key: value}), 1)
    names = {"tune.modules_to_save", "tune.trainable_tokens"} & settings(converted).keys()
    assert len(names) == (not is_full)
    where = converted.decided if is_full else converted.taken
    assert line_of(where, key) is not None
