"""Which layout a run has, settled before its data are prepared: a refusal then costs seconds."""

from dataclasses import dataclass

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.engine.mesh import Layout, MeshCoordinates
from hpc_tune.log import log
from hpc_tune.memory.monitor import Monitor
from hpc_tune.plan.candidates import check_layout, choose_layout, keeps_gathered, without_effect
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model
from hpc_tune.world.comm import Comm


@dataclass(frozen=True)
class Resolved:
    """The layout, why it is the one, this rank's place in it, and the settings it runs with."""

    layout: Layout
    why: str
    coordinates: MeshCoordinates
    parallel: ParallelConfig


def resolve(job: Job, model: Model) -> Resolved:
    """Settle the layout. Collective."""
    asked, comm, size = model.config.parallel, job.comm, model.size
    room = bytes_per_rank(job.monitor, comm)
    layout, why = choose_layout(asked, comm.world.size, size, room, _ranks_per_node(comm))
    check_layout(layout, asked, model.built.config)
    if comm.is_rank_0:
        for warning in without_effect(layout, asked):
            log.warning(warning)
    if job.chosen is not None:
        why = f"the shortest step by prediction, {job.chosen.step_s:.3g} s"
    parallel = asked.model_copy(update={"reshard": keeps_gathered(asked, size, layout, room)})
    return Resolved(layout, why, layout.coordinates(comm.world.rank), parallel)


def bytes_per_rank(monitor: Monitor, comm: Comm) -> int:
    """Return the least that any rank has for what it computes with, in bytes. Collective."""
    if comm.device.type == "cuda":
        import torch

        least = torch.cuda.get_device_properties(comm.device).total_memory
    else:
        least = monitor.limit.num_bytes // comm.world.local_size
    return -int(comm.max([-least])[0])


def _ranks_per_node(comm: Comm) -> int:
    """Return how many ranks each node has, 1 where they have different numbers. Collective."""
    here = comm.world.local_size
    most, least = comm.max([here, -here])
    return here if most == -least else 1
