"""The topology of a node: its GPUs, the paths between them, and the network cards near them.

NVIDIA's GPUs are read from the driver (nvidia-ml-py, if installed); AMD's GPUs, network cards and
NUMA nodes from the kernel. A path's label is a hint; the rates of links are measured (links.py).
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_tune.files import raise_if_too_many_open_files
from hpc_tune.world.affinity import SYS, pci_device_path, read_numa_node

# -- AMD's GPUs of a node and the links between them, as the kernel's compute driver shows them.
#
#     /sys/class/kfd/kfd/topology/nodes/N/gpu_id        0 for a CPU, 1 to 2^32 for a GPU
#     /sys/class/kfd/kfd/topology/nodes/N/properties    NAME VALUE lines
#     /sys/class/kfd/kfd/topology/nodes/N/io_links/M/properties    to other nodes: type, node_to
#
# Source: drivers/gpu/drm/amd/amdkfd/kfd_topology.c of Linux. A part of a GPU that counts as a GPU,
# such as a die of an MI250X, is a separate node.


_XGMI_LINK_TYPE = "11"  # the type of a link between GPUs (CRAT_IOLINK_TYPE_XGMI); 2 is PCIe


@dataclass(frozen=True)
class AmdGpu:
    """A GPU: its number among the kernel's nodes, architecture, PCI address, and linked nodes."""

    node: int
    gfx: str
    uuid: str
    pci_address: str
    linked_nodes: tuple[int, ...]


def amd_gpus(folder: Path) -> list[AmdGpu]:
    """Return the GPUs in the driver's order, which is that of HIP; ``folder`` is /sys."""
    nodes = folder / "class" / "kfd" / "kfd" / "topology" / "nodes"
    gpus = []
    for node in sorted(_list_numbered_entries(nodes), key=lambda path: int(path.name)):
        if _read_text(node / "gpu_id") in ("", "0"):
            continue
        facts = _read_properties(node / "properties")
        links = [
            _read_properties(link / "properties")
            for link in _list_numbered_entries(node / "io_links")
        ]
        linked_nodes = [
            int(link["node_to"]) for link in links if link.get("type") == _XGMI_LINK_TYPE
        ]
        gpus.append(
            AmdGpu(
                node=int(node.name),
                gfx=_gfx_name(int(facts.get("gfx_target_version", 0))),
                uuid=f"{int(facts.get('unique_id', 0)):x}",
                pci_address=_pci_address(
                    int(facts.get("domain", 0)), int(facts.get("location_id", 0))
                ),
                linked_nodes=tuple(sorted(linked_nodes)),
            )
        )
    return gpus


def amd_driver_version(folder: Path) -> str:
    """Return the version of the amdgpu driver; "" for the one built into the kernel."""
    return _read_text(folder / "module" / "amdgpu" / "version")


