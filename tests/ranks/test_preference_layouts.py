"""Objectives on preferences: one loss in every layout, and what they refuse."""

import json
import random
import re

import pytest

from tests.support.ranks import python, rank_environment, run_ranks
from tests.support.training import SMALL, launch_runs, losses, many_runs, worst_gap

LAYOUTS = {
    "replicate": ["parallel.replicate=2"],
    "shard": ["parallel.shard=2"],
    "tensor": ["parallel.tensor=2"],
    "pipeline": ["parallel.pipeline=2", "batch.micro_size=1"],
    "zero": ["parallel.zero_stage=3"],
    "context": ["parallel.shard=2", "parallel.context=2"],
}
SAMPLE, OTHERS = ("shard", "tensor", "zero"), ("replicate", "pipeline", "context")
METHODS = {"dpo": "lora", "kto": "lora", "ipo": "full", "simpo": "dora", "orpo": "lora"}


def pairs(number):
    draw = random.Random(number)
    for _ in range(number):
        a, b = draw.randint(1, 50), draw.randint(1, 50)
        yield {
            "prompt": [{"role": "user", "content": f"What is {a} plus {b}?"}],
            "chosen": [{"role": "assistant", "content": f"The sum is {a + b}."}],
            "rejected": [{"role": "assistant", "content": f"Maybe {a - b}" + " or so" * (a % 4)}],
        }


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(folder, name, data, objective, *more):
    words = [*SMALL, f"data.path={data}", "data.eval_path=null", "data.eval_fraction=0.2"]
    words += ["data.seq_len=320", "batch.global_size=4", "train.max_steps=4", "tune.dropout=0"]
    words += [f"tune.objective={objective}", "optim.lr=1e-3", f"data.cache={folder / 'data'}"]
    return [*words, f"run.dir={folder / name}", *more]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The losses of each objective on one rank, with all rows of a step in one micro-batch."""
    folder = tmp_path_factory.mktemp("preferences")
    data = write(folder / "pairs.jsonl", pairs(60))
    jobs = [
        {"overrides": settings(folder, o, data, o, f"tune.method={m}", "batch.micro_size=4")}
        for o, m in METHODS.items()
    ]
    assert many_runs(1, jobs, folder) == [0] * len(jobs)
    return folder, data, {o: losses(folder / o) for o in METHODS}


def test_the_first_loss_is_that_of_equal_answers(alone):
    *_, found = alone
    assert found["dpo"][0] == pytest.approx(0.693147, abs=1e-6)
    assert found["kto"][0] == pytest.approx(0.5, abs=1e-6)
    assert found["ipo"][0] == pytest.approx(25.0, abs=1e-3)
    assert all(each[-1] < each[0] for each in found.values())


@pytest.mark.parametrize(
    ("objective", "names"),
    [
        pytest.param("dpo", SAMPLE, id="dpo, a sample"),
        pytest.param("dpo", OTHERS, id="dpo, the others", marks=pytest.mark.full),
        *(
            pytest.param(objective, tuple(LAYOUTS), id=objective, marks=pytest.mark.full)
            for objective in METHODS
            if objective != "dpo"
        ),
    ],
)
def test_layouts_and_micro_batches_change_no_loss(alone, objective, names):
    folder, data, references = alone
    method = METHODS[objective]
    layouts = {k: LAYOUTS[k] for k in names if method != "dora" or k not in ("zero", "tensor")}
    jobs = [
        {
            "overrides": settings(
                folder, f"{objective} {k}", data, objective, f"tune.method={method}", *v
            )
        }
        for k, v in layouts.items()
    ]
    assert many_runs(2, jobs, folder, timeout=600.0) == [0] * len(jobs)
    found = {
        k: worst_gap(losses(folder / f"{objective} {k}"), references[objective]) for k in layouts
    }
    assert max(found.values()) < 1e-5, found


@pytest.mark.full
def test_rows_whose_answers_have_no_mismatched_ones_are_learned_in_shards(tmp_path):
    rows = [
        {"prompt": "Why?", "completion": "because " * (n % 9 + 1), "label": n % 2 == 0}
        for n in range(60)
    ]
    data = write(tmp_path / "one-prompt.jsonl", rows)
    for name, ranks, more in (("alone", 1, []), ("shard", 2, ["parallel.shard=2"])):
        words = settings(tmp_path, name, data, "kto", f"data.cache={tmp_path / name}", *more)
        [ended] = launch_runs(ranks, [{"overrides": words}], tmp_path)
        assert ended.code == 0, ended.output
        assert re.search(r"held-out loss .* over \d+ labeled answers", ended.output)
    assert worst_gap(losses(tmp_path / "shard"), losses(tmp_path / "alone")) < 1e-5


@pytest.mark.full
def test_a_run_of_preferences_resumes_on_other_ranks(alone):
    folder, data, references = alone
    words = settings(folder, "resumed", data, "dpo", "tune.method=lora")
    jobs = [{"overrides": [*words, "parallel.shard=2"], "stop_after": 2}]
    assert many_runs(2, jobs, folder) == [75]
    assert many_runs(1, [{"overrides": words}], folder) == [0]
    assert worst_gap(losses(folder / "resumed"), references["dpo"]) < 1e-5


@pytest.mark.full
def test_a_run_that_began_with_an_adapter_goes_on_against_it_alone(tmp_path):
    data = write(tmp_path / "pairs.jsonl", pairs(30))
    answers = ({"messages": row["prompt"] + row["chosen"]} for row in pairs(30))
    first = settings(
        tmp_path, "sft", write(tmp_path / "sft.jsonl", answers), "sft", "optim.lr=1e-2"
    )
    words = settings(tmp_path, "dpo", data, "dpo")
    with_it = [*words, f"tune.init_from={tmp_path}/sft/export/adapter"]
    jobs = [{"overrides": first}, {"overrides": with_it, "stop_after": 2}]
    assert many_runs(1, jobs, tmp_path) == [0, 75]
    without, again = launch_runs(1, [{"overrides": words}, {"overrides": with_it}], tmp_path)
    assert (without.code, again.code) == (2, 0), without.output
    assert "/sft/export/adapter, but none is given now" in without.output
    whole = settings(tmp_path, "whole", data, "dpo", with_it[-1])
    assert many_runs(1, [{"overrides": whole}], tmp_path) == [0]
    assert worst_gap(losses(tmp_path / "dpo"), losses(tmp_path / "whole")) < 1e-6


@pytest.mark.parametrize(
    ("rows", "words", "said"),
    [
        (pairs(4), ["tune.objective=sft"], "tune.objective=dpo"),
        (pairs(4), ["tune.objective=dpo", "tune.gamma=1"], "tune.gamma=1 has no effect"),
        (pairs(4), ["tune.objective=dpo", "data.loss_on=all"], "data.loss_on=all"),
        (pairs(4), ["tune.objective=dpo", "tune.dropout=0.1"], "without noise"),
        ([{"prompt": "a", "completion": "b", "label": "yes"}], ["tune.objective=kto"], "label"),
        ([{"prompt": "a", "chosen": "b", "rejected": "b"}], ["tune.objective=dpo"], "same"),
        ([{"prompt": "a", "completion": "b"}], ["tune.objective=dpo"], "chosen"),
    ],
)
def test_what_is_no_preference_is_refused(tmp_path, rows, words, said):
    data = write(tmp_path / "rows.jsonl", rows)
    argv = [*python(), "-m", "hpc_tune", *settings(tmp_path, "run", data, "dpo"), *words]
    done = run_ranks(argv, rank_environment(1), 120.0)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
