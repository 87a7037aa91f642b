"""The sizes of a new configuration, from a plan of its run."""

from pathlib import Path

from hpc_tune.config.init import PlannedSizes
from hpc_tune.config.load import load_config
from hpc_tune.errors import ConfigError, DataError
from hpc_tune.log import log
from hpc_tune.memory.policy import DEVICE_LIMITS, HOST_LIMITS
from hpc_tune.plan.hardware import USUAL_DEVICE, USUAL_HOST, Machine
from hpc_tune.plan.report import make_plan


def plan_sizes(file: Path, nodes: int, gpus: int) -> PlannedSizes | None:
    """Return what a configuration's run needs on GPUs, None where its model cannot be read yet.

    Recomputes as little as fits a usual GPU.
    """
    config = load_config([str(file)], [])
    machine = Machine(nodes, gpus, USUAL_DEVICE, USUAL_HOST)
    log.info("planning the memory of %d x %d GPUs", nodes, gpus)
    for recompute in ("selective", "full"):
        try:
            plan = make_plan(config.changed({"parallel.recompute": recompute}), machine)
        except (ConfigError, DataError) as error:
            log.warning("memory is not planned: %s", error)
            return None
        needed = [phase for phase in plan.phases if not phase.optional]
        on_device = max(phase.device_bytes for phase in needed)
        fits = DEVICE_LIMITS.allows(on_device, USUAL_DEVICE)
        if fits:
            break
    on_node = max(phase.node_bytes(machine) for phase in needed)
    node_gib = -(-int(on_node / HOST_LIMITS.fits) >> 30)
    return PlannedSizes(recompute, node_gib, on_device, USUAL_DEVICE, fits)
