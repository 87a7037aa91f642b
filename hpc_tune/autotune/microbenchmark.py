"""Measures how fast the ranks compute a decoder block and the head, before the model is loaded.

models of one block and of two, random weights -> forward and backward, all ranks at once
-> seconds per token of a block and of the rest; then again on the first rank alone
"""

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from hpc_tune.autotune.candidates import legal_layouts
from hpc_tune.batch import Batch, costliest_batch
from hpc_tune.config.optim import OptimConfig
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.engine.adamw_8bit import make_optimizer
from hpc_tune.engine.base import EngineSettings
from hpc_tune.engine.native import NativeEngine
from hpc_tune.errors import ConfigError
from hpc_tune.memory.policy import MEASURED_STATE_MEMORY_SHARE
from hpc_tune.model.build import BuiltModel
from hpc_tune.model.regions import local_region
from hpc_tune.plan.resolve import ModelShape
from hpc_tune.plan.step_time import ComputeTimes, Network, tensor_axis_time
from hpc_tune.step.layout import Layout
from hpc_tune.step.messages import BACKWARD_ALL_REDUCES, FORWARD_ALL_REDUCES
from hpc_tune.step.plan import StepPlan
from hpc_tune.step.size import STATE_COPIES, ModelSize, measure_model_size
from hpc_tune.units import format_bytes
from hpc_tune.world.comm import Comm

FEW_BLOCKS, MORE_BLOCKS = 1, 2
_REPEATS, _MIN_TIMED_S = 3, 0.3
_MAX_TOKENS_ON_CPU = 1024  # for which a block of an 8B model takes ten seconds
_BUFFER_VALUES, _MATRIX_WIDTH, _MAX_MATMULS = 1 << 22, 256, 100
_MAX_TIMED_GATHERS_S = 1.0


