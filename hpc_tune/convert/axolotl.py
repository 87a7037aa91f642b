"""The rules for configs of axolotl, which trains with the Trainer of Hugging Face."""

from typing import Any

from hpc_tune.convert.another_training import find_axolotl_task
from hpc_tune.convert.axolotl_data import CHAT_TEMPLATE, LISTS, data_rules, list_usable_files
from hpc_tune.convert.axolotl_others import IGNORED_KEYS, UNSUPPORTED_KEYS
from hpc_tune.convert.axolotl_preferences import (
    AXOLOTL_PREFERENCES,
    find_axolotl_objective,
    axolotl_preference_defaults,
)
from hpc_tune.convert.layers import add_experts, are_expert_stacks, convert_targets
from hpc_tune.convert.outcomes import (
    NO_ADAPTERS,
    ForeignConfig,
    Ignored,
    Mapped,
    Outcome,
    Rule,
    Tool,
    Unsupported,
    adapter_rule,
    dora_rule,
    each,
    global_batch,
    model_path,
    offload_params,
    packing,
    rslora_rule,
    same,
)
from hpc_tune.convert.preferences import (
    SFT,
    answers_rule,
    dropout_rule,
    map_seq_len,
    noise_rule,
    reference_adapter_rule,
)
from hpc_tune.convert.trainer import (
    convert_schedule,
    deepspeed,
    early_stop,
    epochs,
    eval_steps,
    first_adapter,
    max_steps,
    modules_to_save,
    neftune,
    optimizer,
    patterns,
    save_steps,
    save_strategy,
    trainable_tokens,
    val_size,
    warmup_ratio,
    warmup_steps,
)

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


def _seq_len(value: Any, theirs: ForeignConfig) -> Outcome:
    remark = "longer rows are cut and counted; there they are dropped"
    return map_seq_len(theirs.whole("sequence_len"), find_axolotl_objective(theirs), remark)


def _packing(value: Any, theirs: ForeignConfig) -> Outcome:
    return packing(theirs.is_on("sample_packing"), theirs)


def _too_long(value: Any, theirs: ForeignConfig) -> Outcome:
    if find_axolotl_objective(theirs) != SFT:
        return Ignored("what does not fit loses the left of its prompt, and no answer is cut")
    if value == "truncate":
        return Ignored("what is longer than data.seq_len loses its end, and is counted")
    return Unsupported(
        "what is longer than data.seq_len loses its end, and is counted; none is dropped: drop it "
        "beforehand",
        to_do=True,
    )


def _loss_on(value: Any, theirs: ForeignConfig) -> Outcome:
    return Mapped({"data.loss_on": "all" if str(value).lower() == "true" else "answers"})


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
    "sequence_len": _seq_len,
    "excess_length_strategy": _too_long,
    "sample_packing": _packing,
    "train_on_inputs": answers_rule(_loss_on, find_axolotl_objective),
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
    {**_MAPPED, **AXOLOTL_PREFERENCES, **IGNORED_KEYS, **UNSUPPORTED_KEYS},
    _defaults,
    find_axolotl_task,
    LISTS,
)
