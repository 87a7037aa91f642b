"""The rules for configs of LLaMA-Factory, whose further keys are the Hugging Face Trainer's."""

from typing import Any

from hpc_tune.convert.another_training import find_llama_factory_task
from hpc_tune.convert.layers import convert_targets
from hpc_tune.convert.llama_factory_others import IGNORED_KEYS, UNSUPPORTED_KEYS
from hpc_tune.convert.llama_factory_preferences import (
    LLAMA_FACTORY_PREFERENCES,
    find_llama_factory_objective,
    llama_factory_preference_defaults,
)
from hpc_tune.convert.outcomes import (
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
    dora_rule,
    each,
    explain_chat_template,
    global_batch,
    model_path,
    packing,
    rslora_rule,
    same,
)
from hpc_tune.convert.parts import first_records
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
    save_steps,
    save_strategy,
    val_size,
    warmup_ratio,
    warmup_steps,
)


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
