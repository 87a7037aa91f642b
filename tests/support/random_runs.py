"""Draws random runs: a model, rows, settings, and the starts that a run is split into.

    draw(seed)         always the same run for a seed
    draw_mixed(seed)   a run with several sources, preferences, experts, or all of these
    write(draw)        the model and the rows of a run as files

Everything is small, so that a run of a few steps takes a second: what is tested is how features
combine, not how large they are.
"""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from hpc_tune.model.builtin import write_tiny_model

VOCABULARY = 320  # of builtin:tiny's tokenizer: a token per byte
# What published models of each family set besides their sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 24, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 24, "query_pre_attn_scalar": 16},
    "olmo": {"clip_qkv": 8.0},
    "olmo2": {},
    "phi3": {"pad_token_id": 0},
    "granite": {"embedding_multiplier": 2.0, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    "cohere": {"logit_scale": 0.5},
    "glm": {"pad_token_id": 0},
    "starcoder2": {"sliding_window": None},
    "stablelm": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "gpt2": {},
    "gpt_neox": {"rotary_pct": 0.5},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **{"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
        "shared_expert_intermediate_size": 48,
    },
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
OF_EXPERTS = {
    2: (("shard=2", "expert=2"), ("shard=2", "expert=2", "context=2")),
    4: (("shard=4", "expert=2"), ("shard=4", "expert=4"), ("shard=4", "expert=4", "context=2")),
}
WITHOUT_KV_HEADS = ("gpt2", "gpt_neox")
LAYOUTS: dict[int, tuple[tuple[str, ...], ...]] = {
    1: ((),),
    2: (
        ("replicate=2",),
        ("shard=2", "reshard=block"),
        ("shard=2", "reshard=step", "blocks_per_unit=2"),
        ("shard=2", "offload_params=cpu"),
        ("zero_stage=1",),
        ("zero_stage=2",),
        ("zero_stage=2", "offload_optimizer=cpu"),
        ("zero_stage=3",),
        ("replicate=2", "context=2"),
        ("shard=2", "context=2"),
        ("zero_stage=3", "context=2"),
        ("tensor=2",),
        ("pipeline=2",),
        ("pipeline=2", "stages_per_rank=2"),
    ),
    3: (("replicate=3",), ("shard=3",), ("zero_stage=3",)),
    4: (
        *(("replicate=2", "shard=2"), ("tensor=2", "shard=2"), ("pipeline=2", "shard=2")),
        *(("shard=4", "context=2"), ("pipeline=2", "shard=2", "context=2")),
        *(("replicate=4", "context=4"), ("tensor=2", "shard=2", "context=2")),  # with 2 heads too
    ),
}
WORDS = ("a", "the", "run", "rows", "naïve", "東京", "é", "🙂", "42", "x()\n\treturn", "stops.")


@dataclass(frozen=True)
class Start:
    """One start of a run: its ranks, its own settings, and after how many steps it stops."""

    num_ranks: int
    overrides: tuple[str, ...]
    stop_after: int | None


@dataclass(frozen=True)
class Draw:
    """A run: its starts, and what they have in common."""

    seed: int
    family: str
    model: dict[str, Any]
    rows: tuple[dict[str, Any], ...]
    held_out: tuple[dict[str, Any], ...]
    overrides: tuple[str, ...]
    starts: tuple[Start, ...]
    sources: tuple[tuple[dict[str, Any], ...], ...] = ()  # in place of ``rows``

    def __str__(self) -> str:
        """Describe everything that was drawn except the rows."""
        starts = "; ".join(
            f"{s.num_ranks} ranks {' '.join(s.overrides)} stop {s.stop_after}" for s in self.starts
        )
        return (
            f"seed {self.seed}: {self.family} {self.model}, {len(self.rows)} rows, "
            f"{len(self.held_out)} held out, {' '.join(self.overrides)} | {starts}"
        )


def draw(seed: int) -> Draw:
    """Return the run of a seed."""
    rng = random.Random(seed)
    family = rng.choice(list(FAMILIES))
    model = _model(rng, family)
    seq_len = rng.choice((64, 96, 160))
    kind = rng.choice(("text", "prompt", "messages"))
    rows = tuple(_row(rng, kind, seq_len) for _ in range(rng.randint(6, 30)))
    held_out = tuple(_row(rng, kind, seq_len) for _ in range(rng.choice((0, 3, 5, 9))))
    global_size = rng.randint(1, 8)
    steps = rng.randint(4, 9)
    overrides = [
        f"data.seq_len={seq_len}",
        f"data.packing={rng.choice(('true', 'false'))}",
        f"data.loss_on={rng.choice(('answers', 'all'))}",
        f"batch.global_size={global_size}",
        f"train.seed={rng.randint(0, 99)}",
        f"optim.schedule={rng.choice(('constant', 'linear', 'cosine'))}",
        f"optim.warmup_steps={rng.choice((0, 1, 3))}",
        f"optim.weight_decay={rng.choice((0, 0.1))}",
        f"optim.clip_norm={rng.choice((0, 0.3, 1))}",
        f"checkpoint.every_steps={rng.choice((1, 2, 3, 100))}",
        f"checkpoint.keep={rng.choice((1, 3))}",
        f"checkpoint.keep_best={rng.choice(('true', 'false'))}",
        f"checkpoint.background={rng.choice(('true', 'false'))}",
        *_method(rng, family),
    ]
    if rng.random() < 0.6:
        overrides.append(f"train.max_steps={steps}")
    else:
        # In terms of the shortest possible epoch, so that a run does not get long.
        overrides.append(f"train.epochs={rng.choice((0.5, 1, 1.5)) if len(rows) > 8 else 2}")
    if held_out:
        overrides.append(f"train.eval_every_steps={rng.choice((1, 2, 4))}")
        if rng.random() < 0.5:
            overrides.append(f"train.eval_rows={rng.randint(1, 6)}")
    elif rng.random() < 0.5:
        overrides += ["data.eval_fraction=0.3", f"train.eval_every_steps={rng.choice((1, 3))}"]
    return Draw(
        seed, family, model, rows, held_out, tuple(overrides), _starts(rng, steps, overrides)
    )


def draw_mixed(seed: int) -> Draw:
    """Return the run of a seed, with features that ``draw`` leaves out."""
    rng = random.Random(f"mixed {seed}")
    has_experts, num_sources = rng.random() < 0.6, rng.choice((1, 2, 2, 3))
    family = rng.choice(list(EXPERTS) if has_experts else ["llama", "qwen3", "gemma2", "olmo2"])
    model = _model(rng, family)
    objective = rng.choice(("sft", "dpo", "ipo", "simpo", "orpo", "kto", "kto"))
    seq_len = rng.choice((160, 256))
    sources = tuple(
        tuple(_preference(rng, objective, seq_len) for _ in range(rng.randint(8, 24)))
        for _ in range(num_sources)
    )
    steps = rng.randint(4, 8)
    overrides = [
        f"data.seq_len={seq_len}",
        f"data.packing={rng.choice(('true', 'false'))}",
        f"batch.global_size={rng.randint(2, 6)}",
        f"train.seed={rng.randint(0, 99)}",
        f"train.max_steps={steps}",
        f"optim.schedule={rng.choice(('constant', 'cosine'))}",
        f"optim.clip_norm={rng.choice((0, 1))}",
        f"checkpoint.every_steps={rng.choice((1, 2, 100))}",
        f"checkpoint.background={rng.choice(('true', 'false'))}",
        f"tune.objective={objective}",
        *_mixed_method(rng, has_experts),
    ]
    if rng.random() < 0.6:
        overrides.append(f"train.eval_every_steps={rng.choice((1, 3))}")
    return Draw(
        *(seed, family, model, (), (), tuple(overrides)),
        starts=_starts(rng, steps, False, OF_EXPERTS if has_experts else {}),
        sources=sources,
    )


def _mixed_method(rng: random.Random, has_experts: bool) -> list[str]:
    router = ["tune.router_aux_loss=0.01"] if has_experts and rng.random() < 0.4 else []
    if rng.random() < 0.35:
        return ["tune.method=full", "optim.lr=3e-4", *router]
    targets = "[q_proj,v_proj,experts]" if has_experts and rng.random() < 0.6 else "[q_proj,v_proj]"
    return ["tune.method=lora", "tune.rank=4", "optim.lr=3e-3", f"tune.targets={targets}", *router]


def _preference(rng: random.Random, objective: str, seq_len: int) -> dict[str, Any]:
    def text(most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, max(1, most // 6))))

    prompt = {"prompt": text(seq_len // 5)}
    if objective == "sft":
        return {**prompt, "completion": text(seq_len // 3)}
    if objective == "kto":
        return {**prompt, "completion": text(seq_len // 3), "label": rng.random() < 0.5}
    return {**prompt, "chosen": text(seq_len // 4), "rejected": text(seq_len // 4) + "!"}


def _model(rng: random.Random, family: str) -> dict[str, Any]:
    num_heads = rng.choice((2, 4))
    hidden = num_heads * 16
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": rng.random() < 0.5,
        "bos_token_id": 257,
        "eos_token_id": 258,
        "pad_token_id": 256,
        "max_position_embeddings": 512,
    }
    if family == "gpt2":
        sizes |= {"n_embd": hidden, "n_head": num_heads, "n_layer": rng.randint(2, 4)}
        return sizes | {"n_positions": 512}
    sizes |= {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden + 8,
        "num_hidden_layers": rng.randint(2, 4),
        "num_attention_heads": num_heads,
    }
    if family not in WITHOUT_KV_HEADS:
        sizes["num_key_value_heads"] = rng.choice((num_heads, num_heads // 2))
    if family.startswith(("gemma", "glm")):
        sizes["head_dim"] = 16
    return sizes | (FAMILIES | EXPERTS)[family]


def _method(rng: random.Random, family: str) -> list[str]:
    method = rng.choice(("full", "lora", "lora", "dora"))
    if method == "full":
        return ["tune.method=full", f"optim.lr={rng.choice((1e-3, 3e-4))}"]
    rank = rng.choice((1, 4, 8, 24))
    words = [
        f"tune.method={method}",
        f"tune.rank={rank}",
        f"tune.alpha={rng.choice((rank, 2 * rank))}",
        f"tune.dropout={rng.choice((0, 0, 0.1))}",
        f"optim.lr={rng.choice((3e-3, 1e-3))}",
    ]
    if family in ("llama", "mistral", "qwen2", "qwen3") and rng.random() < 0.5:
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        chosen = rng.sample([*names, "lm_head"], rng.randint(1, 4))
        words.append(f"tune.targets=[{','.join(chosen)}]")
    return words


def _starts(
    rng: random.Random,
    steps: int,
    is_dora: bool,
    of_experts: Mapping[int, tuple[tuple[str, ...], ...]] = MappingProxyType({}),
) -> tuple[Start, ...]:
    starts = []
    for _ in range(rng.randint(1, 3)):
        num_ranks = rng.choice((1, 1, 2, 2, 2, 2, 2, 3, 4))
        axes = rng.choice(LAYOUTS[num_ranks])
        if num_ranks in of_experts and rng.random() < 0.6:
            axes = rng.choice(of_experts[num_ranks])
        while is_dora and {"zero_stage=3", "tensor=2"} & set(axes):  # the configuration refuses it
            axes = rng.choice(LAYOUTS[num_ranks])
        words = [f"parallel.{axis}" for axis in axes]
        words.append(f"parallel.recompute={rng.choice(('none', 'selective', 'full'))}")
        words.append(f"batch.micro_size={rng.choice((1, 2, 3, 8))}")
        starts.append(Start(num_ranks, tuple(words), rng.randint(1, max(1, steps - 2))))
    last = starts.pop()
    return (*starts, Start(last.num_ranks, last.overrides, None))


def _row(rng: random.Random, kind: str, seq_len: int) -> dict[str, Any]:
    """Return a row, sometimes longer than ``seq_len``, or with its answer beyond it."""

    def text(most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, max(1, most // 6))))

    size = seq_len if rng.random() < 0.8 else 2 * seq_len
    if kind == "text":
        return {"text": text(size)}
    if kind == "prompt":
        return {"prompt": text(size // 4), "completion": text(size // 2)}
    messages = [{"role": "system", "content": text(8)}] if rng.random() < 0.3 else []
    for _ in range(rng.choice((1, 1, 2, 3))):
        messages.append({"role": "user", "content": text(size // 5)})
        messages.append({"role": "assistant", "content": text(size // 4)})
    return {"messages": messages}


def write(one: Draw, folder: Path) -> list[str]:
    """Write the model and the rows of a draw; return the settings that name them."""
    model = folder / "model"
    write_tiny_model(model)
    for name in ("model.safetensors", "config.json"):
        (model / name).unlink()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(one.seed)
        config = AutoConfig.for_model(one.family, **one.model)
        stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in stock.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=0.03)
        disable_progress_bar()
        stock.save_pretrained(model)
    words = [f"model.path={model}"]
    if one.sources:
        return [*words, *_written_sources(one, folder)]
    words += _written(one.rows, folder / "rows.jsonl", "data.path")
    if one.held_out:
        return words + _written(one.held_out, folder / "held-out.jsonl", "data.eval_path")
    return [*words, "data.eval_path=null"]


def _written_sources(one: Draw, folder: Path) -> list[str]:
    files = [folder / f"rows-{number}.jsonl" for number in range(len(one.sources))]
    for rows, file in zip(one.sources, files, strict=True):
        _written(rows, file, "path")
    is_measured = any(word.startswith("train.eval_every") for word in one.overrides)
    held_out = f"data.eval_path={files[0] if is_measured else 'null'}"
    if len(files) == 1:
        return [f"data.path={files[0]}", held_out]
    share = 1 / len(files)
    named = ", ".join(f"{{path: {f}, weight: {share}, max_epochs: 99}}" for f in files)
    return [f"data.sources=[{named}]", held_out]


def _written(rows: tuple[dict[str, Any], ...], file: Path, key: str) -> list[str]:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return [f"{key}={file}"]
