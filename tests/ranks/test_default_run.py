"""``mpirun -np N python -m hpc_tune``, literally, with no arguments."""

import json
import time

import pytest

from tests.support.ranks import mpirun
from tests.support.training import losses, outcome, rows, train, worst_gap


def run_default(folder, n, *settings, limit_s=400, cold=True):
    """Return the seconds that it took."""
    folder.mkdir(exist_ok=True)
    began_s = time.monotonic()
    done = mpirun(n, ["-m", "hpc_tune", *settings], timeout=limit_s, cwd=folder, cold=cold)
    assert done.returncode == 0, done.stderr
    assert outcome(folder / "runs" / "tiny")["status"] == "done"
    return time.monotonic() - began_s


@pytest.mark.parametrize(
    ("n", "settings"),
    [
        # As many as show it: all 40 take minutes.
        (2, ["train.max_steps=3", "train.eval_rows=8"]),
        *(pytest.param(n, [], marks=pytest.mark.full) for n in (2, 4, 16)),
    ],
)
@pytest.mark.timeout(900)
def test_ranks_without_arguments_give_the_losses_of_one(tmp_path, n, settings):
    run_default(tmp_path / "many", n, *settings, limit_s=800, cold=False)
    tiny = tmp_path / "many" / "runs" / "tiny"
    # One process has both cores: a second thread would wait for what runs beside this test.
    words = [f"run.dir={tmp_path / 'one'}", f"data.cache={tiny / 'data'}", "run.threads=1"]
    done = train([*words, *settings])
    assert done.returncode == 0, done.stderr
    assert worst_gap(losses(tiny), losses(tmp_path / "one")) < 1e-5
    most, slowest = rows(tiny, "most_work_s"), rows(tiny, "slowest_rank")
    lines = [json.loads(line) for line in (tiny / "ranks.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 4 if settings else 41))
    for line in lines:
        step, work_s = line["step"], line["work_s"]
        assert len(work_s) == n
        assert max(work_s) == pytest.approx(most[step], abs=2e-4)
        assert work_s[slowest[step]] == pytest.approx(max(work_s), abs=2e-4)
    before, _, _ = done.stderr.partition("step 0:")
    first = [line.split()[0] for line in before.splitlines() if not line.startswith("warning: ")]
    assert first == [
        *("world", "model", "method", "data", "layout", "memory", "kernels"),
        *("batch", "rate", "files"),
        "micro-batches",
    ]


@pytest.mark.full
def test_the_bare_command_trains_and_says_what_it_does(tmp_path):
    run_default(tmp_path, 2)
    run_dir = tmp_path / "runs" / "tiny"
    held_out = rows(run_dir, "eval_loss")
    assert held_out[40] < 0.7 * held_out[0]
    assert (run_dir / "config.resolved.yaml").is_file()
    assert list((run_dir / "tensorboard").iterdir())
    again = mpirun(2, ["-m", "hpc_tune"], cwd=tmp_path)
    assert again.returncode == 0
    assert "resumed" in again.stderr
    assert len(losses(run_dir)) == 40


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_16_ranks_and_any_other_number_give_the_losses_of_one(tmp_path):
    times, curves = {}, {}
    for n in (1, 2, 3, 5, 7, 16):
        times[n] = run_default(tmp_path / str(n), n)
        curves[n] = losses(tmp_path / str(n) / "runs" / "tiny")
        gap = worst_gap(curves[n], curves[1])
        print(f"{n} ranks: {times[n]:.0f} s, largest difference to one rank {gap:.1e}", flush=True)
    assert times[16] < 180
    assert max(worst_gap(curve, curves[1]) for curve in curves.values()) < 1e-5
