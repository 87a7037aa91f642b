"""The rules for configs of LLaMA-Factory, whose further keys are the Hugging Face Trainer's."""

from typing import Any

from hpc_tune.convert.hf_trainer import (
    NF4,
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
    save_steps,
    save_strategy,
    schedule_arguments,
    val_size,
    warmup_ratio,
    warmup_steps,
)
from hpc_tune.convert.preferences import (
    LLAMA_FACTORY_PREFERENCES,
    SFT,
    answers_rule,
    dropout_rule,
    find_llama_factory_objective,
    llama_factory_preference_defaults,
    map_seq_len,
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
    convert_targets,
    dora_rule,
    each,
    explain_chat_template,
    first_records,
    global_batch,
    lacking,
    model_path,
    packing,
    rslora_rule,
    same,
)
from hpc_tune.convert.wrong_tasks import find_llama_factory_task

# -- LLaMA-Factory's keys that give no setting: what hpc_tune decides itself, and what it lacks.


_PREPARED = "raw data are prepared once, into data.cache; ranks read ahead of their steps"
IGNORED_KEYS: dict[str, Rule] = {
    "do_train": Ignored("the command trains"),
    **each(Ignored("data.path names the file itself"), "dataset_dir"),
    **each(Ignored("datasets of a folder are one"), "mix_strategy"),
    **each(
        Ignored(_PREPARED),
        "overwrite_cache preprocessing_num_workers preprocessing_batch_size tokenized_path "
        "dataloader_num_workers dataloader_prefetch_factor dataloader_persistent_workers "
        "dataloader_pin_memory dataloader_drop_last streaming buffer_size group_by_length "
        "data_shared_file_system dataloader_in_order dataloader_multiprocessing_context "
        "train_sampling_strategy length_column_name sortish_sampler",
    ),
    **each(
        Ignored("run.dir has checkpoints, each with the optimizer; a new run has a new one"),
        "overwrite_output_dir save_only_model save_safetensors save_on_each_node "
        "enable_jit_checkpoint ignore_data_skip restore_callback_states_from_checkpoint",
    ),
    **each(
        Ignored("metrics.jsonl and tensorboard/ in run.dir have each step"),
        "logging_steps logging_strategy logging_dir logging_first_step plot_loss log_level "
        "disable_tqdm include_num_input_tokens_seen include_mfu log_on_each_node "
        "log_level_replica logging_nan_inf_filter skip_memory_metrics print_param_status debug "
        "include_effective_tokens_per_second",
    ),
    **each(Ignored("run.timeout and run.host_timeout end a job that hangs"), "ddp_timeout"),
    **each(
        Ignored("the micro-batch is the largest that fits"),
        "per_device_eval_batch_size auto_find_batch_size eval_accumulation_steps",
    ),
    **each(
        Ignored("held-out loss is measured at the start, the end and train.eval_every_steps"),
        "eval_strategy do_eval eval_on_start eval_delay prediction_loss_only bf16_full_eval "
        "fp16_full_eval eval_do_concat_batches eval_use_gather_object batch_eval_metrics",
    ),
    "average_tokens_across_devices": Ignored("a loss is a sum over the tokens of all ranks"),
    "ignore_pad_token_for_loss": Ignored("padding is neither attended to nor learned"),
    "label_names": Ignored("data.loss_on says what is learned"),
    "torch_empty_cache_steps": Ignored("the governor acts before memory ends"),
    "init_special_tokens": Ignored("no tokens are added"),
    **each(
        Ignored("python -m hpc_tune export --to merged merges an adapter"),
        "export_dir export_size export_device export_legacy_format",
    ),
    **each(Ignored("train.seed is the seed of everything"), "data_seed"),
    **each(
        Ignored("it is the Trainer's; disable_gradient_checkpointing is what counts there"),
        "gradient_checkpointing gradient_checkpointing_kwargs.* use_reentrant_gc use_unsloth_gc "
        "activation_checkpointing activation_checkpointing_kwargs.*",
    ),
    **each(
        Ignored("one decoder block is compiled, for all"),
        "torch_compile_backend torch_compile_mode",
    ),
    **each(
        Ignored("attention and loss are PyTorch's own"),
        "flash_attn attn enable_liger_kernel use_liger_kernel liger_kernel_config.* use_unsloth "
        "use_v1_kernels",
    ),
    **each(
        Ignored("ranks read their regions of the files of model.path"),
        "low_cpu_mem_usage use_fast_tokenizer cache_dir model_revision offload_folder "
        "quantization_device_map",
    ),
    **each(
        Ignored("mpirun, srun or torchrun start the ranks"),
        "use_ray ray_run_name ray_storage_path ray_storage_filesystem ray_num_workers "
        "resources_per_worker resources_per_worker.* placement_strategy ray_init_kwargs.* "
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_backend local_rank",
    ),
    **each(
        Ignored(LAYOUT),
        "fsdp fsdp_config fsdp_config.* parallelism_config.* accelerator_config.* "
        "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size "
        "context_parallel_size sequence_parallel virtual_pipeline_model_parallel_size",
    ),
    "double_quantization": Ignored(NF4),
    **schedule_arguments(
        "num_cycles num_decay_steps min_lr_ratio warmup_type decay_type",
        "optim.schedule, optim.restarts and optim.decay_ratio say it",
    ),
    **each(
        Ignored("optim.min_lr_ratio says it"),
        "lr_scheduler_kwargs.min_lr_rate lr_scheduler_kwargs.min_lr",
    ),
    **each(
        Ignored("checkpoint.keep_best takes the loss"), "metric_for_best_model greater_is_better"
    ),
    "remove_unused_columns": Ignored("the form of a record is found by its keys"),
}
_BY_TEMPLATE = "the tokenizer's chat template writes tools and reasoning"


