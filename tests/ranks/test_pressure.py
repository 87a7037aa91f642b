"""Under memory pressure a run gives up speed, then leaves: never killed, it learns the same."""

import json
import signal
import sys

import pytest

from tests.support.cgroup import memory_group
from tests.support.ranks import find_mpirun, rank_environment, run_ranks
from tests.support.training import SMALL, events, losses, many_runs, outcome, train, worst_gap

MIB = 1 << 20
LAYOUTS = {
    1: ("single",),
    2: ("replicate=2", "shard=2", "pipeline=2", "tensor=2", "zero_stage=2", "zero_stage=3"),
}
# Two rows per step and rank at the least; each rung has a step to show what it gives.
PRESSED = ["CALM", *["HIGH"] * 11, "CALM"]
SETTINGS = [*SMALL, "train.max_steps=20", "batch.micro_size=4", "tune.method=lora"]
SETTINGS.append("tune.dropout=0.1")


@pytest.mark.parametrize("n", list(LAYOUTS))
def test_a_run_that_is_pushed_down_the_ladder_has_the_same_losses(tmp_path, n):
    common = [*SETTINGS, "checkpoint.every_steps=5", f"data.cache={tmp_path / 'data'}"]
    jobs = []
    for layout in LAYOUTS[n]:
        axis = [] if layout == "single" else [f"parallel.{layout}"]
        for name, levels in (("pressed", PRESSED), ("calm", ["CALM"])):
            overrides = [*common, *axis, f"run.dir={tmp_path / layout / name}"]
            jobs.append({"overrides": overrides, "levels": levels})
    codes = many_runs(n, jobs, tmp_path, 600, "tests.support.pressed_runs")
    assert codes == [0] * len(jobs)
    for layout in LAYOUTS[n]:
        pressed = tmp_path / layout / "pressed"
        gap = worst_gap(losses(pressed), losses(tmp_path / layout / "calm"))
        done = [event["action"] for event in events(pressed, "governor") if "action" in event]
        print(f"{layout}: {gap:.1e} after {done}")
        assert done == [
            "trim",
            "shrink_buffers",
            "save_in_pieces",
            "split_micro_batches",
            "split_micro_batches",
            "recompute",
        ]
        assert gap < 1e-5


# What a single rank of builtin:tiny takes is less than half of it.
LIMIT = 700 * MIB
HUNGRY = [*SMALL, "train.max_steps=40", "checkpoint.every_steps=4", "batch.micro_size=4"]


def train_in(group, run_dir, way, num_bytes, *overrides, n=1, timeout=180.0):
    words = [*HUNGRY, f"run.dir={run_dir}", f"data.cache={run_dir.parent / 'data'}", *overrides]
    argv = [sys.executable, "-m", "tests.support.greedy", way, str(num_bytes), *words]
    if n > 1:
        argv = [find_mpirun(), "-np", str(n), *argv]
    return run_ranks(group.inside(argv), rank_environment(n), timeout)


WAYS = {
    "a leak of 20 MB per step": ("leak", 20 * MIB),
    "a leak of 200 MB/s within a step": ("burst", 200 * MIB),
    "a micro-batch that grows too large": ("batch", 120 * MIB),
}


def check_way(tmp_path, way, n):
    with memory_group(n * LIMIT) as group:
        found = train_in(group, tmp_path / "off", *WAYS[way], "memory.governor=off", n=n)
        assert found.returncode not in (0, 75), "or the test shows nothing"
        assert group.kills > 0
    with memory_group(n * LIMIT) as group:
        found = train_in(group, tmp_path / "on", *WAYS[way], n=n)
        assert group.kills == 0, found.stderr
        assert found.returncode in (0, 75), found.stderr
        if found.returncode == 75:
            told = outcome(tmp_path / "on")
            assert told["reason"].startswith("host memory of "), told
            assert {"need", "had", "phase", "rank", "host", "governor"} <= set(told)
        again = train_in(group, tmp_path / "on", "none", 0, n=n)
        assert again.returncode == 0, again.stderr
        assert group.kills == 0
    return found


@pytest.mark.parametrize("way", list(WAYS))
def test_where_the_kernel_would_have_killed_the_run_leaves_and_then_finishes(tmp_path, way):
    found = check_way(tmp_path, way, 1)
    print(found.returncode, found.stderr[-2000:])


def test_a_run_that_was_killed_is_told_of_by_the_next_start_and_by_inspect(tmp_path):
    with memory_group(LIMIT) as group:
        run_dir = tmp_path / "run"
        killed = train_in(group, run_dir, "burst", 400 * MIB, "memory.governor=observe")
        assert killed.returncode == -signal.SIGKILL
        [word] = (run_dir / "memory").iterdir()
        said = json.loads(word.read_text())
        word.write_text(json.dumps({**said, "time": said["time"] - 60}))
        inspect = [sys.executable, "-m", "hpc_tune", "inspect", str(run_dir)]
        inspected = run_ranks(inspect, rank_environment(1), 60.0)
        assert "the kernel killed 1 of that group's processes" in inspected.stdout, inspected
        done = train_in(group, run_dir, "none", 0)
        assert done.returncode == 0, done.stderr
        assert "it was killed: no outcome.json. Last seen on" in done.stderr
        assert not list((run_dir / "memory").iterdir())
    assert train([*HUNGRY, f"run.dir={run_dir}"]).returncode == 0
