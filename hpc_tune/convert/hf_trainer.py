"""Rules shared by the tools that are built on the Hugging Face Trainer and peft."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpc_tune.convert import preferences, rules
from hpc_tune.convert.rules import (
    ADAPTER_ONLY_KEY,
    OFF_KEY,
    ForeignConfig,
    IgnoredKey,
    MappedKey,
    Outcome,
    Rule,
    UnsupportedKey,
    rule_for_keys,
)
from hpc_tune.files import read_json_object

_SCHEDULES = {"linear": "linear", "cosine": "cosine", "cosine_with_min_lr": "cosine"}
_SCHEDULES |= dict.fromkeys(("constant", "constant_with_warmup"), "constant")
SCHEDULE_ADVICE = "optim.schedule is constant, linear, cosine, cosine_with_restarts or wsd"
_SCHEDULES_WITH_ARGUMENTS = ("warmup_stable_decay", "cosine_with_restarts")
_SCHEDULE_KWARGS = "lr_scheduler_kwargs"
_FINAL_RATE_REMARK = "the final rate is reached in the last step here, and one step later there"
# For load balance between experts.
ROUTER_LOSS_ADVICE = (
    "tune.router_aux_loss is per layer and row, theirs over all layers and a micro-batch at once; "
    "set it to train for balance"
)
HELD_OUT_LOSS_REASON = (
    "held-out loss is measured at the start, at the end and every train.eval_every_steps steps"
)
PREPARATION_REASON = "raw data are prepared once, into data.cache; ranks read ahead of their steps"
TRACKER_HINT = (
    "run.trackers takes tensorboard, wandb, mlflow and trackio; metrics.jsonl always has each step"
)
OWN_KERNEL_REASON = "attention and loss are PyTorch's own; logits are never held whole"
ROPE_ADVICE = "set model.rope_scaling, whose keys are those of transformers' config.json"
SHAPE_ADVICE = "the model is what config.json of model.path says: change it there"
LAYER_PATTERN_KEY = UnsupportedKey(
    "tune.targets takes names of layers such as q_proj, not patterns", to_do=True
)
NF4_REASON = "NF4 with double quantization, by bitsandbytes"
_ZERO_STAGE_PATTERN = re.compile(r"(?:z|zero|stage)[_-]?([1-3])(?!\d)")
_BNB_REMARK = "also for embeddings, whose state theirs keeps in fp32"
_OFFLOAD_KEYS = (
    "fsdp_config.offload_params",
    "fsdp_config.fsdp_offload_params",
    "fsdp_cpu_offload",
    "fsdp.cpu_offload",
)
_PLAIN_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")


def only_value_rule(value: str, reason: str) -> Rule:
    """Rule for a key of which hpc_tune only supports ``value``."""

    def rule(their_value: Any, config: ForeignConfig) -> Outcome:
        return (
            IgnoredKey(reason)
            if str(their_value).lower() == value
            else UnsupportedKey(reason, to_do=True)
        )

    return rule


def _convert_init_adapter(value: Any, config: ForeignConfig) -> Outcome:
    if config.method == "full":
        return UnsupportedKey(
            "merge it into the model first, and name that in model.path", to_do=True
        )
    if isinstance(value, str) and "," not in value and rules.is_local_path(value):
        remark = "its rank, alpha and targets must be the config's"
        return MappedKey({"tune.init_from": value}, remark)
    return UnsupportedKey("tune.init_from takes the folder of one adapter", to_do=True)


def init_adapter_rule(reference_key: str = "") -> Rule:
    """Rule for the adapter to start from; ``reference_key``: the key of the reference's adapter."""
    return preferences.reference_adapter_rule(_convert_init_adapter, reference_key)


def convert_val_size(value: Any, config: ForeignConfig) -> Outcome:
    """Rule for the share of the data that is held out."""
    if value == 0:
        return IgnoredKey("no data is held out")
    if isinstance(value, int | float) and 0 < value < 1:
        return MappedKey(
            {"data.eval_fraction": value}, "a hash of each document chooses, not chance"
        )
    return UnsupportedKey("data.eval_fraction is a share of the documents: set it", to_do=True)


def eval_steps_rule(
    val_size_key: str, has_files: Callable[[ForeignConfig], bool] = lambda config: False
) -> Rule:
    """Rule for the steps between evaluations, if ``val_size_key`` or files give held-out data."""

    def rule(value: Any, config: ForeignConfig) -> Outcome:
        if isinstance(value, float) and value < 1:
            return UnsupportedKey("train.eval_every_steps is a number of steps: set it", to_do=True)
        if has_files(config) or 0 < config.number(val_size_key) < 1:
            return MappedKey({"train.eval_every_steps": value})
        return UnsupportedKey(f"set train.eval_every_steps={value} together with data.eval_path")

    return rule


