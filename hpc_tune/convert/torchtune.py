"""The rules for configs of torchtune: full, LoRA and QLoRA recipes, on one or several devices."""

from typing import Any

from hpc_tune.convert import preferences, rules
from hpc_tune.convert.hf_trainer import (
    SCHEDULE_ADVICE,
    convert_adamw_8bit,
    convert_targets,
    map_decay_to_zero,
    only_value_rule,
)
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

# -- The rules for datasets in torchtune's configs: which file, which columns, what is learned.


_DATASET_SETTINGS = {"dataset": "data.path", "dataset_val": "data.eval_path"}
# Dataset components with configurable columns: their column keys, as fields of data.columns.
_PAIR_FIELDS = {"input": "prompt", "output": "completion"}
_PREFERENCE_FIELDS = {"chosen": "chosen", "rejected": "rejected"}
_RANKED_FIELDS = {"prompt": "prompt", **_PREFERENCE_FIELDS}
_RANKED_COLUMNS = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
_FIELDS_BY_COMPONENT = {
    "instruct_dataset": _PAIR_FIELDS,
    "preference_dataset": _PREFERENCE_FIELDS,
    "hh_rlhf_helpful_dataset": _PREFERENCE_FIELDS,
    "stack_exchange_paired_dataset": _RANKED_FIELDS,
}
_FORM_IMPLIED_KEY = IgnoredKey(rules.FORM_REASON)
_EVAL_FRACTION_KEY = IgnoredKey("data.eval_fraction says it")
_ALPACA_PREAMBLE_ADVICE = (
    "alpaca's preamble (Below is an instruction that ...) and headings are in each prompt there, "
    "but not here: to keep them, write them into the records (as prompt and completion)"
)


def _component_name(value: Any) -> str:
    """Return the last part of a dotted name, such as a component's name without its module."""
    return str(value).rpartition(".")[2]


def _usable_path(dataset_key: str, config: ForeignConfig) -> Any:
    """Return the file or folder that ``dataset`` or ``dataset_val`` reads, if hpc_tune can."""
    files, source = (
        config.get(f"{dataset_key}.data_files"),
        str(config.get(f"{dataset_key}.source", "")),
    )
    if dataset_key == "dataset_val" and config.get(f"{dataset_key}.split", "train") != "train":
        return None
    if files is not None:
        return files if rules.is_usable_file(files) else None
    return source if rules.is_data_path(source) else None


def _convert_eval_every(value: Any, config: ForeignConfig) -> Outcome:
    if _usable_path("dataset_val", config) or _holds_out_fraction(config):
        return MappedKey({"train.eval_every_steps": value})
    return UnsupportedKey(f"set train.eval_every_steps={value} together with data.eval_path")


def _holds_out_fraction(config: ForeignConfig) -> bool:
    """Return whether a share of the only data file is held out."""
    return isinstance(
        _convert_dataset_split("dataset", config.get("dataset.split", "train"), config), MappedKey
    )


def _held_out_is_rest_of_file(config: ForeignConfig) -> bool:
    """Return whether the held-out data, if any, are the rest of the training file."""
    held_out = {key: value for key, value in config.values.items() if key.startswith("dataset_val")}
    if not held_out:
        return True
    split = str(config.get("dataset.split", "train")).replace(" ", "")
    is_rest = rules.complement_split(config.get("dataset_val.split")) == split
    file_keys = ("source", "data_files")
    return is_rest and all(
        config.get(f"dataset_val.{key}", config.get(f"dataset.{key}"))
        == config.get(f"dataset.{key}")
        for key in file_keys
    )


def _split_rule(dataset_key: str) -> Rule:
    def rule(value: Any, config: ForeignConfig) -> Outcome:
        if (
            dataset_key == "dataset_val"
            and rules.complement_split(value)
            and _holds_out_fraction(config)
        ):
            return _EVAL_FRACTION_KEY
        return _convert_dataset_split(dataset_key, value, config)

    return rule


