"""tools/gpu_cost.py: what a step costs on a GPU, counted on fake tensors.

Products are compared with the arithmetic of a model's shape, joint kernels and messages with small
traces written by hand.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.support.fake_cuda_marks import skip_without_fake_cuda
from tests.support.ranks import HANG_S, python, rank_environment, run_ranks

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

from gpu_cards import CARDS, MIN_KERNEL_US  # noqa: E402
from gpu_cost import KINDS, cost  # noqa: E402
from gpu_cost_page import _GROUPS  # noqa: E402
from gpu_kernels import Kernel, Steps  # noqa: E402

CARD = CARDS["h100"]
MB = 100 << 20
# A Llama of two blocks, whose products are large enough that flops decide.
SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


def kernel(kind, reads, writes, stream=0, **other):
    fusible = kind not in ("base products", "messages")
    sizes = [dict.fromkeys(storages, MB) for storages in (reads, writes)]
    values = {"backward": False, "in_block": True, "fusible": fusible, "flops": 0.0, **other}
    return Kernel("one", kind, torch.bfloat16, values.pop("flops"), *sizes, stream, **values)


def counted(*events, compiled=False, alive=()):
    return cost(Steps([*events], set(alive), 0, 1), CARD, 1, compiled)


@pytest.mark.full
@skip_without_fake_cuda
def test_products_cost_what_the_shape_says(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    words = ["tools/gpu_cost.py", str(tmp_path), "--json"]
    done = run_ranks([*python(cold=True), *words], rank_environment(1), HANG_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    wide, hidden = SHAPE["intermediate_size"], SHAPE["hidden_size"]
    block = 3 * wide * hidden + 2 * hidden * hidden + 2 * hidden * hidden // 2
    head = SHAPE["vocab_size"] * hidden
    # Forward, and the gradient of the input; q, k and v of the first block need none.
    first = hidden * hidden + 2 * hidden * hidden // 2
    flops = 2 * 2 * (2 * block + head) - 2 * first
    assert found["us"]["base products"] == pytest.approx(flops / 640e12 * 1e6, rel=0.01)
    # One document of 4,096 tokens: half of all pairs, 4 flops each forward and 10 backward.
    pairs = 4096 * 4097 / 2 / 4096 * hidden * 2
    attention = pairs * (4 / CARD.attention[0] + 10 / CARD.attention[1]) * 1e6
    assert attention < found["us"]["attention"] < 1.1 * attention
    assert found["exposed_us"] == 0
    assert [wait.split(" ")[0] for wait in found["host_waits"]] == ["values"]


def test_joint_kernels_read_and_write_once():
    # A product, then x -> y -> z of which the product behind reads z alone.
    events = [
        kernel("base products", [1], [2]),
        kernel("norms", [2], [3]),
        kernel("norms", [3, 2], [4]),
        kernel("base products", [4], [5]),
    ]
    eager, joint = counted(*events), counted(*events, compiled=True)
    assert eager.us["norms"] == pytest.approx(5 * MB / CARD.bytes_per_s * 1e6)
    assert joint.us["norms"] == pytest.approx(2 * MB / CARD.bytes_per_s * 1e6)
    assert (eager.launches, joint.launches) == (4, 3)
    assert joint.us["base products"] == eager.us["base products"]


def test_what_the_backward_pass_alone_reads_is_made_again():
    events = [
        kernel("base products", [1], [2]),
        kernel("norms", [2], [3]),
        kernel("norms", [3], [4]),
        kernel("base products", [4], [5]),
        kernel("norms", [3, 2, 6], [7], backward=True),
        kernel("base products", [7], [8], backward=True),
    ]
    joint = counted(*events, compiled=True)
    # Forward 2 -> 4; backward 2, 6 -> 7. Storage 3 is neither written nor read.
    assert joint.us["norms"] == pytest.approx(5 * MB / CARD.bytes_per_s * 1e6)


def test_messages_are_hidden_by_what_runs_beside_them():
    flops = CARD.matmul[torch.bfloat16] * 1e-3  # a millisecond
    message = {"message": CARD.link_bytes_per_s * 3e-3, "fusible": False, "in_block": False}
    product = kernel("base products", [1], [2], flops=flops)
    alone = [kernel("messages", [3], [4], 1, **message), ("wait", 0, 1), product]
    beside = [kernel("messages", [3], [4], 1, **message), product, product, ("wait", 0, 1), product]
    assert counted(*alone).exposed_us == pytest.approx(3000, rel=0.01)
    found = counted(*beside)
    assert found.exposed_us == pytest.approx(1000, rel=0.02)
    assert found.hidden_us == pytest.approx(2000, rel=0.02)


def test_the_gpu_waits_for_the_host_where_kernels_are_short():
    short = [kernel("norms", [], []) for _ in range(10)]
    found = counted(*short, kernel("base products", [], []))
    assert found.us == {"base products": MIN_KERNEL_US, "norms": pytest.approx(10 * MIN_KERNEL_US)}
    assert found.host_us == pytest.approx(11 * CARD.launch_us - 10 * MIN_KERNEL_US)


def test_every_kind_that_was_counted_is_in_a_column_of_the_page():
    columns = {kind for kinds in _GROUPS.values() for kind in kinds}
    assert columns == {*KINDS}
    for file in (ROOT / "benchmarks/gpu").glob("cost-*.json"):
        for case in json.loads(file.read_text()).values():
            assert case["us"].keys() <= columns
