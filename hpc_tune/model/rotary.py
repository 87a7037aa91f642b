"""Rotary positions: scaled as ``model.rope_scaling`` says, and the same for all texts of a run.

apply_rope_scaling_to_json  puts the setting into the content of a config.json (runs, exports)
fix_rotary_frequencies      fixes frequencies that transformers would recompute for each text
length_independent_scaling  the setting with which transformers computes the fixed ones (exports)

transformers computes some frequencies for the longest text of a micro-batch (longrope: two sets;
dynamic NTK, arXiv:2309.00071: one for each length), so a text's loss would depend on the other
texts. Here the frequencies are those of ``data.seq_len`` tokens, or for pairs of the longest text
that is learned, as on a server that is started for texts of that length.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hpc_tune.config.rope import ORIGINAL_LENGTH_KEY, ROPE_TYPES, SCALING_KEYS, format_rope_scaling
from hpc_tune.errors import ConfigError, first_line
from hpc_tune.model.config_json import value_shared_by_layers

_FULL_ATTENTION = "full_attention"  # the layers to scale if each kind has its own parameters
# Their max_position_embeddings is the unscaled length.
_ROPE_TYPES_WITH_UNSCALED_LENGTH = ("linear", "dynamic")
_MAX_POSITIONS_KEY = "max_position_embeddings"
# Scales queries by position relative to ORIGINAL_LENGTH_KEY.
_ATTENTION_SCALE_KEY = "llama_4_scaling_beta"
_DEFAULT_ROPE_TYPE = "default"  # to transformers: frequencies that never change


def apply_rope_scaling(config: Any, content: Mapping[str, Any], scaling: Mapping[str, Any]) -> Any:
    """Return ``config``, which transformers made from ``content``, with its positions scaled.

    Raises:
        ConfigError: if the model family does not support this scaling.
    """
    text, kind = format_rope_scaling(scaling), config.get_text_config().model_type
    old_parameters = _rotary_parameters(config)
    if not old_parameters:
        raise ConfigError(f"{text}: a {kind} model has no rotary positions to scale")
    if (rope := old_parameters.get("rope_type", _DEFAULT_ROPE_TYPE)) not in (
        _DEFAULT_ROPE_TYPE,
        *ROPE_TYPES,
    ):
        raise ConfigError(
            f"{text}: a {kind} model has {rope} rotary positions, which any scaling would replace; "
            "leave model.rope_scaling out"
        )
    try:
        scaled_config = type(config).from_dict(apply_rope_scaling_to_json(config, content, scaling))
    except Exception as error:  # whatever the family's own checks raise
        raise ConfigError(
            f"{text}: transformers rejects this scaling for a {kind} model: {first_line(error)}"
        ) from None
    actual, expected = _rotary_parameters(scaled_config), _replace_scaling(old_parameters, scaling)
    if diff := [f"{k}={actual.get(k)}" for k, v in expected.items() if actual.get(k) != v]:
        raise ConfigError(
            f"{text}: transformers turns it into {', '.join(diff)} for a {kind} model; use a kind "
            "of scaling that the model's own configuration names"
        )
    return scaled_config


def apply_rope_scaling_to_json(
    config: Any, content: Mapping[str, Any], scaling: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the ``content`` of the config.json that ``config`` was read from, positions scaled.

    The form is kept: ``rope_parameters``, or ``rope_scaling`` as transformers before 5 read it.
    ``scaling`` may come from ``length_independent_scaling``.
    """
    text_config = config.get_text_config()
    text_keys = [name for name in config.sub_configs if getattr(config, name, None) is text_config]
    name = next((name for name in text_keys if isinstance(content.get(name), dict)), None)
    part = dict(content if name is None else content[name])
    if isinstance(all_parameters := part.get("rope_parameters"), dict):
        old_parameters = all_parameters.get(_FULL_ATTENTION, all_parameters)
        new = _replace_scaling(old_parameters, scaling)
        part["rope_parameters"] = (
            new if old_parameters is all_parameters else {**all_parameters, _FULL_ATTENTION: new}
        )
    else:
        new = _replace_scaling(part.get("rope_scaling") or {}, scaling)
        part["rope_scaling"] = {k: v for k, v in new.items() if k != "rope_theta"}
    if "rope_theta" in scaling and ("rope_theta" in part or "rope_scaling" in part):
        part["rope_theta"] = scaling["rope_theta"]
    # Phi-3 reads it from there.
    if ORIGINAL_LENGTH_KEY in scaling and hasattr(text_config, ORIGINAL_LENGTH_KEY):
        part[ORIGINAL_LENGTH_KEY] = scaling[ORIGINAL_LENGTH_KEY]
    positions = _scaled_max_positions(text_config, _rotary_parameters(config), scaling)
    if positions is not None:
        part[_MAX_POSITIONS_KEY] = positions
    return part if name is None else {**content, name: part}


