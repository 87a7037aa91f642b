"""What the loop trains with: saves, metrics and the governor's levers, around an engine."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from hpc_tune.batch import Batch
from hpc_tune.checkpoint.export import pack_adapter
from hpc_tune.checkpoint.staging import CudaDevice
from hpc_tune.checkpoint.state import Evals, RunState
from hpc_tune.data.loader import HeldOut
from hpc_tune.data.sampler import SampleOrder
from hpc_tune.engine.base import Engine
from hpc_tune.log import log
from hpc_tune.plan.hardware import peak_flops
from hpc_tune.plan.resolve import most_micro_rows, rows_per_rank
from hpc_tune.probe.software import git_commit
from hpc_tune.step.layout import Layout, MeshCoordinates
from hpc_tune.step.messages import expected_bytes
from hpc_tune.step.plan import StepPlan
from hpc_tune.step.size import attention_flops, weight_flops
from hpc_tune.train.attempt import Attempts
from hpc_tune.train.checkpointing import Checkpointer, WriteOptions
from hpc_tune.train.data import Data
from hpc_tune.train.exit import fail
from hpc_tune.train.governor import Governor
from hpc_tune.train.job import Job
from hpc_tune.train.levers import loader_levers
from hpc_tune.train.loop import Work
from hpc_tune.train.metrics import Metrics
from hpc_tune.train.micro import largest_micro_size
from hpc_tune.train.model import Model
from hpc_tune.train.profile import StepProfile
from hpc_tune.train.rank_work import RankWork
from hpc_tune.train.trackers import Facts, Trackers, open_trackers
from hpc_tune.units import format_bytes
from hpc_tune.world.comm import Comm
from hpc_tune.world.flight_recorder import FOLDER, keep_trace
from hpc_tune.world.step_limit import StepLimit


def prepare_training(
    job: Job, model: Model, plan: StepPlan, data: Data, engine: Engine, saved: RunState | None
) -> Work:
    """Return what the loop works with; ``saved`` is the state that it resumes. Collective."""
    config, comm, total_steps = model.config, job.setup_comm, data.total_steps
    coordinates = plan.layout.coordinates(comm.world.rank)
    step = saved.step if saved is not None else 0
    micro_size = _micro_size(job, model, plan.layout, engine, saved)
    data.loader.set_micro_size(micro_size)
    saver = _saver(job, model, engine)
    governor = job.memory_exit.governor = _governor(job, engine, data, saver, saved)
    _log_micro_batches(model, data, plan)
    job.monitor.enter("first step", "beginning the first step", tell=True)
    job.monitor.limit_private_memory()
    peak = _peak_flops(comm)

    def before_update() -> None:
        job.watchdog.close()
        saver.before_update()

    def state(step: int, loader_state: dict[str, Any], evals: Evals) -> RunState:
        return RunState(
            step,
            total_steps,
            model.built.identity,
            loader_state,
            asdict(plan.layout),
            micro_size,
            job.config.model_dump(),
            *(evals.loss_at(step), asdict(evals), governor.taken, model.sample),
        )

    return Work(
        comm=job.step_comm,
        config=config,
        engine=engine,
        loader=data.loader,
        eval_batches=_evaluation(model, plan.layout, coordinates, data),
        counts_rows=coordinates.counts_rows,
        saver=saver,
        attempts=Attempts(job.step_comm, engine, governor, before_update),
        state=state,
        evals=Evals.from_json(saved.evals if saved is not None else {}),
        metrics=_metrics(job, model, total_steps, step),
        rank_work=_rank_work(job, total_steps, step),
        monitor=job.monitor,
        stop=job.stop,
        start_step=step,
        total_steps=total_steps,
        weight_flops=weight_flops(model.size, model.built.config),
        attention_flops=partial(attention_flops, model.built.config),
        peak_flops=peak * comm.world.size if peak else None,
        plan=plan,
        governor=governor,
        step_limit=_step_limit(job),
        profile=StepProfile(job.step_comm, job.dir, config.train.profiled_steps, step, total_steps),
        faults=job.faults,
    )


def _peak_flops(comm: Comm) -> float | None:
    """Return those of one rank's device, None where they are not known."""
    if comm.device.type == "cpu":
        return None
    return peak_flops(torch.cuda.get_device_name(comm.device))


