"""Worlds of several sizes from each launcher at hand, and what the collectives give in them."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest

from tests.support.ranks import (
    HANG_S,
    find_mpirun,
    mpirun,
    python,
    rank_environment,
    run_ranks,
    started,
    torchrun,
)

MPI = ["openmpi", "mpich", "intelmpi"]
PROGRAM = """
import json, os, sys
from hpc_tune import log
from hpc_tune.cluster.launchers import rank_hint
from hpc_tune.config.schema import RunSettings
from hpc_tune.errors import DataError, HpcTuneError
from hpc_tune.world.bootstrap import bootstrap, shutdown

log.configure_logging(rank_hint())
s = bootstrap(RunSettings())
me, n = s.world.rank, s.world.size
assert me == rank_hint()

def agreed(failing):
    error = DataError(f"bad row on {me}") if me in failing else None
    try:
        s.agree_on_error(error, "reading")
    except HpcTuneError as e:
        return [type(e).__name__, str(e), e.exit_code]
    return None

s.barrier("the test", limit_s=30)
s.barrier("the test")
told = {
    "world": str(s.world),
    "device": str(s.device),
    "roster": [[p.rank, p.node, p.pid] for p in s.roster],
    "pid": os.getpid(),
    "gathered": s.gather({"rank": me, "pad": "x" * me}),
    "from_last": s.broadcast(("from", me), src=n - 1),
    "sum": s.sum([1, me, 0.5]),
    "max": s.max([me, -me]),
    "agreed": [agreed([]), agreed([n - 1]), agreed(range(n))],
    "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    "nonce": s.nonce,
    "group": [s.cpu_group.rank(), s.cpu_group.size()],
    "threads": s.threads,
    "cpus": sorted(os.sched_getaffinity(0)),
}
import torch
assert torch.get_num_threads() == s.threads == int(os.environ["OMP_NUM_THREADS"])
sys.stdout.write(json.dumps(told) + "\\n")
shutdown(s)
"""


def told_by(done):
    """Return what each rank told, by rank."""
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(rows, key=lambda row: row["group"][0])


def check_world(rows, n, launcher):
    """Check what the ranks told against arithmetic."""
    assert len(rows) == n
    for rank, row in enumerate(rows):
        place, _, via = row["world"].partition(" via ")
        assert place == f"rank {rank}/{n} node 0/1 local {rank}/{n}"
        assert via in launcher
        assert row["group"] == [rank, n]
        assert row["roster"] == [[r, 0, rows[r]["pid"]] for r in range(n)]
        assert row["gathered"] == [{"rank": r, "pad": "x" * r} for r in range(n)]
        assert row["from_last"] == ["from", n - 1]
        assert row["sum"] == [n, n * (n - 1) / 2, n / 2]
        assert row["max"] == [n - 1, 0]
        text = f"bad row on {n - 1}"
        remote = ["RemoteError", f"rank {n - 1} failed in reading: {text}", 2]
        assert row["agreed"][0] is None
        assert row["agreed"][1] == (["DataError", text, 2] if rank == n - 1 else remote)
        assert row["agreed"][2][0] == ("DataError" if rank == 0 else "RemoteError")
        assert row["interface"] == "lo"
        assert row["nonce"] == rows[0]["nonce"]


@pytest.mark.parametrize("n", [*(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 5)), 3])
def test_mpirun_makes_a_world(n):
    done = mpirun(n, ["-c", PROGRAM], cold=True)
    check_world(told_by(done), n, MPI)
    nodes = "1 rank" if n == 1 else f"{n} ranks"
    assert done.stderr.count(f"{nodes} on 1 node, ") == 1


def test_torchrun_makes_a_world(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    check_world(told_by(torchrun(2, [str(script)])), 2, ["torchrun"])


def test_a_single_process_is_a_world_of_one():
    done = run_ranks([sys.executable, "-c", PROGRAM], rank_environment(1), HANG_S)
    rows = told_by(done)
    check_world(rows, 1, ["single"])
    assert rows[0]["cpus"] == sorted(os.sched_getaffinity(0))


def slurm_step(n):
    """Return the variables that srun would give to the ranks of one node."""
    all_ = {
        "SLURM_JOB_ID": "4242",
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_NUM_TASKS": str(n),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": str(n),
        "SLURM_STEP_NODELIST": "n1",
    }
    return [all_ | {"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(n)]


def torch_variables(n):
    """Return what deepspeed's launcher, or a loop over ssh, would set for the ranks of one node."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    all_ = {"WORLD_SIZE": str(n), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return [all_ | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(n)]


