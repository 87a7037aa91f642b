"""Mixtures of sources in real runs: stopped anywhere, resumed on other numbers of ranks."""

import csv
import json
import random

import pytest

from hpc_tune.checkpoint.store import Store, read_state
from hpc_tune.data.order import phases_from_json, rows_before
from tests.support.training import SMALL, events, launch_runs, losses, rows, worst_gap

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}</s>\n{% endfor %}"
WEIGHTS = {"chats": 0.6, "questions": 0.3, "texts": 0.1}
EPOCHS = {"chats": 1, "questions": 2, "texts": 3}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Chats, questions in CSV with a template of their own, and texts of which all is learned."""
    folder, draw = tmp_path_factory.mktemp("sources"), random.Random(0)
    with (folder / "chats.jsonl").open("w") as file:
        for n in range(160):
            said = "Well, " * draw.randint(1, 6) + f"it is {n}."
            turns = [("user", f"What is {n}?"), ("assistant", said)]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    with (folder / "questions.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["ask", "say"])
        table.writerows([f"{n} + {n}?", f"{n + n}" * draw.randint(1, 9)] for n in range(90))
    (folder / "texts").mkdir()
    for n in range(30):
        (folder / "texts" / f"{n}.txt").write_text(f"Text {n}. " * draw.randint(2, 11))
    (folder / "own.jinja").write_text(TEMPLATE)
    return folder


def settings(data, name, shares, *more):
    said = {
        "chats": f"path: {data}/chats.jsonl",
        "questions": f"path: {data}/questions.csv, columns: {{ask: prompt, say: completion}}, "
        f"chat_template: {data}/own.jinja",
        "texts": f"path: {data}/texts, loss_on: all",
    }
    kind = "weight" if shares is WEIGHTS else "epochs"
    sources = ", ".join(
        f"{{{said[source]}, {kind}: {share}, max_epochs: 40}}" for source, share in shares.items()
    )
    words = [word for word in SMALL if not word.startswith("train.max_steps")]
    words += [f"data.sources=[{sources}]", "data.eval_fraction=0.1", "tune.method=lora"]
    words += ["train.eval_rows=6", "optim.lr=1e-3", f"data.cache={data}/cache"]
    return [*words, f"run.dir={data / name}", *more]


def position(run_dir):
    return read_state(Store(run_dir / "checkpoints", keep=9).step_folders()[-1])["loader"]


def cut_and_go_on(data, name, overrides, stops, sizes):
    """Stop a run after each number of steps; go on on the next number of ranks."""
    before = 0
    for stop, size in zip([*stops, None], sizes, strict=True):
        left = None if stop is None else stop - before
        job = {"overrides": overrides, "stop_after": left}
        (ended,) = launch_runs(size, [job], data)
        assert ended.code == (0 if stop is None else 75), ended.output
        before = stop or 0
    return data / name


def assert_same(whole, cut, tolerance=1e-5):
    assert worst_gap(losses(whole), losses(cut)) < tolerance
    assert rows(whole, "source_tokens") == rows(cut, "source_tokens")
    for name in ("eval_loss", "eval_losses"):
        assert rows(whole, name).keys() == rows(cut, name).keys()
    for step, each in rows(whole, "eval_losses").items():
        assert each == pytest.approx(rows(cut, "eval_losses")[step], abs=tolerance)
        mean = sum(each.values()) / len(each)
        assert rows(whole, "eval_loss")[step] == pytest.approx(mean, abs=1e-9)
    assert position(whole) == position(cut)


def test_a_mixture_is_the_same_stopped_and_resumed_on_more_ranks(data):
    one = settings(data, "one", WEIGHTS, "train.max_steps=9")
    cut = settings(data, "cut", WEIGHTS, "train.max_steps=9")
    jobs = [{"overrides": one}, {"overrides": cut, "stop_after": 4}]
    ended = launch_runs(2, jobs, data)
    assert [each.code for each in ended] == [0, 75], ended[-1].output
    assert "held-out loss" in ended[0].output
    assert "the mean of chats" in ended[0].output
    (resumed,) = launch_runs(3, [{"overrides": cut}], data)
    assert resumed.code == 0, resumed.output
    assert_same(data / "one", data / "cut")
    (start,) = events(data / "one", "start")
    reached = {source["name"]: source for source in start["mixture"]}
    consumed = rows_before(phases_from_json(position(data / "one")["phases"]), 72)
    assert {name: source["rows"] for name, source in reached.items()} == consumed
    for name, weight in WEIGHTS.items():
        mean_row = reached[name]["learned_per_pass"] / reached[name]["rows_per_pass"]
        learned = sum(source["learned_tokens"] for source in reached.values())
        assert abs(reached[name]["learned_tokens"] - weight * learned) <= 2 * mean_row


@pytest.mark.full
def test_layouts_count_and_learn_the_same(data):
    layouts = {
        "alone": ["parallel.replicate=2", "batch.micro_size=3"],
        "tensor": ["parallel.tensor=2"],
        "pipeline": ["parallel.pipeline=2", "batch.micro_size=1"],
        "zero": ["parallel.zero_stage=2"],
    }
    jobs = [
        {"overrides": settings(data, name, WEIGHTS, "train.max_steps=5", *more)}
        for name, more in layouts.items()
    ]
    ended = launch_runs(2, jobs, data)
    assert [each.code for each in ended] == [0] * 4, ended[-1].output
    for name in layouts:
        assert worst_gap(losses(data / "alone"), losses(data / name)) < 1e-4
        assert rows(data / "alone", "source_tokens") == rows(data / name, "source_tokens")


@pytest.mark.full
def test_weights_change_where_a_run_is_if_that_is_asked_for(data):
    def changed(*more):
        words = settings(data, "changed", WEIGHTS, "train.max_steps=6", "tune.rank=4", *more)
        return {"overrides": words}

    new = ["data.sources.0.weight=0.3", "data.sources.1.weight=0.6"]
    jobs = [
        changed() | {"stop_after": 3},
        changed(*new),
        changed(*new, "data.new_mixture=true") | {"stop_after": 1},
        changed(*new, "data.new_mixture=true"),
    ]
    ended = launch_runs(2, jobs, data)
    assert [each.code for each in ended] == [75, 2, 75, 0], ended[-1].output
    assert "chats weight 0.6, now weight 0.3" in ended[1].output
    assert "set data.new_mixture=true" in ended[1].output
    first, second = phases_from_json(position(data / "changed")["phases"])
    assert (first.first_row, second.first_row) == (0, 24)
    assert second.parts["chats"].rows_before == first.count_rows_before(24)["chats"]
    (said,) = events(data / "changed", "mixture")
    assert said["step"] == 3
    assert "questions weight 0.3, now weight 0.6" in said["changes"]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["weights", "epochs"])
def test_five_stops_on_four_two_and_three_ranks_change_nothing(data, kind):
    shares = {"weights": WEIGHTS, "epochs": EPOCHS}[kind]
    more = ["train.max_steps=40"] if kind == "weights" else []
    more += ["train.eval_every_steps=10", "batch.global_size=5"]
    one, cut = (settings(data, f"{kind} {n}", shares, *more) for n in ("whole", "cut"))
    (ended,) = launch_runs(1, [{"overrides": one}], data)
    assert ended.code == 0, ended.output
    num_steps = len(losses(data / f"{kind} whole"))
    stops = sorted(random.Random(kind).sample(range(1, num_steps), 5))
    print(f"{num_steps} steps, stopped after {stops}")
    cut_and_go_on(data, f"{kind} cut", cut, stops, [4, 2, 3, 4, 2, 3])
    whole = data / f"{kind} whole"
    assert_same(whole, data / f"{kind} cut")
    print("largest difference of losses", worst_gap(losses(whole), losses(data / f"{kind} cut")))
    learned = dict.fromkeys(shares, 0)
    for tokens in rows(whole, "source_tokens").values():
        learned = {name: learned[name] + tokens[name] for name in shares}
    start = events(whole, "start")[0]
    per_pass = {source["name"]: source["learned_per_pass"] for source in start["mixture"]}
    print("learned tokens", learned, "of a pass", per_pass)
    if kind == "epochs":
        assert learned == {name: EPOCHS[name] * per_pass[name] for name in EPOCHS}
    else:
        total = sum(learned.values())
        widest = 128  # a row, which has as many learned tokens at most
        assert all(abs(learned[n] - WEIGHTS[n] * total) <= 2 * widest for n in WEIGHTS), learned
