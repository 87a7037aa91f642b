"""The held-out loss of a run: when and how it is measured."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from hpc_tune.batch import Batch
from hpc_tune.checkpoint.state import Evals, RunState
from hpc_tune.config.schema import TrainConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.data.loader import HeldOutRows, Loader
from hpc_tune.data.order import SampleOrder
from hpc_tune.engine.base import Engine, evaluate
from hpc_tune.log import LOG_ON_RANK_0_ONLY, log
from hpc_tune.model.objective import compute_metrics, format_metrics, with_zero_rewards
from hpc_tune.rundir import facts
from hpc_tune.rundir.json_lines import EventsWriter
from hpc_tune.step.plan import StepPlan
from hpc_tune.train.data import Data
from hpc_tune.train.job import Job
from hpc_tune.train.model import Model
from hpc_tune.train.reference import mean_kl
from hpc_tune.world.comm import Comm
from hpc_tune.world.stop import StopFlag

BatchFactory = Callable[[], Iterable[Batch]]
HeldOutBatches = Mapping[str, BatchFactory]


def held_out_batches(job: Job, model: Model, plan: StepPlan, data: Data) -> HeldOutBatches:
    """Return functions that yield this rank's batches of held-out data, by source name."""
    config, batches_by_source = model.config, {}
    for number, source in enumerate(data.held_out):
        held_out = HeldOutRows(
            source.store,
            SampleOrder(config.data.seq_len, config.data.packing, seed=0),
            num_rows=config.train.eval_rows,
            rank=plan.layout.coordinates(job.setup_comm.world.rank).data,
            size=plan.layout.data_parallel_size,
            document_limit=source.limit,
        )
        if data.eval_references:
            held_out.set_reference_log_probs(data.eval_references[number])
        batches_by_source[source.name] = partial(_iter_batches, held_out, data.loader)
    return batches_by_source


def fingerprint_held_out_data(data: Data, num_rows: int | None) -> str:
    """Return a hash of the held-out data that is evaluated, "" if nothing is held out.

    ``num_rows``: how many rows of each source are evaluated, None for all. Losses with different
    hashes cannot be compared.
    """
    if not data.held_out:
        return ""
    sources = sorted((s.store.attributes.content, s.limit or 0) for s in data.held_out)
    return hashlib.sha256(json.dumps([sources, num_rows]).encode()).hexdigest()[:16]


def restore_evals(saved_state: RunState | None, held_out_hash: str, events: EventsWriter) -> Evals:
    """Return the evaluations in ``saved_state`` unless they used held-out data of another hash.

    If so, log and record the change, and return no evaluations. An empty hash (unknown) fits any.
    """
    if saved_state is None:
        return Evals()
    evals = Evals.from_json(saved_state.evals)
    if (
        evals.last is None
        or "" in (held_out_hash, saved_state.held_out)
        or held_out_hash == saved_state.held_out
    ):
        return evals
    log.warning(
        "resume: the held-out losses up to step %d are over other held-out data, or another "
        "train.eval_rows: later losses are not compared with them, and the best is chosen among "
        "the later ones only",
        evals.last[0],
        extra=LOG_ON_RANK_0_ONLY,
    )
    events.write("held_out", saved_state.step)
    return Evals()


def _iter_batches(held_out: HeldOutRows, loader: Loader) -> Iterator[Batch]:
    return held_out.batches(loader.micro_size)


@dataclass(frozen=True)
class EvalResult:
    """What an evaluation of ``loss_terms`` loss tokens or pairs measured besides its mean loss.

    ``losses``: the loss of each source by name, if sources have names; the loss is their mean.
    """

    loss_terms: int
    seconds: float
    preference_metrics: dict[str, float]
    losses: dict[str, float] = field(default_factory=dict)


