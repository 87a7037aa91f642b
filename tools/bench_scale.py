"""tools/bench.py scale: how far more ranks pay."""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench_watch import WARM, launch, steps_of, watched

WORTH = 0.5  # more ranks are advised while each added one brings half of its share


def run_scale(asked: argparse.Namespace) -> dict[str, Any]:
    """Run a configuration on more and more ranks; print the table and how far they pay."""
    found: dict[int, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in sorted(set(asked.ranks)):
            out = Path(folder) / str(ranks)
            out.mkdir()
            config = ["--config", str(Path(asked.config).resolve())] if asked.config else []
            words = [f"run.dir={out / 'run'}", f"train.max_steps={asked.steps}", *asked.settings]
            command = [*launch(ranks), sys.executable, "-m", "hpc_tune", *config, *words]
            watched(command, out, "cpu")
            steps = steps_of(out / "run")[WARM:]
            step_s = sum(step["step_s"] for step in steps)
            comm_share = sum(step["comm_s"] for step in steps) / step_s
            found[ranks] = (sum(step["tokens"] for step in steps) / step_s, comm_share)
            print(f"{ranks} ranks: {found[ranks][0]:.0f} tokens/s", flush=True)
    print()
    for line in scale_table(found):
        print(line)
    return {"settings": asked.settings, "ranks": {str(n): one for n, one in found.items()}}


def scale_table(found: Mapping[int, tuple[float, float]]) -> Iterator[str]:
    """Yield the lines for (tokens per second, communication share) by number of ranks."""
    few = min(found)
    one = found[few][0] / few
    yield f"{'ranks':>6}{'tokens/s':>12}{'speed-up':>10}{'efficiency':>12}{'messages':>10}"
    for ranks, (tokens_per_s, share) in found.items():
        ratio = tokens_per_s / one
        yield (f"{ranks:>6}{tokens_per_s:>12.0f}{ratio:>9.2f}x{ratio / ranks:>12.0%}{share:>10.0%}")
    best, more = few, few
    for before, ranks in zip(list(found), list(found)[1:], strict=False):
        gain = found[ranks][0] / found[before][0] - 1
        if gain < WORTH * (ranks / before - 1):
            more = ranks
            break
        best = more = ranks
    if more == best:
        yield f"up to {best} ranks each added one pays: try more"
        return
    gain = found[more][0] / found[best][0]
    why = "messages" if found[more][1] > 0.2 else "shared cores, or too few rows per rank"
    yield f"use {best}: {more} ranks are {gain:.2f} x as fast ({why})"
