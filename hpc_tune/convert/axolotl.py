"""The rules for configs of axolotl, which trains with the Hugging Face Trainer."""

from typing import Any

from hpc_tune.convert import hf_trainer, preferences, rules
from hpc_tune.convert.axolotl_data import DATA_RULES, DATASET_LIST_KEYS, list_readable_data_files
from hpc_tune.convert.rules import (
    ADAPTER_ONLY_KEY,
    OFF_KEY,
    OFF_VALUES,
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

_FULL_METHOD_REMARK = "none: all weights are trained"
_OBJECTIVES = ("dpo", "ipo", "simpo", "orpo", "kto")
# Plugins that change how something is computed, but not the result.
_KERNEL_PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin", "KernelsPlugin", "NeMoPlugin")
# Values of dpo_loss_type that correspond to our objective dpo.
_DPO_LOSS_TYPES = (["sigmoid"], ["robust"], ["sigmoid", "sft"], ["sft", "sigmoid"])
_BETA_KEYS = ("trl.beta", "rl_beta", "dpo_beta", "orpo_alpha")  # the first that is set counts


def _read_method(config: ForeignConfig) -> str:
    kind = config.get("adapter", _FULL_METHOD_REMARK)
    is_4_bit = config.is_on("load_in_4bit") or config.get("peft.weight_dtype") in ("nf4", "int4")
    return rules.choose_method(
        is_full=kind == _FULL_METHOD_REMARK,
        is_4_bit=kind == "qlora" or is_4_bit,
        is_dora=config.is_on("peft_use_dora"),
    )


def _read_objective(config: ForeignConfig) -> str | None:
    kind = str(config.get("rl", "")).lower()
    if kind == "dpo" and (losses := _list_losses(config)) not in _DPO_LOSS_TYPES:
        return "ipo" if losses == ["ipo"] else None
    return kind if kind in _OBJECTIVES else SFT


def _list_losses(config: ForeignConfig) -> list[str]:
    value = config.get("dpo_loss_type", ["sigmoid"])
    return [str(name) for name in (value if isinstance(value, list) else [value])]


def _convert_weight_dtype(value: Any, config: ForeignConfig) -> Outcome:
    if value in ("nf4", "int4") and config.method == "qlora":
        remark = "" if value == "nf4" else "in NF4, not in integers"
        return MappedKey({"tune.method": "qlora"}, remark)
    return UnsupportedKey(rules.QUANTIZATION_ADVICE, to_do=True)


def _convert_targets(value: Any, config: ForeignConfig) -> Outcome:
    if config.method == "full":
        return ADAPTER_ONLY_KEY
    if not hf_trainer.are_expert_stacks(config.get("lora_target_parameters")):
        return _convert_layer_targets(config)
    has_layers = config.get("lora_target_modules") or config.is_on("lora_target_linear")
    layers = _convert_layer_targets(config) if has_layers else MappedKey({"tune.targets": []})
    return hf_trainer.add_expert_targets(layers, config.get("lora_r"))


def _convert_target_parameters(value: Any, config: ForeignConfig) -> Outcome:
    if not hf_trainer.are_expert_stacks(value):
        return UnsupportedKey(
            "adapters go on both stacks of experts in all layers, if tune.targets names experts: "
            "[all-linear, experts], with tune.expert_rank for each expert",
            to_do=True,
        )
    return _convert_targets(value, config)


def _convert_layer_targets(config: ForeignConfig) -> Outcome:
    names = config.get("lora_target_modules", False)
    if names is False or names in ("all-linear", "all_linear"):
        names = []
    is_list = isinstance(names, list) and hf_trainer.is_name_or_names(names)
    if not is_list or not all(name.replace("_", "").isalnum() for name in names):
        return hf_trainer.LAYER_PATTERN_KEY
    if not config.is_on("lora_target_linear") and names:
        return hf_trainer.convert_targets(names, "base_model", config)
    if extra_names := [name for name in names if name in ("lm_head", "embed_tokens")]:
        return UnsupportedKey(
            f"all-linear does not include {extra_names[0]}; list all names instead", to_do=True
        )
    return MappedKey({"tune.targets": "all-linear"})


def _convert_batch(value: Any, config: ForeignConfig) -> Outcome:
    is_new = config.get("context_parallel_size")
    context = "context_parallel_size" if is_new else "sequence_parallel_degree"  # its older name
    rows, accumulation = "micro_batch_size", "gradient_accumulation_steps"
    if config.get("batch_size"):
        rows, accumulation = "batch_size", ""
    return rules.map_global_batch(config, rows, accumulation, "tensor_parallel_size", context)


def _convert_schedule(value: Any, config: ForeignConfig) -> Outcome:
    ratio = config.get("lr_scheduler_kwargs.min_lr_rate", config.get("cosine_min_lr_ratio"))
    return hf_trainer.convert_schedule(value, ratio, config)


def _convert_bf16(value: Any, config: ForeignConfig) -> Outcome:
    keys = [key for key in ("bf16", "bfloat16", "fp16", "float16") if config.is_on(key)]
    if str(value).lower() == "false":
        return IgnoredKey(f"{keys[0]} says it") if keys else MappedKey({"model.dtype": "fp32"})
    if value == "auto" and (config.is_on("fp16") or config.is_on("float16")):
        return IgnoredKey("fp16 takes precedence")
    settings: dict[str, Any] = {"model.dtype": "auto" if value == "auto" else "bf16"}
    if config.method != "full":
        return MappedKey(settings, "adapters and their state stay in fp32")
    if config.get("deepspeed"):
        return MappedKey(settings, "trained weights are kept in fp32, as DeepSpeed does")
    return MappedKey({**settings, "tune.param_dtype": "bf16"}, rules.PURE_BF16_REMARK)


def _convert_recompute(value: Any, config: ForeignConfig) -> Outcome:
    if str(value).lower() == "false":
        return IgnoredKey("parallel.recompute=none is the default")
    remark = "" if str(value).lower() == "true" else "recomputed, not moved to the host"
    return MappedKey({"parallel.recompute": "full"}, remark)


def _convert_profile(value: Any, config: ForeignConfig) -> Outcome:
    offset = config.integer("profiler_steps_start") if config.get("profiler_steps_start") else 0
    return MappedKey({"train.profile": f"{offset + 1}:{config.integer('profiler_steps')}"})


def _convert_trackers(value: Any, config: ForeignConfig) -> Outcome:
    has_wandb = config.is_on("use_wandb") or config.get("wandb_project") is not None
    is_off = config.get("wandb_mode") == "disabled" or config.get("use_wandb", True) is False
    names = ["wandb"] if has_wandb and not is_off else []
    names += [name for name in ("mlflow", "trackio") if config.is_on(f"use_{name}")]
    return MappedKey({"run.trackers": names}, "into run.dir, unless their variables say otherwise")


def _convert_plugins(value: Any, config: ForeignConfig) -> Outcome:
    names = [str(name).rpartition(".")[2] for name in (value if isinstance(value, list) else [])]
    other_plugins = [name for name in names if name not in _KERNEL_PLUGINS]
    if not other_plugins:
        return IgnoredKey(hf_trainer.OWN_KERNEL_REASON)
    return UnsupportedKey(f"{' and '.join(other_plugins)}: there are no plugins", to_do=True)


def _default_settings(config: ForeignConfig) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "adapter": _FULL_METHOD_REMARK,
        "sequence_len": 512,
        "sample_packing": False,
        "lr_scheduler": "cosine",
        "bf16": "auto",
    }
    if not config.get("batch_size"):
        defaults |= {"micro_batch_size": 1, "gradient_accumulation_steps": 1}
    if config.get("max_steps") is None:
        defaults["num_epochs"] = 1.0
    if any(config.get(key) for key in ("fp16", "float16", "bfloat16", "float32")):
        del defaults["bf16"]
    if config.has_preferences and all(config.get(key) is None for key in _BETA_KEYS):
        defaults["rl_beta"] = 0.1
    return defaults | (
        {"simpo_gamma": 0.5, "cpo_alpha": 1.0} if config.objective == "simpo" else {}
    )


