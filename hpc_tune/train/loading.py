"""The engine of a run: the compiler prepared, the model partitioned and loaded."""

import os
from pathlib import Path

import torch

from hpc_tune.engine.base import Engine, EngineSettings
from hpc_tune.engine.compile import prepare_compiler
from hpc_tune.engine.native import NativeEngine
from hpc_tune.engine.zero.engine import ZeroEngine
from hpc_tune.model.tf32 import capability_of, multiplies_in_tf32, use_tf32
from hpc_tune.step.plan import StepPlan
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model


def load_engine(job: Job, model: Model, plan: StepPlan) -> Engine:
    """Load the model into the engine of its layout. Collective."""
    config, comm, monitor = model.config, job.setup_comm, job.monitor
    if config.train.compile:
        cache = Path(config.run.compile_cache or job.dir / "compile-cache")
        share = monitor.limit.num_bytes // comm.world.local_size
        comm.run_and_agree(
            "preparing to compile",
            lambda: prepare_compiler(cache, comm.world.node, comm.device, comm.threads, share),
        )
    if multiplies_in_tf32(config.train, model.built.dtype, capability_of(comm.device)):
        use_tf32(model.built.module)
    settings = EngineSettings(
        plan,
        comm.device,
        config.optim,
        config.train,
        reserve=monitor.ensure,
        run_and_agree=comm.run_and_agree,
        faults=job.faults,
    )
    uses_zero = plan.parallel.zero_stage is not None
    monitor.enter("load", "loading the model", tell=True)
    comm.begin("loading the model")
    return (ZeroEngine if uses_zero else NativeEngine)(model.built, settings)


def make_deterministic() -> None:
    """Make every operation of this process deterministic, or fail where it has no such version."""
    # cuBLAS reads this at its first use, and refuses deterministic matrix products without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
