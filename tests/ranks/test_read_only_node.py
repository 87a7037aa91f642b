"""As in a centre's container: read-only but for scratch, no HOME, little /dev/shm, no network."""

import os
import shlex
import sys

import pytest

from tests.support.ranks import ROOT, find_mpirun
from tests.support.read_only import make_scratch, run_inside

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount and unshare")

STEPS = ["train.max_steps=2", "data.seq_len=64", "batch.global_size=4", "run.threads=1"]


@pytest.fixture(scope="module")
def scratch():
    folder = make_scratch(ROOT)
    yield folder
    folder.rmdir()


def inside(scratch, *commands, **environ):
    """Run commands there, one after the other; return what they printed."""
    script = "\n".join(shlex.join(map(str, command)) for command in commands)
    return run_inside(scratch, script, PYTHONPATH=str(ROOT), **environ)


@pytest.mark.full
def test_a_run_writes_below_scratch_alone(scratch):
    run = scratch / "run"
    said = inside(
        scratch,
        [sys.executable, "-m", "hpc_tune", f"run.dir={run}", "tune.method=lora", *STEPS],
        ["test", "-s", run / "export" / "adapter" / "adapter_model.safetensors"],
        ["test", "-s", run / "report.html"],
    )
    assert "done after 2 steps" in said


@pytest.mark.full
def test_what_comes_after_a_run_writes_below_scratch_alone(scratch):
    hpc_tune, run = [sys.executable, "-m", "hpc_tune"], scratch / "run"
    said = inside(
        scratch,
        [*hpc_tune, f"run.dir={run}", "tune.method=lora", *STEPS],
        [*hpc_tune, f"run.dir={run}", "tune.method=lora", *STEPS, "train.max_steps=3"],
        [*hpc_tune, "export", run, "--to", "adapter", "--out", scratch / "adapter"],
        [*hpc_tune, "generate", "--run", run, "--prompt", "os", "--max-tokens", "4"],
        [*hpc_tune, "report", run, "--out", scratch / "report.html"],
        ["test", "-s", scratch / "adapter" / "adapter_model.safetensors"],
        ["test", "-s", scratch / "report.html"],
    )
    assert "done after 2 steps" in said
    assert "done after 3 steps" in said


@pytest.mark.full
def test_ranks_of_mpirun_need_no_more_than_a_folder_for_its_session(scratch):
    launch = [find_mpirun(), "-np", "2", sys.executable, "-m", "hpc_tune"]
    run = [*launch, f"run.dir={scratch / 'run'}", "parallel.shard=2", *STEPS]
    # Without a HOME Open MPI itself does not start.
    said = inside(scratch, run, TMPDIR=str(scratch), HOME=str(scratch))
    assert "done after 2 steps" in said
