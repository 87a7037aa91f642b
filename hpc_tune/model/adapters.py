"""Add peft's adapters to a language model on the meta device: on which layers, and of what rank.

tune.targets -> linear layers, and expert and router tensors that are not linear layers
-> peft adds an adapter to each -> cast to the dtype of trained parameters
"""

import difflib
import math
import os.path
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hpc_tune.config.tune import TuneConfig, match_patterns
from hpc_tune.errors import ConfigError, first_line
from hpc_tune.model.experts import (
    find_expert_modules,
    find_routers,
    find_stacked_experts,
    list_stacked_tensors,
    num_experts_per_token,
)
from hpc_tune.model.language import LanguageModel, read_config
from hpc_tune.model.layers import find_unreplaceable_linears
from hpc_tune.model.modules_to_save import (
    add_trainable_token_rows,
    make_modules_trainable,
    token_ids,
)
from hpc_tune.model.weights import adapted_layer
from hpc_tune.packages import fast_imports

ALL_LINEAR_TARGET = "all-linear"
# Names of experts and routers in transformers 4, where they were linear layers.
EXPERT_LAYER_NAMES = ("gate", "w1", "w2", "w3", "gate_proj", "up_proj", "down_proj")
_WEIGHT_PATTERN_AFFIXES = ("(?:", r")(?:\.weight)?")  # prefix and suffix of a pattern


@dataclass(frozen=True)
class Targets:
    """The parts of a model that get adapters: linear layers by name, and tensors by path.

    ``parameters``: expert stacks, and the weights of ``raw_weight_layers``, such as routers that
    are not linear layers. ``stacks``: paths of the modules whose expert stacks get adapters;
    ``expert_rank``: the rank of these.
    """

    modules: list[str] | str
    parameters: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()
    expert_rank: int = 0
    raw_weight_layers: tuple[str, ...] = ()


def add_adapters(
    language: LanguageModel, tune: TuneConfig, dtype: torch.dtype, directory: Path
) -> nn.Module:
    """Wrap a language model in peft's model, with its adapters and all else that is trained.

    Raises:
        ConfigError: if tune.targets match no layer, or a layer that cannot have an adapter, or
            another setting of tune does not fit the model.
    """
    model, kinds = language.model, (nn.Linear, _conv1d_class())
    linear_names = sorted({_last_part(n) for n, m in model.named_modules() if isinstance(m, kinds)})
    _require_known_targets(tune, model, linear_names)
    _refuse_unreplaceable_linears(tune, model)
    targets = resolve_targets(model, tune)
    if tune.expert_rank and not targets.stacks:
        names = _find_stack_names(model)
        advice = f"name them, as in [all-linear, {', '.join(names)}], or " if names else ""
        raise ConfigError(
            f"tune.expert_rank={tune.expert_rank} has no effect: tune.targets={tune.targets} name "
            f"no routed experts{'' if names else ', and this model has none'}; {advice}leave "
            "it out"
        )
    try:
        peft_model = _wrap_with_peft(
            model, replace(make_lora_config(tune, targets), modules_to_save=None)
        )
    except ValueError as error:
        raise ConfigError(
            f"tune.targets={tune.targets}: {first_line(error)} "
            f"Linear layers of this model: {', '.join(linear_names)}"
        ) from None
    layers = [name for name, m in model.named_modules() if hasattr(m, "lora_A")]
    _require_matching_patterns(tune, layers, targets.stacks)
    _require_consistent_patterns(
        tune, {layer: language.names.whole_model_name(layer) for layer in layers}
    )
    _require_loadable_dora(tune, layers, directory)
    is_transposed = any(getattr(module, "fan_in_fan_out", False) for module in peft_model.modules())
    if is_transposed and tune.method != "lora":
        raise ConfigError(
            f"tune.method={tune.method}: this model keeps its weights transposed (Conv1D); use "
            "tune.method=lora or full"
        )
    if embeddings := [n for n, _ in peft_model.named_parameters() if "lora_embedding_A" in n]:
        raise ConfigError(
            f"tune.targets={tune.targets}: {adapted_layer(embeddings[0])} is an embedding; "
            "adapters are for linear layers"
        )
    if hasattr(model.get_output_embeddings(), "lora_A"):
        _require_adaptable_head(language, tune)
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(_adapter_dtype(tune))
    make_modules_trainable(model, tune, language.is_tied, _adapter_dtype(tune), dtype)
    if tokens := token_ids(directory, tune.trainable_tokens):
        add_trainable_token_rows(model, tokens, language.is_tied, _adapter_dtype(tune))
    return peft_model


def _conv1d_class() -> type[nn.Module]:
    from transformers.pytorch_utils import Conv1D

    return Conv1D


