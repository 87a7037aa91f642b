"""A save that is cut off anywhere leaves the old checkpoint or the new one, never neither."""

import json
import sys

import pytest

from tests.support.ranks import rank_environment, run_ranks
from tests.support.training import SMALL, losses, train, worst_gap

METHODS = ("lora", "full")
OLD, NEW = "step-00000002", "step-00000004"


@pytest.mark.parametrize("method", METHODS)
def test_a_save_may_end_at_each_of_its_operations(tmp_path, method):
    settings = [*SMALL, f"tune.method={method}", "checkpoint.every_steps=2", "checkpoint.keep=1"]
    settings += [f"data.cache={tmp_path / 'data'}", "train.max_steps=6"]
    out, run_dir = tmp_path / "points.json", tmp_path / "run"
    program = ["-m", "tests.support.crash_points", str(out), "4", *settings, f"run.dir={run_dir}"]
    done = run_ranks([sys.executable, *program], rank_environment(1), 280.0)
    assert done.returncode == 0, done.stderr
    points = json.loads(out.read_text())
    operations = {point["operation"] for point in points}
    assert {"open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir"} <= operations
    for point in points:
        assert point["newest"] in (OLD, NEW), point
        assert point["after_another_save"] == NEW, point
    kept = [point["newest"] for point in points]
    assert kept == sorted(kept), "once the new one is there, the old one is never taken again"
    assert {OLD, NEW} == set(kept)
    print(f"{method}: {len(points)} points, {kept.count(OLD)} left the old checkpoint")
    whole = tmp_path / "whole"
    done = train([*settings, f"run.dir={whole}"])
    assert done.returncode == 0, done.stderr
    assert worst_gap(losses(run_dir), losses(whole)) == 0
