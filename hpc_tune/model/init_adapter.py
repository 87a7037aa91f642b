"""Adapters that go on from ones that peft, or the Hugging Face Trainer, has saved."""

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError
from hpc_tune.model.adapters import strip_weight_patterns
from hpc_tune.model.build import BuiltModel
from hpc_tune.model.language import TensorNames
from hpc_tune.model.weights import ADAPTER_FILE, ADAPTER_PREFIX, TensorIndex

_FIELDS = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora", "use_dora": "method"}
_FIELDS |= {name: name for name in ("rank_pattern", "alpha_pattern")}
# Fields of peft's that say nothing about what an adapter of given tensors computes: names, how it
# was begun, and which tensors there are, which are compared one by one.
_IGNORED_FIELDS = frozenset(
    (
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
        *("revision", "inference_mode", "runtime_config", "megatron_config", "megatron_core"),
        *("target_modules", "exclude_modules", "modules_to_save", "trainable_token_indices"),
        *("layers_to_transform", "layers_pattern", "target_parameters", "ensure_weight_tying"),
        *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("lora_dropout", "bias", "qalora_group_size"),
    )
)
# As peft names the ways to begin that leave the base as it is: pissa, olora and others change it.
_INITS_KEEPING_BASE = (True, False, "gaussian", "eva", "orthogonal")


def use_init_adapter(built: BuiltModel, directory: Path) -> BuiltModel:
    """Return the model, its adapters to begin with those of a peft directory.

    Raises:
        ConfigError: lists every way in which they are not adapters of this model and ``tune``.
        DataError: if their file is damaged.
    """
    file, saved = directory / ADAPTER_FILE, _read_adapter_config(directory)
    fields = {key: saved.get(key, {} if "pattern" in key else False) for key in _FIELDS}
    model: Any = built.module.model
    wanted = {key: getattr(model.peft_config["default"], key) for key in _FIELDS}
    for key in ("rank_pattern", "alpha_pattern"):
        wanted[key] = strip_weight_patterns(wanted[key])
        fields[key] = _expand_paths(strip_weight_patterns(fields[key]), wanted[key])
    problems = _compare_expert_ranks(fields, wanted, built.tune)
    problems += [
        f"{key} is {fields[key]} there, and tune.{_FIELDS[key]} says {wanted[key]}"
        for key in _FIELDS
        if fields[key] != wanted[key]
    ]
    if (kind := saved.get("peft_type", "LORA")) != "LORA":
        problems.append(f"peft_type is {kind} there, and only LORA is supported here")
    problems += _compare_tokens(saved.get("trainable_token_indices") or [], [*built.tokens])
    unsupported = sorted(saved.keys() - _IGNORED_FIELDS - _FIELDS.keys())
    problems += [f"{key} is set there, and not supported here" for key in unsupported if saved[key]]
    if (init := saved.get("init_lora_weights", True)) not in _INITS_KEEPING_BASE:
        problems.append(
            f"init_lora_weights is {init} there, which subtracted its first values from the base: "
            "it only fits that changed base; save it with peft's "
            "path_initial_model_for_weight_conversion"
        )
    index = TensorIndex([file])
    use_whole_model_names(index, built.names)
    _refuse_unstacked_experts(directory, index, built.saved_names.values())
    parameters = dict(built.module.named_parameters())
    shapes = {saved: tuple(parameters[own].shape) for own, saved in built.saved_names.items()}
    needed, stored = set(shapes), set(index.pieces)
    problems += [f"it has no {name}" for name in sorted(needed - stored)[:1]]
    problems += [
        f"it has {name}, which this run does not have" for name in sorted(stored - needed)[:1]
    ]
    others = [name for name in sorted(needed & stored) if index.shapes[name] != shapes[name]]
    problems += [
        f"{name} has shape {list(index.shapes[name])} there and {list(shapes[name])} in this "
        "model: it is of another base"
        for name in (others if fields["r"] == wanted["r"] else [])[:1]
    ]
    if problems:
        raise ConfigError(f"tune.init_from={directory}: " + "; ".join(problems))
    return replace(built, start=index)


def _read_adapter_config(directory: Path) -> dict[str, Any]:
    file, settings = directory / ADAPTER_FILE, directory / "adapter_config.json"
    if not file.is_file() or not settings.is_file():
        has_pickle = (directory / "adapter_model.bin").is_file()
        advice = (
            "adapter_model.bin is a pickle, which is not read; load it with peft and save it again"
            if has_pickle
            else "name the folder that peft's save_pretrained or the Trainer wrote"
        )
        raise ConfigError(
            f"tune.init_from={directory}: expected {ADAPTER_FILE} and adapter_config.json in it; "
            + advice
        )
    try:
        saved = json.loads(settings.read_text(encoding="utf-8"))
        return {**saved}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"tune.init_from: {settings} cannot be read: {error}") from None


def use_whole_model_names(index: TensorIndex, names: TensorNames) -> None:
    """Give an adapter that was made on a language model by itself its names in the whole model.

    In a checkpoint the optimizer's state has them as well.
    """
    tables: tuple[dict[str, Any], ...] = (index.pieces, index.shapes, index.dtypes)
    for table in tables:
        for name in list(table):
            part, prefix, own = name.partition(ADAPTER_PREFIX)
            if prefix and not own.startswith(f"{names.in_whole}."):
                table[part + prefix + names.name_in_whole(own)] = table.pop(name)


def _refuse_unstacked_experts(directory: Path, index: TensorIndex, known: Iterable[str]) -> None:
    """Refuse an adapter with a pair of tensors for each expert, as for vLLM or transformers 4."""
    names = (name for name in index.pieces if re.search(r"\.experts\.\d+\.", name))
    if (first := next(names, None)) is not None and first not in {*known}:
        raise ConfigError(
            f"tune.init_from={directory}: it has {first}: a pair of tensors per expert. Expected "
            "peft's form, all experts of a layer in one pair: the folder export/adapter of a run, "
            "or what peft saves with transformers 5"
        )


def _compare_expert_ranks(
    fields: dict[str, Any], wanted: dict[str, Any], tune: TuneConfig
) -> list[str]:
    """Return how the ranks and scales of experts differ, and take experts out of the patterns.

    peft's own adapters have a pattern for them only where they have another rank than the others.
    """
    problems = []
    for key, every, said in (
        ("rank_pattern", "r", "the rank of experts is {} there, and tune.expert_rank says {}"),
        (
            *("alpha_pattern", "lora_alpha"),
            "lora_alpha of experts is {} there, and {} here: tune.alpha x expert_rank / rank",
        ),
    ):
        experts = [path for path in wanted[key] if path not in getattr(tune, key)]
        pairs = [(fields[key].pop(path, fields[every]), wanted[key].pop(path)) for path in experts]
        problems += [said.format(*pair) for pair in pairs if pair[0] != pair[1]][:1]
    return problems


def _expand_paths(patterns: Any, paths: Iterable[str]) -> Any:
    """Return patterns with the paths among ``paths`` in place of those that are the end of some."""
    found: dict[str, Any] = {}
    for key, value in patterns.items():
        ends = [path for path in paths if path.endswith(f".{key}")]
        found |= dict.fromkeys(ends or [key], value)
    return found


def _compare_tokens(there: Any, here: list[int]) -> list[str]:
    """Return what is wrong with the tokens whose rows an adapter holds; they are in that order."""
    (there,) = there.values() if isinstance(there, dict) and len(there) == 1 else (there,)
    if there == here:
        return []
    said = f"trainable_token_indices is {there} there, and tune.trainable_tokens means {here}"
    return [said]
