"""Count tokens that choose other experts in bf16 than in stock transformers' forward pass.

    python tools/expert_flips.py [--families mixtral ...] [--tokens 2048]

The same weights and documents are run by stock transformers one document at a time (the reference),
in packed rows, and with eager attention; and by hpc_tune with new adapters, one document per row
and packed. A token flips in a layer if it chooses another set of experts there. The last two
columns count flips of stock and of ours, packed, against stock in fp32. Random weights, 4 layers,
512 wide; the routers' weights have the standard deviation of all others, or ten times as much.
"""

import argparse
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_tune.config.tune import TuneConfig
from hpc_tune.data.packed_rows import make_batch
from hpc_tune.model.balance import find_router_modules
from hpc_tune.model.build import build
from hpc_tune.model.layers import find_blocks, use_faster_layers
from hpc_tune.model.load import allocate, load_weights

SHAPE = {
    **{"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64},
    **{"moe_intermediate_size": 256, "num_experts_per_tok": 4, "pad_token_id": 0},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 16, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 32, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 32, "sliding_window": 64},
    "deepseek_v3": {
        **{"n_routed_experts": 32, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
        **{"q_lora_rank": 128, "kv_lora_rank": 64, "num_key_value_heads": 8, "head_dim": 32},
        **{"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64},
    },
}
LENGTHS = (96, 160, 57, 199)  # tokens of a row's documents
ExpertChoices = dict[str, torch.Tensor]


def main() -> None:
    """Print a row of the table for each family and deviation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--tokens", type=int, default=2048)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    print(
        "| family | routers | choices | stock packed | stock eager | ours | ours packed |", end=""
    )
    print(" fp32: stock | fp32: ours |")
    print("|---|---|---|---|---|---|---|---|---|")
    for family in asked.families:
        for spread in (1, 10):
            with tempfile.TemporaryDirectory() as folder:
                _write(family, spread, Path(folder))
                print(f"| {family} | x{spread} | {_row(Path(folder), asked.tokens)} |", flush=True)


def _write(family: str, spread: int, folder: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for router in find_router_modules(model).values():
            for parameter in router.parameters():
                parameter.normal_(std=0.02 * spread)
    model.save_pretrained(folder)


def _row(folder: Path, num_tokens: int) -> str:
    """Return the number of choices, and how many of them flip in each comparison."""
    rows = -(-num_tokens // sum(LENGTHS))
    generator = torch.Generator().manual_seed(1)
    documents = [
        [torch.randint(3, 1024, (n,), generator=generator) for n in LENGTHS] for _ in range(rows)
    ]
    alone = [[one] for row in documents for one in row]
    stocks: list[Any] = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=by).eval()
        for dtype, by in ((torch.bfloat16, None), (torch.bfloat16, "eager"), (torch.float32, None))
    ]
    built = build(folder, torch.bfloat16, TuneConfig(), 0)
    cpu = torch.device("cpu")
    use_faster_layers(built.module, list(find_blocks(built.module)), False, torch.bfloat16, cpu)
    allocate(built.module, cpu)
    load_weights(built)

    def by_stock(model: Any, row: list[torch.Tensor]) -> None:
        positions = torch.cat([torch.arange(len(one)) for one in row])
        model(
            input_ids=torch.cat(row).unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
        )

    def by_ours(model: Any, row: list[torch.Tensor]) -> None:
        given = [(one.numpy(), np.ones(len(one), dtype=bool)) for one in row]
        model(make_batch([given], sum(map(len, row)), 0))

    stock, eager, exact = (_record_choices(model, by_stock, alone) for model in stocks)
    packed = _record_choices(built.module, by_ours, documents)
    choices = sum(map(len, stock.values()))
    flips = (
        _flips(_record_choices(stocks[0], by_stock, documents), stock),
        _flips(eager, stock),
        _flips(_record_choices(built.module, by_ours, alone), stock),
        _flips(packed, stock),
        _flips(stock, exact),
        _flips(packed, exact),
    )
    return " | ".join([f"{choices:,}", *(f"{count} ({count / choices:.2%})" for count in flips)])


def _flips(chosen: ExpertChoices, other_choices: ExpertChoices) -> int:
    pairs = zip(chosen.values(), other_choices.values(), strict=True)
    return sum(int((one != other).any(1).sum()) for one, other in pairs)


@torch.no_grad()
def _record_choices(
    model: torch.nn.Module, run: Callable[[Any, Any], None], rows: list[list[torch.Tensor]]
) -> ExpertChoices:
    """Return the experts that each token of ``rows`` chooses, sorted, by router."""
    with _watch_routers(model) as seen:
        for row in rows:
            run(model, row)
            for found in seen.values():
                found[-1] = found[-1][: sum(map(len, row))]  # the rest is padding
    return {path: torch.cat(found) for path, found in seen.items()}


@contextmanager
def _watch_routers(model: torch.nn.Module) -> Iterator[dict[str, list[torch.Tensor]]]:
    seen: dict[str, list[torch.Tensor]] = {path: [] for path in find_router_modules(model)}
    handles = [
        router.register_forward_hook(
            lambda _module, _inputs, out, path=path: seen[path].append(out[2].sort(1).values)
        )
        for path, router in find_router_modules(model).items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


if __name__ == "__main__":
    main()
