"""The rules for configs of axolotl, which trains with the Trainer of Hugging Face."""

from typing import Any

from hpc_tune.convert.axolotl_data import (
    CHAT_TEMPLATE,
    LENGTHS,
    LISTS,
    data_rules,
    list_usable_files,
)
from hpc_tune.convert.hf_trainer import (
    NF4,
    ONE_SCHEDULE,
    ROUTER_LOSS,
    convert_schedule,
    deepspeed,
    early_stop,
    epochs,
    eval_steps,
    first_adapter,
    max_steps,
    modules_to_save,
    neftune,
    only_value,
    optimizer,
    patterns,
    save_steps,
    save_strategy,
    schedule_arguments,
    trainable_tokens,
    val_size,
    warmup_ratio,
    warmup_steps,
)
from hpc_tune.convert.preferences import (
    AXOLOTL_PREFERENCES,
    axolotl_preference_defaults,
    dropout_rule,
    find_axolotl_objective,
    noise_rule,
    reference_adapter_rule,
)
from hpc_tune.convert.rules import (
    LAYOUT,
    NO_ADAPTERS,
    NO_TRACKER,
    ForeignConfig,
    Ignored,
    Mapped,
    Outcome,
    Rule,
    Tool,
    Unsupported,
    adapter_rule,
    add_experts,
    are_expert_stacks,
    convert_targets,
    dora_rule,
    each,
    global_batch,
    lacking,
    model_path,
    offload_params,
    rslora_rule,
    same,
)
from hpc_tune.convert.wrong_tasks import find_axolotl_task

# -- The keys of axolotl that give no setting: what hpc_tune decides itself, and what it lacks.


