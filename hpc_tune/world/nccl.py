"""Handle NCCL's errors here, since torch would abort the process.

    torch's watchdog sees an error or a late collective -> keeps it in the group, and ends nothing
    NcclWatch looks at all groups -> waits for HostWatch to name who is gone -> ends the world

torch's own handling aborts from C++ without saying which rank is gone, and its limits use a clock
that runs on while a job is suspended: such a job would be ended when it is resumed.
"""

import json
import time
from collections.abc import Callable, Iterable, MutableMapping
from pathlib import Path
from typing import Any

from hpc_tune.errors import HpcTuneError, WorldError
from hpc_tune.world import liveness
from hpc_tune.world.comm import Comm

# 0: the watchdog keeps errors for get_error; no thread ends a process whose watchdog is late.
_DISABLED_ERROR_HANDLING = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
_OLD_ERROR_HANDLING_VARIABLE = "NCCL_ASYNC_ERROR_HANDLING"

ErrorReader = Callable[[], Iterable[str]]


def disable_nccl_error_handling(environ: MutableMapping[str, str]) -> None:
    """Keep torch from ending the process when NCCL fails, if its NCCL groups have get_error and the
    user has set none of the variables for it.

    Call this before groups are made.
    """
    from torch._C import _distributed_c10d

    backend = getattr(_distributed_c10d, "ProcessGroupNCCL", None)
    is_set = any(
        name in environ for name in (*_DISABLED_ERROR_HANDLING, _OLD_ERROR_HANDLING_VARIABLE)
    )
    if hasattr(backend, "get_error") and not is_set:
        environ.update(_DISABLED_ERROR_HANDLING)


def find_group_errors() -> list[str]:
    """Return the names of torch's ErrorType for all groups of this process that have an error."""
    import torch
    from torch.distributed import distributed_c10d

    error_names = []
    for group in [*distributed_c10d._world.pg_map]:
        try:
            backend: Any = group._get_backend(torch.device("cuda"))
            error_names.append(str(backend.get_error().name))
        except (AttributeError, RuntimeError):  # a CPU group, or one that is being destroyed
            continue
    return [name for name in error_names if name != "SUCCESS"]


class NcclWatch:
    """Checks all groups for errors until ``close``; ends the world by ``on_failure``."""

    def __init__(
        self,
        comm: Comm,
        timeout_s: float,
        on_failure: Callable[[Comm, HpcTuneError], None],
        read_errors: ErrorReader = find_group_errors,
        every_s: float = liveness.NCCL_CHECK_EVERY_S,
    ) -> None:
        """Start checking; ``timeout_s`` is run.timeout."""
        self._comm, self._timeout_s = comm, timeout_s
        self._end_world, self._errors = on_failure, read_errors
        self._last_look_s, self._was_suspended = time.monotonic(), False
        self._watcher = liveness.Watcher("nccl-watch", every_s, self._check_groups)
        self._watcher.start()

    def renumber(self, comm: Comm) -> None:
        """Number this rank as in ``comm`` from now on."""
        self._comm = comm

    def close(self) -> None:
        """Stop checking, at the end of the world."""
        self._watcher.close()

    def _check_groups(self) -> bool:
        now_s = time.monotonic()
        gap_s, self._last_look_s = now_s - self._last_look_s, now_s
        self._was_suspended = self._was_suspended or gap_s > liveness.MIN_SUSPENSION_GAP_S
        names = {*self._errors()}
        if self._was_suspended:  # StallWatch does not count the time that the job was suspended
            names.discard("TIMEOUT")
        if not names:
            return False
        # Whoever learns of a rank's end can say more, and ends the world within this time.
        if not self._watcher.wait(liveness.NCCL_CAUSE_LIMIT_S):
            self._watcher.run_unless_closed(lambda: self._report_errors(names))
        return True

    def _report_errors(self, error_names: set[str]) -> None:
        liveness.exit_soon()
        if error_names == {"TIMEOUT"}:
            text = (
                f"an NCCL collective while {self._comm.activity[0]} had not finished "
                f"{liveness.TORCH_TIMEOUT_MARGIN_S:.0f} s after run.timeout "
                f"({self._timeout_s:.0f} s), and no rank is known to have ended"
            )
        else:
            text = (
                "NCCL has lost its connection to another rank while "
                f"{self._comm.activity[0]}, and no rank is known to have ended: check the "
                "network and its cards on both nodes, which NCCL_DEBUG=WARN names"
            )
        self._end_world(self._comm, WorldError(text))


# -- torch's flight recorder: the last 2,000 collectives of a rank, for ``torchfrtrace``.


TRACE_FOLDER = "collectives"


def write_collectives_trace(folder: Path, rank: int, uses_gpu: bool) -> str | None:
    """Write a trace of this rank's collectives; return the folder, None if nothing was written.

    The recorder is off with TORCH_FR_BUFFER_SIZE=0, torch may be built without it, and torch 2.9
    and 2.10 do not record gloo's collectives.
    """
    from torch._C import _distributed_c10d

    name = "_dump_nccl_trace" if uses_gpu else "_dump_fr_trace"
    dump = getattr(_distributed_c10d, name, None)
    if dump is None:
        return None
    as_json = getattr(_distributed_c10d, f"{name}_json")
    try:
        if not json.loads(as_json()).get("entries"):
            return None
        trace = dump(includeCollectives=True, includeStackTraces=True, onlyActive=False)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"nccl_trace_rank_{rank}").write_bytes(trace)
    except (RuntimeError, OSError, ValueError):  # the run is ending with an error that is reported
        return None
    return str(folder)
