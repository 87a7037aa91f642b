"""What an export contains besides tensors: the model card (README.md), the training configuration,
adapter_config.json, the base's name, and the chat template.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hpc_tune import __version__
from hpc_tune.checkpoint.state import Evals, RunState
from hpc_tune.checkpoint.store import read_state
from hpc_tune.config.data import DataConfig
from hpc_tune.config.rope import ORIGINAL_LENGTH_KEY, format_rope_scaling
from hpc_tune.data.files import as_list
from hpc_tune.errors import DataError
from hpc_tune.hub_cache import CACHE_INTERNAL_NAME, find_name_and_revision
from hpc_tune.log import log
from hpc_tune.model.config_json import read_config_json
from hpc_tune.model.language import read_config
from hpc_tune.model.rotary import length_independent_scaling
from hpc_tune.model.tokenizer import (
    TOKENIZER_CONFIG,
    fix_exported_tokenizer_class,
    load_tokenizer,
    may_have_own_class,
    read_processor_template,
)
from hpc_tune.rundir.facts import read_energy
from hpc_tune.safe_yaml import load_yaml

# -- The name of a base model, for users of an export on other machines.
#
# a folder of the hub's cache (models--OWNER--NAME/snapshots/REVISION) -> OWNER/NAME, REVISION
# any other folder                                                     -> its own name


@dataclass(frozen=True)
class BaseModelName:
    """``name``: for people; ``location``: what loads the model, a path or a hub name.

    ``revision``: the revision on the hub, if ``location`` is a hub name.
    """

    name: str
    location: str
    revision: str | None = None


def find_base_model_name(base: Path) -> BaseModelName:
    """Return the name of the base model in the folder ``base``, resolving links into the cache."""
    path = Path(os.path.abspath(base))
    for location in (path, path.resolve()):
        if (cache_entry := find_name_and_revision(location)) is not None:
            name, revision = cache_entry
            return BaseModelName(name, name, revision)
    parts = (part for part in reversed(path.parts) if not CACHE_INTERNAL_NAME.fullmatch(part))
    return BaseModelName(next(parts), str(path))


# -- The model card, and the configuration of the training.


CARD_FILE, CONFIG_FILE = "README.md", "training_config.yaml"
_CAUSAL_CLASS = "AutoModelForCausalLM"

_USAGE = {
    "adapter": """from peft import PeftModel
from transformers import {imports}

{setup}base = {auto}.from_pretrained("the base model"{given})
model = PeftModel.from_pretrained(base, "this folder")""",
    "per-expert": """from vllm import LLM
from vllm.lora.request import LoRARequest

model = LLM("the base model", enable_lora=True{given})
model.generate("a prompt", lora_request=LoRARequest("tuned", 1, "this folder"))""",
    "merged": """from transformers import {auto}

model = {auto}.from_pretrained("this folder")""",
    "gguf": """from transformers import {imports}

