"""What a run does when the file system refuses a checkpoint: it stops, or goes on, as asked."""

import os
import shutil
import signal
import subprocess
import time

import pytest

from hpc_tune.checkpoint.store import Store, verify_checkpoint
from tests.ranks.test_bad_input import mounted
from tests.ranks.test_train_ends import ENDLESS, Job
from tests.support.crash_points import fill
from tests.support.ranks import HANG_S
from tests.support.training import events, losses, outcome, train

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a mount of its own")
SAVES = ["checkpoint.every_steps=2", "checkpoint.keep=2"]


def remount(folder, mode):
    """Make a mount read-only (``ro``) or writable; the first waits until no file is being written.

    The folder is never idle for long, so it is tried again and again.
    """
    until_s = time.monotonic() + HANG_S
    while subprocess.run(
        ["mount", "-o", f"remount,{mode}", str(folder)], capture_output=True
    ).returncode:
        assert time.monotonic() < until_s
        time.sleep(0.01)


def delete_again_and_again(folder, is_noticed):
    """Delete the folder until that has met a save; between two saves nobody would miss it."""
    until_s = time.monotonic() + HANG_S
    while not is_noticed():
        assert time.monotonic() < until_s
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.02)


TROUBLES = {
    "full": (
        lambda folder, _: fill(folder.resolve()),
        lambda folder: folder.resolve().with_name("filler").unlink(),
        "No space left on device",
    ),
    "read-only": (
        lambda folder, _: remount(folder, "ro"),
        lambda folder: remount(folder, "rw"),
        "Read-only file system",
    ),
    "deleted": (delete_again_and_again, lambda folder: None, "No such file or directory"),
}


@pytest.fixture(
    params=[pytest.param(t, marks=() if t == "full" else pytest.mark.full) for t in TROUBLES]
)
def trouble(request, tmp_path):
    """A run directory on a tmpfs, what brings trouble to its checkpoints, and what ends it.

    Of the run that is asked what it told, the events are not on the disk that fills up: a full one
    takes a line only where the last page of their file has room.
    """
    run_dir = tmp_path / "run"
    folder = run_dir / "checkpoints"
    bring, end, said = TROUBLES[request.param]
    # Files of the run stay open for writing: only the checkpoints can become read-only.
    place = {"full": tmp_path / "disk", "read-only": folder, "deleted": run_dir}[request.param]
    place.mkdir(parents=True)
    with mounted(place, "size=64m"):
        if request.param == "full":
            run_dir.mkdir()
            for name in ("checkpoints", "tensorboard"):
                (place / name).mkdir()
                (run_dir / name).symlink_to(place / name)
            (run_dir / "metrics.jsonl").symlink_to(place / "metrics.jsonl")
        yield run_dir, lambda noticed: bring(folder, noticed), lambda: end(folder), said


def wait_for_checkpoint(run_dir, after=0):
    """Return the step of the first checkpoint after a step."""
    until_s = time.monotonic() + HANG_S
    while True:
        newer = [int(p.name[5:]) for p in Store(run_dir / "checkpoints", keep=1).step_folders()]
        if newer and newer[-1] > after:
            return newer[-1]
        assert time.monotonic() < until_s
        time.sleep(0.05)


@pytest.mark.full
def test_where_checkpoints_are_not_required_training_goes_on_and_saves_again(trouble):
    run_dir, bring, end, said = trouble
    settings = [*SAVES, "checkpoint.required=false", "tune.method=full", "run.tensorboard=true"]
    with Job(run_dir, 2, *settings) as job:
        wait_for_checkpoint(run_dir)
        bring(lambda: "training continues" in job.stderr)
        job.wait_for_text("training continues")
        end()
        step = int(job.stderr.partition("training continues")[0].rpartition("step ")[2].split()[0])
        wait_for_checkpoint(run_dir, step)
        job.process.send_signal(signal.SIGUSR1)
        code, _ = job.wait(30)
    assert code == 75, job.stderr
    assert said in job.stderr
    assert "Traceback" not in job.stderr, job.stderr
    assert any("not saved" in event["message"] for event in events(run_dir, "warning"))
    newest = Store(run_dir / "checkpoints", keep=1).latest_checkpoint()
    assert int(newest.name[5:]) == outcome(run_dir)["step"]


def test_where_they_are_the_run_ends_with_one_message_and_the_old_one_stays(trouble):
    run_dir, bring, _, said = trouble
    with Job(run_dir, 2, *SAVES, "tune.method=full", cold=False) as job:
        wait_for_checkpoint(run_dir)
        bring(lambda: job.process.poll() is not None)
        code, took_s = job.wait(30)
        left = Store(run_dir / "checkpoints", keep=1).step_folders()
        for path in left:
            verify_checkpoint(path)
    assert code == 1, job.stderr
    assert took_s < 30
    assert said in job.stderr
    assert job.stderr.count("error") == 1, job.stderr
    assert "Traceback" not in job.stderr, job.stderr
    assert left or said == "No such file or directory"


@pytest.mark.full
def test_a_run_whose_last_save_is_refused_is_not_done_and_goes_on_from_the_one_before(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    settings = [*SAVES, "checkpoint.required=false", "train.max_steps=60"]
    with mounted(run_dir, "size=64m"):
        with Job(run_dir, 1, *settings) as job:
            step = wait_for_checkpoint(run_dir)
            filler = fill(run_dir / "checkpoints")
            code, _ = job.wait(60)
        assert code == 75, job.stderr
        filler.unlink()
        newest = wait_for_checkpoint(run_dir)
        assert step <= newest < 60
        assert "stopped: the last checkpoint could not be saved. Rerun the same" in job.stderr
        assert f"command to resume from step {newest} (exit code 75" in job.stderr
        done = train([*ENDLESS, *settings, f"run.dir={run_dir}"])
        assert done.returncode == 0, done.stderr
        assert outcome(run_dir)["step"] == 60
        assert len(losses(run_dir)) == 60
