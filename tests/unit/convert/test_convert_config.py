"""Configs of other tools become ours, and no key of theirs goes missing on the way."""

import ast
import re
from collections import Counter

import pytest
import yaml

from hpc_tune import cli
from hpc_tune.config.load import describe_fields, load_config
from hpc_tune.convert import convert as tool
from hpc_tune.convert.axolotl import AXOLOTL
from hpc_tune.convert.llama_factory import LLAMA_FACTORY
from hpc_tune.convert.rules import ForeignConfig, rule_table
from hpc_tune.convert.torchtune import TORCHTUNE
from hpc_tune.errors import EXIT_DONE, EXIT_USER_ERROR, ConfigError
from tests.support.converting import CONFIGS, FACTORY_LORA, TUNE_LORA, line_of, settings, theirs
from tests.support.ranks import ROOT

OURS_TUNE = """
model: {path: /models/llama, dtype: bf16}
tune: {method: lora, rank: 64, alpha: 128.0, targets: [q_proj, v_proj, o_proj]}
data: {path: /data/chats.jsonl, seq_len: 8192, packing: true, loss_on: answers}
batch: {global_size: 60}  # 3 x 5 x 4
optim: {lr: 3.0e-4, weight_decay: 0.01, schedule: cosine, min_lr_ratio: 0.0, warmup_steps: 40,
  clip_norm: 1.5}
parallel: {recompute: full, offload_params: cpu}
train: {epochs: 2.0, seed: 11, compile: true}
run: {dir: /runs/here, device: cuda}
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
OURS_FULL = """
model: {path: /models/1b, dtype: bf16}
tune: {method: full, param_dtype: bf16}
data: {path: data/code.jsonl, columns: {content: text}, seq_len: 2048, packing: true}
batch: {global_size: 8}  # 4 x 1 x 4 / 2 that share a row
optim: {lr: 2.0e-5, schedule: cosine, min_lr_ratio: 0.0}
parallel: {context: 2}  # without train.compile, which does not go with it
train: {epochs: 1.0}
run: {dir: out, tensorboard: true}
"""
OURS_FACTORY = """
model: {path: /models/qwen, dtype: bf16}
tune: {method: lora, rank: 4, alpha: 8.0, targets: [q_proj, v_proj]}
data: {path: FILL_IN, seq_len: 1024, packing: false}
batch: {global_size: 64}  # 2 x 8 x 4
optim: {lr: 1.0e-4, schedule: cosine, min_lr_ratio: 7.615e-05, warmup_steps: 20}
parallel: {recompute: full}
train: {max_steps: 200}
checkpoint: {every_steps: 50}
run: {dir: /runs/qwen}
"""
EXAMPLES = pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("torchtune", OURS_TUNE),
        ("factory", OURS_FACTORY),
        ("axolotl", OURS_LORA),
        ("axolotl_qlora", OURS_QLORA),
        ("axolotl_full", OURS_FULL),
    ],
)
# Of torchtune the keys of the recipes that it ships for supervised fine-tuning.
TORCHTUNE_KEYS = """
tokenizer._component_ tokenizer.path tokenizer.max_seq_len tokenizer.merges_file
tokenizer.max_num_tiles model._component_ model.lora_attn_modules model.apply_lora_to_mlp
model.apply_lora_to_output model.lora_rank model.lora_alpha model.lora_dropout model.use_dora
model.quantize_base checkpointer._component_ checkpointer.checkpoint_dir
checkpointer.checkpoint_files checkpointer.checkpoint_files.filename_format
checkpointer.checkpoint_files.max_filename checkpointer.recipe_checkpoint
checkpointer.adapter_checkpoint checkpointer.output_dir checkpointer.model_type
resume_from_checkpoint save_adapter_weights_only save_last_epoch_only epochs_to_save
save_every_n_steps dataset._component_ dataset.packed dataset.train_on_input dataset.source
dataset.data_files dataset.split dataset.column_map.input dataset.conversation_column
dataset.conversation_style dataset.new_system_prompt run_val_every_n_steps dataset_val._component_
dataset_val.split batch_size_val seed shuffle batch_size optimizer._component_ optimizer.fused
optimizer.foreach optimizer.weight_decay optimizer.lr lr_scheduler._component_
lr_scheduler.num_warmup_steps loss._component_ epochs max_steps_per_epoch
gradient_accumulation_steps clip_grad_norm compile optimizer_in_bwd output_dir
metric_logger._component_ metric_logger.log_dir log_every_n_steps log_peak_memory_stats log_level
device dtype enable_activation_checkpointing enable_activation_offloading custom_sharded_layers
fsdp_cpu_offload fsdp.cpu_offload memory_efficient_fsdp_wrap tensor_parallel_dim
tensor_parallel_plan._component_ low_cpu_ram profiler._component_ profiler.enabled
profiler.output_dir profiler.cpu profiler.cuda profiler.profile_memory profiler.with_stack
profiler.record_shapes profiler.with_flops profiler.wait_steps profiler.warmup_steps
profiler.active_steps profiler.num_cycles
"""
# Of LLaMA-Factory the arguments that it documents, and those of the Trainer that it takes too.
LLAMA_FACTORY_KEYS = """
model_name_or_path adapter_name_or_path adapter_folder cache_dir use_fast_tokenizer resize_vocab
split_special_tokens add_tokens add_special_tokens new_special_tokens_config init_special_tokens
model_revision low_cpu_mem_usage rope_scaling flash_attn shift_attn mixture_of_depths use_unsloth
use_unsloth_gc enable_liger_kernel moe_aux_loss_coef disable_gradient_checkpointing use_reentrant_gc
upcast_layernorm upcast_lmhead_output train_from_scratch infer_backend offload_folder use_kv_cache
use_v1_kernels infer_dtype hf_hub_token ms_hub_token om_hub_token print_param_status
trust_remote_code quantization_method quantization_bit quantization_type double_quantization
quantization_device_map fp8 fp8_backend fp8_enable_fsdp_float8_all_gather image_max_pixels
image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels video_fps
video_maxlen use_audio_in_video audio_sampling_rate export_dir export_size export_device
export_quantization_bit export_quantization_dataset export_quantization_nsamples
export_quantization_maxlen export_legacy_format export_hub_model_id vllm_maxlen vllm_gpu_util
vllm_enforce_eager vllm_max_lora_rank vllm_config use_kt kt_optimize_rule cpu_infer chunk_size mode
kt_maxlen kt_use_cuda_graph kt_mode kt_force_think template dataset eval_dataset dataset_dir
media_dir cutoff_len train_on_prompt mask_history streaming buffer_size mix_strategy
interleave_probs overwrite_cache preprocessing_batch_size preprocessing_num_workers max_samples
eval_num_beams ignore_pad_token_for_loss val_size eval_on_each_dataset packing neat_packing
tool_format default_system enable_thinking tokenized_path data_shared_file_system
freeze_trainable_layers freeze_trainable_modules freeze_extra_modules additional_target lora_alpha
lora_dropout lora_rank lora_target loraplus_lr_ratio loraplus_lr_embedding use_rslora use_dora
pissa_init pissa_iter pissa_convert create_new_adapter module_dropout oft_rank oft_block_size
oft_target pref_beta pref_ftx pref_bco_weight pref_loss dpo_label_smoothing kto_chosen_weight
kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm ppo_target
ppo_whiten_rewards ref_model ref_model_adapters ref_model_quantization_bit reward_model
reward_model_adapters reward_model_quantization_bit reward_model_type ld_alpha use_galore
galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise
use_apollo apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj
apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front use_badam badam_mode
badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode
badam_verbose use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode
swanlab_api_key swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret pure_bf16 stage
finetuning_type use_llama_pro use_adam_mini use_mca use_muon use_dft_loss use_asft_loss asft_alpha
use_eaft_loss eaft_alpha freeze_vision_tower freeze_multi_modal_projector freeze_language_model
compute_accuracy disable_shuffling early_stopping_steps plot_loss
include_effective_tokens_per_second ray_run_name ray_storage_path ray_storage_filesystem
ray_num_workers resources_per_worker placement_strategy ray_init_kwargs overwrite_output_dir
do_sample temperature top_p top_k num_beams max_length max_new_tokens repetition_penalty
length_penalty skip_special_tokens sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config
sglang_lora_backend use_ray resources_per_worker.GPU do_predict
"""
TRAINER_KEYS = """
accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2
adam_epsilon auto_find_batch_size average_tokens_across_devices batch_eval_metrics bf16
bf16_full_eval data_seed dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context
dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
dataloader_prefetch_factor ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed disable_tqdm do_eval
do_train enable_jit_checkpoint eval_accumulation_steps eval_delay eval_do_concat_batches
eval_on_start eval_steps eval_strategy eval_use_gather_object fp16 fp16_full_eval fsdp fsdp_config
full_determinism generation_config generation_max_length generation_num_beams
gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs greater_is_better
hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip
include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor learning_rate
length_column_name liger_kernel_config load_best_model_at_end local_rank log_level log_level_replica
log_on_each_node logging_first_step logging_nan_inf_filter logging_steps logging_strategy
lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps metric_for_best_model
neftune_noise_alpha num_train_epochs optim optim_args optim_target_modules output_dir
parallelism_config per_device_eval_batch_size per_device_train_batch_size predict_with_generate
prediction_loss_only project push_to_hub remove_unused_columns report_to
restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_on_each_node
save_only_model save_steps save_strategy save_total_limit seed skip_memory_metrics sortish_sampler
tf32 torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy use_cache use_cpu
use_liger_kernel warmup_steps weight_decay
"""
# The configuration reference of axolotl: what stands at the top level, and in its parts.
AXOLOTL_KEYS = """
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
DATASETS = [
    f"{part}.{key}"
    for part in ("datasets.0", "test_datasets.1", "pretraining_dataset.0")
    for key in DATASET_KEYS.split()
]


