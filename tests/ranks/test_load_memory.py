"""What loading costs a node in host memory: no rank may hold more than what it keeps."""

import json

import pytest

from tests.support.random_model import SHAPE_1B, SHAPE_SMALL, write_random_llama
from tests.support.ranks import HANG_S, mpirun

MIB = 1 << 20


def measure(directory, n, axes, timeout=HANG_S):
    done = mpirun(
        n, ["-m", "tests.support.load_memory", str(directory), *axes], timeout=timeout, cold=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    directory = tmp_path_factory.mktemp("small")
    return directory, write_random_llama(directory, **SHAPE_SMALL)


@pytest.mark.parametrize(
    "axis",
    [pytest.param(a, marks=pytest.mark.full) for a in ("replicate=2", "zero_stage=3")]
    + ["shard=2"],
)
def test_two_ranks_grow_by_no_more_than_they_keep(small, axis):
    directory, model_bytes = small
    found = measure(directory, 2, [axis])
    # Whole frozen weights are the file's pages. Beside the weights that are kept, each rank has a
    # 16 MiB piece while it reads, the adapters with their state, and the allocator's slack.
    kept = 0 if axis == "replicate=2" else model_bytes
    assert kept * 0.9 <= found["loaded"], found
    assert found["loading"] < kept + 2 * 32 * MIB, found
    # What is gathered for a block is freed before the next but one, on both ranks.
    assert found["step"] < (1 if axis == "replicate=2" else 3) * model_bytes, found
    # Each byte comes from the disk once, though both ranks want it: a page is there for both.
    assert found["read_bytes"] < 1.05 * model_bytes + 2 * 32 * MIB


LAYOUTS = {
    "replicate 4": ["replicate=4"],
    "shard 4": ["shard=4"],
    "shard 4, offload_params=cpu": ["shard=4", "offload_params=cpu"],
    "replicate 2 x shard 2": ["replicate=2", "shard=2"],
    "tensor 4": ["tensor=4"],
    "pipeline 4": ["pipeline=4"],
    "zero 1": ["zero_stage=1"],
    "zero 3": ["zero_stage=3"],
    "zero 3, offload_params=cpu": ["zero_stage=3", "offload_params=cpu"],
}
PHASES = ("loading", "loaded", "step", "saving", "read_bytes")


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_1b_model_on_4_ranks(tmp_path):
    model_bytes = write_random_llama(tmp_path / "1b", **SHAPE_1B)
    table = {}
    for name, axes in LAYOUTS.items():
        table[name] = measure(tmp_path / "1b", 4, axes, 600)
        print(name, table[name], flush=True)
    print(f"\nmodel {model_bytes / MIB:.0f} MiB; sums over 4 ranks / model bytes")
    print(f"| layout | {' | '.join(PHASES)} |")
    for name, found in table.items():
        shown = [f"{found[phase] / model_bytes:.3f}" for phase in PHASES]
        print(f"| {name} | {' | '.join(shown)} |")
    for name in ("shard 4", "zero 3", "tensor 4", "pipeline 4"):
        assert table[name]["loading"] < 1.15 * model_bytes, name
    for name in ("replicate 4", "zero 1"):
        assert table[name]["loading"] < 0.1 * model_bytes, "four ranks share one copy"
