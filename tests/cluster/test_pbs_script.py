"""The script of pbs/ as users submit it, to a stub of PBS (tests/support/pbs.py).

Debian has no package of OpenPBS or Torque, so no real scheduler has seen it. What is real: bash
runs the file of the repository, mpirun starts its ranks, and its own qsub submits the next job.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support import pbs
from tests.support.jobs import SETTINGS, adapter, clone, launch_by, starts
from tests.support.ranks import descendants, rank_environment
from tests.support.training import events, outcome, rows

pytestmark = pytest.mark.full

LIMIT_S = 200.0
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


def submit(queue, here, name, walltime, steps, asked=()):
    """Submit the script as a user with settings does; return the run directory."""
    folder, environment = queue
    words = [*SETTINGS, *LAYOUT, f"train.max_steps={steps}", "checkpoint.every_steps=100"]
    words += [f"run.dir={here / name}", f"data.cache={here / 'data'}"]
    given = {"SETTINGS": " ".join(words), "SCRATCH": str(here), "HPC_TUNE_VENV": sys.prefix}
    given["HPC_TUNE_LAUNCH"] = launch_by("mpirun")
    listed = ",".join(f"{key}={value}" for key, value in given.items())
    argv = ["qsub", *asked, "-l", f"walltime={walltime}", "-v", listed, "pbs/70b_lora.pbs"]
    subprocess.run(argv, env=environment, cwd=here, check=True, capture_output=True)
    return here / name


def wait(folder, until=None):
    """Wait until no job is left, or for something else; return all jobs."""
    until_s = time.monotonic() + LIMIT_S
    is_over = until or (lambda: all(job["exit"] is not None for job in pbs.jobs(folder)))
    while not is_over():
        assert time.monotonic() < until_s, said(folder)
        time.sleep(0.2)
    return pbs.jobs(folder)


def said(folder):
    return "\n".join(file.read_text(errors="replace") for file in sorted(folder.glob("*.out")))


def has_step(run_dir, step):
    return (run_dir / "metrics.jsonl").exists() and step in rows(run_dir, "loss")


def test_a_job_of_pbs_submits_the_next_one_before_its_time_ends(queue, tmp_path):
    folder, _ = queue
    here = clone(tmp_path / "clone")
    # supervise keeps a minute for the end; four ranks on two busy cores start in 50 s.
    asked = ["-q", "debug", "-A", "OURS", "-l", "select=1:ncpus=4:ngpus=4"]
    run_dir = submit(queue, here, "run", "00:02:35", 1_000_000, asked)
    wait(folder, lambda: len(pbs.jobs(folder)) > 1)
    same = ("queue", "account", "select", "walltime", "variables", "script")
    before, after = ([job[name] for name in same] for job in pbs.jobs(folder)[:2])
    assert before[:3] == ["debug", "OURS", "1:ncpus=4:ngpus=4"]
    assert after == before, "what the command line said counts for the next job, too"
    first = starts(run_dir)[0]
    assert (first["reason"], first["job"]) == ("SIGUSR1", "000.stub")
    wait(folder, lambda: has_step(run_dir, starts(run_dir)[-1]["to_step"] + 1))
    (run_dir / "STOP").touch()
    done = wait(folder)
    assert [job["exit"] for job in done] == [75] * len(done), said(folder)
    assert {job["walltime"] for job in done} == {"00:02:35"}
    assert starts(run_dir)[-1]["reason"] == "STOP file"
    assert starts(run_dir)[-1]["from_step"] >= first["to_step"]
    assert "Traceback" not in said(folder)


@pytest.mark.soak
def test_a_job_that_pbs_runs_again_ends_with_the_same_bits(queue, tmp_path):
    (folder, environment), steps = queue, 300
    here = clone(tmp_path / "clone")
    run_dir = submit(queue, here, "run", "00:30:00", steps)
    wait(folder, lambda: has_step(run_dir, steps // 2))
    subprocess.run(["qrerun", pbs.jobs(folder)[0]["number"]], env=environment, check=True)
    [job] = wait(folder)
    assert (job["runs"], job["exit"]) == (2, 0), said(folder)
    assert len(events(run_dir, "resume")) == 1
    assert outcome(run_dir)["status"] == "done"
    whole = submit(queue, here, "whole", "00:30:00", steps)
    assert wait(folder)[-1]["exit"] == 0
    assert adapter(run_dir, steps) == adapter(whole, steps)