_PREPARED = "raw data are prepared once, into data.cache; ranks read ahead of their steps"
_OWN = Ignored("attention and loss are PyTorch's own; logits are never held whole")
IGNORED_KEYS: dict[str, Rule] = {
    "quantize_moe_experts": Ignored("tune.method=qlora keeps routed experts in 4 bits too"),
    **each(
        Ignored("padding is neither attended to nor learned"),
        "special_tokens.pad_token tokens.pad_token",
    ),
    **each(
        Ignored("model and tokenizer are read from model.path; config.json says their type"),
        "model_type type_of_model tokenizer_type tokenizer_use_fast tokenizer_legacy "
        "tokenizer_use_mistral_common tokenizer_save_jinja_files base_model_config "
        "cls_model_config base_model_ignore_patterns is_falcon_derived_model "
        "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model save_safetensors",
    ),
    **each(
        Ignored("ranks read their regions of the files"),
        "low_cpu_mem_usage lora_on_cpu qlora_sharded_model_loading device_map device_map.* "
        "experimental_skip_move_to_device",
    ),
    **each(
        Ignored(_PREPARED),
        "dataset_processes dataset_num_proc dataset_keep_in_memory skip_prepare_dataset "
        "num_dataset_shards_to_save dataloader_pin_memory dataloader_num_workers "
        "dataloader_prefetch_factor dataloader_drop_last group_by_length streaming "
        "streaming_multipack_buffer_size pretrain_multipack_buffer_size remove_unused_columns "
        "preprocess_iterable is_preprocess",
    ),
    **each(
        Ignored("rows have data.seq_len tokens, packed by the data's order and train.seed"),
        "eval_sample_packing pad_to_sequence_len pad_to_multiple_of sample_packing_group_size "
        "sample_packing_bin_size sample_packing_mp_start_method sample_packing_eff_est "
        "multipack_real_batches batch_flattening total_num_tokens total_supervised_tokens "
        "pretrain_multipack_attn pretraining_sample_concatenation",
    ),
    **each(Ignored("the micro-batch is the largest that fits"), "eval_batch_size"),
    "auto_find_batch_size": Ignored("the micro-batch is the largest that fits"),
    **each(
        _OWN,
        "flash_attention sdp_attention xformers_attention flex_attention eager_attention "
        "sage_attention attn_implementation attention flex_attn_compile_kwargs.* flash_optimum "
        "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp "
        "gemma4_hybrid_attn_impl unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv "
        "unsloth_lora_o unsloth_rms_norm unsloth_rope lora_mlp_kernel lora_qkv_kernel "
        "lora_o_kernel lora_embedding_kernel liger_rope liger_rms_norm liger_layer_norm "
        "liger_swiglu liger_glu_activation liger_cross_entropy liger_fused_linear_cross_entropy "
        "liger_use_token_scaling liger_rms_norm_gated fused_attn_kernel cut_cross_entropy "
        "chunked_cross_entropy chunked_cross_entropy_num_chunks use_kernels experts_implementation "
        "use_scattermoe use_sonicmoe tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp",
    ),
    **each(
        Ignored(LAYOUT),
        "fsdp fsdp.* fsdp_config fsdp_config.* fsdp_version fsdp_final_state_dict_type ddp "
        "expert_parallel_size dp_shard_size dp_replicate_size tensor_parallel_size "
        "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_find_unused_parameters accelerator_config.*",
    ),
    **each(Ignored("run.timeout and run.host_timeout end a job that hangs"), "ddp_timeout"),
    **each(
        Ignored("mpirun, srun or torchrun start the ranks"),
        "world_size local_rank use_ray ray_run_name ray_num_workers resources_per_worker "
        "resources_per_worker.*",
    ),
    "device": Ignored("run.device=auto takes the GPU if there is one"),
    **each(
        Ignored("the governor acts before memory ends; memory.host_limit limits the host"),
        "gpu_memory_limit max_memory.* gc_steps",
    ),
    **each(
        Ignored("metrics.jsonl in run.dir has each step, with tokens per second and memory"),
        "logging_steps include_tokens_per_second include_tkps debug profiler_steps_start",
    ),
    **each(
        Ignored("the run is one, however often it starts; WANDB_PROJECT is in the environment"),
        "wandb_mode wandb_entity wandb_run_id wandb_watch",
    ),
    **each(
        Ignored("checkpoints go by time and steps, not by epochs; the last weights are saved"),
        "save_only_model save_first_step saves_per_epoch dynamic_checkpoint.*",
    ),
    **each(
        Ignored("held-out loss is measured at the start and the end; train.eval_every_steps"),
        "eval_strategy evaluation_strategy eval_sequence_len",
    ),
    "auto_resume_from_checkpoints": Ignored("checkpoint.resume=auto: rerun the same command"),
    **each(
        Ignored("python -m hpc_tune export --to merged merges an adapter"),
        "merge_lora merge_method",
    ),
    **each(
        Ignored("recomputing is PyTorch's own, not reentrant"), "gradient_checkpointing_kwargs.*"
    ),
    **each(Ignored("one decoder block is compiled, for all"), "torch_compile_backend"),
    "torch_compile_mode": Ignored("one decoder block is compiled, for all"),
    **schedule_arguments(
        "num_cycles num_decay_steps min_lr_ratio warmup_type decay_type",
        "optim.schedule, optim.restarts and optim.decay_ratio say it",
    ),
    **each(
        Ignored("optim.min_lr_ratio says it"),
        "cosine_min_lr_ratio lr_scheduler_kwargs.min_lr_rate",
    ),
    "peft.backend": Ignored("bitsandbytes quantizes"),
    "peft_autocast_adapter_dtype": only_value(
        "true", "adapters are in fp32; tune.param_dtype says it"
    ),
    "lora_fan_in_fan_out": Ignored("found by the kind of a layer"),
    "loraplus_lr_embedding": Ignored("embeddings have no adapters"),
    "strict": Ignored("a key that is not known is an error"),
    "axolotl_config_path": Ignored("run.dir has the resolved configuration"),
    "shuffle_before_merging_datasets": Ignored("rows of all data are shuffled, by train.seed"),
    "peft_init_lora_weights": only_value("true", "adapters are initialized as in LoRA"),
    "bnb_config_kwargs.bnb_4bit_quant_type": only_value("nf4", NF4),
    "bnb_config_kwargs.bnb_4bit_use_double_quant": only_value("true", NF4),
    "shuffle_merged_datasets": only_value("true", "rows are always shuffled, by train.seed"),
}
_SHAPE = "the model is what config.json of model.path says: change it there"
UNSUPPORTED_KEYS: dict[str, Rule] = {
    "load_in_8bit": lacking("there are no 8 bits: lora on bf16 is used; qlora has 4", to_do=True),
    "gptq": lacking("tune.method=qlora quantizes a model by itself: name that", to_do=True),
    **each(lacking(NF4), "bnb_config_kwargs.* peft.group_size"),
    **each(
        lacking("model.dtype is bf16 or fp32; auto takes bf16 on a GPU that has it"), "fp16 float16"
    ),
    "float32": lacking("set model.dtype=fp32", to_do=True),
    "fp8_enable_fsdp_float8_all_gather": lacking("weights are gathered in model.dtype"),
    **each(
        lacking("all linear layers named in tune.targets get adapters", to_do=True),
        "peft_layers_to_transform peft_layers_pattern",
    ),
    **each(
        lacking("adapters begin and are trained as in LoRA, with B at 0", to_do=True),
        "peft.loftq_config.* relora relora_steps relora_warmup_steps "
        "relora_anneal_steps relora_prune_ratio relora_prune_method relora_cpu_offload "
        "jagged_restart_steps jagged_restart_warmup_steps jagged_restart_anneal_steps "
        "peft_ensure_weight_tying",
    ),
    **each(
        lacking("no parts are frozen: adapters are trained, or all weights", to_do=True),
        "unfrozen_parameters lisa_n_layers lisa_step_interval "
        "spectrum_top_fraction spectrum_model_name",
    ),
    "lisa_layers_attribute": Ignored("no parts are frozen"),
    **each(
        ROUTER_LOSS,
        "model_config.router_aux_loss_coef overrides_of_model_config.router_aux_loss_coef",
    ),
    **each(
        Ignored("a loss of routers is learned where tune.router_aux_loss is set"),
        "model_config.output_router_logits overrides_of_model_config.output_router_logits",
    ),
    **each(
        lacking(_SHAPE, to_do=True),
        "overrides_of_model_config.* model_config.* rope_scaling peft_layer_replication "
        "reinit_weights random_init_weights scaling_softmax scaling_softmax_factor "
        "scaling_softmax_bias s2_attention llama4_linearized_experts use_pose "
        "pose_split_on_token_ids pose_max_context_len pose_num_chunks",
    ),
    **each(
        lacking("the model is loaded as model.dtype says"),
        "torch_dtype overrides_of_model_kwargs.* model_kwargs.* model_quantization_config "
        "model_quantization_config_kwargs.* embeddings_skip_upcast",
    ),
    **each(
        lacking(
            "no tokens are added; save the model and its tokenizer with them first", to_do=True
        ),
        "tokens added_tokens_overrides special_tokens.additional_special_tokens "
        "fix_untrained_tokens",
    ),
    **each(
        lacking("the tokenizer's own is taken: if that is another, change it there", to_do=True),
        "special_tokens.bos_token special_tokens.eos_token special_tokens.unk_token "
        "tokens.bos_token tokens.eos_token tokens.unk_token",
    ),
    **each(
        lacking("embeddings keep their size"),
        "resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings",
    ),
    "tokenizer_config": lacking("put that tokenizer's files into model.path", to_do=True),
    **each(
        lacking("name the directory of that revision in model.path", to_do=True),
        "revision_of_model model_revision",
    ),
    "trust_remote_code": lacking("no code of a model directory is run: its type must be known"),
    # false is an argument too: of Qwen3's enable_thinking it is not what a template does without.
    "chat_template_kwargs.*": Unsupported(
        "a template has no further arguments: write them into it", to_do=True
    ),
    "eot_tokens": lacking("what the chat template writes to end an answer is learned with it"),
    "default_system_message": lacking(
        "begin each record's messages with a system message", to_do=True
    ),
    **each(lacking("cut the data beforehand", to_do=True), "dataset_shard_num dataset_shard_idx"),
    **each(
        lacking("prepare the data so beforehand", to_do=True),
        "dataset_exact_deduplication min_sample_len",
    ),
    **each(
        lacking("rows are always shuffled, by train.seed", to_do=True),
        "curriculum_sampling sample_packing_sequentially",
    ),
    **each(
        lacking("there is no context parallelism; parallel.recompute=full makes long rows fit"),
        "context_parallel_size sequence_parallel_degree heads_k_stride ring_attn_func",
    ),
    **each(
        lacking("parallel.recompute=full saves that memory"),
        "activation_offloading layer_offloading",
    ),
    "deepcompile": lacking("set train.compile=true"),
    **each(
        lacking("there is one learning rate for all weights", to_do=True),
        "embedding_lr embedding_lr_scale lr_groups",
    ),
    **each(
        lacking("AdamW is the only optimizer; find optim.lr again", to_do=True),
        "optim_args optim_args.* optim_target_modules torchdistx_path adam_beta3 adam_epsilon2 "
        "dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of grokfast_alpha "
        "grokfast_lamb",
    ),
    **each(
        lacking(ONE_SCHEDULE, to_do=True),
        "lr_scheduler_kwargs.* lr_quadratic_warmup cosine_constant_lr_ratio lr_div_factor",
    ),
    **each(
        lacking("cross entropy of the next token is the only loss", to_do=True),
        "use_eaft label_smoothing_factor",
    ),
    **each(Ignored("cross entropy is the only loss"), "eaft_alpha eaft_k"),
    **each(
        Ignored("distillation alone uses it"),
        "kd_trainer kd_ce_alpha kd_alpha kd_temperature kd_beta kd_normalize_topk",
    ),
    "trainer_cls": lacking("there is one loop of training", to_do=True),
    "diffusion.*": Ignored("training by diffusion alone uses it"),
    **each(
        lacking("nothing is quantized or pruned in training, but the base by qlora", to_do=True),
        "qat.* quantization.* llmcompressor.*",
    ),
    **each(
        lacking("a loss that is not finite ends a run; watch and the report show the others"),
        "loss_watchdog_threshold loss_watchdog_patience",
    ),
    "load_best_model_at_end": lacking("set checkpoint.keep_best=true, and export that", to_do=True),
    **each(
        Ignored("checkpoint.keep_best takes the loss"), "metric_for_best_model greater_is_better"
    ),
    "evals_per_epoch": lacking("evaluations go by steps: set train.eval_every_steps"),
    "resume_from_checkpoint": lacking(
        "their state cannot be read; tune.init_from takes adapters", to_do=True
    ),
    **each(
        lacking("the held-out loss is what is measured; generate and lm-eval come afterwards"),
        "eval_table_size eval_max_new_tokens do_causal_lm_eval eval_causal_lm_metrics "
        "do_bench_eval bench_dataset bench_split generate_samples lm_eval_tasks "
        "lm_eval_batch_size lm_eval_model",
    ),
    **each(
        Ignored("python -m hpc_tune generate answers prompts"),
        "num_generation_samples generation_max_new_tokens generation_temperature "
        "generation_top_p generation_top_k generation_prompt_ratio generation_do_sample "
        "gradio_title gradio_share gradio_server_name gradio_server_port gradio_max_new_tokens "
        "gradio_temperature",
    ),
    **each(
        lacking(NO_TRACKER),
        "mlflow_tracking_uri mlflow_experiment_name mlflow_run_name "
        "hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace comet_project_name "
        "comet_experiment_key comet_mode comet_online comet_experiment_config.* "
        "trackio_project_name trackio_run_name trackio_space_id use_otel_metrics "
        "otel_metrics_host otel_metrics_port use_swanlab swanlab_project swanlab_mode "
        "swanlab_workspace swanlab_experiment_name swanlab_description swanlab_log_completions "
        "swanlab_log_model swanlab_completion_log_interval swanlab_completion_max_buffer "
        "wandb_log_model",
    ),
    **each(
        lacking("nothing is uploaded; run.dir has export/"),
        "hub_model_id hub_strategy hub_revision push_dataset_to_hub hf_use_auth_token",
    ),
    **each(
        Ignored("images, sound and video are not trained on"),
        "image_size image_resize_algorithm freeze_mm_modules processor_type is_multimodal",
    ),
    "max_packed_sequence_len": lacking("set data.packing=true", to_do=True),
}