def _convert_rl(value: Any, config: ForeignConfig) -> Outcome:
    return preferences.map_objective(config) if config.has_preferences else OFF_KEY


def _convert_loss_type(value: Any, config: ForeignConfig) -> Outcome:
    if "sft" in _list_losses(config) and config.get("dpo_loss_weights") is None:
        return MappedKey({"tune.sft_weight": 1.0}, preferences.MEAN_REMARK)
    return preferences.OBJECTIVE_IMPLIED_KEY


def _convert_loss_weights(value: Any, config: ForeignConfig) -> Outcome:
    weights = dict(
        zip(_list_losses(config), value if isinstance(value, list) else [value], strict=False)
    )
    if len(weights) == 1 and list(weights.values()) == [1]:
        return IgnoredKey("there is one loss, of weight 1")
    if weights.keys() == {"sigmoid", "sft"} and weights["sigmoid"] == 1:
        return MappedKey({"tune.sft_weight": weights["sft"]}, preferences.MEAN_REMARK)
    return UnsupportedKey(
        "the pairs' loss always has weight 1, and tune.sft_weight is the weight of the chosen "
        "answers' loss: divide all weights by the pairs' weight, and multiply optim.lr by the "
        "pairs' weight",
        to_do=True,
    )


def _convert_smoothing(value: Any, config: ForeignConfig) -> Outcome:
    if config.objective != "dpo":
        return IgnoredKey(f"{config.objective} does not use it there")
    if _list_losses(config) == ["robust"] and value not in OFF_VALUES:
        return MappedKey({"tune.label_smoothing": value})
    return rules.apply_rule(preferences.SMOOTHING_RULE, value, config)


