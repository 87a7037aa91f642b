"""As in a centre's container: read-only but for scratch, no HOME, little /dev/shm, no network."""

import os
import shlex
import subprocess
import sys

import pytest

from tests.support.ranks import ROOT, find_mpirun, rank_environment

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount and unshare")

# / and all that is mounted below it, but what the kernel makes itself, is read-only afterwards.
CONTAINER = """
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
STEPS = ["train.max_steps=2", "data.seq_len=64", "batch.global_size=4", "run.threads=1"]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    """A folder outside of /tmp, which is to be read-only."""
    folder = ROOT / f".scratch-{os.getpid()}"
    folder.mkdir()
    yield folder
    folder.rmdir()


def inside(scratch, *commands, **environ):
    """Run commands there, one after the other; return what they printed."""
    env = rank_environment(2, {"SCRATCH": str(scratch), "PYTHONPATH": str(ROOT), **environ})
    # torch sets the last one, where a test before this one has imported its compiler.
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        env.pop(name, None)
    env |= environ
    script = CONTAINER + "\n".join(shlex.join(map(str, command)) for command in commands)
    argv = ["unshare", "--mount", "--net", "bash", "-c", script]
    done = subprocess.run(
        argv, capture_output=True, text=True, env=env, cwd="/", timeout=600, errors="replace"
    )
    if "unshare" in done.stderr and "Operation not permitted" in done.stderr:
        pytest.skip("may not unshare namespaces here")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


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
