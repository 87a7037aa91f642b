"""Explain packages that cannot be used: missing, or shadowed by a wrong version in PYTHONPATH.

Also speeds up imports by hiding optional packages that are not used.

Imports only the standard library, since any other package may be the broken one.
"""

import gc
import importlib.metadata
import importlib.util
import os
import re
import resource
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

_THIS_PACKAGE = "hpc_tune"
_CORE_PACKAGES = ("omegaconf", "pydantic", "torch")  # without one, it is the wrong environment
_MODULE_PACKAGES = {"yaml": "pyyaml", "pynvml": "nvidia-ml-py"}  # packages with other module names
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(;.*)?")


def explain_import_failure(error: BaseException) -> str | None:
    """Explain which package an import error is about and what to do; None for other errors."""
    if not isinstance(error, ImportError) and not _was_raised_in_import(error):
        return None
    package, file = _find_package(error)
    if package == _THIS_PACKAGE:
        return None
    if file is None and isinstance(error, ModuleNotFoundError):
        return _missing_module_advice(package)
    folder = Path(file).parent.parent if file else None
    version = next(
        (v for n, v in _list_installed_packages(folder) if n == _normalize_name(package)), None
    )
    version = version or getattr(sys.modules.get(package), "__version__", None)
    subject = f"{package} {version}" if version else package
    lines = str(error).strip().splitlines() or [type(error).__name__]
    text = f"{subject} in {folder or 'an unknown folder'} cannot be used: {lines[0]}"
    specifier = required_versions().get(_normalize_name(package))
    if remedy := _mmap_failure_remedy(lines[0]):
        return f"{text}. {remedy}"
    text += f"; expected {package}{specifier}" if specifier else ""
    return f"{text}. {_wrong_version_remedy(folder)}"


def shadowing_package_warnings(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a warning for each package in PYTHONPATH that shadows the installed one with a version
    that hpc_tune does not support.
    """
    specifiers, warnings = required_versions(), []
    for folder in _pythonpath_folders(environ):
        for name, version in _list_installed_packages(folder):
            if name in specifiers and not _is_in_range(version, specifiers[name]):
                warnings.append(
                    f"PYTHONPATH has {name} {version} in {folder}, in front of the installed one; "
                    f"expected {name}{specifiers[name]}. {_wrong_version_remedy(folder, environ)}"
                )
    return warnings


def hidden_torch_warning() -> str | None:
    """Return a warning if another torch is installed behind the one that is imported.

    The hidden one may be the center's build for its GPUs.
    """
    versions = {str(dist.locate_file("")): dist.version for dist in _find_distributions("torch")}
    (folder, version), *hidden_torches = [*versions.items()] or [("", "")]
    if not hidden_torches:
        return None
    listing = " and ".join(f"{number} in {path}" for path, number in hidden_torches)
    return (
        f"torch {version} in {folder} hides torch {listing}: if that is your center's, built for "
        "its GPUs, make an environment that keeps it (python3 tools/install.py), or uninstall the "
        "first"
    )


def _find_distributions(name: str) -> list[importlib.metadata.Distribution]:
    return [*importlib.metadata.distributions(name=name)]


def required_versions() -> dict[str, str]:
    """Return the versions that hpc_tune supports, such as ``>=2.9,<3``, by package."""
    try:
        lines = importlib.metadata.requires(_THIS_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:  # a clone that is not installed
        return {}
    matches = [_REQUIREMENT.fullmatch(line) for line in lines]
    return {
        _normalize_name(m[1]): m[2].strip() for m in matches if m and "extra" not in (m[3] or "")
    }


def is_installed(module: str) -> bool:
    """Whether a module can be found; its parent packages are imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _missing_module_advice(module: str) -> str:
    """Return what to do about a missing module; it may be the wrong environment altogether."""
    package = _MODULE_PACKAGES.get(module, _normalize_name(module))
    if any(importlib.util.find_spec(name) is None for name in _CORE_PACKAGES):
        return (
            f"the Python at {sys.executable} has no module {module}; expected one in which "
            "hpc_tune is installed: activate that environment (source .venv/bin/activate), or "
            "install into this one as docs/laptop.md says"
        )
    return (
        f"{package} is needed for this and is not installed: {sys.executable} -m pip install "
        f"'{package}{required_versions().get(package, '')}'"
    )


def _was_raised_in_import(error: BaseException) -> bool:
    """Return whether a module's top-level code was running; Python hides its import frames."""
    return any(
        frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__"
        for frame in _traceback_frames(error)
    )


def _find_package(error: BaseException) -> tuple[str, str | None]:
    """Return the package that an error names, else the one that raised it, and its file."""
    name, last_globals = None, _traceback_frames(error)[-1].f_globals
    if isinstance(error, ImportError):
        name = error.name
    elif isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        name = error.obj.__name__
    package = (name or str(last_globals.get("__name__"))).partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None) or getattr(error, "path", None)
    return package, file or (last_globals.get("__file__") if name is None else None)


