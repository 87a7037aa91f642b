"""A run from its configuration to its outcome: the floors below, composed.

bootstrap -> run directory -> model shapes -> layout -> data -> engine -> resume -> loop -> export
"""

import math
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpc_tune.checkpoint.export import export_adapter, pack_adapter
from hpc_tune.checkpoint.locate import template_of
from hpc_tune.checkpoint.state import Evals, RunState
from hpc_tune.checkpoint.store import Store
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import RunConfig
from hpc_tune.data.layout import TokenStore
from hpc_tune.data.loader import Loader, eval_batches
from hpc_tune.engine.base import Engine
from hpc_tune.engine.mesh import Layout, Place
from hpc_tune.engine.native import NativeEngine
from hpc_tune.engine.wrap import prepare_compiler
from hpc_tune.engine.zero import ZeroEngine
from hpc_tune.errors import HpcTuneError
from hpc_tune.faults import NO_FAULTS, Faults
from hpc_tune.log import configure, log
from hpc_tune.memory.governor import Governor
from hpc_tune.model.build import BuiltModel
from hpc_tune.model.room import asking
from hpc_tune.plan.account import measure
from hpc_tune.plan.choose import micro_rows
from hpc_tune.plan.cost import expected_bytes, flops_per_token, peak_flops
from hpc_tune.rundir import outcome
from hpc_tune.rundir.json_lines import EVENTS, Events
from hpc_tune.rundir.outcome import Outcome
from hpc_tune.rundir.owner import LiveMark, require_shared, this_process
from hpc_tune.train.agreement import agree_on_settings
from hpc_tune.train.choosing import Chosen, choose
from hpc_tune.train.describe import describe
from hpc_tune.train.ending import EarlyLeave, fail
from hpc_tune.train.foresight import compare, foresee
from hpc_tune.train.inputs import Inputs, prepare_data, prepare_model
from hpc_tune.train.layout import settle_layout
from hpc_tune.train.loop import Work, run_loop
from hpc_tune.train.metrics import Metrics
from hpc_tune.train.micro import largest_micro_size
from hpc_tune.train.pressure import Pressure, make_governor
from hpc_tune.train.profile import StepProfile
from hpc_tune.train.reporting import write_report
from hpc_tune.train.resuming import find_checkpoint, restore
from hpc_tune.train.rundir import make_run_dir
from hpc_tune.train.saving import Saver
from hpc_tune.units import format_bytes
from hpc_tune.world.bootstrap import bootstrap, shutdown
from hpc_tune.world.comm import Comm
from hpc_tune.world.hang import HangWatch
from hpc_tune.world.reform import dismiss, wait_outside
from hpc_tune.world.stop import StopFlag


def run(
    config: RunConfig,
    stop: StopFlag | None = None,
    force: bool = False,
    faults: Faults = NO_FAULTS,
) -> int:
    """Train as configured, with all ranks that the launcher started; return the exit code.

    ``stop`` replaces the one that listens to signals, the time limit and the STOP file. ``force``
    starts what the plan says does not fit into memory. ``faults`` are for tests.
    """
    comm = None
    causes: list[Callable[[BaseException], BaseException]] = []
    run_dir = Path(config.run.dir)
    try:
        comm = (faults.join or bootstrap)(config.run, partial(fail, run_dir=run_dir))
        configure(comm.world.rank)
        agree_on_settings(comm, config)
        if stop is None:
            # A file system is not asked for the STOP file by thousands of ranks each second.
            first = comm.is_rank_0
            stop = StopFlag(run_dir if first else None, config.train.time_limit, is_first=first)
        stop.install()
        early = EarlyLeave(comm, stop, run_dir)
        causes.append(early.cause_of)
        chosen, store, outside = None, comm.store, 0
        if config.parallel.layout == "auto":
            # No rank may work for hours here.
            chosen, inside = choose(config, comm.in_training())
            config = chosen.applied(config)
            early.close()
            causes.clear()
            outside = comm.world.size - len(chosen.ranks) if comm.is_rank_0 else 0
            if inside is None:
                return wait_outside(comm)
            comm = inside
            configure(comm.world.rank)
            early = EarlyLeave(comm, stop, run_dir)
            causes.append(early.cause_of)
        result = _run(config, comm, run_dir, stop, early, causes, force, chosen, faults)
        causes.clear()  # they hold the engine, whose process groups must be gone at the end
        shutdown(comm)
        dismiss(store, outside, result.exit_code)
        return result.exit_code
    except (Exception, KeyboardInterrupt) as error:
        cause: BaseException = error
        for cause_of in causes:
            cause = cause_of(cause)
        fail(comm, cause, run_dir)


