"""Two slices of a model in two threads of one process, where an axis has two ranks."""

import threading
from typing import Any

import torch

from hpc_tune.engine.tensor_parallel import Axis


class ThreadAxis(Axis):
    """Two threads where an axis has two ranks."""

    def __init__(self, rank: int, shared: list[Any], barrier: threading.Barrier) -> None:
        object.__setattr__(self, "_at", (rank, shared, barrier))

    @property
    def rank(self) -> int:
        """The number of this thread."""
        rank: int = self.__dict__["_at"][0]
        return rank

    @property
    def size(self) -> int:
        """How many threads there are."""
        return 2

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        rank, shared, barrier = self.__dict__["_at"]
        shared[rank] = x.detach().clone()
        barrier.wait()
        both = list(shared)
        barrier.wait()
        return both

    def all_reduce(self, x: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM) -> torch.Tensor:
        """Return the sum or the maximum of both threads' values."""
        one, other = self._exchange(x)
        return one + other if op == torch.distributed.ReduceOp.SUM else torch.maximum(one, other)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return both threads' values, in order."""
        return torch.cat(self._exchange(x), dim=-1)


def merge_gradients(models: list[Any]) -> dict[str, torch.Tensor]:
    """Return the whole gradients of two slices."""
    (one, partial), (other, _) = models
    others, joined = dict(other.module.named_parameters()), {}
    for name, parameter in one.module.named_parameters():
        first, second = parameter.grad, others[name].grad
        if first is None or second is None:
            continue
        if cut := one.slices.get(name):
            parts = zip(*(g.chunk(cut.parts, cut.dim) for g in (first, second)), strict=True)
            joined[name] = torch.cat([piece for pair in parts for piece in pair], dim=cut.dim)
        else:
            joined[name] = first + second if name in partial else first
    return joined


def find_unlike_gradient(models: list[Any]) -> str:
    """Return the first parameter that both slices hold whole, with different gradients; or ""."""
    (one, partial), (other, _) = models
    others = dict(other.module.named_parameters())
    for name, parameter in one.module.named_parameters():
        first, second = parameter.grad, others[name].grad
        if first is None or second is None or name in one.slices or name in partial:
            continue
        if not torch.allclose(first, second, rtol=1e-3, atol=1e-5):
            return name
    return ""
