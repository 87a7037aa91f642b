"""The rules for configs of LLaMA-Factory, whose further keys are the Hugging Face Trainer's."""

from typing import Any

from hpc_tune.convert.outcomes import (
    LAYOUT,
    NO_ADAPTERS,
    Decided,
    Left,
    Outcome,
    Rule,
    Taken,
    Theirs,
    Tool,
    adapter,
    dora,
    each,
    global_batch,
    lacking,
    model_path,
    packing,
    same,
)
from hpc_tune.convert.trainer import (
    NF4,
    deepspeed,
    epochs,
    first_adapter,
    max_steps,
    only,
    optimizer,
    rank_stabilized,
    save_steps,
    val_size,
    warmup,
)

_SCHEDULES = {
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "linear": "linear",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def _method(theirs: Theirs) -> str:
    if theirs.get("finetuning_type") == "full":
        return "full"
    if str(theirs.get("quantization_bit")) == "4":
        return "qlora"
    return "dora" if theirs.is_on("use_dora") else "lora"


def _finetuning_type(value: Any, theirs: Theirs) -> Outcome:
    if value in ("lora", "full"):
        return Taken({"tune.method": _method(theirs)})
    return Left("tune.method is lora, dora, qlora or full; lora is used", to_do=True)


def _bits(value: Any, theirs: Theirs) -> Outcome:
    if _method(theirs) == "qlora":
        return Taken({"tune.method": "qlora"})
    return Left("only tune.method=qlora has a quantized base, of 4 bits", to_do=True)


def _names(value: Any) -> list[str]:
    names = value if isinstance(value, list) else str(value).split(",")
    return [str(name).strip() for name in names]


def _targets(value: Any, theirs: Theirs) -> Outcome:
    if _method(theirs) == "full":
        return NO_ADAPTERS
    names = _names(value)
    return Taken({"tune.targets": "all-linear" if names == ["all"] else names})


def _stage(value: Any, theirs: Theirs) -> Outcome:
    if value == "sft":
        return Decided("supervised fine-tuning is the only kind")
    if value == "pt":
        return Decided("records with text are learned as a whole")
    return Left("there is supervised fine-tuning only, not rewards and preferences", to_do=True)


def _dataset(ours: str) -> Rule:
    def rule(value: Any, theirs: Theirs) -> Outcome:
        names = _names(value)
        folder = theirs.get("dataset_dir", "data")
        advice = f"{folder}/dataset_info.json names the file of {' and '.join(names)}: set {ours} "
        advice += "to it (alpaca, ShareGPT and messages are understood)"
        if len(names) > 1:
            advice += ", as a list"
        return Left(advice, to_do=True)

    return rule


def _loss_on(value: Any, theirs: Theirs) -> Outcome:
    return Taken({"data.loss_on": "all" if theirs.is_on("train_on_prompt") else "answers"})


def _packing(value: Any, theirs: Theirs) -> Outcome:
    return packing(theirs.is_on("packing") or theirs.is_on("neat_packing"), theirs)


def _batch(value: Any, theirs: Theirs) -> Outcome:
    return global_batch(theirs, "per_device_train_batch_size", "gradient_accumulation_steps")


def _schedule(value: Any, theirs: Theirs) -> Outcome:
    schedule = _SCHEDULES.get(str(value))
    if schedule is None:
        return Left("optim.schedule is constant, linear or cosine", to_do=True)
    if schedule == "constant":
        return Taken({"optim.schedule": schedule})
    ratio = theirs.get("lr_scheduler_kwargs.min_lr_rate", 0.0)
    return Taken({"optim.schedule": schedule, "optim.min_lr_ratio": ratio})


def _bf16(value: Any, theirs: Theirs) -> Outcome:
    is_pure = theirs.is_on("pure_bf16")
    if not is_pure and not theirs.is_on("bf16"):
        return Decided("model.dtype=auto takes what the device has")
    if not is_pure or _method(theirs) != "full":
        return Taken({"model.dtype": "bf16"}, "trained weights and their state stay in fp32")
    remark = "tune.param_dtype=fp32 loses no small updates and takes twice the memory"
    return Taken({"model.dtype": "bf16", "tune.param_dtype": "bf16"}, remark)


def _recompute(value: Any, theirs: Theirs) -> Outcome:
    is_off = theirs.is_on("disable_gradient_checkpointing")
    return Taken({"parallel.recompute": "none" if is_off else "full"}, "none is faster if it fits")


def _report_to(value: Any, theirs: Theirs) -> Outcome:
    names = _names(value)
    if not set(names) <= {"none", "tensorboard", "wandb"}:
        return Left("run.tensorboard and run.wandb are there; metrics.jsonl always has each step")
    ours = {"run.tensorboard": "tensorboard" in names}
    return Taken(ours | ({"run.wandb": True} if "wandb" in names else {}))


def _defaults(theirs: Theirs) -> dict[str, Any]:
    """Return what LLaMA-Factory takes where a config says nothing."""
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
    return defaults


_TAKEN: dict[str, Rule] = {
    "model_name_or_path": model_path,
    "adapter_name_or_path": first_adapter(_method),
    "quantization_bit": _bits,
    "stage": _stage,
    "finetuning_type": _finetuning_type,
    "use_dora": dora(_method),
    "use_rslora": rank_stabilized("lora_alpha", "lora_rank"),
    "lora_rank": adapter("tune.rank", _method),
    "lora_alpha": adapter("tune.alpha", _method),
    "lora_dropout": adapter("tune.dropout", _method),
    "lora_target": _targets,
    "dataset": _dataset("data.path"),
    "eval_dataset": _dataset("data.eval_path"),
    "cutoff_len": same("data.seq_len"),
    **each(_packing, "packing neat_packing"),
    "train_on_prompt": _loss_on,
    **each(_batch, "per_device_train_batch_size gradient_accumulation_steps"),
    "learning_rate": same("optim.lr"),
    "lr_scheduler_type": _schedule,
    **each(warmup, "warmup_ratio warmup_steps"),
    "weight_decay": same("optim.weight_decay"),
    "adam_beta1": same("optim.beta1"),
    "adam_beta2": same("optim.beta2"),
    "adam_epsilon": same("optim.eps"),
    "max_grad_norm": same("optim.clip_norm"),
    "optim": optimizer,
    "num_train_epochs": epochs,
    "max_steps": max_steps,
    **each(_bf16, "bf16 pure_bf16"),
    "disable_gradient_checkpointing": _recompute,
    "torch_compile": same("train.compile"),
    **each(deepspeed, "deepspeed deepspeed.*"),
    "save_steps": save_steps,
    "save_total_limit": same("checkpoint.keep"),
    "output_dir": same("run.dir"),
    "report_to": _report_to,
    "run_name": same("run.name"),
    "seed": same("train.seed"),
}
_PREPARED = "raw data are prepared once, into data.cache; ranks read ahead of their steps"
_DECIDED: dict[str, Rule] = {
    "do_train": Decided("the command trains"),
    **each(Decided("the tokenizer's chat template; data.chat_template names another"), "template"),
    **each(Decided("data.path names the file itself"), "dataset_dir"),
    **each(Decided("datasets of a folder are one"), "mix_strategy"),
    **each(
        Decided(_PREPARED),
        "overwrite_cache preprocessing_num_workers preprocessing_batch_size tokenized_path "
        "dataloader_num_workers dataloader_prefetch_factor dataloader_persistent_workers "
        "dataloader_pin_memory dataloader_drop_last streaming buffer_size group_by_length",
    ),
    **each(
        Decided("run.dir has checkpoints, each with the optimizer; a new run has a new one"),
        "overwrite_output_dir save_only_model save_strategy save_safetensors",
    ),
    **each(
        Decided("metrics.jsonl and tensorboard/ in run.dir have each step"),
        "logging_steps logging_strategy logging_dir logging_first_step plot_loss log_level "
        "disable_tqdm include_num_input_tokens_seen include_mfu",
    ),
    **each(Decided("run.timeout and run.host_timeout end a job that hangs"), "ddp_timeout"),
    **each(Decided("the micro-batch is the largest that fits"), "per_device_eval_batch_size"),
    **each(Decided("held-out loss comes every train.eval_every_steps"), "eval_strategy do_eval"),
    **each(Decided("train.seed is the seed of everything"), "data_seed"),
    **each(
        Decided("it is the Trainer's; disable_gradient_checkpointing is what counts there"),
        "gradient_checkpointing gradient_checkpointing_kwargs.* use_reentrant_gc",
    ),
    **each(Decided("one decoder block is compiled, for all"), "torch_compile_backend"),
    **each(
        Decided("attention and loss are PyTorch's own"),
        "flash_attn attn enable_liger_kernel use_unsloth use_v1_kernels",
    ),
    **each(
        Decided("ranks read their regions of the files of model.path"),
        "low_cpu_mem_usage use_fast_tokenizer cache_dir model_revision",
    ),
    **each(
        Decided("mpirun, srun or torchrun start the ranks"),
        "use_ray ray_run_name ray_storage_path ray_storage_filesystem ray_num_workers "
        "resources_per_worker resources_per_worker.* placement_strategy ray_init_kwargs.* "
        "ddp_find_unused_parameters local_rank",
    ),
    **each(Decided(LAYOUT), "fsdp fsdp_config fsdp_config.*"),
    "double_quantization": Decided(NF4),
    **each(Decided("optim.min_lr_ratio says it"), "lr_scheduler_kwargs.min_lr_rate"),
    "remove_unused_columns": Decided("the form of a record is found by its keys"),
}
_LEFT: dict[str, Rule] = {
    "quantization_method": only("bnb", NF4),
    "quantization_type": only("nf4", NF4),
    "fp16": lacking("model.dtype is bf16 or fp32; auto takes bf16 on a GPU that has it"),
    "trust_remote_code": lacking("no code of a model directory is run: its type must be known"),
    "max_samples": lacking("cut the file: head -n N", to_do=True),
    "val_size": val_size,
    "resume_from_checkpoint": lacking("their state cannot be read; tune.init_from takes adapters"),
    **each(
        lacking("checkpoint.keep_best=true keeps the best one; a run does not stop early"),
        "load_best_model_at_end metric_for_best_model greater_is_better early_stopping_steps",
    ),
    "eval_steps": Left("set train.eval_every_steps together with data.eval_path"),
    "disable_shuffling": lacking("rows are always shuffled, by train.seed"),
    "mask_history": lacking("every answer of a chat is learned", to_do=True),
    "interleave_probs": lacking("put a mixture into one file", to_do=True),
    "tool_format": lacking("the tokenizer's chat template writes tools"),
    "additional_target": lacking("only adapters are trained", to_do=True),
    "create_new_adapter": lacking("merge the first adapter into the model", to_do=True),
    **each(
        lacking("adapters are initialized as in LoRA"),
        "pissa_init pissa_iter pissa_convert loraplus_lr_ratio loraplus_lr_embedding",
    ),
    **each(
        lacking("AdamW is the only optimizer; find optim.lr again"),
        "use_galore use_apollo use_badam use_adam_mini use_muon optim_args",
    ),
    **each(
        lacking("cross entropy is the only loss"),
        "neftune_noise_alpha label_smoothing_factor use_dft_loss moe_aux_loss_coef",
    ),
    **each(
        lacking("the model is what config.json of model.path says", to_do=True),
        "rope_scaling shift_attn mixture_of_depths use_llama_pro resize_vocab add_tokens "
        "add_special_tokens new_special_tokens_config",
    ),
    **each(
        lacking("there is supervised fine-tuning only, not rewards and preferences"),
        "pref_beta pref_ftx pref_loss ref_model ref_model_adapters reward_model "
        "reward_model_adapters reward_model_type simpo_gamma dpo_label_smoothing ppo_epochs "
        "kto_chosen_weight kto_rejected_weight",
    ),
    **each(
        lacking("python -m hpc_tune generate answers prompts"),
        "do_predict predict_with_generate compute_accuracy max_new_tokens max_length top_k top_p "
        "temperature num_beams infer_backend infer_dtype",
    ),
    **each(
        lacking("set train.float8=true with train.compile=true, if the GPU has it"),
        "fp8 fp8_backend fp8_enable_fsdp_float8_all_gather",
    ),
    **each(lacking("KTransformers is not used"), "use_kt kt_optimize_rule cpu_infer chunk_size"),
    **each(
        lacking("no parts are frozen: adapters are trained, or all weights", to_do=True),
        "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules",
    ),
    **each(
        lacking("models of text are trained, not of images, sound or video"),
        "image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_fps "
        "video_maxlen media_dir freeze_vision_tower freeze_multi_modal_projector "
        "freeze_language_model",
    ),
    **each(
        lacking("nothing is uploaded; run.dir has export/"),
        "push_to_hub hub_model_id hub_strategy hub_token hf_hub_token use_swanlab swanlab_project",
    ),
    **each(lacking("dtypes follow model.dtype"), "upcast_layernorm upcast_lmhead_output tf32"),
}
LLAMA_FACTORY = Tool("LLaMA-Factory", {**_TAKEN, **_DECIDED, **_LEFT}, _defaults)
