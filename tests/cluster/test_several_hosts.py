"""Training over several hosts: what each rank finds, going on on others, and hosts that are lost.

The hosts are namespaces of this machine, with addresses and names of their own.
"""

import json
import os
import shlex
import signal
import sys
import time

import psutil
import pytest

from hpc_tune.world.processes import is_alive
from tests.ranks.test_train_ends import ENDLESS, Job
from tests.support.hosts import hosts
from tests.support.launchers import ACROSS, across
from tests.support.ranks import HANG_S, rank_environment, run_ranks
from tests.support.training import events, losses, outcome, rows, train, worlds_in, worst_gap

OPEN_MPI = "Open MPI 5 of PyPI"
STEPS = 8
SETTINGS = [
    *ENDLESS,
    f"train.max_steps={STEPS}",
    "batch.global_size=8",
    # A run that goes on for longer than it was to has the same rates then.
    "optim.schedule=constant",
    "run.device=cpu",
    # All hosts are one machine.
    "memory.governor=off",
]
ENDS_WITHIN_S = 30
soak = pytest.mark.soak

# As python -m hpc_tune supervise, which gives mpirun a minute after its ranks have exited.
SUPERVISE = """
import sys
from hpc_tune import supervise
supervise._LINGER_S = 5.0
from hpc_tune.cli import main
sys.exit(main(["supervise", "--launch", *sys.argv[1:]]))
"""


class JobAcross(Job):
    """An endless training job over hosts, of which some are cut off."""

    def __init__(self, launcher, num_ranks, run_dir, *words):
        super().__init__(run_dir, num_ranks, "memory.governor=off", *words)
        self.argv = launcher.command(num_ranks, *self.argv[self.argv.index("-m") :])
        self.environment |= launcher.environment

    def pids(self, num_ranks):
        """Return the ranks' processes, by rank."""
        assert len(self.rank_pids()) == num_ranks
        return {rank: self.pid_of(rank) for rank in range(num_ranks)}


def supervised(name, made, num_hosts, run_dir, *words):
    """Return a job of one rank on each host, under a supervise on the first."""
    launcher = across(name, made, range(num_hosts), 1)
    before = launcher.command(num_hosts)
    launch = shlex.join(before[before.index(made.names[0]) + 1 : -1])
    often = ["run.host_timeout=4", "checkpoint.every_steps=2"]
    job = JobAcross(launcher, num_hosts, run_dir, *often, *words)
    arguments = job.argv[job.argv.index("hpc_tune") + 1 :]
    job.argv = made.on(0, sys.executable, "-c", shlex.quote(SUPERVISE), shlex.quote(launch))
    job.argv += arguments
    return job


def seconds_until_gone(pids):
    """Return by rank how long its process lived on."""
    began_s, took_s = time.monotonic(), {}
    while len(took_s) < len(pids):
        now_s = time.monotonic() - began_s
        assert now_s < HANG_S, f"{sorted(set(pids) - set(took_s))} live on"
        gone = [rank for rank, pid in pids.items() if rank not in took_s and not is_alive(pid)]
        took_s |= dict.fromkeys(gone, now_s)
        time.sleep(0.05)
    return took_s


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of one process."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    done = train([*SETTINGS, f"run.dir={run_dir}"])
    assert done.returncode == 0, done.stderr
    return losses(run_dir)


