"""Models of random weights for the parts of tools/gpu_check.py: speed, memory, and the plan.

a shape's config.json, perhaps of fewer blocks -> bench_steps.run -> tokens/s, MFU, the peak
                                               -> plan, in a process beside it
"""

import gc
import json
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from bench_shape import METHOD, planned_bytes
from bench_steps import run
from bench_watch import WARM
from gpu_task import Task

from hpc_tune.config.load import load_config
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.config_json import resolve_model_directory
from hpc_tune.plan.hardware import peak_flops
from hpc_tune.world.bootstrap import bootstrap, shutdown

SIDE = 8192  # of the matmul that measures what the card can do
PLAN_WAIT_S = 30.0


def config_of(task: Task, shape: str, num_blocks: int | None = None) -> Path:
    """Return a folder with the config.json of a shape, or of builtin:tiny on CPUs.

    ``num_blocks``: change it to this many decoder blocks.
    """
    directory = resolve_model_directory(shape)
    if not task.uses_gpu:
        directory = task.work / "tiny"
        write_tiny_model(directory)
    if num_blocks is None:
        return directory
    fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    folder = task.work / f"{num_blocks}-blocks"
    folder.mkdir(exist_ok=True)
    text = json.dumps({**fields, "num_hidden_layers": num_blocks})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


class Shapes:
    """Measures models one after the other in this process, which is a world of one rank."""

    def __init__(self, task: Task) -> None:
        """Form the world."""
        self._task = task
        threads = "auto" if task.uses_gpu else "1"
        words = [f"run.device={task.device}", f"run.threads={threads}"]
        self.comm = bootstrap(load_config(None, words).run)
        self._plans = ThreadPoolExecutor(4)
        self._ceiling = _ceiling(self.comm.device) if task.uses_gpu else None

    def settings(self, model: Path, seq_len: int, *more: str) -> list[str]:
        """Return the settings of one row of ``seq_len`` tokens per step with LoRA."""
        words = [f"model.path={model}", f"data.seq_len={seq_len}", *METHOD, "model.dtype=bf16"]
        return [*words, "batch.micro_size=1", "batch.global_size=1", *more]

    def plan(self, settings: list[str]) -> "Future[int | None]":
        """Start planning the peak of the GPU's allocator in a process of its own."""
        total = torch.cuda.mem_get_info()[1] if self._task.uses_gpu else None
        return self._plans.submit(planned_bytes, settings, 1, total)

    def measure(
        self,
        name: str,
        settings: list[str],
        num_steps: int,
        planned: "Future[int | None]",
        counted: float | None = None,
    ) -> dict[str, Any] | None:
        """Do the steps, report what was found and return it; None if they failed.

        ``counted``: tokens/s by tools/gpu_cost.py, to report beside the measurement.
        """
        device = self.comm.device
        gc.collect()  # an engine has reference cycles
        if self._task.uses_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        torch._dynamo.reset()
        config = load_config(None, [*settings, f"run.device={self._task.device}"])
        began_s = time.monotonic()
        try:
            told: dict[str, Any] = run(config, self.comm, num_steps)
        except Exception as error:  # the next one is still worth measuring
            self._task.tell(name, "failed", f"{type(error).__name__}: {error}")
            return None
        all_s = time.monotonic() - began_s
        found = self._make_figures(told, all_s) | _compare_with_plan(
            told["device_bytes"], self._wait(planned)
        )
        if counted is not None:
            off = counted / found["tokens_per_s"] - 1
            found |= {"counted_tokens_per_s": counted, "counted_off": off}
        self._task.tell(name, **found)
        return found

    def close(self) -> None:
        """End the world."""
        shutdown(self.comm)

    def _make_figures(self, told: dict[str, Any], all_s: float) -> dict[str, Any]:
        seconds, flops = told["seconds"], told["flops_per_token"]
        step_s = statistics.median(seconds[WARM:])
        tokens_per_s = told["tokens"] / step_s
        peak = peak_flops(told["device"])
        return {
            "tokens_per_s": tokens_per_s,
            "mfu": tokens_per_s * flops / peak if peak else None,
            "of_products": tokens_per_s * flops / self._ceiling if self._ceiling else None,
            "step_s": step_s,
            "first_step_s": seconds[0],
            "load_s": all_s - sum(seconds),
            "peak_bytes": told["device_bytes"],
            "flops_per_token": flops,
            "peak_flops": peak,
            "loss": told["loss"],
            "layout": told["layout"],
        }

    def _wait(self, planned: "Future[int | None]") -> int | None:
        try:
            return planned.result(min(PLAN_WAIT_S, max(0.0, self._task.left_s() - 5)))
        except (TimeoutError, SystemExit) as error:
            print(f"without a plan: {error!r}", flush=True)
            return None


def _compare_with_plan(peak_bytes: int | None, planned: int | None) -> dict[str, Any]:
    if not peak_bytes or planned is None:
        return {}
    return {"planned_bytes": planned, "planned_off": planned / peak_bytes - 1}


def _ceiling(device: torch.device) -> float:
    """Return the flops per second of a large matmul in bf16."""
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(8):
        torch.cuda.synchronize(device)
        began_s = time.perf_counter()
        a @ b.t()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began_s)
    return 2 * SIDE**3 / min(seconds)
