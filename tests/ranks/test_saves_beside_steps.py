"""A save beside training is there, whatever becomes of the step that goes on meanwhile."""

import os
import signal

import pytest

from hpc_tune.checkpoint.store import Store, verify_checkpoint
from tests.ranks.test_saves_refused import wait_for_checkpoint
from tests.support.ranks import (
    descendants,
    find_mpirun,
    python,
    rank_environment,
    run_ranks,
    started,
)
from tests.support.training import SMALL, outcome

SETTINGS = [*SMALL, "data.path=builtin:pydocs:heldout", "checkpoint.required=true"]
METHODS = {"lora": ["tune.method=lora"], "zero": ["tune.method=full", "parallel.zero_stage=2"]}


@pytest.mark.full
def test_a_save_is_finished_before_a_loss_that_is_no_number_ends_the_run(tmp_path):
    words = ["checkpoint.every_steps=1", "optim.lr=1e30", "optim.schedule=constant"]
    words += ["optim.warmup_steps=0", "tune.method=lora"]
    program = ["-m", "tests.support.held_saves", "0.02", *SETTINGS, *words, f"run.dir={tmp_path}"]
    done = run_ranks([*python(), *program], rank_environment(1), 300.0)
    assert done.returncode == 1, done.stderr
    [path] = Store(tmp_path / "checkpoints", keep=1).step_folders()
    verify_checkpoint(path)
    assert path.name == "step-00000001"
    assert "step 2: loss nan" in outcome(tmp_path)["reason"]
    assert "The last checkpoint is of step 1." in outcome(tmp_path)["reason"]


@pytest.mark.full
@pytest.mark.parametrize("method", METHODS)
def test_a_save_of_all_ranks_is_there_though_one_never_comes_to_the_next_boundary(tmp_path, method):
    words = [*SETTINGS, *METHODS[method], "checkpoint.every_steps=2", f"run.dir={tmp_path}"]
    program = ["-m", "tests.support.failing_rank", "sleep", "1", "step", "3", *words]
    argv = [find_mpirun(), "-np", "2", *python(), *program]
    with started(argv, rank_environment(2)) as job:
        assert wait_for_checkpoint(tmp_path) == 2
        for pid in descendants(job.pid):
            os.kill(pid, signal.SIGKILL)
        job.wait(60)
    [path] = Store(tmp_path / "checkpoints", keep=1).step_folders()
    verify_checkpoint(path)
