"""Explain why a rank has no GPU although the job was granted some, or the node has some.

variables of the scheduler, what the kernel shows, how torch was built -> a sentence, or nothing
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_tune.cluster.protocol import Environ
from hpc_tune.cluster.schedulers import find_job
from hpc_tune.errors import first_line
from hpc_tune.files import raise_if_too_many_open_files

GpuVendor = Literal["NVIDIA", "AMD", "Intel"]

# Which GPUs a process sees: for CUDA, HIP (two), ROCm's runtime below HIP, and Level Zero.
VISIBILITY_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
    *("ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"),
)
_GPU_COUNT_VARIABLE = "SLURM_GPUS_ON_NODE"  # a number of GPUs
_GPU_LIST_VARIABLE = "PBS_GPUFILE"  # a file with their names
_GRANT_VARIABLES = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", _GPU_COUNT_VARIABLE, _GPU_LIST_VARIABLE)
# What Slurm, or a user, sets for no GPU at all.
_NO_GPU_VALUES = ("", "-1", "nodevfiles", "none", "void")
# The oldest driver that runs programs of each major version of CUDA (CUDA Compatibility, table 1).
_OLDEST_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
_REMEDY = "use the torch of your centre (its module or container)"


@dataclass(frozen=True)
class TorchBuild:
    """What torch is built for: the versions of CUDA and ROCm, empty if not built for it."""

    version: str
    cuda: str = ""
    rocm: str = ""

    @classmethod
    def from_imported_torch(cls) -> "TorchBuild":
        """Return the build of the imported torch."""
        import torch

        return cls(torch.__version__, torch.version.cuda or "", torch.version.hip or "")

    @property
    def description(self) -> str:
        """The version, and what it was built for, in words."""
        kinds = (("CUDA", self.cuda), ("ROCm", self.rocm))
        target = next((f"for {name} {version}" for name, version in kinds if version), "")
        return f"torch {self.version} is built {target or 'for no GPUs'}"


@dataclass(frozen=True)
class UnusedGpus:
    """Why no GPU of a node is used: an error if the job was granted some, else a warning."""

    text: str
    is_error: bool


def find_unused_gpus(
    environ: Environ,
    host: str,
    build: TorchBuild,
    get_torch_reason: Callable[[], str] = lambda: "",
    root: Path = Path("/"),
) -> UnusedGpus | None:
    """Return why no GPU is used, where torch finds none; None if there is none to be used.

    GPUs that a variable hides count only if the job was granted some. ``get_torch_reason`` returns
    torch's own reason, if any. ``root``: where the kernel's /dev, /proc and /sys are. Intel's GPUs
    lead to an error in any job: their sites grant whole nodes.
    """
    grants = find_granted_gpus(environ)
    gpus = count_present_gpus(root)
    hiding_variables = _hiding_variables(environ)
    in_job = find_job(environ) is not None
    if not grants and (not gpus or hiding_variables):
        return None
    counts = " and ".join(f"{num} {maker} GPU{'s' * (num > 1)}" for maker, num in gpus.items())
    cause = _explain_unused_gpus(hiding_variables, build, get_torch_reason, gpus, root)
    if grants or (in_job and "Intel" in gpus):
        sign = f"{grants} says that there are some" if grants else f"it has {counts}"
        return UnusedGpus(
            f"run.device=auto, and torch finds no GPU on {host}, though {sign}: {cause}. To train "
            "on CPUs all the same, set run.device=cpu",
            is_error=True,
        )
    if in_job:
        cause = "the job asked for none (--gpus-per-node=N)"
    text = f"this run computes on CPUs, though {host} has {counts}: {cause}. Set run.device=cpu"
    return UnusedGpus(f"{text} if that is intended", is_error=False)


def explain_cuda_failure() -> str:
    """Return why torch cannot start CUDA or ROCm; nothing if it can."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return first_line(error)
    return ""


def find_granted_gpus(environ: Environ) -> str:
    """Return the variables by which a job was granted GPUs, with their values."""
    variables = {
        n: environ[n]
        for n in (*_GRANT_VARIABLES, *VISIBILITY_VARIABLES)
        if not _means_no_gpu(environ.get(n, ""))
    }
    if variables.get(_GPU_COUNT_VARIABLE) == "0":
        del variables[_GPU_COUNT_VARIABLE]
    file = variables.get(_GPU_LIST_VARIABLE)
    if file is not None and not _read_text(Path(file)):  # Torque names one in every job
        del variables[_GPU_LIST_VARIABLE]
    return ", ".join(f"{name}={value}" for name, value in variables.items())


