"""The scripts of slurm/ as users submit them, on a real Slurm of two nodes: nobody watches them.

Whatever happens to a job, its run ends with the bits of one that nothing happened to.
"""

import contextlib
import os
import signal
import statistics
from pathlib import Path

import pytest

from tests.support.jobs import Job, adapter, starts
from tests.support.training import events, losses, outcome, rows, worst_gap

pytestmark = pytest.mark.full

BY_BOTH = pytest.mark.parametrize(
    "launcher", ["srun", pytest.param("mpirun", marks=pytest.mark.soak)]
)


def check_done(job, restarts):
    """Check that the job has finished its run after so many requeues."""
    said = job.wait()
    assert said["JobState"] == "COMPLETED", job.text
    assert outcome(job.run_dir)["status"] == "done"
    assert int(said["Restarts"]) == restarts
    assert "Traceback" not in job.text
    assert "give up" not in job.text, "nothing was: it went on"


@BY_BOTH
def test_a_job_that_is_requeued_and_asked_to_leave_ends_with_the_same_bits(
    cluster, tmp_path, undisturbed, launcher
):
    job = Job(cluster, tmp_path, "tiny_cpu.sh", launcher=launcher)
    job.wait_for_step(6)
    cluster.run("scontrol", "requeue", job.number)
    job.wait_for_step(12)
    job.signal("USR1", "-b")  # as its time limit does: to the batch script alone
    job.wait_for_step(20)
    job.signal("USR1", "-f")  # scancel --signal --full: to the ranks as well
    check_done(job, restarts=3)
    assert len(events(job.run_dir, "resume")) == 3
    assert adapter(job.run_dir) == undisturbed


@BY_BOTH
def test_a_job_that_another_one_takes_the_nodes_of_comes_back(
    cluster, tmp_path, undisturbed, launcher
):
    job = Job(cluster, tmp_path, "tiny_cpu.sh", launcher=launcher)
    job.wait_for_step(6)
    words = ["--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null"]
    urgent = cluster.submit(*words, "--wrap=true")
    assert cluster.wait(urgent)["JobState"] == "COMPLETED"
    check_done(job, restarts=1)
    assert [start["reason"] for start in starts(job.run_dir)] == ["preemption", "all steps done"]
    assert adapter(job.run_dir) == undisturbed


def test_the_script_of_the_70b_run_trains_and_comes_back_with_the_same_bits(
    cluster, tmp_path, monkeypatch
):
    # What differs on CPUs stands on the command line; the file is that of the repository.
    monkeypatch.setitem(cluster.environment, "SCRATCH", str(tmp_path))
    words = ["model.path=builtin:tiny", "run.device=cpu", "parallel.shard=2", "train.max_steps=16"]
    options = ["--ntasks-per-node=2", "--cpus-per-task=1", "--mem=2G"]
    job = Job(cluster, tmp_path / "a", "70b_lora.sh", *words, options=options)
    job.wait_for_step(6)
    job.signal("USR1", "-b")
    check_done(job, restarts=1)
    assert "replicate 2 x shard 2" in job.text
    whole = Job(cluster, tmp_path / "b", "70b_lora.sh", *words, options=options)
    check_done(whole, restarts=0)
    assert adapter(job.run_dir, 16) == adapter(whole.run_dir, 16)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_job_whose_time_ends_requeues_itself_and_ends_with_the_same_bits(
    cluster, tmp_path, undisturbed_run, launcher
):
    steps = int(110.0 / statistics.median(rows(undisturbed_run, "step_s").values()))
    words = [f"train.max_steps={steps}", "checkpoint.every_steps=500"]
    # Slurm looks at its clock twice a minute: the signal comes after 60 to 90 s.
    options = ["--time=3", "--signal=B:USR1@90"]
    job = Job(cluster, tmp_path / "a", "tiny_cpu.sh", *words, launcher=launcher, options=options)
    said = job.wait()
    restarts = int(said["Restarts"])
    assert restarts >= 1, job.text
    check_done(job, restarts)
    reasons = [start["reason"] for start in starts(job.run_dir)]
    assert reasons == ["SIGUSR1"] * restarts + ["all steps done"]
    assert "asking its ranks to stop" not in job.text, "supervise did what Slurm had to"
    whole = Job(cluster, tmp_path / "b", "tiny_cpu.sh", *words, launcher=launcher)
    check_done(whole, restarts=0)
    assert adapter(job.run_dir, steps) == adapter(whole.run_dir, steps)


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_sigterm_to_the_ranks_is_a_start_more_and_to_the_script_the_end(
    cluster, tmp_path, undisturbed, launcher
):
    job = Job(cluster, tmp_path, "tiny_cpu.sh", launcher=launcher)
    job.wait_for_step(6)
    job.signal("TERM")
    job.wait_for_step(16)
    job.signal("TERM", "-b")
    said = job.wait()
    assert (said["JobState"], said["ExitCode"]) == ("FAILED", "75:0")
    assert said["Restarts"] == "0"
    assert "is saved; the job was ended from outside (SIGTERM). If Slurm requeues it" in job.text
    assert "give up" not in job.text
    again = Job(cluster, tmp_path, "tiny_cpu.sh", launcher=launcher)
    check_done(again, restarts=0)
    assert len(starts(job.run_dir)) == 3
    assert adapter(job.run_dir) == undisturbed


@pytest.mark.soak
def test_a_node_that_loses_its_daemon_costs_a_start_though_mpirun_says_all_is_well(
    cluster, tmp_path, undisturbed_run
):
    job = Job(cluster, tmp_path, "tiny_cpu.sh", launcher="mpirun")
    job.wait_for_step(10)
    found = daemons_on("n2")
    assert found, "mpirun has started none"
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    check_done(job, restarts=0)
    first, *_, last = starts(job.run_dir)
    assert first["status"] != "done"
    assert (last["status"], last["nodes"], list(last["left_out"])) == ("done", ["n1"], ["n2"])
    assert worst_gap(losses(job.run_dir), losses(undisturbed_run)) < 1e-5


def daemons_on(node):
    """Return the processes of mpirun's daemon on a node."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, environment = (folder / "comm").read_text(), (folder / "environ").read_bytes()
            on_node = f"SLURMD_NODENAME={node}\0".encode() in environment
            if name.strip() in ("prted", "orted") and on_node:
                found.append(int(folder.name))
    return found
