"""The script of pbs/, and one that ``submit`` writes, in a stub of PBS (tests/support/pbs.py).

Debian has no package of OpenPBS or Torque, so no real scheduler has seen it. What is real: bash
runs the script, mpirun starts its ranks, and its own qsub submits the next job.
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
    asked = ["-q", "debug", "-A", "OURS", "-l", "select=1:ncpus=4:ngpus=4,filesystems=tegu"]
    run_dir = submit(queue, here, "run", "00:02:35", 1_000_000, asked)
    wait(folder, lambda: len(pbs.jobs(folder)) > 1)
    same = ("queue", "account", "select", "walltime", "variables", "script")
    before, after = ([job[name] for name in same] for job in pbs.jobs(folder)[:2])
    assert before[:3] == ["debug", "OURS", "1:ncpus=4:ngpus=4"]
    both = [job["asked"]["l filesystems"] for job in pbs.jobs(folder)[:2]]
    assert both == ["tegu", "tegu"]
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


JOB = """\
run: {{dir: $SCRATCH/run, device: cpu}}
parallel: {{replicate: 2, shard: 2}}
train: {{max_steps: {steps}}}
pbs:
  queue: capacity
  account: OURS
  nodes: 1
  tasks_per_node: 4
  # It leaves after 100 s; four ranks on two busy cores start in 50 s.
  walltime: "00:04:10"
  leave_before: 150
  filesystems: home:eagle
  options: [-k doe]
  venv: {venv}
  launch: {launch}
"""
ASKED = {
    "q": "capacity", "A": "OURS", "N": "hpc_tune", "j": "oe", "r": "y", "k": "doe",
    "l select": "1:ncpus=4:mpiprocs=4", "l place": "scatter", "l walltime": "00:04:10",
    "l filesystems": "home:eagle",
}  # fmt: skip


def test_a_job_of_submit_is_continued_by_one_that_asks_for_the_same_until_it_is_done(
    queue, tmp_path
):
    folder, environment = queue
    here, run_dir = tmp_path / "here", tmp_path / "scratch" / "run"
    here.mkdir()
    its = {"venv": sys.prefix, "launch": launch_by("mpirun")}
    (here / "job.yaml").write_text(JOB.format(steps=1_000_000, **its))
    words = [*SETTINGS[1:], "model.path=builtin:tiny", "checkpoint.every_steps=1000000"]
    argv = [sys.executable, "-m", "hpc_tune", "submit", "--config", "job.yaml", *words]
    environ = environment | {"SCRATCH": str(tmp_path / "scratch")}
    done = subprocess.run(argv, env=environ, cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "submitted job 000.stub, " in done.stdout
    wait(folder, lambda: "asking its ranks to stop" in said(folder))
    steps = max(rows(run_dir, "loss")) + 40
    (here / "job.yaml").write_text(JOB.format(steps=steps, **its))  # which the next job reads
    first, *others = wait(folder)  # one other, or two where all is slow
    assert [job["exit"] for job in (first, *others)] == [75] * len(others) + [0], said(folder)
    numbers = [job["number"] for job in (first, *others)]
    assert first["asked"] == ASKED
    for before, job in zip(numbers, others, strict=False):
        assert job["asked"] == {**ASKED, "W depend": f"afterany:{before}"}
    scripts = {(folder / f"{number}.SC").read_text() for number in numbers}
    assert len(scripts) == 1, "with its directives, as it was submitted"
    reasons = [start["reason"] for start in starts(run_dir)]
    assert reasons == ["SIGUSR1"] * len(others) + ["all steps done"]
    assert [start["job"] for start in starts(run_dir)] == numbers
    assert outcome(run_dir)["status"] == "done"
    assert max(rows(run_dir, "loss")) == steps
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
