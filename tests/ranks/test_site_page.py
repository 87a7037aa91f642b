"""The page of a centre, docs/sites/alps.md, typed from its top to its end on a read-only node.

All its commands are run as they stand there, in their order, by a reader who has no HOME and
nothing to write on but scratch. What only the centre has is in one table.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.docs import DOCS, commands_of
from tests.support.ranks import ROOT, find_mpirun
from tests.support.read_only import make_scratch, run_inside
from tests.support.wheels import wheel_of_setuptools

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount and unshare"),
]
PAGE = DOCS / "sites" / "alps.md"
# The centre's programs: the Python of the tests stands for that of the uenv, two ranks that mpirun
# starts on CPUs for those of srun, and a file for the queue. Open MPI needs a HOME.
PROGRAMS = {
    "uenv": "exit 0",
    "sbatch": 'cat > "$SCRATCH/job.sh"; echo 7',
    "srun": """\
while [ "${1#-}" != "$1" ]; do
    case $1 in -A | -p | -t | -N | -c) shift 2 ;; *) shift ;; esac
done
case "$*" in *"hpc_tune train"*) set -- "$@" $SMALL ;; esac
export HOME=$SCRATCH TMPDIR=$SCRATCH
"$MPIRUN" -np 2 --map-by :oversubscribe --bind-to none "$@" && exit
case "$*" in *"hpc_tune doctor"*) exit 0 ;; esac  # what it finds is looked at below
exit 1
""",
}
# Its folders, and where a reader without internet has the wheels that are missing.
WORDS = {
    "/capstor/scratch/cscs/me": "$SCRATCH/capstor",
    "/iopsstor/scratch/cscs/me": "$SCRATCH/iopsstor",
    "/users/me/hpc_tune": "$SCRATCH/hpc_tune",
    "python3 tools/install.py": "python3 tools/install.py --wheels wheels",
}
# So that it takes seconds: what a reader leaves to the configuration.
SMALL = "train.max_steps=2 data.seq_len=64 batch.global_size=4 run.threads=1"


@pytest.fixture
def scratch():
    folder = make_scratch(ROOT)
    yield folder
    folder.rmdir()


@pytest.fixture
def site():
    """What the centre has, outside of /tmp, in whose place there is another inside."""
    folder = ROOT / f".site-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def typed(page: Path) -> str:
    """Return the commands of a page, with what only the centre has replaced."""
    text = "\n".join(command.text for command in commands_of(page))
    for theirs, ours in WORDS.items():
        assert theirs in text, f"{theirs} is no longer on the page"
        # What a heredoc of the page is to hold is not expanded in it.
        text = text.replace(theirs, ours)
    return text


def programs(folder: Path) -> Path:
    """Write the stand-ins for the centre's programs."""
    folder.mkdir()
    for name, script in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    return folder


def source(folder: Path) -> Path:
    """Copy what a clone has."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.mark.timeout(600)
def test_a_page_of_a_centre_is_typed_from_its_top_to_a_run_that_is_done(scratch, site):
    clone, bin_ = source(site / "clone"), programs(site / "bin")
    wheels = site / "wheels"
    wheels.mkdir()
    wheel_of_setuptools(wheels)  # Python 3.11 puts an older one into each environment
    path = os.pathsep.join([str(bin_), str(Path(sys.executable).parent), os.environ["PATH"]])
    script = f"""
cp -r "$CLONE" hpc_tune
cd hpc_tune
cp -r "$WHEELS" wheels
mkdir "$SCRATCH/capstor" "$SCRATCH/iopsstor"
{typed(PAGE)}
(cd / && python -c 'import hpc_tune; print("imported", hpc_tune.__file__)')
bash "$SCRATCH/job.sh"
test -s "$SCRATCH/capstor/first/export/adapter/adapter_model.safetensors"
test -s "$SCRATCH/iopsstor/first.h5"
"""
    given = {
        "CLONE": str(clone),
        "WHEELS": str(wheels),
        "PATH": path,
        "MPIRUN": find_mpirun(),
        "SMALL": SMALL,
    }
    said = run_inside(scratch, script, ["PYTHONPATH"], **given)
    assert "torch is the site's, as before" in said
    assert f"imported {scratch}/hpc_tune/.venv/lib" in said
    assert "submitted job 7, run directory" in said
    assert "#SBATCH --uenv=pytorch/v2.9.1:/user-environment" in said
    [found] = [line for line in said.splitlines() if line.startswith("ERROR")]
    assert "/dev/shm has 63.9 MiB of 64.0 MiB free" in found, (
        "doctor tells of it, and of nothing else"
    )
    assert f"run.dir {scratch}/capstor/first" in said
    assert "world   2 ranks" in said
    assert "done after 2 steps" in said