@EXAMPLES
def test_a_config_becomes_ours(name, ours):
    assert tool.convert_config(yaml.safe_load(CONFIGS[name]), 4).config == yaml.safe_load(ours)


@EXAMPLES
def test_the_file_that_is_written_is_one_that_a_run_accepts(tmp_path, capsys, name, ours):
    source, out = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    source.write_text(CONFIGS[name])
    assert cli.main(["convert", str(source), "--ranks", "4", "--out", str(out)]) == EXIT_DONE
    said = capsys.readouterr().err
    assert said.startswith("recognized: a config of ")
    assert said.endswith(f"  python -m hpc_tune plan --config {out}\n")
    config, expected = load_config(str(out)), yaml.safe_load(ours)
    assert config.batch.global_size == expected["batch"]["global_size"]
    assert config.tune.method == expected["tune"]["method"]


@pytest.mark.parametrize("text", CONFIGS.values(), ids=CONFIGS)
def test_each_of_their_keys_is_in_one_group_and_what_is_unknown_is_named(text):
    config = theirs(text, my_own_key=3)
    converted = tool.convert_config(config, 4)
    groups = (converted.mapped_keys, converted.ignored_keys, converted.unsupported_keys)
    for key, _ in tool.flatten_keys(config, tool.recognize_tool(config).array_keys):
        assert [line_of(lines, key) is not None for lines in groups].count(True) == 1, key
    assert (
        line_of(converted.unsupported_keys, "my_own_key")
        == f"my_own_key = 3: {tool.UNKNOWN_KEY_ADVICE}"
    )


