"""How long the computing stream of a GPU waits for the messages of FSDP2.

    FSDP2 gathers a unit on a stream of its own -> FsdpAllGather notes when that is done
    the unit is needed -> wait_for_unshard: from here on the computing stream waits for it
    its gradients are there -> FsdpReduceScatter sums them on another stream, and notes the same
    those of the next unit are there -> post_backward: the computing stream waits for the last sum
    the backward pass ends -> finalize_backward: it waits for the sums that are under way

A message that is done before it is needed takes no time of a step, however long it was under way.
FSDP2 tells nobody when it waits, so these methods of its groups are wrapped.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from hpc_tune.engine.counted_collectives import CountedCollectives, FsdpAllGather, FsdpReduceScatter


def time_fsdp_waits(module: nn.Module, collectives: CountedCollectives) -> None:
    """Time what the sharded units of ``module`` wait for, on a GPU."""
    sums = ReduceScatterWaits(collectives)
    for group in {id(group): group for group in _fsdp_groups(module)}.values():
        time_group(group, collectives, sums)


def time_group(group: Any, collectives: CountedCollectives, sums: "ReduceScatterWaits") -> None:
    """Time what one of FSDP2's parameter groups waits for; those of a module share ``sums``."""
    wait, finalize = group.wait_for_unshard, group.finalize_backward
    post_backward, reshard = group.post_backward, group.reshard

    def timed_wait() -> None:
        gather = group._all_gather_comm
        if group._all_gather_result is not None and isinstance(gather, FsdpAllGather):
            collectives.wait_for(gather.take_done())
        wait()

    def timed_post_backward(*unused: Any) -> None:
        sums.begin(group)
        post_backward(*unused)
        sums.end(group)

    def timed_reshard() -> None:
        reshard()
        sums.restart_wait()

    def timed_finalize() -> None:
        with collectives.waiting():
            finalize()

    group.wait_for_unshard, group.finalize_backward = timed_wait, timed_finalize
    group.post_backward, group.reshard = timed_post_backward, timed_reshard


class ReduceScatterWaits:
    """The sums of gradients that a backward pass has begun, each with the event of its end.

    FSDP2 keeps the gradients of one unit until they are summed. It waits for that when those of the
    next are complete: after what is computed for these, and after it has let their weights go.
    """

    def __init__(self, collectives: CountedCollectives) -> None:
        self._collectives = collectives
        self._pending: list[tuple[Any, Any]] = []  # FSDP2's event of each, and one with a time
        self._start_event: Any = None

    def begin(self, group: Any) -> None:
        """The gradients of ``group`` are there."""
        self._start_event = self._collectives.done() if _pending_events(group) else None

    def restart_wait(self) -> None:
        """If there is a sum to wait for, it is from here on."""
        if self._start_event is not None:
            self._start_event = self._collectives.done()

    def end(self, group: Any) -> None:
        """FSDP2 has waited for the sums that it no longer keeps, and has begun the next."""
        kept, since, self._start_event = _pending_events(group), self._start_event, None
        for event, done in self._pending:
            if since is not None and not any(event is other for other in kept):
                self._collectives.wait_for(done, since)
        scatter = group._reduce_scatter_comm
        last = scatter.take_done() if isinstance(scatter, FsdpReduceScatter) else None
        known = {id(event): done for event, done in self._pending}
        self._pending = [(event, known.get(id(event), last)) for event in kept]


def _pending_events(group: Any) -> list[Any]:
    """Return FSDP2's events of the sums whose gradients it keeps; an older torch keeps one's."""
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
            # An older torch has one, or none where a unit has no weights of its own.
            groups = [state._fsdp_param_group] if groups is None else groups
            yield from (group for group in groups if group is not None)
