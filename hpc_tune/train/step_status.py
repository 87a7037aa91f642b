"""What each rank contributes to the boundary before a step, summed over the ranks at once."""

from dataclasses import dataclass

from hpc_tune.world.comm import Comm


@dataclass(frozen=True)
class StepStatus:
    """One rank's counts and votes, or their sums over the ranks.

    ``loss_tokens``, ``tokens`` and ``attention_flops``: of the step's rows that this rank counts.
    ``save``: a checkpoint is due by rank 0's clock. ``stop``: this rank was asked to stop.
    ``saves_done``: 1 if it has done its part of the current checkpoint, see checkpointing.py.
    ``garbage``: it has garbage to collect. ``levels``: the memory levels it has reached.
    """

    loss_tokens: float
    tokens: float
    attention_flops: float
    save: float
    stop: float
    saves_done: float
    garbage: float
    levels: tuple[float, ...]

    def summed(self, comm: Comm) -> "StepStatus":
        """Return the sums over the ranks. Collective."""
        counts = (self.loss_tokens, self.tokens, self.attention_flops)
        votes = (self.save, self.stop, self.saves_done, self.garbage)
        loss_tokens, tokens, flops, save, stop, saves_done, garbage, *levels = comm.sum(
            [*counts, *votes, *self.levels]
        )
        return StepStatus(
            loss_tokens, tokens, flops, save, stop, saves_done, garbage, tuple(levels)
        )
