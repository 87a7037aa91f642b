"""Why a run over several nodes ended is what the first rank says that knows it.

Of the others, which only see that a rank of another node is gone, none writes over it, no node is
left out for it, and the job has the exit code of the cause. A real Slurm of four nodes; each rank
has the host name of its node.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass

import psutil
import pytest

from hpc_tune.rundir import outcome as outcome_file
from tests.support.jobs import Job, for_users, starts
from tests.support.slurm import slurm
from tests.support.training import train

full = pytest.mark.full


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "cluster"
    with slurm(folder, num_nodes=4, limits=False) as cluster:
        for_users(cluster)
        yield cluster


@dataclass(frozen=True)
class Ended:
    """What an operator reads of a job after it."""

    code: str
    outcome: dict
    starts: list
    inspect: str
    text: str


def on_its_node(folder, limit="true"):
    """Return a program that starts the ranks with the host name of their node."""
    file = folder / "through.sh"
    # The name is the mount's and the process's alone.
    inner = f'hostname "$SLURMD_NODENAME"; {limit}; exec "$@"'
    file.write_text(f"#!/bin/sh\nexec unshare --uts sh -c '{inner}' sh \"$@\"\n")
    file.chmod(0o755)
    return str(file)


def submitted(cluster, folder, nodes, *words, limit="true", options=()):
    folder.mkdir(exist_ok=True)
    through = on_its_node(folder, limit)
    options = [f"--nodes={nodes}", "--ntasks-per-node=1", *options]
    return Job(cluster, folder, "tiny_cpu.sh", *words, options=options, through=through)


def ended(job):
    """Wait for the job's end and return what is to be read."""
    said = job.wait()
    shown = train(["inspect", str(job.run_dir)])
    lines = [line for line in shown.stdout.splitlines() if line.startswith("outcome")]
    told = outcome_file.read_outcome(job.run_dir) or {}
    listed = starts(job.run_dir) if (job.run_dir / "starts.jsonl").exists() else []
    found = Ended(said["ExitCode"], told, listed, "".join(lines), job.text)
    print(f"job {found.code}; {found.inspect or shown.stderr}")
    print(f"outcome.json: {told.get('exit_code')}, rank {told.get('rank')}, {told.get('reason')}")
    for start in listed:
        left_out = start["left_out"]
        print(f"start: {start['status']} {start['exit_code']} {start['reason']} {left_out}")
    print(
        "\n".join(line for line in found.text.splitlines() if "rror" in line or "left out" in line)
    )
    return found


def ranks_on(node, run_dir):
    """Return the processes of the ranks of a node."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline() or [""]
            is_rank = "python" in words[0] and "train" in words and f"run.dir={run_dir}" in words
            if is_rank and process.environ().get("SLURMD_NODENAME") == node:
                found.append(process.pid)
    return found


def check(found, reason, code, job_code=None):
    """Check that everything names the same cause, and that no node is blamed for it."""
    assert reason in found.outcome["reason"]
    assert found.outcome["exit_code"] == code
    assert found.code == f"{code if job_code is None else job_code}:0"
    assert all(reason in start["reason"] for start in found.starts), found.starts
    assert {start["exit_code"] for start in found.starts} <= {code}
    assert reason in found.inspect
    assert "lost_hosts" not in found.outcome
    assert "is gone" not in found.text
    assert "left out" not in found.text


NODES = pytest.mark.parametrize("nodes", [2, pytest.param(4, marks=full)])


@NODES
def test_a_wrong_path_is_what_ended_the_run(cluster, tmp_path, nodes):
    found = ended(submitted(cluster, tmp_path / "job", nodes, "data.path=/nowhere.jsonl"))
    check(found, "there is no data at /nowhere.jsonl", 2)
    assert found.text.count("error on rank") == 1


@full
@NODES
def test_a_bad_row_is_what_ended_the_run(cluster, tmp_path, nodes):
    rows = tmp_path / "rows.jsonl"
    good = json.dumps({"messages": [{"role": "user", "content": "a"}]})
    rows.write_text(f"{good}\n" * 50 + '{"messages": [\n')
    found = ended(submitted(cluster, tmp_path / "job", nodes, f"data.path={rows}"))
    check(found, "rows.jsonl", 2)


@contextlib.contextmanager
def small_disk(folder, size):
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@full
@NODES
def test_a_disk_that_is_full_during_a_save_is_what_ended_the_run(cluster, tmp_path, nodes):
    folder = tmp_path / "job" / "run"
    with small_disk(folder, "7m"):
        words = ["checkpoint.keep=100", "checkpoint.every_steps=1"]
        job = submitted(cluster, tmp_path / "job", nodes, *words)
        found = ended(job)
    check(found, "No space left on device", 1)
    assert len(found.starts) > 1


@full
@NODES
def test_a_limit_of_the_size_of_files_is_what_ended_the_run(cluster, tmp_path, nodes):
    job = submitted(cluster, tmp_path / "job", nodes, limit="ulimit -f 64")
    check(ended(job), "File too large", 2)


@full
@NODES
def test_a_time_limit_that_ends_while_it_starts_stays_a_stop(cluster, tmp_path, nodes):
    job = submitted(cluster, tmp_path / "job", nodes, "train.time_limit=12s")
    check(ended(job), "time limit", 75, job_code=75)


def watch_from_outside(cluster, job):
    """Start a step in the job that ends by itself, with code 7, when the run has gone on."""
    script = f"until [ $(wc -l < {job.run_dir}/starts.jsonl) -ge 2 ]; do sleep 0.2; done; exit 7"
    words = ["srun", "--overlap", f"--jobid={job.number}", "-N1", "-n1", "-w", "n1", "--mem=0"]
    return subprocess.Popen([*words, "bash", "-c", script], env=cluster.environment)


def killed_in_turn(node, job, times):
    """Kill the rank of a node; yield its process, and do so again when another is there."""
    last = None
    for _ in range(times):
        until_s = time.monotonic() + 200
        while not (found := set(ranks_on(node, job.run_dir)) - {last}):
            assert time.monotonic() < until_s, job.text
            time.sleep(0.2)
        [last] = found
        os.kill(last, signal.SIGKILL)
        yield last


@full
@NODES
def test_a_rank_that_is_killed_twice_is_named_and_its_node_left_out(cluster, tmp_path, nodes):
    job = submitted(cluster, tmp_path / "job", nodes, "train.max_steps=60")
    job.wait_for_step(10)
    another = watch_from_outside(cluster, job)
    for pid in killed_in_turn("n2", job, times=2):
        print(f"killed {pid}")
        job.wait_for_step(25)  # the next start trains, too
    found = ended(job)
    first, second, *_, last = found.starts
    for start in (first, second):
        assert "host n2 (rank 1) is gone while " in start["reason"]
        assert (start["exit_code"], start["left_out"]) == (1, {})
    assert list(last["left_out"]) == ["n2"]
    assert last["status"] == "done"
    assert found.code == "0:0"
    assert another.wait() == 7, "the step of somebody else was ended with the ranks' own"
