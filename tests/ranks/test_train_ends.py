"""How a training job ends when it is asked to leave, killed, or fails: in time, and saying why."""

import contextlib
import os
import pickle
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from hpc_tune.packages import parse_release
from hpc_tune.world.processes import is_alive
from tests.support import warm
from tests.support.ranks import HANG_S, descendants, find_mpirun, python, rank_environment, started
from tests.support.training import (
    PREPARED,
    SMALL,
    STEPS,
    events,
    losses,
    many_runs,
    outcome,
    rows,
    train,
)

ENDLESS = [
    "data.seq_len=64",
    "data.eval_path=null",
    "batch.global_size=4",
    "train.max_steps=100000",
    "run.tensorboard=false",
    "run.report=false",
    "run.threads=1",
    "data.path=builtin:pydocs:heldout",
    f"data.cache={PREPARED}",
]


class Job:
    """A training job on ``n`` ranks whose output is read as it comes."""

    def __init__(self, run_dir, n, *overrides, cold=True, program=("-m", "hpc_tune")):
        self.run_dir = run_dir
        argv = [find_mpirun(), "-np", str(n), *python(cold), *program]
        self.argv = [*argv, *ENDLESS, f"run.dir={run_dir}", *overrides]
        self.environment = rank_environment(n)
        self.stderr = ""

    def __enter__(self):
        self._started = started(self.argv, self.environment)
        self.process = self._started.__enter__()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *error):
        self._started.__exit__(*error)

    def _read(self):
        for line in self.process.stderr:
            self.stderr += line

    def wait_for_step(self, step, limit_s=HANG_S):
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            assert self.process.poll() is None, self.stderr
            if (self.run_dir / "metrics.jsonl").exists() and step in rows(self.run_dir, "loss"):
                return
            time.sleep(0.05)
        pytest.fail(f"step {step} not reached in {limit_s} s:\n{self.stderr}")

    def wait_for_text(self, text, limit_s=HANG_S):
        until_s = time.monotonic() + limit_s
        while text not in self.stderr:
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < until_s, self.stderr
            time.sleep(0.02)

    def _started_ranks(self):
        """Return what was started for each rank, and the rank's process: they differ if warm."""
        pids = []
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):  # a short-lived child of theirs
                command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                behind = warm.rank_behind(pid)
                if behind != pid or command[1:3] == ["-m", "hpc_tune"]:
                    pids.append((pid, behind))
        return sorted(pids)

    def rank_pids(self):
        """Return the ranks' processes in the order they were started."""
        return [pid for _, pid in self._started_ranks()]

    def pids_of(self, rank):
        """Return the process that mpirun started for a rank, and the rank's own."""
        return next(pids for pids in self._started_ranks() if rank_of(pids[0]) == rank)

    def pid_of(self, rank):
        """Return the process of a rank."""
        return self.pids_of(rank)[1]

    def wait_for_end(self, limit_s):
        """Return the exit code of mpirun; one that does not end tells how far it came."""
        try:
            code = self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            states = [Path(f"/proc/{pid}/stat").read_text()[:60] for pid in self.rank_pids()]
            pytest.fail(f"not ended in {limit_s} s: {states}\n{self.stderr}")
        self._reader.join(5)
        return code

    def wait(self, limit_s):
        """Return (exit code, seconds until all is gone)."""
        pids, began_s = self.rank_pids(), time.monotonic()
        code = self.wait_for_end(limit_s)
        while any(map(is_alive, pids)) and time.monotonic() - began_s < limit_s:
            time.sleep(0.05)
        assert not any(map(is_alive, pids))
        return code, time.monotonic() - began_s


def test_sigusr1_to_mpirun_leaves_a_checkpoint_and_75_and_the_same_command_goes_on(tmp_path):
    with Job(tmp_path, 2) as job:
        job.wait_for_step(3)
        job.process.send_signal(signal.SIGUSR1)
        code, _ = job.wait(HANG_S)
    assert code == 75, job.stderr
    told = outcome(tmp_path)
    stopped_at = told["step"]
    assert len(told.pop("start")) == 32, "the mark of the start"
    assert told == {"status": "stopped", "reason": "SIGUSR1", "step": stopped_at, "exit_code": 75}
    with Job(tmp_path, 3, cold=False) as job:
        job.wait_for_step(stopped_at + 2)
        (tmp_path / "STOP").touch()
        code, _ = job.wait(HANG_S)
    assert code == 75, job.stderr
    assert not (tmp_path / "STOP").exists(), "it was heard; the next start must go on"
    assert [e["step"] for e in events(tmp_path, "resume")] == [stopped_at]
    assert len(losses(tmp_path)) == outcome(tmp_path)["step"] > stopped_at


