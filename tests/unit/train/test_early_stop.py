"""When a run ends since its held-out loss has stopped falling, against transformers."""

import json
import math
import random

import pytest
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from hpc_tune.checkpoint.state import Evals, RunState
from hpc_tune.config.load import load_config
from hpc_tune.config.schema import TrainConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.rundir.json_lines import EventsWriter
from hpc_tune.train.evaluate import Evaluation, restore_evals
from hpc_tune.train.startup.describe import warn_best_weights_not_saved


def saved(held_out, *losses):
    evals = Evals()
    for number, loss in enumerate(losses):
        evals = evals.with_eval(number, loss)
    return RunState(9, 40, "", {}, {}, 1, {}, evals=vars(evals), held_out=held_out)


def test_losses_over_other_held_out_data_are_not_compared(caplog, tmp_path):
    events, before = EventsWriter(tmp_path / "events.jsonl"), saved("a", 3.0, 1.0, 2.0)
    assert restore_evals(None, "a", events) == restore_evals(saved("a"), "b", events) == Evals()
    for of, mark in ((before, "a"), (before, ""), (saved("", 3.0, 1.0, 2.0), "a")):
        assert restore_evals(of, mark, events) == Evals((0, 3.0), (2, 2.0), (1, 1.0), 1)
    assert not caplog.messages
    assert restore_evals(before, "b", events) == Evals()
    assert "up to step 2 are over other held-out data" in caplog.text
    events.close()
    (told,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (told["kind"], told["step"]) == ("held_out", 9)


def evaluation(evals, patience):
    train = TrainConfig(eval_every_steps=1, stop_after_evals=patience)
    return Evaluation(None, None, None, {}, train, 100, evals, TuneConfig())


def test_the_change_of_the_held_out_loss_has_its_steps_where_nothing_is_held_out_by_now(caplog):
    caplog.set_level("INFO", "hpc_tune")
    evals, train = Evals((0, 4.0), (16, 3.0), (16, 3.0)), TrainConfig()
    Evaluation(None, None, None, {}, train, 18, evals, TuneConfig()).log_loss_change()
    Evaluation(None, None, None, {"": list}, train, 16, evals, TuneConfig()).log_loss_change()
    change = "held-out loss 4.0000 -> 3.0000 (-25.0%)"
    assert caplog.messages == [f"{change} from step 0 to step 16", change]


def ours(losses, patience):
    """Return after how many evaluations a run ends; each is of a start of its own."""
    evals = Evals()
    for number, loss in enumerate(losses, 1):
        evals = Evals.from_json(vars(evals)).with_eval(number, loss)
        if evaluation(evals, patience).early_stop_reason:
            return number
    return None


def theirs(losses, patience, folder):
    arguments = TrainingArguments(
        str(folder),
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="loss",
        greater_is_better=False,
        use_cpu=True,
    )
    callback, state = EarlyStoppingCallback(patience), TrainerState()
    control = TrainerControl()
    for number, loss in enumerate(losses, 1):
        callback.on_evaluate(arguments, state, control, {"eval_loss": loss})
        if control.should_training_stop:
            return number
        if state.best_metric is None or loss < state.best_metric:  # as the Trainer then does
            state.best_metric = loss
    return None


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_a_run_ends_after_the_evaluation_after_which_the_trainer_ends(patience, tmp_path):
    draw, ended = random.Random(patience), []
    for _ in range(100):
        losses = [round(draw.uniform(1, 2), 1) for _ in range(12)]  # some are equal
        ended.append(ours(losses, patience))
        assert ended[-1] == theirs(losses, patience, tmp_path), losses
    assert len(set(ended)) > 3


def test_a_loss_that_is_no_number_has_not_fallen():
    assert ours([2.0, math.nan, math.inf, 1.0], 2) == 3
    assert ours([2.0, math.nan, 1.0, math.nan, 0.5], 2) is None
    assert ours([math.nan, math.nan], 2) == 2


def test_the_reason_says_what_was_best():
    evals = Evals().with_eval(0, 2.0).with_eval(10, 1.5).with_eval(20, 1.5).with_eval(30, 1.75)
    assert evaluation(evals, 3).early_stop_reason is None
    assert evaluation(evals, 2).early_stop_reason == (
        "the held-out loss has not fallen below 1.5000 of step 10 for 2 evaluations"
    )
    assert evaluation(evals, None).early_stop_reason is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["train.stop_after_evals=3"], "which are not kept: set checkpoint.keep_best=true"),
        (["train.stop_after_evals=3", "checkpoint.keep_best=true"], "set checkpoint.every_steps=5"),
        (
            ["train.stop_after_evals=3", "checkpoint.keep_best=true", "checkpoint.every_steps=2"],
            "set checkpoint.every_steps=5",
        ),
        (
            ["train.stop_after_evals=3", "checkpoint.keep_best=true", "checkpoint.every_steps=5"],
            None,
        ),
        ([], None),
    ],
)
def test_a_best_that_would_be_lost_is_told_of(settings, said):
    config = load_config(None, ["train.eval_every_steps=5", *settings])
    told = list(warn_best_weights_not_saved(config.train, config.checkpoint))
    assert [said in text for text in told] == ([] if said is None else [True])
