"""The model card (README.md) of an export, and the configuration of its training."""

import json
from collections.abc import Iterator
from pathlib import Path

import yaml

from hpc_tune import __version__
from hpc_tune.checkpoint.base_name import find_base_name
from hpc_tune.checkpoint.state import Evals, RunState
from hpc_tune.checkpoint.store import read_state
from hpc_tune.config.data import DataConfig
from hpc_tune.data.files import as_list
from hpc_tune.rundir.energy import read_energy as read_energy
from hpc_tune.safe_yaml import load_yaml

CARD, CONFIG = "README.md", "training_config.yaml"
_CAUSAL_CLASS = "AutoModelForCausalLM"

_USAGE = {
    "adapter": """from peft import PeftModel
from transformers import {auto}

model = PeftModel.from_pretrained({auto}.from_pretrained("the base model"), "this folder")""",
    "per-expert": """from vllm import LLM
from vllm.lora.request import LoRARequest

model = LLM("the base model", enable_lora=True)
model.generate("a prompt", lora_request=LoRARequest("tuned", 1, "this folder"))""",
    "merged": """from transformers import {auto}

model = {auto}.from_pretrained("this folder")""",
    "gguf": """from transformers import {auto}

# or: llama-cli -m model.gguf
model = {auto}.from_pretrained("this folder", gguf_file="model.gguf")""",
}
_LIBRARY = {"adapter": "peft", "per-expert": "vllm", "merged": "transformers", "gguf": "gguf"}
_UNKNOWN_LICENSE = {"license": "unknown"}


def write_card(checkpoint: Path, base: Path, out: Path, kind: str, whole: bool = True) -> None:
    """Write the card and the configuration of ``checkpoint`` into the folder ``out``.

    ``kind`` is ``"adapter"``, ``"per-expert"``, ``"merged"`` or ``"gguf"``; ``base`` is the
    directory of the base model. ``whole``: it is loaded with all parts of the base, not with its
    language model alone.

    Raises:
        CheckpointError: if the checkpoint's state cannot be used. OSError: if the file system
        refuses.
    """
    state = RunState.from_json(read_state(checkpoint), str(checkpoint))
    config, evals = state.run_config(str(checkpoint)), Evals.from_json(state.evals)
    tune, optim, run = config.tune, config.optim, config.run
    warmup = optim.num_warmup_steps(state.total_steps)
    rows = {"base model": find_base_name(base).name, "method": str(tune.method)}
    if tune.method != "full":
        targets = tune.targets if isinstance(tune.targets, str) else ", ".join(tune.targets)
        patterns = "".join(
            f", {name} {value}"
            for name in ("rank_pattern", "alpha_pattern")
            if (value := getattr(tune, name))
        )
        scaled = ", scaled by alpha / sqrt(rank)" if tune.rslora else ""
        rows["adapter"] = f"rank {tune.rank}, alpha {tune.alpha:g}{scaled}, on {targets}{patterns}"
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
    # Of a checkpoint that lies in its run directory.
    energy = read_energy(checkpoint.absolute().parent.parent)
    if energy is not None and energy.joules is not None:
        rows["energy of training"] = f"{energy.words}; up to step {energy.step}"
    title = f"# {run.name or Path(run.dir).absolute().name}"
    auto = _auto_class(base / "config.json") if whole else _CAUSAL_CLASS
    about = f"{title}\n\n{run.notes}" if run.notes else title
    card = _card(about, base, [tune.method, *run.tags], rows, kind, auto)
    (out / CARD).write_text(card, encoding="utf-8")
    text = yaml.safe_dump(config.model_dump(), sort_keys=False, allow_unicode=True)
    (out / CONFIG).write_text(text, encoding="utf-8")


def _card(
    about: str, base: Path, tags: list[str], rows: dict[str, str], kind: str, auto: str
) -> str:
    head = {
        "base_model": find_base_name(base).name,
        **_read_license(base),
        "library_name": _LIBRARY[kind],
        "pipeline_tag": "text-generation",
        "tags": ["hpc_tune", *tags],
    }
    origin = "A LoRA-type adapter of" if kind in ("adapter", "per-expert") else "Tuned from"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n{about}\n\n"
        f"{origin} {rows['base model']}, made with hpc_tune {__version__}. What the base model's "
        f"licence and card say holds here too.\n\n"
        f"| | |\n|---|---|\n{table}\n\nAll settings: [{CONFIG}]({CONFIG}).\n\n"
        f"```python\n{_USAGE[kind].format(auto=auto)}\n```\n"
    )


def _describe_data(data: DataConfig) -> Iterator[str]:
    """Yield the names of the files, and in a mixture how much of each is learned."""
    for source in data.sources or []:
        share = f"epochs {source.epochs}" if source.epochs else f"weight {source.weight:g}"
        yield f"{source.label} ({share})"
    yield from (Path(path).name for path in as_list(data.path or []))


def _read_license(base: Path) -> dict[str, str]:
    card = base / CARD
    if not card.is_file():
        return _UNKNOWN_LICENSE
    parts = card.read_text(encoding="utf-8", errors="replace").split("---\n", 2)
    try:
        head = load_yaml(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except ValueError:
        head = None
    named = head.items() if isinstance(head, dict) else ()
    found = {key: str(value) for key, value in named if "license" in str(key) and value is not None}
    return found or _UNKNOWN_LICENSE


def _auto_class(config: Path) -> str:
    """Return transformers' class for a whole model: its own, where it has parts for images."""
    if not config.is_file():
        return _CAUSAL_CLASS
    named = json.loads(config.read_text(encoding="utf-8")).get("architectures")
    first = str(named[0]) if isinstance(named, list) and named else ""
    return first if first.endswith("ForConditionalGeneration") else _CAUSAL_CLASS
