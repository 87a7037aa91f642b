"""The seam between the loop and the engines: what every engine offers, and nothing more."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hpc_tune.batch import Batch
from hpc_tune.memory.policy import Action, Lever
from hpc_tune.model.regions import Region
from hpc_tune.model.weights import TensorIndex


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step gave, the same on every rank but for what it says of messages.

    ``loss`` is the mean over the step's global loss tokens. ``grad_norm`` is the L2 norm before
    clipping. ``comm_s`` is the time of this rank's messages, waiting for other ranks included, and
    of gradients that are added up within a backward pass what is left at its end; ``sent_bytes``
    what it sent by kind of collective.
    """

    loss: float
    grad_norm: float
    comm_s: float
    sent_bytes: dict[str, int]


class Engine(Protocol):
    """A model spread over the ranks. Every method but ``regions`` is collective: all ranks call it.

    ``saves_in_background``: whether ``regions`` may be read while the next step is under way.
    ``levers``: what the governor may do to this engine between two steps.
    """

    saves_in_background: bool
    levers: dict[Action, Lever]

    def train_step(
        self,
        batches: Sequence[Batch],
        global_tokens: int,
        lr: float,
        before_update: Callable[[], None] = lambda: None,
    ) -> StepResult:
        """Do one optimizer step on all micro-batches of this rank.

        The loss is the token sum over all ranks divided by ``global_tokens``, so neither the number
        of ranks nor the micro-batches change the gradient. ``before_update`` is called when
        nothing but the update of weights and optimizer state is left to do.
        """

    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Return (loss sum, loss tokens) over all ranks, each of which brings equally many."""

    def regions(self) -> list[Region]:
        """Return what this rank has to write of trained weights and optimizer state.

        Their values are read where they live, and stay as they are until the next update.
        """

    def load(self, index: TensorIndex, step: int) -> None:
        """Read what any layout saved after ``step`` optimizer steps into this one."""

    def run_once(self, batch: Batch) -> None:
        """Do the work of one micro-batch and forget it: for measuring memory before the run."""
