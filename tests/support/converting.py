"""Configs of other tools, like those that they ship or document, and what convert makes of them."""

import re

import yaml

from hpc_tune.convert import convert as command

AXOLOTL_LORA = """
base_model: /models/Llama-3.1-8B
load_in_8bit: false
load_in_4bit:
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_modules: [q_proj, k_proj, v_proj, o_proj]
datasets:
  - path: /data/answers.jsonl
    type: alpaca
  - path: json
    type: chat_template
    data_files: [/data/chats/a.jsonl, /data/chats/b.jsonl]
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
dataset_prepared_path: last_run_prepared
val_set_size: 0.05
sequence_len: 4096
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 8
num_epochs: 3
optimizer: adamw_torch_fused
learning_rate: 0.0002
lr_scheduler: cosine
warmup_steps: 10
weight_decay: 0.01
bf16: true
tf32: false
gradient_checkpointing: true
flash_attention: true
eval_steps: 25
save_steps: 50
save_total_limit: 3
deepspeed: deepspeed_configs/zero2.json
special_tokens: {pad_token: <|end_of_text|>}
output_dir: ./outputs/lora
"""
AXOLOTL_QLORA = """
base_model: /models/70b
load_in_4bit: true
adapter: qlora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
datasets:
  - path: /data/questions.parquet
    type:
      field_instruction: question
      field_output: reply
test_datasets:
  - path: /data/held
    split: train
    type: completion
sequence_len: 512
sample_packing: false
train_on_inputs: true
micro_batch_size: 1
gradient_accumulation_steps: 4
max_steps: 100
learning_rate: 1e-5
lr_scheduler: linear
warmup_ratio: 0.1
optimizer: adamw_torch
gradient_checkpointing: true
gradient_checkpointing_kwargs: {use_reentrant: true}
fsdp: [full_shard, auto_wrap]
fsdp_config:
  fsdp_offload_params: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
wandb_project: mine
wandb_name: first try
output_dir: /runs/70b
"""
AXOLOTL_FULL = """
base_model: /models/1b
datasets: [{path: data/code.jsonl, type: completion, field: content}]
sequence_len: 2048
sample_packing: true
micro_batch_size: 4
gradient_accumulation_steps: 1
learning_rate: 0.00002
optimizer: adamw_torch
bf16: true
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rope: true
context_parallel_size: 2
torch_compile: true
use_tensorboard: true
output_dir: out
"""
TUNE_LORA = """
model:
  _component_: torchtune.models.llama3_1.lora_llama3_1_8b
  lora_attn_modules: [q_proj, v_proj, output_proj]
  apply_lora_to_mlp: False
  lora_rank: 64
  lora_alpha: 128
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 8192}
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/llama/
  output_dir: ${output_dir}/there
dataset:
  _component_: torchtune.datasets.chat_dataset
  source: json
  data_files: /data/chats.jsonl
  packed: True
  train_on_input: False
batch_size: 3
gradient_accumulation_steps: 5
epochs: 2
max_steps_per_epoch: null
optimizer: {_component_: torch.optim.AdamW, lr: 3e-4, fused: True}
lr_scheduler: {_component_: t.training.get_cosine_schedule_with_warmup, num_warmup_steps: 40}
loss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}
clip_grad_norm: 1.5
seed: 11
dtype: bf16
device: cuda
compile: True
enable_activation_checkpointing: True
fsdp_cpu_offload: True
output_dir: /runs/here
"""
FACTORY_LORA = """
model_name_or_path: /models/qwen
stage: sft
finetuning_type: lora
lora_rank: 4
lora_target: q_proj, v_proj
dataset: my_chats
cutoff_len: 1024
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
max_steps: 200
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
save_steps: 50
output_dir: /runs/qwen
"""
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
datasets: [{path: /data/labeled.jsonl, type: llama3.ultra}]
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
CONFIGS = {
    "axolotl": AXOLOTL_LORA,
    "axolotl_qlora": AXOLOTL_QLORA,
    "axolotl_full": AXOLOTL_FULL,
    "torchtune": TUNE_LORA,
    "factory": FACTORY_LORA,
    "factory_dpo": FACTORY_DPO,
    "factory_kto": FACTORY_KTO,
    "axolotl_dpo": AXOLOTL_DPO,
    "axolotl_orpo": AXOLOTL_ORPO,
    "axolotl_kto": AXOLOTL_KTO,
    "torchtune_dpo": TUNE_DPO,
    "torchtune_full": TUNE_FULL,
}


def theirs(text, **changes):
    """Return a config with changed values; keys have __ for the dot, and None removes a key."""
    tree = yaml.safe_load(text)
    for key, value in changes.items():
        *parts, name = key.split("__")
        part = tree
        for step in parts:
            part = part.setdefault(step, {})
        if value is None:
            part.pop(name, None)
        else:
            part[name] = value
    return tree


def settings(converted):
    return {f"{p}.{k}": v for p, part in converted.config.items() for k, v in part.items()}


def on_four_ranks(text, changes):
    return settings(command.convert_config(theirs(text, **changes), 4))


def line_of(lines, key):
    """Return the line that names a key, alone or with others that share its remark."""
    for line in lines:
        shown = "\n".join(getattr(line, "keys", (str(line),)))
        if re.search(rf"^{re.escape(key)}( =| \(|:|$)", shown, re.MULTILINE):
            return str(line)
    return None