def _traceback_frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


def _list_installed_packages(folder: Path | None) -> Iterator[tuple[str, str]]:
    """Yield the name and version of each package that pip has installed into a folder."""
    for path in folder.glob("*-info") if folder is not None else ():
        name, _, version = path.stem.partition("-")
        yield _normalize_name(name), version.partition("-")[0]


def _pythonpath_folders(environ: Mapping[str, str]) -> list[Path]:
    return [Path(folder) for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _wrong_version_remedy(folder: Path | None, environ: Mapping[str, str] = os.environ) -> str:
    shadowing_folders = [path.resolve() for path in _pythonpath_folders(environ)]
    if folder is not None and folder.resolve() in shadowing_folders:
        return f"Unset PYTHONPATH, or take {folder} out of it"
    return "Install the versions that docs/laptop.md names into this environment"


def _mmap_failure_remedy(problem: str) -> str | None:
    """Return what to do if the kernel refuses to map a library; its version is not the cause."""
    if "failed to map segment" not in problem and "Cannot allocate memory" not in problem:
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return "Memory is full, or the file system is mounted noexec: install on another one"
    return (
        f"ulimit -v, or the batch system, limits this process to {limit >> 20} MiB of address "
        "space, and libraries reserve more than they use: remove the limit, or raise it"
    )


def parse_release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; a vendor's pre-release counts as the release."""
    return _parse_numbers(version)[:2]


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_in_range(version: str, specifier: str) -> bool:
    """Return whether a version is within bounds such as ``>=2.9,<3``."""
    release = _parse_numbers(version)
    for bound in filter(None, map(str.strip, specifier.split(","))):
        sign, limit = re.match(r"[<>=!~]*", bound)[0], _parse_numbers(bound)  # type: ignore[index]
        if (sign == ">=" and release < limit) or (sign == "<" and release >= limit):
            return False
    return True


def _parse_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])


# -- Faster imports: unused optional packages are hidden, garbage collection is off.
#
# A rank imports 2,800 modules. When many ranks share few cores, this is most of the startup time.


# These take about a second per rank (benchmarks/NOTES.md) for layers that hpc_tune does not use: it
# has its own in model/quantized_base.py and model/float8.py.
_HIDDEN_PACKAGES = ("torchao", "bitsandbytes")


def is_importable(package: str) -> bool:
    """Return whether a package can be imported; a mere folder of its name does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


@contextmanager
def fast_imports() -> Iterator[None]:
    """Hide torchao and bitsandbytes from transformers and peft, which look for them.

    Garbage collection is off meanwhile, and imported objects are never scanned later: modules stay,
    and scanning their objects again and again takes a fifth of the import time. If nothing is
    imported, nothing is frozen: at each save, that would keep the garbage of the steps before it.
    """
    modules: dict[str, Any] = sys.modules
    num_modules = len(modules)
    hidden_names = [name for name in _HIDDEN_PACKAGES if name not in modules]
    modules.update(dict.fromkeys(hidden_names))
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        for name in hidden_names:
            del modules[name]
        if len(modules) > num_modules:
            gc.freeze()
        if was_on:
            gc.enable()


def collect_frozen_garbage() -> None:
    """Collect garbage, also what ``fast_imports`` has frozen, such as the models of a trial.

    It takes about half a second, since all imported objects are scanned.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
