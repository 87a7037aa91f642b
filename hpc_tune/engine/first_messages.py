"""Large messages on every group, before a device's memory is measured.

NCCL connects an algorithm, and takes its buffers, when the first message of its size comes: 0.5 to
1.6 GB for a group (https://github.com/NVIDIA/nccl/issues/864, 964), and 2.4 GB once among eight
Hopper GPUs with NVLS (https://github.com/NVIDIA/nccl/issues/1410). Otherwise the first step of
training would want that of a device which has been filled already.
"""

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
import torch.distributed as dist

from hpc_tune import torch_versions
from hpc_tune.engine.mesh import wait_until_connected

LARGE_BYTES = 64 << 20


def send_large_messages(
    groups: Iterable[dist.ProcessGroup],
    exchanging: dist.ProcessGroup | None,
    edges: Mapping[tuple[int, Literal["forward", "backward"]], dist.ProcessGroup],
    device: torch.device,
    num_bytes: int = LARGE_BYTES,
) -> None:
    """Send ``num_bytes`` by each collective of the engine over ``groups``. Collective.

    ``exchanging``: the group of experts that are dealt; ``edges``: those of a pipeline, by the rank
    that sends forward. All ranks have their groups in the same order.
    """
    whole = torch.zeros(num_bytes // 4, device=device)
    for group in groups:
        part = torch.zeros(len(whole) // group.size(), device=device)
        used = whole[: len(part) * group.size()]
        dist.all_reduce(used, group=group)
        torch_versions.all_gather(used, part, group)
        torch_versions.reduce_scatter(part, used, dist.ReduceOp.SUM, group)
        wait_until_connected(device)
    if exchanging is not None:
        even = whole[: len(whole) // exchanging.size() * exchanging.size()]
        dist.all_to_all_single(torch.empty_like(even), even, group=exchanging)
        wait_until_connected(device)
    for (first, kind), group in edges.items():
        [other] = {*dist.get_process_group_ranks(group)} - {first}
        source, target = (first, other) if kind == "forward" else (other, first)
        if dist.get_rank() == source:
            dist.send(whole, target, group)
        else:
            dist.recv(whole, source, group)
        wait_until_connected(device)
