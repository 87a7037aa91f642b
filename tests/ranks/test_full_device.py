"""A step that runs out of a device's memory on one rank ends nothing, or all ranks at once."""

import pytest

from hpc_tune.errors import EXIT_DONE, EXIT_RESUMABLE
from tests.support.training import SMALL, events, launch_runs, losses, outcome, worst_gap

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


@pytest.mark.parametrize(
    "layout",
    [
        "shard=2",
        *(
            pytest.param(layout, marks=pytest.mark.full)
            for layout in ("pipeline=2", "tensor=2", "zero_stage=2", "zero_stage=3")
        ),
    ],
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