def _wrap_with_peft(model: Any, config: Any) -> nn.Module:
    """Return peft's model around ``model``; suppress peft's irrelevant warnings."""
    with fast_imports():
        from peft import get_peft_model

    with warnings.catch_warnings(), fast_imports(), keep_peft_target_names():
        # peft reads an attribute of transformers by its deprecated name, once per rank.
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # peft sets it
        warnings.filterwarnings("ignore", "The following .*_pattern keys")  # refused later
        peft_model: nn.Module = get_peft_model(
            model, config, low_cpu_mem_usage=True, autocast_adapter_dtype=True
        )
    return peft_model


def _adapter_dtype(tune: TuneConfig) -> torch.dtype:
    return torch.bfloat16 if tune.param_dtype == "bf16" else torch.float32


def resolve_targets(model: nn.Module, tune: TuneConfig) -> Targets:
    """Resolve ``tune.targets`` in a model that has no adapters yet.

    all-linear means all linear layers (in a mixture of experts: attention, shared experts) but the
    head, routers and ``find_unreplaceable_linears``. Stacks and routers must be named. peft knows
    all-linear too, but not in a list.

    Raises:
        ConfigError: if experts are named that cannot have adapters with these settings.
    """
    routers, stacks = find_routers(model), [path for path, _ in find_stacked_experts(model)]
    special_linears = list(find_unreplaceable_linears(model))
    target_names = [tune.targets] if isinstance(tune.targets, str) else tune.targets
    adds_to_all = ALL_LINEAR_TARGET in target_names and tune.targets != ALL_LINEAR_TARGET
    if not (stacks or routers or special_linears or adds_to_all):
        return Targets(tune.targets)
    modules = [name for name in target_names if name != ALL_LINEAR_TARGET]
    if bad_paths := [p for p in _find_unstacked_experts(model) if _ends_with_name(p, modules)]:
        raise ConfigError(
            f"tune.targets={tune.targets}: {bad_paths[0]} cannot have adapters: its experts are "
            "neither linear layers nor stacked in one tensor; leave them out, or use "
            "tune.method=full"
        )
    adapted_stacks = tuple(path for path in stacks if _ends_with_name(path, modules))
    raw_paths = [path for path, router in routers.items() if _is_raw_weight_router(router)]
    chosen_routers = [path for path in raw_paths if _ends_with_name(path, modules)]
    linear_names = [
        n for n in modules if not any(_ends_with_name(path, [n]) for path in (*stacks, *raw_paths))
    ]
    if ALL_LINEAR_TARGET in target_names:
        linear_names += _find_linears_except(model, {*routers, *special_linears})
    if adapted_stacks:
        _check_expert_stack_settings(tune)
    parameters = [name for path in adapted_stacks for name in list_stacked_tensors(model, path)]
    parameters += [f"{path}.weight" for path in chosen_routers]
    experts_per_token = num_experts_per_token(getattr(model, "config", None))
    rank = tune.expert_rank or max(1, tune.rank // experts_per_token)
    return Targets(linear_names, tuple(parameters), adapted_stacks, rank, tuple(chosen_routers))


def _ends_with_name(path: str, names: list[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _find_unstacked_experts(model: nn.Module) -> list[str]:
    """Return the paths of modules whose experts cannot have adapters, and of their parents."""
    stacks = {path for path, _ in find_stacked_experts(model)}
    unstacked_modules = [
        (p, m)
        for p, m in find_expert_modules(model)
        if p not in stacks and not isinstance(m, nn.Linear)
    ]
    return [path for p, _ in unstacked_modules for path in (p, p.rpartition(".")[0])]


def _is_raw_weight_router(router: nn.Module) -> bool:
    """Whether a router is not a linear layer, but holds a weight matrix like one."""
    weight = getattr(router, "weight", None)
    return type(router) is not nn.Linear and isinstance(weight, nn.Parameter) and weight.dim() == 2


def _refuse_unreplaceable_linears(tune: TuneConfig, model: nn.Module) -> None:
    """Refuse named targets among ``find_unreplaceable_linears``."""
    names = [] if isinstance(tune.targets, str) else tune.targets
    special = list(find_unreplaceable_linears(model))
    if bad := [name for name in names if any(_ends_with_name(path, [name]) for path in special)]:
        raise ConfigError(
            f"tune.targets={tune.targets}: {bad[0]} is not called like other linear layers: a "
            "fused kernel takes its weight, or its matmul is grouped, so its adapter would not be "
            f"trained; leave {', '.join(bad)} out (all-linear does)"
        )


def _find_linears_except(model: Any, excluded_paths: set[str]) -> list[str]:
    """Return the paths of all linear layers except ``excluded_paths`` and the output head."""
    head, kinds = model.get_output_embeddings(), (nn.Linear, _conv1d_class())
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, kinds) and module is not head and path not in excluded_paths
    ]


def _check_expert_stack_settings(tune: TuneConfig) -> None:
    """Refuse settings that adapters on expert stacks do not support."""
    if tune.method == "dora":
        raise ConfigError(
            f"tune.method=dora with experts in tune.targets={tune.targets}: DoRA's magnitudes are "
            "for linear layers; use tune.method=lora, or leave the experts out"
        )
    if tune.dropout:
        raise ConfigError(
            f"tune.dropout={tune.dropout:g} with experts in tune.targets={tune.targets}: adapters "
            "on experts have no dropout, as in peft; set tune.dropout=0, or leave the experts out"
        )


@contextmanager
def keep_peft_target_names() -> Iterator[None]:
    """Keep peft from converting target names.

    In families whose experts were linear layers in transformers 4, peft takes gate_proj to mean the
    expert stacks, lets all-linear include routers, and skips linear layers with these names.
    """
    try:
        from peft.utils import transformers_weight_conversion as conversion
    except ImportError:  # a version before this conversion
        yield
        return
    peft_converter = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = peft_converter


def find_peft_stack_names(directory: Path) -> set[str]:
    """Return the names that stock peft takes for expert stacks in the model of a directory.

    peft decides by the model type, even if a shared expert or a dense layer has such a name.
    """
    names = {*EXPERT_LAYER_NAMES}
    with fast_imports():
        from peft import LoraConfig

        try:
            from peft.utils import transformers_weight_conversion as conversion
        except ImportError:  # an older peft; who loads the adapter may have a newer one
            return names
    lora_config = LoraConfig(target_modules=[*names])
    model_stub = SimpleNamespace(config=read_config(directory))
    conversion.convert_peft_config_for_transformers(lora_config, model_stub, None)
    return names - {*lora_config.target_modules}


def _require_loadable_dora(tune: TuneConfig, layers: list[str], directory: Path) -> None:
    """Refuse DoRA on layers that peft takes for expert stacks, for which it has no DoRA."""
    names = {_last_part(layer) for layer in layers}
    if tune.method != "dora" or names.isdisjoint(EXPERT_LAYER_NAMES):
        return
    stacks = find_peft_stack_names(directory)
    if bad_layers := [layer for layer in layers if _last_part(layer) in stacks]:
        others = sorted(names - stacks)
        hint = f", or leave these layers out: tune.targets=[{','.join(others)}]" if others else ""
        raise ConfigError(
            f"tune.method=dora with tune.targets={tune.targets}: peft could not load the adapter "
            f"of {bad_layers[0]}. In this kind of model it takes layers called "
            f"{', '.join(sorted(names & stacks))} for routed experts, for which it has no DoRA; "
            f"use tune.method=lora{hint}"
        )


def _last_part(path: str) -> str:
    return path.rpartition(".")[2]


def _require_adaptable_head(language: LanguageModel, tune: TuneConfig) -> None:
    """Refuse adapters on an output head that cannot have them."""
    if language.is_tied:
        raise ConfigError(
            f"tune.targets={tune.targets}: the output head of this model is its embedding, which "
            "an adapter would change too; leave it out of tune.targets"
        )
    if tune.dropout:
        raise ConfigError(
            f"tune.dropout={tune.dropout:g} with the output head in tune.targets={tune.targets}: "
            "dropout is drawn row by row, and the head sees the learned tokens of all rows "
            "together; set tune.dropout=0, or leave the head out of tune.targets"
        )


def _require_known_targets(tune: TuneConfig, model: nn.Module, linear_names: list[str]) -> None:
    """Refuse a target that names no module; peft ignores such a target if another one matches."""
    target_names = [] if isinstance(tune.targets, str) else tune.targets
    modules = [name for name, _ in model.named_modules()]
    unknown = [
        name
        for name in target_names
        if name != ALL_LINEAR_TARGET
        and not any(_ends_with_name(module, [name]) for module in modules)
    ]
    if unknown:
        suggestions = difflib.get_close_matches(unknown[0], linear_names, n=3)
        hint = f"; did you mean {' or '.join(suggestions)}?" if suggestions else "."
        experts = _find_stack_names(model)
        # Files store experts one by one, under other names: w1, gate_proj.
        experts_note = f"; its routed experts, as stacks: {', '.join(experts)}" if experts else ""
        raise ConfigError(
            f"tune.targets={tune.targets}: no layer of this model is called "
            f"{', '.join(unknown)}{hint} Its linear layers: {', '.join(linear_names)}{experts_note}"
        )


def _find_stack_names(model: nn.Module) -> list[str]:
    return sorted({_last_part(path) for path, _ in find_stacked_experts(model)})


def _require_matching_patterns(
    tune: TuneConfig, layers: list[str], stacks: tuple[str, ...]
) -> None:
    """Refuse a pattern that matches no adapted layer, and two for one layer: they have no order."""
    plain_layers = [layer for layer in layers if layer.replace(".base_layer", "") not in stacks]
    for setting in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(tune, setting)
        stack_matches = ((key, path) for path in stacks for key in match_patterns(patterns, path))
        if (stack_match := next(stack_matches, None)) is not None:
            raise ConfigError(
                f"tune.{setting}: {' matches '.join(stack_match)}; the rank of experts is set by "
                "tune.expert_rank, and they have the scale of the other adapters"
            )
        keys_by_layer = {layer: match_patterns(patterns, layer) for layer in plain_layers}
        used_keys = {key for keys in keys_by_layer.values() for key in keys}
        if unused_keys := [key for key in patterns if key not in used_keys]:
            advice = "only experts have one, and their rank is tune.expert_rank"
            if plain_layers:
                advice = f"such layers have paths like {', '.join(plain_layers[:2])}"
            raise ConfigError(
                f"tune.{setting}: {unused_keys[0]} matches no layer with an adapter; {advice}"
            )
        for layer, keys in keys_by_layer.items():
            if len(keys) > 1:
                raise ConfigError(
                    f"tune.{setting}: {' and '.join(keys)} both match {layer}; write them so that "
                    "only one matches"
                )


def _require_consistent_patterns(tune: TuneConfig, whole_name_by_layer: Mapping[str, str]) -> None:
    """Refuse a pattern that matches only one of a layer's paths in language model and whole model.

    Adapters are trained in the language model, but exported and merged for the whole model.
    """
    for setting in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(tune, setting)
        for layer, whole in whole_name_by_layer.items():
            if odd := {*match_patterns(patterns, layer)} ^ {*match_patterns(patterns, whole)}:
                end = os.path.commonprefix([layer[::-1], whole[::-1]])[::-1].partition(".")[2]
                raise ConfigError(
                    f"tune.{setting}: {min(odd)} matches only one of {layer} and {whole}, which "
                    "are the same layer in the language model and in the whole model of exports; "
                    f"write it so that it matches both, as {end} does"
                )


def make_lora_config(tune: TuneConfig, targets: Targets) -> Any:
    """Return the peft configuration of these adapters."""
    with fast_imports():
        from peft import LoraConfig

    # First: peft uses the first match, and a shared expert's down_proj may have a pattern.
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    if targets.stacks:
        ratio = targets.expert_rank / tune.rank
        alpha = tune.alpha * (math.sqrt(ratio) if tune.rslora else ratio)  # for the same scale
        tensors = [n for n in targets.parameters if n.rpartition(".")[0] in targets.stacks]
        ranks, alphas = dict.fromkeys(tensors, targets.expert_rank), dict.fromkeys(tensors, alpha)
    ranks |= _extend_patterns_to_weights(tune.rank_pattern, targets.raw_weight_layers)
    alphas |= _extend_patterns_to_weights(tune.alpha_pattern, targets.raw_weight_layers)
    return LoraConfig(
        r=tune.rank,
        lora_alpha=tune.alpha,
        rank_pattern=ranks,
        alpha_pattern=alphas,
        use_rslora=tune.rslora,
        lora_dropout=tune.dropout,
        target_modules=targets.modules,
        target_parameters=list(targets.parameters) or None,
        use_dora=tune.method == "dora",
        task_type="CAUSAL_LM",
        modules_to_save=tune.modules_to_save or None,
    )


def _extend_patterns_to_weights(
    patterns: Mapping[str, Any], layers: Sequence[str]
) -> dict[str, Any]:
    """Make patterns also match the weights of ``layers``, by which peft identifies these layers."""
    changed_keys = {key for layer in layers for key in match_patterns(patterns, layer)}
    prefix, suffix = _WEIGHT_PATTERN_AFFIXES
    return {
        f"{prefix}{key.removesuffix('$')}{suffix}" if key in changed_keys else key: value
        for key, value in patterns.items()
    }


def restore_layer_patterns(patterns: Mapping[str, Any]) -> dict[str, Any]:
    """Undo ``_extend_patterns_to_weights`` in an adapter's patterns, and remove a final ``$``."""
    prefix, suffix = _WEIGHT_PATTERN_AFFIXES
    return {
        key.removeprefix(prefix).removesuffix(suffix)
        if key.endswith(suffix)
        else key.removesuffix("$"): value
        for key, value in patterns.items()
    }
