"""The model card (README.md) of an export, and the configuration of its training."""

import json
from pathlib import Path

import yaml

from hpc_tune import __version__
from hpc_tune.checkpoint.state import Evals, RunState
from hpc_tune.checkpoint.store import read_state
from hpc_tune.config.schema import BatchConfig, DataConfig, OptimConfig, TrainConfig, TuneConfig
from hpc_tune.data.files import as_list
from hpc_tune.safe_yaml import load_yaml

CARD, CONFIG = "README.md", "training_config.yaml"
_CAUSAL = "AutoModelForCausalLM"

_USE = {
    "adapter": """from peft import PeftModel
from transformers import {auto}

model = PeftModel.from_pretrained({auto}.from_pretrained("the base model"), "this folder")""",
    "merged": """from transformers import {auto}

model = {auto}.from_pretrained("this folder")""",
    "gguf": """from transformers import {auto}

# or: llama-cli -m model.gguf
model = {auto}.from_pretrained("this folder", gguf_file="model.gguf")""",
}
_LIBRARY = {"adapter": "peft", "merged": "transformers", "gguf": "gguf"}
_UNKNOWN_LICENSE = {"license": "unknown"}


def write_card(checkpoint: Path, base: Path, out: Path, kind: str, whole: bool = True) -> None:
    """Write the card and the configuration of ``checkpoint`` into the folder ``out``.

    ``kind`` is ``"adapter"``, ``"merged"`` or ``"gguf"``; ``base`` is the base model's directory.
    ``whole``: it is loaded with all parts of the base, not with its language model alone.

    Raises:
        CheckpointError: if the checkpoint's state cannot be used. OSError: if the file system
        refuses.
    """
    state = RunState.from_json(read_state(checkpoint), str(checkpoint))
    config = state.run_config(str(checkpoint))
    auto = _class_of(base / "config.json") if whole else _CAUSAL
    base_name = base.resolve().name
    head = {
        "base_model": base_name,
        **_license_of(base),
        "library_name": _LIBRARY[kind],
        "pipeline_tag": "text-generation",
        "tags": ["hpc_tune", config.tune.method, *config.run.tags],
    }
    sections = (config.tune, config.data, config.batch, config.optim, config.train)
    rows = {"base model": base_name, **_rows(state, *sections)}
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    name = config.run.name or Path(config.run.dir).absolute().name
    card = (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {name}\n\n"
        f"{'A LoRA-type adapter of' if kind == 'adapter' else 'Tuned from'} {base_name}, made with "
        f"hpc_tune {__version__}. What the base model's licence and card say holds here too.\n\n"
        f"{config.run.notes + chr(10) * 2 if config.run.notes else ''}"
        f"| | |\n|---|---|\n{table}\n\nAll settings: [{CONFIG}]({CONFIG}).\n\n"
        f"```python\n{_USE[kind].format(auto=auto)}\n```\n"
    )
    (out / CARD).write_text(card, encoding="utf-8")
    text = yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)
    (out / CONFIG).write_text(text, encoding="utf-8")


def _license_of(base: Path) -> dict[str, str]:
    """Return what the head of the base model's card says of its licence."""
    card = base / CARD
    if not card.is_file():
        return _UNKNOWN_LICENSE
    parts = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    try:
        head = load_yaml(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except ValueError:
        head = None
    found = {k: str(v) for k, v in head.items() if "license" in k} if isinstance(head, dict) else {}
    return found or _UNKNOWN_LICENSE


def _class_of(config: Path) -> str:
    """Return transformers' class for a whole model: its own, where it has parts for images."""
    if not config.is_file():
        return _CAUSAL
    named = json.loads(config.read_text(encoding="utf-8")).get("architectures") or [_CAUSAL]
    return str(named[0]) if named[0].endswith("ForConditionalGeneration") else _CAUSAL


def _rows(
    state: RunState,
    tune: TuneConfig,
    data: DataConfig,
    batch: BatchConfig,
    optim: OptimConfig,
    train: TrainConfig,
) -> dict[str, str]:
    """Return the table of a card: how the model was trained, and its held-out loss."""
    warmup = optim.num_warmup_steps(state.total_steps)
    rows = {"method": str(tune.method)}
    if tune.method != "full":
        targets = tune.targets if isinstance(tune.targets, str) else ", ".join(tune.targets)
        rows["adapter"] = f"rank {tune.rank}, alpha {tune.alpha:g}, on {targets}"
    rows |= {
        "data": ", ".join(Path(path).name for path in as_list(data.path)),
        "optimizer steps": f"{state.step} of {state.total_steps}",
        "batch": f"{batch.global_size} rows of {data.seq_len} tokens",
        "learning rate": f"{optim.peak_lr:g}, {optim.schedule}, {warmup} warm-up steps",
        "seed": str(train.seed),
    }
    evals = Evals.from_json(state.evals)
    if evals.first is not None and evals.last is not None:
        (first_step, first), (last_step, last) = evals.first, evals.last
        rows["held-out loss"] = f"{first:.4f} (step {first_step}) → {last:.4f} (step {last_step})"
        if evals.best is not None and evals.best[0] != last_step:
            rows["lowest held-out loss"] = f"{evals.best[1]:.4f} (step {evals.best[0]})"
    return rows
