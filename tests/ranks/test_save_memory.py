"""What saves, and a resume, cost a rank in host memory, and how long training waits for them."""

import json
import statistics

import pytest

from tests.support.random_model import SHAPE_1B, write_random_llama
from tests.support.ranks import HANG_S, mpirun

MIB = 1 << 20
# 21 million values: 61 MiB of weights and optimizer state in bf16 on each of 2 ranks.
SHAPE_SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
}


def measure(n, axis, model, folder, num_saves, budget, timeout):
    program = ["-m", "tests.support.save_memory", str(model), str(folder), str(num_saves)]
    settings = [f"parallel.{axis}={n}", f"checkpoint.staging_bytes={budget}"]
    done = mpirun(n, [*program, *settings], timeout=timeout, cold=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def check(n, axis, folder, shape, num_saves, budget, timeout):
    write_random_llama(folder / "model", **shape)
    places = folder / "model", folder / "checkpoints"
    fresh = measure(n, axis, *places, num_saves, budget, timeout)
    resumed = measure(n, axis, *places, 0, budget, timeout)
    waits = {name: statistics.median(times) for name, times in fresh["blocked_s"].items()}
    for name, added in fresh["added"].items():
        shown = ", ".join(f"{value / MIB:.0f}" for value in added)
        print(f"\n{name}: adds {shown} MiB; training waits {waits[name]:.2f} s")
        assert max(added) < budget
        half = num_saves // 2
        growth = statistics.median(added[half:]) - statistics.median(added[:half])
        assert growth < 8 * MIB, "each save costs more than the one before"
    print(f"a step without a save takes {fresh['step_s']:.2f} s")
    ratio = resumed["start"] / fresh["start"]
    print(f"start {fresh['start'] / MIB:.0f} MiB, resume {ratio:.3f} of it")
    assert ratio < 1.1
    return waits


@pytest.mark.full
def test_saves_of_a_small_model_stay_within_the_budget(tmp_path):
    check(2, "shard", tmp_path, SHAPE_SMALL, 4, 40 * MIB, HANG_S)


@pytest.mark.soak
@pytest.mark.timeout(2 * 3600)
def test_saves_of_a_1b_model_on_4_ranks_stay_within_the_budget(tmp_path):
    waits = check(4, "pipeline", tmp_path, SHAPE_1B, 10, 256 * MIB, 3000)
    assert waits["background"] < 0.1 * waits["waiting"]
