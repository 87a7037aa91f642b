"""How a world ends when a rank fails, dies, hangs, or loses its launcher."""

import contextlib
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from hpc_tune.world.processes import is_alive
from tests.ranks import test_world_launch
from tests.support.ranks import HANG_S, find_mpirun, mpirun, python, rank_environment, started

# The environment variable CAUSE says what rank 2 (of 4) or rank 1 (of 2) does.
PROGRAM = """
import os, sys, time
from hpc_tune.config.schema import RunSettings
from hpc_tune.errors import DataError
from hpc_tune.world.bootstrap import bootstrap
from hpc_tune.world.failure import announce_exit, claim_failure_report, find_exit_code
from hpc_tune.world.liveness import die
from hpc_tune.world.stop import StopFlag

s = bootstrap(RunSettings())
StopFlag().install()
sys.stdout.write(f"rank {s.world.rank} is pid {os.getpid()}\\n")
s.barrier("start")
cause, victim = os.environ["CAUSE"], int(os.environ["VICTIM"])
try:
    if s.world.rank == victim and cause == "raise":
        raise KeyError("no such thing")
    if s.world.rank == victim and cause == "foreseen":
        raise DataError("data.path holds no rows")
    if cause == "sleep":
        if s.world.rank == victim:
            time.sleep(600)
        s.barrier("a rank that sleeps", limit_s=2)
    while True:
        s.sum([1.0])
        time.sleep(0.01)
except Exception as error:
    if os.environ.get("UNCAUGHT"):
        raise
    told = claim_failure_report(s, error)
    if told is not None:
        text = f"{told.prefix}{told.reason}\\n{told.details or ''}"
        sys.stderr.write(text + "\\n")
        if "SAID" in os.environ:
            open(os.environ["SAID"], "a").write(text)
        announce_exit(s, find_exit_code(error))
    die(s.world.label, find_exit_code(error))
"""


def environment(n, cause, victim, **more):
    return rank_environment(n, {"CAUSE": cause, "VICTIM": str(victim), **more})


def pids_of(process, n):
    """Return the pids that ``n`` ranks print, by rank."""
    found = {}
    while len(found) < n:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        for rank, pid in re.findall(r"rank (\d+) is pid (\d+)", line):
            found[int(rank)] = int(pid)
    return found


# What a rank says of itself, and of another one.
SPEECH = re.compile(r"^error(?::| on) rank \d+ ", re.MULTILINE)
# Open MPI's own text may end with a NUL in front of it.
GONE = re.compile(r"^\0?error: rank (\d+) \(pid (\d+) on host \S+\) is gone", re.MULTILINE)


def is_hydra():
    return Path(find_mpirun()).with_name("mpiexec.hydra").exists()


def wait_until_gone(pids, limit_s):
    began_s = time.monotonic()
    while any(map(is_alive, pids)) and time.monotonic() - began_s < limit_s:
        time.sleep(0.05)
    return [pid for pid in pids if is_alive(pid)]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.full), 2])
def test_a_killed_rank_ends_the_job_in_seconds_and_is_named(victim, tmp_path):
    command = [find_mpirun(), "-np", "4", *python(), "-c", PROGRAM]
    said = tmp_path / "said"  # tells a rank that said nothing from one that was not heard
    said.touch()
    with started(command, environment(4, "none", victim, SAID=str(said))) as job:
        pids = pids_of(job, 4)
        time.sleep(0.5)
        os.kill(pids[victim], signal.SIGKILL)
        _, stderr = job.communicate(timeout=HANG_S)
        assert job.returncode != 0
        heard = f"{stderr}\nwritten by the rank that spoke:\n{said.read_text()}"
        assert set(GONE.findall(heard)) <= {(str(victim), str(pids[victim]))}, heard
        if is_hydra() and not SPEECH.search(stderr):
            # It may kill all ranks within 20 ms, before one has read its broken connection.
            assert "Traceback" not in stderr, heard
        else:
            assert len(GONE.findall(stderr)) == 1, heard
            assert stderr.count("Traceback") == 1, heard
        assert wait_until_gone(pids.values(), HANG_S) == []


