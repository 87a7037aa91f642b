"""Second starts in the run directory of a job that lives, or has died."""

import json
import signal
import sys
import time

from tests.support.ranks import HANG_S, rank_environment, started
from tests.support.training import SMALL, TRAIN, outcome, rows, train


def wait_for(what):
    until_s = time.monotonic() + HANG_S
    while not what():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_a_second_job_is_refused_while_the_first_lives_and_goes_on_when_it_is_dead(tmp_path):
    run_dir = tmp_path / "run"
    words = [*SMALL, "data.path=builtin:pydocs:heldout", f"run.dir={run_dir}"]
    words += ["checkpoint.every_steps=1", "tune.method=lora"]
    argv = [sys.executable, *TRAIN, *words, "train.max_steps=100000"]
    with started(argv, rank_environment(1)) as first:
        wait_for(lambda: list(run_dir.glob("checkpoints/step-*/manifest.json")))
        owner = json.loads((run_dir / "live.json").read_text())
        assert owner["pid"] == first.pid
        before = (run_dir / "config.resolved.yaml").read_bytes()
        second = train([*words, "train.max_steps=3"])
        assert second.returncode == 2, second.stderr
        assert f"is in use by a run on host {owner['host']}, pid {first.pid}" in second.stderr
        assert "Traceback" not in second.stderr
        assert (run_dir / "config.resolved.yaml").read_bytes() == before
        assert not (run_dir / "outcome.json").exists(), "how the first ends is not told yet"
        first.send_signal(signal.SIGKILL)
        first.wait()
    steps = max(rows(run_dir, "loss")) + 3
    third = train([*words, f"train.max_steps={steps}"])
    assert third.returncode == 0, third.stderr
    assert f"pid {first.pid}" in third.stderr
    assert "has ended without a word" in third.stderr
    assert outcome(run_dir)["step"] == steps
    assert not (run_dir / "live.json").exists()


def test_a_run_that_fails_gives_its_folder_back(tmp_path):
    words = [*SMALL, f"run.dir={tmp_path / 'run'}", "data.path=/nowhere.jsonl"]
    assert train(words, n=2).returncode == 2
    assert outcome(tmp_path / "run")["status"] == "failed"
    assert not (tmp_path / "run" / "live.json").exists()
