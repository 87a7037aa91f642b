"""Where the kernel says a PCI device sits, and which CPUs are of a NUMA node.

``folder`` is where it shows its devices: /sys, or a tree like it.
"""

import contextlib
from pathlib import Path

SYS = Path("/sys")


def pci_path(folder: Path, address: str) -> Path:
    """Return the path from the root complex to a device such as ``"0000:17:00.0"``."""
    return (folder / "bus" / "pci" / "devices" / address).resolve()


def read_numa_node(device: Path) -> int | None:
    """Return the NUMA node of a device; the kernel says -1 where there is but one."""
    with contextlib.suppress(OSError, ValueError):
        number = int((device / "numa_node").read_text())
        return number if number >= 0 else None
    return None


def read_node_cpus(folder: Path, node: int) -> frozenset[int]:
    """Return the CPUs of a NUMA node; none where it has memory alone, or is not shown."""
    file = folder / "devices" / "system" / "node" / f"node{node}" / "cpulist"
    with contextlib.suppress(OSError, ValueError):
        return frozenset(
            cpu
            for part in file.read_text().strip().split(",")
            if part
            for cpu in range(int(part.partition("-")[0]), int(part.rpartition("-")[2]) + 1)
        )
    return frozenset()
