"""Decides with a small model on this GPU whether train.compile=auto compiles decoder blocks.

    a small model of the same architecture -> a step in fp32, in the run's dtype, and compiled
    -> blocks are compiled if losses and gradients are then as close to fp32 as without compiling

Two batches of different lengths are computed; the second one meets the graph compiled for the
first. The result is cached beside the architecture checks, by model, software and GPU.
"""

import functools
import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_tune.batch import Batch
from hpc_tune.config.constraints import find_compile_obstacle
from hpc_tune.config.schema import TrainConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.data.packed_rows import make_batch
from hpc_tune.engine.activation_checkpoint import RecomputeLevel, checkpoint_blocks
from hpc_tune.engine.compile import (
    compile_blocks,
    compile_loss,
    compiling_in_process,
    require_compiler,
)
from hpc_tune.errors import HpcTuneError, first_line
from hpc_tune.files import read_json_object, write_file
from hpc_tune.log import LOG_ON_RANK_0_ONLY, log
from hpc_tune.memory.device import empty_caches
from hpc_tune.model.build import BuiltModel, build
from hpc_tune.model.experts import is_mixture_of_experts
from hpc_tune.model.language import read_config
from hpc_tune.model.layers import find_blocks, use_faster_layers
from hpc_tune.model.load import allocate, load_weights
from hpc_tune.model.stock_reference import UncheckableArchitecture, write_small_model
from hpc_tune.model.weights import is_lora_b
from hpc_tune.packages import collect_frozen_garbage, fast_imports
from hpc_tune.train.job import Job
from hpc_tune.train.startup.architecture_check import trial_cache_file

# Document lengths of each batch's rows: two rows of different lengths, then one row.
BATCH_DOCUMENT_LENGTHS = (((24, 40), (17, 31)), ((33, 14, 48),))
MAX_ERROR_RATIO = 2.0  # error of compiled blocks, relative to that of blocks without compiling
# Added to that: a share of the loss, or of a gradient's norm.
MIN_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.01}


@dataclass(frozen=True)
class _StepValues:
    """The losses of both batches, and the gradients of their sum, by parameter name."""

    losses: tuple[float, ...]
    gradients: dict[str, torch.Tensor]


def resolve_auto_compile(job: Job, built: BuiltModel) -> TrainConfig:
    """Return the section train with compile decided on a GPU; log why if not. Collective."""
    comm, parallel, train = job.setup_comm, job.config.parallel, job.config.train
    if train.compile != "auto" or comm.device.type != "cuda":
        return train
    message = "train.compile=auto: blocks are not compiled: %s"
    if reason := find_compile_obstacle(
        parallel, built.tune, train, is_mixture_of_experts(built.module)
    ):
        log.info(message, reason)
    elif reason := comm.run_on_rank_0(
        "trying compiled blocks",
        lambda: check_compiled_blocks_cached(built, parallel.recompute, comm.device),
    ):
        log.warning(message, reason, extra=LOG_ON_RANK_0_ONLY)
    return train.model_copy(update={"compile": not reason})


def check_compiled_blocks_cached(
    built: BuiltModel, recompute: RecomputeLevel, device: torch.device
) -> str:
    """Return why compiled blocks cannot be used on a device, "" if they can.

    The result comes from a cache if it is known; otherwise this takes up to a minute.
    """
    try:
        require_compiler(device, built.tune.dropout)
    except HpcTuneError as error:
        return str(error)
    model = read_config(built.directory, built.rope_scaling)
    by_document = built.module.uses_document_attention
    kind = f"{built.dtype} {recompute} {by_document} {_device_name(device)}"
    digest = hashlib.sha256(f"{torch.__version__} {kind}".encode()).hexdigest()[:8]
    file = trial_cache_file(model, built.tune).with_suffix(f".compiled-{digest}.json")
    if (cached_reason := read_json_object(file).get("why")) is not None:
        return str(cached_reason)
    log.info("compiling a small %s model, to compare it with an uncompiled one", model.model_type)
    try:
        reason = check_compiled_blocks(model, built.tune, built.dtype, device, recompute)
    except UncheckableArchitecture as error:
        return f"no small model of this kind could be tried: {error}"
    except Exception as error:  # noqa: BLE001 - whatever a compiler raises; the next may do better
        return f"a small model of this kind fails with {type(error).__name__}: {first_line(error)}"
    finally:
        collect_frozen_garbage()
        empty_caches()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, json.dumps({"why": reason}))
    except OSError as error:
        log.debug("%s cannot be written, so the next start repeats the trial: %s", file, error)
    return reason


