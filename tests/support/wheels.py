"""Wheels that tests make, for a pip without network."""

import zipfile
from pathlib import Path

import setuptools


def wheel_of_setuptools(folder: Path) -> None:
    """Pack the setuptools that is installed here, which builds hpc_tune's own wheel."""
    version = setuptools.__version__
    packages = Path(setuptools.__file__).parents[1]
    with zipfile.ZipFile(folder / f"setuptools-{version}-py3-none-any.whl", "w") as file:
        for name in ("setuptools", "_distutils_hack", f"setuptools-{version}.dist-info"):
            for path in (packages / name).rglob("*"):
                if path.is_file() and path.suffix != ".pyc" and path.name != "RECORD":
                    file.write(path, path.relative_to(packages))
        file.writestr(f"setuptools-{version}.dist-info/RECORD", "")
