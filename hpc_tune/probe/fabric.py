"""The variables that sites set for their fabric, and which of them a node has otherwise.

HPE Slingshot works without most of them, but slower, or hangs once many ranks send large messages.
With NCCL's protocol LL128 messages arrive wrong without an error
(https://github.com/NVIDIA/nccl/issues/2001), so that is an error here. The values are those of

    HPE      https://github.com/HewlettPackard/shs-ccl-docs/blob/main/ccl_env.sh
    CSCS     https://docs.cscs.ch/software/communication/nccl/
    OLCF     https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html
    Sigma2   https://documentation.sigma2.no/hpc_machines/olivia/nccl.html
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpectedVariable:
    """A variable and the value that sites set; ``others``: further values that do as well."""

    name: str
    value: str
    others: tuple[str, ...] = ()


_SLINGSHOT = (
    ExpectedVariable("NCCL_NET_GDR_LEVEL", "PHB", ("3",)),
    ExpectedVariable("NCCL_CROSS_NIC", "1"),
    ExpectedVariable("FI_CXI_DEFAULT_CQ_SIZE", "131072"),
    ExpectedVariable("FI_CXI_DEFAULT_TX_SIZE", "2048", ("16384",)),
    ExpectedVariable("FI_CXI_RX_MATCH_MODE", "hybrid", ("software",)),
    ExpectedVariable("FI_MR_CACHE_MONITOR", "userfaultfd", ("kdreg2",)),
    ExpectedVariable("FI_CXI_DISABLE_HOST_REGISTER", "1"),
)
_SLINGSHOT_AMD = (ExpectedVariable("FI_CXI_RDZV_PROTO", "alt_read"),)
PLUGIN_NETWORKS = ("Slingshot", "EFA")
_LL128_SINCE = (2, 27)  # NCCL's tuning chooses it over Slingshot from there on
VARIABLE_NAMES = (
    *(one.name for one in (*_SLINGSHOT, *_SLINGSHOT_AMD)),
    "NCCL_PROTO",
)


def tcp_warning(kinds: Sequence[str], library: str, plugin: str, socket_names: str) -> str | None:
    """Return a warning where NCCL sends by TCP, on nodes whose cards need a plugin (pure).

    ``kinds`` of the node's cards; ``plugin`` is the one that is loaded, after the first
    communicator; ``socket_names`` is NCCL_SOCKET_IFNAME.
    """
    kind = next((kind for kind in kinds if kind in PLUGIN_NETWORKS), None)
    if kind is None or plugin:
        return None
    names = socket_names.removeprefix("=").split(",")
    over = ", ".join(filter(None, names)) or "any interface"
    text = (
        f"{library} sends by TCP between the nodes, over {over}: "
        f"{kind} needs its network plugin (aws-ofi-nccl), and none is loaded. Load the site's "
        "module before the ranks start, and bind it into a container (doctor says more)"
    )
    if len(names) == 1 and kinds.count(kind) > 1:
        text += f". Until then name all {kinds.count(kind)} interfaces: run.interface=hsn0,hsn1"
    return text


def find_deviations(kind: str, library: str, settings: Mapping[str, str]) -> list[ExpectedVariable]:
    """Return the variables that sites set, where they are unset or otherwise here (pure).

    ``kind`` of card, such as Slingshot; ``library``: NCCL or RCCL.
    """
    if kind != "Slingshot":
        return []
    return [
        one
        for one in (*_SLINGSHOT, *(_SLINGSHOT_AMD if library == "RCCL" else ()))
        if settings.get(one.name) not in (one.value, *one.others)
    ]


def find_harmful_settings(
    kind: str, library: str, version: str, settings: Mapping[str, str]
) -> list[tuple[bool, str]]:
    """Return what hangs or sends wrong values: (whether that is sure, in words) (pure).

    ``version`` is that of the library which is loaded.
    """
    if kind != "Slingshot":
        return []
    found = []
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if library == "NCCL" and numbers >= _LL128_SINCE and _allows_ll128(settings):
        found.append(
            (
                True,
                f"NCCL {version} sends by the protocol LL128 over Slingshot, and values can arrive "
                "wrong without an error (https://github.com/NVIDIA/nccl/issues/2001): export "
                "NCCL_PROTO=^LL128",
            )
        )
    if settings.get("FI_MR_CACHE_MONITOR") == "memhooks":
        found.append(
            (
                False,
                "FI_MR_CACHE_MONITOR=memhooks misses memory that is freed, so that runs hang; "
                "export FI_MR_CACHE_MONITOR=userfaultfd, or kdreg2",
            )
        )
    return found


def _allows_ll128(settings: Mapping[str, str]) -> bool:
    """Return whether NCCL may choose it: NCCL_PROTO lists what to use, or after ^ what not."""
    protocols = settings.get("NCCL_PROTO", "").upper()
    listed = "LL128" in protocols.removeprefix("^").split(",")
    return not protocols or listed != protocols.startswith("^")
