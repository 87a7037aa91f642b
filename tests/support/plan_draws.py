"""Random small runs on CPUs whose memory is first planned and then measured.

python -m tests.support.plan_draws SEED [SEED ...]

Each seed is a model (family, shape, dtype of its files), a method, rows, recompute, and ranks.
"""

import json
import random
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpc_tune.model.builtin import write_tiny_model
from tests.support.ranks import HANG_S, mpirun, rank_environment, run_ranks
from tests.support.training import events

MIB = 1 << 20
STEPS = 3
COMMON = [
    f"train.max_steps={STEPS}",
    f"checkpoint.every_steps={STEPS}",
    "optim.lr=1e-4",
    "run.tensorboard=false",
    "run.report=false",
    "run.threads=1",
]
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma", "olmo2", "gpt_neox")
LAYOUTS = ("replicate", "shard", "tensor", "pipeline", "zero")
PHASES = ("load", "first step", "steady")


@dataclass(frozen=True)
class Draw:
    """A run: the config.json of its model, the dtype of the files, settings, and ranks."""

    seed: int
    family: str
    shape: dict[str, Any]
    stored: str
    settings: tuple[str, ...]
    ranks: int
    long_documents: bool

    def __str__(self) -> str:
        shape, words = self.shape, [word.split(".")[1] for word in self.settings]
        size = f"{shape['num_hidden_layers']} x {shape['hidden_size']}, V {shape['vocab_size']}"
        documents = "long" if self.long_documents else "short"
        model = f"{self.family} {size}, {self.stored} files"
        return f"{self.seed}: {model}, {documents} documents, {' '.join(words)}"


def draw(seed: int) -> Draw:
    """Draw a run; the same for the same seed."""
    chance = random.Random(seed)
    family = chance.choice(FAMILIES)
    heads = chance.choice((4, 8))
    hidden = heads * chance.choice((32, 64))
    shape = {
        "hidden_size": hidden,
        "intermediate_size": hidden * chance.choice((2, 3, 4)),
        "num_hidden_layers": chance.choice((2, 4, 6, 8, 14)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // chance.choice((1, 2, 4)),
        "head_dim": hidden // heads,
        "vocab_size": chance.choice((512, 2048, 8192, 32000, 49152)),
        "max_position_embeddings": 2048,
        "tie_word_embeddings": chance.random() < 0.5,
    }
    ranks = chance.choice((1, 1, 2))
    layout = chance.choice(LAYOUTS) if ranks == 2 else ""
    rows, seq_len = chance.choice((1, 2, 4, 8)), chance.choice((128, 256, 512, 1024))
    rows = min(rows, 2048 // seq_len)
    micro = rows * ranks * chance.choice((1, 2))
    settings = [
        f"tune.method={chance.choice(('lora', 'lora', 'full'))}",
        f"model.dtype={chance.choice(('auto', 'fp32', 'bf16'))}",
        f"data.seq_len={seq_len}",
        f"batch.micro_size={rows}",
        f"batch.global_size={micro}",
        f"parallel.recompute={chance.choice(('none', 'selective', 'full'))}",
    ]
    if layout == "zero":
        settings.append(f"parallel.zero_stage={chance.choice((1, 2, 3))}")
    elif layout:
        settings.append(f"parallel.{layout}=2")
    stored = chance.choice(("float32", "bfloat16"))
    return Draw(seed, family, shape, stored, tuple(settings), ranks, chance.random() < 0.5)


def write_model(drawn: Draw, folder: Path) -> None:
    """Write the model with random weights, and the tokenizer of builtin:tiny."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_tiny_model(folder)
    tokens = json.loads((folder / "config.json").read_text())
    ids = {name: tokens[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    config = AutoConfig.for_model(drawn.family, **drawn.shape, **ids)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, drawn.stored))
    model.save_pretrained(folder)


def write_long_documents(file: Path) -> None:
    """Write lines of 1,500 letters: documents as long as most rows."""
    chance = random.Random(1)
    lines = ("".join(chance.choices("abcdefgh ", k=1500)) for _ in range(200))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def plan_and_measure(drawn: Draw, folder: Path) -> dict[str, tuple[int, int]]:
    """Return the bytes of the fullest rank in each phase, as (planned, measured)."""
    write_model(drawn, folder / "model")
    settings = [*COMMON, *drawn.settings, f"model.path={folder / 'model'}"]
    data = "builtin:pydocs:heldout"
    if drawn.long_documents:
        data = str(folder / "long.txt")
        write_long_documents(Path(data))
    settings += [f"data.path={data}"]
    plan = [sys.executable, "-m", "hpc_tune", "plan", "--json", "--gpus-per-node", str(drawn.ranks)]
    plan += ["--device-memory", "0", "--host-memory", "24GiB", *settings]
    planned = run_ranks(plan, rank_environment(1), HANG_S)
    assert planned.returncode == 0, planned.stderr
    foreseen = {p["name"]: p["rank_bytes"] for p in json.loads(planned.stdout)["phases"]}
    argv = ["-m", "tests.support.planned_run", *settings, f"run.dir={folder / 'run'}"]
    done = mpirun(drawn.ranks, argv, timeout=HANG_S, cold=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [measured] = events(folder / "run", "memory")
    found = {phase: seen["rank_bytes"] for phase, seen in measured["phases"].items()}
    return {phase: (foreseen[phase], found[phase]) for phase in PHASES}


def table(seeds: Iterable[int]) -> dict[int, float]:
    """Print a row for each draw; return the relative error of its steady steps."""
    errors = {}
    for seed in seeds:
        drawn = draw(seed)
        with tempfile.TemporaryDirectory() as folder:
            found = plan_and_measure(drawn, Path(folder))
        figures = [
            f"{planned // MIB} / {measured // MIB} ({planned / measured - 1:+.0%})"
            for planned, measured in found.values()
        ]
        planned, measured = found["steady"]
        errors[seed] = planned / measured - 1
        print(f"| {drawn} | {' | '.join(figures)} |", flush=True)
    return errors


if __name__ == "__main__":
    table(map(int, sys.argv[1:]))
