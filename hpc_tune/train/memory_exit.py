"""Where memory runs out between two step boundaries: the run stops, and can be resumed.

the monitor's thread sees the limit near -> leave    -> every rank ends, exit code 75
an allocation fails                      -> cause_of -> the same
"""

from dataclasses import replace
from pathlib import Path

from hpc_tune.config.schema import MemoryConfig
from hpc_tune.errors import MemoryBudgetError, ResumableStop
from hpc_tune.faults import Faults
from hpc_tune.log import log
from hpc_tune.memory.device import is_of_a_device, is_out_of_memory, memory_of, what_failed
from hpc_tune.memory.host import find_limit
from hpc_tune.memory.monitor import Monitor, Need
from hpc_tune.rundir import heartbeat
from hpc_tune.train.exit import fail
from hpc_tune.train.governor import MORE_MEMORY, Governor, facts_of
from hpc_tune.units import format_bytes
from hpc_tune.world.comm import Comm, ResumePoint


def make_monitor(memory: MemoryConfig, comm: Comm, run_dir: Path, faults: Faults) -> Monitor:
    """Return this rank's monitor; the first rank of each node keeps the node's heartbeat.

    Raises:
        MemoryBudgetError: if the processes alone take what the node grants.
    """
    world, beat = comm.world, None
    if world.local_rank == 0:
        path = heartbeat.path_of(run_dir, world.node)
        beat = heartbeat.HeartbeatFile(path, world.hostname, find_limit(memory.host_limit))
    monitor = Monitor(
        memory.host_limit,
        faults.device or memory_of(comm.device),
        memory.governor,
        world.rank,
        world.hostname,
        [peer.pid for peer in comm.roster if peer.node == world.node],
        beat,
        faults,
    )
    asked, limit = memory.host_limit, monitor.limit
    if monitor.ranks_bytes() >= limit.num_bytes:
        raise MemoryBudgetError(
            f"{limit.source} grants {format_bytes(limit.num_bytes)} of host memory on "
            f"{world.hostname}, and its {world.local_size} ranks use "
            f"{format_bytes(monitor.ranks_bytes())} before the model is loaded; request more "
            "memory, or start fewer ranks per node"
        )
    if world.rank == 0 and asked is not None and limit.num_bytes < asked:
        log.warning(
            "memory.host_limit=%s has no effect: %s grants %s",
            format_bytes(asked),
            limit.source,
            format_bytes(limit.num_bytes),
        )
    return monitor


class MemoryExit:
    """Ends a run that is short of memory. ``governor``: None before training begins."""

    def __init__(
        self, comm: Comm, monitor: Monitor, run_dir: Path, resume_point: ResumePoint
    ) -> None:
        self.governor: Governor | None = None
        self._comm, self._monitor = comm, monitor
        self._run_dir, self._resume_point = run_dir, resume_point

    def stop(self, need: Need) -> None:
        """End the world before the kernel does; for the monitor's thread."""
        fail(self._comm, self._error_of(need), self._run_dir)

    def cause_of(self, error: BaseException) -> BaseException:
        """Return what an error means: an allocation that fails is a reason to leave."""
        if self._monitor.mode != "on" or not is_out_of_memory(error):
            return error
        device = self._monitor.device
        if device is not None and is_of_a_device(error):
            need = self._monitor.device_need(device.sample())
        else:
            sample = self._monitor.worst()
            need = self._monitor.need(sample.host_bytes if sample else 0)
        words = f"{need.words}; an allocation failed: {what_failed(error)}"
        return self._error_of(replace(need, words=words))

    def _error_of(self, need: Need) -> ResumableStop:
        advice = f"Before training nothing can be given up: {MORE_MEMORY}"
        taken: list[str] = []
        if self.governor is not None:
            advice, taken = self.governor.advice(need), self.governor.taken
        step = self._resume_point.step or 0
        words = f"stopped before memory ran out while {self._comm.doing[0]}: {need.words}. {advice}"
        return ResumableStop(f"{need.words}. {advice}", step, facts_of(need, taken), words)
