"""Compare training of a mixture (attention, experts, or all of it) with stock transformers.

    python tools/bench_experts.py [--dtype fp32 bf16] [--kind attention experts full] [--rounds 7]

A qwen3_moe of 4 layers and random weights is trained on the CPU in two processes: by stock
transformers with peft (attention by its own kernel, experts by grouped_mm), and as hpc_tune
computes it. They take turns at forward and backward passes of a full row. Full fine-tuning keeps
weights in fp32, and for bf16 computes under autocast. Each round has other tokens, as in training,
so that experts get different numbers of them; ours caches as many kernels as a rank does, stock as
many as torch does by default. Printed are medians of tokens per CPU second of one thread, the
ratios of the rounds (median, lowest, highest), the bytes that autograd keeps for the backward pass,
weights included, and in how many rounds other processes took more than a tenth of the cores.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bench_watch import DISTURBED_SHARE, read_others, share_between
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_tune.config.tune import TuneConfig
from hpc_tune.data.packed_rows import make_batch
from hpc_tune.engine.base import autocast
from hpc_tune.model.adapters import keep_peft_target_names, make_lora_config, resolve_targets
from hpc_tune.model.build import DTYPES, build
from hpc_tune.model.layers import find_blocks, use_faster_layers
from hpc_tune.model.load import allocate, load_weights
from hpc_tune.world.affinity import ONEDNN_CACHE_SIZE

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TUNES: dict[str, dict[str, Any]] = {
    "attention": {"targets": ATTENTION},
    "experts": {"targets": [*ATTENTION, "experts"]},
    "full": {"method": "full"},
}
CPU = torch.device("cpu")
OUR_VARIABLES = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(ONEDNN_CACHE_SIZE),
    "LRU_CACHE_CAPACITY": "1",
}
VOCABULARY = 1024
WARM_UP = 3  # rounds that do not count
Step = Callable[[Any], torch.Tensor]  # the loss of a row of tokens


@dataclass(frozen=True)
class ExpertTimings:
    """For each round: tokens per CPU second of both, and the share of the cores others took."""

    stock: list[float]
    ours: list[float]
    others: list[float]
    kept_bytes: tuple[int, int]  # bytes

    def row(self) -> str:
        """Return the medians, and the ratios of the rounds, as cells of a table."""
        ratios = [mine / theirs for mine, theirs in zip(self.ours, self.stock, strict=True)]
        theirs, mine, ratio = map(statistics.median, (self.stock, self.ours, ratios))
        mib = " | ".join(f"{kept / 2**20:.0f} MiB" for kept in self.kept_bytes)
        disturbed = sum(share > DISTURBED_SHARE for share in self.others)
        return (
            f"{theirs:.0f} | {mine:.0f} | {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | "
            f"{mib} | {disturbed} of {len(ratios)} |"
        )


def main() -> int:
    """Measure each dtype and each kind of adapters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--kind", nargs="+", choices=TUNES, default=[*TUNES])
    numbers = {"rounds": 7, "experts": 16, "chosen": 2, "hidden": 512, "tokens": 512}
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    print("| trained | dtype | stock tokens/s | ours | ratio | kept: stock | ours | disturbed |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model(
            "qwen3_moe",
            vocab_size=VOCABULARY,
            hidden_size=asked.hidden,
            moe_intermediate_size=asked.hidden // 2,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=asked.hidden // 8,
            num_experts=asked.experts,
            num_experts_per_tok=asked.chosen,
            norm_topk_prob=True,
        )
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        for dtype in asked.dtype:
            for kind in asked.kind:
                found = _measure(Path(folder), dtype, kind, asked.tokens, asked.rounds)
                print(f"| {kind} | {dtype} | {found.row()}", flush=True)
    return 0


def _measure(folder: Path, dtype: str, kind: str, num_tokens: int, rounds: int) -> ExpertTimings:
    """Run rounds of both in turn, in reversed order each time."""
    sides = {who: _start(who, folder, dtype, kind, num_tokens) for who in ("stock", "ours")}
    kept_bytes = {who: side.recv() for who, side in sides.items()}
    found = ExpertTimings([], [], [], (kept_bytes["stock"], kept_bytes["ours"]))
    for number in range(WARM_UP + rounds):
        before = read_others()
        speeds = {}
        for who in sides if number % 2 else reversed(sides):
            sides[who].send(number)
            speeds[who] = num_tokens / sides[who].recv()
        after = read_others()
        if number >= WARM_UP:
            found.stock.append(speeds["stock"])
            found.ours.append(speeds["ours"])
            found.others.append(share_between([before, after], before.time, after.time))
    for side in sides.values():
        side.send(None)
    return found


def _start(who: str, folder: Path, dtype: str, kind: str, num_tokens: int) -> Connection:
    """Start a process for one side; it sends its kept bytes, then seconds for each round number."""
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(theirs, who, folder, dtype, kind, num_tokens), daemon=True
    )
    before = dict(os.environ)
    # Libraries read it when they are loaded.
    os.environ.update(OUR_VARIABLES if who == "ours" else {})
    process.start()
    os.environ.clear()
    os.environ.update(before)
    theirs.close()
    return mine


def _serve(
    pipe: Connection, who: str, folder: Path, dtype: str, kind: str, num_tokens: int
) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    tune = TuneConfig(**{"method": "lora", "rank": 16, "alpha": 32, **TUNES[kind]})
    step = (_make_our_step if who == "ours" else _make_stock_step)(folder, DTYPES[dtype], tune)
    pipe.send(_count_kept_bytes(step, _row(0, num_tokens)))
    while (number := pipe.recv()) is not None:
        row = _row(number, num_tokens)
        began_s = time.process_time()
        step(row).backward()
        pipe.send(time.process_time() - began_s)


def _row(number: int, num_tokens: int) -> Any:
    return np.random.default_rng(number).integers(0, VOCABULARY, num_tokens)


def _make_stock_step(folder: Path, dtype: torch.dtype, tune: TuneConfig) -> Step:
    is_full = tune.method == "full"
    stock: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32 if is_full else dtype
    )
    if not is_full:
        with keep_peft_target_names():
            stock = get_peft_model(stock, make_lora_config(tune, resolve_targets(stock, tune)))

    def loss(tokens: Any) -> torch.Tensor:
        ids = torch.from_numpy(tokens).view(1, -1)
        with autocast(CPU, dtype if is_full and dtype != torch.float32 else None):
            of_row: torch.Tensor = stock(input_ids=ids, labels=ids, use_cache=False).loss
        return of_row

    return loss


def _make_our_step(folder: Path, dtype: torch.dtype, tune: TuneConfig) -> Step:
    built = build(folder, dtype, tune, 0)
    use_faster_layers(built.module, list(find_blocks(built.module)), False, dtype, CPU)
    allocate(built.module, CPU)
    load_weights(built)

    def loss(tokens: Any) -> torch.Tensor:
        learned = np.ones(len(tokens), dtype=bool)
        with autocast(CPU, dtype if tune.method == "full" and dtype != torch.float32 else None):
            of_row: torch.Tensor = built.module(make_batch([[(tokens, learned)]], len(tokens), 0))
        return of_row

    return loss


def _count_kept_bytes(step: Step, row: Any) -> int:
    """Return the bytes that autograd keeps for the backward pass, weights included."""
    kept_bytes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = step(row)
    loss.backward()
    return sum(kept_bytes.values())


if __name__ == "__main__":
    raise SystemExit(main())
