"""A program for tools/bench.py: full steps of a model of random weights, through the real engine.

    [mpirun -np N] python tools/bench_steps.py OUT STEPS [key=value ...]

Only config.json of ``model.path`` is read: no weight files are needed, and a 70B model is made in
4 bits on the GPU piece by piece. Each row is one document of data.seq_len tokens, all with loss.
Rank 0 writes OUT: seconds of each step, tokens per step, the loss of the last step, the layout,
flops per token; and the GPU's name, bytes, and allocator peak.
"""

import json
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hpc_tune.batch import Batch
from hpc_tune.config.load import load_config
from hpc_tune.config.schema import RunConfig
from hpc_tune.engine.base import EngineSettings, StepResult, train_step
from hpc_tune.engine.native import NativeEngine
from hpc_tune.errors import ConfigError, HpcTuneError
from hpc_tune.faults import NO_FAULTS, Faults
from hpc_tune.model.build import build, resolve_dtype
from hpc_tune.model.config_json import ShapeIndex, resolve_model_directory
from hpc_tune.plan.hardware import Machine
from hpc_tune.plan.resolve import max_micro_rows, resolve
from hpc_tune.step.layout import Layout
from hpc_tune.step.plan import StepPlan
from hpc_tune.step.size import ModelSize, flops_per_token, measure_model_size
from hpc_tune.world.bootstrap import bootstrap, shutdown
from hpc_tune.world.comm import Comm

STD = 0.02
NOISE_VALUES = 1 << 24


class RandomIndex(ShapeIndex):
    """A ``ShapeIndex`` that provides values: normally distributed for matrices, ones for norms.

    The normal values are drawn once per dtype and device and repeated, which takes the time of a
    copy. What the model computes from them means nothing; how long it takes does.
    """

    def __init__(self, known_index: ShapeIndex) -> None:
        """Take the names and shapes from ``known_index``."""
        super().__init__([])
        self.shapes, self.dtypes = known_index.shapes, known_index.dtypes
        self._noise: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def fill(self, local_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        """Fill a contiguous ``local_tensor``."""
        if local_tensor.ndim == 1:
            local_tensor.fill_(1.0)
            return
        kind = local_tensor.dtype, local_tensor.device
        if kind not in self._noise:
            generator = torch.Generator(local_tensor.device).manual_seed(0)
            noise = torch.empty(NOISE_VALUES, device=local_tensor.device)
            self._noise[kind] = noise.normal_(0.0, STD, generator=generator).to(local_tensor.dtype)
        for part in local_tensor.view(-1).split(NOISE_VALUES):
            part.copy_(self._noise[kind][: part.numel()])

    def forget(self) -> None:
        """Free the values to copy from."""
        self._noise.clear()


def main() -> None:
    """Make the model, do the steps, write what they took."""
    out, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    try:
        config = load_config(None, sys.argv[3:])
        if config.parallel.zero_stage is not None:
            raise ConfigError("parallel.zero_stage: only the native engine is measured here")
        comm = bootstrap(config.run)
    except HpcTuneError as error:  # later errors are reported by the rank that has them
        sys.exit(str(error))
    found = run(config, comm, num_steps)
    if comm.is_rank_0:
        out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    shutdown(comm)


@dataclass(frozen=True)
class Steps:
    """An engine with a model of random weights, and the micro-batches of each of its steps."""

    engine: NativeEngine
    size: ModelSize
    layout: Layout
    dtype: torch.dtype
    flops_per_token: float
    batch: Batch
    num_micro: int
    num_tokens: int

    def step(self, config: RunConfig, device: torch.device) -> tuple[float, StepResult]:
        """Do one step; return its seconds and its result."""
        began_s = time.perf_counter()
        # A step ends by reading the loss, so the device has finished it.
        batches = [self.batch.to(device)] * self.num_micro
        result = train_step(self.engine, batches, self.num_tokens, config.optim.peak_lr)
        return time.perf_counter() - began_s, result


def prepare(config: RunConfig, comm: Comm, faults: Faults = NO_FAULTS) -> Steps:
    """Make the engine; each row is one document. Collective."""
    device = comm.device
    dtype = resolve_dtype(config.model.dtype, device)
    directory = resolve_model_directory(config.model.path)
    built = build(directory, dtype, config.tune, config.train.seed, reads_weights=False)
    size = measure_model_size(built.module)
    room = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 1 << 60
    machine = Machine(comm.world.size, 1, room, 0)  # no search for copies within nodes
    resolved = resolve(config.parallel, size, built.config, machine)
    layout = resolved.layout
    assert isinstance(built.index, ShapeIndex)
    index = RandomIndex(built.index)
    plan = StepPlan.for_model(built, layout, resolved.parallel)
    settings = EngineSettings(plan, device, config.optim, config.train, faults=faults)
    engine = NativeEngine(replace(built, index=index), settings)
    index.forget()
    rows, length = max_micro_rows(config.batch, layout), config.data.seq_len
    num_micro = math.ceil(config.batch.global_size / (layout.data_parallel_size * rows))
    generator = torch.Generator().manual_seed(comm.world.rank)
    tokens_BT = torch.randint(built.config.vocab_size, (rows, length), generator=generator)
    positions_BT = torch.arange(length).expand(rows, length).contiguous()
    counts = (rows * length, rows * length, 0)
    batch = Batch(
        *(tokens_BT, tokens_BT, positions_BT, *counts), document_lengths=[[length]] * rows
    )
    num_tokens = num_micro * rows * length * layout.data_parallel_size
    flops = flops_per_token(size, built.config, length)
    return Steps(engine, size, layout, dtype, flops, batch, num_micro, num_tokens)


def run(config: RunConfig, comm: Comm, num_steps: int) -> dict[str, object]:
    """Train for ``num_steps`` steps and return what rank 0 writes."""
    device, on_gpu = comm.device, comm.device.type == "cuda"
    steps, seconds = prepare(config, comm), []
    for _ in range(num_steps):
        step_s, result = steps.step(config, device)
        seconds.append(step_s)
        if comm.is_rank_0:
            print(f"step {len(seconds)}: {seconds[-1]:.2f} s, loss {result.loss:.3f}", flush=True)
    peak_bytes = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    [most_bytes] = comm.max([float(peak_bytes)])
    return {
        "seconds": seconds,
        "tokens": steps.num_tokens,
        "loss": result.loss,
        "layout": str(steps.layout),
        "dtype": "bf16" if steps.dtype == torch.bfloat16 else "fp32",
        "flops_per_token": steps.flops_per_token,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "device_total": torch.cuda.mem_get_info(device)[1] if on_gpu else None,
        "device_bytes": int(most_bytes) if on_gpu else None,
    }


if __name__ == "__main__":
    main()
