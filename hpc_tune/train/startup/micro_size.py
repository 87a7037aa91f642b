"""How many rows a micro-batch has; batch.micro_size=auto tries one row of the run's length."""

import threading
from collections.abc import Callable

import torch

from hpc_tune.batch import full_batch
from hpc_tune.checkpoint.state import RunState
from hpc_tune.engine.base import Engine
from hpc_tune.errors import MemoryBudgetError
from hpc_tune.log import log
from hpc_tune.memory.device import DeviceMemory, what_failed
from hpc_tune.memory.host import own_bytes
from hpc_tune.memory.monitor import Monitor
from hpc_tune.memory.policy import DEVICE, HOST
from hpc_tune.plan.memory_model import GPU_SLACK
from hpc_tune.plan.resolve import most_micro_rows, rows_per_rank
from hpc_tune.step.messages import expected_bytes
from hpc_tune.step.plan import StepPlan
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model
from hpc_tune.units import format_bytes
from hpc_tune.world.comm import Comm

POLL_S = 0.002


def decide_micro_size(
    job: Job, model: Model, plan: StepPlan, engine: Engine, saved: RunState | None
) -> int:
    """Return the rows of a micro-batch; ``saved`` is the state that the run resumes. Collective."""
    config, layout = model.config, plan.layout
    if config.batch.micro_size != "auto":
        return config.batch.micro_size
    if saved is not None and saved.layout == layout.saved:
        return saved.micro_size
    most_rows = most_micro_rows(config.batch, layout)
    limit = job.step_limit()
    limit.enter("measuring micro-batches")
    with limit.over():
        return largest_micro_size(
            job.setup_comm, engine, job.monitor, config.data.seq_len, most_rows
        )


def log_micro_batches(model: Model, plan: StepPlan, micro_size: int) -> None:
    """Log the size of micro-batches, and the bytes that a step sends."""
    seq_len, rows = model.config.data.seq_len, rows_per_rank(model.config.batch, plan.layout)
    tokens, num_micro = rows * seq_len, -(-rows // micro_size)
    micro = (tokens // num_micro, round(plan.loss_share * tokens / num_micro))
    sent = sum(expected_bytes(plan, [micro] * num_micro).values())
    log.info(
        "micro-batches of %d x %d tokens%s",
        min(micro_size, rows),
        seq_len,
        f"; a step sends {format_bytes(sent)} per rank" if sent else "",
    )


def largest_micro_size(
    comm: Comm, engine: Engine, monitor: Monitor, seq_len: int, most_rows: int
) -> int:
    """Return the largest power of two of rows that fit on every rank, at most ``most_rows``.

    One row of ``seq_len`` tokens, all with loss, is run forward and backward; its peak memory is
    taken as the cost of each row. That is too high by what is allocated once, so it errs on the
    safe side. The rows fill memory as far as a plan would. Collective.

    Raises:
        MemoryBudgetError: if this rank's device has no room for one row.
    """
    if most_rows <= 1:
        return 1

    def try_one() -> None:
        engine.run_once(full_batch(1, seq_len))

    if monitor.device is not None:
        rows = _rows_on_device(try_one, monitor, monitor.device, seq_len)
    else:
        row_bytes = _peak_of(try_one)
        room_bytes = int(HOST.filled * monitor.limit.num_bytes) - monitor.used_bytes()
        rows = room_bytes // comm.world.local_size // max(row_bytes, 1)
    # The rank with the least room decides.
    rows = max(1, -int(comm.max([-rows])[0]))
    return most_rows if rows >= most_rows else 1 << (rows.bit_length() - 1)


def _rows_on_device(
    try_one: Callable[[], None], monitor: Monitor, device: DeviceMemory, seq_len: int
) -> int:
    held_bytes, failed = device.sample().allocated_bytes, None
    try:
        try_one()
    except torch.OutOfMemoryError as error:
        failed = what_failed(error)
    found = device.sample()
    if failed is not None:
        raise MemoryBudgetError(
            f"batch.micro_size=auto: not even one row of data.seq_len={seq_len} fits: "
            f"{monitor.device_need(found).words}; {failed}. Set parallel.recompute=full, a shorter "
            "data.seq_len, or parallel.offload_params=cpu, or use more ranks with parallel.shard; "
            "python -m hpc_tune plan predicts what each takes"
        )
    row_bytes = found.used_bytes - found.others_bytes - held_bytes
    # The allocator's fragments grow with what it gives out.
    room_bytes = DEVICE.filled * found.limit_bytes - found.others_bytes
    room_bytes = room_bytes / (1 + GPU_SLACK) - found.allocated_bytes
    return int(room_bytes / max(row_bytes, 1))


def _peak_of(work: Callable[[], None]) -> int:
    """Return by how many bytes host memory rose at its highest while ``work`` ran."""
    before = peak = own_bytes()
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
    return max(peak, own_bytes()) - before
