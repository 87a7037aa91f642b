"""train.profile on real ranks."""

import gzip
import json

import pytest

from tests.support.ranks import mpirun

STEPS = ["train.max_steps=6", "data.seq_len=128", "batch.global_size=4", "train.eval_rows=4"]


def run(folder, *words):
    done = mpirun(2, ["-m", "hpc_tune", *STEPS, f"run.dir={folder}", *words])
    assert done.returncode == 0, done.stderr
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return done, [row["loss"] for row in map(json.loads, lines) if "loss" in row]


@pytest.mark.full
def test_two_steps_are_traced_on_each_rank_and_told_by_kind_without_another_loss(tmp_path):
    done, losses = run(tmp_path / "profiled", "train.profile=4:2")
    folder = tmp_path / "profiled" / "profile"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["rank-0.json.gz", "rank-1.json.gz", "summary.txt"]
    for rank in (0, 1):
        trace = json.loads(gzip.decompress((folder / f"rank-{rank}.json.gz").read_bytes()))
        found = [event.get("name") for event in trace["traceEvents"]]
        assert {"step 4", "step 5", "aten::mm"} <= set(found)
        assert not {"step 3", "step 6"} & set(found)
    title, _, *rows = (folder / "summary.txt").read_text(encoding="utf-8").splitlines()
    assert title == "profile of steps 4 to 5, seconds per step"
    for rank, row in enumerate(rows[:2]):
        number, _, *parts = row.split()
        compute, messages, copies, data, idle, step = map(float, parts)
        assert int(number) == rank
        assert compute > 0
        assert messages > 0
        assert abs(compute + messages + copies + data + idle - step) < 0.02 * step + 0.005
    assert title in done.stderr
    _, plain = run(tmp_path / "plain")
    assert losses == plain


@pytest.mark.full
def test_steps_that_the_run_does_not_do_are_told_and_nothing_is_profiled(tmp_path):
    done, _ = run(tmp_path / "run", "train.profile=7:1")
    assert done.stderr.count("train.profile=7:1 is not among the steps that this run does") == 1
    assert not (tmp_path / "run" / "profile").exists()