def _thinking(value: Any, theirs: ForeignConfig) -> Outcome:
    """Rule for reasoning, which false takes out of their data."""
    if str(value).lower() != "false":
        return Unsupported(_BY_TEMPLATE, to_do=True)
    return Unsupported(
        "there reasoning is taken out of the answers, and an empty block of it ends the prompts: "
        "take it out of the data; an empty block that the chat template writes is learned here, "
        "and counted",
        to_do=True,
    )


UNSUPPORTED_KEYS: dict[str, Rule] = {
    "quantization_method": only_value("bnb", NF4),
    "quantization_type": only_value("nf4", NF4),
    "fp16": lacking("model.dtype is bf16 or fp32; auto takes bf16 on a GPU that has it"),
    "trust_remote_code": lacking("no code of a model directory is run: its type must be known"),
    "resume_from_checkpoint": lacking(
        "their state cannot be read; tune.init_from takes adapters", to_do=True
    ),
    "load_best_model_at_end": lacking("set checkpoint.keep_best=true, and export that", to_do=True),
    "disable_shuffling": lacking("rows are always shuffled, by train.seed", to_do=True),
    "mask_history": lacking("every answer of a chat is learned", to_do=True),
    "interleave_probs": lacking(
        "name each dataset in data.sources with a weight: its share of the learned tokens, not of "
        "documents",
        to_do=True,
    ),
    "tool_format": lacking(_BY_TEMPLATE, to_do=True),
    "enable_thinking": _thinking,
    "default_system": lacking("begin each record's messages with a system message", to_do=True),
    "adapter_folder": lacking("tune.init_from names the folder of the adapter itself", to_do=True),
    "split_special_tokens": lacking(
        "set it in the tokenizer_config.json of model.path", to_do=True
    ),
    "train_from_scratch": lacking("a run begins with the weights of model.path", to_do=True),
    "eval_on_each_dataset": lacking("the held-out loss is one for all data"),
    "use_mca": lacking("Megatron is not used; plan proposes a layout"),
    "create_new_adapter": lacking("merge the first adapter into the model", to_do=True),
    **each(
        lacking("adapters begin as in LoRA, with B at 0", to_do=True),
        "pissa_init pissa_iter pissa_convert",
    ),
    "loraplus_lr_embedding": Ignored("embeddings have no adapters"),
    **each(
        lacking("AdamW is the only optimizer; find optim.lr again", to_do=True),
        "use_galore use_apollo use_badam use_adam_mini use_muon optim_args optim_target_modules "
        "galore_target galore_rank galore_update_interval galore_scale galore_proj_type "
        "galore_layerwise apollo_target apollo_rank apollo_update_interval apollo_scale "
        "apollo_proj apollo_proj_type apollo_scale_type apollo_layerwise apollo_scale_front "
        "badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio "
        "badam_mask_mode badam_verbose",
    ),
    **each(
        lacking("tune.method is lora, dora, qlora or full", to_do=True),
        "module_dropout oft_rank oft_block_size oft_target",
    ),
    **each(
        lacking("cross entropy of the next token is the only loss", to_do=True),
        "label_smoothing_factor use_dft_loss use_asft_loss asft_alpha use_eaft_loss eaft_alpha",
    ),
    "moe_aux_loss_coef": ROUTER_LOSS,
    **each(
        lacking("the model is what config.json of model.path says", to_do=True),
        "rope_scaling shift_attn mixture_of_depths use_llama_pro resize_vocab add_tokens "
        "add_special_tokens new_special_tokens_config",
    ),
    "do_predict": lacking("a run trains: python -m hpc_tune generate answers prompts", to_do=True),
    **each(
        Ignored("python -m hpc_tune generate answers prompts"),
        "predict_with_generate compute_accuracy max_new_tokens max_length top_k top_p "
        "temperature num_beams infer_backend infer_dtype do_sample repetition_penalty "
        "length_penalty skip_special_tokens use_kv_cache use_cache eval_num_beams "
        "generation_max_length generation_num_beams generation_config generation_config.* "
        "include_for_metrics vllm_maxlen vllm_gpu_util vllm_enforce_eager vllm_max_lora_rank "
        "vllm_config vllm_config.* sglang_maxlen sglang_mem_fraction sglang_tp_size "
        "sglang_config sglang_config.* sglang_lora_backend",
    ),
    **each(
        lacking("set train.float8=true with train.compile=true, if the GPU has it", to_do=True),
        "fp8 fp8_backend fp8_enable_fsdp_float8_all_gather",
    ),
    **each(
        lacking("KTransformers is not used"),
        "use_kt kt_optimize_rule cpu_infer chunk_size mode kt_maxlen kt_use_cuda_graph kt_mode "
        "kt_force_think",
    ),
    **each(
        Ignored("there is no quantization of what was trained"),
        "export_quantization_bit export_quantization_dataset export_quantization_nsamples "
        "export_quantization_maxlen",
    ),
    **each(
        lacking("no parts are frozen: adapters are trained, or all weights", to_do=True),
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules",
    ),
    **each(
        lacking("images, sound and video are not trained on"),
        "image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps "
        "video_maxlen media_dir freeze_vision_tower freeze_multi_modal_projector "
        "freeze_language_model image_do_pan_and_scan crop_to_patches use_audio_in_video "
        "audio_sampling_rate visual_inputs image_resolution train_mm_proj_only",
    ),
    **each(
        lacking("nothing is uploaded; run.dir has export/"),
        "push_to_hub hub_model_id hub_strategy hub_token hf_hub_token ms_hub_token om_hub_token "
        "hub_private_repo hub_always_push hub_revision export_hub_model_id",
    ),
    **each(
        lacking(NO_TRACKER),
        "use_swanlab swanlab_project swanlab_workspace swanlab_run_name swanlab_mode "
        "swanlab_api_key swanlab_logdir swanlab_lark_webhook_url swanlab_lark_secret project "
        "trackio_space_id trackio_bucket_id trackio_static_space_id",
    ),
    **each(lacking("dtypes follow model.dtype"), "upcast_layernorm upcast_lmhead_output"),
}


