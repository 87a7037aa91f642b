"""The rules for configs of LLaMA-Factory, which also take the Hugging Face Trainer's keys."""

from typing import Any

from hpc_tune.convert import hf_trainer, preferences, rules
from hpc_tune.convert.rules import (
    ADAPTER_ONLY_KEY,
    SFT,
    ForeignConfig,
    IgnoredKey,
    MappedKey,
    Outcome,
    Refusal,
    Rule,
    Tool,
    UnsupportedKey,
    rule_for_keys,
)

# In LLaMA-Factory ipo, simpo and orpo are losses of stage dpo. As here, they use means over an
# answer's tokens, and pref_ftx weights the chosen answer's mean loss, per pair.
_OBJECTIVE_BY_LOSS = {"sigmoid": "dpo", "ipo": "ipo", "simpo": "simpo", "orpo": "orpo"}


def _read_objective(config: ForeignConfig) -> str | None:
    if config.get("stage") == "dpo":
        return _OBJECTIVE_BY_LOSS.get(str(config.get("pref_loss", "sigmoid")))
    return "kto" if config.get("stage") == "kto" else SFT


def _read_method(config: ForeignConfig) -> str:
    return rules.choose_method(
        is_full=config.get("finetuning_type") == "full",
        is_4_bit=str(config.get("quantization_bit")) == "4",
        is_dora=config.is_on("use_dora"),
    )


def _default_settings(config: ForeignConfig) -> dict[str, Any]:
    defaults = {
        "finetuning_type": "lora",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "learning_rate": 5e-5,
        "num_train_epochs": 3.0,
        "lr_scheduler_type": "linear",
        "cutoff_len": 2048,
        "packing": config.get("stage") == "pt",
        "disable_gradient_checkpointing": False,
    }
    if config.get("warmup_ratio") is None and config.get("warmup_steps") is None:
        defaults["warmup_steps"] = 0
    if config.get("finetuning_type") != "full":
        rank = config.integer("lora_rank") if config.get("lora_rank") else 8
        defaults |= {"lora_rank": rank, "lora_alpha": 2 * rank, "lora_target": "all"}
    if config.has_preferences:
        defaults["pref_beta"] = 0.1
    return defaults | ({"simpo_gamma": 0.5} if config.objective == "simpo" else {})


def _convert_stage(value: Any, config: ForeignConfig) -> Outcome:
    if config.has_preferences:
        return preferences.map_objective(config)
    if value == "pt":
        return IgnoredKey("records with text are learned as a whole")
    return IgnoredKey("tune.objective=sft is the default")


def _convert_reference(value: Any, config: ForeignConfig) -> Outcome:
    if value == config.get("model_name_or_path"):
        return preferences.SAME_REFERENCE_KEY
    return UnsupportedKey(
        preferences.OTHER_REFERENCE_ADVICE + "leave it out there, or stay with them", to_do=True
    )


def _convert_reference_adapter(value: Any, config: ForeignConfig) -> Outcome:
    if value == config.get("adapter_name_or_path"):
        return IgnoredKey("the reference has the adapter of tune.init_from too")
    return UnsupportedKey(
        "the reference is the model with the adapter of tune.init_from", to_do=True
    )


def _convert_quantization_bits(value: Any, config: ForeignConfig) -> Outcome:
    if config.method == "qlora":
        return rules.map_method(value, config)
    return UnsupportedKey(rules.QUANTIZATION_ADVICE, to_do=True)


def _convert_targets(value: Any, config: ForeignConfig) -> Outcome:
    if config.method == "full":
        return ADAPTER_ONLY_KEY
    if not hf_trainer.is_name_or_names(value):
        return hf_trainer.LAYER_PATTERN_KEY
    names = hf_trainer.split_names(value)
    if names == ["all"]:
        return MappedKey({"tune.targets": "all-linear"})
    return hf_trainer.convert_targets(names, "model_name_or_path", config)


def _convert_template(value: Any, config: ForeignConfig) -> Outcome:
    if config.get("stage") == "pt":
        return IgnoredKey("records with text have no template")
    return rules.explain_chat_template(value)


