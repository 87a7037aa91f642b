"""Choose each rank's device, tell what it supports, and check that no GPU is shared or idle.

what each rank of a node sees -> assign_gpus (pure) -> this rank's device -> check of all reports
"""

import ctypes
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpc_tune.cluster.unused_gpus import (
    VISIBILITY_VARIABLES,
    TorchBuild,
    UnusedGpus,
    explain_cuda_failure,
    find_unused_gpus,
)
from hpc_tune.errors import WorldError, first_line
from hpc_tune.units import list_some
from hpc_tune.world.affinity import SYS, pci_device_path, read_numa_node
from hpc_tune.world.discover import World
from hpc_tune.world.json_channel import Channel

if TYPE_CHECKING:
    import torch

# -- Ranks that cannot open the node's other GPUs: cgroups or a container hide them, not a variable.
#
# NCCL still uses NVLink to a GPU that only CUDA_VISIBLE_DEVICES hides. If it cannot open the GPU's
# device file, it silently goes through the host's memory, or fails at the start
# (https://github.com/NVIDIA/nccl/issues/1066, 1948).


DEV = Path("/dev")


def count_openable_gpus(dev: Path = DEV) -> int:
    """Return how many NVIDIA GPUs this process may open, whatever the visibility variables say.

    A cgroup leaves the device files of the other GPUs in place; a container does not.
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
    """Return a warning if ranks cannot open the GPUs of other ranks on their node (pure)."""
    nodes: dict[int, list[DeviceReport]] = defaultdict(list)
    for report in reports:
        nodes[report.node].append(report)
    lines = []
    for peers in nodes.values():
        uuids = {report.uuid for report in peers if not report.uuid.startswith("MIG-")}
        counts = [report.reachable for report in peers if 0 < report.reachable < len(uuids)]
        if counts:
            lines.append(
                f"{peers[0].hostname}: ranks may open {min(counts)} of the {len(uuids)} GPUs"
            )
    if not lines:
        return None
    return (
        f"{list_some(lines, 4, '; ')}; the device files of the other GPUs are hidden (cgroups, or "
        "a container for each rank): NCCL sends through the host's memory instead of NVLink, 5 to "
        '10 times as slow, or fails with "invalid device ordinal". Show each rank all GPUs of the '
        "node: in Slurm --gpus-per-node without --gpus-per-task and --gpu-bind; one container for "
        "all ranks of a node, with all of its GPUs"
    )


# -- Which device a rank computes on, and the check that none is shared or idle.


@dataclass(frozen=True)
class VisibleGpus:
    """The GPUs that one rank sees: their names, the same on all ranks of a node, and NUMA nodes.

    ``error`` says why CUDA does not start.
    """

    names: tuple[str, ...] = ()
    numa_nodes: tuple[int | None, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class DeviceReport:
    """What one rank reports to the others: the names of its device and of all visible devices.

    ``error``: why the rank has no device, if it must have one; ``unused``: which GPUs it leaves
    unused, if it may. ``reachable``: how many NVIDIA GPUs it may open, 0 if that is unknown.
    """

    rank: int
    node: int
    hostname: str
    kind: str
    uuid: str = ""
    visible: tuple[str, ...] = ()
    error: str | None = None
    unused: str | None = None
    reachable: int = 0

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "DeviceReport":
        """Return another rank's report, received as JSON."""
        return cls(**{**row, "visible": tuple(row["visible"])})


def find_visible_gpus(request: Literal["auto", "cpu", "cuda"], folder: Path = SYS) -> VisibleGpus:
    """Return the GPUs that this rank sees; ``folder`` is the kernel's tree of devices."""
    import torch

    if request == "cpu" or not torch.cuda.is_available():
        return VisibleGpus()
    try:
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except RuntimeError as error:
        return VisibleGpus(error=first_line(error))
    numa_nodes = tuple(read_numa_node(pci_device_path(folder, pci_address(gpu))) for gpu in gpus)
    return VisibleGpus(name_gpus(gpus, os.environ), numa_nodes)


def gather_visible_gpus(
    world: World, own_gpus: VisibleGpus, channel: Channel
) -> dict[int, VisibleGpus]:
    """Return what each rank of this node sees, by rank. Collective."""
    rows = channel.all_gather([world.node, own_gpus.names, own_gpus.numa_nodes, own_gpus.error])
    return {
        rank: VisibleGpus(tuple(names), tuple(numa_nodes), error)
        for rank, (node, names, numa_nodes, error) in enumerate(rows)
        if node == world.node
    }


