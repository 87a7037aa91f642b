"""What a rank sends: bytes by kind of collective, and the time they take.

Every message of the native engine goes through a ``CountedCollectives``. Bytes are those that ring
algorithms send, see ``step/layout.py``.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpc_tune import torch_versions
from hpc_tune.step.layout import sent_bytes

Group = dist.ProcessGroup | None


class CountedCollectives:
    """Runs the collectives of one rank and counts them. ``None`` as a group means the world.

    Seconds are the time that this rank, or on a GPU its compute stream, waits for messages; time
    that compute hides does not count. ``time_fsdp_waits`` adds the waits for FSDP2's messages.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._bytes: Counter[str] = Counter()
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []
        self._is_counting = True

    def all_reduce(self, tensor: torch.Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> None:
        """Sum ``tensor`` over the group, in place."""
        size = dist.get_world_size(group)
        if size == 1:
            return
        with self.counted("all_reduce", sent_bytes("all_reduce", size, tensor.nbytes)):
            dist.all_reduce(tensor, op, group=group)

    def begin_all_reduce(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work | None:
        """Begin to sum ``tensor`` over the group, in place; pass the result to ``finish``."""
        self.count("all_reduce", sent_bytes("all_reduce", group.size(), tensor.nbytes))
        return dist.all_reduce(tensor, group=group, async_op=True)

    def finish(self, works: Iterable[dist.Work | None]) -> None:
        """Wait for the all-reduces that were begun."""
        with self.counted("all_reduce", 0):
            for work in filter(None, works):
                work.wait()

    def all_gather(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
        """Return every rank's tensor, all of one shape."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(group.size())]
        total_bytes = group.size() * tensor.nbytes
        with self.counted("all_gather", sent_bytes("all_gather", group.size(), total_bytes)):
            dist.all_gather(parts, tensor, group=group)
        return parts

    def all_gather_into(
        self, out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        """Fill ``out`` with every rank's ``shard``, in order; both are contiguous."""
        with self.counted("all_gather", sent_bytes("all_gather", group.size(), out.nbytes)):
            torch_versions.all_gather(out, shard, group)

    def reduce_scatter_into(
        self, out: torch.Tensor, full_tensor: torch.Tensor, group: dist.ProcessGroup
    ) -> None:
        """Fill ``out`` with this rank's part of the sum of all ``full_tensor``, both contiguous."""
        num_bytes = sent_bytes("reduce_scatter", group.size(), full_tensor.nbytes)
        with self.counted("reduce_scatter", num_bytes):
            torch_versions.reduce_scatter(out, full_tensor, group=group)

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        num_received: list[int] | None,
        num_sent: list[int] | None,
        group: dist.ProcessGroup,
    ) -> None:
        """Send ``num_sent[r]`` rows of ``x`` to rank r; fill ``out`` with its ``num_received[r]``.

        None: the same number of rows to and from each rank.
        """
        rank = group.rank()
        num_kept = x.shape[0] // group.size() if num_sent is None else num_sent[rank]
        row_bytes = x.nbytes // x.shape[0] if x.shape[0] else 0
        with self.counted("all_to_all", (x.shape[0] - num_kept) * row_bytes):
            dist.all_to_all_single(out, x, num_received, num_sent, group=group)

    def begin_send(
        self, tensor: torch.Tensor, target: int, group: dist.ProcessGroup
    ) -> dist.Work | None:
        """Begin to send ``tensor`` to a rank, given by its number in the world."""
        self.count("send", tensor.nbytes)
        return dist.isend(tensor, target, group)

    def all_gather_uncounted(
        self, out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work | None:
        """Gather every rank's part of an FSDP2 unit; the caller counts the bytes."""
        return torch_versions.all_gather(out, shard, group, async_op)

    def count(self, kind: str, num_bytes: int) -> None:
        """Count bytes that are sent by other code."""
        if num_bytes and self._is_counting:
            self._bytes[kind] += num_bytes

    @contextmanager
    def counting_paused(self) -> Iterator[None]:
        """Count nothing in the block: it is no step, so nobody would read or clear the counts."""
        was_counting, self._is_counting = self._is_counting, False
        try:
            yield
        finally:
            self._is_counting = was_counting

    @contextmanager
    def counted(self, kind: str, num_bytes: int) -> Iterator[None]:
        """Count bytes and the time of the block, on a GPU the time of the current stream."""
        self.count(kind, num_bytes)
        with self.timing_wait():
            yield

    @contextmanager
    def timing_wait(self) -> Iterator[None]:
        """Count the time of the block, which contains messages and nothing else."""
        if not self._is_counting:
            yield
            return
        if not self._cuda:
            start_s = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start_s
            return
        start = torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        self._events.append((start, self._record_timed_event()))

    @contextmanager
    def counting_overlapped(self, kind: str, num_bytes: int) -> Iterator[None]:
        """Count bytes that a GPU sends beside its compute stream; on a CPU, count the time too."""
        if not self._cuda:
            with self.counted(kind, num_bytes):
                yield
            return
        self.count(kind, num_bytes)
        yield

    def record_end_event(self) -> Any:
        """Record an event on a GPU's current stream; None on a CPU, or if nothing is counted."""
        return self._record_timed_event() if self._cuda and self._is_counting else None

    def count_wait(self, end_event: Any, start_event: Any = None) -> None:
        """Count the time from ``start_event``, or now, to ``end_event``, one of another stream."""
        if end_event is not None and self._is_counting:
            self._events.append((start_event or self._record_timed_event(), end_event))

    def _record_timed_event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def pop_totals(self) -> tuple[dict[str, int], float]:
        """Return bytes by kind and seconds since the last call; a GPU must have done its work."""
        waited_ms = sum(max(0.0, a.elapsed_time(b)) for a, b in self._events)  # b may be first
        seconds = self._seconds + waited_ms / 1e3
        totals = dict(self._bytes), seconds
        self._bytes.clear()
        self._events.clear()
        self._seconds = 0.0
        return totals


class _FsdpCollective:
    def __init__(self, collectives: CountedCollectives) -> None:
        self._collectives = collectives
        self._end_event: Any = None

    def pop_end_event(self) -> Any:
        """Return the GPU's event of the end of the last message, only once; else None."""
        end_event, self._end_event = self._end_event, None
        return end_event

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
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
        num_bytes = sent_bytes("all_gather", group.size(), output_tensor.nbytes)
        with self._collectives.counting_overlapped("all_gather", num_bytes):
            work = self._collectives.all_gather_uncounted(
                output_tensor, input_tensor, group, async_op
            )
        self._end_event = self._collectives.record_end_event()
        return work


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
        """Sum the gradients of one unit and leave each rank its shard."""
        if group.size() == 1:  # nothing is sharded; before torch 2.10 FSDP2 calls this anyway
            output_tensor.copy_(input_tensor)
            return None
        num_bytes = sent_bytes("reduce_scatter", group.size(), input_tensor.nbytes)
        with self._collectives.counting_overlapped("reduce_scatter", num_bytes):
            work = torch_versions.reduce_scatter(output_tensor, input_tensor, op, group, async_op)
        self._end_event = self._collectives.record_end_event()
        return work


# -- How long the compute stream of a GPU waits for the messages of FSDP2.
#
#     FSDP2 gathers a unit on a stream of its own -> FsdpAllGather records the end of that
#     the unit is needed -> wait_for_unshard: the compute stream waits for it from here on
#     its gradients are complete -> FsdpReduceScatter sums them on another stream, records the end
#     the next unit's are complete -> post_backward: the compute stream waits for the last sum
#     the backward pass ends -> finalize_backward: it waits for the sums that are under way
#
# A message that ends before it is needed costs a step no time, however long it was under way. FSDP2
# does not report when it waits, so these methods of its groups are wrapped.


def time_fsdp_waits(module: nn.Module, collectives: CountedCollectives) -> None:
    """Time how long a GPU waits for the messages of the sharded units of ``module``."""
    waits = ReduceScatterWaits(collectives)
    for group in {id(group): group for group in _fsdp_groups(module)}.values():
        time_group_waits(group, collectives, waits)


def time_group_waits(
    group: Any, collectives: CountedCollectives, waits: "ReduceScatterWaits"
) -> None:
    """Time the waits of one of FSDP2's parameter groups; the groups of a module share ``waits``."""
    wait, finalize = group.wait_for_unshard, group.finalize_backward
    post_backward, reshard = group.post_backward, group.reshard

    def timed_wait() -> None:
        gather = group._all_gather_comm
        if group._all_gather_result is not None and isinstance(gather, FsdpAllGather):
            collectives.count_wait(gather.pop_end_event())
        wait()

    def timed_post_backward(*unused: Any) -> None:
        waits.begin_wait(group)
        post_backward(*unused)
        waits.end_wait(group)

    def reshard_then_restart_wait() -> None:
        reshard()
        waits.restart_wait()

    def timed_finalize() -> None:
        with collectives.timing_wait():
            finalize()

    group.wait_for_unshard, group.finalize_backward = timed_wait, timed_finalize
    group.post_backward, group.reshard = timed_post_backward, reshard_then_restart_wait


class ReduceScatterWaits:
    """The gradient sums that a backward pass has begun, each with the event of its end.

    FSDP2 keeps the gradients of one unit until they are summed. It waits for that when the next
    unit's are complete: after they are computed, and after that unit's weights are freed.
    """

    def __init__(self, collectives: CountedCollectives) -> None:
        self._collectives = collectives
        self._pending: list[tuple[Any, Any]] = []  # of each FSDP2's event, and a timed one
        self._start_event: Any = None

    def begin_wait(self, group: Any) -> None:
        """Note that the gradients of ``group`` are complete."""
        self._start_event = self._collectives.record_end_event() if _pending_events(group) else None

    def restart_wait(self) -> None:
        """If there is a sum to wait for, let the wait begin here."""
        if self._start_event is not None:
            self._start_event = self._collectives.record_end_event()

    def end_wait(self, group: Any) -> None:
        """Note that FSDP2 has waited for the sums it no longer keeps, and has begun the next."""
        events, start_event, self._start_event = _pending_events(group), self._start_event, None
        for event, end_event in self._pending:
            if start_event is not None and not any(event is other for other in events):
                self._collectives.count_wait(end_event, start_event)
        scatter = group._reduce_scatter_comm
        last = scatter.pop_end_event() if isinstance(scatter, FsdpReduceScatter) else None
        end_events = {id(event): end_event for event, end_event in self._pending}
        self._pending = [(event, end_events.get(id(event), last)) for event in events]


def _pending_events(group: Any) -> list[Any]:
    """Return FSDP2's events of the sums whose gradients it keeps; an older torch keeps only one."""
    context = group.comm_ctx
    states = getattr(context, "reduce_scatter_states", None)
    if states is None:
        states = [getattr(context, "reduce_scatter_state", None)]
    return [state.event for state in states if state is not None and state.event is not None]


def _fsdp_groups(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        get_state = getattr(part, "_get_fsdp_state", None)  # of FSDPModule
        if get_state is not None:
            state = get_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            # An older torch has one group, or None if a unit has no weights of its own.
            groups = [state._fsdp_param_group] if groups is None else groups
            yield from (group for group in groups if group is not None)