def _method(theirs: ForeignConfig) -> str:
    if theirs.get("finetuning_type") == "full":
        return "full"
    if str(theirs.get("quantization_bit")) == "4":
        return "qlora"
    return "dora" if theirs.is_on("use_dora") else "lora"


def _finetuning_type(value: Any, theirs: ForeignConfig) -> Outcome:
    if value in ("lora", "full"):
        return Mapped({"tune.method": _method(theirs)})
    return Unsupported("tune.method is lora, dora, qlora or full; lora is used", to_do=True)


def _bits(value: Any, theirs: ForeignConfig) -> Outcome:
    if _method(theirs) == "qlora":
        return Mapped({"tune.method": "qlora"})
    return Unsupported("only tune.method=qlora has a quantized base, of 4 bits", to_do=True)


def _split_names(value: Any) -> list[str]:
    names = value if isinstance(value, list) else str(value).split(",")
    return [str(name).strip() for name in names]


def _targets(value: Any, theirs: ForeignConfig) -> Outcome:
    if _method(theirs) == "full":
        return NO_ADAPTERS
    names = _split_names(value)
    if names == ["all"]:
        return Mapped({"tune.targets": "all-linear"})
    return convert_targets(names, "model_name_or_path", theirs)


def _template(value: Any, theirs: ForeignConfig) -> Outcome:
    if theirs.get("stage") == "pt":
        return Ignored("records with text have no template")
    return explain_chat_template(value)


