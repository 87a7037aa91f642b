"""The doctor on real ranks and hosts, with real faults planted."""

import json
import os
import pty
import shlex
import subprocess
import sys
import time

import pytest

from tests.support.hosts import hosts
from tests.support.launchers import launcher
from tests.support.ranks import HANG_S, find_mpirun, mpirun, python, rank_environment, run_ranks

DOCTOR = ["-m", "hpc_tune", "doctor", "run.device=cpu"]


def test_what_a_library_prints_is_no_part_of_the_report():
    """As gloo does in torch 2.9, from C++."""
    program = """
import os, sys
from hpc_tune.probe.doctor import _redirect_stdout_to_stderr
print("report")
with _redirect_stdout_to_stderr():
    os.write(1, b"noise ")
    print("from Python")
print("goes on")
"""
    done = run_ranks([*python(), "-c", program], rank_environment(1), HANG_S)
    assert done.stdout == "report\ngoes on\n"
    assert done.stderr == "noise from Python\n"


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
    names = [one["name"] for one in told["links"]["collectives"]]
    assert names == [n for n in ("all-reduce", "all-gather", "reduce-scatter") for _ in range(2)]
    assert [rank["products"]["num_wrong"] for rank in told["ranks"]] == [0, 0]
    assert all(rank["products"]["flops_per_s"] > 1e8 for rank in told["ranks"])
    assert list(tmp_path.iterdir()) == [], "the test of the folder leaves nothing"


@pytest.mark.full
def test_one_process_alone_is_told_without_links(tmp_path):
    done = run_ranks([sys.executable, *DOCTOR, f"run.dir={tmp_path}"], rank_environment(1), HANG_S)
    assert done.returncode == 0, done.stderr
    assert "rank 0" in done.stdout
    assert "links" not in done.stdout


@pytest.mark.full
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
    done = run_ranks(shell, environment, HANG_S)
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


def mpich(of):
    """Return an MPICH's launcher and its library; skip without them, or without another MPI."""
    found = launcher(f"MPICH of {of}")
    if "Open MPI" not in mpi_of(find_mpirun()):
        pytest.skip("needs Open MPI as the other one")
    return found


def mpi_of(mpirun):
    return subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout


@pytest.mark.full
@pytest.mark.parametrize("started_by", ["Open MPI", "MPICH"])
def test_an_mpi4py_of_another_mpi_than_the_launcher_is_named(tmp_path, started_by):
    words = [*DOCTOR, f"run.dir={tmp_path}"]
    if started_by == "Open MPI":
        # Beside it lies a PMIx that mpirun itself could not use.
        library = [f"{name}={value}" for name, value in mpich("Debian").environment.items()]
        argv = [find_mpirun(), "-np", "2", "/usr/bin/env", *library, sys.executable, *words]
        loaded = "MPICH Version"
    else:  # that of PyPI finds its own libraries
        argv, loaded = mpich("PyPI").command(2, *words), "Open MPI v"
    done = run_ranks(argv, rank_environment(2), HANG_S)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "says rank 0 of 2, but MPI says rank 0 of 1: mpi4py has loaded" in done.stderr
    assert loaded in done.stderr
    assert "which is not the MPI of this launcher" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_an_mpich_that_would_end_its_ranks_within_mpi_init_is_named_before(tmp_path):
    library = mpich("PyPI").environment
    argv = [find_mpirun(), "-np", "2", sys.executable, *DOCTOR, f"run.dir={tmp_path}"]
    done = run_ranks(argv, rank_environment(2, library), HANG_S)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "says rank 0 of 2, but this library cannot start: mpi4py has loaded" in done.stderr
    assert "which is not the MPI of this launcher" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_the_right_library_for_the_same_launcher_has_no_errors(tmp_path):
    right = mpich("Debian")
    argv = right.command(2, *DOCTOR, f"run.dir={tmp_path}")
    done = run_ranks(argv, rank_environment(2, right.environment), HANG_S)
    assert done.returncode == 0, done.stderr
    assert "launcher  mpich and MPICH Version: " in done.stdout


# Both ranks tell of one GPU, as where a launcher shows each of them the same; they compute on CPUs.
DUPLICATED = """
import sys, torch
from hpc_tune.cli import main
from hpc_tune.world import bootstrap
from hpc_tune.world.device import DeviceReport

def pick(wanted, world, seen):
    place = (world.rank, world.node, world.hostname)
    return torch.device("cpu"), DeviceReport(*place, "cuda", "GPU-5e1f", ("GPU-5e1f",))

bootstrap.pick_device = pick
sys.exit(main(["doctor", *sys.argv[1:]]))
"""


@pytest.mark.full
def test_two_ranks_on_one_device_are_named(tmp_path):
    done = mpirun(2, ["-c", DUPLICATED, f"run.dir={tmp_path}"])
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.count("ranks 0, 1 on ") == 1
    assert "share one GPU (GPU-5e1f) of 1 visible" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_a_rank_with_another_version_is_named(tmp_path):
    told = tmp_path / "torch-1.0.dist-info" / "METADATA"
    told.parent.mkdir()
    told.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    rank = [sys.executable, *DOCTOR, f"run.dir={tmp_path}"]
    env = rank_environment(2)
    other = ["env", f"PYTHONPATH={tmp_path}:{env['PYTHONPATH']}", *rank]
    done = run_ranks([find_mpirun(), "-np", "1", *rank, ":", "-np", "1", *other], env, HANG_S)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ERROR  torch differs: 1.0 on " in done.stdout


