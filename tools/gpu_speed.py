"""A part of tools/gpu_check.py: LoRA of Llama 3 8B at 4,096 tokens, random weights, one row.

Reports what tools/gpu_cost.py counted for this card beside the measurement, if it did.
"""

import json
from pathlib import Path

import torch
from gpu_shapes import Shapes, config_of
from gpu_task import Task

from hpc_tune.errors import ConfigError
from hpc_tune.model.float8 import check_float8

SHAPE = "shape:llama3-8b"
COMPILE_SETTING = ("train.compile=true",)
COUNTS_FOLDER = Path(__file__).resolve().parents[1] / "benchmarks" / "gpu"
VARIANTS = {
    "bf16": ("train.compile=false",),
    "bf16, compiled": COMPILE_SETTING,
    "float8, compiled": (*COMPILE_SETTING, "train.float8=true"),
    "base fp8, compiled": (*COMPILE_SETTING, "tune.base_dtype=fp8"),
}
CASES = {  # names in gpu_cost_page.py
    "bf16": "8B lora",
    "bf16, compiled": "8B lora, compiled",
    "float8, compiled": "8B lora, float8, compiled",
    "base fp8, compiled": "8B lora, base fp8, compiled",
}


def main() -> None:
    """Measure each variant, and report the planned peak beside it."""
    task = Task.of_arguments()
    seq_len, num_steps = (4096, 10) if task.uses_gpu else (64, 3)
    model, shapes, possible = config_of(task, SHAPE), Shapes(task), {}
    for name, more in VARIANTS.items():
        if why := _find_skip_reason(task, more):
            task.tell(name, "skipped", why)
        else:
            possible[name] = shapes.settings(model, seq_len, *more)
    plans = {name: shapes.plan(settings) for name, settings in possible.items()}
    counted = _read_counts(torch.cuda.get_device_name()) if task.uses_gpu else {}
    for name, settings in possible.items():
        shapes.measure(name, settings, num_steps, plans[name], counted.get(name))
    shapes.close()


def _read_counts(card: str) -> dict[str, float]:
    """Return the tokens/s that were counted for a card, by name of the variant."""
    file = next((f for f in COUNTS_FOLDER.glob("cost-*.json") if f.stem[5:].upper() in card), None)
    if file is None:
        return {}
    rows = json.loads(file.read_text(encoding="utf-8"))
    return {n: 1e6 / rows[case]["total_us"] for n, case in CASES.items() if case in rows}


def _find_skip_reason(task: Task, more: tuple[str, ...]) -> str:
    if "train.float8=true" in more:
        try:
            check_float8(torch.device(task.device))
        except ConfigError as error:
            return str(error)
    if COMPILE_SETTING[0] in more and not task.uses_gpu:
        return "on a CPU compiling takes longer than all else here; the part losses does it"
    return ""


if __name__ == "__main__":
    main()