@pytest.mark.parametrize(
    ("rules", "keys"),
    [
        (TORCHTUNE, TORCHTUNE_KEYS.split()),
        (LLAMA_FACTORY, LLAMA_FACTORY_KEYS.split() + TRAINER_KEYS.split()),
        (AXOLOTL, AXOLOTL_KEYS.split() + DATASETS),
    ],
)
def test_the_keys_that_are_documented_are_known(rules, keys):
    nothing = ForeignConfig(rules, {}, 1)
    assert [key for key in keys if rules.outcome(key, nothing) is None] == []
    assert rules.outcome("no_such_key", nothing) is None


@pytest.mark.parametrize(
    "file", ["axolotl", "axolotl_data", "hf_trainer", "llama_factory", "torchtune"]
)
def test_no_key_has_two_rows(file):
    """The later one would win unseen."""
    tables = ast.walk(ast.parse((ROOT / "hpc_tune" / "convert" / f"{file}.py").read_text()))
    for found in (node for node in tables if isinstance(node, ast.Dict)):
        keys = [key.value for key in found.keys if isinstance(key, ast.Constant)]
        for row in found.values:
            match row:
                case ast.Call(func=ast.Name("each"), args=[_, ast.Constant(names)]):
                    keys += names.split()
        assert [key for key, number in Counter(keys).items() if number > 1] == []