@pytest.mark.full
def test_the_time_limit_ends_a_run_with_a_checkpoint_before_it_passes(tmp_path):
    began_s = time.monotonic()
    done = train([*ENDLESS, f"run.dir={tmp_path}", "train.time_limit=25s"], timeout=60)
    assert time.monotonic() - began_s < 25
    assert done.returncode == 75, done.stderr
    assert outcome(tmp_path)["reason"] == "time limit"
    assert list((tmp_path / "checkpoints").glob("step-*"))


@pytest.mark.parametrize(
    ("victim", "limit_s", "cold"),
    [(2, HANG_S, False), pytest.param(0, 15, True, marks=pytest.mark.full)],
)
def test_kill_9_of_one_rank_ends_the_job_in_seconds_and_names_it(tmp_path, victim, limit_s, cold):
    with Job(tmp_path, 4, cold=cold) as job:
        job.wait_for_step(2)
        launched, pid = job.pids_of(victim)
        os.kill(pid, signal.SIGKILL)
        code, took_s = job.wait(HANG_S)
    assert code not in (0, 75)
    assert took_s < limit_s
    said = rf"rank {victim} \(pid {pid} on host \S+\) is gone while \w+ing step \d+\. Nothing is "
    said += "saved yet. Rerun the same command to start again."
    # Open MPI's own words end with a null character.
    lines = [line.lstrip("\0 ") for line in job.stderr.splitlines()]
    lines = [line for line in lines if line.startswith("error")]
    if not lines:
        # Open MPI kills the others within a second, on a busy machine before one has spoken.
        assert re.search(rf"process rank {victim} with PID {launched}\b", job.stderr), job.stderr
        assert "Traceback" not in job.stderr, job.stderr
        return
    assert len(lines) == 1, job.stderr
    [line] = lines
    assert re.match(f"error: {said}", line), job.stderr
    assert "Traceback" not in job.stderr, job.stderr
    ended = outcome(tmp_path)
    assert line == f"error: {ended['reason']}"
    assert "frame #" not in job.stderr, "what c10d says of a store that is gone"
    assert (ended["lost_ranks"], ended["lost_hosts"]) == ([victim], [])
    if "Details: " in line:  # the thread that watches the connections has no traceback
        assert "Traceback" in Path(line.partition("Details: ")[2]).read_text()


@pytest.mark.full
@pytest.mark.parametrize("layout", ["parallel.replicate=2", "parallel.pipeline=2"])
def test_a_rank_that_answers_no_more_ends_the_job_after_the_limit(tmp_path, layout):
    with Job(tmp_path, 2, layout, "run.timeout=8") as job:
        job.wait_for_step(2)
        pid = job.pid_of(1)
        os.kill(pid, signal.SIGSTOP)
        began_s = time.monotonic()
        code = job.wait_for_end(HANG_S)
    print(f"ended {time.monotonic() - began_s:.1f} s after the stop")
    assert code not in (0, 75)
    assert f"rank 1 (pid {pid} on" in job.stderr
    assert outcome(tmp_path)["late_ranks"] == [1]


def failing(how, rank, place, step):
    """Return how ``-m hpc_tune`` is to be started for one rank to fail there."""
    return ["-m", "tests.support.failing_rank", how, str(rank), place, str(step)]


@pytest.mark.full
@pytest.mark.parametrize(("before", "step"), [("boundary", 3), ("extremes", 3), ("save", 6)])
def test_a_rank_that_comes_to_no_small_message_ends_the_job_too(tmp_path, before, step):
    """Those of a step and of a save have the limit of the large ones."""
    words = ["run.timeout=5", "checkpoint.every_steps=2"]
    with Job(tmp_path / "run", 2, *words, program=failing("stop", 1, before, step)) as job:
        code = job.wait_for_end(HANG_S)
    assert code not in (0, 75)
    assert outcome(tmp_path / "run")["late_ranks"] == [1]