def _convert_dataset_split(dataset_key: str, value: Any, config: ForeignConfig) -> Outcome:
    is_whole = dataset_key == "dataset" and _held_out_is_rest_of_file(config)
    file = config.get(f"{dataset_key}.data_files", config.get(f"{dataset_key}.source"))
    data_path = file if isinstance(file, str) and rules.is_data_path(file) else None
    return rules.convert_split(value, _DATASET_SETTINGS[dataset_key], data_path, is_whole)


def _convert_dataset_component(value: Any, config: ForeignConfig) -> Outcome:
    name = _component_name(value)
    if not config.get("dataset.source") and not config.get("dataset.data_files"):
        advice = (
            f"compute nodes have no internet: on a login node write the records of {name} to a "
            "JSONL or Parquet file, and set data.path to it"
        )
        note = _ALPACA_PREAMBLE_ADVICE if "alpaca" in name else ""
        if "stack_exchange_paired" in name:
            note = "rename question, response_j and response_k there to prompt, chosen and rejected"
        return UnsupportedKey(f"{advice}; {note}" if note else advice, to_do=True)
    if "alpaca" in name:
        return UnsupportedKey(_ALPACA_PREAMBLE_ADVICE, to_do=True)
    if (fields := _FIELDS_BY_COMPONENT.get(name)) is None:
        return _FORM_IMPLIED_KEY
    defaults = _RANKED_COLUMNS if fields is _RANKED_FIELDS else {}
    columns = {
        str(config.get(f"dataset.column_map.{key}", defaults.get(key, key))): our_name
        for key, our_name in fields.items()
    }
    columns = {column: our_name for column, our_name in columns.items() if column != our_name}
    return MappedKey({"data.columns": columns}) if columns else _FORM_IMPLIED_KEY


def _source_rule(dataset_key: str) -> Rule:
    def rule(value: Any, config: ForeignConfig) -> Outcome:
        if config.get(f"{dataset_key}.data_files"):
            return rules.FORMAT_IMPLIED_KEY
        if dataset_key == "dataset_val" and _holds_out_fraction(config):
            return _EVAL_FRACTION_KEY
        path = _usable_path(dataset_key, config)
        return (
            MappedKey({_DATASET_SETTINGS[dataset_key]: path})
            if path
            else rules.explain_hub_data(value, _DATASET_SETTINGS[dataset_key])
        )

    return rule


def _files_rule(dataset_key: str) -> Rule:
    def rule(value: Any, config: ForeignConfig) -> Outcome:
        if dataset_key == "dataset_val" and _holds_out_fraction(config):
            return _EVAL_FRACTION_KEY
        if path := _usable_path(dataset_key, config):
            return MappedKey({_DATASET_SETTINGS[dataset_key]: path})
        return UnsupportedKey(
            "write it as JSONL or Parquet into one file or folder; set "
            f"{_DATASET_SETTINGS[dataset_key]}",
            to_do=True,
        )

    return rule


def _convert_loss_on(value: Any, config: ForeignConfig) -> Outcome:
    if config.has_preferences:
        return preferences.ANSWERS_ONLY_KEY
    choices = {"true": "all", "false": "answers"}
    choices |= {"train_on_all": "all", "train_on_assistant": "answers"}
    if choice := choices.get(str(value).lower()):
        return MappedKey({"data.loss_on": choice})
    return UnsupportedKey("data.loss_on is answers or all: answers is used", to_do=True)


def _column_rule(*names: str) -> Rule:
    def rule(value: Any, config: ForeignConfig) -> Outcome:
        if value in names:
            return _FORM_IMPLIED_KEY
        if not isinstance(value, str):
            return UnsupportedKey(rules.COLUMN_NAME_REASON, to_do=True)
        return MappedKey({"data.columns": {value: names[0]}})

    return rule


def _convert_column_map(value: Any, config: ForeignConfig) -> Outcome:
    if _component_name(config.get("dataset._component_")) in _FIELDS_BY_COMPONENT:
        return IgnoredKey("data.columns says it")
    return UnsupportedKey(
        "set data.columns={NAME: FIELD}, with the fields of docs/data.md", to_do=True
    )


