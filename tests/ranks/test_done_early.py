"""A run ends by itself when its held-out loss has stopped falling, also over a resume."""

import pytest

from hpc_tune.checkpoint.store import Store
from tests.support.training import SMALL, launch_runs, outcome, rows

SETTINGS = [
    *SMALL,
    "data.eval_path=builtin:pydocs:heldout",
    "tune.method=lora",
    "train.eval_rows=4",
    "optim.lr=2.0",  # so high that the loss rises after a few steps
    "optim.schedule=constant",
    "optim.warmup_steps=0",
    "optim.clip_norm=0",
    "train.max_steps=20",
    "train.eval_every_steps=1",
    "train.stop_after_evals=3",
    "checkpoint.every_steps=1",
    "checkpoint.keep=1",
    "checkpoint.keep_best=true",
]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("early")

    def job(name, *more, stop_after=None):
        words = [*SETTINGS, f"run.dir={folder / name}", *more]
        return {"overrides": words, "stop_after": stop_after}

    jobs = {
        "whole": job("whole"),
        "cut": job("cut", stop_after=2),
        "resumed": job("cut"),
        "again": job("cut"),
        "not kept": job("lost", "checkpoint.keep_best=false"),
        "few rows": job("other", stop_after=2),
        "other rows": job("other", "train.eval_rows=2"),
    }
    ended = launch_runs(2, list(jobs.values()), folder)
    return folder, dict(zip(jobs, ended, strict=True))


def test_a_run_whose_held_out_loss_rises_is_done_early_and_keeps_its_best(launched):
    folder, ended = launched
    assert ended["whole"].code == 0, ended["whole"].output
    found, losses = outcome(folder / "whole"), rows(folder / "whole", "eval_loss")
    best = min(losses, key=losses.get)
    assert found["status"] == "done"
    assert found["step"] == best + 3 == max(losses) < 20
    said = f"has not fallen below {losses[best]:.4f} of step {best} for 3 evaluations"
    assert said in found["reason"]
    assert f"stopped early: the held-out loss {said}" in ended["whole"].output
    kept = [
        int(p.name[-8:]) for p in Store(folder / "whole" / "checkpoints", keep=1).step_folders()
    ]
    assert kept == [best, best + 3]
    assert "the lowest held-out loss" in ended["whole"].output
    assert (folder / "whole" / "export" / "adapter").is_dir()


def test_what_is_counted_survives_a_stop_and_a_run_that_is_done_stays_done(launched):
    folder, ended = launched
    assert [ended[name].code for name in ("cut", "resumed", "again")] == [75, 0, 0]
    one, other = (outcome(folder / name) | {"start": None} for name in ("cut", "whole"))
    assert one == other, "of different starts"
    assert rows(folder / "cut", "eval_loss") == rows(folder / "whole", "eval_loss")


def test_a_best_that_is_not_kept_is_told_of_before_and_after(launched):
    _, ended = launched
    assert "which are not kept: set checkpoint.keep_best=true" in ended["not kept"].output
    assert "had the lowest held-out loss, are not kept" in ended["not kept"].output


def test_losses_over_other_held_out_rows_are_not_compared_after_a_resume(launched):
    folder, ended = launched
    assert [ended[name].code for name in ("few rows", "other rows")] == [75, 0]
    assert "up to step 2 are over other held-out data" in ended["other rows"].output
    losses = rows(folder / "other", "eval_loss")
    best = min((step for step in losses if step >= 2), key=losses.get)
    found = outcome(folder / "other")
    assert f"below {losses[best]:.4f} of step {best} for" in found["reason"]
    kept = [
        int(p.name[-8:]) for p in Store(folder / "other" / "checkpoints", keep=1).step_folders()
    ]
    assert {best, found["step"]} <= {*kept}
    assert f"lowest held-out loss, {losses[best]:.4f}" in ended["other rows"].output
