"""What a rank sends: bytes by kind of collective, and the time they take.

Every message of the native engine goes through a ``CountedCollectives``. Bytes are those of the
ring algorithms, see ``step/rings.py``.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from hpc_tune import torch_versions
from hpc_tune.step.rings import sent_bytes

Group = dist.ProcessGroup | None


class CountedCollectives:
    """Does the collectives of one rank and keeps count. ``None`` as a group means the world.

    Seconds are those in which this rank waits for messages on a CPU, and those in which messages
    are under way on a GPU, whether or not compute hides them; but for ``begin_all_reduce``, of
    which only what is left to wait for counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._bytes: Counter[str] = Counter()
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []
        self._counts = True

    def all_reduce(self, tensor: torch.Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> None:
        """Add ``tensor`` up over the group, in place."""
        size = dist.get_world_size(group)
        if size == 1:
            return
        with self.counted("all_reduce", sent_bytes("all_reduce", size, tensor.nbytes)):
            dist.all_reduce(tensor, op, group=group)

    def begin_all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        """Begin to add ``tensor`` up over the group, in place; ``finish`` what is returned."""
        self.count("all_reduce", sent_bytes("all_reduce", group.size(), tensor.nbytes))
        return dist.all_reduce(tensor, group=group, async_op=True)

    def finish(self, works: Iterable[dist.Work | None]) -> None:
        """Wait for what was begun."""
        with self.counted("all_reduce", 0):
            for work in filter(None, works):
                work.wait()

    def all_gather(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
        """Return every rank's tensor, all of one shape."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        whole = group.size() * tensor.nbytes
        with self.counted("all_gather", sent_bytes("all_gather", group.size(), whole)):
            dist.all_gather(parts, tensor, group=group)
        return parts

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        receive: list[int] | None,
        send: list[int] | None,
        group: dist.ProcessGroup,
    ) -> None:
        """Send ``send[r]`` rows of ``x`` to rank r of the group, and fill ``out`` with what comes.

        None: as many rows to each.
        """
        own = group.rank()
        kept = x.shape[0] // group.size() if send is None else send[own]
        row = x.nbytes // x.shape[0] if x.shape[0] else 0
        with self.counted("all_to_all", (x.shape[0] - kept) * row):
            dist.all_to_all_single(out, x, receive, send, group=group)

    def count(self, kind: str, num_bytes: int) -> None:
        """Count bytes that are sent elsewhere."""
        if num_bytes and self._counts:
            self._bytes[kind] += num_bytes

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count nothing in the block, which is no step: nobody would ask for it, or clear it."""
        before, self._counts = self._counts, False
        try:
            yield
        finally:
            self._counts = before

    @contextmanager
    def counted(self, kind: str, num_bytes: int) -> Iterator[None]:
        """Count bytes, and the time until the block has done its work or has given it out."""
        self.count(kind, num_bytes)
        if not self._counts:
            yield
            return
        if not self._cuda:
            start_s = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start_s
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._events.append((start, end))

    def take(self) -> tuple[dict[str, int], float]:
        """Return bytes by kind and seconds since the last call; a GPU must have done its work."""
        seconds = self._seconds + sum(a.elapsed_time(b) for a, b in self._events) / 1e3
        taken = dict(self._bytes), seconds
        self._bytes.clear()
        self._events.clear()
        self._seconds = 0.0
        return taken


class _FsdpCollective:
    def __init__(self, collectives: CountedCollectives) -> None:
        self._collectives = collectives

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for what the collective yields."""
        return torch.empty(*size, dtype=dtype, device=device)


class FsdpAllGather(_FsdpCollective):
    """FSDP2's all-gather, counted: see ``FSDPModule.set_custom_all_gather``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Gather the shards of one unit."""
        sent = sent_bytes("all_gather", group.size(), output_tensor.nbytes)
        with self._collectives.counted("all_gather", sent):
            return torch_versions.all_gather(output_tensor, input_tensor, group, async_op)


class FsdpReduceScatter(_FsdpCollective):
    """FSDP2's reduce-scatter, counted: see ``FSDPModule.set_custom_reduce_scatter``."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Add up the gradients of one unit and leave each rank its shard."""
        sent = sent_bytes("reduce_scatter", group.size(), input_tensor.nbytes)
        with self._collectives.counted("reduce_scatter", sent):
            return torch_versions.reduce_scatter(output_tensor, input_tensor, op, group, async_op)