def _dataset(ours: str) -> Rule:
    def rule(value: Any, theirs: ForeignConfig) -> Outcome:
        names = _split_names(value)
        folder = theirs.get("dataset_dir", "data")
        advice = f"{folder}/dataset_info.json names the file of {' and '.join(names)}: set {ours} "
        kinds = "alpaca, ShareGPT and messages"
        kinds = (
            kinds
            if find_llama_factory_objective(theirs) == SFT
            else "with ranking or kto_tag: both kinds"
        )
        advice += f"to it ({kinds} are understood)"
        if len(names) > 1:
            advice += ", as a list"
        return Unsupported(advice, to_do=True)

    return rule


def _loss_on(value: Any, theirs: ForeignConfig) -> Outcome:
    return Mapped({"data.loss_on": "all" if theirs.is_on("train_on_prompt") else "answers"})


def _packing(value: Any, theirs: ForeignConfig) -> Outcome:
    if find_llama_factory_objective(theirs) != SFT:
        remark = (
            "training on preferences does not pack there; true is faster, and a row then holds "
        )
        remark += "several documents, so make the batch smaller"
        return Mapped({"data.packing": False}, remark)
    return packing(theirs.is_on("packing") or theirs.is_on("neat_packing"), theirs)


def _seq_len(value: Any, theirs: ForeignConfig) -> Outcome:
    remark = "what is longer loses its end; prompts lose too there"
    return map_seq_len(theirs.whole("cutoff_len"), find_llama_factory_objective(theirs), remark)


def _batch(value: Any, theirs: ForeignConfig) -> Outcome:
    return global_batch(theirs, "per_device_train_batch_size", "gradient_accumulation_steps")


def _schedule(value: Any, theirs: ForeignConfig) -> Outcome:
    ratio = theirs.get("lr_scheduler_kwargs.min_lr_rate")
    lowest, peak = theirs.number("lr_scheduler_kwargs.min_lr"), theirs.number("learning_rate")
    if lowest >= 0 and peak > 0:
        ratio = lowest / peak
    return convert_schedule(value, ratio, theirs)


def _bf16(value: Any, theirs: ForeignConfig) -> Outcome:
    is_pure = theirs.is_on("pure_bf16")
    if not is_pure and not theirs.is_on("bf16"):
        return Ignored("model.dtype=auto takes what the device has")
    if not is_pure or _method(theirs) != "full":
        return Mapped({"model.dtype": "bf16"}, "trained weights and their state stay in fp32")
    remark = "tune.param_dtype=fp32 loses no small updates and takes twice the memory"
    return Mapped({"model.dtype": "bf16", "tune.param_dtype": "bf16"}, remark)


def _recompute(value: Any, theirs: ForeignConfig) -> Outcome:
    is_off = theirs.is_on("disable_gradient_checkpointing")
    return Mapped({"parallel.recompute": "none" if is_off else "full"}, "none is faster if it fits")


def _report_to(value: Any, theirs: ForeignConfig) -> Outcome:
    names = _split_names(value)
    trackers = [name for name in ("wandb", "mlflow", "trackio") if name in names]
    if not set(names) <= {"none", "tensorboard", *trackers}:
        return Unsupported(NO_TRACKER)
    ours: dict[str, Any] = {"run.tensorboard": "tensorboard" in names}
    return Mapped(ours | ({"run.trackers": trackers} if trackers else {}))