def _beta_rule(key: str) -> Rule:
    def rule(value: Any, config: ForeignConfig) -> Outcome:
        first_key = next((name for name in _BETA_KEYS if config.get(name) is not None), key)
        if config.has_preferences and first_key != key:
            return IgnoredKey(f"{first_key} takes precedence")
        return rules.apply_rule("tune.beta", value, config)

    return rule


_PREFERENCE_RULES = rules.rule_table(
    {
        "dpo_loss_type": _convert_loss_type,
        "dpo_loss_weights": _convert_loss_weights,
        "dpo_label_smoothing": _convert_smoothing,
        **rule_for_keys(
            preferences.sft_weight_rule(preferences.MEAN_REMARK), "rpo_alpha cpo_alpha"
        ),
    },
    ignored_keys={
        "a prompt is cut only where the answers need its room": "max_prompt_len",
        "the reference is computed once, and kept": "precompute_ref_log_probs",
        "logits are never held whole, and padding is not computed": "dpo_use_logits_to_keep "
        "dpo_use_liger_kernel dpo_padding_free",
    },
    todo_keys={
        "all pairs count alike": "dpo_use_weighting",
        "dpo takes sums of log-probabilities; ipo has means": "dpo_norm_loss",
        "accuracy, margin and log-probabilities are measured; run generate afterwards": (
            "dpo_generate_during_eval"
        ),
    },
)
_MAPPED_RULES: dict[str, Rule] = {
    "base_model": rules.convert_model_path,
    "adapter": rules.known_values_rule(
        ("lora", "qlora", _FULL_METHOD_REMARK),
        rules.map_method,
        UnsupportedKey(rules.METHOD_ADVICE, to_do=True),
    ),
    "load_in_4bit": rules.on_off_rule(rules.map_method, rules.METHOD_IMPLIED_KEY),
    "peft.weight_dtype": _convert_weight_dtype,
    "bnb_config_kwargs.bnb_4bit_quant_type": hf_trainer.only_value_rule(
        "nf4", hf_trainer.NF4_REASON
    ),
    "bnb_config_kwargs.bnb_4bit_use_double_quant": hf_trainer.only_value_rule(
        "true", hf_trainer.NF4_REASON
    ),
    "peft_use_dora": rules.DORA_RULE,
    "peft_use_rslora": rules.on_off_rule("tune.rslora"),
    "lora_r": "tune.rank",
    **hf_trainer.peft_pattern_rules("lora_rank_pattern", "tune.rank_pattern"),
    **hf_trainer.peft_pattern_rules("lora_alpha_pattern", "tune.alpha_pattern"),
    "lora_dropout": preferences.override_for_preferences(
        preferences.UNUSED_DROPOUT_KEY, "tune.dropout"
    ),
    "lora_modules_to_save": hf_trainer.convert_modules_to_save,
    "peft_trainable_token_indices": rules.ignore_if_off("tune.trainable_tokens"),
    "peft_autocast_adapter_dtype": hf_trainer.only_value_rule(
        "true", "adapters are in fp32; tune.param_dtype says it"
    ),
    "peft_init_lora_weights": hf_trainer.only_value_rule(
        "true", "adapters are initialized as in LoRA"
    ),
    "lora_target_modules": _convert_targets,
    "lora_target_linear": rules.on_off_rule(_convert_targets, IgnoredKey("tune.targets says it")),
    "lora_target_parameters": _convert_target_parameters,
    "lora_model_dir": hf_trainer.init_adapter_rule(),
    "val_set_size": hf_trainer.convert_val_size,
    **rule_for_keys(_convert_batch, "micro_batch_size gradient_accumulation_steps batch_size"),
    **rule_for_keys(
        rules.convert_context_parallel, "context_parallel_size sequence_parallel_degree"
    ),
    "num_epochs": hf_trainer.convert_epochs,
    "optimizer": hf_trainer.convert_optimizer,
    "lr_scheduler": _convert_schedule,
    **rule_for_keys(_convert_bf16, "bf16 bfloat16"),
    "fp8": rules.on_off_rule(UnsupportedKey(rules.FLOAT8_ADVICE, to_do=True)),
    **rule_for_keys(
        _convert_recompute, "gradient_checkpointing fsdp_config.activation_checkpointing"
    ),
    **rule_for_keys(
        rules.OFFLOAD_PARAMS_RULE, "fsdp_config.offload_params fsdp_config.fsdp_offload_params"
    ),
    "torch_compile": rules.torch_compile_rule("context_parallel_size", "sequence_parallel_degree"),
    "eval_steps": hf_trainer.eval_steps_rule(
        "val_set_size", lambda config: bool(list_readable_data_files("test_datasets", config))
    ),
    "early_stopping_patience": hf_trainer.early_stop_rule("val_set_size"),
    "noisy_embedding_alpha": hf_trainer.NEFTUNE_RULE,
    "profiler_steps": _convert_profile,
    "dataset_prepared_path": "data.cache",
    "shuffle_merged_datasets": hf_trainer.only_value_rule("true", rules.SHUFFLE_REASON),
    **rule_for_keys(_convert_trackers, "use_wandb wandb_project use_mlflow use_trackio"),
    "wandb_name": "run.name",
    "use_tensorboard": "run.tensorboard",
    "plugins": _convert_plugins,
    # Keys for training on preferences, which trl does.
    "rl": _convert_rl,
    **{key: _beta_rule(key) for key in _BETA_KEYS},
    **preferences.restrict_to_preferences(_PREFERENCE_RULES),
    "kto_desirable_weight": "tune.desirable_weight",
    "kto_undesirable_weight": "tune.undesirable_weight",
    # false counts as an argument: Qwen3's template behaves differently without enable_thinking.
    "chat_template_kwargs.*": UnsupportedKey(
        "arguments for the chat template are not supported: write them into it", to_do=True
    ),
}
_IGNORED_KEYS = {
    "tune.method=qlora keeps routed experts in 4 bits too": "quantize_moe_experts",
    "padding is neither attended to nor learned": "special_tokens.pad_token tokens.pad_token",
    "model and tokenizer are read from model.path; config.json says their type": "model_type "
    "type_of_model tokenizer_type tokenizer_use_fast tokenizer_legacy tokenizer_use_mistral_common "
    "tokenizer_save_jinja_files base_model_config cls_model_config base_model_ignore_patterns "
    "is_falcon_derived_model is_llama_derived_model is_mistral_derived_model is_qwen_derived_model "
    "save_safetensors",
    rules.PARTIAL_READ_REASON: "lora_on_cpu qlora_sharded_model_loading device_map device_map.* "
    "experimental_skip_move_to_device",
    hf_trainer.PREPARATION_REASON: "dataset_processes dataset_num_proc dataset_keep_in_memory "
    "skip_prepare_dataset num_dataset_shards_to_save streaming_multipack_buffer_size "
    "pretrain_multipack_buffer_size remove_unused_columns preprocess_iterable is_preprocess",
    "rows have data.seq_len tokens, packed by the data's order and train.seed": (
        "eval_sample_packing pad_to_sequence_len pad_to_multiple_of sample_packing_group_size "
        "sample_packing_bin_size sample_packing_mp_start_method sample_packing_eff_est "
        "multipack_real_batches batch_flattening total_num_tokens total_supervised_tokens "
        "pretrain_multipack_attn pretraining_sample_concatenation"
    ),
    rules.MICRO_BATCH_REASON: "eval_batch_size",
    hf_trainer.OWN_KERNEL_REASON: "flash_attention sdp_attention xformers_attention flex_attention "
    "eager_attention sage_attention attn_implementation attention flex_attn_compile_kwargs.* "
    "flash_optimum flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv "
    "flash_attn_fuse_mlp gemma4_hybrid_attn_impl unsloth_cross_entropy_loss unsloth_lora_mlp "
    "unsloth_lora_qkv unsloth_lora_o unsloth_rms_norm unsloth_rope lora_mlp_kernel lora_qkv_kernel "
    "lora_o_kernel lora_embedding_kernel liger_rope liger_rms_norm liger_layer_norm liger_swiglu "
    "liger_glu_activation liger_cross_entropy liger_fused_linear_cross_entropy "
    "liger_use_token_scaling liger_rms_norm_gated fused_attn_kernel cut_cross_entropy "
    "chunked_cross_entropy chunked_cross_entropy_num_chunks use_kernels experts_implementation "
    "use_scattermoe use_sonicmoe tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp",
    rules.LAYOUT_REASON: "fsdp.* fsdp_version fsdp_final_state_dict_type ddp expert_parallel_size "
    "dp_shard_size dp_replicate_size tensor_parallel_size",
    "ranks exchange heads for tokens, and use no ring": "heads_k_stride ring_attn_func",
    "mpirun, srun or torchrun start the ranks": "world_size",
    "run.device=auto takes the GPU if there is one": "device",
    "the governor acts before memory ends; memory.host_limit limits the host": "gpu_memory_limit "
    "max_memory.* gc_steps",
    rules.METRICS_REASON: "include_tokens_per_second include_tkps profiler_steps_start",
    "all starts of a run are one wandb run; set WANDB_PROJECT in the environment": (
        "wandb_mode wandb_entity wandb_run_id wandb_watch"
    ),
    "checkpoints go by time and steps, not by epochs; the last weights are saved": (
        "save_only_model save_first_step saves_per_epoch dynamic_checkpoint.*"
    ),
    hf_trainer.HELD_OUT_LOSS_REASON: "evaluation_strategy eval_sequence_len",
    "checkpoint.resume=auto: rerun the same command": "auto_resume_from_checkpoints",
    rules.EXPORT_MERGE_REASON: "merge_lora merge_method",
    "recomputing is PyTorch's own, not reentrant": "gradient_checkpointing_kwargs.*",
    "optim.min_lr_ratio says it": "cosine_min_lr_ratio",
    "bitsandbytes quantizes": "peft.backend",
    "it follows from the type of a layer": "lora_fan_in_fan_out",
    "an unknown key is an error": "strict",
    "run.dir has the resolved configuration": "axolotl_config_path",
    "rows of all data are shuffled, by train.seed": "shuffle_before_merging_datasets",
    "no parts are frozen": "lisa_layers_attribute",
    "routers have an auxiliary loss if tune.router_aux_loss is set": (
        "model_config.output_router_logits overrides_of_model_config.output_router_logits"
    ),
    "cross entropy is the only loss": "eaft_alpha eaft_k",
    "only distillation uses it": "kd_trainer kd_ce_alpha kd_alpha kd_temperature kd_beta "
    "kd_normalize_topk",
    "only training by diffusion uses it": "diffusion.*",
    "python -m hpc_tune generate answers prompts": "num_generation_samples "
    "generation_max_new_tokens generation_temperature generation_top_p generation_top_k "
    "generation_prompt_ratio generation_do_sample gradio_title gradio_share gradio_server_name "
    "gradio_server_port gradio_max_new_tokens gradio_temperature",
    "images, sound and video are not trained on": "image_size image_resize_algorithm "
    "freeze_mm_modules processor_type is_multimodal",
    preferences.REWARD_ONLY_KEY.reason: "process_reward_model trl.* vllm.* ebft.* "
    "center_rewards_coefficient num_labels",
}
_UNSUPPORTED_KEYS = {
    hf_trainer.NF4_REASON: "bnb_config_kwargs.* peft.group_size",
    rules.DTYPE_ADVICE: "float16",
    "weights are gathered in model.dtype": "fp8_enable_fsdp_float8_all_gather",
    "the model is loaded as model.dtype says": "torch_dtype overrides_of_model_kwargs.* "
    "model_kwargs.* model_quantization_config model_quantization_config_kwargs.* "
    "embeddings_skip_upcast",
    "embeddings keep their size": "resize_token_embeddings_to_32x mean_resizing_embeddings "
    "shrink_embeddings",
    "the text with which the chat template ends an answer is learned too": "eot_tokens",
    rules.RECOMPUTE_ADVICE: "activation_offloading layer_offloading",
    "set train.compile=true": "deepcompile",
    "a loss that is not finite ends a run; watch and the report show all losses": (
        "loss_watchdog_threshold loss_watchdog_patience"
    ),
    "evaluations go by steps: set train.eval_every_steps": "evals_per_epoch",
    "only the held-out loss is measured; run generate and lm-eval afterwards": (
        "eval_table_size eval_max_new_tokens do_causal_lm_eval eval_causal_lm_metrics "
        "do_bench_eval bench_dataset bench_split generate_samples lm_eval_tasks "
        "lm_eval_batch_size lm_eval_model"
    ),
    hf_trainer.TRACKER_HINT: "mlflow_tracking_uri mlflow_experiment_name mlflow_run_name "
    "hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace comet_project_name "
    "comet_experiment_key comet_mode comet_online comet_experiment_config.* trackio_project_name "
    "trackio_run_name use_otel_metrics otel_metrics_host otel_metrics_port swanlab_experiment_name "
    "swanlab_description swanlab_log_completions swanlab_log_model swanlab_completion_log_interval "
    "swanlab_completion_max_buffer wandb_log_model",
    "nothing is uploaded; run.dir has export/": "push_dataset_to_hub hf_use_auth_token",
}
_TODO_KEYS = {
    "8-bit bases are not supported: lora on bf16 is used; qlora has 4 bits": "load_in_8bit",
    "tune.method=qlora quantizes the original model: name that one": "gptq",
    "set model.dtype=fp32": "float32",
    "all linear layers named in tune.targets get adapters": "peft_layers_to_transform "
    "peft_layers_pattern",
    "adapters start and are trained as in LoRA, with B at 0": "peft.loftq_config.* relora "
    "relora_steps relora_warmup_steps relora_anneal_steps relora_prune_ratio relora_prune_method "
    "relora_cpu_offload jagged_restart_steps jagged_restart_warmup_steps "
    "jagged_restart_anneal_steps peft_ensure_weight_tying",
    "no parts are frozen: adapters are trained, or all weights": "unfrozen_parameters "
    "lisa_n_layers lisa_step_interval spectrum_top_fraction spectrum_model_name",
    hf_trainer.ROUTER_LOSS_ADVICE: "model_config.router_aux_loss_coef "
    "overrides_of_model_config.router_aux_loss_coef",
    hf_trainer.ROPE_ADVICE: "overrides_of_model_config.rope_scaling.* model_config.rope_scaling.*",
    hf_trainer.SHAPE_ADVICE: "overrides_of_model_config.* model_config.* peft_layer_replication "
    "reinit_weights random_init_weights scaling_softmax scaling_softmax_factor "
    "scaling_softmax_bias s2_attention llama4_linearized_experts use_pose pose_split_on_token_ids "
    "pose_max_context_len pose_num_chunks",
    rules.VOCAB_ADVICE: "tokens added_tokens_overrides special_tokens.additional_special_tokens "
    "fix_untrained_tokens",
    "the tokenizer's own token is used: if it differs, change it there": (
        "special_tokens.bos_token special_tokens.eos_token special_tokens.unk_token "
        "tokens.bos_token tokens.eos_token tokens.unk_token"
    ),
    "put that tokenizer's files into model.path": "tokenizer_config",
    "name the directory of that revision in model.path": "revision_of_model model_revision",
    rules.SYSTEM_MESSAGE_ADVICE: "default_system_message",
    "cut the data beforehand": "dataset_shard_num dataset_shard_idx",
    "filter the data beforehand": "dataset_exact_deduplication min_sample_len",
    rules.SHUFFLE_REASON: "curriculum_sampling sample_packing_sequentially",
    "there is one learning rate for all weights": "embedding_lr embedding_lr_scale lr_groups",
    rules.OPTIMIZER_ADVICE: "optim_args.* torchdistx_path adam_beta3 adam_epsilon2 dion_lr "
    "dion_momentum dion_rank_fraction dion_rank_multiple_of grokfast_alpha grokfast_lamb",
    hf_trainer.SCHEDULE_ADVICE: "lr_scheduler_kwargs.* lr_quadratic_warmup "
    "cosine_constant_lr_ratio lr_div_factor",
    "cross entropy of the next token is the only loss": "use_eaft",
    "there is only one training loop": "trainer_cls",
    "nothing is quantized or pruned in training, except the base by qlora": "qat.* quantization.* "
    "llmcompressor.*",
    "set data.packing=true": "max_packed_sequence_len",
}
_CHOSEN_FIELDS = "field_chosen field_rejected type.field_chosen type.field_rejected"
_CHOSEN_KEYS = " ".join(
    f"{part}.{key}" for part in DATASET_LIST_KEYS[:2] for key in _CHOSEN_FIELDS.split()
)
_MEDIA_KEYS = "processor_type is_multimodal image_size image_resize_algorithm freeze_mm_modules"