LATE = {
    "stop": "does not answer: its process is stopped",
    "sleep": "has not arrived: it is at training step 3, hpc_tune/train/control.py",
}


@pytest.mark.parametrize("how", [pytest.param("stop", marks=pytest.mark.full), "sleep"])
def test_a_rank_that_does_not_come_to_a_step_is_named_before_the_backend_gives_up(tmp_path, how):
    """The other's main thread waits in C++ for a minute longer, as NCCL's would until its abort."""
    words = ["run.timeout=5", "parallel.shard=2", "tune.method=full"]
    program = failing(how, 1, "step", 3)
    with Job(tmp_path / "run", 2, *words, cold=how == "stop", program=program) as job:
        job.wait_for_step(2)
        began_s = time.monotonic()
        code = job.wait_for_end(HANG_S)
    print(f"{how}: ended {time.monotonic() - began_s:.1f} s after step 2\n{job.stderr}")
    assert code == 1
    assert "Traceback" not in job.stderr
    said = re.findall(r"^error on rank \d on \S+: (.*)", job.stderr, flags=re.MULTILINE)
    assert len(said) == 1
    assert re.match(
        r"training step 3: no progress for 5 s \(run.timeout\): rank 1 \(pid \d+ on \S+\) "
        + re.escape(LATE[how]),
        said[0],
    )
    ended = outcome(tmp_path / "run")
    assert (ended["status"], ended["exit_code"], ended["reason"]) == ("failed", 1, said[0])
    assert (ended["late_ranks"], ended["during"]) == ([1], "training step 3")
    if parse_release(torch.__version__) < (2, 11):  # it records none of gloo's collectives
        assert "trace" not in ended
        return
    waiting = pickle.loads((Path(ended["trace"]) / "nccl_trace_rank_0").read_bytes())
    assert "gloo:" in waiting["entries"][-1]["profiling_name"]


def rank_of(pid):
    environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
    values = dict(v.split("=", 1) for v in environment if "=" in v)
    return int(values.get("OMPI_COMM_WORLD_RANK", values.get("PMI_RANK")))


@pytest.mark.full
def test_an_exception_on_one_rank_ends_the_job_with_one_line_that_names_its_traceback(tmp_path):
    with Job(tmp_path / "run", 4, program=failing("raise", 1, "step", 3)) as job:
        job.wait_for_step(2)
        code, _ = job.wait(HANG_S)
    assert code not in (0, 75)
    said = "rank 1 on .* failed while training step 3: KeyError: 'planted on rank 1'. Nothing is "
    said += "saved"
    assert len(re.findall(said, job.stderr)) == 1, job.stderr
    assert "Traceback" not in job.stderr, job.stderr
    ended, file = outcome(tmp_path / "run"), tmp_path / "run" / "failures" / "rank-1.txt"
    assert (ended["during"], ended["last_checkpoint"]) == ("training step 3", 0)
    assert re.match(f"{said} yet. Details: {file}", ended["reason"])
    assert f"error: {ended['reason']}" in job.stderr
    assert "Traceback" in file.read_text()


@pytest.mark.full
def test_the_same_command_goes_on_whatever_it_began_from(tmp_path):
    """checkpoint.resume says where the first start begins, not each of them."""
    point = tmp_path / "first" / "checkpoints" / "step-00000002"
    jobs = []
    for name, resume in (("first", "auto"), ("next", str(point)), ("fresh", "none")):
        overrides = [*SMALL, f"run.dir={tmp_path / name}", f"checkpoint.resume={resume}"]
        jobs.append({"overrides": overrides, "stop_after": 2})
        jobs += [{"overrides": overrides}] if name != "first" else []
    assert many_runs(1, jobs, tmp_path) == [75, 75, 0, 75, 0]
    for name, resumed in (("next", [2, 4]), ("fresh", [2])):
        assert [e["step"] for e in events(tmp_path / name, "resume")] == resumed
        assert len(set(rows(tmp_path / name, "loss"))) == STEPS - (2 if name == "next" else 0)
