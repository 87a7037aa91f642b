"""How a training job ends when it is asked to leave, killed, or fails: in time, and saying why."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support.ranks import descendants, find_mpirun, is_alive, rank_environment, started
from tests.support.training import events, losses, outcome, rows, train

ENDLESS = [
    "data.seq_len=64",
    "data.eval_path=null",
    "batch.global_size=4",
    "train.max_steps=100000",
    "run.tensorboard=false",
    "run.report=false",
    "run.threads=1",
    "data.path=builtin:pydocs:heldout",
]


class Job:
    """A training job on ``n`` ranks whose output is read as it comes."""

    def __init__(self, run_dir, n, *overrides):
        self.run_dir = run_dir
        argv = [find_mpirun(), "-np", str(n), sys.executable, "-m", "hpc_tune"]
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

    def wait_for_step(self, step, limit_s=90):
        until_s = time.monotonic() + limit_s
        while time.monotonic() < until_s:
            assert self.process.poll() is None, self.stderr
            if (self.run_dir / "metrics.jsonl").exists() and step in rows(self.run_dir, "loss"):
                return
            time.sleep(0.05)
        pytest.fail(f"step {step} not reached in {limit_s} s:\n{self.stderr}")

    def wait_for_text(self, text, limit_s=90):
        until_s = time.monotonic() + limit_s
        while text not in self.stderr:
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < until_s, self.stderr
            time.sleep(0.02)

    def rank_pids(self):
        """Return the ranks' processes in the order they were started."""
        pids = []
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):  # a short-lived child of theirs
                command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if command[1:3] == ["-m", "hpc_tune"]:
                    pids.append(pid)
        return sorted(pids)

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
        code, took_s = job.wait(30)
    assert code == 75, job.stderr
    assert took_s < 20
    stopped_at = outcome(tmp_path)["step"]
    assert outcome(tmp_path) == {
        "status": "stopped",
        "reason": "SIGUSR1",
        "step": stopped_at,
        "exit_code": 75,
    }
    with Job(tmp_path, 3) as job:
        job.wait_for_step(stopped_at + 2)
        (tmp_path / "STOP").touch()
        code, took_s = job.wait(30)
    assert code == 75, job.stderr
    assert took_s < 20
    assert not (tmp_path / "STOP").exists(), "it was heard; the next start must go on"
    assert [e["step"] for e in events(tmp_path, "resume")] == [stopped_at]
    assert len(losses(tmp_path)) == outcome(tmp_path)["step"] > stopped_at


def test_the_time_limit_ends_a_run_with_a_checkpoint_before_it_passes(tmp_path):
    began_s = time.monotonic()
    done = train([*ENDLESS, f"run.dir={tmp_path}", "train.time_limit=25s"], timeout=60)
    assert time.monotonic() - began_s < 25
    assert done.returncode == 75, done.stderr
    assert outcome(tmp_path)["reason"] == "time limit"
    assert list((tmp_path / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("victim", [0, 2])
def test_kill_9_of_one_rank_ends_the_job_in_seconds_and_names_it(tmp_path, victim):
    with Job(tmp_path, 4) as job:
        job.wait_for_step(2)
        pid = next(p for p in job.rank_pids() if rank_of(p) == victim)
        os.kill(pid, signal.SIGKILL)
        code, took_s = job.wait(30)
    assert code not in (0, 75)
    assert took_s < 15
    assert re.search(rf"rank {victim}\b", job.stderr), job.stderr
    assert job.stderr.count("Traceback") <= 1


@pytest.mark.parametrize("layout", ["parallel.replicate=2", "parallel.pipeline=2"])
def test_a_rank_that_answers_no_more_ends_the_job_after_the_limit(tmp_path, layout):
    with Job(tmp_path, 2, layout, "run.timeout=8") as job:
        job.wait_for_step(2)
        pid = next(p for p in job.rank_pids() if rank_of(p) == 1)
        os.kill(pid, signal.SIGSTOP)
        code = job.wait_for_end(40)
    assert code not in (0, 75)
    assert "rank 0 on" in job.stderr
    assert "another rank did not answer within run.timeout" in job.stderr


STOPS_ITSELF = """
import importlib, os, signal, sys
import torch.distributed as dist
from hpc_tune.config.load import load_config
from hpc_tune.train.run import run

place, left = sys.argv[1].split("."), 3
name = place.pop()
owner = importlib.import_module("hpc_tune.train." + place.pop(0))
for part in place:
    owner = getattr(owner, part)
real = getattr(owner, name)

def stopping(*arguments):
    global left
    left -= 1
    if left == 0 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return real(*arguments)

setattr(owner, name, stopping)
sys.exit(run(load_config(None, sys.argv[2:])))
"""


@pytest.mark.parametrize("before", ["loop._agree", "loop._worst_of_all", "saving.Saver.start"])
def test_a_rank_that_comes_to_no_small_message_ends_the_job_too(tmp_path, before):
    """Those of a step and of a save have the limit of the large ones."""
    program = tmp_path / "program.py"
    program.write_text(STOPS_ITSELF)
    job = Job(tmp_path / "run", 2, "run.timeout=5", "checkpoint.every_steps=2")
    job.argv[4:6] = [str(program), before]
    with job:
        code = job.wait_for_end(60)
    assert code not in (0, 75)
    assert "another rank did not answer within run.timeout" in job.stderr


def rank_of(pid):
    environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
    values = dict(v.split("=", 1) for v in environment if "=" in v)
    return int(values.get("OMPI_COMM_WORLD_RANK", values.get("PMI_RANK")))


def test_an_exception_on_one_rank_ends_the_job_with_its_traceback_once(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from hpc_tune.config.load import load_config\n"
        "from hpc_tune.engine.native import NativeEngine\n"
        "from hpc_tune.train.run import run\n"
        "import torch.distributed as dist\n"
        "step, real = 0, NativeEngine.train_step\n"
        "def train_step(self, *arguments):\n"
        "    global step\n"
        "    step += 1\n"
        "    if step == 3 and dist.get_rank() == 1:\n"
        "        raise KeyError('planted on rank 1')\n"
        "    return real(self, *arguments)\n"
        "NativeEngine.train_step = train_step\n"
        "sys.exit(run(load_config(None, sys.argv[1:])))\n"
    )
    job = Job(tmp_path / "run", 4)
    job.argv[4:6] = [str(program)]
    with job:
        job.wait_for_step(2)
        code, took_s = job.wait(30)
    assert code not in (0, 75)
    assert took_s < 15
    assert job.stderr.count("KeyError: 'planted on rank 1'") == 1, job.stderr
    assert job.stderr.count("Traceback") == 1, job.stderr
    assert "rank 1 on" in job.stderr
    assert outcome(tmp_path / "run")["status"] == "failed"
    assert "planted on rank 1" in outcome(tmp_path / "run")["reason"]
