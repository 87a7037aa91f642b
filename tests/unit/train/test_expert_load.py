"""experts.jsonl: what is counted between evaluations, and which experts starve."""

import json

import pytest

from hpc_tune.model.balance import Router, RouterSums
from hpc_tune.rundir.json_lines import EVENTS_FILE, EXPERTS_FILE, EventsWriter
from hpc_tune.train.metrics import (
    ExpertLoadWriter,
    describe_starving_experts,
    find_starving_experts,
)

ROUTERS = (Router("layers.1.gate", 1, 3), Router("layers.4.gate", 4, 2))


def counted(*rows):
    return RouterSums(0.0, 0.0, rows)


def lines_of(folder, name=EXPERTS_FILE):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture
def load(tmp_path):
    made = []

    def make(start=0):
        made.append(
            ExpertLoadWriter(tmp_path, start, ROUTERS, EventsWriter(tmp_path / EVENTS_FILE))
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_line_has_the_tokens_since_the_line_before(load, tmp_path):
    told = load()
    told.write()  # an evaluation before the first step
    for step in (1, 2, 3):
        told.add(step, counted([step, 0.0, 1.0], [2.0, 2.0]))
        if step == 2:
            told.write()
            told.write()
    told.close()
    layers = {"layers": [1, 4]}
    assert lines_of(tmp_path) == [
        {"step": 2, "since": 0, **layers, "tokens": [[3, 0, 2], [4, 4]]},
        {"step": 3, "since": 2, **layers, "tokens": [[3, 0, 1], [2, 2]]},
    ]


def test_a_resume_drops_the_lines_of_steps_that_it_does_again(load, tmp_path):
    told = load()
    for step in (1, 2, 3):
        told.add(step, counted([1, 1, 1], [1, 1]))
        told.write()
    told.close()
    again = load(start=2)
    again.add(3, counted([5, 5, 5], [5, 5]))
    again.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]
    assert lines_of(tmp_path)[-1]["tokens"] == [[5, 5, 5], [5, 5]]


def test_layers_whose_experts_starve_are_said_once_until_others_do(load, tmp_path, caplog):
    told, step = load(), 0
    for starved, times in (([500, 2, 500], 2), ([500, 500, 500], 1), ([500, 2, 500], 1)):
        for _ in range(times):
            step += 1
            told.add(step, counted(starved, [300, 300]))
            told.write()
    told.close()
    said = [event["message"] for event in lines_of(tmp_path, EVENTS_FILE)]
    assert [event["step"] for event in lines_of(tmp_path, EVENTS_FILE)] == [1, 4]
    assert said[0] == (
        "experts starve, with less than a hundredth of an even share of the tokens in steps 1 to "
        "1: layer 1: 1. tune.router_aux_loss spreads tokens"
    )


def test_few_tokens_starve_nobody_and_all_in_one_starves_the_others():
    assert find_starving_experts([3], [[290, 0, 0]]) == {}
    assert find_starving_experts([3], [[900, 0, 0]]) == {3: [1, 2]}
    assert find_starving_experts([3, 7], [[300, 300, 300], [0, 400, 500]]) == {7: [0]}


def test_a_long_list_is_cut_and_says_by_how_much():
    text = describe_starving_experts({layer: list(range(layer)) for layer in range(1, 12)}, 4, 9)
    assert "in steps 5 to 9: layer 1: 0; layer 2: 0, 1; " in text
    assert "; and 3 more. " in text