def early_stop_rule(val_size_key: str) -> Rule:
    """Rule for early stopping: the evaluations without improvement after which a run ends."""

    def rule(value: Any, config: ForeignConfig) -> Outcome:
        if 0 < config.number(val_size_key) < 1 and config.number("eval_steps") >= 1:
            settings = {"train.stop_after_evals": value, "checkpoint.keep_best": True}
            return MappedKey(settings, "the held-out loss counts, including the one at the start")
        return UnsupportedKey(
            f"set train.stop_after_evals={value} with data.eval_path and train.eval_every_steps",
            to_do=True,
        )

    return rules.ignore_if_off(rule)


def has_max_steps(config: ForeignConfig) -> bool:
    """Return whether max_steps decides the length of the run, not the epochs."""
    return config.number("max_steps") > 0


def _convert_max_steps(value: Any, config: ForeignConfig) -> Outcome:
    if has_max_steps(config):
        return MappedKey({"train.max_steps": value})
    return IgnoredKey("unset in their config: train.epochs decides")


def convert_epochs(value: Any, config: ForeignConfig) -> Outcome:
    """Rule for epochs; max_steps takes precedence."""
    if has_max_steps(config):
        return IgnoredKey("train.max_steps decides, as max_steps does there")
    return MappedKey({"train.epochs": value})


def _convert_warmup(value: Any, config: ForeignConfig) -> Outcome:
    try:
        share = float(str(value))
    except ValueError:
        share = -1.0
    if not 0 <= share < 1e9:
        return UnsupportedKey("set optim.warmup_steps or optim.warmup_ratio", to_do=True)
    if share >= 1 or not share:
        return MappedKey({"optim.warmup_steps": int(share)})
    if has_max_steps(config):
        return MappedKey({"optim.warmup_steps": math.ceil(share * config.integer("max_steps"))})
    return MappedKey({"optim.warmup_ratio": share})


def _convert_warmup_steps(value: Any, config: ForeignConfig) -> Outcome:
    """Return the outcome for warmup_steps; if it is 0, warmup_ratio decides."""
    if config.number("warmup_steps") == 0 and config.number("warmup_ratio") > 0:
        return IgnoredKey("it is 0: warmup_ratio decides, as it does there")
    return _convert_warmup(value, config)


def _convert_warmup_ratio(value: Any, config: ForeignConfig) -> Outcome:
    """Return the outcome for warmup_ratio; a positive warmup_steps takes precedence."""
    if config.number("warmup_steps") > 0:
        return IgnoredKey("warmup_steps decides, as it does there")
    return _convert_warmup(value, config)


def convert_schedule(name: Any, min_ratio: Any, config: ForeignConfig) -> Outcome:
    """Return the outcome for a schedule; ``min_ratio``: final rate / peak, None if it ends at 0."""
    schedule = _SCHEDULES.get(str(name))
    match str(name):
        case "warmup_stable_decay":
            return _convert_wsd(config)
        case "cosine_with_restarts":
            if config.number(f"{_SCHEDULE_KWARGS}.num_cycles") > 1:
                cycles = config.integer(f"{_SCHEDULE_KWARGS}.num_cycles")
                options = {"optim.restarts": cycles - 1, "optim.min_lr_ratio": 0.0}
                return MappedKey({"optim.schedule": str(name), **options}, _FINAL_RATE_REMARK)
            schedule = "cosine"
    if schedule is None:
        return UnsupportedKey(SCHEDULE_ADVICE, to_do=True)
    if schedule == "constant":
        return MappedKey({"optim.schedule": schedule})
    if min_ratio and schedule == "cosine":
        return MappedKey({"optim.schedule": schedule, "optim.min_lr_ratio": min_ratio})
    return map_decay_to_zero(
        schedule,
        config.integer("max_steps") if has_max_steps(config) else None,
        _known_warmup_steps(config),
    )