@pytest.mark.parametrize("uncaught", ["", pytest.param("1", marks=pytest.mark.full)])
def test_an_exception_on_one_rank_ends_the_job_with_one_traceback(uncaught):
    env = {"CAUSE": "raise", "VICTIM": "2", "UNCAUGHT": uncaught}
    done = mpirun(4, ["-c", PROGRAM], env=env, cold=bool(uncaught))
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "rank 2 on" in done.stderr
    assert "KeyError: 'no such thing'" in done.stderr


def test_a_foreseen_error_ends_the_job_with_its_message_and_exit_code():
    done = mpirun(2, ["-c", PROGRAM], timeout=HANG_S, env={"CAUSE": "foreseen", "VICTIM": "1"})
    assert done.returncode == 2
    assert "data.path holds no rows" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_a_wait_that_is_too_long_says_who_waited_for_what():
    done = mpirun(2, ["-c", PROGRAM], timeout=HANG_S, env={"CAUSE": "sleep", "VICTIM": "1"})
    assert done.returncode != 0
    assert re.search(r"rank 0 on \S+: waited 2 s for a rank that sleeps", done.stderr)


def test_ranks_leave_when_mpirun_is_killed():
    command = [find_mpirun(), "-np", "2", sys.executable, "-c", PROGRAM]
    with started(command, environment(2, "none", 0)) as job:
        pids = pids_of(job, 2)
        os.kill(job.pid, signal.SIGKILL)
        left = wait_until_gone(pids.values(), HANG_S)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == []


@pytest.mark.full
def test_ranks_behind_a_shell_script_leave_too(tmp_path):
    script = tmp_path / "wrapper.sh"
    script.write_text('#!/bin/sh\n"$@"\nexit $?\n')
    script.chmod(0o755)
    command = [find_mpirun(), "-np", "2", str(script), sys.executable, "-c", PROGRAM]
    with started(command, environment(2, "none", 0)) as job:
        pids = pids_of(job, 2)
        os.kill(job.pid, signal.SIGKILL)
        left = wait_until_gone(pids.values(), HANG_S)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == []


# A rank that waits for its GPU: nothing tells its main thread that another one is gone.
WAITING = """
import os, sys, time
import torch
from hpc_tune.config.schema import RunSettings
from hpc_tune.world import bootstrap as start

take, groups = start._choose_device, start.init_groups
cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
start._choose_device = lambda *of: (gpu, *take(*of)[1:])
start.init_groups = lambda world, device, *more: groups(world, cpu, *more)
comm = start.bootstrap(RunSettings(device="cpu"))
comm.begin("training step 7")
sys.stdout.write(f"rank {comm.world.rank} is pid {os.getpid()}\\n")
time.sleep(600)
"""


@pytest.mark.parametrize("victim", [0, 1])
def test_ranks_of_one_node_that_wait_for_their_gpus_hear_of_a_killed_one(victim):
    """Without a launcher that ends them, as under srun."""
    command = [*python(), "-c", WAITING]
    with contextlib.ExitStack() as all_:
        jobs = [
            all_.enter_context(started(command, rank_environment(2, own)))
            for own in test_world_launch.slurm_step(2)
        ]
        pids = [pids_of(job, 1)[rank] for rank, job in enumerate(jobs)]
        os.kill(pids[victim], signal.SIGKILL)
        began_s = time.monotonic()
        _, stderr = jobs[1 - victim].communicate(timeout=HANG_S)
        assert time.monotonic() - began_s < 300  # of the sleep of 600; run.timeout is 1,800
    host = socket.gethostname()
    gone = f"rank {victim} (pid {pids[victim]} on host {host}) is gone while training step 7"
    assert gone in stderr
    assert jobs[1 - victim].returncode == 1
