"""One optimizer step, or none: where a device has no room for it, all ranks give it up together.

    this rank runs out   -> its messages of the step all the same -> votes for giving up
    the others           -> before the update                    -> vote, and give up too
    all                  -> nothing has changed; at the boundary the governor answers, and the step
                            is run again

That is for ranks that work each for itself until the update. With messages within a pass nobody
could tell the others in time: the error ends the run, and the next start begins one rung lower
(memory_exit.py).
"""

from collections.abc import Callable, Sequence

import torch

from hpc_tune.batch import Batch
from hpc_tune.engine.base import Engine, StepResult
from hpc_tune.memory.device import give_back_cache
from hpc_tune.memory.host import trim_heap
from hpc_tune.train.governor import Governor
from hpc_tune.world.comm import Comm


class _GivenUpError(Exception):
    """Another rank has run out."""


class Attempts:
    """Runs optimizer steps of ``engine``; see ``base.Engine.train_step``."""

    def __init__(
        self, comm: Comm, engine: Engine, governor: Governor, before_update: Callable[[], None]
    ) -> None:
        self._comm, self._engine, self._governor = comm, engine, governor
        self._before_update = before_update
        self._repeats = engine.repeats_steps and governor.answers_device

    def step(self, batches: Sequence[Batch], global_tokens: int, lr: float) -> StepResult | None:
        """Run a step; return None if a rank has run out of its device's memory. Collective.

        Raises:
            torch.OutOfMemoryError: if that step cannot be run again.
        """
        is_agreed, ran_out = False, False

        def before_update() -> None:
            nonlocal is_agreed
            if self._repeats and self._comm.sum([False]) != [0]:
                raise _GivenUpError
            is_agreed = True
            self._before_update()

        try:
            return self._engine.train_step(batches, global_tokens, lr, before_update)
        except _GivenUpError:
            pass
        except torch.OutOfMemoryError as error:
            if is_agreed or not self._repeats:
                raise
            ran_out = True
            self._governor.observe_out_of_memory(error)
        if ran_out:
            self._comm.sum([True])
        # What the error held is free only now, and in fragments.
        trim_heap()
        give_back_cache()
        return None
