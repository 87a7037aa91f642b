"""tools/bench.py shape: a model of random weights, its speed, its peak and the planned one."""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_watch import RUN_LIMIT_S, WARM, ceiling_of, launch, run_watched

from hpc_tune.memory.host import find_host_limit

TOOLS = Path(__file__).resolve().parent
METHOD = ["tune.method=lora", "tune.rank=16", "tune.alpha=32"]


@dataclass(frozen=True)
class ShapeSpeed:
    """What ``table`` shows; ``planned_bytes`` and ``device_bytes`` are None without a GPU."""

    tokens_per_s: float
    limit: float
    host_bytes: int
    device_bytes: int | None
    planned_bytes: int | None


def run_shape(args: argparse.Namespace) -> dict[str, Any]:
    """Run the steps on ``args.ranks`` ranks, plan them, print both; return all figures."""
    is_shape = args.model.startswith("shape:")
    words = [
        f"model.path={args.model if is_shape else Path(args.model).resolve()}",
        f"data.seq_len={args.seq_len}",
        f"batch.micro_size={args.rows}",
        f"batch.global_size={args.rows * args.ranks}",
        *METHOD,
        *args.settings,
    ]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        program = [sys.executable, str(TOOLS / "bench_steps.py"), str(out), str(args.steps)]
        where = [f"run.device={args.device}", f"run.dir={Path(folder) / 'run'}"]
        command = [*launch(args.ranks), *program, *words, *where]
        seen = run_watched(command, Path(folder), "cpu")  # the allocator reports its own peak
        told: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    tokens_per_s = told["tokens"] / statistics.median(told["seconds"][WARM:])
    devices = args.ranks if args.device == "cuda" else 1  # a CPU's ceiling covers all its cores
    ceiling = devices * ceiling_of(told["dtype"], args.device)
    planned = planned_bytes(words, args.ranks, told["device_total"])
    limit = ceiling / told["flops_per_token"]
    found = ShapeSpeed(tokens_per_s, limit, seen.host_bytes, told["device_bytes"], planned)
    print(f"{args.model} on {args.ranks} x {told['device']}, {told['layout']}, {told['dtype']}")
    for line in table(found):
        print(line)
    return {"words": words, "ranks": args.ranks, **vars(found), "ceiling": ceiling, **told}


def table(found: ShapeSpeed) -> Iterator[str]:
    """Yield the lines to print for one model."""
    share = found.tokens_per_s / found.limit
    yield f"tokens/s     {found.tokens_per_s:.0f}, {share:.0%} of what matmuls would allow"
    yield f"host         {found.host_bytes / 1e9:.2f} GB"
    if found.device_bytes is not None and found.planned_bytes is not None:
        off = found.planned_bytes / found.device_bytes - 1
        yield f"device       {found.device_bytes / 1e9:.2f} GB at the allocator's peak"
        yield f"planned      {found.planned_bytes / 1e9:.2f} GB, {off:+.1%}"


def planned_bytes(words: list[str], ranks: int, device_total: int | None) -> int | None:
    """Return the traced peak of one GPU's allocator; None on CPUs (no weight files)."""
    if device_total is None:
        return None
    plan = [sys.executable, "-m", "hpc_tune", "plan", "--json", "--gpus-per-node", str(ranks)]
    plan += ["--device-memory", str(device_total)]
    plan += ["--host-memory", str(find_host_limit().num_bytes), *words]
    done = subprocess.run(plan, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    if not done.stdout:
        raise SystemExit(f"{' '.join(plan)}\n{done.stderr}")
    peak_bytes: int = json.loads(done.stdout)["trace"]["peak_bytes"]
    return peak_bytes
