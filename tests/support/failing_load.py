"""Trains as ``python -m hpc_tune`` does, but one rank reads truncated model files.

    python -m tests.support.failing_load RANK FOLDER [key=value ...]

Each rank reads the model in its own working folder, through /proc/self/cwd. Before it loads, RANK
changes to FOLDER, which has the same files truncated. A collective is an error where a rank may
fail alone.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from hpc_tune.config.load import load_config
from hpc_tune.train import run as stages
from hpc_tune.world.comm import Comm

COLLECTIVES = (
    "allgather",
    "allgather_into_tensor_coalesced",
    "_allgather_base",
    "allreduce",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce_scatter",
    "_reduce_scatter_base",
    "send",
)


def refuse_collectives_alone() -> None:
    """Make torch's collectives raise within ``Comm.run_and_agree``; those of ``Comm`` always do."""
    alone: list[str] = []
    run_and_agree = Comm.run_and_agree

    def watched(self: Comm, what: str, work: Callable[[], Any]) -> Any:
        def marked() -> Any:
            alone.append(what)
            try:
                return work()
            finally:
                alone.pop()

        return run_and_agree(self, what, marked)

    def refusing(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert not alone, f"{name} within {alone[-1]!r}"
            return original(*args, **kwargs)

        return call

    Comm.run_and_agree = watched  # type: ignore[method-assign]
    for name in COLLECTIVES:
        if original := getattr(dist.ProcessGroup, name, None):
            setattr(dist.ProcessGroup, name, refusing(name, original))
    dist.new_group = refusing("new_group", dist.new_group)


if __name__ == "__main__":
    victim, folder, *overrides = sys.argv[1:]
    load = stages.load_engine

    def load_engine(*args: Any) -> Any:
        if dist.get_rank() == int(victim):
            os.chdir(folder)
        return load(*args)

    refuse_collectives_alone()
    stages.load_engine = load_engine
    sys.exit(stages.run(load_config(None, overrides)))
