"""How many rows a micro-batch has; batch.micro_size=auto tries one row of the run's length."""

import threading
from collections.abc import Callable

import torch

from hpc_tune.batch import costliest_batch
from hpc_tune.checkpoint.state import RunState, Settings
from hpc_tune.config.section import flatten_settings
from hpc_tune.engine.base import Engine
from hpc_tune.errors import MemoryBudgetError
from hpc_tune.log import log
from hpc_tune.memory.device import DeviceMemory, describe_failed_allocation
from hpc_tune.memory.host import own_bytes
from hpc_tune.memory.monitor import MemoryMonitor
from hpc_tune.memory.policy import DEVICE_LIMITS, HOST_LIMITS
from hpc_tune.plan.memory_model import GPU_SLACK_SHARE
from hpc_tune.plan.resolve import max_micro_rows, rows_per_rank
from hpc_tune.step.messages import expected_bytes
from hpc_tune.step.plan import StepPlan
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model
from hpc_tune.units import format_bytes
from hpc_tune.world.comm import Comm

POLL_S = 0.002
# At most this many times the rows that would fit if each took as much as the first: limits the
# effect of a small difference between two measured peaks.
_MAX_ROW_BYTES_RATIO = 8
_MEMORY_SETTINGS = (  # settings that change the memory of a row, or the memory left for rows
    *("batch.micro_size", "model.dtype", "tune.param_dtype", "optim.name"),
    *("train.compile", "train.float8", "parallel.recompute", "parallel.reshard"),
    *("parallel.row_pieces", "parallel.offload_activations"),
    *("parallel.zero_stage", "parallel.offload_params", "parallel.offload_optimizer"),
    "parallel.context",
)


def decide_micro_size(
    job: Job, model: Model, plan: StepPlan, engine: Engine, saved_state: RunState | None
) -> int:
    """Return the rows of a micro-batch. Collective. ``saved_state``: what the run resumes from.

    A run resumed with the same layout and memory settings keeps its size, to compute the same bits.
    """
    config, layout = model.config, plan.layout
    if config.batch.micro_size != "auto":
        return config.batch.micro_size
    settings = job.config.model_dump()
    if (
        saved_state is not None
        and saved_state.layout == layout.saved_axes
        and _needs_same_memory(saved_state, settings)
    ):
        return saved_state.micro_size
    max_rows = max_micro_rows(config.batch, layout)
    watch = job.make_stall_watch()
    watch.enter("measuring micro-batches")
    with watch.watching():
        return largest_micro_size(
            job.setup_comm, engine, job.monitor, config.data.seq_len, max_rows
        )


def _needs_same_memory(saved_state: RunState, settings: Settings) -> bool:
    old, new = flatten_settings(saved_state.config), flatten_settings(settings)
    return all(old.get(name, new[name]) == new[name] for name in _MEMORY_SETTINGS)