def _convert_wsd(config: ForeignConfig) -> Outcome:
    """Return the outcome for warmup_stable_decay, which decays by half a cosine by default."""
    settings: dict[str, Any] = {"optim.schedule": "wsd"}
    settings["optim.min_lr_ratio"] = config.get(f"{_SCHEDULE_KWARGS}.min_lr_ratio", 0.0)
    missing = []
    if has_max_steps(config) and config.get(f"{_SCHEDULE_KWARGS}.num_decay_steps"):
        share = config.integer(f"{_SCHEDULE_KWARGS}.num_decay_steps") / config.integer("max_steps")
        settings["optim.decay_ratio"] = float(f"{share:.4g}")
    else:
        missing.append("set optim.decay_ratio, the share of all steps with a falling rate")
    kinds = (
        config.get(f"{_SCHEDULE_KWARGS}.warmup_type", "linear"),
        config.get(f"{_SCHEDULE_KWARGS}.decay_type"),
    )
    if kinds != ("linear", "linear"):  # transformers decays by a cosine by default
        missing.append("the rate rises and falls linearly here, but not there")
    return MappedKey(settings, "; ".join(missing) or _FINAL_RATE_REMARK, to_do=bool(missing))


def _convert_schedule_argument(value: Any, config: ForeignConfig) -> Outcome:
    name = str(config.get("lr_scheduler_type", config.get("lr_scheduler")))
    if name in _SCHEDULES_WITH_ARGUMENTS:
        return IgnoredKey("optim.schedule, optim.restarts and optim.decay_ratio say it")
    return UnsupportedKey(SCHEDULE_ADVICE, to_do=True)


def map_decay_to_zero(schedule: str, steps: int | None, warmup_steps: int) -> MappedKey:
    """Return our ``schedule`` for one of theirs that reaches 0 one step after the last.

    ``optim.min_lr_ratio`` gives the last step their rate; it is 0 if ``steps`` is not known.
    """
    if steps is None or steps <= warmup_steps + 1:
        return MappedKey(
            {"optim.schedule": schedule, "optim.min_lr_ratio": 0.0}, _FINAL_RATE_REMARK
        )
    fraction_left = 1 / (steps - warmup_steps)
    ratio = fraction_left if schedule == "linear" else 0.5 * (1 - math.cos(math.pi * fraction_left))
    remark = "their rate in the last step"
    return MappedKey(
        {"optim.schedule": schedule, "optim.min_lr_ratio": float(f"{ratio:.4g}")}, remark
    )


def _known_warmup_steps(config: ForeignConfig) -> int:
    warmup = _convert_warmup(config.get("warmup_steps") or config.get("warmup_ratio", 0), config)
    return int(warmup.settings.get("optim.warmup_steps", 0)) if isinstance(warmup, MappedKey) else 0


def convert_optimizer(value: Any, config: ForeignConfig) -> Outcome:
    """Rule for the optimizer; only AdamW is supported."""
    name = str(value)
    if name in _PLAIN_ADAMW:
        return IgnoredKey("AdamW is the only optimizer")
    if "adamw" in name and "8bit" in name:
        return convert_adamw_8bit(config, "" if "torch" in name else _BNB_REMARK, "paged" in name)
    if "adamw" in name and re.search("bit|fp8|paged", name):
        return UnsupportedKey(
            "AdamW's state is in fp32, or in 8 bits with optim.name=adamw_8bit, and not paged; "
            "plan says whether it fits"
        )
    return UnsupportedKey(rules.OPTIMIZER_ADVICE, to_do=True)


def convert_adamw_8bit(config: ForeignConfig, remark: str, is_paged: bool) -> Outcome:
    """Return AdamW with moments in 8 bits, unless the config offloads parameters.

    ``remark``: what is different here; ``is_paged``: whether theirs is.
    """
    if any(config.is_on(key) for key in _OFFLOAD_KEYS):
        return UnsupportedKey("with parallel.offload_params=cpu its state is in fp32 on the host")
    remarks = [remark] if remark else []
    remarks += ["not paged: it stays on the device"] if is_paged else []
    return MappedKey({"optim.name": "adamw_8bit"}, "; ".join(remarks))


def _convert_deepspeed(value: Any, config: ForeignConfig) -> Outcome:
    name = str(value).lower()
    stage = _ZERO_STAGE_PATTERN.search(name)
    advice = f"; parallel.zero_stage={stage[1]} asks for DeepSpeed" if stage else ""
    advice += ", parallel.offload_optimizer=cpu for its offload" if "offload" in name else ""
    return IgnoredKey(rules.LAYOUT_REASON + advice)


def _convert_save_strategy(value: Any, config: ForeignConfig) -> Outcome:
    match value:
        case "best":
            return MappedKey({"checkpoint.keep_best": True})
        case "no":
            return UnsupportedKey(
                "a run always saves: checkpoint.every_minutes is 30, and it saves at the end"
            )
    return IgnoredKey("checkpoints go by time and by checkpoint.every_steps, not by epochs")


