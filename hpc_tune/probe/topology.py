"""The topology of a node: its GPUs, the paths between them, and the network cards near them.

GPUs come from the driver (nvidia-ml-py, where it is installed), cards and NUMA nodes from the
kernel. A label is a hint; what a link carries is measured (links.py).
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_tune.world.numa import SYS, numa_of, pci_path

_CARDS = ("infiniband", "cxi")  # the second: HPE Slingshot
# nvmlGpuTopologyLevel_t, in the words of nvidia-smi topo.
_LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver knows it, whether or not a rank may use it.

    ``place``: its PCI address.
    """

    uuid: str
    name: str
    place: str
    numa: int | None
    nvlinks: int


@dataclass(frozen=True)
class Card:
    """One card of the fast network; ``rate`` and ``state`` are the kernel's words.

    ``near`` are the GPUs that share a PCI switch with it, so that GPUDirect is worth it.
    """

    name: str
    state: str
    rate: str
    numa: int | None
    near: tuple[int, ...]


@dataclass(frozen=True)
class Topology:
    """One node. ``paths`` are of pairs of GPUs, such as ``"0-1"``: NVLink, or where they meet:
    PIX, PXB (switches), PHB (root complex), NODE, SYS (across NUMA nodes).
    """

    gpus: tuple[Gpu, ...] = ()
    paths: Mapping[str, str] = field(default_factory=dict)
    cards: tuple[Card, ...] = ()
    driver: str = ""
    driver_cuda: str = ""


def read_topology(folder: Path = SYS) -> Topology:
    """Return this node's topology; without a driver or nvidia-ml-py its cards alone.

    ``folder`` is where the kernel shows its devices.
    """
    gpus, paths, driver, cuda = _ask_driver(folder)
    devices = [pci_path(folder, gpu.place) for gpu in gpus]
    return Topology(gpus, paths, tuple(_cards(folder, devices)), driver, cuda)


def share_a_switch(device: Path, other: Path) -> bool:
    """Tell whether two devices meet below the root complex (pure).

    Their paths then have a bridge in common: ``.../pci0000:15/0000:15:01.0/...``.
    """
    common = [a for a, b in zip(device.parts, other.parts, strict=False) if a == b]
    return any(re.fullmatch(r"[0-9a-f]+:[0-9a-f]+:[0-9a-f]+\.[0-9a-f]", part) for part in common)


def _ask_driver(folder: Path) -> tuple[tuple[Gpu, ...], dict[str, str], str, str]:
    nothing: tuple[tuple[Gpu, ...], dict[str, str], str, str] = ((), {}, "", "")
    try:
        import pynvml as nvml
    except ImportError:
        return nothing
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver
        return nothing
    try:
        handles = list(_handles(nvml))
        gpus = tuple(_gpu(nvml, handle, folder) for handle in handles)
        paths = {
            f"{i}-{j}": _path(nvml, handles[i], handles[j])
            for i in range(len(handles))
            for j in range(i + 1, len(handles))
        }
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        return gpus, paths, driver, f"{cuda // 1000}.{cuda % 1000 // 10}"
    except nvml.NVMLError:
        return nothing
    finally:
        nvml.nvmlShutdown()


def _handles(nvml: Any) -> Iterator[Any]:
    for index in range(nvml.nvmlDeviceGetCount()):
        with contextlib.suppress(nvml.NVMLError):  # another job's
            yield nvml.nvmlDeviceGetHandleByIndex(index)


def _gpu(nvml: Any, handle: Any, folder: Path) -> Gpu:
    # NVML writes a domain of eight digits, the kernel one of four.
    address = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower()[-12:]
    return Gpu(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-"),  # as torch writes it
        name=_text(nvml.nvmlDeviceGetName(handle)),
        place=address,
        numa=numa_of(folder / "bus" / "pci" / "devices" / address),
        nvlinks=sum(_nvlinks(nvml, handle)),
    )


def _nvlinks(nvml: Any, handle: Any) -> Iterator[bool]:
    with contextlib.suppress(nvml.NVMLError):  # it has no more
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            yield nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED


def _path(nvml: Any, gpu: Any, other: Any) -> str:
    with contextlib.suppress(nvml.NVMLError):
        status = nvml.nvmlDeviceGetP2PStatus(gpu, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if status == nvml.NVML_P2P_STATUS_OK:
            return "NVLink"
    with contextlib.suppress(nvml.NVMLError):
        return _LEVELS.get(nvml.nvmlDeviceGetTopologyCommonAncestor(gpu, other), "?")
    return "?"


def _cards(folder: Path, gpus: Sequence[Path]) -> Iterator[Card]:
    for kind in _CARDS:
        try:
            cards = sorted((folder / "class" / kind).iterdir())
        except OSError:
            continue
        for card in cards:
            device = (card / "device").resolve()
            near = tuple(i for i, gpu in enumerate(gpus) if share_a_switch(device, gpu))
            state = _text_of(card / "ports" / "1" / "state").partition(": ")[2]
            rate = _text_of(card / "ports" / "1" / "rate").partition(" (")[0]
            yield Card(card.name, state, rate, numa_of(device), near)


def _text_of(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
