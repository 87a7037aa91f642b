"""Configs of other tools become ours, and no key of theirs goes missing on the way."""

import re

import pytest
import yaml

from hpc_tune import cli
from hpc_tune.config.load import describe_fields, load_config
from hpc_tune.convert import convert as tool
from hpc_tune.convert.llama_factory import LLAMA_FACTORY
from hpc_tune.convert.rules import ForeignConfig, table
from hpc_tune.convert.torchtune import TORCHTUNE
from hpc_tune.errors import EXIT_DONE, EXIT_USER, ConfigError
from tests.support.converting import line_of, on_four_ranks, settings, theirs
from tests.support.ranks import ROOT

TORCHTUNE_LORA = """
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
LLAMA_FACTORY_LORA = """
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
OURS_1 = """
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
OURS_2 = """
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
BOTH = ("tune", "factory")
ATTENTION = ["q_proj", "k_proj", "v_proj", "output_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
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


@pytest.mark.parametrize(
    ("text", "ours"), [(TORCHTUNE_LORA, OURS_1), (LLAMA_FACTORY_LORA, OURS_2)], ids=BOTH
)
def test_a_config_becomes_ours(text, ours):
    assert tool.convert(yaml.safe_load(text), 4).config == yaml.safe_load(ours)


@pytest.mark.parametrize("text", [TORCHTUNE_LORA, LLAMA_FACTORY_LORA], ids=BOTH)
def test_each_of_their_keys_is_in_one_group_and_what_is_unknown_is_named(text):
    config = theirs(text, my_own_key=3)
    converted = tool.convert(config, 1)
    groups = (converted.taken, converted.decided, converted.left)
    for key, _ in tool.flatten(config):
        assert [line_of(lines, key) is not None for lines in groups].count(True) == 1, key
    assert line_of(converted.left, "my_own_key") == f"my_own_key = 3: {tool.UNKNOWN}"


@pytest.mark.parametrize(
    ("rules", "keys"),
    [(TORCHTUNE, TORCHTUNE_KEYS), (LLAMA_FACTORY, LLAMA_FACTORY_KEYS + TRAINER_KEYS)],
    ids=BOTH,
)
def test_the_keys_that_are_documented_are_known(rules, keys):
    nothing = ForeignConfig(rules, {}, 1)
    assert [key for key in keys.split() if rules.outcome(key, nothing) is None] == []
    assert rules.outcome("no_such_key", nothing) is None


def test_no_key_has_two_rules():
    """The later one would win unseen."""
    with pytest.raises(AssertionError, match="seed.*have two rules"):
        table({"seed": "train.seed"}, {"it is so": "tf32 seed"})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model___component_": "t.qlora_llama3_1_8b"}, {"tune.method": "qlora"}),
        ({"model__use_dora": True}, {"tune.method": "dora"}),
        (
            {"model___component_": "t.llama3_8b", "model__lora_rank": None},
            {"tune.method": "full", "tune.param_dtype": "bf16"}
            | {"tune.rank": None, "tune.alpha": None, "tune.targets": None},
        ),
        ({"model__use_dora": True, "model__quantize_base": True}, {"tune.method": "qlora"}),
        (
            {"model__lora_attn_modules": ATTENTION, "model__apply_lora_to_mlp": True},
            {"tune.targets": "all-linear"},
        ),
        (
            {"model__apply_lora_to_mlp": True, "model__apply_lora_to_output": True},
            {"tune.targets": ["q_proj", "v_proj", "o_proj", *MLP, "lm_head"]},
        ),
        ({"dataset__packed": None}, {"data.packing": False}),
        ({"dataset__train_on_input": True}, {"data.loss_on": "all"}),
        ({"dataset__data_files": "/data/*.csv"}, {"data.path": "/data/*.csv"}),
        (
            {"dataset___component_": "torchtune.datasets.instruct_dataset"}
            | {"dataset__column_map": {"input": "question", "output": "reply"}},
            {"data.columns": {"question": "prompt", "reply": "completion"}},
        ),
        ({"dataset__conversation_column": "dialogue"}, {"data.columns": {"dialogue": "messages"}}),
        ({"metric_logger": {"_component_": "t.WandBLogger"}}, {"run.trackers": ["wandb"]}),
        (
            {"dataset___component_": "torchtune.datasets.alpaca_dataset"}
            | {"dataset__train_on_input": None},
            {"data.loss_on": "all"},
        ),
        (
            {"optimizer___component_": "bitsandbytes.optim.PagedAdamW8bit"}
            | {"fsdp_cpu_offload": False},
            {"optim.name": "adamw_8bit"},
        ),
        ({"optimizer___component_": "torchao.optim.AdamW8bit"}, {"optim.name": None}),
        ({"clip_grad_norm": None}, {"optim.clip_norm": 0.0}),
        ({"lr_scheduler": None}, {"optim.schedule": "constant", "optim.warmup_steps": 0}),
        ({"max_steps_per_epoch": 7}, {"train.max_steps": 14}),
        ({"enable_activation_checkpointing": False}, {"parallel.recompute": "none"}),
        (
            {"dataset_val__data_files": "/data/held.jsonl", "run_val_every_n_steps": 9},
            {"data.eval_path": "/data/held.jsonl", "train.eval_every_steps": 9},
        ),
        ({"tensor_parallel_dim": 2}, {"batch.global_size": 3 * 5 * 2}),
        ({"checkpointer__checkpoint_dir": "${output_dir}"}, {"model.path": "/runs/here"}),
        ({"output_dir": "${oc.env:HOME}/x"}, {"run.dir": "${oc.env:HOME}/x"}),
        ({"my_seed": 5, "seed": "${my_seed}"}, {"train.seed": 5}),
    ],
)
def test_what_torchtune_says_elsewhere_or_by_default_counts_too(changes, expected):
    came = on_four_ranks(TORCHTUNE_LORA, changes)
    assert {key: came.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"quantization_bit": 4}, {"tune.method": "qlora"}),
        ({"use_dora": True}, {"tune.method": "dora"}),
        ({"lora_target": "all"}, {"tune.targets": "all-linear"}),
        ({"lora_rank": None}, {"tune.rank": 8, "tune.alpha": 16.0}),
        ({"finetuning_type": "full"}, {"tune.method": "full", "tune.rank": None}),
        ({"finetuning_type": "full", "pure_bf16": True}, {"tune.param_dtype": "bf16"}),
        ({"neat_packing": True}, {"data.packing": True}),
        ({"train_on_prompt": True}, {"data.loss_on": "all"}),
        ({"max_steps": None}, {"train.epochs": 3.0, "optim.warmup_ratio": 0.1}),
        ({"val_size": 0.1}, {"data.eval_fraction": 0.1}),
        ({"val_size": 0.1, "eval_steps": 20}, {"train.eval_every_steps": 20}),
        ({"eval_steps": 20}, {"train.eval_every_steps": None}),
        (
            {"val_size": 0.1, "eval_steps": 20, "early_stopping_steps": 3},
            {"train.stop_after_evals": 3, "checkpoint.keep_best": True},
        ),
        ({"early_stopping_steps": 3}, {"train.stop_after_evals": None}),
        ({"save_strategy": "best"}, {"checkpoint.keep_best": True}),
        ({"use_cpu": True}, {"run.device": "cpu"}),
        ({"use_rslora": True}, {"tune.rslora": True}),
        ({"neftune_noise_alpha": 5}, {"tune.neftune_alpha": 5}),
        ({"optim": "adamw_8bit"}, {"optim.name": "adamw_8bit"}),
        ({"optim": "adamw_torch_4bit"}, {"optim.name": None}),
        ({"loraplus_lr_ratio": 16.0}, {"optim.lora_b_ratio": 16.0}),
        ({"loraplus_lr_ratio": 16.0, "finetuning_type": "full"}, {"optim.lora_b_ratio": None}),
        ({"use_rslora": True, "finetuning_type": "full"}, {"tune.rslora": None}),
        ({"max_steps": -1}, {"train.epochs": 3.0, "train.max_steps": None}),
        ({"warmup_ratio": None, "warmup_steps": 30}, {"optim.warmup_steps": 30}),
        (
            {"warmup_ratio": 0.5, "warmup_steps": 30, "max_steps": None},
            {"optim.warmup_steps": 30, "optim.warmup_ratio": None},
        ),
        (
            {"warmup_ratio": 0.5, "warmup_steps": 0, "max_steps": None},
            {"optim.warmup_steps": None, "optim.warmup_ratio": 0.5},
        ),
        ({"warmup_ratio": None}, {"optim.warmup_steps": 0, "optim.warmup_ratio": None}),
        ({"lr_scheduler_type": None}, {"optim.schedule": "linear", "optim.min_lr_ratio": 0.005556}),
        ({"max_steps": None}, {"optim.schedule": "cosine", "optim.min_lr_ratio": 0.0}),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5}},
            {"optim.schedule": "cosine", "optim.min_lr_ratio": 0.1},
        ),
        (
            {
                "lr_scheduler_type": "cosine_with_restarts",
                "lr_scheduler_kwargs": {"num_cycles": 3},
            },
            {"optim.schedule": "cosine_with_restarts", "optim.restarts": 2},
        ),
        ({"lr_scheduler_type": "cosine_with_restarts"}, {"optim.schedule": "cosine"}),
        (
            {
                "max_steps": 100,
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 20, "decay_type": "linear"},
            },
            {"optim.schedule": "wsd", "optim.decay_ratio": 0.2, "optim.min_lr_ratio": 0.0},
        ),
        ({"learning_rate": None}, {"optim.lr": 5e-5}),
        ({"per_device_train_batch_size": None}, {"batch.global_size": 8 * 8 * 4}),
        ({"disable_gradient_checkpointing": True}, {"parallel.recompute": "none"}),
        ({"report_to": "none"}, {"run.tensorboard": False}),
        ({"report_to": ["wandb"]}, {"run.tensorboard": False, "run.trackers": ["wandb"]}),
        ({"adapter_name_or_path": "/runs/a/adapter"}, {"tune.init_from": "/runs/a/adapter"}),
    ],
)
def test_what_llama_factory_says_elsewhere_or_by_default_counts_too(changes, expected):
    came = on_four_ranks(LLAMA_FACTORY_LORA, changes)
    assert {key: came.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("text", "changes", "key", "words"),
    [
        (LLAMA_FACTORY_LORA, {"model_name_or_path": "org/name"}, "model_name_or_path", "hub"),
        (LLAMA_FACTORY_LORA, {}, "dataset", "dataset_info.json"),
        (LLAMA_FACTORY_LORA, {"quantization_bit": 8}, "quantization_bit", "4 bits"),
        (LLAMA_FACTORY_LORA, {"val_size": 500}, "val_size", "share"),
        (TORCHTUNE_LORA, {"tokenizer__max_seq_len": None}, "tokenizer.max_seq_len", "seq_len"),
        (
            TORCHTUNE_LORA,
            {"dataset": {"_component_": "torchtune.datasets.alpaca_cleaned_dataset"}},
            "dataset._component_",
            "alpaca_cleaned_dataset",
        ),
        (TORCHTUNE_LORA, {"dataset__data_files": "/d/a.xlsx"}, "dataset.data_files", "JSONL"),
        (TORCHTUNE_LORA, {"dataset__column_map": {"a": "b"}}, "dataset.column_map.a", "columns"),
        (
            TORCHTUNE_LORA,
            {"checkpointer___component_": "torchtune.training.FullModelMetaCheckpointer"},
            "checkpointer.checkpoint_dir",
            "Meta's format",
        ),
        (TORCHTUNE_LORA, {"loss___component_": "t.MyLoss"}, "loss._component_", "only"),
    ],
)
def test_what_cannot_be_known_is_to_do_and_has_a_placeholder(text, changes, key, words):
    converted = tool.convert(theirs(text, lora_alpha=8, **changes), 1)
    assert words in line_of(converted.left, key)
    assert line_of(converted.left, key) in converted.to_do
    for path in ("model.path", "data.path"):
        notes = [note for note in converted.to_do if path in note]
        assert (settings(converted)[path] == tool.PLACEHOLDER) == bool(notes)
        assert len(notes) <= 1, "what their config tells is not said to be missing"