_FULL = "none: all weights are trained"
# Plugins that change how something is computed, and not what.
_KERNELS = ("LigerPlugin", "CutCrossEntropyPlugin", "KernelsPlugin", "NeMoPlugin")


def _method(theirs: ForeignConfig) -> str:
    kind = theirs.get("adapter", _FULL)
    if kind == _FULL:
        return "full"
    is_4_bit = theirs.is_on("load_in_4bit") or theirs.get("peft.weight_dtype") in ("nf4", "int4")
    if kind == "qlora" or is_4_bit:
        return "qlora"
    return "dora" if theirs.is_on("peft_use_dora") else "lora"


def _adapter(value: Any, theirs: ForeignConfig) -> Outcome:
    if value in ("lora", "qlora", _FULL):
        return Mapped({"tune.method": _method(theirs)})
    return Unsupported("tune.method is lora, dora, qlora or full; lora is used", to_do=True)


def _4_bit(value: Any, theirs: ForeignConfig) -> Outcome:
    if str(value).lower() != "true":
        return Ignored("tune.method says it")
    return Mapped({"tune.method": _method(theirs)})


def _weight_dtype(value: Any, theirs: ForeignConfig) -> Outcome:
    if value in ("nf4", "int4") and _method(theirs) == "qlora":
        remark = "" if value == "nf4" else "in NF4, not in integers"
        return Mapped({"tune.method": "qlora"}, remark)
    return Unsupported("only tune.method=qlora has a quantized base, of 4 bits", to_do=True)


