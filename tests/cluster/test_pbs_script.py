"""The script of pbs/ as users submit it, to a stub of PBS (tests/support/pbs.py).

Debian has no package of OpenPBS or Torque, so no real scheduler has seen it. What is real: bash
runs the file of the repository, mpirun starts its ranks, and its own qsub submits the next job.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time

import pytest

from tests.support import pbs
from tests.support.jobs import SETTINGS, adapter, clone, launch_by, starts
from tests.support.ranks import descendants, rank_environment
from tests.support.training import events, outcome, rows, train

LIMIT_S = 200.0
# Of a job with 78 s of which supervise keeps 60 for the end: it cannot do all that takes 20.
WALLTIME, TRAINING_S = "00:01:18", 20.0
LAYOUT = ["model.path=builtin:tiny", "run.device=cpu"]
LAYOUT += ["parallel.replicate=2", "parallel.shard=2"]


@pytest.fixture
def queue(tmp_path):
    """A folder of the stub, and the variables with which its programs are found."""
    folder = tmp_path / "queue"
    folder.mkdir()
    yield folder, rank_environment(4) | pbs.install(folder)
    for job in pbs.jobs(folder):
        for pid in [*descendants(job["pid"] or 0), job["pid"]] if job["exit"] is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """How many steps this machine does in TRAINING_S."""
    run_dir = tmp_path_factory.mktemp("speed") / "run"
    done = train([*SETTINGS, *LAYOUT, f"run.dir={run_dir}"], n=4)
    assert done.returncode == 0, done.stderr
    return int(TRAINING_S / statistics.median(rows(run_dir, "step_s").values()))


def submit(queue, here, name, walltime, steps):
    """Submit the script as a user with settings does; return the run directory."""
    folder, environment = queue
    words = [*SETTINGS, *LAYOUT, f"train.max_steps={steps}", "checkpoint.every_steps=100"]
    words += [f"run.dir={here / name}", f"data.cache={here / 'data'}"]
    given = {"SETTINGS": " ".join(words), "SCRATCH": str(here), "HPC_TUNE_VENV": sys.prefix}
    given["HPC_TUNE_LAUNCH"] = launch_by("mpirun")
    listed = ",".join(f"{key}={value}" for key, value in given.items())
    argv = ["qsub", "-l", f"walltime={walltime}", "-v", listed, "pbs/70b_lora.pbs"]
    subprocess.run(argv, env=environment, cwd=here, check=True, capture_output=True)
    return here / name


def wait(folder):
    """Wait until no job is left and return all."""
    until_s = time.monotonic() + LIMIT_S
    while any(job["exit"] is None for job in pbs.jobs(folder)):
        assert time.monotonic() < until_s, said(folder)
        time.sleep(0.2)
    return pbs.jobs(folder)


def said(folder):
    return "\n".join(file.read_text(errors="replace") for file in sorted(folder.glob("*.out")))


def test_a_job_of_pbs_submits_the_next_one_before_its_time_ends(queue, tmp_path, steps):
    folder, _ = queue
    here = clone(tmp_path / "clone")
    run_dir = submit(queue, here, "run", WALLTIME, steps)
    done = wait(folder)
    assert len(done) > 1, said(folder)
    assert [job["exit"] for job in done] == [75] * (len(done) - 1) + [0], said(folder)
    assert {job["walltime"] for job in done} == {WALLTIME}
    reasons = [start["reason"] for start in starts(run_dir)]
    assert reasons == ["SIGUSR1"] * (len(done) - 1) + ["all steps done"]
    assert len(events(run_dir, "resume")) == len(done) - 1
    assert outcome(run_dir)["status"] == "done"
    assert "Traceback" not in said(folder)


@pytest.mark.soak
def test_a_job_that_pbs_runs_again_ends_with_the_same_bits(queue, tmp_path, steps):
    folder, environment = queue
    here = clone(tmp_path / "clone")
    run_dir = submit(queue, here, "run", "00:30:00", steps)
    until_s = time.monotonic() + LIMIT_S
    while not (run_dir / "metrics.jsonl").exists() or steps // 2 not in rows(run_dir, "loss"):
        assert time.monotonic() < until_s, said(folder)
        time.sleep(0.2)
    subprocess.run(["qrerun", pbs.jobs(folder)[0]["number"]], env=environment, check=True)
    [job] = wait(folder)
    assert (job["runs"], job["exit"]) == (2, 0), said(folder)
    assert len(starts(run_dir)) >= 1
    whole = submit(queue, here, "whole", "00:30:00", steps)
    assert wait(folder)[-1]["exit"] == 0
    assert adapter(run_dir, steps) == adapter(whole, steps)
