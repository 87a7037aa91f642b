"""adapter_config.json, for peft of today and of years ago, and for servers that read it."""

import json
from pathlib import Path
from typing import Any

from hpc_tune.checkpoint.base_name import find_base_name

# What peft has written since its first versions. A field of later ones is an error in those before.
_BASE_FIELDS = (
    *("peft_type", "task_type", "base_model_name_or_path", "inference_mode", "r", "lora_alpha"),
    *("lora_dropout", "target_modules", "modules_to_save", "bias", "fan_in_fan_out"),
    "init_lora_weights",
)


def write_adapter_config(config: Any, base: Path, out: Path) -> None:
    """Write peft's ``config`` of an adapter of ``base`` into the folder ``out``.

    Newer fields are left out where they have their default, which older versions do as well. Whole
    numbers are written as such: Ollama cannot read a lora_alpha of 32.0.
    """
    found = find_base_name(base)
    config.base_model_name_or_path, config.revision = found.place, found.revision
    config.inference_mode = True
    default = type(config)().to_dict()
    fields = {
        key: _to_json_types(value)
        for key, value in sorted(config.to_dict().items())
        if key in _BASE_FIELDS or value != default[key]
    }
    (out / "adapter_config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")


def _to_json_types(value: Any) -> Any:
    """Return sets as lists, and numbers without a fraction as whole ones."""
    if isinstance(value, dict):
        return {key: _to_json_types(item) for key, item in value.items()}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return sorted(value) if isinstance(value, set) else value