def _targets(value: Any, theirs: ForeignConfig) -> Outcome:
    if _method(theirs) == "full":
        return NO_ADAPTERS
    if not are_expert_stacks(theirs.get("lora_target_parameters")):
        return _layers(theirs)
    has_layers = theirs.get("lora_target_modules") or theirs.is_on("lora_target_linear")
    layers = _layers(theirs) if has_layers else Mapped({"tune.targets": []})
    return add_experts(layers, theirs.get("lora_r"))


def _target_parameters(value: Any, theirs: ForeignConfig) -> Outcome:
    if not are_expert_stacks(value):
        return Unsupported(
            "adapters go on both stacks of all layers' experts, where tune.targets names them: "
            "[all-linear, experts], with tune.expert_rank for each expert",
            to_do=True,
        )
    return _targets(value, theirs)


def _layers(theirs: ForeignConfig) -> Outcome:
    names = theirs.get("lora_target_modules")
    is_pattern = isinstance(names, str) and names.replace("_", "-") != "all-linear"
    names = names if isinstance(names, list) else []
    if is_pattern or any(not str(name).replace("_", "").isalnum() for name in names):
        return Unsupported(
            "tune.targets has names of layers, such as [q_proj], no patterns", to_do=True
        )
    if not theirs.is_on("lora_target_linear") and names:
        return convert_targets(list(map(str, names)), "base_model", theirs)
    if further := [name for name in names if name in ("lm_head", "embed_tokens")]:
        return Unsupported(
            f"all-linear does not include {further[0]}; list all names instead", to_do=True
        )
    return Mapped({"tune.targets": "all-linear"})