def _use_cpu(value: Any, theirs: ForeignConfig) -> Outcome:
    return (
        Mapped({"run.device": "cpu"}) if theirs.is_on("use_cpu") else Ignored("off in their config")
    )


def _defaults(theirs: ForeignConfig) -> dict[str, Any]:
    defaults = {
        "finetuning_type": "lora",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "learning_rate": 5e-5,
        "num_train_epochs": 3.0,
        "lr_scheduler_type": "linear",
        "cutoff_len": 2048,
        "packing": theirs.get("stage") == "pt",
        "disable_gradient_checkpointing": False,
    }
    if theirs.get("warmup_ratio") is None and theirs.get("warmup_steps") is None:
        defaults["warmup_steps"] = 0
    if theirs.get("finetuning_type") != "full":
        rank = theirs.whole("lora_rank") if theirs.get("lora_rank") else 8
        defaults |= {"lora_rank": rank, "lora_alpha": 2 * rank, "lora_target": "all"}
    return defaults | llama_factory_preference_defaults(theirs)


_MAPPED: dict[str, Rule] = {
    "model_name_or_path": model_path,
    "adapter_name_or_path": reference_adapter_rule(
        first_adapter(_method), find_llama_factory_objective, "ref_model_adapters"
    ),
    "quantization_bit": _bits,
    "template": _template,
    "finetuning_type": _finetuning_type,
    "use_dora": dora_rule(_method),
    "use_rslora": rslora_rule(_method),
    "lora_rank": adapter_rule("tune.rank", _method),
    "lora_alpha": adapter_rule("tune.alpha", _method),
    "additional_target": modules_to_save(_method),
    "lora_dropout": dropout_rule(
        adapter_rule("tune.dropout", _method), find_llama_factory_objective
    ),
    "lora_target": _targets,
    "loraplus_lr_ratio": adapter_rule("optim.lora_b_ratio", _method),
    "dataset": _dataset("data.path"),
    "eval_dataset": _dataset("data.eval_path"),
    "val_size": val_size,
    "eval_steps": eval_steps("val_size"),
    "cutoff_len": _seq_len,
    "max_samples": first_records("data.path"),
    **each(_packing, "packing neat_packing"),
    "train_on_prompt": answers_rule(_loss_on, find_llama_factory_objective),
    **each(_batch, "per_device_train_batch_size gradient_accumulation_steps"),
    "learning_rate": same("optim.lr"),
    "lr_scheduler_type": _schedule,
    "warmup_ratio": warmup_ratio,
    "warmup_steps": warmup_steps,
    "weight_decay": same("optim.weight_decay"),
    "adam_beta1": same("optim.beta1"),
    "adam_beta2": same("optim.beta2"),
    "adam_epsilon": same("optim.eps"),
    "max_grad_norm": same("optim.clip_norm"),
    "optim": optimizer,
    "num_train_epochs": epochs,
    "max_steps": max_steps,
    **each(_bf16, "bf16 pure_bf16"),
    "tf32": same("train.tf32"),
    "disable_gradient_checkpointing": _recompute,
    "torch_compile": same("train.compile"),
    **each(deepspeed, "deepspeed deepspeed.*"),
    "early_stopping_steps": early_stop("val_size"),
    "neftune_noise_alpha": noise_rule(neftune, find_llama_factory_objective),
    "save_steps": save_steps,
    "save_total_limit": same("checkpoint.keep"),
    "output_dir": same("run.dir"),
    "report_to": _report_to,
    "run_name": same("run.name"),
    "seed": same("train.seed"),
    "full_determinism": same("train.deterministic"),
    "use_cpu": _use_cpu,
    "save_strategy": save_strategy,
}
LLAMA_FACTORY = Tool(
    "LLaMA-Factory",
    {**_MAPPED, **LLAMA_FACTORY_PREFERENCES, **IGNORED_KEYS, **UNSUPPORTED_KEYS},
    _defaults,
    find_llama_factory_task,
)
