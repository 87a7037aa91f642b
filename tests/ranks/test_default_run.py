"""``mpirun -np N python -m hpc_tune``, literally, with no arguments."""

import time

import pytest

from tests.support.ranks import mpirun
from tests.support.training import losses, outcome, rows, worst_gap


def run_default(folder, n, limit_s=400):
    began_s = time.monotonic()
    done = mpirun(n, ["-m", "hpc_tune"], timeout=limit_s, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert outcome(folder / "runs" / "tiny")["status"] == "done"
    return time.monotonic() - began_s


def test_the_bare_command_trains_and_says_what_it_does(tmp_path):
    took_s = run_default(tmp_path, 2, limit_s=190)
    run_dir = tmp_path / "runs" / "tiny"
    held_out = rows(run_dir, "eval_loss")
    assert held_out[40] < 0.7 * held_out[0]
    assert took_s < 180
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
        folder = tmp_path / str(n)
        folder.mkdir()
        times[n] = run_default(folder, n)
        curves[n] = losses(folder / "runs" / "tiny")
        gap = worst_gap(curves[n], curves[1])
        print(f"{n} ranks: {times[n]:.0f} s, largest difference to one rank {gap:.1e}", flush=True)
    assert times[16] < 180
    assert max(worst_gap(curve, curves[1]) for curve in curves.values()) < 1e-5