@pytest.mark.full
@pytest.mark.parametrize("launched", [False, True])
def test_there_are_colours_where_a_person_looks(tmp_path, launched):
    """Open MPI shows every rank a terminal, so who looks is told by mpirun's own output."""
    argv = [sys.executable, *DOCTOR, f"run.dir={tmp_path}"]
    argv = [find_mpirun(), "-np", "2", *argv] if launched else argv
    seen = on_terminal(argv, rank_environment(2))
    assert "\033[" in seen
    assert "\033[" not in on_terminal(argv, rank_environment(2, {"NO_COLOR": "1"}))
    piped = run_ranks(argv, rank_environment(2), HANG_S).stdout
    assert "launcher  " in piped
    assert "\033[" not in piped


def on_terminal(argv, environment):
    """Run a command on a terminal of its own and return what it shows."""
    reads, writes = pty.openpty()
    process = subprocess.Popen(
        argv, env=environment, stdin=writes, stdout=writes, stderr=subprocess.DEVNULL
    )
    os.close(writes)
    shown = []
    try:
        while piece := os.read(reads, 4096):
            shown.append(piece)
    except OSError:  # so the end of a terminal shows
        pass
    os.close(reads)
    assert process.wait(HANG_S) in (0, 1)
    return b"".join(shown).decode()


@pytest.mark.soak
def test_sixteen_ranks_take_less_than_a_minute(tmp_path):
    began_s = time.monotonic()
    done = mpirun(16, [*DOCTOR, f"run.dir={tmp_path}"])
    took_s = time.monotonic() - began_s
    assert done.returncode == 0, done.stdout + done.stderr
    assert "both say 16 ranks" in done.stdout
    assert took_s < 60.0


def test_a_loopback_master_is_said_before_anyone_waits(tmp_path):
    extra = {"MASTER_ADDR": "localhost", "GROUP_WORLD_SIZE": "2"}
    done = run_ranks([sys.executable, *DOCTOR], rank_environment(1, extra), HANG_S)
    assert done.returncode == 1
    assert "each node's own address, on 2 nodes" in done.stderr
    assert "Traceback" not in done.stderr


# The doctor where the clock of rank 1 is an hour ahead.
FAST_CLOCK = """
import os, sys, time
from hpc_tune.__main__ import main
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    now = time.time
    time.time = lambda: now() + 3600
sys.exit(main())
"""


@pytest.mark.full
def test_a_slow_host_and_a_fast_clock_among_four_are_named(tmp_path):
    # The others have a rate, too, far above: busy cores would make links of 700 MB/s differ.
    with hosts(4, tmp_path, "400mbit") as made:
        if not find_mpirun().endswith("mpirun"):
            pytest.skip("written for Open MPI 5")
        slow = "root tbf rate 20mbit burst 128kb latency 50ms"
        subprocess.run(
            f"tc -n {made.names[2]} qdisc replace dev eth0 {slow}".split(),
            check=True,
            capture_output=True,
        )
        options = f"--prtemca plm_ssh_agent {made.agent} --hostfile {made.hostfile}"
        options += f" --prtemca prte_if_include {made.network} --map-by ppr:1:node -np 4"
        options += f" --mca btl_tcp_if_include {made.network} -x PYTHONPATH"
        (tmp_path / "fast_clock.py").write_text(FAST_CLOCK)
        command = [sys.executable, str(tmp_path / "fast_clock.py"), *DOCTOR[2:]]
        command += [f"run.dir={tmp_path}", "run.threads=1"]
        argv = made.on(0, find_mpirun(), *options.split(), shlex.join(command))
        done = run_ranks(argv, rank_environment(4), HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all links of node 2: " in done.stdout, done.stdout
    assert done.stdout.count("slow link") == 1, done.stdout
    assert "its clock is 1h00m ahead of the others': " in done.stdout, done.stdout
    assert done.stdout.count("its clock") == 1, done.stdout


# Rank 1 multiplies slowly, and adds 1 to a value of each product.
SLOW_AND_WRONG = """
import os, sys, time, torch
from hpc_tune.__main__ import main
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    right = torch.mm
    def mm(left, right_, out):
        time.sleep(0.3)
        right(left, right_, out=out)
        out[0, 0] += 1
    torch.mm = mm
sys.exit(main())
"""


@pytest.mark.full
def test_a_rank_that_multiplies_slowly_and_wrongly_is_named(tmp_path):
    (tmp_path / "slow_and_wrong.py").write_text(SLOW_AND_WRONG)
    argv = [str(tmp_path / "slow_and_wrong.py"), *DOCTOR[2:], "--links", "1"]
    done = mpirun(2, [*argv, f"run.dir={tmp_path}"], cold=True)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if " multiplies " in line]
    lines += [line for line in done.stdout.splitlines() if " computes wrongly" in line]
    if len(os.sched_getaffinity(0)) > 1:  # on one core the ranks are not compared
        assert "rank 1 on CPUs " in lines[0]
        assert "below the median of all 2 of its model" in lines[0]
    assert "rank 1 on CPUs " in lines[-1]
    assert "matmuls of small integers had a wrong value" in lines[-1]
    assert len(lines) <= 2, "rank 0 does what it should"
