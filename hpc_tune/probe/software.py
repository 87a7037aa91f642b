"""Find which software a rank runs on: packages, libraries, and DeepSpeed's compiled ops."""

import ast
import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpc_tune import __version__
from hpc_tune.cluster.protocol import read_output
from hpc_tune.probe.topology import amd_driver_version, amd_gpus
from hpc_tune.world.affinity import SYS

_COMMAND_LIMIT_S = 10.0
REPORTED_PACKAGES = ("hpc_tune", "torch", "mpi4py", "deepspeed", "transformers", "peft", "h5py")


@dataclass(frozen=True)
class CompiledOps:
    """DeepSpeed's C++ ops: those compiled at installation, and missing tools to compile others."""

    ops: tuple[str, ...]
    missing_tools: tuple[str, ...]


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that are installed."""
    versions = {"python": platform.python_version()}
    for package in REPORTED_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def bug_report_lines() -> list[str]:
    """Return a line for each fact that a bug report needs; imports no large library.

    The first line is ``hpc_tune VERSION``.
    """
    facts = {"hpc_tune": __version__} | package_versions()
    clone = Path(__file__).parents[2]
    if (clone / ".git").exists() and (commit := git_commit(clone)):
        facts["commit"] = commit
    facts["platform"] = platform.platform()
    for name, program in (("mpirun", "mpirun"), ("slurm", "srun")):
        if output := read_output(program, "--version", limit_s=_COMMAND_LIMIT_S).strip():
            facts[name] = output.splitlines()[0]
    with contextlib.suppress(OSError, IndexError):
        driver = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
        facts["nvidia"] = " ".join(driver.split())
    if driver := amd_driver_version(SYS):
        facts["amdgpu"] = driver
    amds = [gpu.gfx for gpu in amd_gpus(SYS)]
    if gpus := Counter([*_gpu_names(Path("/proc/driver/nvidia/gpus")), *amds]):
        facts["gpus"] = ", ".join(f"{num} {name}" for name, num in gpus.items())
    return [f"{name} {text}" for name, text in facts.items()]


def _gpu_names(folder: Path) -> Iterator[str]:
    """Yield the model of each NVIDIA GPU, from the driver's files in ``folder``."""
    for file in sorted(folder.glob("*/information")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == "Model":
                yield value.strip()


def git_commit(folder: Path | None = None) -> str | None:
    """Return the git commit of a folder (default: working directory); None outside of a clone."""
    command = ("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    output = read_output("git", "-C", str(folder or "."), *command, limit_s=_COMMAND_LIMIT_S)
    return output.strip() or None


def mpi_library() -> str:
    """Return the name of the MPI library that is loaded, if any is."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None:
        return ""
    text: str = mpi.Get_library_version()
    first = text.replace("\0", "").strip().splitlines()[0].partition(",")[0]
    return " ".join(first.split())


def find_compiled_deepspeed_ops(uses_gpu: bool) -> CompiledOps | None:
    """Return DeepSpeed's compiled ops, without importing it; None if it is not installed."""
    try:
        spec = importlib.util.find_spec("deepspeed")
    except ValueError:
        return None
    if spec is None or spec.origin is None:
        return None
    ops: dict[str, bool] = {}
    with contextlib.suppress(OSError, ValueError, SyntaxError):
        for line in (Path(spec.origin).parent / "git_version_info_installed.py").open():
            name, _, value = line.partition("=")
            if name == "installed_ops":
                ops = ast.literal_eval(value)
    tools = ["ninja", os.environ.get("CXX", "c++"), *(["nvcc"] if uses_gpu else [])]
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), f"{toolkit}/bin"])
    missing = tuple(tool for tool in tools if shutil.which(tool, path=path) is None)
    return CompiledOps(tuple(sorted(name for name, is_built in ops.items() if is_built)), missing)
