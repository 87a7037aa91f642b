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
    linear = sorted({_last_part(n) for n, m in model.named_modules() if isinstance(m, kinds)})
    _require_known_targets(tune, model, linear)
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
        wrapped = _wrap_with_peft(
            model, replace(make_lora_config(tune, targets), modules_to_save=None)
        )
    except ValueError as error:
        raise ConfigError(
            f"tune.targets={tune.targets}: {first_line(error)} "
            f"Linear layers of this model: {', '.join(linear)}"
        ) from None
    layers = [name for name, m in model.named_modules() if hasattr(m, "lora_A")]
    _require_matching_patterns(tune, layers, targets.stacks)
    _require_consistent_patterns(
        tune, {layer: language.names.whole_model_name(layer) for layer in layers}
    )
    _require_loadable_dora(tune, layers, directory)
    transposed = any(getattr(module, "fan_in_fan_out", False) for module in wrapped.modules())
    if transposed and tune.method != "lora":
        raise ConfigError(
            f"tune.method={tune.method}: this model keeps its weights transposed (Conv1D); use "
            "tune.method=lora or full"
        )
    if others := [n for n, _ in wrapped.named_parameters() if "lora_embedding_A" in n]:
        raise ConfigError(
            f"tune.targets={tune.targets}: {adapted_layer(others[0])} is an embedding; "
            "adapters are for linear layers"
        )
    if hasattr(model.get_output_embeddings(), "lora_A"):
        _require_adaptable_head(language, tune)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(_adapter_dtype(tune))
    make_modules_trainable(model, tune, language.is_tied, _adapter_dtype(tune), dtype)
    if tokens := token_ids(directory, tune.trainable_tokens):
        add_trainable_token_rows(model, tokens, language.is_tied, _adapter_dtype(tune))
    return wrapped


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
        wrapped: nn.Module = get_peft_model(
            model, config, low_cpu_mem_usage=True, autocast_adapter_dtype=True
        )
    return wrapped


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
    special = list(find_unreplaceable_linears(model))
    named = [tune.targets] if isinstance(tune.targets, str) else tune.targets
    adds_to_all = ALL_LINEAR_TARGET in named and tune.targets != ALL_LINEAR_TARGET
    if not (stacks or routers or special or adds_to_all):
        return Targets(tune.targets)
    modules = [name for name in named if name != ALL_LINEAR_TARGET]
    if unstacked := [p for p in _find_unstacked_experts(model) if _ends_with_name(p, modules)]:
        raise ConfigError(
            f"tune.targets={tune.targets}: {unstacked[0]} cannot have adapters: its experts are "
            "neither linear layers nor stacked in one tensor; leave them out, or use "
            "tune.method=full"
        )
    adapted = tuple(path for path in stacks if _ends_with_name(path, modules))
    bare = [path for path, router in routers.items() if _is_raw_weight_router(router)]
    chosen = [path for path in bare if _ends_with_name(path, modules)]
    rest = [n for n in modules if not any(_ends_with_name(path, [n]) for path in (*stacks, *bare))]
    if ALL_LINEAR_TARGET in named:
        rest += _find_linears_except(model, {*routers, *special})
    if adapted:
        _check_expert_stack_settings(tune)
    parameters = [name for path in adapted for name in list_stacked_tensors(model, path)]
    parameters += [f"{path}.weight" for path in chosen]
    chosen_each = num_experts_per_token(getattr(model, "config", None))
    rank = tune.expert_rank or max(1, tune.rank // chosen_each)
    return Targets(rest, tuple(parameters), adapted, rank, tuple(chosen))


def _ends_with_name(path: str, names: list[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _find_unstacked_experts(model: nn.Module) -> list[str]:
    """Return the paths of modules whose experts cannot have adapters, and of their parents."""
    stacks = {path for path, _ in find_stacked_experts(model)}
    held = [
        (p, m)
        for p, m in find_expert_modules(model)
        if p not in stacks and not isinstance(m, nn.Linear)
    ]
    return [path for p, _ in held for path in (p, p.rpartition(".")[0])]


def _is_raw_weight_router(router: nn.Module) -> bool:
    """Whether a router is not a linear layer, but holds a weight matrix like one."""
    weight = getattr(router, "weight", None)
    return type(router) is not nn.Linear and isinstance(weight, nn.Parameter) and weight.dim() == 2


def _refuse_unreplaceable_linears(tune: TuneConfig, model: nn.Module) -> None:
    """Refuse named targets among ``find_unreplaceable_linears``."""
    named = [] if isinstance(tune.targets, str) else tune.targets
    special = list(find_unreplaceable_linears(model))
    if bad := [name for name in named if any(_ends_with_name(path, [name]) for path in special)]:
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
    theirs = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = theirs


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
    asked = LoraConfig(target_modules=[*names])
    like = SimpleNamespace(config=read_config(directory))
    conversion.convert_peft_config_for_transformers(asked, like, None)
    return names - {*asked.target_modules}


def _require_loadable_dora(tune: TuneConfig, layers: list[str], directory: Path) -> None:
    """Refuse DoRA on layers that peft takes for expert stacks, for which it has no DoRA."""
    names = {_last_part(layer) for layer in layers}
    if tune.method != "dora" or names.isdisjoint(EXPERT_LAYER_NAMES):
        return
    taken = find_peft_stack_names(directory)
    if lost := [layer for layer in layers if _last_part(layer) in taken]:
        others = sorted(names - taken)
        rest = f", or leave these layers out: tune.targets=[{','.join(others)}]" if others else ""
        raise ConfigError(
            f"tune.method=dora with tune.targets={tune.targets}: peft could not load the adapter "
            f"of {lost[0]}. In this kind of model it takes layers called "
            f"{', '.join(sorted(names & taken))} for routed experts, for which it has no DoRA; "
            f"use tune.method=lora{rest}"
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
    named = [] if isinstance(tune.targets, str) else tune.targets
    modules = [name for name, _ in model.named_modules()]
    unknown = [
        name
        for name in named
        if name != ALL_LINEAR_TARGET
        and not any(_ends_with_name(module, [name]) for module in modules)
    ]
    if unknown:
        near = difflib.get_close_matches(unknown[0], linear_names, n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        experts = _find_stack_names(model)
        # Files store experts one by one, under other names: w1, gate_proj.
        routed = f"; its routed experts, as stacks: {', '.join(experts)}" if experts else ""
        raise ConfigError(
            f"tune.targets={tune.targets}: no layer of this model is called "
            f"{', '.join(unknown)}{hint} Its linear layers: {', '.join(linear_names)}{routed}"
        )


def _find_stack_names(model: nn.Module) -> list[str]:
    return sorted({_last_part(path) for path, _ in find_stacked_experts(model)})


def _require_matching_patterns(
    tune: TuneConfig, layers: list[str], stacks: tuple[str, ...]
) -> None:
    """Refuse a pattern that matches no adapted layer, and two for one layer: they have no order."""
    plain = [layer for layer in layers if layer.replace(".base_layer", "") not in stacks]
    for setting in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(tune, setting)
        matched = ((key, path) for path in stacks for key in match_patterns(patterns, path))
        if (of_experts := next(matched, None)) is not None:
            raise ConfigError(
                f"tune.{setting}: {' matches '.join(of_experts)}; the rank of experts is set by "
                "tune.expert_rank, and they have the scale of the other adapters"
            )
        found = {layer: match_patterns(patterns, layer) for layer in plain}
        used = {key for keys in found.values() for key in keys}
        if unused := [key for key in patterns if key not in used]:
            advice = "only experts have one, and their rank is tune.expert_rank"
            if plain:
                advice = f"such layers have paths like {', '.join(plain[:2])}"
            raise ConfigError(
                f"tune.{setting}: {unused[0]} matches no layer with an adapter; {advice}"
            )
        for layer, keys in found.items():
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
        grown = targets.expert_rank / tune.rank
        alpha = tune.alpha * (math.sqrt(grown) if tune.rslora else grown)  # for the same scale
        stacked = [n for n in targets.parameters if n.rpartition(".")[0] in targets.stacks]
        ranks, alphas = dict.fromkeys(stacked, targets.expert_rank), dict.fromkeys(stacked, alpha)
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
    changed = {key for layer in layers for key in match_patterns(patterns, layer)}
    before, behind = _WEIGHT_PATTERN_AFFIXES
    return {
        f"{before}{key.removesuffix('$')}{behind}" if key in changed else key: value
        for key, value in patterns.items()
    }


def restore_layer_patterns(patterns: Mapping[str, Any]) -> dict[str, Any]:
    """Undo ``_extend_patterns_to_weights`` in an adapter's patterns, and remove a final ``$``."""
    before, behind = _WEIGHT_PATTERN_AFFIXES
    return {
        key.removeprefix(before).removesuffix(behind)
        if key.endswith(behind)
        else key.removesuffix("$"): value
        for key, value in patterns.items()
    }