def test_no_key_is_in_two_tables():
    with pytest.raises(AssertionError, match="seed.*have two rules"):
        rule_table({"seed": "train.seed"}, {"it is so": "tf32 seed"})


@pytest.mark.parametrize(
    ("text", "changes", "key", "words"),
    [
        (FACTORY_LORA, {"optim": "adamw_bnb_8bit"}, "optim", "also for embeddings"),
        (FACTORY_LORA, {"optim": "paged_adamw_8bit"}, "optim", "not paged"),
        (FACTORY_LORA, {"optim": "paged_adamw_32bit"}, "optim", "optim.name=adamw_8bit"),
        (
            TUNE_LORA,
            {"optimizer___component_": "torchao.optim.AdamW8bit"},
            "optimizer._component_",
            "parallel.offload_params=cpu",
        ),
    ],
)
def test_what_is_different_in_8_bits_is_said(text, changes, key, words):
    converted = tool.convert_config(theirs(text, **changes), 1)
    assert words in line_of([*converted.unsupported_keys, *converted.mapped_keys], key)


def test_fp16_is_named_and_the_dtype_left_to_the_device():
    converted = tool.convert_config(theirs(FACTORY_LORA, bf16=None, fp16=True), 1)
    assert "bf16 or fp32" in line_of(converted.unsupported_keys, "fp16")
    assert "model.dtype" not in settings(converted)
    converted = tool.convert_config(theirs(TUNE_LORA, dtype="fp16"), 1)
    assert "bf16 or fp32" in line_of(converted.unsupported_keys, "dtype")


def test_a_second_key_for_the_same_setting_does_not_overwrite_the_first():
    columns = {"dataset__conversation_column": "turns", "dataset__column": "body"}
    converted = tool.convert_config(theirs(TUNE_LORA, **columns), 1)
    assert settings(converted)["data.columns"] == {"turns": "messages"}
    assert "data.columns = {'turns': 'messages'} already" in line_of(
        converted.unsupported_keys, "dataset.column"
    )