# torchtune's builders of models with separate layers that are fused in Hugging Face's files.
_FUSED_BUILDERS = ("phi3", "phi4")
_FUSED_LAYERS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_ATTENTION_LAYERS = {
    "q_proj": "q_proj",
    "k_proj": "k_proj",
    "v_proj": "v_proj",
    "output_proj": "o_proj",
}
_MLP_LAYERS = ["gate_proj", "up_proj", "down_proj"]
_CROSS_ENTROPY_NAMES = ("CrossEntropy", "CEWith")
_OBJECTIVE_BY_LOSS = {"DPOLoss": "dpo", "SimPOLoss": "simpo"}
# torchtune's IPO uses sums over tokens, ours uses means.
_UNSUPPORTED_LOSSES = ("RSOLoss", "IPOLoss")
_LOSS_DEFAULTS = {"dpo": {"loss.beta": 0.1}, "simpo": {"loss.beta": 2.0, "loss.gamma": 0.5}}
_NO_LIMIT, _NO_SCHEDULER = "no limit", "no scheduler"


def _read_objective(config: ForeignConfig) -> str | None:
    name = _component_name(config.get("loss._component_"))
    return None if name in _UNSUPPORTED_LOSSES else _OBJECTIVE_BY_LOSS.get(name, SFT)


def _read_method(config: ForeignConfig) -> str:
    builder = _component_name(config.get("model._component_"))
    is_4_bit = builder.startswith("qlora") or config.is_on("model.quantize_base")
    is_dora = config.is_on("model.use_dora")
    is_lora = builder.startswith("lora") or config.get("model.lora_rank")
    return rules.choose_method(not (is_4_bit or is_dora or is_lora), is_4_bit, is_dora)


def _convert_method(value: Any, config: ForeignConfig) -> Outcome:
    remark = "the shape itself is read from config.json of model.path"
    return MappedKey({"tune.method": config.method}, remark)


def _convert_targets(value: Any, config: ForeignConfig) -> Outcome:
    if config.method == "full":
        return ADAPTER_ONLY_KEY
    modules = config.get("model.lora_attn_modules")
    modules = modules if isinstance(modules, list) else [modules]
    layers = list(_ATTENTION_LAYERS)
    if not all(name in layers for name in modules if name):
        reason = f"there the layers of attention are called {', '.join(layers)}; set tune.targets"
        return UnsupportedKey(reason, to_do=True)
    names = [our_name for name, our_name in _ATTENTION_LAYERS.items() if name in modules]
    names += _MLP_LAYERS if config.is_on("model.apply_lora_to_mlp") else []
    is_with_head = config.is_on("model.apply_lora_to_output")
    names += ["lm_head"] if is_with_head else []
    if outcome := _fuse_targets(names, str(config.get("model._component_"))):
        return outcome
    if len(names) == len(_ATTENTION_LAYERS) + len(_MLP_LAYERS) and not is_with_head:
        return MappedKey({"tune.targets": "all-linear"})
    return convert_targets(names, "checkpointer.checkpoint_dir", config)


def _fuse_targets(names: list[str], builder: str) -> Outcome | None:
    """Return the targets for a torchtune builder whose layers are fused in Hugging Face files.

    None: the builder makes no such model.
    """
    if not any(f".{family}." in builder for family in _FUSED_BUILDERS):
        return None
    targets = list(dict.fromkeys(_FUSED_LAYERS.get(name, name) for name in names))
    layers = {_FUSED_LAYERS[name] for name in names if name in _FUSED_LAYERS}
    added_parts = [p for p, layer in _FUSED_LAYERS.items() if layer in layers and p not in names]
    if not layers:
        return MappedKey({"tune.targets": targets})
    remark = f"{' and '.join(sorted(layers))} of the Hugging Face model: one adapter here replaces "
    remark += "several there"
    remark += f", and also adapts {' and '.join(added_parts)}" if added_parts else ""
    return MappedKey({"tune.targets": targets}, remark, to_do=True)