def _gfx_name(version: int) -> str:
    """Name an architecture, such as gfx90a for 90010: major, minor and stepping (these two hex)."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _pci_address(domain: int, location: int) -> str:
    """Return the PCI address of a bus, device and function packed into one number."""
    return f"{domain:04x}:{location >> 8 & 255:02x}:{location >> 3 & 31:02x}.{location & 7}"


def _read_properties(file: Path) -> Mapping[str, str]:
    lines = (line.split() for line in _read_text(file).splitlines())
    return {line[0]: line[1] for line in lines if len(line) == 2}


def _list_numbered_entries(folder: Path) -> list[Path]:
    return [path for path in _list_folder(folder) if path.name.isdigit()]


# -- GPUs and network cards of a node, and the paths between them.


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise_if_too_many_open_files(error)
        return []


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise_if_too_many_open_files(error)
        return ""


_CARD_CLASSES = ("infiniband", "cxi")  # cxi: HPE Slingshot
# nvmlGpuTopologyLevel_t, in the words of nvidia-smi topo.
_PCI_PATH_LABELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}

NO_NVML = "nvidia-ml-py is not installed"


@dataclass(frozen=True)
class NodeGpu:
    """One GPU as the driver knows it, whether or not a rank may use it.

    ``place``: its PCI address. ``nvlinks``: how many of its links to other GPUs are up; on AMD, the
    number of linked GPUs. ``link``: what such a link is called.
    """

    uuid: str
    name: str
    place: str
    numa: int | None
    nvlinks: int
    link: str = "NVLink"


@dataclass(frozen=True)
class NetworkCard:
    """One card of the fast network; ``state`` and ``rate``: ``ACTIVE`` and ``100 Gb/sec``.

    ``near``: the numbers of the GPUs that share a PCI switch with it, so that GPUDirect pays off.
    ``kind``: InfiniBand, RoCE, Slingshot (without a state), or EFA.
    """

    name: str
    state: str
    rate: str
    numa: int | None
    near: tuple[int, ...]
    kind: str = "InfiniBand"


@dataclass(frozen=True)
class Topology:
    """The topology of one node.

    ``paths``: by pair of GPUs, such as ``"0-1"``: NVLink, or where their PCI paths meet: PIX, PXB
    (switches), PHB (root complex), NODE, SYS (across NUMA nodes), ? if unknown; XGMI or PCIe for
    AMD's. ``driver_error``: why the driver gave no or incomplete information. ``ethernet``: Mb/s of
    the network interfaces that are up, by name.
    """

    gpus: tuple[NodeGpu, ...] = ()
    paths: Mapping[str, str] = field(default_factory=dict)
    cards: tuple[NetworkCard, ...] = ()
    driver: str = ""
    driver_cuda: str = ""
    driver_error: str = ""
    ethernet: Mapping[str, int] = field(default_factory=dict)


def read_topology(folder: Path = SYS) -> Topology:
    """Return this node's topology; NVIDIA's GPUs only if their driver and nvidia-ml-py are there.

    Without nvidia-ml-py and AMD's GPUs, ``driver_error`` is NO_NVML. ``folder`` is where the kernel
    shows its devices.
    """
    topology = _amd_topology(folder) or _nvidia_topology(folder)
    devices = [pci_device_path(folder, gpu.place) for gpu in topology.gpus]
    cards = tuple(find_network_cards(folder, devices))
    return replace(topology, cards=cards, ethernet=_ethernet_speeds_mbps(folder))


def _amd_topology(folder: Path) -> Topology | None:
    """Return the topology of AMD's GPUs, as the kernel shows them; None if there are none."""
    devices = amd_gpus(folder)
    if not devices:
        return None
    gpus = tuple(
        NodeGpu(
            uuid=gpu.uuid,
            name=gpu.gfx,
            place=gpu.pci_address,
            numa=read_numa_node(folder / "bus" / "pci" / "devices" / gpu.pci_address),
            nvlinks=len(gpu.linked_nodes),
            link="XGMI link",
        )
        for gpu in devices
    )
    paths = {
        f"{i}-{j}": "XGMI" if other.node in gpu.linked_nodes else "PCIe"
        for i, gpu in enumerate(devices)
        for j, other in enumerate(devices[i + 1 :], i + 1)
    }
    return Topology(gpus=gpus, paths=paths, driver=amd_driver_version(folder))


def are_on_same_switch(device: Path, other_device: Path) -> bool:
    """Return whether the PCI paths of two devices meet below the root complex (pure).

    Their paths then have a bridge in common: ``.../pci0000:15/0000:15:01.0/...``.
    """
    common = [a for a, b in zip(device.parts, other_device.parts, strict=False) if a == b]
    return any(re.fullmatch(r"[0-9a-f]+:[0-9a-f]+:[0-9a-f]+\.[0-9a-f]", part) for part in common)


def _nvidia_topology(folder: Path) -> Topology:
    """Return what NVIDIA's driver reports, without what it refuses, as for a slice of a GPU."""
    try:
        import pynvml as nvml
    except ImportError:
        return Topology(driver_error=NO_NVML)
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:  # no driver, or not for this user
        return Topology(driver_error=str(error))
    errors: list[str] = []
    devices: list[tuple[Any, NodeGpu]] = []
    driver, cuda = "", 0
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            with _collect_errors(nvml, errors):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                devices.append((handle, _read_gpu(nvml, handle, folder)))
        driver = _to_text(nvml.nvmlSystemGetDriverVersion())
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
    except nvml.NVMLError as error:
        errors.append(str(error))
    paths = {
        f"{i}-{j}": _link_path(nvml, devices[i][0], devices[j][0])
        for i in range(len(devices))
        for j in range(i + 1, len(devices))
    }
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlShutdown()
    return Topology(
        gpus=tuple(gpu for _, gpu in devices),
        paths=paths,
        driver=driver,
        driver_cuda=f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else "",
        driver_error="; ".join(dict.fromkeys(errors)),
    )


