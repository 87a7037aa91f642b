"""The seam between the loop and the engines: what every engine offers, and nothing more."""

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
from hpc_tune.memory.host import keep_freed_blocks, return_freed_blocks
from hpc_tune.memory.policy import Action, ActionHandle
from hpc_tune.model.balance import RouterSums
from hpc_tune.model.build import BuiltModel
from hpc_tune.model.dropout import use_neftune, use_row_dropout
from hpc_tune.model.objective import Objective
from hpc_tune.model.regions import Region
from hpc_tune.model.tensor_sources import Reserve, reserve_nothing
from hpc_tune.model.weights import TensorIndex
from hpc_tune.step.layout import Layout
from hpc_tune.step.plan import StepPlan
from hpc_tune.world.comm import RunAndAgree, run_alone


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is made with beside the model.

    ``reserve`` is called with the bytes of each large allocation of host memory, before it.
    ``run_and_agree`` is that of ``Comm``: reading and allocating may fail on one rank, and the
    others must not wait for it in a collective. ``row_tokens``: of a row on this rank, 0 if not
    known.
    """

    plan: StepPlan
    device: torch.device
    optim: OptimConfig
    train: TrainConfig = TrainConfig()
    reserve: Reserve = reserve_nothing
    run_and_agree: RunAndAgree = run_alone
    faults: Faults = NO_FAULTS
    row_tokens: int = 0

    @property
    def layout(self) -> Layout:
        """The layout of the plan."""
        return self.plan.layout

    @property
    def parallel(self) -> ParallelConfig:
        """The settings of the plan, with nothing left to decide."""
        return self.plan.parallel


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, the same on every rank except for its messages.

    ``loss`` is the mean over the step's terms (``Batch.num_terms``) on all ranks, and ``sums`` are
    those of the objective over them. ``grad_norm`` is the L2 norm before
    clipping. ``comm_s`` is this rank's time in collectives, waiting for other ranks included; of
    those that overlap with compute, what is left to wait for when their results are needed.
    ``sent_bytes`` are the bytes it sent by kind of collective. ``routers``: what those of a mixture
    did in the step.
    """

    loss: float
    grad_norm: float
    comm_s: float
    sent_bytes: dict[str, int]
    sums: Sequence[float]
    routers: RouterSums | None = None


class Engine(Protocol):
    """A model spread over the ranks. Every method but ``regions`` is collective: all ranks call it.

    ``saves_in_background``: whether ``regions`` may be read while the next step is under way.
    ``repeats_steps``: a pass that runs out of memory leaves no other rank waiting for this one, and
    the step can be run again: ``accumulate`` returns the error then. ``levers``: what the governor
    may do to this engine between two steps.
    """

    saves_in_background: bool
    repeats_steps: bool
    levers: dict[Action, ActionHandle]

    def accumulate(
        self, batches: Sequence[Batch], global_terms: float, global_tokens: float = 1.0
    ) -> torch.OutOfMemoryError | None:
        """Compute the gradients of one optimizer step from all micro-batches of this rank.

        The loss is the objective's sum over all ranks divided by ``global_terms``, so neither the
        number of ranks nor the micro-batches change the gradient. That of routers' losses is
        divided by ``global_tokens``, those of all ranks without padding. Weights and optimizer
        state stay as they are.

        Returns the error if this rank ran out of memory, has sent the step's messages all the same,
        and can run it again.

        Raises:
            torch.OutOfMemoryError: if it ran out where others wait for it.
        """

    def update(self, lr: float) -> StepResult:
        """Update the weights and the optimizer state by what ``accumulate`` has computed."""

    def outputs(
        self,
        batches: Iterable[Batch],
        objective: Objective | None = None,
        within_step: bool = False,
    ) -> Iterator[tuple[Batch, torch.Tensor]]:
        """Yield micro-batches, each with the sums of ``objective``, without gradients.

        Each rank brings equally many; of those that work on the same rows, one yields them. By
        default the objective is the one that is trained. The messages of a pass ``within_step``
        count as the coming step's.
        """

    def regions(self) -> list[Region]:
        """Return the regions of trained weights and optimizer state that this rank writes.

        Their values are views, valid until the next update.
        """

    def load(self, index: TensorIndex, step: int) -> None:
        """Read a checkpoint of any layout, saved after ``step`` optimizer steps, into this one."""

    def run_once(self, batch: Batch) -> None:
        """Run a micro-batch and drop its gradients: for measuring memory before the run."""


def train_step(
    engine: Engine,
    batches: Sequence[Batch],
    global_terms: float,
    lr: float,
    global_tokens: float = 1.0,
) -> StepResult:
    """Run one optimizer step where nothing else reads the weights meanwhile."""
    error = engine.accumulate(batches, global_terms, global_tokens)
    if error is not None:
        raise error
    return engine.update(lr)


def evaluate(
    engine: Engine, batches: Iterable[Batch], plan: StepPlan, device: torch.device
) -> tuple[list[float], float, int]:
    """Return (the objective's sums, the terms they are over, the tokens with loss) of all ranks.

    Collective.
    """
    total = torch.zeros(plan.num_sums + 2, dtype=torch.float64, device=device)
    for batch, sums in engine.outputs(batches):
        total[:-2] += sums.double()
        total[-2] += batch.num_terms
        total[-1] += batch.num_loss_tokens
    dist.all_reduce(total)
    *added, terms, num_tokens = total.tolist()
    return added, terms, int(num_tokens)


def init_model(built: BuiltModel, train: TrainConfig, is_sharded: bool) -> None:
    """Set the heap for a model, and give that dropout and noise that every layout repeats."""
    if is_sharded:
        return_freed_blocks()
    else:
        keep_freed_blocks()
    if not train.compiles:
        use_row_dropout(built.module, built.seed)
    use_neftune(built.module, built.tune.neftune_alpha, built.seed)


# -- The dtype in which a micro-batch is computed, and the seed of its random numbers.


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Compute matrix products in ``dtype`` within a block; None leaves all as it is."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def seed_micro_batch(seed: int, first_row: int, stage: int = 0) -> None:
    """Seed torch for a micro-batch in a pipeline stage, the same in every layout."""
    torch.manual_seed((seed * 1_000_003 + first_row) ^ (stage << 52))