def _convert_save_steps(value: Any, config: ForeignConfig) -> Outcome:
    """Return the outcome for save_steps; a value below 1 is a share of the run."""
    if isinstance(value, float) and value < 1:
        return UnsupportedKey(
            "checkpoint.every_steps is a number of steps; checkpoint.every_minutes is 30"
        )
    return MappedKey({"checkpoint.every_steps": value})


def convert_modules_to_save(value: Any, config: ForeignConfig) -> Outcome:
    """Rule for modules trained in full beside adapters: a list, or names separated by commas."""
    if not value:
        return OFF_KEY
    if config.method == "full":
        return ADAPTER_ONLY_KEY
    if not is_name_or_names(value):
        return UnsupportedKey(
            "tune.modules_to_save takes names of modules, such as [lm_head]", to_do=True
        )
    return MappedKey({"tune.modules_to_save": split_names(value)})


def is_name_or_names(value: Any) -> bool:
    """Return whether a value is a text or a list of texts."""
    return all(isinstance(name, str) for name in (value if isinstance(value, list) else [value]))


def split_names(value: Any) -> list[str]:
    """Return the names in a list, or in a text with commas."""
    names = value if isinstance(value, list) else str(value).split(",")
    return [str(name).strip() for name in names]


def peft_pattern_rules(their_key: str, our_key: str) -> dict[str, Rule]:
    """Return the rules for peft's rank_pattern or alpha_pattern, under the key ``their_key``."""

    def rule(value: Any, config: ForeignConfig) -> Outcome:
        if config.method == "full":
            return ADAPTER_ONLY_KEY
        start = f"{their_key}."
        patterns = {k: value for k, value in config.values.items() if k.startswith(start)}
        return MappedKey({our_key: {k.removeprefix(start): value for k, value in patterns.items()}})

    return {their_key: OFF_KEY, f"{their_key}.*": rule}


_NEFTUNE_REMARK = "scaled by the tokens of a document; there by the tokens and padding of a row"
NEFTUNE_RULE = preferences.override_for_preferences(
    preferences.UNSUPPORTED_NOISE_KEY,
    rules.ignore_if_off(
        lambda value, config: MappedKey({"tune.neftune_alpha": value}, _NEFTUNE_REMARK)
    ),
)
# Keys common to axolotl and LLaMA-Factory.
TRAINER_RULES = rules.rule_table(
    {
        "learning_rate": "optim.lr",
        "weight_decay": "optim.weight_decay",
        "adam_beta1": "optim.beta1",
        "adam_beta2": "optim.beta2",
        "adam_epsilon": "optim.eps",
        "max_grad_norm": "optim.clip_norm",
        "max_steps": _convert_max_steps,
        "warmup_steps": _convert_warmup_steps,
        "warmup_ratio": _convert_warmup_ratio,
        "tf32": "train.tf32",
        "seed": "train.seed",
        "output_dir": "run.dir",
        "save_steps": _convert_save_steps,
        "save_strategy": _convert_save_strategy,
        "save_total_limit": "checkpoint.keep",
        "lora_alpha": "tune.alpha",
        "loraplus_lr_ratio": "optim.lora_b_ratio",
        "simpo_gamma": "tune.gamma",
        "neftune_noise_alpha": NEFTUNE_RULE,
        "reward_model": preferences.REWARD_ONLY_KEY,
        **rule_for_keys(_convert_deepspeed, "deepspeed deepspeed.*"),
        **rule_for_keys(
            _convert_schedule_argument,
            "lr_scheduler_kwargs.num_cycles lr_scheduler_kwargs.num_decay_steps "
            "lr_scheduler_kwargs.min_lr_ratio lr_scheduler_kwargs.warmup_type "
            "lr_scheduler_kwargs.decay_type",
        ),
    },
    ignored_keys={
        PREPARATION_REASON: "dataloader_num_workers dataloader_prefetch_factor "
        "dataloader_pin_memory dataloader_drop_last streaming group_by_length",
        rules.MICRO_BATCH_REASON: "auto_find_batch_size",
        rules.LAYOUT_REASON: "fsdp fsdp_config fsdp_config.* accelerator_config.* "
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers",
        rules.PARTIAL_READ_REASON: "low_cpu_mem_usage",
        "run.timeout and run.host_timeout end a job that hangs": "ddp_timeout",
        "mpirun, srun or torchrun start the ranks": "local_rank use_ray ray_run_name "
        "ray_num_workers resources_per_worker resources_per_worker.*",
        rules.METRICS_REASON: "logging_steps debug",
        HELD_OUT_LOSS_REASON: "eval_strategy",
        rules.COMPILE_REASON: "torch_compile_backend torch_compile_mode",
        "optim.min_lr_ratio says it": "lr_scheduler_kwargs.min_lr_rate",
        "embeddings have no adapters": "loraplus_lr_embedding",
        "checkpoint.keep_best uses the loss": "metric_for_best_model greater_is_better",
    },
    unsupported_keys={
        rules.DTYPE_ADVICE: "fp16",
        "no code of a model directory is run: hpc_tune must know its type": "trust_remote_code",
        TRACKER_HINT: "use_swanlab swanlab_project swanlab_mode swanlab_workspace trackio_space_id",
        "nothing is uploaded; run.dir has export/": "hub_model_id hub_strategy hub_revision",
    },
    todo_keys={
        ROPE_ADVICE: "rope_scaling",
        rules.OPTIMIZER_ADVICE: "optim_args optim_target_modules",
        "cross entropy of the next token is the only loss": "label_smoothing_factor",
        "set checkpoint.keep_best=true, and export the best": "load_best_model_at_end",
        rules.UNREADABLE_STATE_ADVICE: "resume_from_checkpoint",
    },
)