@pytest.mark.parametrize(
    ("config", "ranks", "words"),
    [
        ({"base_model": "x", "my_key": "lora"}, 1, "base_model, my_key; expected"),
        ({"model": {"_component_": "x"}}, 1, "expected a training config of torchtune"),
        ({"model": "m", "train_dataset": "d.yaml"}, 1, "newer form of LLaMA-Factory (v1"),
        ({"model": "m", "dataset": "d", "train_type": "lora"}, 1, "a config of ms-swift"),
        ({"model_name_or_path": "m", "dataset_name": "d"}, 1, "a config of trl"),
        ({}, 1, "found the keys nothing"),
        (theirs(TUNE_LORA, tensor_parallel_dim=4), 6, "give a multiple of 4"),
        (theirs(TUNE_LORA, batch_size="many"), 1, "batch_size = 'many' in their config"),
        (theirs(TUNE_LORA, optimizer__lr=-1), 1, "optim.lr=-1: Input should be greater"),
        (theirs(TUNE_LORA, output_dir="${gone}"), 1, "refers to ${gone}, which is not set"),
        (theirs(TUNE_LORA, a="${b}", b="${a}"), 1, "refer to each other: a -> b -> a"),
        (theirs(TUNE_LORA, a="${a}"), 1, "refer to each other: a -> a"),
        (theirs(TUNE_LORA, a="${b}", b="${b}"), 1, "refer to each other: b -> b"),
    ],
)
def test_what_cannot_be_converted_is_one_message(config, ranks, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        tool.convert_config(config, ranks)


def test_without_ranks_one_is_assumed_and_said_in_the_file_too(tmp_path, capsys):
    source = tmp_path / "theirs.yaml"
    source.write_text(TUNE_LORA)
    assert cli.main(["convert", str(source)]) == EXIT_DONE
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert "--ranks was not given, so 1 rank is assumed" in text
    assert yaml.safe_load(said.out)["batch"]["global_size"] == 15


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "no such file"), ("a: [1", "not YAML"), ("- 1", "found list"), ("a: 1", "expected")],
)
def test_wrong_input_is_one_message_and_exit_code_2(tmp_path, capsys, content, words):
    source = tmp_path / "theirs.yaml"
    if content is not None:
        source.write_text(content)
    assert cli.main(["convert", str(source)]) == EXIT_USER_ERROR
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert words in said.err


def test_a_file_that_is_there_is_not_overwritten(tmp_path, capsys):
    source = tmp_path / "theirs.yaml"
    source.write_text(TUNE_LORA)
    assert cli.main(["convert", str(source), "--out", str(source)]) == EXIT_USER_ERROR
    assert "exists" in capsys.readouterr().err
    assert source.read_text() == TUNE_LORA


def test_a_file_name_that_is_too_long_is_refused_with_the_reason(tmp_path, capsys):
    source = tmp_path / "theirs.yaml"
    source.write_text(TUNE_LORA)
    out = tmp_path / f"{'x' * 300}.yaml"
    assert cli.main(["convert", str(source), "--out", str(out)]) == EXIT_USER_ERROR
    assert "cannot be written: File name too long" in capsys.readouterr().err


def tables():
    """Return, for each tool of the page, the cells of the column that is ours."""
    page = (ROOT / "docs" / "coming-from.md").read_text()
    found = {}
    for section in page.split("\n## ")[1:]:
        rows = [line.strip("|").split("|") for line in section.splitlines() if line[:1] == "|"]
        if rows:
            assert rows[0][1].strip() == "hpc_tune"
            assert {len(row) for row in rows} == {3}
            found[section.splitlines()[0]] = [row[1] for row in rows[2:]]
    return found


def test_the_page_names_only_settings_that_exist():
    known = {name for name, *_ in describe_fields()}
    found = tables()
    assert list(found) == ["torchtune", "LLaMA-Factory", "axolotl", "LitGPT", "TorchTitan"]
    for name, cells in found.items():
        named = [code for cell in cells for code in re.findall(r"`([^`]*)`", cell)]
        assert [code for code in named if code not in known] == [], name
        assert {"model.path", "batch.global_size", "optim.lr", "run.dir"} <= set(named), name


@pytest.mark.parametrize(
    "text",
    [
        "llamafactory-cli train --stage sft --do_train True",
        "#!/bin/bash\nset -e: 1: 2\ntorchrun train.py \\\n  --do_train --stage=sft \\\n",
    ],
)
def test_a_script_of_flags_is_told_how_to_become_yaml(tmp_path, text):
    script = tmp_path / "run.sh"
    script.write_text(text)
    with pytest.raises(ConfigError, match="flags .*not YAML; write each flag .* as stage: sft"):
        tool.read_yaml(script)
