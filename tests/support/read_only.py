"""A node like a center's container: read-only except scratch, little /dev/shm, no network."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.ranks import rank_environment

# Makes / and all mounts below it read-only, except the kernel's own file systems.
_CONTAINER = """
set -e
mount --make-rprivate /
ip link set lo up
mount -t tmpfs -o size=64m tmpfs /dev/shm
mount -t tmpfs -o size=3g tmpfs "$SCRATCH"
mount -t tmpfs -o size=1m,ro tmpfs /tmp
mount -o remount,bind,ro /
cd "$SCRATCH"
for folder in /var/tmp /tmp "$SCRATCH/.."; do
    if touch "$folder/probe" 2>/dev/null; then echo "$folder can be written"; exit 9; fi
done
"""


def run_inside(scratch: Path, script: str, without: Sequence[str] = (), **environ: str) -> str:
    """Run a bash script in the container, in ``scratch``; return what it printed.

    HOME and the variables in ``without`` are not set, unless ``environ`` sets them.
    """
    env = rank_environment(2, {"SCRATCH": str(scratch)})
    # torch sets the last one if an earlier test has imported its compiler.
    gone = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", *without)
    env = {name: value for name, value in env.items() if name not in gone} | environ
    argv = ["unshare", "--mount", "--net", "bash", "-c", _CONTAINER + script]
    done = subprocess.run(
        argv, capture_output=True, text=True, env=env, cwd="/", timeout=600, errors="replace"
    )
    if "unshare" in done.stderr and "Operation not permitted" in done.stderr:
        pytest.skip("may not unshare namespaces here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def make_scratch(folder: Path) -> Path:
    """Make the folder that scratch is mounted on, outside /tmp, which becomes read-only."""
    scratch = folder / f".scratch-{os.getpid()}"
    scratch.mkdir()
    return scratch
