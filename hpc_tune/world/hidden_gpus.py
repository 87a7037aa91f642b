"""Ranks whose GPUs' neighbours are hidden by cgroups or a container, and not only by a variable.

NCCL reaches a GPU that CUDA_VISIBLE_DEVICES hides by NVLink; one whose device file cannot be opened
it reaches through the host's memory, without a word, or it fails at the start
(https://github.com/NVIDIA/nccl/issues/1066, 1948).
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpc_tune.world.device import DeviceReport

DEV = Path("/dev")


def count_openable_gpus(dev: Path = DEV) -> int:
    """Return how many of NVIDIA's GPUs this process may open, whatever variables show of them.

    A cgroup leaves the files of the others where they are; a container does not.
    """
    num = 0
    for file in dev.glob("nvidia*"):
        if re.fullmatch(r"nvidia\d+", file.name):
            try:
                os.close(os.open(file, os.O_RDWR | os.O_CLOEXEC))
            except OSError:
                continue
            num += 1
    return num


def hidden_gpus_warning(reports: "Iterable[DeviceReport]") -> str | None:
    """Return a warning where ranks cannot open the GPUs of others on their node (pure)."""
    nodes: dict[int, list[DeviceReport]] = defaultdict(list)
    for report in reports:
        nodes[report.node].append(report)
    told = []
    for here in nodes.values():
        used = {report.uuid for report in here if not report.uuid.startswith("MIG-")}
        few = [report.reachable for report in here if 0 < report.reachable < len(used)]
        if few:
            told.append(f"{here[0].hostname}: ranks may open {min(few)} of the {len(used)} GPUs")
    if not told:
        return None
    more = f" and {len(told) - 4} more nodes" if len(told) > 4 else ""
    return (
        f"{'; '.join(told[:4])}{more}; the device files of the other GPUs are hidden (cgroups, or "
        "a container for each rank): NCCL sends through the host's memory instead of NVLink, 5 to "
        '10 times as slow, or fails with "invalid device ordinal". Show each rank all GPUs of the '
        "node: in Slurm --gpus-per-node without --gpus-per-task and --gpu-bind; one container for "
        "all ranks of a node, with all of its GPUs"
    )
