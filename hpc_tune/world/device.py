"""Which device a rank computes on, and the check that no GPU is shared or idle."""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpc_tune.errors import WorldError
from hpc_tune.world.allocator import expand_segments
from hpc_tune.world.discover import World

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceReport:
    """What one rank reports to the others: the UUIDs of its device and of all visible ones.

    ``error`` says why it has no device, if it requested one.
    """

    rank: int
    node: int
    hostname: str
    kind: str
    uuid: str = ""
    visible: tuple[str, ...] = ()
    error: str | None = None


def pick_device(
    wanted: Literal["auto", "cpu", "cuda"], world: World
) -> "tuple[torch.device, DeviceReport]":
    """Return this rank's device and its report; an error is reported, not raised.

    A launcher that shows each rank one GPU leaves device 0, otherwise the local rank is the index.
    """
    import torch

    expand_segments(os.environ, wanted)
    cpu, rank = torch.device("cpu"), (world.rank, world.node, world.hostname)
    if wanted == "cpu" or not torch.cuda.is_available():
        error = None
        if wanted == "cuda":
            shown = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
            error = (
                f"run.device=cuda, but torch {torch.__version__} finds no CUDA device on "
                f"{world.hostname} (CUDA_VISIBLE_DEVICES is {shown}); request GPUs for the job, or "
                "set run.device=cpu"
            )
        return cpu, DeviceReport(*rank, "cpu", error=error)
    visible = tuple(
        str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())
    )
    index = 0 if len(visible) == 1 else world.local_rank
    if index >= len(visible):
        error = (
            f"{world.hostname} runs {world.local_size} ranks but shows {len(visible)} GPUs to rank "
            f"{world.rank}; start {len(visible)} ranks per node, or set run.device=cpu"
        )
        return cpu, DeviceReport(*rank, "cuda", visible=visible, error=error)
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device, DeviceReport(*rank, "cuda", uuid=visible[index], visible=visible)


def check_devices(reports: Sequence[DeviceReport], launched: bool) -> str | None:
    """Check by all ranks' reports that each GPU of the nodes has one rank (pure).

    Returns a warning, if any: a process without a launcher may leave GPUs idle, a launched world
    may not.

    Raises:
        WorldError: on mixed kinds, a rank without a device, a GPU with two ranks, or an idle GPU.
    """
    for report in reports:
        if report.error is not None:
            raise WorldError(report.error)
    without = sorted({r.hostname for r in reports if r.kind == "cpu"})
    if without and len({r.kind for r in reports}) > 1:
        raise WorldError(
            f"some ranks have a CUDA device, those on {', '.join(without[:8])} have none; check "
            "these nodes (nvidia-smi), or set run.device=cpu"
        )
    if without:
        return None
    owners: dict[str, list[int]] = defaultdict(list)
    shown: dict[int, set[str]] = defaultdict(set)
    hosts: dict[int, str] = {}
    for report in reports:
        owners[report.uuid].append(report.rank)
        shown[report.node] |= set(report.visible)
        hosts[report.node] = report.hostname
    for uuid, ranks in owners.items():
        if len(ranks) > 1:
            where = reports[ranks[0]]
            raise WorldError(
                f"ranks {', '.join(map(str, ranks))} on {where.hostname} share one GPU ({uuid}) "
                f"of {len(shown[where.node])} visible; start one rank per GPU"
            )
    idle = {node: sorted(uuids - owners.keys()) for node, uuids in shown.items()}
    lines = [
        f"{hosts[node]}: {len(uuids)} of {len(shown[node])} GPUs idle ({', '.join(uuids)})"
        for node, uuids in sorted(idle.items())
        if uuids
    ]
    if not lines:
        return None
    text = "; ".join(lines[:8])
    if not launched:
        num_gpus = max(map(len, shown.values()))
        return f"{text}; one process uses one GPU, mpirun -np {num_gpus} would use all"
    raise WorldError(
        f"{text}; start one rank per GPU, or hide the GPUs that are not for this run with "
        "CUDA_VISIBLE_DEVICES"
    )


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell whether this CPU has bf16 instructions (AVX512-BF16 or AMX); True if it is no x86.

    Without that torch takes 33 x as long for a training step in bf16 as for one in fp32 (SmolLM2 on
    a CPU with AVX2).
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), None)
    return flags is None or bool(flags & {"avx512_bf16", "amx_bf16"})
