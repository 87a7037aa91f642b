"""Install hpc_tune beside the torch that a center provides, and leave that torch as it is.

    module load python pytorch        # or enter the container: whatever brings the center's torch
    python3 tools/install.py          # makes .venv over this Python
    source .venv/bin/activate

The environment sees all packages of this Python. Only what is missing or too old is installed into
it, but no torch and no CUDA or ROCm library. `pip install .` alone would put PyPI's torch in front
of the center's if a package needs another version, and on many machines that one sees no GPU.
Needs only Python's own modules and pip.
"""

from __future__ import annotations  # so that an older Python can be told that it is too old

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What a site compiles against its own torch, MPI or CPUs; below, what belongs to a torch.
_SITE_PACKAGES = ("torch", "triton", "pytorch-triton-rocm", "numpy", "mpi4py", "h5py")
_TORCH_PACKAGES = re.compile(r"(torch|triton|pytorch-triton.*|nvidia-(?!ml-py).*|cuda-.*)")
_PIP = ("-m", "pip", "--disable-pip-version-check")
_LIMIT_S = 3600.0

_TORCH = """
import json, torch
gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
build = "ROCm " + torch.version.hip if torch.version.hip else (
    "CUDA " + torch.version.cuda if torch.version.cuda else "CPUs")
print(json.dumps([torch.__version__, torch.__file__, build, gpus]))
"""
_LIST_INSTALLED_CODE = """
import importlib.metadata as m, json, re
found = {}
for d in m.distributions():
    if d.metadata["Name"]:
        name = re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower()
        found.setdefault(name, [d.version, str(d.locate_file(""))])
print(json.dumps(found))
"""
_PURELIB = "import json, sysconfig; print(json.dumps(sysconfig.get_path('purelib')))"
_FOLDERS = "import json, sys; print(json.dumps([f for f in sys.path if f.endswith('-packages')]))"


class InstallError(Exception):
    """The installation cannot continue; the message says why, and what to do."""


@dataclass(frozen=True)
class Torch:
    """The torch that a Python imports: its version, file, build, and the number of GPUs it sees."""

    version: str
    file: str
    build: str
    gpus: int

    def __str__(self) -> str:
        return f"torch {self.version} for {self.build} in {Path(self.file).parents[1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Install; return the exit code."""
    args = _parser().parse_args(arguments)
    try:
        _install(args)
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="made if it is not there")
    parser.add_argument("--zero", action="store_true", help="with DeepSpeed, for ZeRO and NVMe")
    parser.add_argument(
        "--mpi",
        action="store_true",
        help="with mpi4py, compiled against the MPI that is loaded; only mpirun needs it",
    )
    parser.add_argument("--extra", action="append", default=[], help="such as qlora or float8")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels: no network is used")
    parser.add_argument("--dry-run", action="store_true", help="say what would be installed")
    return parser


def _install(args: argparse.Namespace) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036
        raise InstallError(f"this is Python {sys.version.split()[0]}; load one from 3.11 on")
    torch = _torch_of(sys.executable)
    if torch is None:
        raise InstallError(
            f"{sys.executable} has no torch to keep: load the centre's module or enter its "
            "container first. If there is none, `pip install .` installs PyPI's"
        )
    print(f"found {torch}")
    if not torch.gpus:
        print("it sees no GPU here, which is usual on a login node")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        venv = folder / "venv" if args.dry_run else args.venv
        _install_into(venv, torch, args, folder)


def _install_into(venv: Path, torch: Torch, args: argparse.Namespace, scratch: Path) -> None:
    python = _environment(venv, torch)
    site = _ask_python(python, _LIST_INSTALLED_CODE)
    requirements = _list_requirements(args)
    wheels = ["--no-index", "--find-links", str(args.wheels)] if args.wheels else []
    constraints = scratch / "site.txt"
    held = _hold_versions(site, requirements, torch)
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in held.items()))
    missing = dict(_find_missing(python, requirements, constraints, wheels))
    for name, version in missing.items():
        old = f" (the site has {site[name][0]})" if name in site else ""
        print(f"  {'would install' if args.dry_run else 'installs'} {name} {version}{old}")
    if not args.dry_run:
        options = ["--quiet", "--no-deps", *wheels]
        if missing:
            _pip(python, "install", *options, *(f"{name}=={v}" for name, v in missing.items()))
        if args.mpi and "mpi4py" not in site:
            source = [] if args.wheels else ["--no-binary=mpi4py"]
            _pip(python, "install", *options, *source, "mpi4py")
        isolation = ["--no-build-isolation"] if args.wheels else []
        _pip(python, "install", *options, *isolation, str(ROOT))
        _check(python, torch, venv)
    kept = [
        name for name in sorted(map(_name, requirements)) if name in site and name not in missing
    ]
    of_site = [f"torch {torch.version}", *(f"{name} {site[name][0]}" for name in kept)]
    print(f"kept from the site: {', '.join(of_site)}")


