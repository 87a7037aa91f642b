"""Adapters on attention and experts of a mixture: ours beside peft's, in one process.

    python tools/bench_experts.py [--dtype fp32 bf16] [--rounds 7] [--experts 16] [--hidden 512]

A qwen3_moe of random values, 4 layers, 2 experts of a token, is trained on the CPU: stock
transformers with peft (attention by its own kernel, experts by grouped_mm), and the same model as
hpc_tune computes it, in turn, forward and backward of a row of full length. Printed are medians of
tokens per CPU second of one thread, the ratio of each round (median, least, most), the bytes that
autograd keeps for the backward pass, weights included, and in how many rounds other processes took
more than a tenth of the cores.
"""

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from bench_quiet import DISTURBED, read_others, share_between
from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_tune.config.tune import TuneConfig
from hpc_tune.data.packed_rows import make_batch
from hpc_tune.model.adapters import lora_config, names_as_they_are, targets_of
from hpc_tune.model.blocks import block_list, use_own_layers
from hpc_tune.model.build import DTYPES, build
from hpc_tune.model.load import allocate, load_weights

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS = {"attention": ATTENTION, "experts": [*ATTENTION, "experts"]}
CPU = torch.device("cpu")
Step = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Found:
    """Of each round: tokens per CPU second of both, and what share of the cores others took."""

    stock: list[float]
    ours: list[float]
    others: list[float]
    kept: tuple[int, int]  # bytes

    def row(self) -> str:
        """Return the medians, and the ratios of rounds."""
        ratios = [mine / theirs for mine, theirs in zip(self.ours, self.stock, strict=True)]
        theirs, mine, ratio = map(statistics.median, (self.stock, self.ours, ratios))
        mib = " | ".join(f"{kept / 2**20:.0f} MiB" for kept in self.kept)
        disturbed = sum(share > DISTURBED for share in self.others)
        return (
            f"{theirs:.0f} | {mine:.0f} | {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) | "
            f"{mib} | {disturbed} of {len(ratios)} |"
        )


def main() -> int:
    """Measure each dtype and each kind of adapters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    for name, value in (("rounds", 7), ("experts", 16), ("hidden", 512), ("tokens", 512)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    print("| adapters | dtype | stock tokens/s | ours | ratio | kept: stock | ours | disturbed |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model(
            "qwen3_moe",
            vocab_size=1024,
            hidden_size=asked.hidden,
            moe_intermediate_size=asked.hidden // 2,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=asked.hidden // 8,
            num_experts=asked.experts,
            num_experts_per_tok=2,
            norm_topk_prob=True,
        )
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        for dtype in asked.dtype:
            for kind in TARGETS:
                steps = _steps(Path(folder), DTYPES[dtype], kind, asked.tokens)
                found = _measured(*steps, asked.tokens, asked.rounds)
                print(f"| {kind} | {dtype} | {found.row()}", flush=True)
    return 0


def _steps(folder: Path, dtype: torch.dtype, kind: str, num_tokens: int) -> tuple[Step, Step]:
    """Return the losses of stock and ours, of the same row of tokens."""
    tune = TuneConfig(method="lora", rank=16, alpha=32, targets=TARGETS[kind])
    stock: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with names_as_they_are():
        stock = get_peft_model(stock, lora_config(tune, targets_of(stock, tune)))
    built = build(folder, dtype, tune, 0)
    use_own_layers(built.module, list(block_list(built.module)), False, dtype, CPU)
    allocate(built.module, CPU)
    load_weights(built)
    tokens = np.arange(num_tokens) * 37 % 1000
    batch = make_batch([[(tokens, np.ones(num_tokens, dtype=bool))]], num_tokens, 0)
    ids = torch.from_numpy(tokens).view(1, -1)
    return (
        lambda: stock(input_ids=ids, labels=ids, use_cache=False).loss,
        lambda: built.module(batch),
    )


def _measured(stock: Step, ours: Step, num_tokens: int, rounds: int) -> Found:
    """Do rounds of both in turn, the order reversed each time, after one that does not count."""
    found = Found([], [], [], (_kept_by(stock), _kept_by(ours)))
    for number in range(rounds + 1):
        before = read_others()
        pairs = [(stock, found.stock), (ours, found.ours)]
        for step, speeds in pairs if number % 2 else reversed(pairs):
            began_s = time.process_time()
            step().backward()
            speeds.append(num_tokens / (time.process_time() - began_s))
        after = read_others()
        found.others.append(share_between([before, after], before.time, after.time))
    for values in (found.stock, found.ours, found.others):
        del values[0]
    return found


def _kept_by(step: Step) -> int:
    """Return the bytes that autograd keeps for the backward pass, weights included."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = step()
    loss.backward()
    return sum(kept.values())


if __name__ == "__main__":
    raise SystemExit(main())