@pytest.mark.parametrize(
    ("text", "changes", "key", "words"),
    [
        (LLAMA_FACTORY_LORA, {"optim": "adamw_bnb_8bit"}, "optim", "embeddings too"),
        (LLAMA_FACTORY_LORA, {"optim": "paged_adamw_8bit"}, "optim", "not paged"),
        (LLAMA_FACTORY_LORA, {"optim": "paged_adamw_32bit"}, "optim", "optim.name=adamw_8bit"),
        (
            TORCHTUNE_LORA,
            {"optimizer___component_": "torchao.optim.AdamW8bit"},
            "optimizer._component_",
            "parallel.offload_params=cpu",
        ),
    ],
)
def test_what_is_different_in_8_bits_is_said(text, changes, key, words):
    converted = tool.convert(theirs(text, **changes), 1)
    assert words in line_of([*converted.left, *converted.taken], key)


def test_fp16_is_named_and_the_dtype_left_to_the_device():
    converted = tool.convert(theirs(LLAMA_FACTORY_LORA, bf16=None, fp16=True), 1)
    assert "bf16 or fp32" in line_of(converted.left, "fp16")
    assert "model.dtype" not in settings(converted)
    converted = tool.convert(theirs(TORCHTUNE_LORA, dtype="fp16"), 1)
    assert "bf16 or fp32" in line_of(converted.left, "dtype")


