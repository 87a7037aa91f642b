"""Held-out losses that a stop has cut are made up for, and epochs that are raised lose no rows."""

import json

import pytest

from hpc_tune.checkpoint.store import Store, read_state, verify_checkpoint
from tests.support.training import SMALL, launch_runs, outcome, rows

BATCHES = 3  # of held-out data, in each evaluation
SETTINGS = [
    *SMALL,
    "data.eval_path=builtin:pydocs:heldout",
    "tune.method=lora",
    f"train.eval_rows={BATCHES}",
    "batch.micro_size=1",
    "batch.global_size=2",
    "train.max_steps=4",
    "train.eval_every_steps=2",
    "checkpoint.every_steps=2",
    "checkpoint.keep=9",
    "checkpoint.keep_best=true",
]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The folder of some runs that one launch has done: uninterrupted, cut and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    data = folder / "d.jsonl"
    docs = [{"prompt": f"Say {n}.", "completion": "a" * n} for n in range(1, 6)]
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))

    def job(name, *more, cut_after=None):
        words = [*SETTINGS, f"run.dir={folder / name}", *more]
        return {"overrides": words, "cut_after": cut_after}

    epochs = [f"data.path={data}", "data.eval_path=null", "data.packing=false"]
    epochs += ["train.max_steps=null", "train.eval_rows=null", "train.eval_every_steps=null"]
    jobs = {
        "whole": job("whole"),
        "cut at 0": job("start", cut_after=2),
        "again from 0": job("start"),
        "cut at 2": job("middle", cut_after=BATCHES + 2),
        "cut at 2 again": job("middle", cut_after=1),
        "on from 2": job("middle"),
        "cut at 4": job("end", cut_after=2 * BATCHES + 2),
        "on from 4": job("end"),
        "cut at the end": job("fewer", "train.eval_every_steps=null", cut_after=BATCHES + 2),
        "fewer steps": job("fewer", "train.eval_every_steps=null", "train.max_steps=3"),
        "one epoch": job("epochs", *epochs, "train.epochs=1"),
        "two epochs": job("epochs", *epochs, "train.epochs=2"),
        "fewer epochs": job("epochs", *epochs, "train.epochs=1.5"),
    }
    program = "tests.support.cut_evaluations"
    ended = launch_runs(1, list(jobs.values()), folder, program=program)
    return folder, dict(zip(jobs, ended, strict=True))


@pytest.mark.parametrize(
    ("run", "starts"),
    [
        ("start", ["cut at 0", "again from 0"]),
        ("middle", ["cut at 2", "cut at 2 again", "on from 2"]),
        ("end", ["cut at 4", "on from 4"]),
    ],
)
def test_an_evaluation_that_a_stop_has_cut_is_made_up_for(launched, run, starts):
    folder, ended = launched
    *stops, last = (ended[start] for start in starts)
    assert [one.code for one in (*stops, last)] == [75] * len(stops) + [0], last.output
    assert "evaluation interrupted to stop in time" in stops[0].output
    assert outcome(folder / run)["status"] == "done"
    for key in ("loss", "eval_loss"):
        assert rows(folder / run, key) == rows(folder / "whole", key), key
    assert list(rows(folder / run, "eval_loss")) == [0, 2, 4]
    assert (folder / run / "export" / "adapter").is_dir()


def test_a_run_whose_steps_are_lowered_below_what_it_did_is_measured_and_done(launched):
    folder, ended = launched
    assert [ended[name].code for name in ("cut at the end", "fewer steps")] == [75, 0]
    assert outcome(folder / "fewer")["status"] == "done"
    assert list(rows(folder / "fewer", "eval_loss")) == [0, 4]


def test_a_checkpoint_gets_the_held_out_loss_that_was_measured_late(launched):
    folder, _ = launched
    losses = rows(folder / "whole", "eval_loss")
    for run in ("whole", "middle", "end"):
        paths = Store(folder / run / "checkpoints", keep=1).step_folders()
        assert {int(p.name[-8:]) for p in paths} == {2, 4}
        for path in paths:
            verify_checkpoint(path)
            assert read_state(path)["eval_loss"] == losses[int(path.name[-8:])], path


def test_epochs_that_are_raised_after_a_short_last_step_give_each_row_as_often(launched):
    """Five rows, two a step: the third step of the first epoch has one."""
    folder, ended = launched
    assert [ended[name].code for name in ("one epoch", "two epochs", "fewer epochs")] == [0, 0, 0]
    assert list(rows(folder / "epochs", "samples_seen").values()) == [2, 4, 5, 7, 9, 10]
    assert "the run has 6 steps now and had 3" in ended["two epochs"].output
    assert "6 steps = 2.00 epochs" in ended["two epochs"].output
    assert outcome(folder / "epochs")["step"] == 6
