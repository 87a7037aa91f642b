"""tools/install.py over a Python with a torch of its own: nothing brings another."""

import argparse
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.wheels import wheel_of_setuptools

ROOT = Path(__file__).parents[3]
INSTALL = ROOT / "tools" / "install.py"
sys.path.insert(0, str(INSTALL.parent))

import install  # noqa: E402

LIMIT_S = 240
ROCM = "2.10.0+rocm7.0.2"
TORCH = """__version__ = "2.10.0+rocm7.0.2"
class version:
    hip, cuda = "7.0.2", None
class cuda:
    is_available = staticmethod(lambda: False)
"""
# What each has on PyPI: some need torch, and pip would bring the newest one for them.
NEEDS_TORCH = {"peft": "torch>=1.13.0", "transformers": "torch>=2.6", "deepspeed": "torch"}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an empty wheel for each package, and a torch that must not be taken."""
    folder = tmp_path_factory.mktemp("wheels")
    names = {install._name(r) for r in install._list_requirements(_arguments("--zero"))} | {
        "mpi4py"
    }
    for name in names:
        wheel(folder, name, "99.0" if name != "transformers" else "5.20", NEEDS_TORCH.get(name))
    wheel_of_setuptools(folder)
    wheel(folder, "nvidia-cublas", "13.0", None)
    wheel(folder, "torch", "2.15.0", "nvidia-cublas")
    return folder


def wheel(folder: Path, name: str, version: str, needs: str | None) -> None:
    """Write a wheel with one empty module."""
    base = name.replace("-", "_")
    with zipfile.ZipFile(folder / f"{base}-{version}-py3-none-any.whl", "w") as file:
        info = f"{base}-{version}.dist-info"
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        file.writestr(f"{info}/METADATA", text + (f"Requires-Dist: {needs}\n" if needs else ""))
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
        file.writestr(f"{base}.py", "")


def site(folder: Path, known_to_pip: bool) -> Path:
    """Make a Python with torch 2.10 for ROCm, an old transformers, and numpy."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=LIMIT_S
    )
    python = folder / "bin" / "python"
    text = subprocess.run(
        [python, "-c", install._PURELIB], check=True, capture_output=True, text=True
    ).stdout
    packages = Path(json.loads(text))
    (packages / "torch").mkdir()
    (packages / "torch" / "__init__.py").write_text(TORCH)
    there = {"transformers": "4.57.6", "numpy": "1.26.4"}
    for name, version in (there | ({"torch": ROCM} if known_to_pip else {})).items():
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return python


def run(python: Path, venv: Path, wheels: Path, *words: str, **environ: str) -> str:
    """Run the script with a Python; return what it prints."""
    done = subprocess.run(
        [python, INSTALL, "--venv", venv, "--wheels", wheels, *words],
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return f"{done.returncode} {done.stdout}{done.stderr}"


def packages_of(venv: Path) -> set[str]:
    """Return what is in an environment itself."""
    folders = venv.glob("lib/python*/site-packages/*.dist-info")
    return {install._normalize_name(folder.name.partition("-")[0]) for folder in folders}


def _arguments(*words: str) -> argparse.Namespace:
    return install._parser().parse_args(words)


@pytest.mark.parametrize("known_to_pip", [True, pytest.param(False, marks=pytest.mark.full)])
def test_no_torch_is_installed_over_that_of_the_site(
    tmp_path: Path, wheels: Path, known_to_pip: bool
) -> None:
    python = site(tmp_path / "site", known_to_pip)
    told = run(python, tmp_path / "own", wheels)
    own = packages_of(tmp_path / "own")
    assert told.startswith(f"0 found torch {ROCM} for ROCm 7.0.2"), told
    assert {"transformers", "peft", "h5py"} <= own
    assert not {"torch", "nvidia-cublas", "deepspeed", "mpi4py", "numpy"} & own
    assert "installs transformers 5.20 (the site has 4.57.6)" in told
    assert f"kept from the site: torch {ROCM}, " in told
    assert ", numpy 1.26.4" in told


@pytest.mark.full
def test_it_can_be_run_again_and_brings_what_is_asked_for(tmp_path: Path, wheels: Path) -> None:
    python = site(tmp_path / "site", known_to_pip=True)
    assert "would install deepspeed 99.0" in run(
        python, tmp_path / "own", wheels, "--zero", "--dry-run"
    )
    assert not (tmp_path / "own").exists()
    assert run(python, tmp_path / "own", wheels)[0] == "0"
    told = run(python, tmp_path / "own", wheels, "--zero", "--mpi")
    assert told.count("installs") == 1, told
    assert {"deepspeed", "mpi4py"} <= packages_of(tmp_path / "own")


@pytest.mark.full
def test_folders_of_pythonpath_come_behind(tmp_path: Path, wheels: Path) -> None:
    python = site(tmp_path / "site", known_to_pip=True)
    module = tmp_path / "module"
    module.mkdir()
    (module / "transformers.py").write_text("__version__ = '4.57.6'")
    (module / "of_the_module.py").write_text("")
    told = run(python, tmp_path / "own", wheels, PYTHONPATH=str(module))
    assert told.startswith("0 "), told
    script = ". own/bin/activate; python -c 'import transformers as t, of_the_module as m; "
    script += "print(t.__file__, m.__file__)'"
    done = subprocess.run(
        ["sh", "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(module)},
        check=True,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    first, second = done.stdout.split()
    assert first.startswith(str(tmp_path / "own"))
    assert second == str(module / "of_the_module.py")


@pytest.mark.full
def test_refusals_say_what_to_do(tmp_path: Path, wheels: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", bare], check=True, timeout=LIMIT_S
    )
    assert "has no torch to keep: load the centre's module" in run(
        bare / "bin" / "python", tmp_path / "own", wheels
    )
    python = site(tmp_path / "site", known_to_pip=True)
    assert "--extra zlora: expected one of adamw8bit" in run(
        python, tmp_path / "own", wheels, "--extra", "zlora"
    )
    assert run(python, tmp_path / "own", tmp_path / "none").startswith("2 ")
