"""A signal in any phase of a job: it leaves in time, with 75, and loses nothing."""

import contextlib
import os
import signal
import time

import pytest

from hpc_tune.checkpoint.store import Store, verify_checkpoint
from tests.ranks.test_train_ends import Job
from tests.support.training import outcome

LEAVES_WITHIN_S = 20
EVALUATING = ["data.eval_path=builtin:pydocs:heldout", "batch.micro_size=1", "train.eval_rows=4000"]
# What is printed when a phase begins, and what makes it last.
PHASES = {
    "reading the data": ("tokenizing", ["data.path=builtin:pydocs", "data.cache=null"]),
    "loading": ("micro-batches of", []),
    "evaluating": ("step 0: evaluating", EVALUATING),
    "compiling": ("compiling one decoder block", ["train.compile=true"]),
    "training": ("step 1/", []),
    "saving": ("step 1/", ["checkpoint.every_steps=1"]),
}
# Open MPI's mpirun hands the first two on. It takes SIGTERM and SIGINT for itself, and gives the
# ranks half a second; these go to the ranks, as Slurm sends them.
SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2, signal.SIGINT)
BY_MPIRUN = (signal.SIGUSR1, signal.SIGUSR2)


def leave(run_dir, phase, number, background=True):
    """Send the signal when the phase begins; return how long the job took to be gone."""
    text, overrides = PHASES[phase]
    overrides = [*overrides, f"checkpoint.background={background}"]
    with Job(run_dir, 4, *overrides) as job:
        job.wait_for_text(text)
        for pid in [job.process.pid] if number in BY_MPIRUN else job.rank_pids():
            os.kill(pid, number)
        code, took_s = job.wait(60)
    assert code == 75, job.stderr
    assert outcome(run_dir)["reason"] == number.name
    for path in Store(run_dir / "checkpoints", keep=1).step_folders():
        verify_checkpoint(path)
    assert not list(run_dir.glob("checkpoints/*.tmp"))
    return took_s


@pytest.mark.full
@pytest.mark.parametrize(
    ("phase", "number"),
    [("compiling", signal.SIGUSR1), ("evaluating", signal.SIGTERM), ("saving", signal.SIGINT)],
)
def test_a_signal_in_a_phase_ends_the_job_in_time(tmp_path, phase, number):
    assert leave(tmp_path, phase, number) < LEAVES_WITHIN_S


@pytest.mark.full
def test_signals_while_a_run_ends_change_nothing_about_how_it_ended(tmp_path):
    with Job(tmp_path, 1, "train.max_steps=2", "tune.method=lora", "run.report=true") as job:
        job.wait_for_text("adapter exported")
        for number in (signal.SIGUSR1, signal.SIGTERM):
            for pid in job.rank_pids():
                os.kill(pid, number)
        job.wait_for_text("done after 2 steps")
        while pids := job.rank_pids():  # until it is gone
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
            time.sleep(0.01)
        code, _ = job.wait(60)
    assert code == 0, job.stderr
    assert outcome(tmp_path)["status"] == "done"
    assert (tmp_path / "report.html").is_file()


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("phase", list(PHASES))
def test_each_signal_in_each_phase_again_and_again(tmp_path, phase):
    took_s = []
    for number in range(12):
        began_s = time.monotonic()
        background, which = number % 8 < 4, SIGNALS[number % len(SIGNALS)]
        took_s.append(leave(tmp_path / str(number), phase, which, background))
        assert time.monotonic() - began_s < 120
    print(f"{phase}: left after {min(took_s):.1f} to {max(took_s):.1f} s")
    assert max(took_s) < LEAVES_WITHIN_S
