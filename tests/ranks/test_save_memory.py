"""What saves, and a resume, cost a rank in host memory, and how long training waits for them."""

import json
import statistics

import pytest

from tests.ranks.test_load_memory import SHAPE_SMALL
from tests.support.random_model import SHAPE_1B, write_random_llama
from tests.support.ranks import mpirun

MIB = 1 << 20
BUDGET_BYTES = 256 * MIB  # checkpoint.staging_bytes


def measure(n, model, folder, num_saves, timeout):
    program = ["-m", "tests.support.save_memory", str(model), str(folder), str(num_saves)]
    done = mpirun(n, [*program, f"shard={n}"], timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def check(n, folder, shape, num_saves, timeout=300):
    write_random_llama(folder / "model", **shape)
    fresh = measure(n, folder / "model", folder / "checkpoints", num_saves, timeout)
    resumed = measure(n, folder / "model", folder / "checkpoints", 0, timeout)
    waits = {name: statistics.median(times) for name, times in fresh["blocked_s"].items()}
    for name, added in fresh["added"].items():
        shown = ", ".join(f"{value / MIB:.0f}" for value in added)
        print(f"\n{name}: adds {shown} MiB; training waits {waits[name]:.2f} s")
        assert max(added) < BUDGET_BYTES
        half = num_saves // 2
        growth = statistics.median(added[half:]) - statistics.median(added[:half])
        assert growth < 8 * MIB, "each save costs more than the one before"
    print(f"a step without a save takes {fresh['step_s']:.2f} s")
    ratio = resumed["start"] / fresh["start"]
    print(f"start {fresh['start'] / MIB:.0f} MiB, resume {ratio:.3f} of it")
    assert ratio < 1.1
    return waits


@pytest.mark.timeout(600)
def test_saves_of_a_small_model_stay_within_the_budget(tmp_path):
    check(2, tmp_path, SHAPE_SMALL, 4)


@pytest.mark.soak
@pytest.mark.timeout(2 * 3600)
def test_saves_of_a_1b_model_on_4_ranks_stay_within_the_budget(tmp_path):
    waits = check(4, tmp_path, SHAPE_1B, 10, 3000)
    assert waits["background"] < 0.1 * waits["waiting"]