def _step_limit(job: Job) -> StepLimit:
    comm, on_gpu = job.step_comm, job.setup_comm.device.type == "cuda"
    lost = partial(fail, job.setup_comm, run_dir=job.dir)
    keep = partial(keep_trace, job.dir / FOLDER, comm.world.rank, on_gpu)
    return StepLimit(comm, job.config.run.timeout, lost, keep)


def _micro_size(
    job: Job, model: Model, layout: Layout, engine: Engine, saved: RunState | None
) -> int:
    config = model.config
    if config.batch.micro_size != "auto":
        return config.batch.micro_size
    if saved is not None and saved.layout == asdict(layout):
        return saved.micro_size
    most_rows = most_micro_rows(config.batch, layout)
    limit = _step_limit(job)
    limit.enter("measuring micro-batches")
    with limit.over():
        return largest_micro_size(
            job.setup_comm, engine, job.monitor, config.data.seq_len, most_rows
        )


def _saver(job: Job, model: Model, engine: Engine) -> Checkpointer:
    tune, pack = model.config.tune, None
    if tune.method != "full":
        pack = partial(pack_adapter, tune=tune, base=model.built.directory)
    device = CudaDevice if job.setup_comm.device.type == "cuda" else None
    writing = WriteOptions(
        job.config.run.timeout,
        job.monitor.admit,
        device,
        lambda: not job.owner.is_anothers(),
        job.faults,
    )
    common = (job.step_comm, job.store, engine, job.events, job.config.checkpoint)
    return Checkpointer(*common, writing, job.resume_point, pack)


def _governor(
    job: Job, engine: Engine, data: Data, saver: Checkpointer, saved: RunState | None
) -> Governor:
    previous = job.previous
    if saved is not None and not previous.actions:  # a killed run left them only in its checkpoint
        previous = replace(previous, actions=tuple(saved.governor))
    levers = loader_levers(data.loader, data.store.path) | saver.levers | engine.levers
    return Governor(job.step_comm, job.monitor, job.events, levers, previous)


def _metrics(job: Job, model: Model, total_steps: int, step: int) -> Metrics:
    def make() -> Metrics:
        if not job.setup_comm.is_rank_0:
            return Metrics(None, total_steps, step)
        trackers = _trackers(job, model, step)
        return Metrics(job.dir, total_steps, step, trackers, advise=job.chosen is None)

    return job.setup_comm.run_and_agree("opening the metrics", make)


def _rank_work(job: Job, total_steps: int, step: int) -> RankWork:
    run_dir = job.dir if job.setup_comm.is_rank_0 else None
    return job.setup_comm.run_and_agree(
        "opening ranks.jsonl", lambda: RankWork(job.step_comm, run_dir, step, total_steps)
    )


def _trackers(job: Job, model: Model, step: int) -> Trackers:
    run, settings = job.config.run, model.config.model_dump(mode="json")
    name = run.name or job.dir.absolute().name
    facts = Facts(job.dir, name, run.tags, run.notes, git_commit(), settings, step)
    return open_trackers(run, facts)


def _log_micro_batches(model: Model, data: Data, plan: StepPlan) -> None:
    seq_len = model.config.data.seq_len
    rows = rows_per_rank(model.config.batch, plan.layout)
    micro_size = data.loader.micro_size
    tokens, num_micro = rows * seq_len, -(-rows // micro_size)
    micro = (tokens // num_micro, round(plan.loss_share * tokens / num_micro))
    sent = sum(expected_bytes(plan, [micro] * num_micro).values())
    log.info(
        "micro-batches of %d x %d tokens%s",
        *(min(micro_size, rows), seq_len),
        f"; a step sends {format_bytes(sent)} per rank" if sent else "",
    )


def _evaluation(
    model: Model, layout: Layout, coordinates: MeshCoordinates, data: Data
) -> Callable[[], Iterable[Batch]] | None:
    config, store = model.config, data.eval_store
    if store is None:
        return None
    held_out = HeldOut(
        store,
        SampleOrder(config.data.seq_len, config.data.packing, seed=0),
        num_rows=config.train.eval_rows,
        rank=coordinates.data,
        size=layout.data_size,
    )
    return lambda: held_out.batches(data.loader.micro_size)