def count_present_gpus(root: Path = Path("/")) -> dict[GpuVendor, int]:
    """Return how many GPUs of each maker the kernel's drivers show; of Intel's only server GPUs."""
    amd = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    intel = (root / "sys/class/drm").glob("card[0-9]*/device")
    counts: dict[GpuVendor, int] = {
        "NVIDIA": len([*(root / "proc/driver/nvidia/gpus").glob("*/information")]),
        "AMD": sum(_read_text(file) not in ("", "0") for file in amd),
        # PCI class 0380: a display controller without a display, unlike a laptop's.
        "Intel": sum(
            _read_text(device / "vendor") == "0x8086"
            and _read_text(device / "class").startswith("0x0380")
            for device in intel
            if re.fullmatch(r"card\d+", device.parent.name)
        ),
    }
    return {maker: num for maker, num in counts.items() if num}


def _hiding_variables(environ: Environ) -> list[str]:
    return [
        f"{name}={environ[name]}"
        for name in VISIBILITY_VARIABLES
        if _means_no_gpu(environ.get(name, "x"))
    ]


def _explain_unused_gpus(
    hiding_variables: Sequence[str],
    build: TorchBuild,
    get_torch_reason: Callable[[], str],
    gpus: Mapping[GpuVendor, int],
    root: Path,
) -> str:
    if list(gpus) == ["Intel"]:
        return "hpc_tune does not support Intel's GPUs (torch.xpu)"
    if not build.cuda and not build.rocm:
        return f"{build.description}; {_REMEDY}, or install one that is"
    maker: GpuVendor = "AMD" if build.rocm else "NVIDIA"
    if gpus and maker not in gpus:
        makers = " and ".join(gpus)
        return (
            f"{build.description}, and the GPUs here are {makers}'s; {_REMEDY}, or install another"
        )
    if maker == "NVIDIA":  # on which the variables of other makers have no effect
        hiding_variables = [v for v in hiding_variables if v.startswith("CUDA_")]
    if hiding_variables:
        return (
            f"{' and '.join(hiding_variables)} hides them from this process; start the step with "
            "its GPUs (srun --gpus-per-node=N), or unset it"
        )
    if not gpus:
        path = "/sys/class/kfd" if maker == "AMD" else "/proc/driver/nvidia"
        return (
            f"{build.description}, and no driver of {maker} shows one here ({path}); compare the "
            "job's request with the node, and the options of its container"
        )
    explain = _explain_unused_amd_gpus if maker == "AMD" else _explain_unused_nvidia_gpus
    return explain(build, get_torch_reason(), root)


def _explain_unused_amd_gpus(build: TorchBuild, torch_reason: str, root: Path) -> str:
    kfd = root / "dev/kfd"
    if not kfd.exists():
        return "there is no /dev/kfd; start the container with --rocm, or the step with its GPUs"
    if not os.access(kfd, os.R_OK | os.W_OK):
        return (
            "this user may not open /dev/kfd; ask your centre for the group that may "
            "(video or render)"
        )
    driver = _read_text(root / "sys/module/amdgpu/version") or "of unknown version"
    return f"{build.description}, the driver amdgpu is {driver}{_torch_error_clause(torch_reason)}"


def _explain_unused_nvidia_gpus(build: TorchBuild, torch_reason: str, root: Path) -> str:
    text = _read_text(root / "proc/driver/nvidia/version")
    driver = re.search(r"\b(\d{3,})\.(\d+)[.\d]*", text)
    least = _OLDEST_DRIVERS.get(int(build.cuda.partition(".")[0]))
    if driver and least and (int(driver[1]), int(driver[2])) < least:
        return (
            f"{build.description}, which needs driver {least[0]}.{least[1]} or newer, and the node "
            f"has {driver[0]}; {_REMEDY}, or install one for an older CUDA"
        )
    if not [*(root / "dev").glob("nvidia[0-9]*")]:
        return "there is no /dev/nvidia0; start the container with --nv, or the step with its GPUs"
    return (
        f"{build.description}, the driver is "
        f"{driver[0] if driver else 'of unknown version'}{_torch_error_clause(torch_reason)}"
    )


def _torch_error_clause(reason: str) -> str:
    return f", and it does not start ({reason})" if reason else ", and torch sees none of them"


def _means_no_gpu(value: str) -> bool:
    return value.strip().lower() in _NO_GPU_VALUES


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise_if_too_many_open_files(error)
        return ""