# -- The layers of a config's model, to check that the layers named for adapters exist.
#
# model.path is a directory here -> the names of its weights, without reading any weight
#               not here          -> None: unknown yet; plan checks it later


# Layer names of model families, by model_type in config.json, for directories without weights.
_GPT_NEOX_LAYERS = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
_LLAMA_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PHI3_LAYERS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_LAYERS_BY_MODEL_TYPE = {
    **dict.fromkeys(("gpt_neox", "bloom", "falcon"), _GPT_NEOX_LAYERS),
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "olmo2"), _LLAMA_LAYERS
    ),
    "phi3": _PHI3_LAYERS,
    "gpt2": ("c_attn", "c_proj", "c_fc"),
}
_EXPERT_STACK_PATTERN = re.compile(r"(?:[a-z_]+\.)*experts\.(gate_up|down)_proj")
_OUTPUT_HEAD = {"lm_head"}  # absent from files if it is tied to the embedding
_MAX_HEADER_BYTES = 64 << 20  # a larger header means a damaged file


def convert_targets(names: list[str], model_key: str, config: ForeignConfig) -> Outcome:
    """Return the outcome for the names of layers that get adapters, given the config's model."""
    layers = read_layer_names(Path(str(config.get(model_key, ""))).expanduser())
    if layers is None or not (unknown := [name for name in names if name not in layers]):
        return MappedKey({"tune.targets": names})
    is_one = len(unknown) == 1
    return UnsupportedKey(
        f"{config.get(model_key)} has no {'layer' if is_one else 'layers'} {', '.join(unknown)}; "
        f"set tune.targets to some of {', '.join(sorted(layers))}, or leave it out for all linear "
        "layers",
        to_do=True,
    )


def are_expert_stacks(parameters: Any) -> bool:
    """Return whether peft's target_parameters name both expert stacks of all layers."""
    names = parameters if isinstance(parameters, list) else [parameters]
    matches = [_EXPERT_STACK_PATTERN.fullmatch(str(name)) for name in names]
    return all(matches) and {match[1] for match in matches if match} == {"gate_up", "down"}


def add_expert_targets(outcome: Outcome, rank: Any) -> Outcome:
    """Return ``outcome`` with routed experts as targets; in peft each expert has the full rank."""
    if not isinstance(outcome, MappedKey):
        return outcome
    names = outcome.settings["tune.targets"]
    targets = [*([names] if isinstance(names, str) else names), "experts"]
    settings = {"tune.targets": targets, "tune.expert_rank": rank}
    return MappedKey(settings, "the rank of each expert, as there")


def read_layer_names(directory: Path) -> set[str] | None:
    """Return the names, without paths, of the linear layers of a model directory.

    None: there is no such directory, or its files do not tell.
    """
    if not directory.is_dir():
        return None
    names = set(_OUTPUT_HEAD)
    for weight in _read_weight_names(directory):
        *_, module, suffix = f"..{weight}".split(".")
        if suffix == "weight" and "norm" not in module and "embed" not in module:
            names.add(module)
    if names == _OUTPUT_HEAD:
        model_type = read_json_object(directory / "config.json").get("model_type")
        names |= set(_LAYERS_BY_MODEL_TYPE.get(str(model_type), ()))
    return None if names == _OUTPUT_HEAD else names


def _read_weight_names(directory: Path) -> list[str]:
    index = read_json_object(directory / "model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict) and index:
        return list(map(str, index))
    try:
        with (directory / "model.safetensors").open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(num_bytes)) if num_bytes <= _MAX_HEADER_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return []
    return list(header) if isinstance(header, dict) else []
