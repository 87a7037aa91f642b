"""Which layout a run has, settled before its data are prepared: a refusal then costs seconds."""

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import RunConfig
from hpc_tune.engine.mesh import Layout
from hpc_tune.log import log
from hpc_tune.memory.governor import Governor
from hpc_tune.model.build import BuiltModel
from hpc_tune.plan.account import ModelSize
from hpc_tune.plan.choose import check_layout, choose_layout, keeps_gathered, without_effect
from hpc_tune.world.bootstrap import Session
from hpc_tune.world.collective import max_of


def settle_layout(
    config: RunConfig, session: Session, governor: Governor, built: BuiltModel, size: ModelSize
) -> tuple[Layout, str, ParallelConfig]:
    """Return the layout, why it is the one, and the settings it runs with. Collective."""
    room = bytes_per_rank(governor, session)
    per_node = _ranks_per_node(session)
    layout, why = choose_layout(config.parallel, session.world.size, size, room, per_node)
    check_layout(layout, config.parallel, built.config)
    if session.world.rank == 0:
        for warning in without_effect(layout, config.parallel):
            log.warning(warning)
    reshard = keeps_gathered(config.parallel, size, layout, room)
    return layout, why, config.parallel.model_copy(update={"reshard": reshard})


def bytes_per_rank(governor: Governor, session: Session) -> int:
    """Return the least that any rank has for what it computes with, in bytes. Collective."""
    if session.device.type == "cuda":
        import torch

        least = torch.cuda.get_device_properties(session.device).total_memory
    else:
        least = governor.limit.num_bytes // session.world.local_size
    return -int(max_of(session, [-least])[0])


def _ranks_per_node(session: Session) -> int:
    """Return how many ranks each node has, 1 where they have different numbers. Collective."""
    here = session.world.local_size
    most, least = max_of(session, [here, -here])
    return here if most == -least else 1
