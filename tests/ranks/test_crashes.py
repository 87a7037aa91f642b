"""A save that is cut off anywhere leaves the old checkpoint or the new one, never neither."""

import json
import os
import re
import signal
import time
from pathlib import Path
from random import Random

import pytest

from hpc_tune.checkpoint.store import Store, verify_checkpoint
from hpc_tune.errors import CheckpointError
from tests.ranks.test_bad_input import mounted
from tests.ranks.test_saves_refused import wait_for_checkpoint
from tests.ranks.test_train_ends import ENDLESS, Job
from tests.support.ranks import python, rank_environment, run_ranks
from tests.support.training import SMALL, events, losses, many_runs, rows, train, worst_gap

METHODS = ("lora", "full")
OLD, NEW = "step-00000002", "step-00000004"


SAVES = [*SMALL, "checkpoint.every_steps=2", "checkpoint.keep=1", "train.max_steps=6"]


def points_of(folder, run_dir, way, method, every):
    """Return what was found at the points of the second save of a run (see crash_points.py)."""
    settings = [*SAVES, f"tune.method={method}"]
    out = folder / "points.json"
    program = ["-m", "tests.support.crash_points", str(out), way, str(every), "4"]
    command = [*python(), *program, *settings, f"run.dir={run_dir}"]
    done = run_ranks(command, rank_environment(1), 1800.0)
    assert done.returncode == 0, done.stderr
    points = json.loads(out.read_text())
    for point in points:
        assert point["newest"] in (OLD, NEW), point
        assert point["after_another_save"] == NEW, point
    whole = folder / "whole"
    done = train([*settings, f"run.dir={whole}"])
    assert done.returncode == 0, done.stderr
    assert worst_gap(losses(run_dir), losses(whole)) == 0
    kept = [point["newest"] for point in points]
    print(f"\n{way} {method}: {len(points)} points, {kept.count(OLD)} left the old checkpoint")
    return points


def check_ends(folder, method, every):
    points = points_of(folder, folder / "run", "end", method, every)
    kept = [point["newest"] for point in points]
    assert kept == sorted(kept), "once the new one is there, the old one is never taken again"
    assert {OLD, NEW} == set(kept)
    return {point["operation"] for point in points}


def check_full_disk(folder, method, every):
    (folder / "disk").mkdir()
    with mounted(folder / "disk", "size=64m"):
        points = points_of(folder, folder / "disk" / "run", "fill", method, every)
    for point in points:
        if point["error"] is None:
            assert point["newest"] == NEW, point
        else:
            assert point["newest"] == OLD, point
            assert "No space left on device" in point["error"], point
            assert not [name for name in point["left"] if name.endswith(".tmp")], point
    print(f"refused: {sum(point['error'] is not None for point in points)}")
    assert {OLD, NEW} == {point["newest"] for point in points}


def test_a_save_may_end_at_each_37th_of_its_operations(tmp_path):
    check_ends(tmp_path, "lora", 37)


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a small tmpfs")
def test_the_disk_may_be_full_at_each_37th_operation_of_a_save(tmp_path):
    check_full_disk(tmp_path, "lora", 37)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("method", METHODS)
def test_a_save_may_end_at_each_of_its_operations(tmp_path, method):
    operations = check_ends(tmp_path, method, 1)
    assert {"open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir"} <= operations


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a small tmpfs")
@pytest.mark.parametrize("method", METHODS)
def test_the_disk_may_be_full_at_each_operation_of_a_save(tmp_path, method):
    check_full_disk(tmp_path, method, 1)


KILLED = [*ENDLESS, "train.deterministic=true", "checkpoint.every_steps=2", "tune.method=lora"]