def _dataset_rule(key: str) -> Rule:
    def rule(value: Any, config: ForeignConfig) -> Outcome:
        names = hf_trainer.split_names(value)
        folder = config.get("dataset_dir", "data")
        kinds = "alpaca, ShareGPT and messages"
        kinds = "both forms, with ranking or kto_tag," if config.has_preferences else kinds
        return UnsupportedKey(
            f"{folder}/dataset_info.json names the file of {' and '.join(names)}: set {key} to it "
            f"({kinds} are understood){', as a list' if len(names) > 1 else ''}",
            to_do=True,
        )

    return rule


def _convert_loss_on(value: Any, config: ForeignConfig) -> Outcome:
    return MappedKey({"data.loss_on": "all" if config.is_on("train_on_prompt") else "answers"})


def _convert_packing(value: Any, config: ForeignConfig) -> Outcome:
    if config.has_preferences:
        remark = f"training on preferences does not pack there; {rules.PACKING_ADVICE}"
        return MappedKey({"data.packing": False}, remark)
    return rules.apply_rule(
        rules.PACKING_RULE, config.is_on("packing") or config.is_on("neat_packing"), config
    )


def _convert_seq_len(value: Any, config: ForeignConfig) -> Outcome:
    remark = "longer rows are cut at the end; there prompts are cut too"
    return preferences.convert_seq_len(config.integer("cutoff_len"), config, remark)


def _convert_batch(value: Any, config: ForeignConfig) -> Outcome:
    return rules.map_global_batch(
        config, "per_device_train_batch_size", "gradient_accumulation_steps"
    )


def _convert_schedule(value: Any, config: ForeignConfig) -> Outcome:
    ratio = config.get("lr_scheduler_kwargs.min_lr_rate")
    min_lr, peak_lr = config.number("lr_scheduler_kwargs.min_lr"), config.number("learning_rate")
    if min_lr >= 0 and peak_lr > 0:
        ratio = min_lr / peak_lr
    return hf_trainer.convert_schedule(value, ratio, config)


def _convert_bf16(value: Any, config: ForeignConfig) -> Outcome:
    is_pure = config.is_on("pure_bf16")
    if not is_pure and not config.is_on("bf16"):
        return IgnoredKey("model.dtype=auto takes what the device has")
    if not is_pure or config.method != "full":
        return MappedKey({"model.dtype": "bf16"}, "trained weights and their state stay in fp32")
    return MappedKey({"model.dtype": "bf16", "tune.param_dtype": "bf16"}, rules.PURE_BF16_REMARK)


def _convert_recompute(value: Any, config: ForeignConfig) -> Outcome:
    is_off = config.is_on("disable_gradient_checkpointing")
    return MappedKey(
        {"parallel.recompute": "none" if is_off else "full"}, "none is faster if it fits"
    )


def _convert_report_to(value: Any, config: ForeignConfig) -> Outcome:
    names = hf_trainer.split_names(value)
    trackers = [name for name in ("wandb", "mlflow", "trackio") if name in names]
    if not set(names) <= {"none", "tensorboard", *trackers}:
        return UnsupportedKey(hf_trainer.TRACKER_HINT)
    settings: dict[str, Any] = {"run.tensorboard": "tensorboard" in names}
    return MappedKey(settings | ({"run.trackers": trackers} if trackers else {}))


_TEMPLATE_REASON = "the tokenizer's chat template writes tools and reasoning"


def _convert_thinking(value: Any, config: ForeignConfig) -> Outcome:
    """Return the outcome for enable_thinking; false removes reasoning from their data."""
    if str(value).lower() != "false":
        return UnsupportedKey(_TEMPLATE_REASON, to_do=True)
    return UnsupportedKey(
        "there reasoning is removed from the answers, and an empty block of it ends the prompts: "
        "remove it from the data; an empty block that the chat template writes is learned here, "
        "and counted",
        to_do=True,
    )


