"""Nodes that are lost or sick while a job trains, on a real Slurm of four nodes.

The run goes on in the same job, on a spare node or on fewer, with the losses of an undisturbed one.
"""

import time

import pytest

from tests.support.jobs import SETTINGS, Job, for_users, starts
from tests.support.slurm import slurm
from tests.support.training import events, losses, train, worst_gap

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lost") / "cluster"
    with slurm(folder, num_nodes=4, limits=False) as cluster:
        for_users(cluster)
        yield cluster


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of one process."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    words = [*SETTINGS, "run.device=cpu", f"run.dir={run_dir}"]
    done = train(words)
    assert done.returncode == 0, done.stderr
    return losses(run_dir)


@pytest.fixture
def mended(cluster):
    """The cluster, whose nodes are all well again afterwards."""
    yield cluster
    cluster.mend()


def submitted(cluster, folder, nodes, *words, launcher="srun", through=""):
    """Submit the small run on so many nodes of two ranks; ``through`` a program that starts it."""
    options = [
        f"--nodes={nodes}",
        "--ntasks-per-node=2",
        "--nodelist=" + ",".join(cluster.nodes[:nodes]),
    ]
    return Job(
        cluster,
        folder,
        "tiny_cpu.sh",
        *words,
        launcher=launcher,
        options=options,
        through=str(through),
    )


def seconds_to_go_on(job, began_s):
    """Return the seconds until the first step after the resume."""
    until_s = time.monotonic() + 200
    while not events(job.run_dir, "resume"):
        assert time.monotonic() < until_s, job.text
        time.sleep(0.05)
    job.wait_for_step(events(job.run_dir, "resume")[-1]["step"] + 1)
    return time.time() - began_s


def check_goes_on(job, alone, left_out, nodes):
    """Check that the job has finished, in two starts, without the node."""
    until_s = time.monotonic() + 200
    while starts(job.run_dir)[-1]["status"] != "done":
        assert time.monotonic() < until_s, job.text
        time.sleep(0.2)
    job.cluster.mend()  # else the job ends with the time that Slurm gives the node to answer
    said = job.wait()
    assert said["JobState"] == "COMPLETED", job.text
    assert said["Restarts"] == "0"
    first, *_, last = starts(job.run_dir)
    assert first["status"] == "failed"
    assert last["nodes"] == nodes, job.text
    assert list(last["left_out"]) == [left_out], job.text
    assert worst_gap(losses(job.run_dir), alone) < 1e-5
    return last["left_out"][left_out]


@pytest.mark.parametrize("launcher", ["srun", pytest.param("mpirun", marks=pytest.mark.soak)])
def test_a_node_whose_daemon_and_ranks_are_killed_is_replaced_by_a_spare(
    mended, tmp_path, alone, launcher
):
    job = submitted(mended, tmp_path, 3, "slurm.spare_nodes=1", launcher=launcher)
    job.wait_for_step(10)
    began_s = time.time()
    mended.kill("n2")
    took_s = seconds_to_go_on(job, began_s)
    why = check_goes_on(job, alone, "n2", ["n1", "n3"])
    print(f"killed slurmd, {launcher}: {took_s:.1f} s to the next step; {why}")
    assert "a probe failed" in why or "does not respond" in why


def test_without_a_spare_it_goes_on_on_fewer_nodes_when_slurm_calls_one_down(
    mended, tmp_path, alone
):
    job = submitted(mended, tmp_path, 2, "parallel.replicate=2", "parallel.shard=2")
    job.wait_for_step(10)
    began_s = time.time()
    mended.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    took_s = seconds_to_go_on(job, began_s)
    why = check_goes_on(job, alone, "n2", ["n1"])
    print(f"state=down: {took_s:.1f} s to the next step; {why}")
    assert "on 1 of 2 nodes, 2 ranks, with parallel.replicate=1" in job.text


def test_a_node_on_which_ranks_exit_at_once_is_left_out(mended, tmp_path, alone):
    sick = tmp_path / "through.sh"
    sick.write_text(
        '#!/bin/sh\n[ "$SLURMD_NODENAME" = n2 ] && [ "$3" = hpc_tune ] && exit 9\nexec "$@"\n'
    )
    sick.chmod(0o755)
    began_s = time.time()
    job = submitted(mended, tmp_path / "job", 3, "slurm.spare_nodes=1", through=sick)
    job.wait_for_step(1)
    took_s = time.time() - began_s
    why = check_goes_on(job, alone, "n2", ["n1", "n3"])
    print(f"sick node: {took_s:.1f} s from submission to the first step; {why}")
    assert "Exited with exit code 9" in why


def test_the_first_node_lost_queues_the_job_again(mended, tmp_path, alone):
    options = ["--nodes=2", "--ntasks-per-node=2"]
    job = Job(mended, tmp_path, "tiny_cpu.sh", launcher="srun", options=options)
    job.wait_for_step(10)
    assert mended.show(job.number)["BatchHost"] == "n1"
    # It stays down: Slurm 22.05 holds a job that comes back to a node it was taken from like this.
    mended.run("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    said = job.wait()
    assert (said["JobState"], said["Restarts"]) == ("COMPLETED", "1"), job.text
    assert said["BatchHost"] != "n1"
    assert "give up" not in job.text
    assert worst_gap(losses(job.run_dir), alone) < 1e-5
