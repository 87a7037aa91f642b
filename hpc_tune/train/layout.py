"""Which layout a run has, settled before its data are prepared: a refusal then costs seconds."""

from dataclasses import replace

from hpc_tune.log import log
from hpc_tune.plan.hardware import machine_of
from hpc_tune.plan.resolve import Resolved, resolve, without_effect
from hpc_tune.step.plan import StepPlan
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model


def resolve_layout(job: Job, model: Model) -> Resolved:
    """Resolve the layout for the machine that the ranks run on. Collective.

    Raises:
        ConfigError: if the axes that are set do not multiply to the world size, or the model cannot
            be laid out like that.
    """
    asked, comm = model.config.parallel, job.setup_comm
    machine = machine_of(comm, job.monitor.limit.num_bytes)
    world = (machine, comm.world.size, comm.world.rank)
    resolved = resolve(asked, model.size, model.built.config, *world)
    if comm.is_rank_0:
        for warning in without_effect(resolved.layout, asked):
            log.warning(warning)
    if job.chosen is None:
        return resolved
    why = f"the shortest step by prediction, {job.chosen.time.seconds:.3g} s"
    return replace(resolved, why=why)


def plan_step(model: Model, resolved: Resolved, loss_share: float) -> StepPlan:
    """Return the plan of a step; ``loss_share`` of the tokens carry loss."""
    config, itemsize = model.built.config, model.built.dtype.itemsize
    return StepPlan(resolved.layout, resolved.parallel, model.size, config, itemsize, loss_share)
