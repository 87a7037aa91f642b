"""``model.rope_scaling``: how rotary positions are stretched to rows longer than the model's.

The keys are those of transformers' config.json. This module, without torch, checks the keys that
each kind needs; ``model/rotary.py`` checks what a model family supports.
"""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator

ORIGINAL_LENGTH_KEY = "original_max_position_embeddings"
_REQUIRED_KEYS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", ORIGINAL_LENGTH_KEY),
    "llama3": ("factor", ORIGINAL_LENGTH_KEY, "low_freq_factor", "high_freq_factor"),
    "longrope": (ORIGINAL_LENGTH_KEY, "short_factor", "long_factor"),
}
_OPTIONAL_KEYS: Mapping[str, tuple[str, ...]] = {
    "yarn": (
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": ("factor", "attention_factor"),
}
ROPE_TYPES = tuple(_REQUIRED_KEYS)
# The keys of rope_parameters that belong to a scaling (alpha: HunYuan's). The others belong to the
# model and stay if the scaling is replaced.
SCALING_KEYS = frozenset(("rope_type", "type", "alpha")).union(
    *_REQUIRED_KEYS.values(), *_OPTIONAL_KEYS.values()
)
_ORIGINAL_LENGTH_HINT = (
    f"{ORIGINAL_LENGTH_KEY}, the tokens that the model was trained with "
    "(max_position_embeddings of its config.json)"
)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) < math.inf


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_positive_int(value: Any) -> bool:
    return isinstance(value, int) and _is_positive(value)


def _is_list_of_positives(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_positive, value))


_VALUE_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "factor": (lambda v: _is_number(v) and v >= 1, "a number of 1 or more"),
    ORIGINAL_LENGTH_KEY: (_is_positive_int, "a number of tokens"),
    "short_factor": (_is_list_of_positives, "a list of numbers above 0"),
    "long_factor": (_is_list_of_positives, "a list of numbers above 0"),
    "truncate": (lambda v: isinstance(v, bool), "true or false"),
}
_POSITIVE_CHECK = (_is_positive, "a number above 0")


def _check_rope_scaling(raw_value: Any) -> dict[str, Any] | None:
    """Validate the setting, and return it with ``rope_type`` for ``type``, the key in old files."""
    if raw_value is None:
        return None
    if not isinstance(raw_value, dict):
        example = "{rope_type: linear, factor: 4}"
        raise ValueError(f"Input should be a valid dictionary, such as {example}")
    kind = str(raw_value.get("rope_type", raw_value.get("type", "")))
    if kind not in _REQUIRED_KEYS:
        problem = f"rope_type={kind} is not known" if kind else "there is no rope_type"
        raise ValueError(f"{problem}; expected one of {', '.join(ROPE_TYPES)}")
    values = {key: value for key, value in raw_value.items() if key not in ("rope_type", "type")}
    required, optional = _REQUIRED_KEYS[kind], ("rope_theta", *_OPTIONAL_KEYS.get(kind, ()))
    problems = [
        f"{kind} needs {_ORIGINAL_LENGTH_HINT if key == ORIGINAL_LENGTH_KEY else key}"
        for key in required
        if values.get(key) is None
    ]
    for key, value in values.items():
        is_right, expected = _VALUE_CHECKS.get(key, _POSITIVE_CHECK)
        if key not in (*required, *optional):
            problems.append(f"{kind} has no {key} (it has {', '.join((*required, *optional))})")
        elif value is not None and not is_right(value):
            problems.append(f"{key} is {value!r}, expected {expected}")
    if not problems:
        for low, high in (("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor")):
            if None not in (values.get(low), values.get(high)) and values[low] >= values[high]:
                problems.append(f"{high} must be above {low}")
    if problems:
        raise ValueError("; ".join(problems))
    set_values = {key: value for key, value in values.items() if value is not None}
    return {"rope_type": kind, **set_values}


RopeScaling = Annotated[dict[str, Any] | None, BeforeValidator(_check_rope_scaling)]


def suggest_rope_scaling(seq_len: int, trained_len: int) -> dict[str, Any]:
    """Return YaRN settings for rows of ``seq_len`` tokens and a model trained with fewer."""
    return {
        "rope_type": "yarn",
        "factor": -(-seq_len // trained_len),
        ORIGINAL_LENGTH_KEY: trained_len,
    }


def format_rope_scaling(value: Mapping[str, Any], name: str = "model.rope_scaling") -> str:
    """Return the setting as it is typed in a shell or in YAML."""
    pairs = ", ".join(f"{key}: {item}" for key, item in value.items())
    return f"{name}={{{pairs}}}"