{setup}# or: llama-cli -m model.gguf
model = {auto}.from_pretrained("this folder", gguf_file="model.gguf"{given})""",
}
_LIBRARY = {"adapter": "peft", "per-expert": "vllm", "merged": "transformers", "gguf": "gguf"}
_UNKNOWN_LICENSE = {"license": "unknown"}


def read_rope_scaling(checkpoint: Path, base: Path) -> Mapping[str, Any] | None:
    """Return the rope scaling with which other tools reproduce the positions used in training.

    It is model.rope_scaling, made independent of the text's length as in training; None if unset.

    Raises:
        CheckpointError: if the checkpoint's state cannot be used.
    """
    state = RunState.from_json(read_state(checkpoint), str(checkpoint))
    config = state.run_config(str(checkpoint))
    if (scaling := config.model.rope_scaling) is None:
        return None
    # Earlier versions did not save scaled_for; it only differs from data.seq_len for pairs.
    return length_independent_scaling(
        read_config(base), scaling, state.scaled_for or config.data.seq_len
    )


def write_model_card(
    checkpoint: Path, base: Path, out: Path, kind: str, is_whole_model: bool = True
) -> None:
    """Write the card and the configuration of ``checkpoint`` into the folder ``out``.

    ``kind`` is ``"adapter"``, ``"per-expert"``, ``"merged"`` or ``"gguf"``; ``base`` is the
    directory of the base model. ``is_whole_model``: the export is loaded with all parts of the
    base, not only with its language model.

    Raises:
        CheckpointError: if the checkpoint's state cannot be used. OSError: if the file system
        refuses.
    """
    state = RunState.from_json(read_state(checkpoint), str(checkpoint))
    config, evals = state.run_config(str(checkpoint)), Evals.from_json(state.evals)
    tune, optim, run = config.tune, config.optim, config.run
    warmup = optim.num_warmup_steps(state.total_steps)
    rows = {"base model": find_base_model_name(base).name, "method": str(tune.method)}
    if tune.method != "full":
        targets = tune.targets if isinstance(tune.targets, str) else ", ".join(tune.targets)
        patterns = "".join(
            f", {name} {value}"
            for name in ("rank_pattern", "alpha_pattern")
            if (value := getattr(tune, name))
        )
        rslora = ", scaled by alpha / sqrt(rank)" if tune.rslora else ""
        rows["adapter"] = f"rank {tune.rank}, alpha {tune.alpha:g}{rslora}, on {targets}{patterns}"
    if state.experts:
        rows["experts"] = state.experts
    rows |= {
        "data": ", ".join(_describe_data(config.data)),
        "optimizer steps": f"{state.step} of {state.total_steps}",
        "batch": f"{config.batch.global_size} rows of {config.data.seq_len} tokens",
        "learning rate": f"{optim.peak_lr:g}, {optim.schedule}, {warmup} warm-up steps",
        "seed": str(config.train.seed),
    }
    if evals.first is not None and evals.last is not None:
        (first_step, first), (last_step, last) = evals.first, evals.last
        rows["held-out loss"] = f"{first:.4f} (step {first_step}) → {last:.4f} (step {last_step})"
        if evals.best is not None and evals.best[0] != last_step:
            rows["lowest held-out loss"] = f"{evals.best[1]:.4f} (step {evals.best[0]})"
    # Only known if the checkpoint is still in its run directory.
    energy = read_energy(checkpoint.absolute().parent.parent)
    if energy is not None and energy.joules is not None:
        rows["energy of training"] = f"{energy.full_text}; up to step {energy.step}"
    title = f"# {run.name or Path(run.dir).absolute().name}"
    auto = _auto_class(base) if is_whole_model else _CAUSAL_CLASS
    scaling = read_rope_scaling(checkpoint, base)
    if scaling is not None:
        rows["rotary positions"] = _describe_rope_scaling(config.model.rope_scaling or {}, scaling)
        if kind in ("adapter", "per-expert"):
            _warn_of_rope_scaling(scaling)
    summary = f"{title}\n\n{run.notes}" if run.notes else title
    card = _format_card(
        summary, base, [tune.method, *run.tags], rows, kind, _usage_code(kind, auto, base, scaling)
    )
    (out / CARD_FILE).write_text(card, encoding="utf-8")
    text = yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)
    (out / CONFIG_FILE).write_text(text, encoding="utf-8")


def _format_card(
    summary: str, base: Path, tags: list[str], rows: dict[str, str], kind: str, usage: str
) -> str:
    head = {
        "base_model": find_base_model_name(base).name,
        **_read_license(base),
        "library_name": _LIBRARY[kind],
        "pipeline_tag": "text-generation",
        "tags": ["hpc_tune", *tags],
    }
    origin = "A LoRA-type adapter of" if kind in ("adapter", "per-expert") else "Tuned from"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n{summary}\n\n"
        f"{origin} {rows['base model']}, made with hpc_tune {__version__}. The base model's "
        f"license and card apply here too.\n\n"
        f"| | |\n|---|---|\n{table}\n\nAll settings: [{CONFIG_FILE}]({CONFIG_FILE}).\n\n"
        f"```python\n{usage}\n```\n"
    )


def _describe_rope_scaling(trained_scaling: Mapping[str, Any], scaling: Mapping[str, Any]) -> str:
    """Return model.rope_scaling in words, and the scaling with which others get the same."""
    text, scaling_text = (
        ", ".join(f"{k} {v}" for k, v in fields.items()) for fields in (trained_scaling, scaling)
    )
    return (
        text
        if scaling == trained_scaling
        else f"{text}; the same for texts of all lengths: {scaling_text}"
    )


def _warn_of_rope_scaling(scaling: Mapping[str, Any]) -> None:
    log.warning(
        "the adapter's files cannot store the RoPE scaling that it was trained with: load the base "
        "model with %s (see %s in the adapter's folder), or export --to merged, which stores it",
        *(format_rope_scaling(scaling, "rope_parameters"), CARD_FILE),
    )


def _usage_code(kind: str, auto: str, base: Path, scaling: Mapping[str, Any] | None) -> str:
    """Return code that loads an export; it sets scaled positions that no file contains.

    An adapter contains none of its base's configuration; a merged model has a config.json, and only
    llama.cpp reads the scaling from a GGUF file.
    """
    imports, setup, extra_arguments = auto, "", ""
    if scaling is not None:
        text = read_config(base, scaling).get_text_config()
        fields = {"rope_parameters": text.rope_parameters}
        lengths = ("max_position_embeddings", ORIGINAL_LENGTH_KEY)
        fields |= {k: v for k in lengths if isinstance(v := getattr(text, k, None), int)}
        if kind == "per-expert":
            extra_arguments = f", hf_overrides={fields!r}"
        else:
            imports, extra_arguments = f"AutoConfig, {auto}", ", config=config"
            location = (
                '"this folder", gguf_file="model.gguf"' if kind == "gguf" else '"the base model"'
            )
            setup = f"config = AutoConfig.from_pretrained({location})\n" + "".join(
                f"config.get_text_config().{key} = {value!r}\n" for key, value in fields.items()
            )
    return _USAGE[kind].format(auto=auto, imports=imports, setup=setup, given=extra_arguments)


def _describe_data(data: DataConfig) -> Iterator[str]:
    """Yield the names of the files, or the sources of a mixture with their weight or epochs."""
    for source in data.sources or []:
        share = f"epochs {source.epochs}" if source.epochs else f"weight {source.weight:g}"
        yield f"{source.label} ({share})"
    yield from (Path(path).name for path in as_list(data.path or []))


def _read_license(base: Path) -> dict[str, str]:
    card = base / CARD_FILE
    if not card.is_file():
        return _UNKNOWN_LICENSE
    parts = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    try:
        header = load_yaml(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except ValueError:
        header = None
    items = header.items() if isinstance(header, dict) else ()
    fields = {k: str(v) for k, v in items if "license" in str(k) and v is not None}
    return fields or _UNKNOWN_LICENSE


def _auto_class(base: Path) -> str:
    """Return the transformers class that loads a whole model: its own class if it is multimodal."""
    if not (base / "config.json").is_file():
        return _CAUSAL_CLASS
    architectures = read_config_json(base).get("architectures")
    first = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    return first if first.endswith("ForConditionalGeneration") else _CAUSAL_CLASS


# -- adapter_config.json, for current and old versions of peft, and for servers that read it.


# Fields that peft has had since its first versions. Old versions refuse fields added later.
_BASE_FIELDS = (
    *("peft_type", "task_type", "base_model_name_or_path", "inference_mode", "r", "lora_alpha"),
    *("lora_dropout", "target_modules", "modules_to_save", "bias", "fan_in_fan_out"),
    "init_lora_weights",
)


def write_adapter_config(config: Any, base: Path, out: Path) -> None:
    """Write peft's ``config`` of an adapter of ``base`` into the folder ``out``.

    Newer fields are left out if they have their default, which is how older versions behave. Whole
    numbers are written without a fraction: Ollama cannot read a lora_alpha of 32.0.
    """
    base_name = find_base_model_name(base)
    config.base_model_name_or_path, config.revision = base_name.location, base_name.revision
    config.inference_mode = True
    default = type(config)().to_dict()
    fields = {
        key: _to_json_types(value)
        for key, value in sorted(config.to_dict().items())
        if key in _BASE_FIELDS or value != default[key]
    }
    (out / "adapter_config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")


def _to_json_types(value: Any) -> Any:
    """Turn sets into lists, and floats without a fraction into integers."""
    if isinstance(value, dict):
        return {key: _to_json_types(item) for key, item in value.items()}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return sorted(value) if isinstance(value, set) else value


# -- Chat templates and the tokenizer's class in an export: its users get what training used.
#
# tokenizer_config.json            one template, or several by name, in older transformers
# chat_template.jinja              the one named default
# additional_chat_templates/*.jinja    the others


TEMPLATE_FILE, OTHER_TEMPLATES_FOLDER = "chat_template.jinja", "additional_chat_templates"


def write_chat_templates(template: str | None, base: Path, out: Path) -> None:
    """Put the chat templates into an export that already has the tokenizer files of ``base``.

    ``template`` is the one used in training, if it is not the base's: it replaces all others. If
    transformers would load a tokenizer.json differently, another tokenizer_class is named.
    """
    if template is not None:
        _write_chat_template(template, out)
    else:
        _copy_missing_templates(base, out)
    if may_have_own_class(out):
        try:
            fix_exported_tokenizer_class(load_tokenizer(base), out)
        except DataError:
            return  # a tokenizer that cannot be loaded was not used in training


def _write_chat_template(template: str, out: Path) -> None:
    """Write one template, also to the place where older transformers look for it."""
    (out / TEMPLATE_FILE).write_text(template, encoding="utf-8")
    file = out / TOKENIZER_CONFIG
    if file.is_file():
        settings = json.loads(file.read_text(encoding="utf-8")) | {"chat_template": template}
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")


def _copy_missing_templates(base: Path, out: Path) -> None:
    """Write the base's templates that are missing in the copied files."""
    for file in sorted((base / OTHER_TEMPLATES_FOLDER).glob("*.jinja")):
        (out / OTHER_TEMPLATES_FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(file, out / OTHER_TEMPLATES_FOLDER / file.name)
    config_file = out / TOKENIZER_CONFIG
    settings = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
    if (out / TEMPLATE_FILE).exists() or settings.get("chat_template"):
        return
    if entry := read_processor_template(base):
        templates = entry[1] if isinstance(entry[1], dict) else {"default": entry[1]}
        for name, text in templates.items():
            file = (
                out / TEMPLATE_FILE
                if name == "default"
                else out / OTHER_TEMPLATES_FOLDER / f"{name}.jinja"
            )
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
