"""The doctor on real ranks and hosts, with real faults planted."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from tests.support.hosts import hosts
from tests.support.ranks import find_mpirun, mpirun, rank_environment, run_ranks

DOCTOR = ["-m", "hpc_tune", "doctor", "run.device=cpu"]


def test_two_good_ranks_have_a_link_and_no_errors(tmp_path):
    done = mpirun(2, [*DOCTOR, "--json", f"run.dir={tmp_path}"])
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    assert not [one for one in told["findings"] if one["level"] == "error"]
    [pair] = told["links"]["pairs"]
    assert pair["ranks"] == [0, 1]
    assert 1e-6 < pair["latency_s"] < 0.1
    assert 1e7 < pair["bytes_per_s"] < 1e12
    assert {one["name"] for one in told["links"]["collectives"]} == {"all-reduce", "all-gather"}
    assert list(tmp_path.iterdir()) == [], "the test of the folder leaves nothing"


def test_one_process_alone_is_told_without_links(tmp_path):
    done = run_ranks([sys.executable, *DOCTOR, f"run.dir={tmp_path}"], rank_environment(1), 60)
    assert done.returncode == 0, done.stderr
    assert "rank 0" in done.stdout
    assert "links" not in done.stdout


def test_faults_of_a_node_are_found(tmp_path):
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"]).returncode:
        pytest.skip("mounts need root")
    cache = tmp_path / "cache"
    cache.mkdir()
    faults = (
        f"mount --bind {cache} {cache} && mount -o remount,ro,bind {cache} && "
        "mount -t tmpfs -o size=16m tmpfs /dev/shm && head -c 14M /dev/zero > /dev/shm/left && "
        "ulimit -l 64 && ulimit -n 200 && "
    )
    argv = [find_mpirun(), "-np", "2", "--bind-to", "none", "taskset", "-c", "0", sys.executable]
    argv += [*DOCTOR, f"run.dir={tmp_path}", f"data.cache={cache}"]
    # Open MPI itself would fail at the full folder.
    environment = rank_environment(2, {"OMPI_MCA_btl": "self,tcp"})
    shell = ["unshare", "--mount", "sh", "-c", faults + shlex.join(argv)]
    done = run_ranks(shell, environment, 120)
    assert done.returncode not in (0, 2), done.stdout + done.stderr
    for words in (
        f"data.cache {cache} on ",
        "cannot be written: Read-only file system",
        "/dev/shm has 2.00 MiB of 16.0 MiB free, 2 ranks need",
        "a process may lock 64.0 KiB of memory",
        "a process may open 200 files",
        "pinned all 2 ranks of ",
    ):
        assert words in done.stdout, done.stdout + done.stderr


def test_a_loopback_master_is_said_before_anyone_waits(tmp_path):
    extra = {"MASTER_ADDR": "localhost", "GROUP_WORLD_SIZE": "2"}
    done = run_ranks([sys.executable, *DOCTOR], rank_environment(1, extra), 60)
    assert done.returncode == 1
    assert "each node's own address, on 2 nodes" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_slow_host_among_four_is_named(tmp_path):
    with hosts(4, tmp_path) as made:
        if not find_mpirun().endswith("mpirun"):
            pytest.skip("written for Open MPI 5")
        slow = "root tbf rate 20mbit burst 128kb latency 50ms"
        subprocess.run(
            f"tc -n {made.names[2]} qdisc add dev eth0 {slow}".split(),
            check=True,
            capture_output=True,
        )
        options = f"--prtemca plm_ssh_agent {made.agent} --hostfile {made.hostfile}"
        options += f" --prtemca prte_if_include {made.network} --map-by ppr:1:node -np 4"
        options += f" --mca btl_tcp_if_include {made.network} -x PYTHONPATH"
        command = [sys.executable, *DOCTOR, f"run.dir={tmp_path}", "run.threads=1"]
        argv = made.on(0, find_mpirun(), *options.split(), shlex.join(command))
        done = run_ranks(argv, rank_environment(4), 120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all links of node 2: " in done.stdout, done.stdout
    assert done.stdout.count("slow link") == 1, done.stdout