def kill_often(folder, n, times, background):
    """Train on ``n`` ranks and kill one at random ``times`` times; return the finished run."""
    random = Random(times)
    run_dir = folder / f"killed-{background}"
    overrides = [*settings_of(folder, times), f"checkpoint.background={background}"]
    for _ in range(times):
        with Job(run_dir, n, *overrides) as job:
            begun = last_step(run_dir)
            job.wait_for_text("micro-batches of")
            time.sleep(0.3)  # until the steps that are done again have left metrics.jsonl
            job.wait_for_step(begun + random.randrange(1, 6))
            if not begun:
                wait_for_checkpoint(run_dir)
            time.sleep(random.uniform(0, 0.15))
            os.kill(random.choice(job.rank_pids()), signal.SIGKILL)
            code, _ = job.wait(30)
        assert code not in (0, 75)
        left = Store(run_dir / "checkpoints", keep=1)
        for path in left.step_folders():
            verify_checkpoint(path)
    done = train([*overrides, f"run.dir={run_dir}"], n=n, timeout=600)
    assert done.returncode == 0, done.stderr
    return run_dir


def settings_of(folder, times):
    """Return what all runs are trained with: of up to 5 steps between two kills."""
    return [*KILLED, f"train.max_steps={10 + 5 * times}", f"data.cache={folder / 'data'}"]


def last_step(run_dir):
    """Return the step that the next start goes on from."""
    newest = Store(run_dir / "checkpoints", keep=1).latest_checkpoint()
    return 0 if newest is None else int(newest.name.removeprefix("step-"))


def check_kills(folder, n, times, ways):
    whole = folder / "whole"
    done = train([*settings_of(folder, times), f"run.dir={whole}"], n=n, timeout=600)
    assert done.returncode == 0, done.stderr
    for background in ways:
        run_dir = kill_often(folder, n, times, background)
        assert len(events(run_dir, "resume")) >= times
        assert final_adapter(run_dir) == final_adapter(whole), "the same bits"


def final_adapter(run_dir):
    return (run_dir / "export" / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.mark.full
def test_a_run_that_is_killed_twice_ends_with_the_same_bits(tmp_path):
    check_kills(tmp_path, 2, 2, (True,))


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_a_run_that_is_killed_a_hundred_times_ends_with_the_same_bits(tmp_path):
    check_kills(tmp_path, 4, 100, (True, False))


@pytest.mark.full
def test_an_elastic_run_with_dropout_loses_nothing(tmp_path):
    """1 -> 4 -> 2 -> 3 ranks, ddp -> fsdp -> zero2 -> zero3, each sample once per epoch."""
    legs = [(1, []), (4, ["shard=4"]), (2, ["zero_stage=2"]), (3, ["zero_stage=3"])]
    settings = [*SMALL, "tune.dropout=0.1", "tune.method=lora"]
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


def flip(file, bit):
    """Turn one bit of a file."""
    with file.open("r+b") as opened:
        opened.seek(bit // 8)
        [byte] = opened.read(1)
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))


@pytest.mark.full
def test_100_flipped_bits_are_all_found_and_none_is_resumed_from(tmp_path):
    random, run_dir = Random(0), tmp_path / "run"
    settings = [*SAVES, "checkpoint.keep=2", "tune.method=lora"]
    settings += [f"run.dir={run_dir}"]
    assert train(settings).returncode == 0
    before = losses(run_dir)
    store = Store(run_dir / "checkpoints", keep=2)
    older, newest = store.step_folders()
    files = [file for file in newest.rglob("*") if file.is_file()]
    bits = [8 * file.stat().st_size for file in files]
    for number in range(100):
        # By size, and each file, small as it may be, a few times.
        file = files[number % len(files)] if number < 40 else random.choices(files, bits)[0]
        bit = random.randrange(8 * file.stat().st_size)
        flip(file, bit)
        with pytest.raises(CheckpointError, match=re.escape(newest.name)):
            verify_checkpoint(newest)
        assert store.latest_checkpoint() == older
        if number < 99:
            flip(file, bit)
    inspected = run_ranks(
        [*python(), "-m", "hpc_tune", "inspect", str(run_dir), "--verify"],
        rank_environment(1),
        60.0,
    )
    assert inspected.returncode != 0
    assert f"{newest.name}  NOT VALID" in inspected.stdout + inspected.stderr
    done = train(settings)
    assert done.returncode == 0, done.stderr
    assert "skipping a checkpoint" in done.stderr
    assert [Path(event["path"]).name for event in events(run_dir, "resume")] == [older.name]
    assert losses(run_dir) == before
