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
from tests.support.ranks import ROOT, descendants, mpirun, rank_environment
from tests.support.training import TRAIN, events, outcome, rows

LIMIT_S = 200.0
# Of training each job does about so much, and about twice that is to be done.
SHARE_S = 8.0
KEPT_S = 60  # by supervise, for the end
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
def sizes(tmp_path_factory):
    """The walltime of a job and the steps of a run, by how fast this machine is."""
    folder, config = tmp_path_factory.mktemp("speed"), ROOT / "configs/llama3_70b_lora.yaml"
    words = [*TRAIN, "--config", str(config), *SETTINGS, *LAYOUT, f"run.dir={folder / 'run'}"]
    began_s = time.monotonic()
    done = mpirun(4, words, timeout=120, env={"SCRATCH": str(folder)})
    took_s = time.monotonic() - began_s
    assert done.returncode == 0, done.stderr
    times_s = list(rows(folder / "run", "step_s").values())
    minutes, seconds = divmod(int(KEPT_S + took_s - sum(times_s) + SHARE_S), 60)
    return f"00:{minutes:02}:{seconds:02}", int(2 * SHARE_S / statistics.median(times_s))


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


def test_a_job_of_pbs_submits_the_next_one_before_its_time_ends(queue, tmp_path, sizes):
    folder, (walltime, steps) = queue[0], sizes
    here = clone(tmp_path / "clone")
    run_dir = submit(queue, here, "run", walltime, steps)
    done = wait(folder)
    assert len(done) > 1, said(folder)
    assert [job["exit"] for job in done] == [75] * (len(done) - 1) + [0], said(folder)
    assert {job["walltime"] for job in done} == {walltime}
    reasons = [start["reason"] for start in starts(run_dir)]
    assert reasons == ["SIGUSR1"] * (len(done) - 1) + ["all steps done"]
    assert len(events(run_dir, "resume")) == len(done) - 1
    assert outcome(run_dir)["status"] == "done"
    assert "Traceback" not in said(folder)


@pytest.mark.soak
def test_a_job_that_pbs_runs_again_ends_with_the_same_bits(queue, tmp_path, sizes):
    (folder, environment), (_, steps) = queue, sizes
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
