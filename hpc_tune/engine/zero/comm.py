"""DeepSpeed's collectives, counted as the native engine's are."""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from hpc_tune.engine.counted_collectives import CountedCollectives
from hpc_tune.step.rings import CollectiveKind, sent_bytes

_COLLECTIVE_KINDS: dict[str, CollectiveKind] = {
    "all_reduce": "all_reduce",
    "reduce": "reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
}


class CountedBackend:
    """The backend of ``deepspeed.comm``, with its collectives counted."""

    def __init__(self, backend: Any, collectives: CountedCollectives) -> None:
        self._backend, self._collectives = backend, collectives

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._backend, name)
        if name not in _COLLECTIVE_KINDS:
            return call

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self._collectives.counted(
                _COLLECTIVE_KINDS[name], _ring_bytes(_COLLECTIVE_KINDS[name], (args, kwargs))
            ):
                work = call(*args, **kwargs)
            return work if work is None else _CountedWork(work, self._collectives)

        return counted


class _CountedWork:
    """A collective in flight; waiting for it counts as communication too."""

    def __init__(self, work: Any, collectives: CountedCollectives) -> None:
        self._work, self._collectives = work, collectives

    def wait(self) -> None:
        with self._collectives.counted("", 0):
            self._work.wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _ring_bytes(kind: CollectiveKind, arguments: Any) -> int:
    """Return what this rank sends by the ring algorithms.

    A whole tensor, or a list of its parts, comes together with this rank's part of it.
    """
    sizes = [leaf.nbytes for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    size = dist.get_world_size()
    whole = max(sizes) if len(sizes) <= 2 else max(sizes) * size
    return sent_bytes(kind, size, whole)
