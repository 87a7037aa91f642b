"""Which ranks share a node."""

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpc_tune.errors import WorldError


def host_key() -> str:
    """Return what is equal for the ranks of one host: its name, which several may share, the boot
    of its kernel, and the network that loopback belongs to, which containers may have of their own.
    """
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def number_nodes(
    by_mpi: Sequence[object], by_name: Sequence[object], claimed_sizes: Sequence[int | None]
) -> list[int]:
    """Return each rank's node, numbered by its lowest rank (pure).

    ``by_mpi`` and ``by_name`` hold one key per rank, equal on one node: MPI's own split, and the
    host name for where MPI is blind (Open MPI 5 over Slurm's PMIx 4 sees every rank alone, and all
    ranks of a node would take the same GPU). ``claimed_sizes`` are the launcher's ranks per node.

    Raises:
        WorldError: if the launcher's sizes fit neither.
    """
    for keys in (by_mpi, by_name):
        counts = Counter(keys)
        if all(n in (None, counts[k]) for k, n in zip(keys, claimed_sizes, strict=True)):
            order = {key: index for index, key in enumerate(dict.fromkeys(keys))}
            return [order[key] for key in keys]
    sizes = [sorted(Counter(keys).values()) for keys in (by_mpi, by_name)]
    raise WorldError(
        f"the launcher says {sorted(set(map(str, claimed_sizes)))} ranks per node, MPI sees "
        f"{sizes[0][:16]} and the host names {by_name[:16]} give {sizes[1][:16]}; check that "
        "mpi4py uses the launcher's MPI and that every node has a host name of its own"
    )


def node_fields(rank: int, nodes: list[int]) -> dict[str, Any]:
    """Return the fields of ``World`` that follow from each rank's node."""
    node = nodes[rank]
    return {
        "local_rank": nodes[:rank].count(node),
        "local_size": nodes.count(node),
        "node": node,
        "num_nodes": len(set(nodes)),
    }
