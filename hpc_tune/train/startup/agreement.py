"""All ranks train with the same settings, or none does."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from hpc_tune.config.section import flatten
from hpc_tune.errors import ConfigError
from hpc_tune.world.comm import Comm

# A node's local disk may have another path on each node.
_NODE_LOCAL_SETTINGS = {"parallel.offload_path"}
_MAX_NAMED = 5


def agree_on_settings(comm: Comm, settings: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare every rank's settings, a dumped configuration, with rank 0's. Collective.

    Ranks get different ones from another environment, another working directory, or another copy
    of the file on their node.

    Raises:
        ConfigError: on every rank, naming the fields that differ, their values and their ranks.
    """
    own = {
        name: value for name, value in flatten(settings).items() if name not in _NODE_LOCAL_SETTINGS
    }
    first = comm.broadcast(own)
    others = {name: value for name, value in own.items() if value != first[name]}
    if not comm.sum([bool(others)])[0]:
        return
    ranks_of: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, differing in enumerate(comm.gather(others)):
        for name, value in differing.items():
            ranks_of[name, str(value)].append(rank)
    lines = [
        f"{name}={value} on {_ranks(ranks)}, {first[name]} on rank 0"
        for (name, value), ranks in ranks_of.items()
    ]
    error = ConfigError(
        f"the ranks have different settings: {'; '.join(lines[:_MAX_NAMED])}. Give all nodes the "
        "same file, arguments and environment"
    )
    comm.agree_on_error(error if comm.is_rank_0 else None, "comparing the settings")


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_NAMED]))
    more = f" and {len(ranks) - _MAX_NAMED} more" if len(ranks) > _MAX_NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
