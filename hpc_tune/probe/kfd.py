"""AMD's GPUs of a node and the links between them, as the kernel's compute driver shows them.

    /sys/class/kfd/kfd/topology/nodes/N/gpu_id        0 of a CPU, 1 to 2^32 of a GPU
    /sys/class/kfd/kfd/topology/nodes/N/properties    NAME VALUE lines
    /sys/class/kfd/kfd/topology/nodes/N/io_links/M/properties    to other nodes: type, node_to

Source: drivers/gpu/drm/amd/amdkfd/kfd_topology.c of Linux. A part of a GPU that counts as one, such
as a die of an MI250X, is a node of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_tune.errors import raise_if_out_of_files

_XGMI = "11"  # the type of a link between GPUs (CRAT_IOLINK_TYPE_XGMI); 2 is PCIe


@dataclass(frozen=True)
class AmdGpu:
    """A GPU: its number among the kernel's nodes, architecture, PCI address, and linked nodes."""

    node: int
    gfx: str
    uuid: str
    place: str
    linked: tuple[int, ...]


def amd_gpus(folder: Path) -> list[AmdGpu]:
    """Return the GPUs in the driver's order, which is that of HIP; ``folder`` is /sys."""
    nodes = folder / "class" / "kfd" / "kfd" / "topology" / "nodes"
    found = []
    for node in sorted(_folders(nodes), key=lambda path: int(path.name)):
        if _text(node / "gpu_id") in ("", "0"):
            continue
        facts = _properties(node / "properties")
        links = [_properties(link / "properties") for link in _folders(node / "io_links")]
        linked = [int(link["node_to"]) for link in links if link.get("type") == _XGMI]
        found.append(
            AmdGpu(
                node=int(node.name),
                gfx=_gfx_name(int(facts.get("gfx_target_version", 0))),
                uuid=f"{int(facts.get('unique_id', 0)):x}",
                place=_pci_address(int(facts.get("domain", 0)), int(facts.get("location_id", 0))),
                linked=tuple(sorted(linked)),
            )
        )
    return found


def amd_driver(folder: Path) -> str:
    """Return the version of amdgpu, where it is not the kernel's own."""
    return _text(folder / "module" / "amdgpu" / "version")


def _gfx_name(version: int) -> str:
    """Return such as gfx90a for 90010: major, minor and stepping, the last two in hexadecimal."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _pci_address(domain: int, location: int) -> str:
    """Return the PCI address of a bus, device and function that are one number."""
    return f"{domain:04x}:{location >> 8 & 255:02x}:{location >> 3 & 31:02x}.{location & 7}"


def _properties(file: Path) -> Mapping[str, str]:
    lines = (line.split() for line in _text(file).splitlines())
    return {line[0]: line[1] for line in lines if len(line) == 2}


def _folders(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.name.isdigit()]
    except OSError as error:
        raise_if_out_of_files(error)
        return []


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise_if_out_of_files(error)
        return ""