def _environment(venv: Path, torch: Torch) -> str:
    """Make an environment that imports what this Python does; return its Python."""
    python = str(venv / "bin" / "python")
    if not Path(python).exists():
        _run([sys.executable, "-m", "venv", "--system-site-packages", str(venv)], os.environ)
    own = Path(_ask_python(python, _PURELIB))
    # Folders of this Python's own environment and of PYTHONPATH come after those of the new one.
    # Activation unsets PYTHONPATH, whose folders would otherwise come first.
    theirs = [f for f in _ask_python(sys.executable, _FOLDERS, dict(os.environ)) if Path(f) != own]
    theirs += [f for f in os.environ.get("PYTHONPATH", "").split(os.pathsep) if f]
    have = _ask_python(python, _FOLDERS)
    if more := [f for f in dict.fromkeys(theirs) if f not in have]:
        (own / "of_the_site.pth").write_text("".join(f"{folder}\n" for folder in more))
    activate = venv / "bin" / "activate"
    line = "unset PYTHONPATH  # its folders are in of_the_site.pth, behind what is installed here\n"
    if "PYTHONPATH" in os.environ and line not in activate.read_text():
        activate.write_text(activate.read_text() + line)
    if (now := _torch_of(python)) is None or now.file != torch.file:
        raise InstallError(
            f"{venv} has {now or 'no torch'}, not the site's: remove it (rm -r {venv}), and run "
            "this again"
        )
    return python


def _list_requirements(args: argparse.Namespace) -> list[str]:
    """Return the requirements of setup.py without torch, and with DeepSpeed only if asked for."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    call = next(
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and "setup" in ast.dump(n.func)
    )
    given = {k.arg: k.value for k in call.keywords}
    extras: dict[str, list[str]] = ast.literal_eval(given["extras_require"])
    left_out = {"torch", "mpi4py", *([] if args.zero else ["deepspeed"])}
    requirements = [
        r for r in ast.literal_eval(given["install_requires"]) if _name(r) not in left_out
    ]
    for extra in args.extra:
        if extra not in extras:
            raise InstallError(f"--extra {extra}: expected one of {', '.join(sorted(extras))}")
        requirements += extras[extra]
    return [*requirements, *(["setuptools>=70.1"] if args.wheels else [])]


def _hold_versions(
    site: dict[str, Any], requirements: Sequence[str], torch: Torch
) -> dict[str, str]:
    """Return the site's versions to keep: those that are new enough, and always torch."""
    held = {name: site[name][0] for name in _SITE_PACKAGES if name in site}
    for requirement in requirements:
        name, _, least = requirement.partition(">=")
        if name in held and _numbers(held[name]) < _numbers(least.partition(",")[0]):
            del held[name]
    return {"torch": torch.version} | held  # metadata may lack torch's suffix, such as +cu128


def _find_missing(
    python: str, requirements: Sequence[str], constraints: Path, wheels: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield (name, version) of what pip would install for ``requirements``, except torch's."""
    report = constraints.with_name("report.json")
    options = ["--dry-run", "--quiet", "--report", str(report), *wheels]
    if "torch" not in _ask_python(python, _LIST_INSTALLED_CODE):
        version = dict(line.split("==") for line in constraints.read_text().splitlines())["torch"]
        _write_empty_torch(constraints.parent, version)
        options += ["--find-links", str(constraints.parent)]
    _pip(python, "install", *options, "--constraint", str(constraints), *requirements)
    for item in json.loads(report.read_text(encoding="utf-8"))["install"]:
        name = _normalize_name(item["metadata"]["name"])
        if not _TORCH_PACKAGES.fullmatch(name):
            yield name, item["metadata"]["version"]


def _write_empty_torch(folder: Path, version: str) -> None:
    """Write a wheel without files for pip's resolver; it is not installed.

    pip does not see a torch that was built without it, and would fetch one with all its libraries.
    """
    info = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def _check(python: str, torch: Torch, venv: Path) -> None:
    """Check that the environment imports the site's torch, and hpc_tune.

    Raises:
        InstallError: if not.
    """
    now = _torch_of(python)
    if now is None or now.file != torch.file:
        raise InstallError(f"{venv} now has {now or 'no torch'} in place of {torch}")
    version = _ask_python(python, "import json, hpc_tune; print(json.dumps(hpc_tune.__version__))")
    print(f"installed hpc_tune {version} into {venv}; torch is the site's, as before")
    print(f"next: source {venv}/bin/activate && python -m hpc_tune doctor, on a compute node")


def _torch_of(python: str) -> Torch | None:
    """Return the torch that a Python imports, or None if it has none.

    Raises:
        InstallError: if there is one that cannot be imported.
    """
    environ = dict(os.environ) if python == sys.executable else _drop_pythonpath()
    done = subprocess.run(
        [python, "-c", _TORCH], env=environ, capture_output=True, text=True, timeout=_LIMIT_S
    )
    if done.returncode == 0:
        return Torch(*json.loads(done.stdout.splitlines()[-1]))
    problem = (done.stderr.strip().splitlines() or ["no output"])[-1]
    if problem == "ModuleNotFoundError: No module named 'torch'":
        return None
    raise InstallError(f"the torch of {python} cannot be imported here: {problem}")


def _ask_python(python: str, code: str, environ: dict[str, str] | None = None) -> Any:
    return json.loads(_run([python, "-c", code], environ or _drop_pythonpath()))


def _pip(python: str, *arguments: str) -> None:
    # A container may pin versions for pip (PIP_CONSTRAINT), some of them too old.
    environ = {k: v for k, v in _drop_pythonpath().items() if k != "PIP_CONSTRAINT"}
    _run([python, *_PIP, *arguments], environ)


def _drop_pythonpath() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _run(argv: Sequence[str], environ: Any) -> str:
    """Run a command and return its output.

    Raises:
        InstallError: with the command's last lines, if it fails.
    """
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        lines = [line for line in lines if not line.startswith("WARNING")] or lines
        raise InstallError("\n  ".join([f"{' '.join(argv[:5])} ... failed:", *lines[-8:]]))
    return done.stdout


def _name(requirement: str) -> str:
    return _normalize_name(re.split(r"[<>=!~\[; ]", requirement)[0])


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])


if __name__ == "__main__":
    sys.exit(main())