def _run(
    config: RunConfig,
    comm: Comm,
    run_dir: Path,
    stop: StopFlag,
    early: EarlyLeave,
    causes: list[Callable[[BaseException], BaseException]],
    force: bool,
    chosen: Chosen | None,
    faults: Faults,
) -> Outcome:
    """``causes`` takes what tells of an error what it means."""
    world, is_rank_0 = comm.world, comm.is_rank_0
    lost = partial(fail, comm, run_dir=run_dir)
    comm = replace(comm, hang=HangWatch(config.run.timeout, lost))
    mark = LiveMark(run_dir, this_process(comm.nonce, run_dir), lost)
    making = partial(make_run_dir, config, run_dir, mark)
    previous = comm.on_rank_0("making the run directory", making)
    if world.num_nodes > 1:
        looking = partial(require_shared, run_dir, comm.nonce, comm.roster[0].hostname)
        elsewhere = world.local_rank == 0 and not is_rank_0
        comm.together("finding the run directory", looking if elsewhere else lambda: None)
    events = Events(run_dir / EVENTS if is_rank_0 else None)
    step, saver = 0, None
    governor = comm.together(
        "looking at the memory",
        lambda: make_governor(config.memory, comm, run_dir, faults),
    )
    training = comm.in_training()
    pressure = Pressure(
        training, governor, run_dir, events, lambda: saver.committed_step if saver else step
    )
    causes.append(pressure.cause_of)
    if is_rank_0 and previous.death:
        log.warning(previous.death)
        events.write("warning", message=previous.death)
    governor.start(pressure.leave_at_once)
    kept = config.checkpoint
    store = Store(run_dir / "checkpoints", kept.keep, kept.keep_every, kept.keep_best)
    checkpoint = find_checkpoint(comm, config, store)
    if config.train.deterministic:
        _make_deterministic()
    asked = config  # what a checkpoint keeps and is compared with
    built, config = prepare_model(config, comm, run_dir, fresh=checkpoint is None)
    size = measure(built.module)
    layout, why, parallel = settle_layout(config, comm, governor, built, size)
    if chosen is not None:
        why = f"the shortest step by prediction, {chosen.step_s:.3g} s"
    foreseen = foresee(config, comm, governor, size, layout, built.config, run_dir, force)
    governor.enter("data", "preparing the data", tell=True)
    inputs = Inputs(built, size, *prepare_data(config.data, comm, run_dir, built.directory))
    place = layout.place(world.rank)
    loader = _make_loader(config, inputs, layout, place)
    total_steps = math.ceil(loader.total_rows / config.batch.global_size)
    if is_rank_0:
        words = (layout, why, loader, total_steps, foreseen.verdict)
        describe(config, comm, inputs, *words, events)
    if config.train.compile:
        cache = Path(config.run.compile_cache or run_dir / "compile-cache")
        share = governor.limit.num_bytes // world.local_size
        comm.together(
            "preparing to compile",
            lambda: prepare_compiler(cache, world.node, comm.device, comm.threads, share),
        )
    governor.enter("load", "loading the model", tell=True)
    with asking(governor.ensure):
        engine = comm.together(
            "loading the model",
            lambda: _make_engine(inputs, layout, comm, config, parallel, faults),
        )
    saved = None
    if checkpoint is not None:
        governor.enter("load", "loading a checkpoint", tell=True)
        with asking(governor.ensure):
            saved = restore(comm, checkpoint, engine, asked, built.identity, total_steps)
        comm.together("finding the place in the data", lambda: loader.restore(saved.loader))
        step = saved.step
        log.info("resumed from %s at step %d of %d", checkpoint, step, total_steps)
        events.write("resume", step, path=str(checkpoint))
    early.step = step
    rows = -(-config.batch.global_size // layout.data_size)
    micro_size = _micro_size(config, comm, engine, governor, layout, saved)
    loader.set_micro_size(micro_size)

    model = (size, built.config, layout, parallel, built.dtype.itemsize)
    expected = partial(expected_bytes, *model, inputs.loss_share)

    def state(step: int, place: dict[str, Any], evals: Evals) -> RunState:
        return RunState(
            step,
            total_steps,
            built.identity,
            place,
            asdict(layout),
            micro_size,
            asked.model_dump(),
            evals.loss_at(step),
            asdict(evals),
            pressure.taken,
        )

    full, limit_s = config.tune.method == "full", config.run.timeout
    pack = None if full else partial(pack_adapter, tune=config.tune, base=built.directory)
    saver = Saver(
        training, store, engine, events, kept, limit_s, step, pack, governor.admit, faults
    )
    if saved is not None and not previous.actions:  # a run that was killed left it there alone
        previous = replace(previous, actions=tuple(saved.governor))
    pressure.attach(engine, loader, saver, micro_size, inputs.store.path, previous)
    tokens, num_micro = rows * config.data.seq_len, -(-rows // pressure.micro_size)
    micro = (tokens // num_micro, round(inputs.loss_share * tokens / num_micro))
    sent = sum(expected([micro] * num_micro).values())
    log.info(
        "micro-batches of %d x %d tokens%s",
        min(pressure.micro_size, rows),
        config.data.seq_len,
        f"; a step sends {format_bytes(sent)} per rank" if sent else "",
    )

    def before_update() -> None:
        early.close()
        saver.before_update()

    governor.enter("first step", "beginning the first step", tell=True)
    governor.fence()
    on_cpu = comm.device.type == "cpu"
    peak = None if on_cpu else peak_flops(torch.cuda.get_device_name(comm.device))
    metrics = comm.together(
        "opening the metrics",
        lambda: Metrics(run_dir if is_rank_0 else None, config, total_steps, step, chosen is None),
    )
    result = run_loop(
        Work(
            comm=training,
            config=config,
            engine=engine,
            loader=loader,
            eval_batches=_evaluation(config, inputs.eval_store, layout, place, pressure),
            counts_rows=place.counts_rows,
            saver=saver,
            before_update=before_update,
            state=state,
            evals=Evals.from_json(saved.evals if saved is not None else {}),
            metrics=metrics,
            governor=governor,
            stop=stop,
            total_steps=total_steps,
            flops_per_token=flops_per_token(size, built.config, config.data.seq_len),
            peak_flops=peak * world.size if peak else None,
            expected_bytes=expected,
            pressure=pressure,
            profile=StepProfile(training, run_dir, config.train.profiled_steps, step, total_steps),
            faults=faults,
        ),
        step,
    )
    early.close()
    compare(foreseen.plan, comm, governor, events)
    if chosen is not None:
        events.write("layout", **chosen.compare(metrics.steps_s))
    metrics.close()
    loader.close()
    stop.close()
    comm.on_rank_0("ending the run", lambda: _finish(config, run_dir, store, built, result))
    governor.close()
    events.write("stop", result.step, reason=result.reason)
    events.close()
    if config.run.report and result.has_time:
        comm.on_rank_0("writing the report", lambda: write_report(run_dir))
    if is_rank_0:
        mark.close()
    return result


def _make_deterministic() -> None:
    # cuBLAS reads it at its first use; without it deterministic matrix products are refused.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def _make_engine(
    inputs: Inputs,
    layout: Layout,
    comm: Comm,
    config: RunConfig,
    parallel: ParallelConfig,
    faults: Faults,
) -> Engine:
    common = (layout, comm.device, config.optim, parallel, config.train)
    if parallel.zero_stage is not None:
        return ZeroEngine(inputs.built, *common)
    return NativeEngine(inputs.built, *common, loss_share=inputs.loss_share, faults=faults)


def _make_loader(config: RunConfig, inputs: Inputs, layout: Layout, place: Place) -> Loader:
    loader = Loader(
        inputs.store,
        seq_len=config.data.seq_len,
        packing=config.data.packing,
        seed=config.train.seed,
        global_size=config.batch.global_size,
        total_rows=0,
        rank=place.data,
        size=layout.data_size,
    )
    if config.train.max_steps is not None:
        loader.total_rows = config.train.max_steps * config.batch.global_size
    else:
        loader.total_rows = math.ceil((config.train.epochs or 1) * loader.num_rows_per_epoch)
    return loader


def _micro_size(
    config: RunConfig,
    comm: Comm,
    engine: Engine,
    governor: Governor,
    layout: Layout,
    saved: RunState | None,
) -> int:
    if config.batch.micro_size != "auto":
        return config.batch.micro_size
    if saved is not None and saved.layout == asdict(layout):
        return saved.micro_size
    most_rows = micro_rows(config, layout)
    return largest_micro_size(comm, engine, governor, config.data.seq_len, most_rows)


def _evaluation(
    config: RunConfig, store: TokenStore | None, layout: Layout, place: Place, pressure: Pressure
) -> Any:
    if store is None:
        return None
    return lambda: eval_batches(
        store,
        seq_len=config.data.seq_len,
        packing=config.data.packing,
        num_rows=config.train.eval_rows,
        rank=place.data,
        size=layout.data_size,
        micro_size=pressure.micro_size,
    )


def _finish(
    config: RunConfig, run_dir: Path, store: Store, built: BuiltModel, result: Outcome
) -> None:
    """Export the adapter of a finished run, write the outcome, and say what can be done next."""
    if result.status == "done" and config.tune.method != "full":
        out = run_dir / "export" / "adapter"
        try:
            template = template_of(run_dir, config)
            out = export_adapter(store.steps()[-1], config.tune, built.directory, out, template)
        except OSError as error:
            raise HpcTuneError(f"{out} cannot be written: {error}") from None
        log.info("adapter exported to %s", out)
    try:
        outcome.write(result, run_dir)
    except OSError as error:
        log.warning("%s cannot be written: %s", run_dir / outcome.FILE, error.strerror)
    if result.status == "done":
        log.info(
            "done after %d steps. Next: python -m hpc_tune generate --run %s --prompt '...'",
            result.step,
            run_dir,
        )
    else:
        log.info(
            "stopped at step %s: %s. The same command goes on from here", result.step, result.reason
        )
