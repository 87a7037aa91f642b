"""A part of tools/gpu_check.py: QLoRA of Llama 3 70B's decoder blocks, as many as fit.

Runs with 2 and with 8 blocks show the memory and the time of one more block, most of which is
quantizing it. From this follows how many can be measured in a last run: up to all 80.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from gpu_shapes import Shapes, config_of
from gpu_task import Task

SHAPE = "shape:llama3-70b"
FEW_BLOCKS, MORE_BLOCKS = 2, 8
MARGIN_S = 12.0  # for the end of the process, and for blocks that take longer
USED_SHARE = 0.9  # of the device


def main() -> None:
    """Measure a few blocks, then as many as fit."""
    task = Task.of_arguments()
    num_steps = 5 if task.uses_gpu else 3
    few, more = (FEW_BLOCKS, MORE_BLOCKS) if task.uses_gpu else (1, 2)
    shapes = Shapes(task)
    found = {num: told for num in (few, more) if (told := _measure(task, shapes, num, num_steps))}
    if len(found) == 2:
        total = torch.cuda.mem_get_info()[1] if task.uses_gpu else None
        room = None if total is None else int(USED_SHARE * total)
        num = find_max_blocks(found, num_steps, task.left_s() - MARGIN_S, room)
        text = (config_of(task, SHAPE) / "config.json").read_text(encoding="utf-8")
        num = min(num, json.loads(text)["num_hidden_layers"])
        if num > more:
            _measure(task, shapes, num, num_steps)
        else:
            task.tell("more blocks", "skipped", "no time or memory was left")
    shapes.close()


def _measure(task: Task, shapes: Shapes, num: int, num_steps: int) -> dict[str, Any] | None:
    model, seq_len = config_of(task, SHAPE, num), 4096 if task.uses_gpu else 64
    settings = shapes.settings(model, seq_len, "tune.method=qlora", "parallel.recompute=full")
    return shapes.measure(f"{num} blocks", settings, num_steps, shapes.plan(settings))


def find_max_blocks(
    found: Mapping[int, Mapping[str, Any]], num_steps: int, left_s: float, room_bytes: int | None
) -> int:
    """Return how many blocks can be measured in ``left_s`` and ``room_bytes``.

    ``found`` has the measurements of two numbers of blocks, for linear extrapolation.
    """
    (few, less), (more, most) = sorted(found.items())

    def of(told: Mapping[str, Any]) -> float:
        return float(told["load_s"] + told["first_step_s"] + (num_steps - 1) * told["step_s"])

    per_block_s = max((of(most) - of(less)) / (more - few), 1e-3)
    num = more + int((left_s - of(most)) / per_block_s)
    if room_bytes is not None:
        per_block = max(1, (most["peak_bytes"] - less["peak_bytes"]) // (more - few))
        num = min(num, more + (room_bytes - most["peak_bytes"]) // per_block)
    return num


if __name__ == "__main__":
    main()