def _target_linear(value: Any, theirs: ForeignConfig) -> Outcome:
    if str(value).lower() == "true":
        return _targets(value, theirs)
    return Ignored("tune.targets says it")


def _batch(value: Any, theirs: ForeignConfig) -> Outcome:
    ranks_per_row = 1
    context = "context_parallel_size"
    context = context if theirs.get(context) else "sequence_parallel_degree"  # its older name
    for key in ("tensor_parallel_size", context):
        if theirs.get(key):
            ranks_per_row *= theirs.whole(key)
    if theirs.get("batch_size"):
        rows = ForeignConfig({"rows": theirs.whole("batch_size"), "accumulated": 1}, theirs.ranks)
        return global_batch(rows, "rows", "accumulated", ranks_per_row)
    return global_batch(theirs, "micro_batch_size", "gradient_accumulation_steps", ranks_per_row)


def _schedule(value: Any, theirs: ForeignConfig) -> Outcome:
    ratio = theirs.get("lr_scheduler_kwargs.min_lr_rate", theirs.get("cosine_min_lr_ratio"))
    return convert_schedule(value, ratio, theirs)


def _bf16(value: Any, theirs: ForeignConfig) -> Outcome:
    halves = [key for key in ("bf16", "bfloat16", "fp16", "float16") if theirs.is_on(key)]
    if str(value).lower() == "false":
        return Ignored(f"{halves[0]} says it") if halves else Mapped({"model.dtype": "fp32"})
    if value == "auto" and (theirs.is_on("fp16") or theirs.is_on("float16")):
        return Ignored("fp16 takes precedence")
    ours: dict[str, Any] = {"model.dtype": "auto" if value == "auto" else "bf16"}
    if _method(theirs) != "full":
        return Mapped(ours, "adapters and their state stay in fp32")
    if theirs.get("deepspeed"):
        return Mapped(ours, "trained weights are kept in fp32, as DeepSpeed does")
    remark = "as there; tune.param_dtype=fp32 loses no small updates and takes twice the memory"
    return Mapped({**ours, "tune.param_dtype": "bf16"}, remark)