class BlockModels:
    """Makes models like the configured one, but with few blocks and random weights."""

    # Of the newest model: its step, and the bytes that both passes gather if it is sharded.
    plan: StepPlan
    gathered_bytes = 0.0

    def __init__(
        self,
        shape: ModelShape,
        parallel: ParallelConfig,
        optim: OptimConfig,
        seq_len: int,
        comm: Comm,
        available_bytes: int,
    ) -> None:
        """Measure on the ranks of ``comm``, each with ``available_bytes`` bytes of memory."""
        self.comm, self.parallel, self._seq_len = comm, parallel, seq_len
        self._shape, self.optim, self._available_bytes = shape, optim, available_bytes

    def engine(self, num_blocks: int, layout: Layout) -> NativeEngine:
        """Return an engine of ``num_blocks`` blocks. Collective.

        Raises:
            ConfigError: if even so few blocks do not fit.
        """
        update = {"reshard": "block", "offload_params": "none"}
        parallel = self.parallel.model_copy(update=update)
        with tempfile.TemporaryDirectory() as folder:
            make = partial(self._build_model, num_blocks, Path(folder))
            built_model = self.comm.run_and_agree("measuring a decoder block", make)
            self.plan = StepPlan.for_model(built_model, layout, parallel)
            settings = EngineSettings(
                self.plan, self.comm.device, self.optim, run_and_agree=self.comm.run_and_agree
            )
            engine = NativeEngine(built_model, settings)
        for parameter in built_model.module.parameters():
            if parameter.is_floating_point():
                local_region(parameter.detach())[0].normal_(std=0.02)
        return engine

    def _build_model(self, num_blocks: int, folder: Path) -> BuiltModel:
        shape = self._shape.with_blocks(num_blocks, folder)
        built_model, itemsize = shape.build(), shape.dtype.itemsize
        size, model = measure_model_size(built_model.module), built_model.config
        _require_memory(size, self._available_bytes)
        head = model.vocab_size * model.hidden_size * itemsize
        self.gathered_bytes = max(0, 2 * size.frozen_bytes - head)  # the head is gathered once
        return built_model

    def batch(self, rows: int) -> Batch:
        """Return a micro-batch to measure with; on CPUs with fewer tokens."""
        length = self._seq_len
        if self.comm.device.type == "cpu":
            length = min(length, _MAX_TOKENS_ON_CPU)
            rows = max(1, min(rows, _MAX_TOKENS_ON_CPU // length))
        return costliest_batch(rows, length)


def measure_compute(
    models: BlockModels,
    rows: int,
    network: Network,
    rank_order: Sequence[int],
    allow_tensor_parallel: bool,
) -> ComputeTimes:
    """Measure this model's blocks on these ranks; every rank returns the same result. Collective.

    ``rows``: of a micro-batch; ``network``: the measured links; ``rank_order``: the ranks of
    ``models.comm`` as ``network`` numbers them; ``allow_tensor_parallel``: see
    ``constraints.allows_tensor_parallel``.

    Raises:
        ConfigError: if even the few blocks to measure do not fit.
    """
    comm, seconds, batch = models.comm, {}, models.batch(rows)
    num_ranks = comm.world.size
    for num_blocks in (FEW_BLOCKS, MORE_BLOCKS):
        run_step = partial(models.engine(num_blocks, Layout(num_ranks, 1)).run_and_discard, batch)
        seconds[num_blocks] = _slowest_rank_s(run_step, comm)
    comm.barrier("the first rank to compute alone")
    times = [_time_work(run_step, comm.device) for _ in range(_REPEATS) if comm.is_rank_0]
    [alone_s] = comm.max([statistics.median(times or [0.0])])
    block_s = max(1e-12, (seconds[MORE_BLOCKS] - seconds[FEW_BLOCKS]) / (MORE_BLOCKS - FEW_BLOCKS))
    unshard_s = _unshard_s_per_byte(comm)
    # Over slow links transfers hide all other costs; on GPUs gathering overlaps with compute.
    gathers_s = network.collective_s("all_gather", [rank_order], models.gathered_bytes)
    if num_ranks > 1 and comm.device.type == "cpu" and 0 < gathers_s < _MAX_TIMED_GATHERS_S:
        run_step = partial(models.engine(MORE_BLOCKS, Layout(1, num_ranks)).run_and_discard, batch)
        extra_s = _slowest_rank_s(run_step, comm) - seconds[MORE_BLOCKS] - gathers_s
        unshard_s = max(unshard_s, extra_s / models.gathered_bytes)
    sync_s = None
    if num_ranks > 1 and allow_tensor_parallel:
        sync_s = _sliced_all_reduce_overhead_s(
            models, batch, seconds[MORE_BLOCKS], network, rank_order
        )
    if sync_s is None:
        sync_s = _small_all_reduce_overhead_s(
            comm, block_s / (FORWARD_ALL_REDUCES + BACKWARD_ALL_REDUCES)
        )
    tokens = batch.num_tokens
    return ComputeTimes(
        block_s=block_s / tokens,
        head_s=max(0.0, seconds[FEW_BLOCKS] - FEW_BLOCKS * block_s) / tokens,
        update_s=_update_s_per_value(comm, models.optim),
        unshard_s=unshard_s,
        sync_s=sync_s,
        sharing=max(1.0, seconds[MORE_BLOCKS] / alone_s),
        overlaps=comm.device.type == "cuda",
        host_copy_s=_host_copy_s_per_byte(comm) if models.parallel.offload_activations else 0.0,
    )


def _require_memory(size: ModelSize, available_bytes: int) -> None:
    needed_bytes = size.frozen_bytes + STATE_COPIES * size.trained_bytes
    if needed_bytes > MEASURED_STATE_MEMORY_SHARE * available_bytes:
        raise ConfigError(
            f"parallel.layout=auto: measuring {MORE_BLOCKS} decoder blocks of this model takes "
            f"{format_bytes(needed_bytes)}, too much for the {format_bytes(available_bytes)} "
            "available; set parallel.shard, .tensor or .pipeline"
        )


def _slowest_rank_s(work: Callable[[], object], comm: Comm) -> float:
    """Return the seconds of ``work`` on the slowest rank while all ranks do it at once.

    The work is repeated often enough that ranks that share processors get equal shares of them. A
    GPU's first call is discarded: it loads kernels for seconds.
    """
    comm.barrier("all ranks to begin")
    if comm.device.type == "cuda":
        _time_work(work, comm.device)
    [once_s] = comm.max([_time_work(work, comm.device)])
    repeats = max(1, math.ceil(_MIN_TIMED_S / once_s))
    times = []
    for _ in range(_REPEATS):
        comm.barrier("all ranks to begin")
        spent_s = _time_work(lambda: [work() for _ in range(repeats)], comm.device)
        times += comm.max([spent_s / repeats])
    return statistics.median(times)


def _time_work(work: Callable[[], object], device: torch.device) -> float:
    began_s = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began_s


def _update_s_per_value(comm: Comm, optim: OptimConfig) -> float:
    """Return the optimizer's seconds per trained value."""
    values = nn.Parameter(torch.zeros(_BUFFER_VALUES, device=comm.device))
    values.grad = torch.zeros_like(values)
    optimizer = make_optimizer([("values", values)], optim)
    return _slowest_rank_s(optimizer.step, comm) / _BUFFER_VALUES


def _unshard_s_per_byte(comm: Comm) -> float:
    """Return the seconds per byte to allocate two buffers, zero one and copy it to the other."""

    def zero_and_copy() -> None:
        buffer = torch.zeros(_BUFFER_VALUES, device=comm.device)
        torch.empty_like(buffer).copy_(buffer)

    return _slowest_rank_s(zero_and_copy, comm) / (4 * _BUFFER_VALUES)


def _host_copy_s_per_byte(comm: Comm) -> float:
    """Return the seconds per byte of a copy from a GPU to pinned memory while all ranks copy."""
    if comm.device.type != "cuda":
        return 0.0
    values = torch.zeros(_BUFFER_VALUES, device=comm.device)
    pinned = torch.empty(_BUFFER_VALUES, pin_memory=True)
    return _slowest_rank_s(lambda: pinned.copy_(values, non_blocking=True), comm) / values.nbytes


def _sliced_all_reduce_overhead_s(
    models: BlockModels,
    batch: Batch,
    unsliced_s: float,
    network: Network,
    rank_order: Sequence[int],
) -> float | None:
    """Return the seconds that a small all-reduce adds, measured in blocks sliced over all ranks.

    ``unsliced_s``: seconds of ``MORE_BLOCKS`` unsliced blocks. None if the blocks cannot be sliced
    over all ranks.
    """
    comm = models.comm
    sliced_layout = Layout(1, 1, comm.world.size)
    if sliced_layout not in legal_layouts(models.parallel, models.plan.model, sliced_layout.size):
        return None
    measured_s = _slowest_rank_s(
        partial(models.engine(MORE_BLOCKS, sliced_layout).run_and_discard, batch), comm
    )
    micro = batch.num_tokens, batch.num_loss_tokens
    messages = tensor_axis_time(models.plan, rank_order, network, micro)
    expected_s = unsliced_s / sliced_layout.size + messages.transfer_s
    return max(0.0, measured_s - expected_s) / messages.num_messages


def _small_all_reduce_overhead_s(comm: Comm, work_s: float) -> float:
    """Return the seconds that a small all-reduce adds after ``work_s`` seconds of work."""
    if comm.world.size == 1:
        return 0.0
    matrix = torch.randn(_MATRIX_WIDTH, _MATRIX_WIDTH, device=comm.device)
    small_tensor = torch.zeros(8, device=comm.device)
    multiply = partial(torch.mm, matrix, matrix)
    num_matmuls = max(1, min(_MAX_MATMULS, round(work_s / _slowest_rank_s(multiply, comm))))

    def time_matmuls(include_all_reduce: bool) -> float:
        def work() -> None:
            for _ in range(num_matmuls):
                multiply()
            if include_all_reduce:
                dist.all_reduce(small_tensor)

        return _slowest_rank_s(work, comm)

    return max(0.0, time_matmuls(True) - time_matmuls(False))