@contextlib.contextmanager
def _collect_errors(nvml: Any, errors: list[str]) -> Iterator[None]:
    try:
        yield
    except nvml.NVMLError as error:
        errors.append(str(error))


def _read_gpu(nvml: Any, handle: Any, folder: Path) -> NodeGpu:
    # NVML writes a domain of eight digits, the kernel one of four.
    address = _to_text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()[-12:]
    return NodeGpu(
        uuid=_to_text(nvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-"),  # as torch writes it
        name=_to_text(nvml.nvmlDeviceGetName(handle)),
        place=address,
        numa=read_numa_node(folder / "bus" / "pci" / "devices" / address),
        nvlinks=sum(_nvlink_states(nvml, handle)),
    )


def _nvlink_states(nvml: Any, handle: Any) -> Iterator[bool]:
    with contextlib.suppress(nvml.NVMLError):  # raised after the last link
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            yield nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED


def _link_path(nvml: Any, gpu: Any, other_gpu: Any) -> str:
    with contextlib.suppress(nvml.NVMLError):
        status = nvml.nvmlDeviceGetP2PStatus(gpu, other_gpu, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if status == nvml.NVML_P2P_STATUS_OK:
            return "NVLink"
    with contextlib.suppress(nvml.NVMLError):
        return _PCI_PATH_LABELS.get(nvml.nvmlDeviceGetTopologyCommonAncestor(gpu, other_gpu), "?")
    return "?"


def find_network_cards(folder: Path = SYS, gpus: Sequence[Path] = ()) -> Iterator[NetworkCard]:
    """Yield the cards of fast networks; ``gpus``: device paths of the GPUs for ``near``."""
    for group in _CARD_CLASSES:
        for card in _list_folder(folder / "class" / group):
            device = (card / "device").resolve()
            near_gpus = tuple(i for i, gpu in enumerate(gpus) if are_on_same_switch(device, gpu))
            state, rate = _best_port(card / "ports")
            if group == "cxi":  # the kernel shows the rate at its Ethernet interface, hsn0
                interfaces = [net.name for net in _list_folder(device / "net")]
                speeds = [_interface_speed_mbps(folder, name) for name in interfaces]
                rate = f"{max(speeds, default=0) // 1000 or 200} Gb/sec"
            yield NetworkCard(
                card.name, state, rate, read_numa_node(device), near_gpus, _card_kind(group, card)
            )


def _card_kind(card_class: str, card: Path) -> str:
    if card_class == "cxi":
        return "Slingshot"
    if (card / "device" / "driver").resolve().name == "efa":
        return "EFA"
    layers = [_read_text(port / "link_layer") for port in _list_folder(card / "ports")]
    return "RoCE" if "Ethernet" in layers else "InfiniBand"


def _best_port(ports: Path) -> tuple[str, str]:
    """Return state and rate of the first port that is up, else of the first port."""
    pairs = [
        (
            _read_text(port / "state").partition(": ")[2],
            _read_text(port / "rate").partition(" (")[0],
        )
        for port in _list_folder(ports)
    ]
    return next((pair for pair in pairs if pair[0] == "ACTIVE"), pairs[0] if pairs else ("", ""))


def _ethernet_speeds_mbps(folder: Path) -> dict[str, int]:
    """Return the Mb/s of each network interface that is a device and up."""
    names = [
        net.name for net in _list_folder(folder / "class" / "net") if (net / "device").exists()
    ]
    return {name: speed for name in names if (speed := _interface_speed_mbps(folder, name)) > 0}


def _interface_speed_mbps(folder: Path, interface: str) -> int:
    with contextlib.suppress(ValueError):
        return int(_read_text(folder / "class" / "net" / interface / "speed"))
    return 0


def _to_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
