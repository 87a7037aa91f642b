"""Memory of GPUs that the kernel counts as the machine's: of GH200 and GB200, NUMA nodes of it.

Such a node has no CPUs. MemTotal has its 96 or 144 GB, and CUDA gives them to whoever asks for
memory of the GPU, so it is not the host's.
"""

import re
from pathlib import Path

from hpc_tune.world.numa import SYS, read_node_cpus

_LINE = re.compile(r"^Node \d+ (MemTotal|MemFree):\s+(\d+) kB", re.MULTILINE)


def find_gpu_meminfo(proc: Path = Path("/proc"), folder: Path = SYS) -> list[Path]:
    """Return where the kernel tells of memory of GPUs; none without NVIDIA's driver."""
    if not (proc / "driver" / "nvidia").is_dir():
        return []
    nodes = folder.glob("devices/system/node/node[0-9]*")
    return [
        node / "meminfo"
        for node in sorted(nodes)
        if (node / "cpulist").is_file()
        and not read_node_cpus(folder, int(node.name[len("node") :]))
    ]


def read_total_and_free(files: list[Path]) -> tuple[int, int]:
    """Return the bytes that these nodes have, and those of them that nobody uses."""
    sums = {"MemTotal": 0, "MemFree": 0}
    for file in files:
        for name, kib in _LINE.findall(file.read_text(encoding="ascii", errors="replace")):
            sums[name] += 1024 * int(kib)
    return sums["MemTotal"], sums["MemFree"]
