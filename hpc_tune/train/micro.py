"""batch.micro_size=auto: how many rows fit through the model at once, by trying one."""

import threading
from collections.abc import Callable

import torch

from hpc_tune.batch import full_batch
from hpc_tune.engine.base import Engine
from hpc_tune.memory.host import own_bytes
from hpc_tune.memory.monitor import Monitor
from hpc_tune.memory.policy import Level, room_of
from hpc_tune.world.comm import Comm

POLL_S = 0.002


def largest_micro_size(
    comm: Comm, engine: Engine, monitor: Monitor, seq_len: int, most_rows: int
) -> int:
    """Return the largest power of two of rows that fit on every rank, at most ``most_rows``.

    One row of ``seq_len`` tokens, all with loss, is run forward and backward; its peak memory is
    taken as the cost of each row. That is too high by what is allocated once, so it errs on the
    safe side. The rows fill memory up to where the governor begins to act. Collective.
    """
    if most_rows <= 1:
        return 1
    row_bytes = _peak_of(lambda: engine.run_once(full_batch(1, seq_len)), comm.device)
    if comm.device.type == "cuda":
        free_bytes, total_bytes = torch.cuda.mem_get_info(comm.device)
        free_bytes += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        room_bytes = room_of(total_bytes - free_bytes, total_bytes, Level.TIGHT)
    else:
        room_bytes = room_of(monitor.used_bytes(), monitor.limit.num_bytes, Level.TIGHT)
        room_bytes //= comm.world.local_size
    rows = max(1, room_bytes // max(row_bytes, 1))
    # The rank with the least room decides.
    rows = -int(comm.max([-rows])[0])
    return most_rows if rows >= most_rows else 1 << (rows.bit_length() - 1)


def _peak_of(work: Callable[[], None], device: torch.device) -> int:
    """Return by how many bytes memory rose at its highest while ``work`` ran."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    before = peak = own_bytes()
    finished = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not finished.wait(POLL_S):
            peak = max(peak, own_bytes())

    watcher = threading.Thread(target=watch, name="memory of one row", daemon=True)
    watcher.start()
    work()
    finished.set()
    watcher.join()
    return max(peak, own_bytes()) - before
