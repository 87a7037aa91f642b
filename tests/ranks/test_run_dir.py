"""Second starts in the run directory of a job that lives, or has died."""

import json
import os
import shlex
import signal
import sys
import time
from contextlib import ExitStack

import pytest

from tests.support.hosts import hosts
from tests.support.ranks import HANG_S, python, rank_environment, started
from tests.support.training import SMALL, TRAIN, outcome, rows, train
from tests.support.warm import rank_behind


def wait_for(what):
    until_s = time.monotonic() + HANG_S
    while not what():
        assert time.monotonic() < until_s
        time.sleep(0.05)


def test_a_second_job_is_refused_while_the_first_lives_and_goes_on_when_it_is_dead(tmp_path):
    run_dir = tmp_path / "run"
    words = [*SMALL, "data.path=builtin:pydocs:heldout", f"run.dir={run_dir}"]
    words += ["checkpoint.every_steps=1", "tune.method=lora"]
    argv = [*python(), *TRAIN, *words, "train.max_steps=100000"]
    with started(argv, rank_environment(1)) as first:
        wait_for(lambda: list(run_dir.glob("checkpoints/step-*/manifest.json")))
        owner = json.loads((run_dir / "live.json").read_text())
        pid = owner["pid"]
        assert pid == rank_behind(first.pid)
        before = (run_dir / "config.resolved.yaml").read_bytes()
        second = train([*words, "train.max_steps=3"])
        assert second.returncode == 2, second.stderr
        assert f"is in use by a run on host {owner['host']}, pid {pid}" in second.stderr
        assert "Traceback" not in second.stderr
        assert (run_dir / "config.resolved.yaml").read_bytes() == before
        assert not (run_dir / "outcome.json").exists(), "how the first ends is not told yet"
        os.kill(pid, signal.SIGKILL)
        first.wait()
    steps = max(rows(run_dir, "loss")) + 3
    third = train([*words, f"train.max_steps={steps}"])
    assert third.returncode == 0, third.stderr
    assert f"pid {pid}" in third.stderr
    assert "ended without releasing it" in third.stderr
    assert outcome(run_dir)["step"] == steps
    assert not (run_dir / "live.json").exists()


def test_a_run_that_fails_gives_its_folder_back(tmp_path):
    words = [*SMALL, f"run.dir={tmp_path / 'run'}", "data.path=/nowhere.jsonl"]
    assert train(words, n=2).returncode == 2
    assert outcome(tmp_path / "run")["status"] == "failed"
    assert not (tmp_path / "run" / "live.json").exists()


@pytest.mark.full
def test_a_rank_that_reads_from_what_never_answers_ends_the_run_within_its_timeout(tmp_path):
    """The others wait for it where one rank may prepare data for hours."""
    os.mkfifo(tmp_path / "template.jinja")
    words = [*SMALL, "run.timeout=5", f"run.dir={tmp_path / 'run'}"]
    done = train([*words, f"data.chat_template={tmp_path / 'template.jinja'}"], n=2)
    assert done.returncode == 1, done.stderr
    said = "looking at the data: nothing was read or computed for 5 s (run.timeout)"
    assert said in done.stderr
    assert said in outcome(tmp_path / "run")["reason"]
    assert not (tmp_path / "run" / "live.json").exists()


@pytest.mark.full
def test_hosts_that_do_not_share_the_run_directory_are_refused_before_anything_is_read(tmp_path):
    """With adapters it would show at the resume: rank 0 alone saves."""
    (run_dir := tmp_path / "run").mkdir()
    train_here = f"exec {shlex.join([sys.executable, *TRAIN, *SMALL, f'run.dir={run_dir}'])}"
    with hosts(2, tmp_path) as made, ExitStack() as stack:
        address = {"MASTER_ADDR": made.names[0], "MASTER_PORT": "29871", "WORLD_SIZE": "2"}
        ranks = []
        for rank, mount in enumerate(("true", f"mount -t tmpfs none {run_dir}")):
            env = rank_environment(2, {**address, "RANK": str(rank)})
            command = made.on(rank, f"{mount} && {train_here}")
            ranks.append(stack.enter_context(started(command, env)))
        said = [rank.communicate(timeout=HANG_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2], said
    assert f"run.dir={run_dir} on {made.names[1]} is not the folder of that name on" in said[1]
    assert "Traceback" not in said[0] + said[1]
    assert "tokenizing" not in said[0]
    assert not (run_dir / "live.json").exists()