def test_a_second_key_for_the_same_setting_does_not_overwrite_the_first():
    columns = {"dataset__conversation_column": "turns", "dataset__column": "body"}
    converted = tool.convert(theirs(TORCHTUNE_LORA, **columns), 1)
    assert settings(converted)["data.columns"] == {"turns": "messages"}
    assert "data.columns = {'turns': 'messages'} already" in line_of(
        converted.left, "dataset.column"
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
        (theirs(TORCHTUNE_LORA, tensor_parallel_dim=4), 6, "give a multiple of 4"),
        (theirs(TORCHTUNE_LORA, batch_size="many"), 1, "batch_size = 'many' in their config"),
        (theirs(TORCHTUNE_LORA, optimizer__lr=-1), 1, "optim.lr=-1: Input should be greater"),
        (theirs(TORCHTUNE_LORA, output_dir="${gone}"), 1, "names ${gone}, which has no value"),
        (theirs(TORCHTUNE_LORA, a="${b}", b="${a}"), 1, "name each other"),
    ],
)
def test_what_cannot_be_converted_is_one_message(config, ranks, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        tool.convert(config, ranks)


@pytest.mark.parametrize("text", [TORCHTUNE_LORA, LLAMA_FACTORY_LORA], ids=BOTH)
def test_the_file_that_is_written_is_one_that_a_run_accepts(tmp_path, capsys, text):
    source, out = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    source.write_text(text)
    assert cli.main(["convert", str(source), "--ranks", "4", "--out", str(out)]) == EXIT_DONE
    assert capsys.readouterr().err.startswith("recognised: a config of ")
    config = load_config(str(out))
    tree = yaml.safe_load(text)
    rows = tree.get("batch_size") or tree["per_device_train_batch_size"]
    assert config.batch.global_size == rows * tree["gradient_accumulation_steps"] * 4


def test_without_ranks_one_is_assumed_and_said_in_the_file_too(tmp_path, capsys):
    source = tmp_path / "theirs.yaml"
    source.write_text(TORCHTUNE_LORA)
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
    assert cli.main(["convert", str(source)]) == EXIT_USER
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert words in said.err


def test_a_file_that_is_there_is_not_overwritten(tmp_path, capsys):
    source = tmp_path / "theirs.yaml"
    source.write_text(TORCHTUNE_LORA)
    assert cli.main(["convert", str(source), "--out", str(source)]) == EXIT_USER
    assert "exists" in capsys.readouterr().err
    assert source.read_text() == TORCHTUNE_LORA


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
