"""How long the computing stream of a GPU waits for the messages of FSDP2.

    FSDP2 gathers a unit on a stream of its own -> FsdpAllGather notes when that is done
    the unit is needed -> wait_for_unshard: from here on the computing stream waits for it
    the backward pass ends -> finalize_backward: for the last gradients that are being summed

A gather that is done before it is needed takes no time of a step, however long it was under way.
FSDP2 tells nobody when it waits, so these two methods of its groups are wrapped. Where earlier sums
of gradients hold the computing stream, within the backward pass, is not seen.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn

from hpc_tune.engine.counted_collectives import CountedCollectives, FsdpAllGather


def time_waits(module: nn.Module, collectives: CountedCollectives) -> None:
    """Time what the sharded units of ``module`` wait for, on a GPU."""
    for group in {id(group): group for group in _groups_of(module)}.values():
        time_group(group, collectives)


def time_group(group: Any, collectives: CountedCollectives) -> None:
    """Time what one of FSDP2's parameter groups waits for."""
    wait, finalize = group.wait_for_unshard, group.finalize_backward

    def timed_wait() -> None:
        gather = group._all_gather_comm
        if group._all_gather_result is not None and isinstance(gather, FsdpAllGather):
            collectives.wait_for(gather.take_done())
        wait()

    def timed_finalize() -> None:
        with collectives.waiting():
            finalize()

    group.wait_for_unshard, group.finalize_backward = timed_wait, timed_finalize


def _groups_of(module: nn.Module) -> Iterator[Any]:
    for part in module.modules():
        get_state = getattr(part, "_get_fsdp_state", None)  # of FSDPModule
        if get_state is not None:
            state = get_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            yield from [state._fsdp_param_group] if groups is None else groups
