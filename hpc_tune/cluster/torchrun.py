"""torchrun, which runs a store for its ranks and pins none of them."""

import ipaddress
import socket

from hpc_tune.cluster.plain import TORCH_NAMES
from hpc_tune.cluster.protocol import Claim, Environ, Launcher, read_claim
from hpc_tune.errors import WorldError

_NODE_VARIABLES = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")


def _claim_of_torchrun(environ: Environ) -> Claim | None:
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    return read_claim(
        environ,
        "torchrun",
        rank="RANK",
        size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        node="GROUP_RANK",
        num_nodes="GROUP_WORLD_SIZE",
    )


TORCHRUN = Launcher(
    _claim_of_torchrun,
    prefixes=("TORCHELASTIC_", *TORCH_NAMES, *_NODE_VARIABLES),
    has_store=True,
)


def check_torchrun_master(environ: Environ) -> None:
    """Refuse a torchrun of several nodes whose master address is each node's own.

    Raises:
        WorldError: since no two nodes would ever meet.
    """
    name, nodes = environ.get("MASTER_ADDR", ""), environ.get("GROUP_WORLD_SIZE", "1")
    if not name or nodes in ("", "1"):
        return
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        raise WorldError(f"MASTER_ADDR={name} cannot be resolved: {error}") from None
    if ipaddress.ip_address(address).is_loopback:
        raise WorldError(
            f"MASTER_ADDR={name} is {address}, each node's own address, on {nodes} nodes: give "
            "torchrun --master-addr the address of the first node's network"
        )
