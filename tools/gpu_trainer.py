"""A part of tools/gpu_check.py: measures what speed does, with transformers' Trainer and peft."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_task import Task

from hpc_tune.model.builtin import TINY_CONFIG

TOOLS = Path(__file__).resolve().parent
SHAPES = TOOLS.parent / "hpc_tune" / "shapes"
NAME = "bf16, Trainer with peft"
WARM = 2  # steps whose time does not count


def main() -> int:
    """Train a few steps of random rows; report the speed, with hpc_tune's if it was measured."""
    task = Task.of_arguments()
    seq_len, steps = (4096, 10) if task.uses_gpu else (64, 4)
    model = SHAPES / "llama3-8b"
    if not task.uses_gpu:
        model = task.work / "toy"
        model.mkdir()
        (model / "config.json").write_text(
            json.dumps({"model_type": "llama", **TINY_CONFIG}), encoding="utf-8"
        )
    vocab_size = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    draw = random.Random(0)
    rows = [[draw.randrange(vocab_size) for _ in range(seq_len)] for _ in range(steps)]
    tokens, settings = task.work / "tokens.json", task.work / "settings.json"
    tokens.write_text(json.dumps([[row, row] for row in rows]), encoding="utf-8")
    said = {"model": str(model), "random": True, "tokens": str(tokens), "mode": "ddp"}
    said |= {"dtype": "bf16", "rows": 1, "steps": steps, "save_at": None, "cpu": not task.uses_gpu}
    settings.write_text(json.dumps(said), encoding="utf-8")
    program = [sys.executable, str(TOOLS / "bench_peer.py"), str(settings), str(task.work)]
    code = subprocess.run(program, cwd=task.work).returncode
    if code != 0:
        task.tell(NAME, "failed", f"the Trainer ended with {code}")
        return code
    lines = (task.work / "0.jsonl").read_text(encoding="utf-8").splitlines()
    first, last = (json.loads(lines[number]) for number in (WARM - 1, -1))
    tokens_per_s = (last["tokens"] - first["tokens"]) / (last["time"] - first["time"])
    found = {"tokens_per_s": tokens_per_s, "peak_bytes": last["device_bytes"]}
    task.tell(NAME, **found, **_compare_with_native(task, tokens_per_s))
    return 0


def _compare_with_native(task: Task, tokens_per_s: float) -> dict[str, Any]:
    """Return the MFU, and hpc_tune's speed over the Trainer's, from results of the part speed."""
    check = json.loads((task.figures.parent / "gpu-check.json").read_text(encoding="utf-8"))
    told = [one for part in check["parts"] if part["name"] == "speed" for one in part["figures"]]
    ours = next((one for one in told if one["name"] == "bf16" and "tokens_per_s" in one), None)
    if ours is None:
        return {}
    flops, peak = ours["flops_per_token"], ours["peak_flops"]
    mfu = tokens_per_s * flops / peak if peak else None
    return {"mfu": mfu, "hpc_tune_over_it": ours["tokens_per_s"] / tokens_per_s}


if __name__ == "__main__":
    sys.exit(main())
