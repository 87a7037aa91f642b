"""How many messages a step is, by who sends them: in plain steps, with a save, an evaluation."""

import json
from typing import Any

import pytest

from tests.support.training import SMALL, launch_runs

STEPS = 6
PLAIN, EVALUATES, SAVES = (1, 2), 3, 4  # the last one does both; others may end a save
LAYOUTS = {
    "replicate": ["parallel.replicate=2", "tune.method=lora"],
    "shard": ["parallel.shard=2", "tune.method=full"],
    "pipeline": ["parallel.pipeline=2", "tune.method=lora"],
    "zero2": ["parallel.zero_stage=2", "tune.method=full"],
    "zero3": ["parallel.zero_stage=3", "tune.method=full"],
}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("messages")
    small = [word for word in SMALL if not word.startswith("data.eval_path")]
    more = [
        *(f"train.max_steps={STEPS}", "optim.warmup_steps=1", "train.eval_rows=2"),
        *(f"train.eval_every_steps={EVALUATES}", f"checkpoint.every_steps={SAVES}"),
    ]
    jobs = [
        {"overrides": [*small, *more, *words, f"run.dir={folder / name}"]}
        for name, words in LAYOUTS.items()
    ]
    for ended in launch_runs(2, jobs, folder, program="tests.support.counted_steps"):
        assert ended.code == 0, ended.output
    found: dict[str, Any] = {"folder": folder}
    for name in LAYOUTS:
        steps = json.loads((folder / name / "messages.json").read_text())
        found[name] = {int(step): counts for step, counts in steps.items()}
        for step, counts in found[name].items():
            print(name, step, counts)
    return found


def control(counts):
    return {name.split()[1]: n for name, n in counts.items() if name.startswith("control")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plain_step_has_one_message_of_control(told, layout):
    """It says what is to be done next, and what the metrics of the step before still lack."""
    for step in PLAIN:
        assert list(control(told[layout][step]).values()) == [1], told[layout][step]
    one = control(told[layout][PLAIN[0]])
    for step in (EVALUATES, SAVES, STEPS):  # whose line is written before anything else
        assert {name: control(told[layout][step])[name] for name in one} == {
            name: 2 for name in one
        }, told[layout][step]


def test_the_sums_of_a_step_are_as_many_as_its_layout_asks_for(told):
    """Of gradients, of losses; of squares where ranks hold different gradients."""
    for layout in ("replicate", "shard", "pipeline"):
        for step in PLAIN:
            assert told[layout][step]["device allreduce of 2"] == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_step_has_its_line_before_what_follows_it(told, layout):
    lines = (told["folder"] / layout / "metrics.jsonl").read_text().splitlines()
    found = [(row["step"], "loss" in row) for row in map(json.loads, lines)]
    steps = [(step, True) for step in range(1, STEPS + 1)]
    assert found == [(0, False), *steps[:EVALUATES], (EVALUATES, False), *steps[3:], (STEPS, False)]