def check_compiled_blocks(
    model: Any,
    tune: TuneConfig,
    dtype: torch.dtype,
    device: torch.device,
    recompute: RecomputeLevel,
) -> str:
    """Return how a small compiled model of the architecture differs, "" if it does not.

    Raises:
        UncheckableArchitecture: if no small model can be made.
    """
    config = TuneConfig(method=tune.method, base_dtype=tune.base_dtype, targets=tune.targets)
    with fast_imports(), tempfile.TemporaryDirectory(prefix="hpc_tune-trial-") as folder:
        write_small_model(model, directory := Path(folder))
        run = functools.partial(_run_step, directory, config, device=device, recompute=recompute)
        exact = run(torch.float32, compiled=False)
        eager = exact if dtype == torch.float32 else run(dtype, compiled=False)
        with compiling_in_process(directory):
            compiled = run(dtype, compiled=True)
        return compare_steps(exact, eager, compiled, MIN_TOLERANCES.get(dtype, 0.01))


def compare_steps(
    exact: _StepValues, eager: _StepValues, compiled: _StepValues, min_tolerance: float
) -> str:
    """Return which value of compiled blocks is too far from fp32 compared with plain blocks, or "".

    ``min_tolerance``: the share of a loss, or of a gradient's norm, that is tolerated in any case.
    """
    for loss, actual, base in zip(exact.losses, compiled.losses, eager.losses, strict=True):
        if not abs(actual - loss) <= MAX_ERROR_RATIO * abs(base - loss) + min_tolerance * abs(loss):
            return f"a small model's loss is {actual:.6g} with compiled blocks, {base:.6g} without"
    for name, gradient in exact.gradients.items():
        norm = gradient.norm().item()
        actual, base = (
            (step.gradients[name] - gradient).norm().item() if name in step.gradients else norm
            for step in (compiled, eager)
        )
        if not actual <= MAX_ERROR_RATIO * base + min_tolerance * norm + 1e-7:
            actual, base = actual / (norm or 1.0), base / (norm or 1.0)
            return (
                f"the gradient of a small model's {name} is off by {actual:.1e} of its norm with "
                f"compiled blocks, by {base:.1e} without"
            )
    return ""


def _run_step(
    directory: Path,
    tune: TuneConfig,
    dtype: torch.dtype,
    compiled: bool,
    device: torch.device,
    recompute: RecomputeLevel,
) -> _StepValues:
    built = build(directory, dtype, tune, 0)
    blocks = list(find_blocks(built.module))
    shares = not compiled or recompute == "none"
    use_faster_layers(built.module, blocks, compiled, dtype, device, shares_inputs=shares)
    checkpoint_blocks(blocks, recompute)
    if compiled:
        compile_blocks(blocks)
        compile_loss(built.module)
    allocate(built.module, device)
    load_weights(built)
    parameters = {n: p for n, p in built.module.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(parameters.items())):
            if is_lora_b(name):  # initially zero, so that A would get no gradient
                generator = torch.Generator().manual_seed(number)
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    losses = []
    casts = tune.method == "full" and dtype != torch.float32
    for rows in BATCH_DOCUMENT_LENGTHS:
        batch = _make_random_batch(rows).to(device)
        with torch.autocast(device.type, dtype, enabled=casts):
            loss = built.module(batch)
        loss.backward()
        losses.append(loss.item())
    gradients = {n: p.grad.float() for n, p in parameters.items() if p.grad is not None}
    return _StepValues(tuple(losses), gradients)


def _make_random_batch(rows: Sequence[Sequence[int]]) -> Batch:
    generator = np.random.default_rng(1)
    masked_rows = [
        [(generator.integers(3, 256, length), np.full(length, True)) for length in row]
        for row in rows
    ]
    return make_batch(masked_rows, max(map(sum, rows)), 0)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
