"""The held-out loss of a run: when it is measured, and how."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hpc_tune.batch import Batch
from hpc_tune.checkpoint.state import Evals
from hpc_tune.config.schema import TrainConfig
from hpc_tune.data.loader import HeldOut
from hpc_tune.data.sampler import SampleOrder
from hpc_tune.engine.base import Engine, evaluate
from hpc_tune.log import log
from hpc_tune.model.objective import measures_of
from hpc_tune.rundir import displacement
from hpc_tune.step.plan import StepPlan
from hpc_tune.train.data import Data
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model
from hpc_tune.train.reference import mean_kl
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
    if data.eval_reference is not None:
        held_out.set_reference(data.eval_reference)
    return lambda: held_out.batches(data.loader.micro_size)


@dataclass(frozen=True)
class Measured:
    """What an evaluation is over, tokens or pairs, how long it took, and more than the loss."""

    terms: int
    seconds: float
    measures: dict[str, float]


class Evaluation:
    """Measures the mean loss over held-out data's loss tokens. ``evals``: what was measured."""

    def __init__(
        self,
        comm: Comm,
        stop: StopFlag,
        plan: StepPlan,
        batches: Batches | None,
        train: TrainConfig,
        total_steps: int,
        evals: Evals,
        has_labels: bool = False,
    ) -> None:
        """Measure ``batches`` by the settings of ``train``; nothing where they are None.

        ``has_labels``: they are of labelled answers, whose mean KL divergence is measured first.
        """
        self.evals = evals
        self._comm, self._stop, self._plan, self._batches = comm, stop, plan, batches
        self._every, self._total = train.eval_every_steps, total_steps
        self._has_labels = has_labels
        self._patience = train.stop_after_evals

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

    @property
    def no_better(self) -> str | None:
        """Why the run is done before its last step: the loss has stopped falling. Else None.

        As the EarlyStoppingCallback of transformers, without a threshold.
        """
        evals = self.evals
        if self._patience is None or evals.since_best < self._patience:
            return None
        best = "was never a number"
        if evals.best is not None:
            best = f"has not fallen below {evals.best[1]:.4f} of step {evals.best[0]}"
        return f"the held-out loss {best} for {evals.since_best} evaluations"

    def measure(self, engine: Engine, step: int, margin_s: float) -> Measured | None:
        """Evaluate after ``step``. Collective.

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
        kl = 0.0
        if self._has_labels:
            others = (b.mismatched for b in batches() if b.mismatched is not None)
            kl = mean_kl(engine, others, self._comm)
        with_kl = (batch.with_kl(kl) if batch.pairs else batch for batch in batches())
        sums, terms = evaluate(engine, with_kl, self._plan, self._comm.device)
        if was_cut:
            log.info("step %d: evaluation interrupted to stop in time", step)
            return None
        eval_s, loss = time.monotonic() - began_s, sums[0] / max(1, terms)
        measures = measures_of(sums, terms)
        self.evals = self.evals.with_(step, loss, measures.get("chosen_log_prob"))
        if not math.isfinite(loss):
            log.warning(
                "step %d: the held-out loss is %s; it is never taken for the best", step, loss
            )
        over = f"{terms} tokens" if self._plan.num_sums == 1 else f"{terms} pairs"
        also = "".join(f", {name.replace('_', ' ')} {v:.4g}" for name, v in measures.items())
        log.info("step %d: held-out loss %.4f over %s%s (%.1fs)", step, loss, over, also, eval_s)
        if len(self.evals.chosen) == displacement.MIN_FALLS + 1:  # once for each time that it falls
            log.warning("step %d: %s", step, displacement.warning(self.evals.chosen))
        return Measured(terms, eval_s, measures)

    def say_change(self) -> None:
        """Log how the loss changed over the run."""
        first, last = self.evals.first, self.evals.last
        if first is not None and last is not None and first != last:
            (_, before), (_, after) = first, last
            change = f" ({100 * (after / before - 1):+.1f}%)" if before else ""
            log.info("held-out loss %.4f -> %.4f%s", before, after, change)