def log_micro_batches(model: Model, plan: StepPlan, micro_size: int) -> None:
    """Log the size of micro-batches, and the bytes that a step sends."""
    seq_len, rows = model.config.data.seq_len, rows_per_rank(model.config.batch, plan.layout)
    tokens, num_micro = plan.num_local_tokens(rows * seq_len), -(-rows // micro_size)
    micro = (tokens // num_micro, round(plan.loss_token_fraction * tokens / num_micro))
    sent_bytes = sum(expected_bytes(plan, [micro] * num_micro).values())
    log.info(
        "micro-batches of %d x %d tokens%s%s",
        min(micro_size, rows),
        seq_len,
        f", shared by {context} ranks" if (context := plan.layout.context) > 1 else "",
        f"; a step sends {format_bytes(sent_bytes)} per rank" if sent_bytes else "",
    )


def largest_micro_size(
    comm: Comm, engine: Engine, monitor: MemoryMonitor, seq_len: int, max_rows: int
) -> int:
    """Return the largest power of two of rows that fit on every rank, or ``max_rows`` if these do.

    One row of ``seq_len`` tokens, all with loss, is run forward and backward; then two rows, if
    they fit even at twice the memory of the first. The memory that the second row adds is the cost
    of each further row; the rest is allocated once (gathered weights, workspaces). The rows fill
    memory up to the same share as in a plan. Collective.

    Raises:
        MemoryBudgetError: if one row does not fit on this rank's device.
    """
    if max_rows <= 1:
        return 1
    device = monitor.device
    if device is not None:
        measure_row_bytes, room_bytes = _prepare_device_measurement(
            engine, monitor, device, seq_len
        )
    else:
        measure_row_bytes, room_bytes = _prepare_host_measurement(engine, monitor, seq_len)
        room_bytes //= comm.world.local_size

    def min_over_ranks(rows: int) -> int:
        """Return the rows of the rank with the least room."""
        return max(1, -int(comm.max([-rows])[0]))

    one_bytes = max(measure_row_bytes(1), 1)
    rows = min_over_ranks(room_bytes // one_bytes)
    if 1 < rows < max_rows:
        added_bytes = max(measure_row_bytes(2) - one_bytes, one_bytes // _MAX_ROW_BYTES_RATIO, 1)
        rows = min_over_ranks(1 + (room_bytes - one_bytes) // added_bytes)
    return max_rows if rows >= max_rows else 1 << (rows.bit_length() - 1)


def _prepare_device_measurement(
    engine: Engine, monitor: MemoryMonitor, device: DeviceMemory, seq_len: int
) -> tuple[Callable[[int], int], int]:
    """Return a function that measures the peak bytes of rows, and the bytes available for rows."""
    baseline = device.sample()
    # The allocator's fragmentation grows with the memory that it hands out.
    filled_bytes = (DEVICE_LIMITS.target_share * baseline.limit_bytes - baseline.others_bytes) / (
        1 + GPU_SLACK_SHARE
    )

    def measure_row_bytes(rows: int) -> int:
        cause = None
        try:
            engine.run_and_discard(costliest_batch(rows, seq_len))
        except torch.OutOfMemoryError as error:
            cause = describe_failed_allocation(error)
        sample = device.sample()
        if cause is not None:
            raise MemoryBudgetError(
                f"batch.micro_size=auto: not even one row of data.seq_len={seq_len} fits: "
                f"{monitor.device_shortage(sample).words}; {cause}. Set parallel.recompute=full, a "
                "shorter data.seq_len, or parallel.offload_params=cpu, or use more ranks with "
                "parallel.shard, or with parallel.context, which share a row; python -m hpc_tune "
                "plan predicts the memory of each"
            )
        return sample.used_bytes - sample.others_bytes - baseline.allocated_bytes

    return measure_row_bytes, int(filled_bytes) - baseline.allocated_bytes


def _prepare_host_measurement(
    engine: Engine, monitor: MemoryMonitor, seq_len: int
) -> tuple[Callable[[int], int], int]:
    """Return a function that measures the peak bytes of rows, and the bytes left for all ranks."""
    before_bytes = own_bytes()

    def measure_row_bytes(rows: int) -> int:
        batch = costliest_batch(rows, seq_len)
        return _measure_peak_bytes(lambda: engine.run_and_discard(batch)) - before_bytes

    filled_bytes = int(HOST_LIMITS.target_share * monitor.limit.num_bytes)
    return measure_row_bytes, filled_bytes - monitor.used_bytes()


def _measure_peak_bytes(work: Callable[[], None]) -> int:
    """Return the peak bytes of host memory of this process while ``work`` ran."""
    peak = own_bytes()
    finished = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not finished.wait(POLL_S):
            peak = max(peak, own_bytes())

    watcher = threading.Thread(target=watch, name="memory of one row", daemon=True)
    watcher.start()
    try:
        work()
    finally:
        finished.set()
        watcher.join()
    return max(peak, own_bytes())