def _recompute(value: Any, theirs: ForeignConfig) -> Outcome:
    if str(value).lower() == "false":
        return Ignored("parallel.recompute=none is the default")
    remark = "" if str(value).lower() == "true" else "computed again, not moved to the host"
    return Mapped({"parallel.recompute": "full"}, remark)


def _compile(value: Any, theirs: ForeignConfig) -> Outcome:
    return Mapped({"train.compile": str(value).lower() in ("true", "auto")})


def _float8(value: Any, theirs: ForeignConfig) -> Outcome:
    if str(value).lower() != "true":
        return Ignored("off in their config")
    return Unsupported(
        "set train.float8=true with train.compile=true, if the GPU has it", to_do=True
    )


def _profile(value: Any, theirs: ForeignConfig) -> Outcome:
    skipped = theirs.whole("profiler_steps_start") if theirs.get("profiler_steps_start") else 0
    first = skipped + 1
    return Mapped({"train.profile": f"{first}:{theirs.whole('profiler_steps')}"})


def _trackers(value: Any, theirs: ForeignConfig) -> Outcome:
    has_wandb = theirs.is_on("use_wandb") or theirs.get("wandb_project") is not None
    is_off = theirs.get("wandb_mode") == "disabled" or theirs.get("use_wandb", True) is False
    names = ["wandb"] if has_wandb and not is_off else []
    names += [name for name in ("mlflow", "trackio") if theirs.is_on(f"use_{name}")]
    return Mapped({"run.trackers": names}, "into run.dir, unless their variables say otherwise")


def _plugins(value: Any, theirs: ForeignConfig) -> Outcome:
    names = [str(name).rpartition(".")[2] for name in (value if isinstance(value, list) else [])]
    others = [name for name in names if name not in _KERNELS]
    if not others:
        return Ignored("attention and loss are PyTorch's own; logits are never held whole")
    return Unsupported(f"{' and '.join(others)}: there are no plugins", to_do=True)


