"""Which layers the model of a config has, to see whether its adapters find theirs.

model.path is a directory here -> the names of its weights, without reading one
              not here          -> None: nobody knows yet, and plan checks it later
"""

import json
import re
from pathlib import Path
from typing import Any

from hpc_tune.convert.outcomes import ForeignConfig, Mapped, Outcome, Unsupported

# Families whose modules have names of their own, by model_type of config.json.
_GPT_NEOX = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
_LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PHI3 = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
_LAYERS = {
    **dict.fromkeys(("gpt_neox", "bloom", "falcon"), _GPT_NEOX),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "olmo2"), _LLAMA),
    "phi3": _PHI3,
    "gpt2": ("c_attn", "c_proj", "c_fc"),
}
# torchtune's builders of models whose layers it splits, and Hugging Face's files do not.
_FUSED_BUILDERS = ("phi3", "phi4")
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_STACK = re.compile(r"(?:[a-z_]+\.)*experts\.(gate_up|down)_proj")
_OUTPUT_HEAD = {"lm_head"}  # files leave out one that is tied to the embedding
_LARGEST_HEADER = 64 << 20  # bytes; one of more is damaged


def convert_targets(names: list[str], model_key: str, theirs: ForeignConfig) -> Outcome:
    """Return what becomes of the names of layers that get adapters, for the model of a config."""
    layers = read_layer_names(Path(str(theirs.get(model_key, ""))).expanduser())
    unknown = [] if layers is None else [name for name in names if name not in layers]
    if not unknown or layers is None:
        return Mapped({"tune.targets": names})
    is_one = len(unknown) == 1
    return Unsupported(
        f"{theirs.get(model_key)} has no {'layer' if is_one else 'layers'} {', '.join(unknown)}; "
        f"set tune.targets to some of {', '.join(sorted(layers))}, or leave it out for all linear "
        "layers",
        to_do=True,
    )


def are_expert_stacks(parameters: Any) -> bool:
    """Return whether peft's target_parameters are both stacks of the experts of all layers."""
    names = parameters if isinstance(parameters, list) else [parameters]
    found = [_STACK.fullmatch(str(name)) for name in names]
    return all(found) and {match[1] for match in found if match} == {"gate_up", "down"}


def add_experts(outcome: Outcome, rank: Any) -> Outcome:
    """Return targets with routed experts among them; peft gives each expert the whole rank."""
    if not isinstance(outcome, Mapped):
        return outcome
    names = outcome.settings["tune.targets"]
    every = [*([names] if isinstance(names, str) else names), "experts"]
    settings = {"tune.targets": every, "tune.expert_rank": rank}
    return Mapped(settings, "the rank of each expert, as there")


def fuse_targets(names: list[str], builder: str) -> Outcome | None:
    """Return the targets for a builder of torchtune whose layers are joined in Hugging Face files.

    None: the builder is of no such model.
    """
    if not any(f".{family}." in builder for family in _FUSED_BUILDERS):
        return None
    ours = list(dict.fromkeys(_FUSED.get(name, name) for name in names))
    joined = {_FUSED[name] for name in names if name in _FUSED}
    others = [part for part, whole in _FUSED.items() if whole in joined and part not in names]
    if not joined:
        return Mapped({"tune.targets": ours})
    remark = f"{' and '.join(sorted(joined))} of the Hugging Face model: one adapter for what has "
    remark += "several there"
    remark += f", and so also for {' and '.join(others)}" if others else ""
    return Mapped({"tune.targets": ours}, remark, to_do=True)


def read_layer_names(directory: Path) -> set[str] | None:
    """Return what the linear layers of a model directory are called in their blocks.

    None: there is no such directory, or its files do not say it.
    """
    if not directory.is_dir():
        return None
    names = set(_OUTPUT_HEAD)
    for weight in _read_weight_names(directory):
        *_, module, last = f"..{weight}".split(".")
        if last == "weight" and "norm" not in module and "embed" not in module:
            names.add(module)
    if names == _OUTPUT_HEAD:
        model_type = _read_json(directory / "config.json").get("model_type")
        names |= set(_LAYERS.get(str(model_type), ()))
    return None if names == _OUTPUT_HEAD else names


def _read_weight_names(directory: Path) -> list[str]:
    index = _read_json(directory / "model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict) and index:
        return list(map(str, index))
    try:
        with (directory / "model.safetensors").open("rb") as file:
            num_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(num_bytes)) if num_bytes <= _LARGEST_HEADER else {}
    except (OSError, ValueError, RecursionError):
        return []
    return list(header) if isinstance(header, dict) else []


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
