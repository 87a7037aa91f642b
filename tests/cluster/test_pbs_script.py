"""The script of pbs/ as users submit it, to a stub of PBS (tests/support/pbs.py).

Debian has no package of OpenPBS or Torque, so no real scheduler has seen it. What is real: bash
runs the file of the repository, mpirun starts its ranks, and its own qsub submits the next job.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support import pbs
from tests.support.jobs import LAUNCHERS, SETTINGS, adapter, clone, starts
from tests.support.ranks import descendants, rank_environment
from tests.support.training import events, outcome, rows

STEPS, LIMIT_S = 300, 150.0


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


def submit(queue, here, name, walltime):
    """Submit the script as a user with settings does; return the run directory."""
    folder, environment = queue
    words = [*SETTINGS, "model.path=builtin:tiny", "run.device=cpu", "parallel.replicate=2"]
    words += ["parallel.shard=2", f"train.max_steps={STEPS}", "checkpoint.every_steps=100"]
    words += [f"run.dir={here / name}", f"data.cache={here / 'data'}"]
    given = {"SETTINGS": " ".join(words), "SCRATCH": str(here), "HPC_TUNE_VENV": sys.prefix}
    given["HPC_TUNE_LAUNCH"] = LAUNCHERS["mpirun"]
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


def test_a_job_of_pbs_submits_the_next_one_before_its_time_ends(queue, tmp_path):
    folder, _ = queue
    here = clone(tmp_path / "clone")
    run_dir = submit(queue, here, "run", "00:01:18")
    done = wait(folder)
    assert len(done) > 1, said(folder)
    assert [job["exit"] for job in done] == [75] * (len(done) - 1) + [0], said(folder)
    assert {job["walltime"] for job in done} == {"00:01:18"}
    reasons = [start["reason"] for start in starts(run_dir)]
    assert reasons == ["SIGUSR1"] * (len(done) - 1) + ["all steps done"]
    assert len(events(run_dir, "resume")) == len(done) - 1
    assert outcome(run_dir)["status"] == "done"
    assert "Traceback" not in said(folder)


@pytest.mark.soak
def test_a_job_that_pbs_runs_again_ends_with_the_same_bits(queue, tmp_path):
    folder, environment = queue
    here = clone(tmp_path / "clone")
    run_dir = submit(queue, here, "run", "00:30:00")
    until_s = time.monotonic() + LIMIT_S
    while not (run_dir / "metrics.jsonl").exists() or 150 not in rows(run_dir, "loss"):
        assert time.monotonic() < until_s, said(folder)
        time.sleep(0.2)
    subprocess.run(["qrerun", pbs.jobs(folder)[0]["number"]], env=environment, check=True)
    [job] = wait(folder)
    assert (job["runs"], job["exit"]) == (2, 0), said(folder)
    assert len(starts(run_dir)) >= 1
    whole = submit(queue, here, "whole", "00:30:00")
    assert wait(folder)[-1]["exit"] == 0
    assert adapter(run_dir, STEPS) == adapter(whole, STEPS)
    assert json.loads((folder / "000.stub.job").read_text())["runs"] == 2
