"""A part of tools/gpu_check.py: how long training stands still for a save and for MOVE_OPTIMIZER.

full fine-tuning of a random model -> a save in the background, and one that training waits for
the same model in the engine       -> its optimizer state to the host and back: seconds, bytes
"""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from bench_steps import Steps, prepare
from gpu_jobs import SMALL_SETTINGS, Job, Launch, events_of, rows_of, run_of
from gpu_task import Task

from hpc_tune.config.load import load_config
from hpc_tune.faults import Faults
from hpc_tune.memory.policy import Action
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.world.bootstrap import bootstrap, shutdown

# 0.3B values: a checkpoint of 3.7 GB.
SHAPE = {
    **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 32000},
}
FREED_SHARE = 0.9  # of the two moments
END_S = 5.0


def main() -> None:
    """Measure saves in whole runs, then MOVE_OPTIMIZER."""
    task = Task.of_arguments()
    model = task.work / "model"
    write_tiny_model(model)
    if task.uses_gpu:
        _make_larger(model)
    seq_len = 1024 if task.uses_gpu else 64
    size = (f"data.seq_len={seq_len}", "batch.global_size=4", "batch.micro_size=4")
    common = (
        *SMALL_SETTINGS,
        *size,
        f"model.path={model}",
        "tune.method=full",
        f"run.device={task.device}",
    )
    threads = () if task.uses_gpu else ("run.threads=1",)
    _tell_saves(task, (*common, *threads, f"data.cache={task.work / 'data'}"))
    _tell_lever(task, [*common, *threads])


def _make_larger(model: Path) -> None:
    """Give the model the sizes in SHAPE, and random weights."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    file = model / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8")) | SHAPE | {"dtype": "bfloat16"}
    file.write_text(json.dumps(fields), encoding="utf-8")
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    weights = {}
    for name, parameter in made.named_parameters():
        values = torch.randn(parameter.shape, device="cuda").mul_(0.02).to(torch.bfloat16)
        weights[name] = values.cpu() if values.ndim > 1 else torch.ones_like(values).cpu()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    torch.cuda.empty_cache()


def _tell_saves(task: Task, common: tuple[str, ...]) -> None:
    jobs = {
        "a save in the background": ("train.max_steps=6", "checkpoint.background=true"),
        "a save for which training waits": ("train.max_steps=3", "checkpoint.background=false"),
    }
    keep = ("checkpoint.every_steps=3", "checkpoint.keep=1")
    made = [Job(name, (*common, *keep, *more)) for name, more in jobs.items()]
    launch = Launch("saves", made, task.work)
    while not launch.is_over and task.left_s() > END_S:
        launch.look()
        time.sleep(0.2)
    launch.end()
    for number, job in enumerate(made):
        run_dir = run_of(task.work, job.name)
        code = launch.codes[number] if number < len(launch.codes) else None
        first = next(iter(events_of(run_dir, "checkpoint")), None)
        if code != 0 or first is None:
            said = "it was not done in time" if code is None else f"it ended with {code}"
            task.tell(job.name, "failed", said)
            continue
        rows = rows_of(run_dir)
        # Wall time from the end of a step to the end of the next, with all that is between.
        between = [b["time"] - a["time"] for a, b in zip(rows, rows[1:], strict=False)]
        task.tell(
            job.name,
            save_bytes=first["bytes"],
            save_s=first["save_s"],
            stall_s=first["blocked_s"],
            step_s=statistics.median(row["step_s"] for row in rows[1:]),
            between_steps_s=between,
        )


def _tell_lever(task: Task, settings: list[str]) -> None:
    config = load_config(None, settings)
    comm = bootstrap(config.run)
    steps = prepare(config, comm, Faults(offloads_without_gpu=not task.uses_gpu))
    device = torch.device(task.device)
    lever = steps.engine.memory_actions[Action.MOVE_OPTIMIZER]
    before_s, before = _step_s(steps, config, device), _count_allocated_bytes(task)
    words, there_s = _pull_lever(task, lever.apply_times, 1)
    moved_s, moved = _step_s(steps, config, device), _count_allocated_bytes(task)
    back_words, back_s = _pull_lever(task, lever.apply_times, 0)
    after_s, after = _step_s(steps, config, device), _count_allocated_bytes(task)
    moments = 2 * steps.size.trained_bytes
    wrong = []
    if task.uses_gpu and before - moved < FREED_SHARE * moments:
        wrong.append(f"it freed {before - moved} bytes of {moments}, and said: {words}")
    if "host" not in words or "device" not in back_words:
        wrong.append(f"it said: {words}; {back_words}")
    task.tell(
        Action.MOVE_OPTIMIZER.value,
        "failed" if wrong else "passed",
        "; ".join(wrong),
        state_bytes=moments,
        freed_bytes=before - moved,
        back_bytes=after - moved,
        to_host_s=there_s,
        to_device_s=back_s,
        step_s=before_s,
        step_with_it_s=moved_s,
        step_after_s=after_s,
    )
    shutdown(comm)


def _step_s(steps: Steps, config: Any, device: torch.device) -> float:
    """Return the seconds of the second of two steps."""
    return [steps.step(config, device)[0] for _ in range(2)][-1]


def _count_allocated_bytes(task: Task) -> int:
    return torch.cuda.memory_allocated() if task.uses_gpu else 0


def _pull_lever(task: Task, pull: Any, times: int) -> tuple[str, float]:
    began_s = time.perf_counter()
    words = str(pull(times))
    if task.uses_gpu:
        torch.cuda.synchronize()
    return words, time.perf_counter() - began_s


if __name__ == "__main__":
    main()