def name_gpus(gpus: Sequence[Any], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a name for each GPU from torch's properties of it (pure).

    The name is the UUID, or the PCI address if ROCm gives no UUID. An AMD GPU has both, since its
    dies may share a UUID. CUDA may give a slice of a GPU (MIG) the UUID of the whole GPU; a process
    then sees only this slice, whose name is in CUDA_VISIBLE_DEVICES. If names are equal within a
    process, as they may be for the parts of one AMD GPU, their indices are appended.
    """
    visible_devices = environ.get("CUDA_VISIBLE_DEVICES", "")
    if len(gpus) == 1 and visible_devices.startswith("MIG-"):
        return (visible_devices.partition(",")[0],)
    names = []
    for index, gpu in enumerate(gpus):
        uuid = str(getattr(gpu, "uuid", ""))
        has_uuid = bool(uuid.strip("0-"))
        address = pci_address(gpu)
        if has_uuid and address and str(getattr(gpu, "gcnArchName", "")).startswith("gfx"):
            uuid = f"{uuid} at {address}"
        names.append(uuid if has_uuid else address or f"device {index}")
    if len(set(names)) == len(names):
        return tuple(names)
    return tuple(f"{name}, {index}" for index, name in enumerate(names))


def pci_address(gpu: Any) -> str:
    """Return the PCI address of a GPU from torch's properties, such as ``"0000:17:00.0"``."""
    fields = (getattr(gpu, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    domain, bus, device = fields
    return "" if bus is None else f"{domain or 0:04x}:{bus:02x}:{device or 0:02x}.0"


def assign_gpus(visible_gpus: Mapping[int, Sequence[str]]) -> dict[int, str]:
    """Assign each rank of a node one of the GPUs that it sees, and no GPU twice (pure).

    A rank takes the first free GPU, so ranks that see the same GPUs take them in order. If none is
    free, earlier ranks move to other GPUs if they can (augmenting paths of Kuhn's matching), so
    that a rank is left without a GPU only if there are too few.
    """
    owner: dict[str, int] = {}

    def assign_gpu(rank: int, visited_gpus: set[str]) -> bool:
        free = next((gpu for gpu in visible_gpus[rank] if gpu not in owner), None)
        if free is not None:
            owner[free] = rank
            return True
        for gpu in visible_gpus[rank]:
            if gpu not in visited_gpus:
                visited_gpus.add(gpu)
                if assign_gpu(owner[gpu], visited_gpus):
                    owner[gpu] = rank
                    return True
        return False

    for rank in visible_gpus:
        assign_gpu(rank, set())
    return {rank: gpu for gpu, rank in owner.items()}


def pick_device(
    request: Literal["auto", "cpu", "cuda"], world: World, visible_gpus: Mapping[int, VisibleGpus]
) -> "tuple[torch.device, DeviceReport]":
    """Return this rank's device and its report; an error is reported, not raised.

    ``visible_gpus``: what each rank of this node sees.
    """
    import torch

    cpu, identity = torch.device("cpu"), (world.rank, world.node, world.hostname)
    own_gpus = visible_gpus[world.rank]
    if not own_gpus.names:
        error = None
        if request == "cuda" or own_gpus.error:
            settings = ", ".join(
                f"{n} is {os.environ[n]}" for n in VISIBILITY_VARIABLES if n in os.environ
            )
            issue = f"cannot start CUDA ({own_gpus.error})" if own_gpus.error else "finds no GPU"
            error = (
                f"run.device={request}, but torch {torch.__version__} {issue} on {world.hostname} "
                f"({settings or f'{_gpus_env_var()} is unset'}); request GPUs for the job, or set "
                "run.device=cpu"
            )
        elif request == "auto":
            unused = explain_unused_gpus(world.hostname)
            if unused is not None and not unused.is_error:
                return cpu, DeviceReport(*identity, "cpu", unused=unused.text)
            error = None if unused is None else unused.text
        return cpu, DeviceReport(*identity, "cpu", error=error)
    names = {rank: gpus.names for rank, gpus in visible_gpus.items()}
    gpu_by_rank = assign_gpus(names)
    if world.rank not in gpu_by_rank:
        error = _describe_gpu_shortage(world, names, gpu_by_rank)
        return cpu, DeviceReport(*identity, "cuda", visible=own_gpus.names, error=error)
    device = torch.device("cuda", own_gpus.names.index(gpu_by_rank[world.rank]))
    torch.cuda.set_device(device)
    uuid, reachable = gpu_by_rank[world.rank], count_openable_gpus()
    return device, DeviceReport(*identity, "cuda", uuid, own_gpus.names, reachable=reachable)


def explain_unused_gpus(host: str) -> UnusedGpus | None:
    """Return why this process, in which torch finds no GPU, does not use the GPUs of its node."""
    return find_unused_gpus(
        os.environ, host, TorchBuild.from_imported_torch(), explain_cuda_failure
    )


def set_thread_device(device: "torch.device") -> None:
    """Set this rank's GPU in the current thread, which would otherwise use the first GPU.

    For threads that call CUDA: even a call that needs no device, such as pinning memory, creates a
    context on the thread's GPU. That would take some 500 MB of another rank's GPU
    (https://github.com/pytorch/pytorch/issues/58626).
    """
    import torch

    torch.cuda.set_device(device)


def numa_nodes_by_rank(visible_gpus: Mapping[int, VisibleGpus]) -> list[int | None]:
    """Return the NUMA node of each rank's GPU; None without a GPU or if unknown (pure)."""
    gpu_by_rank = assign_gpus({rank: gpus.names for rank, gpus in visible_gpus.items()})
    return [
        gpus.numa_nodes[gpus.names.index(gpu_by_rank[rank])] if rank in gpu_by_rank else None
        for rank, gpus in visible_gpus.items()
    ]


def check_devices(reports: Sequence[DeviceReport], is_launched: bool) -> str | None:
    """Check from all ranks' reports that each GPU of the nodes has exactly one rank (pure).

    Returns a warning, if any: a process without a launcher may leave GPUs idle, a launched world
    may not. All ranks may compute on CPUs of nodes with GPUs that the job was not granted.

    Raises:
        WorldError: on mixed kinds, a rank without a device, a GPU with two ranks, or an idle GPU.
    """
    for report in reports:
        if report.error is not None:
            raise WorldError(report.error)
    cpu_hosts = sorted({r.hostname for r in reports if r.kind == "cpu"})
    if cpu_hosts and len({r.kind for r in reports}) > 1:
        raise WorldError(
            f"some ranks have a GPU, those on {', '.join(cpu_hosts[:8])} have none; check "
            "these nodes (nvidia-smi, or rocm-smi for AMD), or set run.device=cpu"
        )
    if cpu_hosts:
        return next((report.unused for report in reports if report.unused), None)
    owners: dict[str, list[int]] = defaultdict(list)
    node_gpus: dict[int, set[str]] = defaultdict(set)
    hosts: dict[int, str] = {}
    for report in reports:
        owners[report.uuid].append(report.rank)
        node_gpus[report.node] |= set(report.visible)
        hosts[report.node] = report.hostname
    for uuid, ranks in owners.items():
        if len(ranks) > 1:
            first_report = reports[ranks[0]]
            raise WorldError(
                f"ranks {list_some(ranks, 8)} on {first_report.hostname} share one GPU ({uuid}) of "
                f"{len(node_gpus[first_report.node])} visible; start one rank per GPU"
            )
    idle = {node: sorted(uuids - owners.keys()) for node, uuids in node_gpus.items()}
    lines = [
        f"{hosts[node]}: {len(uuids)} of {len(node_gpus[node])} GPUs idle ({list_some(uuids, 8)})"
        for node, uuids in sorted(idle.items())
        if uuids
    ]
    if not lines:
        return None
    text = "; ".join(lines[:8])
    num_gpus = max(map(len, node_gpus.values()))
    if not is_launched:
        return f"{text}; one process uses one GPU, mpirun -np {num_gpus} would use all"
    raise WorldError(f"{text}; {_idle_gpu_remedy(reports, num_gpus)}")


def _idle_gpu_remedy(reports: Sequence[DeviceReport], num_gpus: int) -> str:
    max_gpus = max(len(report.visible) for report in reports)
    is_disjoint = len({(r.node, gpu) for r in reports for gpu in r.visible}) == sum(
        len(report.visible) for report in reports
    )
    if is_disjoint and num_gpus > max_gpus:
        return (
            f"a rank was given up to {max_gpus} GPUs and uses one: start {num_gpus} ranks per node "
            f"(--ntasks-per-node={num_gpus}) that each see all GPUs (--gpus-per-node={num_gpus}, "
            "without --gpus-per-task)"
        )
    return (
        f"start one rank per GPU (--ntasks-per-node={num_gpus}), or hide the GPUs that are not for "
        f"this run with {_gpus_env_var()}"
    )


def _describe_gpu_shortage(
    world: World, visible_gpus: Mapping[int, Sequence[str]], gpu_by_rank: Mapping[int, str]
) -> str:
    """Describe the ranks that see too few GPUs: this rank, and ranks that could make room."""
    gpus = set(visible_gpus[world.rank])
    while (
        new_gpus := {g for r, gpu in gpu_by_rank.items() if gpu in gpus for g in visible_gpus[r]}
        - gpus
    ):
        gpus |= new_gpus
    ranks = [rank for rank, names in visible_gpus.items() if names and gpus.issuperset(names)]
    num_gpus = len({gpu for names in visible_gpus.values() for gpu in names})
    gpus_text = "one GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
    gpus_text += f" ({list_some(sorted(gpus), 8)})"
    text = f"ranks {list_some(ranks, 8)} on {world.hostname} share {gpus_text}"
    num_ranks = len(visible_gpus)
    if num_gpus >= num_ranks:
        return (
            f"{text}, while its {num_ranks} ranks see {num_gpus} in all; show each rank all GPUs "
            "of the job (without --gpu-bind and --gpus-per-task)"
        )
    return (
        f"{text}; {num_ranks} ranks run there and see {num_gpus} in all: start {num_gpus} per "
        f"node (--ntasks-per-node={num_gpus}), request {num_ranks} GPUs per node "
        f"(--gpus-per-node={num_ranks}), or set run.device=cpu"
    )


def _gpus_env_var() -> str:
    import torch

    return "ROCR_VISIBLE_DEVICES" if torch.version.hip else "CUDA_VISIBLE_DEVICES"


def cpu_has_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell whether this CPU has bf16 instructions (AVX512-BF16 or AMX); True if it is not x86.

    Without them a training step in torch takes 33 times as long in bf16 as in fp32 (SmolLM2 on a
    CPU with AVX2).
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return True
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), None)
    return flags is None or bool(flags & {"avx512_bf16", "amx_bf16"})


# -- Configure torch's CUDA allocator: by environment variables, before torch is imported.
#
# It reads them at its first use; some versions, and torch for AMD, read part of them at import.


# In the order in which torch looks for them: only the first that is set counts.
ALLOC_CONF_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE_SEGMENTS = "expandable_segments:True"
_MEMORY_MAPPING_ATTRIBUTE = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED of cuda.h


def gpus_can_map_memory() -> bool:
    """Return whether there are NVIDIA GPUs and each supports mapping of virtual memory."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    num, attribute = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(num)):
        return False
    for index in range(num.value):
        device = ctypes.c_int()
        if cuda.cuDeviceGet(ctypes.byref(device), index):
            return False
        if (
            cuda.cuDeviceGetAttribute(ctypes.byref(attribute), _MEMORY_MAPPING_ATTRIBUTE, device)
            or not attribute.value
        ):
            return False
    return num.value > 0


def enable_expandable_segments(
    environ: MutableMapping[str, str],
    request: Literal["auto", "cpu", "cuda"],
    can_map: Callable[[], bool] = gpus_can_map_memory,
) -> None:
    """Let the allocator grow its segments, unless ``environ`` already configures it.

    Blocks of varying sizes then leave no gaps too small to be reused. Segments grow by mapping
    memory, which some virtual GPUs cannot do: there the first allocation would fail.
    """
    if request == "cpu" or any(name in environ for name in ALLOC_CONF_VARIABLES):
        return
    if can_map():
        environ["PYTORCH_ALLOC_CONF"] = _EXPANDABLE_SEGMENTS


def read_allocator_settings() -> Mapping[str, Any]:
    """Return the settings that this rank's GPU allocator has read; empty if torch does not tell."""
    import torch

    try:
        settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
    except (AttributeError, RuntimeError):
        return {}
    return settings if isinstance(settings, Mapping) else {}


def unread_alloc_conf_warning(
    environ: Mapping[str, str], settings: Mapping[str, Any]
) -> str | None:
    """Return a warning if segments should grow but torch's ``settings`` say otherwise (pure)."""
    alloc_conf = next((environ[name] for name in ALLOC_CONF_VARIABLES if name in environ), "")
    value = settings.get("expandable_segments")
    if (
        _EXPANDABLE_SEGMENTS not in alloc_conf
        or value is None
        or str(value).lower() in ("true", "1")
    ):
        return None
    return (
        f"torch has not read {_EXPANDABLE_SEGMENTS} from the environment, so GPU memory fragments: "
        "torch was imported before the ranks set it. Export "
        f"PYTORCH_ALLOC_CONF={_EXPANDABLE_SEGMENTS} in the job"
    )


# -- What a GPU can compute, by its architecture: every question of capability is asked here.
#
# For AMD GPUs torch reports their architecture number as the compute capability: MI250X (gfx90a)
# has 9.0, like Hopper, but none of Hopper's new features. So NVIDIA GPUs are identified by
# capability, AMD GPUs by name.
#
#                    NVIDIA since     AMD
#     bf16           8.0              gfx908, gfx90a, gfx942, gfx950 and the later desktop ones
#     fp16           7.0              all with bf16, and gfx900, gfx906 and gfx10
#     TF32           8.0              none
#     attention      8.0              gfx90a, gfx942, gfx950, gfx1100, gfx1201 (tried before use)
#     float8         8.9              gfx942, gfx950, gfx1200, gfx1201 (torch._scaled_mm)
#     grouped mm     9.0, in bf16     gfx90a, gfx942, gfx950 if ROCM_ALLOW_GROUP_GEMM_CK=1, in bf16
#     the same bits  all              none: rocBLAS may sum in any order
#
# Sources: torch/testing/_internal/common_cuda.py of torch 2.13 for attention and float8,
# https://github.com/pytorch/pytorch/pull/171140 for grouped matmul on AMD.


_GFX_WITH_BF16 = ("gfx908", "gfx90a", "gfx942", "gfx950", "gfx11", "gfx12")
_GFX_WITH_FP16 = (*_GFX_WITH_BF16, "gfx900", "gfx906", "gfx10")
_GFX_WITH_VARLEN_ATTENTION = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
_GFX_WITH_FLOAT8 = ("gfx942", "gfx950", "gfx1200", "gfx1201")
_GFX_WITH_GROUPED_MM = ("gfx90a", "gfx942", "gfx950")
# FlashAttention 3 and 4, which torch calls instead of its own kernel: module and package.
FLASH_ATTENTION_PACKAGES = {
    "FA3": ("flash_attn_interface", "flash-attn-3"),
    "FA4": ("flash_attn.cute.interface", "flash-attn-4"),
}
_GROUPED_MM_VARIABLE = "ROCM_ALLOW_GROUP_GEMM_CK"


@dataclass(frozen=True)
class GpuArchitecture:
    """The architecture of a GPU: NVIDIA's by ``capability``, AMD's by the name ``gfx``."""

    capability: tuple[int, int] | None = None
    gfx: str = ""

    def __str__(self) -> str:
        """Return it in words."""
        if self.capability is None:
            return f"architecture {self.gfx}"
        return f"compute capability {self.capability[0]}.{self.capability[1]}"

    @property
    def has_bf16(self) -> bool:
        """Whether it computes in bf16 natively, not by way of fp32."""
        return self._is_supported((8, 0), _GFX_WITH_BF16)

    @property
    def has_fp16(self) -> bool:
        """Whether it computes in fp16 faster than in fp32."""
        return self._is_supported((7, 0), _GFX_WITH_FP16)

    @property
    def has_deterministic_matmul(self) -> bool:
        """Whether a matrix multiplication gives the same bits each time.

        cuBLAS guarantees that for one stream
        (https://docs.nvidia.com/cuda/cublas/#results-reproducibility).
        """
        return self.capability is not None

    @property
    def has_tf32(self) -> bool:
        """Whether it multiplies fp32 matrices in TF32 if torch is set to."""
        return self._is_supported((8, 0), ())

    @property
    def has_varlen_attention(self) -> bool:
        """Whether torch's variable-length attention kernel supports it."""
        return self._is_supported((8, 0), _GFX_WITH_VARLEN_ATTENTION)

    @property
    def flash_attention_versions(self) -> tuple[str, ...]:
        """Which of ``FLASH_ATTENTION_PACKAGES`` support it, the best first; none on AMD GPUs."""
        if self.capability is None:
            return ()
        return {9: ("FA3", "FA4"), 10: ("FA4",)}.get(self.capability[0], ())

    @property
    def has_float8(self) -> bool:
        """Whether it multiplies matrices in float8."""
        return self._is_supported((8, 9), _GFX_WITH_FLOAT8)

    def has_grouped_mm(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether torch has one kernel for the bf16 matmuls of many experts."""
        is_allowed = self.capability is not None or environ.get(_GROUPED_MM_VARIABLE) == "1"
        return is_allowed and self._is_supported((9, 0), _GFX_WITH_GROUPED_MM)

    def _is_supported(self, min_capability: tuple[int, int], names: tuple[str, ...]) -> bool:
        if self.capability is not None:
            return self.capability >= min_capability
        return self.gfx.startswith(names)


def find_architecture(device: "torch.device") -> GpuArchitecture | None:
    """Return the architecture of a GPU; None for a CPU."""
    import torch

    if device.type != "cuda":
        return None
    if torch.version.hip is None:
        return GpuArchitecture(torch.cuda.get_device_capability(device))
    # Such as gfx90a:sramecc+:xnack-.
    name: str = torch.cuda.get_device_properties(device).gcnArchName
    return GpuArchitecture(gfx=name.partition(":")[0])