def train_across(launcher, num_ranks, run_dir, *words):
    """Train to the end; return the node that each rank found itself on, by rank."""
    program = ("-m", "tests.support.train_and_print_world")
    argv = launcher.command(num_ranks, *program, *SETTINGS, *words)
    environment = rank_environment(num_ranks, launcher.environment)
    done = run_ranks([*argv, f"run.dir={run_dir}"], environment, HANG_S)
    assert done.returncode == 0, done.stderr
    return [world["node"] for world in worlds_in(done.stdout)]


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name if name == OPEN_MPI else pytest.param(name, marks=soak) for name in ACROSS]
)
def test_a_run_goes_on_on_another_number_of_hosts(tmp_path, alone, name):
    """The first steps on two hosts, the others on four, of which another one has rank 0."""
    run_dir = tmp_path / "run"
    with hosts(4, tmp_path) as made:
        launcher = across(name, made, [0, 1], 2)
        assert train_across(launcher, 4, run_dir, "train.max_steps=4") == [0, 0, 1, 1]
        launcher = across(name, made, [3, 1, 2, 0], 1)
        assert train_across(launcher, 4, run_dir) == [0, 1, 2, 3]
    assert [event["step"] for event in events(run_dir, "resume")] == [4]
    assert worst_gap(losses(run_dir), alone) < 1e-5


@pytest.mark.full
def test_a_host_that_is_cut_off_ends_every_rank_and_is_named(tmp_path):
    cut_off(tmp_path, 2, 2, 1, OPEN_MPI, timeout_s=4)


@pytest.mark.full
def test_by_default_too_a_host_that_is_cut_off_ends_every_rank_in_half_a_minute(tmp_path):
    assert cut_off(tmp_path, 2, 2, 1, OPEN_MPI) < ENDS_WITHIN_S


@soak
@pytest.mark.parametrize("name", ACROSS)
@pytest.mark.parametrize(
    ("num_hosts", "per_host", "lost"), [(2, 2, 0), (2, 2, 1), (4, 1, 0), (4, 1, 3)]
)
def test_a_host_that_is_cut_off_ends_every_rank_in_half_a_minute(
    tmp_path, num_hosts, per_host, lost, name
):
    assert cut_off(tmp_path, num_hosts, per_host, lost, name) < ENDS_WITHIN_S


def cut_off(tmp_path, num_hosts, per_host, lost, name, timeout_s=20):
    """Cut off one host; return the seconds until all is gone. ``timeout_s``: run.host_timeout.

    The ranks are in a step, of which most is waiting for messages.
    """
    num_ranks, run_dir = num_hosts * per_host, tmp_path / "run"
    with hosts(num_hosts, tmp_path) as made:
        launcher = across(name, made, range(num_hosts), per_host)
        words = [f"run.host_timeout={timeout_s}"] if timeout_s != 20 else []  # the default
        with JobAcross(launcher, num_ranks, run_dir, *words) as job:
            job.wait_for_step(3)
            pids = job.pids(num_ranks)
            made.cut(lost)
            took_s = seconds_until_gone(pids)
            # mpirun may wait for the lost host's daemon for ever.
            seen = min(took_s.values()), max(took_s.values()), job.process.poll()
    print(f"{name}, host {lost} of {num_hosts}: ranks gone after {seen[0]:.1f} to {seen[1]:.1f} s")
    told = outcome(run_dir)
    assert (told["status"], told["exit_code"]) == ("failed", 1)
    # From the other side of a cut, a host's neighbors are the lost ones.
    others = made.names if lost == 0 else [made.names[lost], made.names[0]]
    assert any(f"host {host} (rank" in told["reason"] for host in others), told
    assert f"has not answered in {timeout_s} s (run.host_timeout)" in job.stderr, job.stderr
    assert "Traceback" not in job.stderr, job.stderr
    return seen[1]


