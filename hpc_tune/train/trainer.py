"""The trainer: the engine of a run, this rank's rows, the schedule of the learning rate.

It knows no files and no signals. If a device runs out of memory in a step, all ranks give it up:

    this rank runs out   -> still takes part in the step's messages -> votes to give the step up
    the others           -> before the update                       -> vote, and give it up too
    all                  -> nothing has changed; at the boundary the governor takes an action, and
                            the step is run again

This requires ranks that work independently until the update. With messages within a pass, a rank
could not tell the others in time: the error ends the run, and the next start begins one rung lower
(exit.py).
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hpc_tune.batch import Batch
from hpc_tune.config.schema import OptimConfig
from hpc_tune.data.loader import Loader
from hpc_tune.engine.adamw import learning_rate
from hpc_tune.engine.base import Engine, EngineSettings, StepResult
from hpc_tune.engine.compile import prepare_compiler
from hpc_tune.engine.native import NativeEngine
from hpc_tune.engine.zero.engine import ZeroEngine
from hpc_tune.memory.device import describe_failed_allocation, empty_caches
from hpc_tune.memory.host import trim_heap
from hpc_tune.memory.policy import Phase
from hpc_tune.model.kernels import multiplies_in_tf32, use_tf32
from hpc_tune.step.plan import StepPlan
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model
from hpc_tune.train.reference import KlTerms, clamped_mean_kl, sum_kl_terms
from hpc_tune.world.comm import Comm
from hpc_tune.world.device import find_architecture


def load_engine(job: Job, model: Model, plan: StepPlan) -> Engine:
    """Load the model into the engine of its layout. Collective."""
    config, comm, monitor = model.config, job.setup_comm, job.monitor
    if config.train.compiles:
        cache = Path(config.run.compile_cache or job.dir / "compile-cache")
        share = monitor.limit.num_bytes // comm.world.local_size
        comm.run_and_agree(
            "preparing to compile",
            lambda: prepare_compiler(
                cache, comm.world.node, comm.device, comm.threads, share, config.tune.dropout
            ),
        )
    if multiplies_in_tf32(config.train, model.built.dtype, find_architecture(comm.device)):
        use_tf32(model.built.module)
    settings = EngineSettings(
        plan,
        comm.device,
        config.optim,
        config.train,
        reserve=monitor.require_free_bytes,
        run_and_agree=comm.run_and_agree,
        faults=job.faults,
        row_tokens=plan.num_local_tokens(config.data.seq_len),
    )
    uses_zero = plan.parallel.zero_stage is not None
    monitor.enter(Phase.LOAD, "loading the model", writes_heartbeat=True)
    comm.begin("loading the model")
    return (ZeroEngine if uses_zero else NativeEngine)(model.built, settings)


def make_deterministic() -> None:
    """Make every operation of this process deterministic; those that cannot be raise an error."""
    # cuBLAS reads this at its first use, and refuses deterministic matmuls without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # In this mode torch fills the result of torch.empty with NaN, to expose reads of unwritten
    # memory. There are none, and DeepSpeed allocates a bucket of 64 MiB per micro-batch: filling it
    # takes half of such a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class Trainer:
    """Trains step by step: ``next_batches``, ``accumulate``, ``update``. All are collective.

    A step has two parts, since a save that still reads the weights must be waited for in between.
    ``step``: how many steps are done. ``began_s`` and ``data_s``: when the current step began, on
    the monotonic clock, and how long it waited for its rows. ``lr``: the rate of the last update.
    ``out_of_memory_reason``: this rank's failed allocation, if the last step was given up for it.
    """

    def __init__(
        self,
        comm: Comm,
        engine: Engine,
        loader: Loader,
        optim: OptimConfig,
        steps: range,
        can_repeat: bool,
    ) -> None:
        """Do ``steps``; the run ends with the last one. ``can_repeat``: the governor frees memory
        after a step is given up, so that the step can be repeated.
        """
        self.engine, self.loader = engine, loader
        self.step, self.total_steps = steps.start, steps.stop
        self.began_s = self.data_s = self.lr = 0.0
        self.out_of_memory_reason: str | None = None
        self._comm, self._optim = comm, optim
        self._repeats = engine.can_repeat_steps and can_repeat
        self._position = loader.state()

    @property
    def position(self) -> dict[str, Any]:
        """The loader's position in the data before the rows of the next step."""
        return self._position

    def next_batches(self) -> list[Batch]:
        """Begin a step: return this rank's micro-batches."""
        self._position, self.began_s = self.loader.state(), time.monotonic()
        batches = self.loader.next_step()
        self.data_s = time.monotonic() - self.began_s
        return batches

    def reread_batches(self) -> list[Batch]:
        """Return the rows of the current step again, in micro-batches of the present size."""
        self.loader.restore(self._position)
        return self.loader.next_step()

    def accumulate(
        self, batches: Sequence[Batch], global_terms: float, global_tokens: float = 1.0
    ) -> bool:
        """Compute the gradients of a step; False if a rank ran out of memory and all gave it up.

        Raises:
            torch.OutOfMemoryError: if this rank ran out and the step cannot be repeated.
        """
        self.out_of_memory_reason = None
        if any(batch.mismatched_batch is not None for batch in batches):
            kl = self._measure_kl(batches)
            if kl is None:
                return self._give_up_step()
            batches = [batch.with_kl(kl) for batch in batches]
        error = self.engine.accumulate(batches, global_terms, global_tokens)
        if error is not None:
            self._note_out_of_memory(error)
            del error
        if not self._repeats or self._comm.sum([self.out_of_memory_reason is not None]) == [0]:
            return True
        return self._give_up_step()

    def _measure_kl(self, batches: Sequence[Batch]) -> float | None:
        """Return the step's KL divergence; None if a rank ran out of memory in its passes.

        The ranks learn that from the sum itself, so no rank waits in another collective.
        """
        terms = KlTerms()
        try:
            mismatched_batches = [b.mismatched_batch for b in batches if b.mismatched_batch]
            terms = sum_kl_terms(self.engine, mismatched_batches, is_within_step=True)
        except torch.OutOfMemoryError as error:
            self._note_out_of_memory(error)
        ran_out = self.out_of_memory_reason is not None
        log_prob_change_sum, num_answers, num_failed = self._comm.sum([*terms, ran_out])
        return None if num_failed else clamped_mean_kl(log_prob_change_sum, num_answers)

    def _note_out_of_memory(self, error: torch.OutOfMemoryError) -> None:
        if not self._repeats:
            raise error
        self.out_of_memory_reason = describe_failed_allocation(error)

    def _give_up_step(self) -> bool:
        # The memory that the error held is free only now, and fragmented.
        trim_heap()
        empty_caches()
        self.loader.restore(self._position)
        return False

    def update(self) -> StepResult:
        """Update the weights with the scheduled learning rate."""
        self.lr = learning_rate(self._optim, self.step, self.total_steps)
        result = self.engine.update(self.lr)
        self.step += 1
        self._position = self.loader.state()
        return result