def _convert_seq_len(value: Any, config: ForeignConfig) -> Outcome:
    keys = ("tokenizer.max_seq_len", "dataset.max_seq_len")
    limits = [config.integer(key) for key in keys if config.get(key, _NO_LIMIT) != _NO_LIMIT]
    if limits:
        return preferences.convert_seq_len(min(limits), config)
    return UnsupportedKey(
        "set data.seq_len to the tokens of your longest document (theirs are never cut); otherwise "
        "it is 1024, and longer documents are cut and counted",
        to_do=True,
    )


def _convert_model_path(value: Any, config: ForeignConfig) -> Outcome:
    if "Meta" in _component_name(config.get("checkpointer._component_")):
        return UnsupportedKey(
            "it has weights in Meta's format: fetch the same model in Hugging Face's on a login "
            "node (hf download NAME --local-dir DIR), and set model.path to DIR",
            to_do=True,
        )
    return MappedKey({"model.path": str(value).rstrip("/") or "/"}, "a Hugging Face directory")


def _convert_batch(value: Any, config: ForeignConfig) -> Outcome:
    shared_by = "tensor_parallel_dim", "context_parallel_dim"
    return rules.map_global_batch(config, "batch_size", "gradient_accumulation_steps", *shared_by)


def _steps_of_all_epochs(config: ForeignConfig) -> int | None:
    """Return the steps of all epochs together; None if max_steps_per_epoch is not set."""
    if config.get("max_steps_per_epoch") is None:
        return None
    return config.integer("epochs") * config.integer("max_steps_per_epoch")


def _convert_run_length(value: Any, config: ForeignConfig) -> Outcome:
    steps = _steps_of_all_epochs(config)
    if steps is None:
        return MappedKey({"train.epochs": value})
    return MappedKey(
        {"train.max_steps": steps}, "if epochs have that many steps; else leave it out"
    )


def _convert_optimizer(value: Any, config: ForeignConfig) -> Outcome:
    if str(value) == "torch.optim.AdamW":
        return IgnoredKey("AdamW is the only optimizer")
    if "AdamW8bit" in str(value):
        return convert_adamw_8bit(config, "", "Paged" in str(value))
    if "AdamW" in str(value):
        return UnsupportedKey(
            "AdamW's state is in fp32, or in 8 bits with optim.name=adamw_8bit; plan says whether "
            "it fits"
        )
    return UnsupportedKey(rules.OPTIMIZER_ADVICE, to_do=True)


def _convert_betas(value: Any, config: ForeignConfig) -> Outcome:
    if isinstance(value, list) and len(value) == 2:
        return MappedKey({"optim.beta1": value[0], "optim.beta2": value[1]})
    return UnsupportedKey("set optim.beta1 and optim.beta2", to_do=True)


def _convert_schedule(value: Any, config: ForeignConfig) -> Outcome:
    if value == _NO_SCHEDULER:
        return MappedKey({"optim.schedule": "constant", "optim.warmup_steps": 0})
    if _component_name(value) == "get_cosine_schedule_with_warmup":
        key = "lr_scheduler.num_warmup_steps"
        return map_decay_to_zero(
            "cosine", _steps_of_all_epochs(config), config.integer(key) if config.get(key) else 0
        )
    return UnsupportedKey(SCHEDULE_ADVICE, to_do=True)


def _convert_loss(value: Any, config: ForeignConfig) -> Outcome:
    if config.has_preferences:
        return preferences.map_objective(config)
    if any(word in str(value) for word in _CROSS_ENTROPY_NAMES):
        return IgnoredKey("cross entropy, whose logits are never held whole")
    return UnsupportedKey(
        "cross entropy of the next token is the only loss, beside DPOLoss and SimPOLoss", to_do=True
    )


def _convert_clip(value: Any, config: ForeignConfig) -> Outcome:
    return MappedKey({"optim.clip_norm": 0.0 if str(value).strip(".") == "inf" else value})


