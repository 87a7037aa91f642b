"""A save that is cut off anywhere leaves the old checkpoint or the new one, never neither."""

import json
import os
import signal
import sys
import time
from random import Random

import pytest

from hpc_tune.checkpoint.store import Store, verify
from tests.ranks.test_train_ends import ENDLESS, Job
from tests.support.ranks import rank_environment, run_ranks
from tests.support.training import SMALL, events, losses, many_runs, rows, train, worst_gap

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


KILLED = [*ENDLESS, "train.deterministic=true", "train.max_steps=400", "checkpoint.every_steps=2"]
NUM_RANKS = 4


def kill_often(folder, times, background, seed):
    """Train on 4 ranks and kill one at random ``times`` times; return the finished run."""
    random = Random(seed)
    run_dir = folder / f"killed-{background}"
    overrides = [*KILLED, f"checkpoint.background={background}", f"data.cache={folder / 'data'}"]
    for _ in range(times):
        with Job(run_dir, NUM_RANKS, *overrides) as job:
            begun = last_step(run_dir)
            job.wait_for_text("micro-batches of")
            time.sleep(0.3)  # until the steps that are done again have left metrics.jsonl
            job.wait_for_step(begun + random.randrange(1, 6))
            time.sleep(random.uniform(0, 0.15))
            os.kill(random.choice(job.rank_pids()), signal.SIGKILL)
            code, _ = job.wait(30)
        assert code not in (0, 75)
        left = Store(run_dir / "checkpoints", keep=1)
        for path in left.steps():
            verify(path)
    done = train([*overrides, f"run.dir={run_dir}"], n=NUM_RANKS, timeout=600)
    assert done.returncode == 0, done.stderr
    return run_dir


def last_step(run_dir):
    """Return the step that the next start goes on from."""
    newest = Store(run_dir / "checkpoints", keep=1).latest()
    return 0 if newest is None else int(newest.name.removeprefix("step-"))


def check_kills(folder, times):
    whole = folder / "whole"
    done = train(
        [*KILLED, f"run.dir={whole}", f"data.cache={folder / 'data'}"], n=NUM_RANKS, timeout=600
    )
    assert done.returncode == 0, done.stderr
    for background in (True, False):
        run_dir = kill_often(folder, times, background, seed=times)
        assert len(events(run_dir, "resume")) + 1 >= times
        assert final_adapter(run_dir) == final_adapter(whole), "the same bits"


def final_adapter(run_dir):
    return (run_dir / "export" / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.mark.timeout(600)
def test_a_run_that_is_killed_thrice_ends_with_the_same_bits(tmp_path):
    check_kills(tmp_path, 3)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_a_run_that_is_killed_a_hundred_times_ends_with_the_same_bits(tmp_path):
    check_kills(tmp_path, 100)


def test_an_elastic_run_with_dropout_loses_nothing(tmp_path):
    """1 -> 4 -> 2 -> 3 ranks, ddp -> fsdp -> zero2 -> zero3, each sample once per epoch."""
    legs = [(1, []), (4, ["shard=4"]), (2, ["zero_stage=2"]), (3, ["zero_stage=3"])]
    settings = [*SMALL, "tune.dropout=0.1", "tune.method=lora", f"data.cache={tmp_path}"]
    whole = [*settings, f"run.dir={tmp_path / 'whole'}", "batch.micro_size=8"]
    assert many_runs(1, [{"overrides": whole}], tmp_path) == [0]
    for n, axes in legs:
        stop = None if n == 3 else 2
        overrides = [*settings, f"run.dir={tmp_path / 'elastic'}", "batch.micro_size=2"]
        overrides += [f"parallel.{axis}" for axis in axes]
        code = 0 if stop is None else 75
        assert many_runs(n, [{"overrides": overrides, "stop_after": stop}], tmp_path) == [code]
    assert worst_gap(losses(tmp_path / "elastic"), losses(tmp_path / "whole")) < 1e-5
    seen = rows(tmp_path / "elastic", "samples_seen")
    assert seen == rows(tmp_path / "whole", "samples_seen")
