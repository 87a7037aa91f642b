"""The table of benchmarks/gpu/cost.md: tools/gpu_cost.py for each shape and method.

    python tools/gpu_cost_page.py [--card h100] [--only qlora] > cost.json
    python tools/gpu_cost_page.py --page before.json after.json

The first form counts (minutes), the second prints two of its results beside each other.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_COMPILE_SETTING = "train.compile=true"
# 70B: eight ranks shard the weights and recompute. 30B-A3B: experts are spread over eight too.
_ARGUMENTS_70B = ("llama3-70b", "parallel.shard=8", "parallel.recompute=full")
_ARGUMENTS_30B = ("qwen3-30b-a3b", "parallel.shard=8", "parallel.expert=8")
CASES = {
    "8B lora": ("llama3-8b",),
    "8B lora, compiled": ("llama3-8b", _COMPILE_SETTING),
    "8B qlora": ("llama3-8b", "tune.method=qlora"),
    "8B qlora, compiled": ("llama3-8b", "tune.method=qlora", _COMPILE_SETTING),
    "8B dora": ("llama3-8b", "tune.method=dora"),
    "8B dora, compiled": ("llama3-8b", "tune.method=dora", _COMPILE_SETTING),
    "8B lora, dropout 0.05": ("llama3-8b", "tune.dropout=0.05"),
    "8B lora, float8, compiled": ("llama3-8b", "train.float8=true", _COMPILE_SETTING),
    "8B lora, base fp8": ("llama3-8b", "tune.base_dtype=fp8"),
    "8B lora, base fp8, compiled": ("llama3-8b", "tune.base_dtype=fp8", _COMPILE_SETTING),
    "8B full": ("llama3-8b", "tune.method=full"),
    "8B full, compiled": ("llama3-8b", "tune.method=full", _COMPILE_SETTING),
    "70B lora, shard 8": _ARGUMENTS_70B,
    "70B lora, shard 8, compiled": (*_ARGUMENTS_70B, _COMPILE_SETTING),
    "70B qlora, shard 8": (*_ARGUMENTS_70B, "tune.method=qlora"),
    "70B lora, base fp8, shard 8": (*_ARGUMENTS_70B, "tune.base_dtype=fp8"),
    "70B dora, shard 8": (*_ARGUMENTS_70B, "tune.method=dora"),
    "70B lora, dropout 0.05, shard 8": (*_ARGUMENTS_70B, "tune.dropout=0.05"),
    "70B lora, float8, shard 8, compiled": (*_ARGUMENTS_70B, "train.float8=true", _COMPILE_SETTING),
    "70B full, shard 8": (*_ARGUMENTS_70B, "tune.method=full"),
    "30B-A3B lora, expert 8": _ARGUMENTS_30B,
    "30B-A3B qlora, expert 8": (*_ARGUMENTS_30B, "tune.method=qlora"),
    "30B-A3B dora, expert 8": (*_ARGUMENTS_30B, "tune.method=dora"),
    "30B-A3B lora, dropout 0.05, expert 8": (*_ARGUMENTS_30B, "tune.dropout=0.05"),
    "30B-A3B full, expert 8": (*_ARGUMENTS_30B, "tune.method=full"),
}
_GROUPS = {
    "products": ("base products",),
    "adapters": ("adapters", "casts", "dequantization"),
    "attention": ("attention",),
    "element-wise": ("norms", "rotary", "gated product", "sums", "experts' rows"),
    "loss": ("loss",),
    "rest": ("embedding", "update", "other", "copies of gathered weights"),
}


def main() -> None:
    """Count, or print the page's tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--card", default="h100")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--page", nargs="+", type=Path, metavar="JSON")
    given = parser.parse_args()
    if given.page:
        print(page([json.loads(path.read_text(encoding="utf-8")) for path in given.page]))
        return
    found = {}
    for name, words in CASES.items():
        if given.only not in name:
            continue
        command = [sys.executable, "tools/gpu_cost.py", *words, "--json", "--card", given.card]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        else:
            found[name] = json.loads(done.stdout)
    print(json.dumps(found))


def page(results: list[dict[str, Any]]) -> str:
    """Return the tables in Markdown: microseconds per token, the last result's by kind of work."""
    columns = (*_GROUPS, "exposed", "host", "all", "tokens/s", "KiB kept")
    lines = [
        f"| {' | '.join(['', *columns, *['all before'] * (len(results) > 1)])} |",
        f"|---|{'--:|' * (len(columns) + (len(results) > 1))}",
    ]
    for name, cost in results[-1].items():
        us = cost["us"]
        cells = [f"{sum(us.get(kind, 0) for kind in kinds):.1f}" for kinds in _GROUPS.values()]
        cells += [f"{cost['exposed_us']:.1f}", f"{max(cost['host_us'], 0):.1f}"]
        total = cost["total_us"]
        # What a compiled model keeps was not counted.
        kept = "" if "compiled" in name else f"{cost['kept_bytes'] / 1024:,.0f}"
        cells += [f"**{total:.1f}**", f"{1e6 / total:,.0f}", kept]
        if len(results) > 1:
            before = results[0].get(name)
            cells.append(f"{before['total_us']:.1f}" if before else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
