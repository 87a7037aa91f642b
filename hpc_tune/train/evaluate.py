"""The held-out loss of a run: when it is measured, and how."""

import math
import time
from collections.abc import Callable, Iterable, Iterator

from hpc_tune.batch import Batch
from hpc_tune.checkpoint.state import Evals
from hpc_tune.config.schema import TrainConfig
from hpc_tune.data.loader import HeldOut
from hpc_tune.data.sampler import SampleOrder
from hpc_tune.engine.base import Engine
from hpc_tune.log import log
from hpc_tune.step.plan import StepPlan
from hpc_tune.train.data import Data
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model
from hpc_tune.world.comm import Comm
from hpc_tune.world.stop import StopFlag

Batches = Callable[[], Iterable[Batch]]


def held_out_batches(job: Job, model: Model, plan: StepPlan, data: Data) -> Batches | None:
    """Return what gives this rank's part of the held-out data; None if there is none."""
    config, store = model.config, data.eval_store
    if store is None:
        return None
    held_out = HeldOut(
        store,
        SampleOrder(config.data.seq_len, config.data.packing, seed=0),
        num_rows=config.train.eval_rows,
        rank=plan.layout.coordinates(job.setup_comm.world.rank).data,
        size=plan.layout.data_size,
    )
    return lambda: held_out.batches(data.loader.micro_size)


class Evaluation:
    """Measures the mean loss over held-out data's loss tokens. ``evals``: what was measured."""

    def __init__(
        self,
        comm: Comm,
        stop: StopFlag,
        batches: Batches | None,
        train: TrainConfig,
        total_steps: int,
        evals: Evals,
    ) -> None:
        """Measure ``batches`` by the settings of ``train``; nothing where they are None."""
        self.evals = evals
        self._comm, self._stop, self._batches = comm, stop, batches
        self._every, self._total = train.eval_every_steps, total_steps

    def is_due(self, step: int) -> bool:
        """Whether it is measured after ``step``: at the start, at the end, in between."""
        if self._batches is None:
            return False
        # Beyond the end where max_steps was lowered.
        is_end = step == 0 or step >= self._total
        return is_end or (self._every is not None and step % self._every == 0)

    def is_missing(self, step: int) -> bool:
        """Whether it is due after ``step`` and has not been measured."""
        return self.is_due(step) and self.evals.loss_at(step) is None

    def measure(self, engine: Engine, step: int, margin_s: float) -> tuple[int, float] | None:
        """Return (loss tokens, seconds) of an evaluation after ``step``. Collective.

        None if it was cut, since a rank is asked to stop, or has no more than ``margin_s`` left.
        """
        assert self._batches is not None, "is_due"
        given, was_cut = self._batches, False

        def batches() -> Iterator[Batch]:
            nonlocal was_cut
            for batch in given():
                if self._comm.sum([self._stop.is_asked(margin_s)]) != [0]:
                    was_cut = True
                    return
                yield batch

        log.info("step %d: evaluating on held-out data", step)
        began_s = time.monotonic()
        loss_sum, tokens = engine.evaluate(batches())
        if was_cut:
            log.info("step %d: evaluation interrupted to stop in time", step)
            return None
        eval_s, loss = time.monotonic() - began_s, loss_sum / max(1, tokens)
        self.evals = self.evals.with_(step, loss)
        if not math.isfinite(loss):
            log.warning(
                "step %d: the held-out loss is %s; it is never taken for the best", step, loss
            )
        log.info("step %d: held-out loss %.4f over %d tokens (%.1fs)", step, loss, tokens, eval_s)
        return tokens, eval_s

    def say_change(self) -> None:
        """Log how the loss changed over the run."""
        first, last = self.evals.first, self.evals.last
        if first is not None and last is not None and first != last:
            (_, before), (_, after) = first, last
            change = f" ({100 * (after / before - 1):+.1f}%)" if before else ""
            log.info("held-out loss %.4f -> %.4f%s", before, after, change)