AXOLOTL = Tool(
    "axolotl",
    rules.join_tables(
        hf_trainer.TRAINER_RULES,
        DATA_RULES,
        rules.rule_table(_MAPPED_RULES, _IGNORED_KEYS, _UNSUPPORTED_KEYS, _TODO_KEYS),
    ),
    _default_settings,
    _read_method,
    _read_objective,
    (
        Refusal(
            "plugins", preferences.matches_pattern(r"\.kd\.|KDPlugin"), *preferences.DISTILLATION
        ),
        Refusal(
            "plugins",
            preferences.matches_pattern("(?i)diffusion"),
            "that is training by diffusion",
            "Stay with {tool} for it",
        ),
        Refusal(
            "plugins", preferences.matches_pattern("(?i)nemo_?gym"), *preferences.REWARD_TRAINING
        ),
        preferences.preference_loss_refusal("dpo_loss_type"),
        Refusal(
            "reward_model process_reward_model", preferences.is_on, *preferences.REWARD_TRAINING
        ),
        Refusal(
            "rl", preferences.exclude_preferences(preferences.is_on), *preferences.REWARD_TRAINING
        ),
        Refusal(
            _CHOSEN_KEYS,
            preferences.exclude_preferences(preferences.accept_any),
            *preferences.UNNAMED_LOSS,
        ),
        Refusal("kd_trainer kd_ce_alpha kd_alpha", preferences.is_on, *preferences.DISTILLATION),
        Refusal(
            "datasets.logprobs_field test_datasets.logprobs_field",
            preferences.accept_any,
            *preferences.DISTILLATION,
        ),
        Refusal(_MEDIA_KEYS, preferences.is_on, *preferences.MEDIA_TRAINING),
        Refusal(
            "model_type",
            preferences.matches_pattern("Classification"),
            "that trains a classifier",
            "Stay with {tool} for it",
        ),
    ),
    DATASET_LIST_KEYS,
)
