"""A smaller or reordered world, made of the ranks of an existing one.

    ranks measured -> regroup -> those chosen: a Comm as if launched so
                             -> the others: wait_as_idle_rank until the run has ended

The first rank of the launcher always takes part: it holds the store, through which the ranks left
out learn that the run has ended.
"""

import dataclasses
import gc
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpc_tune.errors import EXIT_FAILED, WorldError
from hpc_tune.world.bootstrap import init_groups, wait_for_idle_gloo
from hpc_tune.world.comm import Comm, Peer
from hpc_tune.world.failure import end_world_on_uncaught

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL_S = 1.0
_LEAVE_LIMIT_S = 10.0
_ENDED_KEY, _LEFT_KEY, _FAILED_KEY = "hpc_tune/ended", "hpc_tune/left", "hpc_tune/failed"


def regroup(comm: Comm, ranks: Sequence[int], timeout_s: float) -> Comm | None:
    """Return this rank's part in a world of ``ranks``, in this order, or None if it is left out.

    Collective over all ranks; ``comm``'s process groups are gone afterwards. ``timeout_s`` is
    run.timeout.
    """
    import torch.distributed as dist

    if comm.store_rank not in ranks:
        raise WorldError(f"rank {comm.store_rank} holds the store and cannot be left out")
    if list(ranks) == list(range(comm.world.size)):
        return comm
    comm.barrier("all ranks to know the layout", timeout_s)
    dist.destroy_process_group()
    gc.collect()
    wait_for_idle_gloo()
    if comm.world.rank not in ranks:
        return None
    roster = _renumber_roster(comm, ranks)
    rank = list(ranks).index(comm.world.rank)
    on_node = [peer.rank for peer in roster if peer.node == roster[rank].node]
    world = dataclasses.replace(
        comm.world,
        rank=rank,
        size=len(ranks),
        local_rank=on_node.index(rank),
        local_size=len(on_node),
        node=roster[rank].node,
        num_nodes=len({peer.node for peer in roster}),
    )
    num = comm.num_regroups + 1
    store = dist.PrefixStore(f"hpc_tune/regrouped/{num}", comm.store)
    group = init_groups(world, comm.device, store, timeout_s, comm.start_s)
    comm = dataclasses.replace(
        comm,
        world=world,
        cpu_group=group,
        roster=roster,
        num_regroups=num,
        store_rank=list(ranks).index(comm.store_rank),
    )
    if comm.watch is not None:
        comm.watch.renumber(comm, ranks)
    if comm.nccl is not None:
        comm.nccl.renumber(comm)
    end_world_on_uncaught(comm)
    return comm


def wait_as_idle_rank(comm: Comm) -> int:
    """Wait for the run's end and return its exit code; ``comm`` is the one before ``regroup``."""
    store, code = comm.store, None
    while code is None:
        time.sleep(_POLL_S)
        try:
            if store.check([_ENDED_KEY]):
                code = int(store.get(_ENDED_KEY))
                store.add(_LEFT_KEY, 1)
            elif store.check([_FAILED_KEY]):
                code = EXIT_FAILED
        except RuntimeError:  # the store is gone with its rank
            code = EXIT_FAILED
    if comm.watch is not None:
        comm.watch.close()
    return code


def release_idle_ranks(store: "Store", num_outside: int, exit_code: int) -> None:
    """Tell ``num_outside`` ranks that the run has ended, and wait until they know."""
    if not num_outside:
        return
    store.set(_ENDED_KEY, str(exit_code))
    until_s = time.monotonic() + _LEAVE_LIMIT_S
    while store.add(_LEFT_KEY, 0) < num_outside and time.monotonic() < until_s:
        time.sleep(0.1)


def _renumber_roster(comm: Comm, ranks: Sequence[int]) -> tuple[Peer, ...]:
    nodes: dict[int, int] = {}
    for rank in ranks:
        nodes.setdefault(comm.roster[rank].node, len(nodes))
    return tuple(
        dataclasses.replace(comm.roster[old], rank=new, node=nodes[comm.roster[old].node])
        for new, old in enumerate(ranks)
    )
