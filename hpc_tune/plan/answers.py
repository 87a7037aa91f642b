"""What commands ask of a plan: whether a run fits and what would help, and sizes for a new one."""

from collections.abc import Mapping
from typing import Any

from hpc_tune.config.constraints import check
from hpc_tune.config.init import Sizes
from hpc_tune.config.schema import RunConfig
from hpc_tune.errors import ConfigError, DataError
from hpc_tune.log import log
from hpc_tune.memory.policy import DEVICE, HOST
from hpc_tune.plan.advice import check_remedies
from hpc_tune.plan.hardware import USUAL_DEVICE, USUAL_HOST, Machine
from hpc_tune.plan.memory_model import Save
from hpc_tune.plan.report import Plan, make_plan


def plan_with_advice(
    config: RunConfig, machine: Machine, save: Save = "streamed", masked: bool = False
) -> tuple[Plan, list[str]]:
    """Return the plan of a run and, where it does not fit, changes that were planned too.

    Raises:
        ConfigError, DataError: as ``make_plan``.
    """

    def fits_with(changes: Mapping[str, Any]) -> bool:
        changed = config.changed(changes)
        try:
            is_allowed = set(check(changed)) <= set(check(config))
            return is_allowed and make_plan(changed, machine, save, masked).fits
        except ConfigError:
            return False

    plan = make_plan(config, machine, save, masked)
    return plan, plan.advice if plan.fits else check_remedies(plan.remedies, fits_with)


def sizes_for(config: RunConfig, nodes: int, gpus: int) -> Sizes | None:
    """Return what a run on GPUs needs, None where the model cannot be read yet.

    Recomputes as little as fits a usual GPU.
    """
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
        fits = on_device <= DEVICE.fits * USUAL_DEVICE
        if fits:
            break
    on_node = max(phase.node_bytes(machine) for phase in needed)
    node_gib = -(-int(on_node / HOST.fits) >> 30)
    return Sizes(recompute, node_gib, on_device, USUAL_DEVICE, fits)