@pytest.mark.parametrize(
    ("variables", "launcher"), [(slurm_step, "slurm"), (torch_variables, "an unknown launcher")]
)
def test_variables_alone_make_a_world(variables, launcher):
    """Under srun without MPI, and under a launcher that is not known."""
    n = 3
    command = [*python(), "-c", PROGRAM]
    processes = [
        subprocess.Popen(
            command,
            env=rank_environment(n, own),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for own in variables(n)
    ]
    try:
        rows = []
        for process in processes:
            out, err = process.communicate(timeout=HANG_S)
            rows += told_by(subprocess.CompletedProcess(command, process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    check_world(sorted(rows, key=lambda row: row["group"][0]), n, [launcher])


@pytest.mark.full
def test_two_jobs_at_the_same_time_do_not_meet():
    command = [find_mpirun(), "-np", "2", sys.executable, "-c", PROGRAM]
    env = rank_environment(4)
    with started(command, env) as first, started(command, env) as second:
        outs = [(job, *job.communicate(timeout=HANG_S)) for job in (first, second)]
        told = [
            told_by(subprocess.CompletedProcess(command, job.returncode, out, err))
            for job, out, err in outs
        ]
    for rows in told:
        check_world(rows, 2, MPI)
    assert told[0][0]["nonce"] != told[1][0]["nonce"]


FAILING = """
import sys
from hpc_tune import log
from hpc_tune.cluster.launchers import rank_hint
from hpc_tune.config.schema import RunSettings
from hpc_tune.errors import HpcTuneError
from hpc_tune.world.bootstrap import bootstrap
from hpc_tune.world.failure import claim_failure_report
from hpc_tune.world.liveness import die

{before}
log.configure_logging(rank_hint())
try:
    bootstrap(RunSettings({settings}))
except HpcTuneError as error:
    text = claim_failure_report(None, error)
    if text:
        print(text, file=sys.stderr, flush=True)
    die("a rank", error.exit_code)
"""


def test_an_mpi4py_of_another_mpi_is_found_and_explained():
    """The launcher's variables say 4, MPI is initialised as a singleton."""
    find_mpirun()
    env = rank_environment(1, {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2"})
    program = FAILING.format(before="", settings="")
    done = run_ranks([*python(), "-c", program], env, HANG_S)
    assert done.returncode == 1
    assert "the launcher (openmpi) says rank 2 of 4, but MPI says rank 0 of 1" in done.stderr
    assert re.search("mpi4py has loaded '(Open MPI v|MPICH|Intel)", done.stderr)
    assert "MPI4PY_LIBMPI" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_a_missing_mpi4py_is_explained_once():
    before = "sys.modules['mpi4py'] = None"
    done = mpirun(2, ["-c", FAILING.format(before=before, settings="")])
    assert done.returncode == 1
    # Without MPI_Init Hydra does not end the others, so each says it.
    assert done.stderr.count("but mpi4py cannot be loaded") == (
        2 if "by mpich" in done.stderr else 1
    )
    assert "pip install --no-binary=mpi4py mpi4py" in done.stderr


@pytest.mark.full
def test_an_unknown_interface_ends_the_world_with_one_message():
    done = mpirun(2, ["-c", FAILING.format(before="", settings="interface='ib77'")])
    assert done.returncode == 1
    assert done.stderr.count("run.interface=ib77 does not exist on") == 1
