"""The interface between the training loop and the engines: what every engine provides."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hpc_tune.batch import Batch
from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import OptimConfig, TrainConfig
from hpc_tune.faults import NO_FAULTS, Faults
from hpc_tune.memory.host import make_malloc_keep_blocks, make_malloc_return_blocks
from hpc_tune.memory.policy import Action, ActionHandle
from hpc_tune.model.balance import RouterSums
from hpc_tune.model.build import BuiltModel
from hpc_tune.model.dropout import use_neftune, use_row_dropout
from hpc_tune.model.objective import Objective
from hpc_tune.model.regions import Region
from hpc_tune.model.tensor_sources import ReserveFunction, reserve_nothing
from hpc_tune.model.weights import TensorIndex
from hpc_tune.step.layout import Layout
from hpc_tune.step.plan import StepPlan
from hpc_tune.world.comm import RunAndAgree, run_on_single_rank


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is constructed with, besides the model.

    ``reserve`` is called with the bytes of each large allocation of host memory, before it is made.
    ``run_and_agree`` is ``Comm.run_and_agree``: reading and allocating may fail on one rank, and
    the others must not wait for it in a collective. ``row_tokens``: tokens of a row on this rank, 0
    if unknown.
    """

    plan: StepPlan
    device: torch.device
    optim: OptimConfig
    train: TrainConfig = TrainConfig()
    reserve: ReserveFunction = reserve_nothing
    run_and_agree: RunAndAgree = run_on_single_rank
    faults: Faults = NO_FAULTS
    row_tokens: int = 0

    @property
    def layout(self) -> Layout:
        """The layout of the plan."""
        return self.plan.layout

    @property
    def parallel(self) -> ParallelConfig:
        """The plan's parallel settings, all of them resolved."""
        return self.plan.parallel


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, the same on every rank except for its messages.

    ``loss`` is the mean over the step's terms (``Batch.num_loss_terms``) on all ranks, ``sums`` are
    the objective's sums over these terms, and ``grad_norm`` is the L2 norm before clipping.
    ``comm_s`` is the time that this rank spent in collectives, including waiting for other ranks; a
    collective that overlaps with compute counts only while its result is waited for.
    ``sent_bytes``: what this rank sent, by kind of collective. ``routers``: the routers' sums of
    the step, in a mixture of experts.
    """

    loss: float
    grad_norm: float
    comm_s: float
    sent_bytes: dict[str, int]
    sums: Sequence[float]
    routers: RouterSums | None = None


class Engine(Protocol):
    """A model spread over the ranks. Every method but ``regions`` is collective: all ranks call it.

    ``saves_in_background``: whether ``regions`` may be read while the next ``accumulate`` runs.
    ``can_repeat_steps``: whether a step can be run again after a pass runs out of memory, because
    no other rank waits for this one during a pass: ``accumulate`` returns the error then.
    ``memory_actions``: what the memory governor may change in this engine between two steps.
    """

    saves_in_background: bool
    can_repeat_steps: bool
    memory_actions: dict[Action, ActionHandle]

    def accumulate(
        self, batches: Sequence[Batch], global_terms: float, global_tokens: float = 1.0
    ) -> torch.OutOfMemoryError | None:
        """Compute the gradients of one optimizer step from all micro-batches of this rank.

        The loss is the objective's sum over all ranks divided by ``global_terms``, so the gradient
        depends neither on the number of ranks nor on the split into micro-batches. The router
        losses are divided by ``global_tokens``, the tokens of all ranks without padding. Weights
        and optimizer state do not change.

        Returns the error if this rank ran out of memory, still sent the step's messages, and can
        run the step again.

        Raises:
            torch.OutOfMemoryError: if it ran out of memory where other ranks wait for it.
        """

    def update(self, lr: float) -> StepResult:
        """Update the weights and the optimizer state with the gradients from ``accumulate``."""

    def objective_sums(
        self,
        batches: Iterable[Batch],
        objective: Objective | None = None,
        is_within_step: bool = False,
    ) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Yield micro-batches with their sums of ``objective``, computed without gradients.

        Every rank passes the same number of them; of the ranks that work on the same rows, one
        yields them. Those without loss may be left out. The default objective is the trained one.
        With ``is_within_step``, the messages of the pass count as the coming step's.
        """

    def regions(self) -> list[Region]:
        """Return the regions of trained weights and optimizer state that this rank writes.

        Their values are views, valid until the next update.
        """

    def load(self, index: TensorIndex, step: int) -> None:
        """Load a checkpoint that any layout saved after ``step`` optimizer steps."""

    def run_and_discard(self, batch: Batch) -> None:
        """Run a micro-batch and discard its gradients, to measure memory before training."""


def train_step(
    engine: Engine, batches: Sequence[Batch], global_terms: float, lr: float
) -> StepResult:
    """Run one optimizer step, when nothing else reads the weights in the meantime."""
    if (error := engine.accumulate(batches, global_terms)) is not None:
        raise error
    return engine.update(lr)


def evaluate(
    engine: Engine, batches: Iterable[Batch], plan: StepPlan, device: torch.device
) -> tuple[list[float], float, int]:
    """Return the objective's sums, the number of terms and the tokens with loss, over all ranks.

    Collective.
    """
    total = torch.zeros(plan.num_sums + 2, dtype=torch.float64, device=device)
    for batch, sums in engine.objective_sums(batches):
        total[:-2] += sums.double()
        total[-2] += batch.num_loss_terms
        total[-1] += batch.num_loss_tokens
    dist.all_reduce(total)
    *total_sums, terms, num_tokens = total.tolist()
    return total_sums, terms, int(num_tokens)


def prepare_heap_and_dropout(built: BuiltModel, train: TrainConfig, is_sharded: bool) -> None:
    """Configure the heap for a model, and make dropout and noise the same in every layout."""
    if is_sharded:
        make_malloc_return_blocks()
    else:
        make_malloc_keep_blocks()
    if not train.compiles:
        use_row_dropout(built.module, built.seed)
    use_neftune(built.module, built.tune.neftune_alpha, built.seed)


# -- The dtype in which a micro-batch is computed, and the seed of its random numbers.


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Compute matmuls in ``dtype`` within a block; None changes nothing."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def seed_micro_batch(seed: int, first_row: int, stage: int = 0) -> None:
    """Seed torch for a micro-batch in a pipeline stage, with the same seed in every layout."""
    torch.manual_seed((seed * 1_000_003 + first_row) ^ (stage << 52))