def _replace_scaling(
    old_parameters: Mapping[str, Any], scaling: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``scaling`` and those of ``old_parameters`` that belong to no scaling."""
    parameters = {key: value for key, value in old_parameters.items() if key not in SCALING_KEYS}
    if _ATTENTION_SCALE_KEY in old_parameters and ORIGINAL_LENGTH_KEY in old_parameters:
        parameters[ORIGINAL_LENGTH_KEY] = old_parameters[ORIGINAL_LENGTH_KEY]
    return parameters | {key: value for key, value in scaling.items() if key != _MAX_POSITIONS_KEY}


def _scaled_max_positions(
    text_config: Any, old_parameters: Mapping[str, Any], scaling: Mapping[str, Any]
) -> int | None:
    """Return max_position_embeddings of a scaled model, or None if it does not change.

    The factor of Llama 3's scaling is not a ratio of lengths: both 8 and 32 (Llama 3.1 and 3.2)
    turn 8192 positions into 131072.
    """
    if _MAX_POSITIONS_KEY in scaling or not {ORIGINAL_LENGTH_KEY, "factor"} <= scaling.keys():
        return scaling.get(_MAX_POSITIONS_KEY)
    if all(
        old_parameters.get(key) == scaling[key]
        for key in ("rope_type", "factor", ORIGINAL_LENGTH_KEY)
    ):
        return None
    positions = int(scaling[ORIGINAL_LENGTH_KEY] * scaling["factor"])
    if scaling["rope_type"] != "llama3":
        return positions
    is_more = positions > getattr(text_config, _MAX_POSITIONS_KEY, 0)
    return positions if is_more and old_parameters.get("rope_type") != "llama3" else None


def length_independent_scaling(
    config: Any, scaling: Mapping[str, Any], num_tokens: int
) -> dict[str, Any]:
    """Return a scaling that gives all texts up to ``num_tokens`` the frequencies for that length.

    These are the frequencies of ``fix_rotary_frequencies``; with the original ``scaling``,
    transformers would use others for shorter texts. ``config`` is transformers' config without the
    scaling. The result may also have max_position_embeddings.
    """
    text_config, kind = config.get_text_config(), scaling["rope_type"]
    if kind == "longrope" and num_tokens > scaling[ORIGINAL_LENGTH_KEY]:
        return {**scaling, "short_factor": scaling["long_factor"]}
    if kind != "dynamic":
        return dict(scaling)
    parameters, old_positions = (
        _rotary_parameters(config) | dict(scaling),
        text_config.max_position_embeddings,
    )
    head_dim = (
        value_shared_by_layers(text_config, "head_dim")
        or text_config.hidden_size // text_config.num_attention_heads
    )
    dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    positions, factor = max(num_tokens, old_positions), scaling["factor"]
    stretch = (factor * positions / old_positions - (factor - 1)) ** (dim / (dim - 2))
    return {
        "rope_type": _DEFAULT_ROPE_TYPE,
        "rope_theta": parameters["rope_theta"] * stretch,
        _MAX_POSITIONS_KEY: positions,
    }


def _rotary_parameters(config: Any) -> dict[str, Any]:
    """Return the rotary parameters of the full-attention layers; empty if there are none."""
    parameters: dict[str, Any] = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return parameters.get(_FULL_ATTENTION, parameters)


def require_scaling_support(model: nn.Module, scaling: Mapping[str, Any]) -> None:
    """Refuse a family whose own code ignores the scaling.

    Raises:
        ConfigError: if no part of ``model`` has the scaling's ``rope_type``.
    """
    kinds = [getattr(part, "rope_type", None) for part in model.modules()]
    rope_types = {name for k in kinds for name in (k.values() if isinstance(k, dict) else (k,))}
    if scaling["rope_type"] not in rope_types:
        config = getattr(model, "config", None)
        raise ConfigError(
            f"{format_rope_scaling(scaling)}: transformers' {getattr(config, 'model_type', '')} "
            "model ignores this setting when it computes positions"
        )


def position_limit(config: Any, scaling: Mapping[str, Any] | None) -> int | None:
    """Return the longest text, in tokens, that a language model's positions are meant for."""
    positions: int | None = getattr(config, _MAX_POSITIONS_KEY, None)
    if positions and scaling and scaling["rope_type"] in _ROPE_TYPES_WITH_UNSCALED_LENGTH:
        return int(positions * scaling["factor"])
    return positions


def has_length_dependent_scaling(config: Any) -> bool:
    """Whether transformers would scale this model's positions by the text's length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parts = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    kinds = [str(part.get("rope_type", "")) for part in parts]
    return any(kind == "longrope" or "dynamic" in kind for kind in kinds)


def llama3_frequency_divisors(config: Any) -> torch.Tensor:
    """Return the divisor of each rotary frequency under a transformers config's Llama 3 scaling."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    exponents = torch.arange(len(frequencies), dtype=torch.float32) / len(frequencies)
    return 1.0 / (config.rope_parameters["rope_theta"] ** exponents) / frequencies


def fix_rotary_frequencies(module: nn.Module, seq_len: int) -> None:
    """Fix every rotary embedding's frequencies to those for ``seq_len`` tokens."""
    layers: Any = module.modules()
    for rotary in layers:
        kinds = getattr(rotary, "rope_type", None)
        by_layer: dict[str | None, str] = kinds if isinstance(kinds, dict) else {None: str(kinds)}
        for layer, kind in by_layer.items():
            if kind != "longrope" and "dynamic" not in kind:
                continue
            device = next(rotary.buffers()).device
            last_BT = torch.tensor([[seq_len - 1]], device=device)
            options = {} if layer is None else {"layer_type": layer}
            rotary(torch.zeros((), device=device), last_BT, **options)
            by_layer[layer] = _DEFAULT_ROPE_TYPE
        if isinstance(kinds, str) and by_layer[None] != kinds:
            rotary.rope_type = by_layer[None]
