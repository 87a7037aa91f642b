"""Configs of axolotl become ours: what its reference documents is known, each key in one group."""

import pytest
import yaml

from hpc_tune import cli
from hpc_tune.config.load import load_config
from hpc_tune.convert import convert as command
from hpc_tune.convert.axolotl import AXOLOTL
from hpc_tune.convert.rules import ForeignConfig
from hpc_tune.errors import EXIT_DONE, ConfigError
from tests.support.converting import line_of, on_four_ranks, settings, theirs

STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LORA = """
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
OURS_LORA = """
model: {path: /models/Llama-3.1-8B, dtype: bf16}
tune: {method: lora, rank: 32, alpha: 16.0, dropout: 0.05,
  targets: [q_proj, k_proj, v_proj, o_proj]}
data: {path: [/data/answers.jsonl, /data/chats/a.jsonl, /data/chats/b.jsonl],
  cache: last_run_prepared, eval_fraction: 0.05, seq_len: 4096, packing: true}
batch: {global_size: 64}  # 2 x 8 x 4
optim: {lr: 2.0e-4, schedule: cosine, min_lr_ratio: 0.0, warmup_steps: 10, weight_decay: 0.01}
parallel: {recompute: full}
train: {epochs: 3.0, tf32: false, eval_every_steps: 25}
checkpoint: {every_steps: 50, keep: 3}
run: {dir: ./outputs/lora}
"""
QLORA_FSDP = """
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
OURS_QLORA = """
model: {path: /models/70b, dtype: auto}
tune: {method: qlora, rank: 8, alpha: 16.0, targets: all-linear}
data: {path: /data/questions.parquet, eval_path: /data/held, seq_len: 512, packing: false,
  columns: {question: instruction, reply: output}, loss_on: all}
batch: {global_size: 16}  # 1 x 4 x 4
optim: {lr: 1.0e-5, schedule: linear, min_lr_ratio: 0.01111, warmup_steps: 10}
parallel: {recompute: full, offload_params: cpu}
train: {max_steps: 100}
run: {dir: /runs/70b, trackers: [wandb], name: first try}
"""
FULL = """
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
OURS_FULL = """
model: {path: /models/1b, dtype: bf16}
tune: {method: full, param_dtype: bf16}
data: {path: data/code.jsonl, columns: {content: text}, seq_len: 2048, packing: true}
batch: {global_size: 8}  # 4 x 1 x 4 / 2 that share a row
optim: {lr: 2.0e-5, schedule: cosine, min_lr_ratio: 0.0}
train: {epochs: 1.0, compile: true}
run: {dir: out, tensorboard: true}
"""
EXAMPLES = pytest.mark.parametrize(
    ("text", "ours"),
    [(LORA, OURS_LORA), (QLORA_FSDP, OURS_QLORA), (FULL, OURS_FULL)],
    ids=("lora", "qlora", "full"),
)
# The configuration reference of axolotl: what stands at the top level, and in its parts.
KEYS = """
strict resume_from_checkpoint auto_resume_from_checkpoints resize_token_embeddings_to_32x
mean_resizing_embeddings shrink_embeddings embeddings_skip_upcast reinit_weights trainer_cls rl
trl.beta trl.use_vllm vllm.device vllm.port ebft.mode qat.weight_dtype quantization.group_size
reward_model dynamic_checkpoint.enabled dynamic_checkpoint.check_interval process_reward_model
center_rewards_coefficient num_labels dpo_use_weighting dpo_use_logits_to_keep dpo_label_smoothing
dpo_norm_loss dpo_use_liger_kernel dpo_padding_free dpo_generate_during_eval dpo_loss_type
dpo_loss_weights precompute_ref_log_probs datasets test_datasets shuffle_merged_datasets
shuffle_before_merging_datasets dataset_prepared_path dataset_shard_num dataset_shard_idx
skip_prepare_dataset num_dataset_shards_to_save pretraining_dataset dataset_processes
dataset_num_proc dataset_exact_deduplication dataset_keep_in_memory dataloader_pin_memory
dataloader_num_workers dataloader_prefetch_factor dataloader_drop_last
accelerator_config.split_batches remove_unused_columns push_dataset_to_hub hf_use_auth_token device
device_map world_size local_rank ddp seed ddp_timeout ddp_bucket_cap_mb ddp_broadcast_buffers
ddp_find_unused_parameters eval_table_size eval_max_new_tokens do_causal_lm_eval
eval_causal_lm_metrics do_bench_eval bench_dataset bench_split metric_for_best_model
greater_is_better loss_watchdog_threshold loss_watchdog_patience gc_steps bf16 fp16 fp8
fp8_enable_fsdp_float8_all_gather bfloat16 float16 tf32 float32 gradient_checkpointing
gradient_checkpointing_kwargs.use_reentrant activation_offloading layer_offloading freeze_mm_modules
unfrozen_parameters sequence_len excess_length_strategy eval_sequence_len min_sample_len
max_prompt_len sample_packing sample_packing_group_size sample_packing_bin_size
sample_packing_sequentially sample_packing_mp_start_method eval_sample_packing pad_to_sequence_len
pad_to_multiple_of curriculum_sampling multipack_real_batches batch_flattening use_pose
pose_split_on_token_ids pose_max_context_len pose_num_chunks pretrain_multipack_buffer_size
pretrain_multipack_attn pretraining_sample_concatenation streaming streaming_multipack_buffer_size
xformers_attention sdp_attention s2_attention flex_attention flex_attn_compile_kwargs.dynamic
flash_attention flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp
flash_optimum sage_attention eager_attention attn_implementation gemma4_hybrid_attn_impl
experts_implementation quantize_moe_experts scaling_softmax scaling_softmax_factor
scaling_softmax_bias unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o
unsloth_rms_norm unsloth_rope lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel
chunked_cross_entropy chunked_cross_entropy_num_chunks use_eaft eaft_alpha eaft_k tiled_mlp
tiled_mlp_num_shards tiled_mlp_use_original_mlp llama4_linearized_experts deepspeed deepcompile fsdp
fsdp_config.activation_checkpointing fsdp_config.offload_params fsdp_config.sync_module_states
fsdp_config.cpu_ram_efficient_loading fsdp_config.cpu_offload_pin_memory fsdp_config.use_orig_params
fsdp_config.state_dict_type fsdp_config.final_state_dict_type fsdp_config.auto_wrap_policy
fsdp_config.transformer_layer_cls_to_wrap fsdp_config.min_num_params
fsdp_config.reshard_after_forward fsdp_config.mixed_precision_policy
fsdp_config.fsdp_sharding_strategy fsdp_config.fsdp_offload_params fsdp_version
fsdp_final_state_dict_type val_set_size dp_shard_size dp_replicate_size sequence_parallel_degree
context_parallel_size heads_k_stride ring_attn_func tensor_parallel_size special_tokens.bos_token
special_tokens.eos_token special_tokens.pad_token special_tokens.unk_token
special_tokens.additional_special_tokens tokens added_tokens_overrides added_tokens_overrides.128041
torch_compile torch_compile_backend torch_compile_mode max_steps warmup_steps warmup_ratio
eval_steps evals_per_epoch eval_strategy save_steps saves_per_epoch save_strategy save_total_limit
save_first_step logging_steps early_stopping_patience load_best_model_at_end save_only_model
use_tensorboard profiler_steps profiler_steps_start include_tokens_per_second include_tkps
neftune_noise_alpha orpo_alpha rpo_alpha simpo_gamma cpo_alpha kto_desirable_weight
kto_undesirable_weight rl_beta max_memory.0 gpu_memory_limit low_cpu_mem_usage chat_template
chat_template_jinja chat_template_kwargs.thinking eot_tokens default_system_message
fix_untrained_tokens is_preprocess preprocess_iterable total_num_tokens total_supervised_tokens
sample_packing_eff_est axolotl_config_path is_falcon_derived_model is_llama_derived_model
is_mistral_derived_model is_qwen_derived_model plugins generate_samples num_generation_samples
generation_max_new_tokens generation_temperature generation_top_p generation_top_k
generation_prompt_ratio generation_do_sample base_model base_model_config base_model_ignore_patterns
cls_model_config tokenizer_config tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common
tokenizer_type processor_type tokenizer_save_jinja_files trust_remote_code
experimental_skip_move_to_device use_kernels model_quantization_config
model_quantization_config_kwargs.dequantize random_init_weights output_dir hub_model_id hub_strategy
hub_revision save_safetensors load_in_8bit load_in_4bit adapter lora_model_dir lora_r lora_alpha
lora_fan_in_fan_out lora_target_modules lora_target_parameters lora_target_linear
lora_modules_to_save lora_dropout lora_rank_pattern lora_alpha_pattern
peft_layers_to_transform peft_layers_pattern
peft.loftq_config.loftq_bits peft.backend peft.weight_dtype peft.group_size peft_use_dora
peft_use_rslora peft_layer_replication peft_init_lora_weights peft_trainable_token_indices
peft_ensure_weight_tying peft_autocast_adapter_dtype qlora_sharded_model_loading lora_on_cpu gptq
bnb_config_kwargs.llm_int8_has_fp16_weight bnb_config_kwargs.bnb_4bit_quant_type
bnb_config_kwargs.bnb_4bit_use_double_quant loraplus_lr_ratio loraplus_lr_embedding merge_lora
merge_method relora relora_steps relora_warmup_steps relora_anneal_steps relora_prune_ratio
relora_prune_method relora_cpu_offload jagged_restart_steps jagged_restart_warmup_steps
jagged_restart_anneal_steps gradient_accumulation_steps micro_batch_size batch_size eval_batch_size
auto_find_batch_size train_on_inputs group_by_length learning_rate embedding_lr embedding_lr_scale
weight_decay optimizer optim_args optim_args.rank optim_target_modules torchdistx_path lr_scheduler
lr_scheduler_kwargs.num_cycles lr_quadratic_warmup cosine_min_lr_ratio cosine_constant_lr_ratio
lr_div_factor lr_groups adam_epsilon adam_epsilon2 adam_beta1 adam_beta2 adam_beta3 dion_lr
dion_momentum dion_rank_fraction dion_rank_multiple_of max_grad_norm num_epochs use_wandb wandb_name
wandb_run_id wandb_mode wandb_project wandb_entity wandb_watch wandb_log_model use_mlflow
mlflow_tracking_uri mlflow_experiment_name mlflow_run_name hf_mlflow_log_artifacts use_comet
comet_api_key comet_workspace comet_project_name comet_experiment_key comet_mode comet_online
comet_experiment_config.name use_trackio trackio_project_name trackio_run_name use_otel_metrics
otel_metrics_host otel_metrics_port lisa_n_layers lisa_step_interval lisa_layers_attribute
gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens
gradio_temperature use_ray ray_run_name ray_num_workers resources_per_worker.GPU image_size
image_resize_algorithm overrides_of_model_config.rope_scaling.type model_config.rope_scaling.factor
overrides_of_model_kwargs.use_cache model_kwargs.use_cache type_of_model model_type
revision_of_model model_revision max_packed_sequence_len rope_scaling noisy_embedding_alpha dpo_beta
evaluation_strategy liger_rope liger_rms_norm liger_layer_norm liger_swiglu liger_glu_activation
liger_cross_entropy liger_fused_linear_cross_entropy cut_cross_entropy kd_trainer kd_alpha
grokfast_alpha spectrum_top_fraction lm_eval_tasks debug
"""
# Of each dataset, of those for evaluation and of those for pretraining.
DATASET_KEYS = """
path split type type.system_prompt type.system_format type.field_system type.field_instruction
type.field_input type.field_output type.format type.no_input_format type.field_prompt
type.field_chosen type.field_rejected type.prompt_format type.chosen_format type.rejected_format
type.field_completion type.field_label type.completion_format input_transform shards shards_idx
preprocess_shards conversation chat_template chat_template_jinja data_files input_format name
ds_type field field_human field_model field_messages field_tools field_system field_thinking
template_thinking_key message_field_role message_field_content message_property_mappings.role
message_field_training message_field_training_detail split_thinking logprobs_field temperature
roles_to_train train_on_eos train_on_eot roles.assistant drop_system_message trust_remote_code
revision step_separator max_completion_length train_on_last_step_only text_column skip length
sequence_length min_input_id max_input_id seed
"""


@EXAMPLES
def test_an_example_becomes_ours(text, ours):
    assert command.convert(yaml.safe_load(text), 4).config == yaml.safe_load(ours)


@EXAMPLES
def test_each_key_of_an_example_is_in_one_group(text, ours):
    config = theirs(text, my_own_key=3)
    converted = command.convert(config, 4)
    groups = (converted.taken, converted.decided, converted.left)
    for key, _ in command.flatten(config, AXOLOTL.lists):
        assert [line_of(lines, key) is not None for lines in groups].count(True) == 1, key
    assert line_of(converted.left, "my_own_key") == f"my_own_key = 3: {command.UNKNOWN}"
    assert "datasets.0.path" in dict(command.flatten(config, AXOLOTL.lists))


def test_every_key_of_the_reference_is_known():
    nothing = ForeignConfig(AXOLOTL, {}, 1)
    parts = ("datasets.0", "test_datasets.1", "pretraining_dataset.0")
    of_datasets = [f"{part}.{key}" for part in parts for key in DATASET_KEYS.split()]
    keys = [*KEYS.split(), *of_datasets]
    assert [key for key in keys if AXOLOTL.outcome(key, nothing) is None] == []
    assert AXOLOTL.outcome("no_such_key", nothing) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"adapter": None}, {"tune.method": "full", "tune.rank": None, "tune.dropout": None}),
        ({"adapter": "qlora", "load_in_4bit": True}, {"tune.method": "qlora"}),
        ({"load_in_4bit": True}, {"tune.method": "qlora"}),
        ({"peft": {"backend": "bnb", "weight_dtype": "nf4"}}, {"tune.method": "qlora"}),
        ({"peft_use_dora": True}, {"tune.method": "dora"}),
        ({"lora_target_linear": True}, {"tune.targets": "all-linear"}),
        ({"peft_trainable_token_indices": [5, 6]}, {"tune.trainable_tokens": [5, 6]}),
        ({"lora_modules_to_save": ["lm_head"]}, {"tune.modules_to_save": ["lm_head"]}),
        ({"lora_target_modules": "all-linear"}, {"tune.targets": "all-linear"}),
        (
            {"lora_target_parameters": STACKS},
            {"tune.targets": ["q_proj", "k_proj", "v_proj", "o_proj", "experts"]},
        ),
        (
            {"lora_target_parameters": STACKS, "lora_target_linear": True, "lora_r": 8},
            {"tune.targets": ["all-linear", "experts"], "tune.expert_rank": 8},
        ),
        (
            {"lora_target_parameters": STACKS, "lora_target_modules": None},
            {"tune.targets": ["experts"]},
        ),
        ({"lora_model_dir": "./first"}, {"tune.init_from": "./first"}),
        ({"adapter": None, "deepspeed": None}, {"tune.param_dtype": "bf16"}),
        ({"adapter": None}, {"tune.param_dtype": None}),  # DeepSpeed keeps fp32
        ({"bf16": "auto"}, {"model.dtype": "auto"}),
        ({"bf16": None, "float32": True}, {"model.dtype": None}),
        ({"bf16": False}, {"model.dtype": "fp32"}),
        ({"bf16": False, "bfloat16": True}, {"model.dtype": "bf16"}),
        ({"bf16": False, "fp16": True}, {"model.dtype": None}),
        ({"sequence_len": None}, {"data.seq_len": 512}),
        ({"sample_packing": None}, {"data.packing": False}),
        ({"train_on_inputs": True}, {"data.loss_on": "all"}),
        ({"chat_template_jinja": "mine.jinja"}, {"data.chat_template": "mine.jinja"}),
        ({"micro_batch_size": None}, {"batch.global_size": 1 * 8 * 4}),
        (
            {"batch_size": 24, "gradient_accumulation_steps": None},
            {"batch.global_size": 24 * 4},
        ),
        ({"sequence_parallel_degree": 4}, {"batch.global_size": 2 * 8}),
        (
            {"sequence_parallel_degree": 4, "context_parallel_size": 4},
            {"batch.global_size": 2 * 8},
        ),
        ({"tensor_parallel_size": 2}, {"batch.global_size": 2 * 8 * 2}),
        ({"max_steps": 40}, {"train.max_steps": 40, "train.epochs": None}),
        ({"num_epochs": None}, {"train.epochs": 1.0}),
        ({"warmup_steps": None}, {"optim.warmup_steps": None, "optim.warmup_ratio": None}),
        (
            {"warmup_steps": None, "warmup_ratio": 0.05},
            {"optim.warmup_steps": None, "optim.warmup_ratio": 0.05},
        ),
        ({"lr_scheduler": None}, {"optim.schedule": "cosine", "optim.min_lr_ratio": 0.0}),
        ({"cosine_min_lr_ratio": 0.2}, {"optim.min_lr_ratio": 0.2}),
        ({"lr_scheduler": "constant_with_warmup"}, {"optim.schedule": "constant"}),
        ({"adam_beta2": 0.95, "max_grad_norm": 0.3}, {"optim.beta2": 0.95, "optim.clip_norm": 0.3}),
        ({"gradient_checkpointing": "offload"}, {"parallel.recompute": "full"}),
        ({"gradient_checkpointing": False}, {"parallel.recompute": None}),
        ({"save_strategy": "best"}, {"checkpoint.keep_best": True}),
        ({"profiler_steps": 3, "profiler_steps_start": 7}, {"train.profile": "8:3"}),
        ({"wandb_project": "p", "wandb_mode": "disabled"}, {"run.trackers": []}),
        ({"peft_use_rslora": True}, {"tune.rslora": True}),
        (  # axolotl#3673
            {
                "lora_rank_pattern": {r".*\.layers\.3\..*(q|k)_proj$": 32, "layers.0.mlp.*": 4},
                "lora_alpha_pattern": {r".*\.layers\.3\..*(q|k)_proj$": 128},
            },
            {
                "tune.rank_pattern": {r".*\.layers\.3\..*(q|k)_proj$": 32, "layers.0.mlp.*": 4},
                "tune.alpha_pattern": {r".*\.layers\.3\..*(q|k)_proj$": 128},
            },
        ),
        ({"neftune_noise_alpha": 5}, {"tune.neftune_alpha": 5}),
        ({"noisy_embedding_alpha": 5}, {"tune.neftune_alpha": 5}),
        ({"optimizer": "adamw_bnb_8bit"}, {"optim.name": "adamw_8bit"}),
        ({"optimizer": "adamw_torch_8bit"}, {"optim.name": "adamw_8bit"}),
        ({"loraplus_lr_ratio": 16}, {"optim.lora_b_ratio": 16}),
        (
            {"val_set_size": 0.1, "eval_steps": 20, "early_stopping_patience": 3},
            {"train.stop_after_evals": 3},
        ),
        ({"seed": 7}, {"train.seed": 7}),
    ],
)
def test_what_axolotl_says_elsewhere_or_by_default_counts_too(changes, expected):
    came = on_four_ranks(LORA, changes)
    assert {key: came.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"base_model": "meta-llama/Llama-3.1-8B"}, "base_model", "hf download"),
        ({"load_in_8bit": True}, "load_in_8bit", "qlora has 4"),
        ({"adapter": "llama-adapter"}, "adapter", "tune.method"),
        ({"lora_target_modules": r"layers\.\d+\.mlp"}, "lora_target_modules", "patterns"),
        (
            {"lora_target_modules": ["lm_head"], "lora_target_linear": True},
            "lora_target_linear",
            "does not include lm_head",
        ),
        ({"default_system_message": "You are."}, "default_system_message", "system message"),
        ({"qat": {"weight_dtype": "int4"}}, "qat.weight_dtype", "quantized or pruned"),
        ({"curriculum_sampling": True}, "curriculum_sampling", "shuffled"),
        (
            {"chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs.enable_thinking",
            "write them into it",
        ),
        ({"my_own_key": 1}, "my_own_key", command.UNKNOWN),
        ({"lora_target_parameters": STACKS[:1]}, "lora_target_parameters", "both stacks"),
        (
            {"lora_target_parameters": [f"22.{name}" for name in STACKS]},
            "lora_target_parameters",
            "all layers",
        ),
        (
            {"model_config": {"router_aux_loss_coef": 0.01}},
            "model_config.router_aux_loss_coef",
            "tune.router_aux_loss",
        ),
        ({"lr_scheduler": "one_cycle"}, "lr_scheduler", "cosine_with_restarts or wsd"),
        ({"optimizer": "muon"}, "optimizer", "only optimizer"),
        ({"val_set_size": 500, "eval_steps": None}, "val_set_size", "share"),
        ({"eval_steps": 0.1}, "eval_steps", "number of steps"),
        ({"chat_template": "chatml"}, "chat_template", "Jinja file"),
        ({"chat_template_jinja": "{{ bos_token }}"}, "chat_template_jinja", "into a file"),
        ({"tokens": ["<x>"]}, "tokens", "no tokens are added"),
        ({"special_tokens__eos_token": "<x>"}, "special_tokens.eos_token", "tokenizer's own"),
        ({"plugins": ["my.Plugin"]}, "plugins", "Plugin: there are no plugins"),
        (
            {"model_config": {"rope_scaling": {"factor": 2}}},
            "model_config.rope_scaling.factor",
            "json",
        ),
        ({"unfrozen_parameters": ["lm_head"]}, "unfrozen_parameters", "frozen"),
    ],
)
def test_what_must_be_seen_to_first_is_marked(changes, key, words):
    converted = command.convert(theirs(LORA, **changes), 4)
    assert words in line_of(converted.left, key)
    assert line_of(converted.left, key) in converted.to_do


@pytest.mark.parametrize(
    ("dataset", "path", "key", "words"),
    [
        ({"path": "tatsu-lab/alpaca", "type": "alpaca"}, None, "path", "--repo-type dataset"),
        ({"path": "tatsu-lab/alpaca", "data_files": "a.json"}, None, "data_files", "hf download"),
        ({"path": "s3://bucket/a.jsonl"}, None, "path", "name DIR in data.path"),
        ({"path": "json", "data_files": "a.xlsx"}, None, "data_files", "JSONL or Parquet"),
        ({"path": "a.jsonl", "split": "train[:20%]"}, "a.jsonl", "split", "r[:round(len(r)*20"),
        ({"path": "a.jsonl", "split": "held"}, "a.jsonl", "split", "name the file of this part"),
        ({"path": "a.jsonl", "type": "alpaca"}, "a.jsonl", "type", "axolotl's words"),
        ({"path": "a.jsonl", "train_on_eos": "all"}, "a.jsonl", "train_on_eos", "answers"),
        ({"path": "a.jsonl", "type": "input_output"}, "a.jsonl", "type", "docs/data.md"),
        ({"path": "a.jsonl", "type": "pygmalion"}, "a.jsonl", "type", "docs/data.md"),
        ({"path": "a.jsonl", "type": "context_qa"}, "a.jsonl", "type", "docs/data.md"),
        ({"path": "a.jsonl", "conversation": "chatml"}, "a.jsonl", "conversation", "Jinja"),
        (
            {"path": "a.jsonl", "type": {"format": "Q: {instruction}"}},
            "a.jsonl",
            "type.format",
            "Jinja",
        ),
        ({"path": "a.jsonl", "roles_to_train": ["user"]}, "a.jsonl", "roles_to_train", "all text"),
        ({"path": "a.jsonl", "shards": 4}, "a.jsonl", "shards", "r[0::4]"),
        (
            {"path": "a.jsonl", "message_property_mappings": {"role": "speaker"}},
            "a.jsonl",
            "message_property_mappings.role",
            "name it role or content",
        ),
    ],
)
def test_what_of_a_dataset_cannot_be_taken_over_is_marked(dataset, path, key, words):
    converted = command.convert(theirs(LORA, datasets=[dataset]), 4)
    line = line_of(converted.left, f"datasets.0.{key}")
    assert words in line
    assert line in converted.to_do
    assert settings(converted)["data.path"] == (path or command.PLACEHOLDER)


@pytest.mark.parametrize(
    ("datasets", "expected"),
    [
        ([{"path": "data/train.jsonl"}], {"data.path": "data/train.jsonl"}),
        ([{"path": "/data/set"}], {"data.path": "/data/set"}),
        ([{"path": "/d", "data_files": ["a.jsonl"]}], {"data.path": "/d/a.jsonl"}),
        ([{"path": "/d/a.jsonl", "data_files": ["/d/a.jsonl"]}], {"data.path": "/d/a.jsonl"}),
        ([{"path": "csv", "data_files": "a.csv.gz"}], {"data.path": "a.csv.gz"}),
        (
            [{"path": "a.jsonl", "type": "oasst"}, {"path": "b.jsonl", "field_messages": "turns"}],
            {
                "data.path": ["a.jsonl", "b.jsonl"],
                "data.columns": {
                    "INSTRUCTION": "instruction",
                    "RESPONSE": "output",
                    "turns": "messages",
                },
            },
        ),
        ([{"path": "a.jsonl", "type": "alpaca_chat.load_qa"}], {"data.columns": None}),
        ([{"path": "a.jsonl", "type": "sharegpt.load_role"}], {"data.columns": None}),
    ],
)
def test_files_and_columns_of_datasets_are_taken_over(datasets, expected):
    came = on_four_ranks(LORA, {"datasets": datasets})
    assert {key: came.get(key) for key in expected} == expected


@EXAMPLES
def test_the_file_that_is_written_is_one_that_a_run_accepts(tmp_path, capsys, text, ours):
    source, out = tmp_path / "theirs.yml", tmp_path / "ours.yaml"
    source.write_text(text)
    assert cli.main(["convert", str(source), "--ranks", "4", "--out", str(out)]) == EXIT_DONE
    assert capsys.readouterr().err.endswith(f"  python -m hpc_tune plan --config {out}\n")
    expected = yaml.safe_load(ours)
    config = load_config(str(out))
    assert config.batch.global_size == expected["batch"]["global_size"]
    assert config.tune.method == expected["tune"]["method"]


def test_what_is_learned_from_text_alone_is_taken_over():
    text = theirs(LORA, datasets=None, max_steps=9)
    dataset = {"path": "/data/books", "text_column": "body"}
    for text["pretraining_dataset"] in (dataset, [dataset]):
        came = settings(command.convert(text, 4))
        assert (came["data.path"], came["data.columns"]) == ("/data/books", {"body": "text"})


def test_the_name_of_a_loader_is_not_taken_for_one_of_a_hub():
    dataset = {"path": "json", "data_files": "a.xlsx"}
    converted = command.convert(theirs(LORA, datasets=[dataset]), 1)
    assert line_of(converted.decided, "datasets.0.path") is not None


def test_a_secret_in_a_config_is_not_printed():
    converted = command.convert(theirs(LORA, comet_api_key="s3cret"), 1)
    assert "s3cret" not in "\n".join(command.report_lines(converted, converted.to_do))
    assert line_of(converted.left, "comet_api_key") is not None


def test_data_held_out_twice_is_one_message():
    changes = {"test_datasets": [{"path": "held.jsonl"}]}
    with pytest.raises(ConfigError, match="both say what is held out"):
        command.convert(theirs(LORA, **changes), 1)