def _defaults(theirs: ForeignConfig) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "adapter": _FULL,
        "sequence_len": 512,
        "sample_packing": False,
        "lr_scheduler": "cosine",
        "bf16": "auto",
    }
    if not theirs.get("batch_size"):
        defaults |= {"micro_batch_size": 1, "gradient_accumulation_steps": 1}
    if theirs.get("max_steps") is None:
        defaults["num_epochs"] = 1.0
    if any(theirs.get(key) for key in ("fp16", "float16", "bfloat16", "float32")):
        del defaults["bf16"]
    return defaults | axolotl_preference_defaults(theirs)


_MAPPED: dict[str, Rule] = {
    "base_model": model_path,
    "adapter": _adapter,
    "load_in_4bit": _4_bit,
    "peft.weight_dtype": _weight_dtype,
    "peft_use_dora": dora_rule(_method),
    "peft_use_rslora": rslora_rule(_method),
    "lora_r": adapter_rule("tune.rank", _method),
    "lora_alpha": adapter_rule("tune.alpha", _method),
    **patterns("lora_rank_pattern", "tune.rank_pattern", _method),
    **patterns("lora_alpha_pattern", "tune.alpha_pattern", _method),
    "lora_dropout": dropout_rule(adapter_rule("tune.dropout", _method), find_axolotl_objective),
    "loraplus_lr_ratio": adapter_rule("optim.lora_b_ratio", _method),
    "lora_modules_to_save": modules_to_save(_method),
    "peft_trainable_token_indices": trainable_tokens(_method),
    "lora_target_modules": _targets,
    "lora_target_linear": _target_linear,
    "lora_target_parameters": _target_parameters,
    "lora_model_dir": reference_adapter_rule(first_adapter(_method), find_axolotl_objective),
    **data_rules(),
    **CHAT_TEMPLATE,
    "val_set_size": val_size,
    **each(_batch, "micro_batch_size gradient_accumulation_steps batch_size"),
    "num_epochs": epochs,
    "max_steps": max_steps,
    "learning_rate": same("optim.lr"),
    "optimizer": optimizer,
    "weight_decay": same("optim.weight_decay"),
    "adam_beta1": same("optim.beta1"),
    "adam_beta2": same("optim.beta2"),
    "adam_epsilon": same("optim.eps"),
    "max_grad_norm": same("optim.clip_norm"),
    "warmup_steps": warmup_steps,
    "warmup_ratio": warmup_ratio,
    "lr_scheduler": _schedule,
    **each(_bf16, "bf16 bfloat16"),
    "tf32": same("train.tf32"),
    "fp8": _float8,
    **each(_recompute, "gradient_checkpointing fsdp_config.activation_checkpointing"),
    **each(offload_params, "fsdp_config.offload_params fsdp_config.fsdp_offload_params"),
    **each(deepspeed, "deepspeed deepspeed.*"),
    "torch_compile": _compile,
    "eval_steps": eval_steps(
        "val_set_size", lambda theirs: bool(list_usable_files("test_datasets", theirs))
    ),
    "early_stopping_patience": early_stop("val_set_size"),
    **each(
        noise_rule(neftune, find_axolotl_objective), "neftune_noise_alpha noisy_embedding_alpha"
    ),
    "save_steps": save_steps,
    "save_strategy": save_strategy,
    "save_total_limit": same("checkpoint.keep"),
    "profiler_steps": _profile,
    "dataset_prepared_path": same("data.cache"),
    **each(_trackers, "use_wandb wandb_project use_mlflow use_trackio"),
    "wandb_name": same("run.name"),
    "use_tensorboard": same("run.tensorboard"),
    "plugins": _plugins,
    "output_dir": same("run.dir"),
    "seed": same("train.seed"),
}
AXOLOTL = Tool(
    "axolotl",
    {**_MAPPED, **LENGTHS, **AXOLOTL_PREFERENCES, **IGNORED_KEYS, **UNSUPPORTED_KEYS},
    _defaults,
    find_axolotl_task,
    LISTS,
)
