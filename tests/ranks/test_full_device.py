"""A step that runs out of a device's memory on one rank ends nothing, or all ranks at once."""

import json

import pytest

from hpc_tune.errors import EXIT_DONE, EXIT_RESUMABLE
from tests.support.training import SMALL, events, launch_runs, losses, outcome, rows, worst_gap

SETTINGS = [
    *SMALL,
    "data.path=builtin:pydocs:heldout",
    "train.max_steps=4",
    "batch.micro_size=4",
    "tune.method=lora",
    "tune.dropout=0.1",
    "checkpoint.every_steps=2",
]
PROGRAM = "tests.support.full_device"


def jobs_of(folder, layout, *ways):
    common = [*SETTINGS, f"parallel.{layout}"]
    return [
        {"overrides": [*common, f"run.dir={folder / layout / name}"], "where": where}
        for name, where in ways
    ]


def done_in(run_dir):
    return [event["action"] for event in events(run_dir, "governor") if "action" in event]


@pytest.mark.full
def test_ranks_that_work_each_for_itself_run_the_step_again(tmp_path):
    ways = [("calm", None), ("forward", "forward"), ("backward", "backward")]
    ended = launch_runs(2, jobs_of(tmp_path, "replicate=2", *ways), tmp_path, program=PROGRAM)
    assert [one.code for one in ended] == [EXIT_DONE] * 3, "".join(one.output for one in ended)
    calm = tmp_path / "replicate=2" / "calm"
    for name in ("forward", "backward"):
        run_dir = calm.with_name(name)
        assert done_in(run_dir) == ["split_micro_batches"]
        [told] = [event for event in events(run_dir, "governor") if "action" in event]
        assert told["rank"] == 1
        assert (
            "CUDA out of memory. Tried to allocate 2.00 GiB: micro-batches of 2" in told["message"]
        )
        gap = worst_gap(losses(run_dir), losses(calm))
        print(f"{name}: {gap:.1e}")
        assert gap < 1e-5


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", ["shard=2", "pipeline=2", "tensor=2", "zero_stage=2", "zero_stage=3"]
)
def test_with_messages_within_a_pass_all_stop_and_the_next_start_is_one_rung_lower(
    tmp_path, layout
):
    where = "zero" if "zero" in layout else "forward"
    ways = [("calm", None), *[("full", where)] * 2]
    calm, first, second = launch_runs(
        2, jobs_of(tmp_path, layout, *ways), tmp_path, program=PROGRAM
    )
    codes = [calm.code, first.code, second.code]
    assert codes == [EXIT_DONE, EXIT_RESUMABLE, EXIT_DONE], (first.output, second.output)
    assert "The next start uses smaller micro-batches (split_micro_batches)" in first.output
    run_dir = tmp_path / layout / "full"
    stop = events(run_dir, "stop")[0]
    assert stop["rank"] == 1
    assert stop["reason"].startswith("device memory of rank 1 on ")
    assert "actions of the last run stay in effect: split_micro_batches\n" in second.output
    assert outcome(run_dir)["status"] == "done"
    assert worst_gap(losses(run_dir), losses(tmp_path / layout / "calm")) < 1e-5


# Two micro-batches a rank and step, two held-out ones. kto's mismatched answers come first.
PLACES = {
    "sft": ("step 1", "step 2", "evaluation 1"),
    "dpo": ("step 1", "step 2", "evaluation 1"),
    "kto": ("step 1", "step 2", "step 3", "step 4", "evaluation 1", "evaluation 2"),
}


def rows_of(objective):
    for n in range(40):
        pair = {"chosen": "yes " * (n + 1), "rejected": "no"}
        answer = {"sft": {"completion": f"is {n}"}, "dpo": pair}
        labeled = {"completion": f"is {n}", "label": n % 3 == 0}
        yield {"prompt": f"what {n}", **answer.get(objective, labeled)}


def objective_jobs(folder, objective, n, layout, chosen):
    """A calm run, and one for each place at which the last rank runs out; each again if it left."""
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_of(objective)))
    words = [*SETTINGS, *layout, f"tune.objective={objective}", f"data.path={data}"]
    words += ["data.eval_fraction=0.2", "train.eval_every_steps=2", "batch.micro_size=2"]
    words += [f"batch.global_size={4 * n}", f"data.cache={folder / 'data'}", "tune.dropout=0"]
    words += ["optim.lr=1e-3", "data.packing=false", "data.seq_len=192"]
    places = [None, *(place for place in chosen for _ in range(2))]
    return [
        {
            "overrides": [*words, f"run.dir={folder / (where or 'calm')}"],
            "where": where if number % 2 else None,
            "ranks": n,
        }
        for number, where in enumerate(places)
    ]


def objective_cases():
    layouts = {1: [""], 2: ["replicate=2", "shard=2", "tensor=2", "pipeline=2"]}
    for objective in PLACES:
        for n, found in layouts.items():
            for layout in found:
                words = (f"parallel.{layout}",) if layout else ()
                name, case = f"{objective} {layout or 'alone'}", (objective, n, words)
                if name == "kto replicate=2":
                    yield pytest.param(*case, ("step 1",), id="a sample")
                yield pytest.param(*case, PLACES[objective], marks=pytest.mark.full, id=name)


@pytest.mark.parametrize(("objective", "n", "layout", "places"), [*objective_cases()])
def test_wherever_a_step_runs_out_it_is_repeated_or_all_stop_and_the_losses_are_the_same(
    tmp_path, objective, n, layout, places
):
    jobs = objective_jobs(tmp_path, objective, n, layout, places)
    calm, *ended = launch_runs(n, jobs, tmp_path, program=PROGRAM)
    assert calm.code == EXIT_DONE, calm.output
    repeats = layout in ((), ("parallel.replicate=2",))
    for number, place in enumerate(places):
        first, second = ended[2 * number : 2 * number + 2]
        goes_on = repeats and place.startswith("step")
        assert first.code == (EXIT_DONE if goes_on else EXIT_RESUMABLE), (place, first.output)
        assert second.code == EXIT_DONE, (place, second.output)
        if goes_on:
            assert done_in(tmp_path / place) == ["split_micro_batches"], place
        else:
            assert "actions of the last run stay in effect: split_micro" in second.output, place
        gap = worst_gap(losses(tmp_path / place), losses(tmp_path / "calm"))
        print(f"{place}: {gap:.1e}")
        assert gap < 1e-5
        held_out = [rows(tmp_path / name, "eval_loss") for name in (place, "calm")]
        assert held_out[0] == pytest.approx(held_out[1], abs=1e-5)