class Evaluation:
    """Measures the mean loss over the loss tokens, pairs or labeled answers of held-out data.

    Several sources are measured separately; the loss is the mean of theirs. ``evals``: the results.
    """

    def __init__(
        self,
        comm: Comm,
        stop: StopFlag,
        plan: StepPlan,
        batches: HeldOutBatches,
        train: TrainConfig,
        total_steps: int,
        evals: Evals,
        tune: TuneConfig,
    ) -> None:
        """Measure ``batches`` as set in ``train``; do nothing if there are none.

        For labeled answers, the mean KL divergence is measured first.
        """
        self.evals = evals
        self._comm, self._stop, self._plan, self._batches = comm, stop, plan, batches
        self._interval_steps, self._total_steps = train.eval_every_steps, total_steps
        self._has_labels, self._has_reference = tune.form == "labels", tune.has_reference
        self._patience = train.stop_after_evals

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after ``step``: at the start, at the end, and in between if set."""
        if not self._batches:
            return False
        # A step may lie beyond the end if max_steps was lowered.
        is_end = step == 0 or step >= self._total_steps
        return is_end or (self._interval_steps is not None and step % self._interval_steps == 0)

    def is_overdue(self, step: int) -> bool:
        """Whether an evaluation is due after ``step`` and has not been done."""
        return self.is_due(step) and self.evals.loss_at(step) is None

    @property
    def early_stop_reason(self) -> str | None:
        """Why the run ends early (the held-out loss has stopped falling), else None.

        The same rule as the EarlyStoppingCallback of transformers without a threshold.
        """
        evals = self.evals
        if self._patience is None or evals.since_best < self._patience:
            return None
        best = "was never a number"
        if evals.best is not None:
            best = f"has not fallen below {evals.best[1]:.4f} of step {evals.best[0]}"
        return f"the held-out loss {best} for {evals.since_best} evaluations"

    def measure(self, engine: Engine, step: int, margin_s: float) -> EvalResult | None:
        """Evaluate after ``step``. Collective.

        None if interrupted: a rank was asked to stop, or has no more than ``margin_s`` left.
        """
        log.info("step %d: evaluating on held-out data", step)
        began_s = time.monotonic()
        losses, all_sums, num = {}, [0.0] * self._plan.num_sums, 0
        for name, make_batches in self._batches.items():
            source_result = self._evaluate_source(engine, make_batches, margin_s)
            if source_result is None:
                log.info("step %d: evaluation interrupted to stop in time", step)
                return None
            sums, loss_terms, num_of_source = source_result
            losses[name] = sums[0] / (loss_terms or 1.0)
            all_sums = [one + other for one, other in zip(all_sums, sums, strict=True)]
            num += num_of_source
        if step == 0 and self._has_reference:
            all_sums = [*with_zero_rewards(all_sums)]
        loss = sum(losses.values()) / len(losses)
        eval_s, preference_metrics = time.monotonic() - began_s, compute_metrics(all_sums, num)
        self.evals = self.evals.with_eval(step, loss, preference_metrics.get("chosen_log_prob"))
        for name, source_loss in losses.items():
            if not math.isfinite(source_loss):
                log.warning(
                    "step %d: the held-out loss%s is %s; it never counts as the best",
                    *(step, f" of {name}" if name else "", source_loss),
                    extra=LOG_ON_RANK_0_ONLY,
                )
        unit = "labeled answers" if self._has_labels else "pairs"
        size = f"{num} {'tokens' if self._plan.num_sums == 1 else unit}"
        stats = f", {format_metrics(preference_metrics)}" if preference_metrics else ""
        if list(losses) == [""]:
            losses = {}
        values = ", ".join(f"{name} {source_loss:.4f}" for name, source_loss in losses.items())
        note = f", the mean of {values}," if len(losses) > 1 else f" ({values})" if values else ""
        log.info(
            "step %d: held-out loss %.4f%s over %s%s (%.1fs)", step, loss, note, size, stats, eval_s
        )
        if len(self.evals.chosen) == facts.MIN_LOG_PROB_FALLS + 1:  # once per falling streak
            log.warning(
                "step %d: %s",
                step,
                facts.likelihood_displacement_warning(self.evals.chosen),
                extra=LOG_ON_RANK_0_ONLY,
            )
        return EvalResult(num, eval_s, preference_metrics, losses)

    def _evaluate_source(
        self, engine: Engine, make_batches: BatchFactory, margin_s: float
    ) -> tuple[list[float], float, int] | None:
        """Return the sums over a source, their number of loss terms, and the number of loss tokens
        or pairs; None if interrupted. Collective.
        """
        was_cut = False

        def batches() -> Iterator[Batch]:
            nonlocal was_cut
            for batch in make_batches():
                if self._comm.sum([self._stop.is_requested(margin_s)]) != [0]:
                    was_cut = True
                    return
                yield batch

        kl = 0.0
        if self._has_labels:
            mismatches = (b.mismatched_batch for b in batches() if b.mismatched_batch is not None)
            kl = mean_kl(engine, mismatches, self._comm)
        with_kl = (batch.with_kl(kl) if batch.pairs else batch for batch in batches())
        sums, loss_terms, num_tokens = evaluate(engine, with_kl, self._plan, self._comm.device)
        is_tokens = self._plan.num_sums == 1
        return None if was_cut else (sums, loss_terms, num_tokens if is_tokens else int(loss_terms))

    def log_loss_change(self) -> None:
        """Log how the held-out loss changed over the run, with the steps if nothing is held out any
        more, since the newest loss is then of an earlier step.
        """
        first, last = self.evals.first, self.evals.last
        if first is not None and last is not None and first != last:
            (first_step, first_loss), (last_step, last_loss) = first, last
            change = f" ({100 * (last_loss / first_loss - 1):+.1f}%)" if first_loss else ""
            steps = "" if self._batches else f" from step {first_step} to step {last_step}"
            log.info("held-out loss %.4f -> %.4f%s%s", first_loss, last_loss, change, steps)