def _convert_dtype(value: Any, config: ForeignConfig) -> Outcome:
    if value not in ("bf16", "fp32"):
        return UnsupportedKey(rules.DTYPE_ADVICE)
    if config.method == "full" and value == "bf16":
        return MappedKey({"model.dtype": value, "tune.param_dtype": value}, rules.PURE_BF16_REMARK)
    return MappedKey({"model.dtype": value})


def _convert_device(value: Any, config: ForeignConfig) -> Outcome:
    kind = str(value).partition(":")[0]
    if kind in ("cuda", "cpu"):
        return MappedKey({"run.device": kind})
    return UnsupportedKey("run.device is cuda or cpu")


def _convert_recompute(value: Any, config: ForeignConfig) -> Outcome:
    kind = "full" if config.is_on("enable_activation_checkpointing") else config.get("ac_mode")
    return MappedKey({"parallel.recompute": kind or "none"})


def _convert_logger(value: Any, config: ForeignConfig) -> Outcome:
    if "TensorBoard" in str(value):
        return MappedKey({"run.tensorboard": True})
    if "WandB" in str(value):
        return MappedKey({"run.trackers": ["wandb"]}, "offline, for wandb sync")
    if _component_name(value) in ("DiskLogger", "StdoutLogger"):
        return IgnoredKey("metrics.jsonl in run.dir has a line for each step")
    return UnsupportedKey(
        "metrics.jsonl and tensorboard/ in run.dir have each step; nothing is uploaded"
    )


def _convert_reference_path(value: Any, config: ForeignConfig) -> Outcome:
    if not rules.make_tune_config(config).has_reference:
        return IgnoredKey("no reference is used")
    start_path = str(config.get("checkpointer.checkpoint_dir")).rstrip("/")
    if str(value).rstrip("/") == start_path:
        return preferences.SAME_REFERENCE_KEY
    return UnsupportedKey(preferences.OTHER_REFERENCE_ADVICE + "start from that one", to_do=True)


def _default_settings(config: ForeignConfig) -> dict[str, Any]:
    defaults: dict[str, Any] = _LOSS_DEFAULTS.get(str(config.objective), {}) | {
        "gradient_accumulation_steps": 1,
        "clip_grad_norm": 0.0,
        "lr_scheduler._component_": _NO_SCHEDULER,
    }
    if not config.get("dataset.max_seq_len"):
        defaults["tokenizer.max_seq_len"] = _NO_LIMIT
    if "AdamW" in str(config.get("optimizer._component_")):
        defaults["optimizer.weight_decay"] = 0.01
    if config.method != "full":
        defaults |= {"model.lora_rank": 8, "model.lora_alpha": 16}
    if isinstance(datasets := config.get("dataset"), list):
        is_packed = [isinstance(d, dict) and d.get("packed") is True for d in datasets]
        return {**defaults, "dataset.packed": any(is_packed)}
    defaults["dataset.packed"] = False
    if "alpaca" in str(config.get("dataset._component_")) and not config.get(
        "dataset.masking_strategy"
    ):
        defaults["dataset.train_on_input"] = True
    return defaults