_MAPPED_RULES: dict[str, Rule] = {
    "model_name_or_path": rules.convert_model_path,
    "adapter_name_or_path": hf_trainer.init_adapter_rule(reference_key="ref_model_adapters"),
    "quantization_bit": _convert_quantization_bits,
    "quantization_method": hf_trainer.only_value_rule("bnb", hf_trainer.NF4_REASON),
    "quantization_type": hf_trainer.only_value_rule("nf4", hf_trainer.NF4_REASON),
    "template": _convert_template,
    "finetuning_type": rules.known_values_rule(
        ("lora", "full"), rules.map_method, UnsupportedKey(rules.METHOD_ADVICE, to_do=True)
    ),
    "use_dora": rules.DORA_RULE,
    "use_rslora": rules.on_off_rule("tune.rslora"),
    "lora_rank": "tune.rank",
    "additional_target": hf_trainer.convert_modules_to_save,
    "lora_dropout": preferences.override_for_preferences(
        preferences.UNUSED_DROPOUT_KEY, "tune.dropout"
    ),
    "lora_target": _convert_targets,
    "dataset": _dataset_rule("data.path"),
    "eval_dataset": _dataset_rule("data.eval_path"),
    "val_size": hf_trainer.convert_val_size,
    "eval_steps": hf_trainer.eval_steps_rule("val_size"),
    "cutoff_len": _convert_seq_len,
    "max_samples": rules.record_count_rule("data.path", ":{}"),
    **rule_for_keys(_convert_packing, "packing neat_packing"),
    "train_on_prompt": preferences.override_for_preferences(
        preferences.ANSWERS_ONLY_KEY, _convert_loss_on
    ),
    "enable_thinking": _convert_thinking,
    **rule_for_keys(_convert_batch, "per_device_train_batch_size gradient_accumulation_steps"),
    "lr_scheduler_type": _convert_schedule,
    "optim": hf_trainer.convert_optimizer,
    "num_train_epochs": hf_trainer.convert_epochs,
    **rule_for_keys(_convert_bf16, "bf16 pure_bf16"),
    "disable_gradient_checkpointing": _convert_recompute,
    "torch_compile": "train.compile",
    "early_stopping_steps": hf_trainer.early_stop_rule("val_size"),
    "report_to": _convert_report_to,
    "run_name": "run.name",
    "full_determinism": "train.deterministic",
    "use_cpu": rules.on_off_rule(MappedKey({"run.device": "cpu"})),
    # Keys for training on preferences.
    "stage": _convert_stage,
    "pref_beta": "tune.beta",
    "kto_chosen_weight": "tune.desirable_weight",
    "kto_rejected_weight": "tune.undesirable_weight",
    **preferences.restrict_to_preferences(
        {
            "pref_loss": preferences.OBJECTIVE_IMPLIED_KEY,
            "pref_ftx": preferences.sft_weight_rule(),
            "dpo_label_smoothing": preferences.SMOOTHING_RULE,
            "ld_alpha": rules.unsupported_rule(
                "tokens after the shorter answer's length count in full", to_do=True
            ),
            "ref_model": _convert_reference,
            "ref_model_adapters": _convert_reference_adapter,
        }
    ),
    **rule_for_keys(
        preferences.REWARD_ONLY_KEY,
        "pref_bco_weight reward_model_adapters reward_model_type ppo_epochs ppo_buffer_size "
        "ppo_score_norm ppo_target ppo_whiten_rewards ref_model_quantization_bit "
        "reward_model_quantization_bit",
    ),
}
_IGNORED_KEYS = {
    "the command trains": "do_train",
    "data.path names the file itself": "dataset_dir",
    "the files of a folder are one dataset": "mix_strategy",
    hf_trainer.PREPARATION_REASON: "overwrite_cache preprocessing_num_workers "
    "preprocessing_batch_size tokenized_path dataloader_persistent_workers buffer_size "
    "data_shared_file_system dataloader_in_order dataloader_multiprocessing_context "
    "train_sampling_strategy length_column_name sortish_sampler",
    "checkpoints in run.dir have the optimizer; a new run has a new run.dir": "save_only_model "
    "overwrite_output_dir save_safetensors save_on_each_node enable_jit_checkpoint "
    "ignore_data_skip restore_callback_states_from_checkpoint",
    "metrics.jsonl and tensorboard/ in run.dir have each step": "logging_dir",
    rules.METRICS_REASON: "logging_strategy logging_first_step plot_loss log_level "
    "disable_tqdm include_num_input_tokens_seen include_mfu log_on_each_node log_level_replica "
    "logging_nan_inf_filter skip_memory_metrics print_param_status "
    "include_effective_tokens_per_second",
    rules.MICRO_BATCH_REASON: "per_device_eval_batch_size eval_accumulation_steps",
    hf_trainer.HELD_OUT_LOSS_REASON: "do_eval eval_on_start eval_delay prediction_loss_only "
    "bf16_full_eval fp16_full_eval eval_do_concat_batches eval_use_gather_object "
    "batch_eval_metrics",
    "a loss is a sum over the tokens of all ranks": "average_tokens_across_devices",
    "padding is neither attended to nor learned": "ignore_pad_token_for_loss",
    "data.loss_on says what is learned": "label_names",
    "the governor acts before memory ends": "torch_empty_cache_steps",
    "no tokens are added": "init_special_tokens",
    rules.EXPORT_MERGE_REASON: "export_dir export_size export_device export_legacy_format",
    "train.seed is the seed of everything": "data_seed",
    "disable_gradient_checkpointing is the key that counts there": "use_unsloth_gc "
    "gradient_checkpointing gradient_checkpointing_kwargs.* use_reentrant_gc "
    "activation_checkpointing activation_checkpointing_kwargs.*",
    hf_trainer.OWN_KERNEL_REASON: "flash_attn attn enable_liger_kernel use_liger_kernel "
    "liger_kernel_config.* use_unsloth use_v1_kernels",
    rules.PARTIAL_READ_REASON: "use_fast_tokenizer cache_dir model_revision offload_folder "
    "quantization_device_map",
    "mpirun, srun or torchrun start the ranks": "ray_storage_path ray_storage_filesystem "
    "placement_strategy ray_init_kwargs.*",
    rules.LAYOUT_REASON: "ddp_static_graph ddp_backend parallelism_config.* "
    "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size "
    "context_parallel_size sequence_parallel virtual_pipeline_model_parallel_size",
    hf_trainer.NF4_REASON: "double_quantization",
    "optim.min_lr_ratio says it": "lr_scheduler_kwargs.min_lr",
    rules.FORM_REASON: "remove_unused_columns",
    "python -m hpc_tune generate answers prompts": "predict_with_generate compute_accuracy "
    "max_new_tokens max_length top_k top_p temperature num_beams infer_backend infer_dtype "
    "do_sample repetition_penalty length_penalty skip_special_tokens use_kv_cache use_cache "
    "eval_num_beams generation_max_length generation_num_beams generation_config "
    "generation_config.* include_for_metrics vllm_maxlen vllm_gpu_util vllm_enforce_eager "
    "vllm_max_lora_rank vllm_config vllm_config.* sglang_maxlen sglang_mem_fraction sglang_tp_size "
    "sglang_config sglang_config.* sglang_lora_backend",
    "trained models are not quantized": "export_quantization_bit "
    "export_quantization_dataset export_quantization_nsamples export_quantization_maxlen",
}
_MEDIA_KEYS = (
    "media_dir visual_inputs image_max_pixels image_min_pixels image_resolution "
    "video_max_pixels video_min_pixels video_fps video_maxlen image_do_pan_and_scan "
    "crop_to_patches use_audio_in_video audio_sampling_rate freeze_vision_tower "
    "freeze_multi_modal_projector freeze_language_model train_mm_proj_only"
)
_UNSUPPORTED_KEYS = {
    "data.eval_sources has a held-out loss for each source": "eval_on_each_dataset",
    "Megatron is not used; plan proposes a layout": "use_mca",
    "KTransformers is not used": "use_kt kt_optimize_rule cpu_infer chunk_size mode kt_maxlen "
    "kt_use_cuda_graph kt_mode kt_force_think",
    "images, sound and video are not trained on": _MEDIA_KEYS,
    "nothing is uploaded; run.dir has export/": "push_to_hub hub_token hf_hub_token ms_hub_token "
    "om_hub_token hub_private_repo hub_always_push export_hub_model_id",
    hf_trainer.TRACKER_HINT: "swanlab_run_name swanlab_api_key swanlab_logdir "
    "swanlab_lark_webhook_url swanlab_lark_secret project trackio_bucket_id "
    "trackio_static_space_id",
    "dtypes follow model.dtype": "upcast_layernorm upcast_lmhead_output",
}
_TODO_KEYS = {
    rules.SHUFFLE_REASON: "disable_shuffling",
    "every answer of a chat is learned": "mask_history",
    "name each dataset in data.sources with a weight: its share of the learned tokens, not of "
    "documents": "interleave_probs",
    _TEMPLATE_REASON: "tool_format",
    rules.SYSTEM_MESSAGE_ADVICE: "default_system",
    "tune.init_from names the adapter's folder itself": "adapter_folder",
    "set it in the tokenizer_config.json of model.path": "split_special_tokens",
    "a run starts from the weights of model.path": "train_from_scratch",
    "merge the first adapter into the model": "create_new_adapter",
    "adapters start as in LoRA, with B at 0": "pissa_init pissa_iter pissa_convert",
    rules.OPTIMIZER_ADVICE: "use_galore use_apollo use_badam use_adam_mini use_muon galore_target "
    "galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise "
    "apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type "
    "apollo_scale_type apollo_layerwise apollo_scale_front badam_mode badam_start_block "
    "badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode badam_verbose",
    "tune.method is lora, dora, qlora or full": "module_dropout oft_rank oft_block_size oft_target",
    "cross entropy of the next token is the only loss": "use_dft_loss use_asft_loss asft_alpha "
    "use_eaft_loss eaft_alpha",
    hf_trainer.ROUTER_LOSS_ADVICE: "moe_aux_loss_coef",
    "the model is what config.json of model.path says": "shift_attn mixture_of_depths "
    "use_llama_pro",
    rules.VOCAB_ADVICE: "resize_vocab add_tokens add_special_tokens new_special_tokens_config",
    "a run only trains; python -m hpc_tune generate answers prompts": "do_predict",
    rules.FLOAT8_ADVICE: "fp8 fp8_backend fp8_enable_fsdp_float8_all_gather",
    "no parts are frozen: adapters are trained, or all weights": "freeze_trainable_layers "
    "freeze_trainable_modules freeze_extra_modules",
}
_MEDIA_TEMPLATE = (
    r"(?:^|_)(?:vl|vision|video|audio|omni|ocr)(?:_|$)|llava|mllama|pixtral|paligemma|minicpm_[vo]"
    r"|glm4(?:_5)?v|intern_?vl|intern_s1"
)


def _is_other_stage(value: Any, config: ForeignConfig) -> bool:
    return value not in ("sft", "pt", "dpo", "kto")


def _is_bco(value: Any, config: ForeignConfig) -> bool:
    return config.get("stage") == "dpo" and preferences.is_on(value, config)


LLAMA_FACTORY = Tool(
    "LLaMA-Factory",
    rules.join_tables(
        hf_trainer.TRAINER_RULES,
        rules.rule_table(_MAPPED_RULES, _IGNORED_KEYS, _UNSUPPORTED_KEYS, _TODO_KEYS),
    ),
    _default_settings,
    _read_method,
    _read_objective,
    (
        Refusal("stage", _is_other_stage, *preferences.REWARD_TRAINING),
        preferences.preference_loss_refusal("pref_loss"),
        Refusal("pref_bco_weight", _is_bco, *preferences.OTHER_LOSS),
        Refusal(
            "template", preferences.matches_pattern(_MEDIA_TEMPLATE), *preferences.MEDIA_TRAINING
        ),
        Refusal(_MEDIA_KEYS, preferences.is_on, *preferences.MEDIA_TRAINING),
    ),
)
