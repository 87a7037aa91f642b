"""What loading costs a node in host memory: no rank may hold more than what it keeps."""

import json

import pytest

from tests.support.random_model import SHAPE_1B, write_random_llama
from tests.support.ranks import mpirun

MIB = 1 << 20
# A quarter of the 1.1B shape's depth and half its width: 0.1B values, 200 MB.
SHAPE_SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 16000,
}


def measure(directory, n, axis, timeout=120):
    done = mpirun(n, ["-m", "tests.support.load_memory", str(directory), axis], timeout=timeout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    directory = tmp_path_factory.mktemp("small")
    return directory, write_random_llama(directory, **SHAPE_SMALL)


@pytest.mark.parametrize("axis", ["replicate", "shard"])
def test_two_ranks_grow_by_no_more_than_they_keep(small, axis):
    directory, model_bytes = small
    found = measure(directory, 2, axis)
    # Whole frozen weights are the file's pages. Beside the weights that are kept, each rank has a
    # 16 MiB piece while it reads, the adapters with their state, and the allocator's slack.
    kept = 0 if axis == "replicate" else model_bytes
    assert kept * 0.9 <= found["loaded"] <= found["peak"] < kept + 2 * 32 * MIB, found


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_1b_model_on_4_ranks(tmp_path):
    model_bytes = write_random_llama(tmp_path / "1b", **SHAPE_1B)
    shard = measure(tmp_path / "1b", 4, "shard", timeout=300)
    replicate = measure(tmp_path / "1b", 4, "replicate", timeout=300)
    print(f"model {model_bytes / MIB:.0f} MiB")
    for name, found in (("shard", shard), ("replicate", replicate)):
        shown = ", ".join(f"{k} {found[k] / model_bytes:.3f}" for k in ("loaded", "peak"))
        print(f"{name} on 4 ranks, growth of all ranks / model bytes: {shown}")
    assert shard["peak"] < 1.15 * model_bytes
    assert replicate["peak"] < 0.1 * model_bytes, "four ranks share one copy in the page cache"
