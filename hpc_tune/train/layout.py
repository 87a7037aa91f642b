"""Which layout a run has, settled before its data are prepared: a refusal then costs seconds."""

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import RunConfig
from hpc_tune.engine.mesh import Layout
from hpc_tune.log import log
from hpc_tune.memory.governor import Governor
from hpc_tune.model.build import BuiltModel
from hpc_tune.plan.account import ModelSize
from hpc_tune.plan.choose import check_layout, choose_layout, keeps_gathered, without_effect
from hpc_tune.world.comm import Comm


def settle_layout(
    config: RunConfig, comm: Comm, governor: Governor, built: BuiltModel, size: ModelSize
) -> tuple[Layout, str, ParallelConfig]:
    """Return the layout, why it is the one, and the settings it runs with. Collective."""
    room = bytes_per_rank(governor, comm)
    per_node = _ranks_per_node(comm)
    layout, why = choose_layout(config.parallel, comm.world.size, size, room, per_node)
    check_layout(layout, config.parallel, built.config)
    if comm.is_rank_0:
        for warning in without_effect(layout, config.parallel):
            log.warning(warning)
    reshard = keeps_gathered(config.parallel, size, layout, room)
    return layout, why, config.parallel.model_copy(update={"reshard": reshard})


def bytes_per_rank(governor: Governor, comm: Comm) -> int:
    """Return the least that any rank has for what it computes with, in bytes. Collective."""
    if comm.device.type == "cuda":
        import torch

        least = torch.cuda.get_device_properties(comm.device).total_memory
    else:
        least = governor.limit.num_bytes // comm.world.local_size
    return -int(comm.max([-least])[0])


def _ranks_per_node(comm: Comm) -> int:
    """Return how many ranks each node has, 1 where they have different numbers. Collective."""
    here = comm.world.local_size
    most, least = comm.max([here, -here])
    return here if most == -least else 1