@pytest.mark.full
def test_a_rank_that_is_stopped_is_no_lost_host_and_supervise_outlives_a_lost_one(tmp_path):
    """mpirun waits for the daemon of a host that is gone; supervise ends it, and starts again."""
    run_dir = tmp_path / "run"
    with hosts(2, tmp_path) as made, supervised(OPEN_MPI, made, 2, run_dir) as job:
        job.wait_for_step(3)
        pids = job.pids(2)
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(8)
        assert all(map(is_alive, pids.values())), job.stderr
        os.kill(pids[1], signal.SIGCONT)
        job.wait_for_step(max(rows(run_dir, "loss")) + 2)
        made.cut(1)
        took_s = seconds_until_gone(pids)
        job.wait_for_text("its ranks have exited", 20)
        made.mend(1)
        job.wait_for_text("resumed from", 60)
        (run_dir / "STOP").touch()
        job.wait_for_end(60)
    print(f"run.host_timeout=4: ranks gone after {max(took_s.values()):.1f} s")
    assert max(took_s.values()) < 4 + 6 + 2
    starts = [json.loads(line) for line in (run_dir / "starts.jsonl").read_text().splitlines()]
    # It may have begun once more before the host was there again.
    assert starts[0]["status"] == "failed"
    assert "has not answered in 4 s" in starts[0]["reason"]
    assert starts[-1]["status"] == "stopped", job.stderr
    assert starts[-1]["from_step"] == starts[0]["to_step"] >= 2


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name if name == OPEN_MPI else pytest.param(name, marks=soak) for name in ACROSS]
)
def test_a_lost_host_is_left_out_and_the_others_go_on_with_the_same_losses(tmp_path, name):
    run_dir, words = tmp_path / "run", ["parallel.replicate=3", "optim.schedule=constant"]
    with hosts(3, tmp_path) as made, supervised(name, made, 3, run_dir, *words) as job:
        job.wait_for_step(5)
        began_s = time.monotonic()
        made.cut(1)
        job.wait_for_text("resumed from", 120)
        step = events(run_dir, "resume")[-1]["step"] + 1
        job.wait_for_step(step + 4)
        print(f"{name}: {time.monotonic() - began_s:.1f} s until step {step}")
        (run_dir / "STOP").touch()
        job.wait_for_end(60)
    first, last = (json.loads(line) for line in (run_dir / "starts.jsonl").read_text().splitlines())
    assert (first["status"], first["nodes"]) == ("failed", list(made.names))
    assert last["nodes"] == [made.names[0], made.names[2]]
    assert list(last["left_out"]) == [made.names[1]]
    assert "a probe" in last["left_out"][made.names[1]]
    assert "on 2 of 3 nodes, 2 ranks, with parallel.replicate=2" in job.stderr
    # The losses are those of one process that nothing happened to.
    undisturbed = tmp_path / "undisturbed"
    steps = [f"train.max_steps={outcome(run_dir)['step']}", f"run.dir={undisturbed}"]
    done = train([*ENDLESS, "memory.governor=off", "optim.schedule=constant", *steps])
    assert done.returncode == 0, done.stderr
    assert worst_gap(losses(run_dir), losses(undisturbed)) < 1e-5


@pytest.mark.full
def test_ranks_whose_supervise_is_killed_save_though_nobody_reads_what_they_say(tmp_path):
    run_dir = tmp_path / "run"
    with hosts(2, tmp_path) as made, supervised(OPEN_MPI, made, 2, run_dir) as job:
        job.wait_for_step(5)
        [pid] = [
            process.pid
            for process in psutil.Process(job.process.pid).children(recursive=True)
            if process.cmdline()[1:3] == ["-c", SUPERVISE]
        ]
        os.kill(pid, signal.SIGKILL)
        until_s = time.monotonic() + 60
        while not (run_dir / "outcome.json").exists():
            assert time.monotonic() < until_s, job.stderr
            time.sleep(0.1)
    assert outcome(run_dir)["reason"] == "SIGUSR1"
    saved = outcome(run_dir)["step"]
    assert (run_dir / "checkpoints" / f"step-{saved:08d}").is_dir()


@pytest.mark.full
def test_two_jobs_share_two_hosts_at_the_same_time(tmp_path, alone):
    with hosts(2, tmp_path) as made:
        launcher = across(OPEN_MPI, made, [0, 1], 1)
        jobs = [JobAcross(launcher, 2, tmp_path / name, *SETTINGS) for name in ("one", "other")]
        with jobs[0], jobs[1]:
            assert [job.wait_for_end(120) for job in jobs] == [0, 0]
    for job in jobs:
        assert worst_gap(losses(job.run_dir), alone) < 1e-5