_MAPPED_RULES: dict[str, Rule] = {
    **rule_for_keys(_convert_method, "model._component_ model.quantize_base"),
    "model.use_dora": rules.DORA_RULE,
    "model.lora_rank": "tune.rank",
    "model.lora_alpha": "tune.alpha",
    "model.lora_dropout": preferences.override_for_preferences(
        preferences.UNSUPPORTED_DROPOUT_KEY, "tune.dropout"
    ),
    **rule_for_keys(
        _convert_targets,
        "model.lora_attn_modules model.apply_lora_to_mlp model.apply_lora_to_output",
    ),
    **rule_for_keys(_convert_seq_len, "tokenizer.max_seq_len dataset.max_seq_len"),
    "checkpointer.checkpoint_dir": _convert_model_path,
    "dataset": UnsupportedKey("set data.path to a list of the files of all of them", to_do=True),
    "dataset._component_": _convert_dataset_component,
    "dataset.source": _source_rule("dataset"),
    "dataset.data_files": _files_rule("dataset"),
    "dataset_val.source": _source_rule("dataset_val"),
    "dataset_val.data_files": _files_rule("dataset_val"),
    "dataset.split": _split_rule("dataset"),
    "dataset_val.split": _split_rule("dataset_val"),
    "dataset.packed": rules.PACKING_RULE,
    **rule_for_keys(_convert_loss_on, "dataset.train_on_input dataset.masking_strategy"),
    "dataset.conversation_column": _column_rule("messages", "conversations"),
    "dataset.column": _column_rule("text"),
    "dataset.column_map.*": _convert_column_map,
    "run_val_every_n_steps": _convert_eval_every,
    **rule_for_keys(_convert_batch, "batch_size gradient_accumulation_steps"),
    "context_parallel_dim": rules.convert_context_parallel,
    **rule_for_keys(_convert_run_length, "epochs max_steps_per_epoch"),
    "optimizer._component_": _convert_optimizer,
    "optimizer.lr": "optim.lr",
    "optimizer.weight_decay": "optim.weight_decay",
    "optimizer.betas": _convert_betas,
    "optimizer.eps": "optim.eps",
    "lr_scheduler._component_": _convert_schedule,
    "lr_scheduler.num_warmup_steps": "optim.warmup_steps",
    "lr_scheduler.num_cycles": only_value_rule("0.5", "the schedule is half a cosine"),
    "loss._component_": _convert_loss,
    "loss.beta": "tune.beta",
    "loss.gamma": "tune.gamma",
    **preferences.restrict_to_preferences({"loss.label_smoothing": preferences.SMOOTHING_RULE}),
    **rule_for_keys(_convert_reference_path, "ref_checkpointer.checkpoint_dir base_model_path"),
    "clip_grad_norm": _convert_clip,
    **rule_for_keys(rules.torch_compile_rule("context_parallel_dim"), "compile compile.model"),
    "dtype": _convert_dtype,
    "device": _convert_device,
    "seed": "train.seed",
    "shuffle": rules.on_off_rule(
        IgnoredKey("the order follows from seed, epoch and position, on any number of ranks"),
        UnsupportedKey(rules.SHUFFLE_REASON, to_do=True),
    ),
    **rule_for_keys(_convert_recompute, "enable_activation_checkpointing ac_mode"),
    **rule_for_keys(rules.OFFLOAD_PARAMS_RULE, "fsdp_cpu_offload fsdp.cpu_offload"),
    "metric_logger._component_": _convert_logger,
    "output_dir": "run.dir",
    "save_every_n_steps": "checkpoint.every_steps",
    "resume_from_checkpoint": rules.on_off_rule(
        UnsupportedKey(rules.UNREADABLE_STATE_ADVICE, to_do=True),
        IgnoredKey("checkpoint.resume=auto: rerun the same command"),
    ),
    "quantizer.*": UnsupportedKey("there is no quantization-aware training", to_do=True),
}
_IGNORED_KEYS = {
    rules.FORM_REASON: "dataset.conversation_style",
    "validation data are read like data.path": "dataset_val.*",
    "documents longer than a row are cut": "dataset.split_across_pack",
    "the reference is computed once, before the first step, and kept": "ref_checkpointer.* "
    "reference_model.* reference_checkpointer.*",
    "the tokenizer is read from model.path": "tokenizer.*",
    "everything that a run writes is in run.dir": "checkpointer.output_dir",
    rules.MICRO_BATCH_REASON: "batch_size_val collate_fn",
    rules.LAYOUT_REASON: "tensor_parallel_dim tensor_parallel_plan tensor_parallel_plan.* "
    "data_parallel_shard_dim data_parallel_replicate_dim "
    "custom_sharded_layers memory_efficient_fsdp_wrap fsdp_reshard_after_forward "
    "fsdp_sharding_strategy fsdp.*",
    "AdamW is fused": "optimizer.fused optimizer.foreach",
    "cross entropy, whose logits are never held whole": "loss.num_output_chunks",
    rules.COMPILE_REASON: "compile.*",
    "parallel.recompute says it": "ac_option",
    rules.PARTIAL_READ_REASON: "low_cpu_ram checkpointer.*",
    rules.METRICS_REASON: "metric_logger.* log_every_n_steps log_peak_memory_stats log_level",
    "checkpoints go by time and steps, while training continues": "save_last_epoch_only "
    "epochs_to_save enable_async_checkpointing keep_last_n_checkpoints",
    "the adapter alone is saved; python -m hpc_tune export --to merged merges it": (
        "save_adapter_weights_only"
    ),
    "train.profile=10:2 traces two steps": "profiler.*",
}
_UNSUPPORTED_KEYS = {
    "a text always ends with the end token": "dataset.add_eos",
    "their training state cannot be read": "checkpointer.recipe_checkpoint",
    "tune.init_from takes an adapter saved by peft": "checkpointer.adapter_checkpoint",
    "gradients are kept until the step; parallel.shard splits them": "optimizer_in_bwd",
    rules.RECOMPUTE_ADVICE: "enable_activation_offloading activation_offloading_use_streams",
    "set train.deterministic=true": "cudnn_deterministic_mode",
    "set train.profile=10:2": "profiler.enabled",
}
_TODO_KEYS = {
    rules.SYSTEM_MESSAGE_ADVICE: "dataset.new_system_prompt",
    "the chat template is applied; data.chat_template names another": "dataset.template "
    "dataset.prompt_template dataset.chat_format",
    "name the files of that configuration in data.path": "dataset.name dataset.subset",
    "remove those records from the data beforehand": "dataset.filter_fn",
    "write it as a Jinja file; set data.chat_template": "tokenizer.prompt_template",
    rules.FLOAT8_ADVICE: "enable_fp8_training fp8_recipe_name",
    rules.VOCAB_ADVICE: "resize_token_embeddings",
}
_IS_MEDIA_BUILDER = preferences.matches_pattern(r"vision|multimodal|\.clip\.|\.flux\.")
_IS_REWARD_TRAINING = preferences.exclude_preferences(
    preferences.matches_pattern("rlhf|KTO|ORPO|PPO|GRPO")
)
_IS_PREFERENCE_DATA = preferences.exclude_preferences(
    preferences.matches_pattern("preference|hh_rlhf|stack_exchange_paired|rlhf")
)
_TEACHER_KEYS = "teacher_model._component_ kd_loss._component_ kd_ratio"
_IS_MEDIA_DATA = preferences.matches_pattern("multimodal|the_cauldron|vqa|llava_instruct")
TORCHTUNE = Tool(
    "torchtune",
    rules.rule_table(_MAPPED_RULES, _IGNORED_KEYS, _UNSUPPORTED_KEYS, _TODO_KEYS),
    _default_settings,
    _read_method,
    _read_objective,
    (
        Refusal(_TEACHER_KEYS, preferences.accept_any, *preferences.DISTILLATION),
        preferences.preference_loss_refusal("loss._component_"),
        Refusal("policy_model._component_", preferences.accept_any, *preferences.REWARD_TRAINING),
        Refusal("loss._component_", _IS_REWARD_TRAINING, *preferences.REWARD_TRAINING),
        Refusal("dataset._component_", _IS_PREFERENCE_DATA, *preferences.UNNAMED_LOSS),
        Refusal(
            "loss._component_", preferences.matches_pattern("KL|KD"), *preferences.DISTILLATION
        ),
        Refusal("dataset._component_", _IS_MEDIA_DATA, *preferences.MEDIA_TRAINING),
        Refusal("model._component_", _IS_MEDIA_BUILDER, *preferences.MEDIA_TRAINING),
        Refusal(
            "model._component_",
            preferences.matches_pattern("classifier"),
            *preferences.REWARD_TRAINING,
        ),
        Refusal("tokenizer._component_", _IS_MEDIA_BUILDER, *preferences.MEDIA_TRAINING),
    ),
)
