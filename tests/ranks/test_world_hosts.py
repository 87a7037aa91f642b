"""Two hosts: where the ranks meet, and what happens when a rank of the other host dies."""

import contextlib
import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import test_world_failure, test_world_launch
from tests.support.hosts import add_stray, hosts
from tests.support.ranks import HANG_S, find_mpirun, rank_environment, run_ranks, started


@pytest.fixture
def two_hosts(tmp_path):
    with hosts(2, tmp_path) as made:
        yield made


def command_on(two_hosts, n, program_file):
    """Return mpirun on the first host, over both, dealing the ranks in blocks."""
    if not Path(find_mpirun()).with_name("prterun").exists():
        pytest.skip("written for Open MPI 5")
    network = two_hosts.network
    options = f"--prtemca plm_ssh_agent {two_hosts.agent} --hostfile {two_hosts.hostfile}"
    options += f" --prtemca prte_if_include {network} --mca btl_tcp_if_include {network}"
    options += f" --map-by ppr:{n // 2}:node -np {n}"
    argv = [find_mpirun(), *options.split()]
    # Daemons elsewhere do not pass the environment on by themselves.
    for name in ("PYTHONPATH", "CAUSE", "VICTIM", "PYTHONUNBUFFERED"):
        argv += ["-x", name]
    return two_hosts.on(0, *argv, sys.executable, str(program_file))


@pytest.mark.full
def test_ranks_meet_on_the_network_that_every_host_reaches(two_hosts, tmp_path):
    # A fast-looking network that leads nowhere, and container bridges of the same address.
    add_stray(two_hosts.names[0], "ib0", "10.250.1.1/24")
    for name in two_hosts.names:
        add_stray(name, "docker0", "172.17.0.1/16")
    program = tmp_path / "program.py"
    program.write_text(test_world_launch.PROGRAM)
    env = rank_environment(4, {"CAUSE": "", "VICTIM": "0"})
    done = run_ranks(command_on(two_hosts, 4, program), env, HANG_S)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(row["world"] for row in rows) == [
        f"rank {r}/4 node {r // 2}/2 local {r % 2}/2 via openmpi" for r in range(4)
    ]
    assert {row["interface"] for row in rows} == {"eth0"}
    assert rows[0]["sum"] == [4, 6, 2]
    assert "4 ranks on 2 nodes" in done.stderr


@pytest.mark.full
def test_hosts_whose_first_interface_has_no_cable_come_up(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(test_world_launch.PROGRAM)
    with hosts(2, tmp_path, dead_first=True) as made:
        names = "from hpc_tune.world.rendezvous import local_addresses; "
        names += "print(*(a.interface for a in local_addresses() if ':' not in a.ip))"
        shell = made.on(0, sys.executable, "-c", shlex.quote(names))
        assert run_ranks(shell, rank_environment(1), 30).stdout.split() == ["lo", "eno1", "eth0"]
        env = rank_environment(2, {"CAUSE": "", "VICTIM": "0"})
        done = run_ranks(command_on(made, 2, program), env, HANG_S)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(row["world"] for row in rows) == [
        f"rank {r}/2 node {r}/2 local 0/1 via openmpi" for r in range(2)
    ]
    assert {row["interface"] for row in rows} == {"eth0"}


@pytest.mark.full
def test_a_rank_killed_on_the_other_host_is_named(two_hosts, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(test_world_failure.PROGRAM)
    env = rank_environment(4, {"CAUSE": "none", "VICTIM": "3"})
    with started(command_on(two_hosts, 4, program), env) as job:
        pids = test_world_failure.pids_of(job, 4)
        time.sleep(0.5)
        os.kill(pids[3], signal.SIGKILL)
        _, stderr = job.communicate(timeout=HANG_S)
        assert job.returncode != 0
        assert re.search(rf"rank 3 \(pid {pids[3]} on host {two_hosts.names[1]}\) is gone", stderr)
        assert stderr.count("Traceback") == 1, stderr
        assert test_world_failure.wait_until_gone(pids.values(), 3) == []


def step_of(made, rank, per_host):
    """Return what srun sets for a rank of a step on two hosts."""
    n = 2 * per_host
    return rank_environment(
        n,
        {
            "SLURM_JOB_ID": "4244",
            "SLURM_STEP_ID": "1",
            "SLURM_LOCALID": str(rank % per_host),
            "SLURM_STEP_NUM_TASKS": str(n),
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_STEP_TASKS_PER_NODE": f"{per_host}(x2)",
            "SLURM_STEP_NODELIST": made.names[0][:-1] + "[0-1]",
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(rank // per_host),
            "CAUSE": "none",
            "VICTIM": "-1",
        },
    )


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_whose_ranks_all_end_is_named_by_a_survivor_elsewhere(two_hosts, lost):
    """No launcher ends the survivors here, and none of them is on that host."""
    program = f"exec {sys.executable} -c {shlex.quote(test_world_failure.PROGRAM)}"
    with contextlib.ExitStack() as open_ones:
        jobs = [
            open_ones.enter_context(
                started(two_hosts.on(r // 2, program), step_of(two_hosts, r, 2))
            )
            for r in range(4)
        ]
        pids = {}
        for job in jobs:
            pids |= test_world_failure.pids_of(job, 1)
        time.sleep(0.5)
        for rank in (2 * lost, 2 * lost + 1):
            os.kill(pids[rank], signal.SIGKILL)
        survivors = jobs[2 - 2 * lost : 4 - 2 * lost]
        said = "".join(job.communicate(timeout=HANG_S)[1] for job in survivors)
    ranks = f"{2 * lost}, {2 * lost + 1}"
    assert said.count(f"error: host {two_hosts.names[lost]} (ranks {ranks}) is gone while") == 1
    assert said.count("Traceback") == 1, said


@pytest.mark.full
def test_srun_without_mpi_meets_across_hosts(two_hosts):
    add_stray(two_hosts.names[0], "ib0", "10.250.1.1/24")
    step = {
        "SLURM_JOB_ID": "4243",
        "SLURM_STEP_ID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": two_hosts.names[0][:-1] + "[0-1]",
    }
    program = shlex.quote(test_world_launch.PROGRAM)
    command = f"exec {sys.executable} -c {program}"
    environments = [
        rank_environment(2, step | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)})
        for rank in range(2)
    ]
    with (
        started(two_hosts.on(1, command), environments[1]) as second,
        started(two_hosts.on(0, command), environments[0]) as first,
    ):
        rows = []
        for rank, process in enumerate([first, second]):
            out, err = process.communicate(timeout=HANG_S)
            assert process.returncode == 0, err
            rows += [json.loads(line) for line in out.splitlines() if line.startswith("{")]
            assert rows[rank]["world"] == f"rank {rank}/2 node {rank}/2 local 0/1 via slurm"
            assert rows[rank]["interface"] == "eth0"
