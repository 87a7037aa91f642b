import pytest
import torch

from hpc_tune.config.schema import RunConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import build
from hpc_tune.model.config_json import (
    model_shape_names,
    refuse_weightless_shape,
    resolve_model_directory,
)
from hpc_tune.step.size import measure_model_size

# (hidden, wide, layers, width of queries, width of keys and of values, vocabulary)
LLAMA_8B = (4096, 14336, 32, 4096, 1024, 128256)
LLAMA_70B = (8192, 28672, 80, 8192, 1024, 128256)
LLAMA_405B = (16384, 53248, 126, 16384, 1024, 128256)
QWEN_32B = (5120, 25600, 64, 8192, 1024, 151936)
QWEN_2_32B = (5120, 27648, 64, 5120, 1024, 152064)
PHI_MINI = (3072, 8192, 32, 3072, 3072, 32064)


def gated(hidden, wide, layers, query, kv, vocab, extra=0):
    """q, k, v, o; gate, up, down; two norms a block; embedding, head and the last norm."""
    attention = 2 * hidden * query + 2 * hidden * kv
    return (
        layers * (attention + 3 * hidden * wide + 2 * hidden + extra) + 2 * vocab * hidden + hidden
    )


def falcon(hidden=4544, layers=32, vocab=65024):
    """One key and value head of 64; q, k and v in one matrix; one norm a block; tied head."""
    block = hidden * (hidden + 2 * 64) + hidden * hidden + 8 * hidden * hidden + 2 * hidden
    return layers * block + vocab * hidden + 2 * hidden


def qwen_mixture(hidden=2048, wide=768, layers=48, experts=128, vocab=151936):
    """32 heads and 4 of keys and values, of 128, with norms; each expert has gate, up and down."""
    attention = 2 * hidden * 4096 + 2 * hidden * 512 + 2 * 128
    mixture = experts * hidden + experts * 3 * hidden * wide
    return layers * (attention + mixture + 2 * hidden) + 2 * vocab * hidden + hidden


def gpt_oss(hidden=2880, layers=36, experts=128, vocab=201088):
    """64 heads with a sink each and 8 of keys and values, of 64; everything has a bias."""
    attention = 2 * hidden * 4096 + 2 * hidden * 512 + 4096 + 2 * 512 + hidden + 64
    expert = hidden * 2 * hidden + 2 * hidden + hidden * hidden + hidden
    mixture = experts * hidden + experts + experts * expert
    return layers * (attention + mixture + 2 * hidden) + 2 * vocab * hidden + hidden


def deepseek(hidden=7168, layers=61, dense=3, experts=256, vocab=129280):
    """128 heads, queries through 1536 and keys and values through 512; the first blocks are dense.

    Without the block that predicts a second token, which is not a part of the 671B.
    """
    queries = hidden * 1536 + 1536 + 1536 * 128 * (128 + 64)
    keys = hidden * (512 + 64) + 512 + 512 * 128 * (128 + 128)
    attention = queries + keys + 128 * 128 * hidden
    mixture = experts * hidden + (experts + 1) * 3 * hidden * 2048
    blocks = layers * (attention + 2 * hidden) + (layers - dense) * mixture
    return blocks + dense * 3 * hidden * 18432 + 2 * vocab * hidden + hidden


@pytest.mark.parametrize(
    ("name", "published", "counted"),
    [
        ("llama3-8b", 8.03e9, gated(*LLAMA_8B)),
        ("llama3-70b", 70.55e9, gated(*LLAMA_70B)),
        ("llama3-405b", 405.85e9, gated(*LLAMA_405B)),
        ("qwen3-32b", 32.76e9, gated(*QWEN_32B, extra=2 * 128)),  # norms of q and k
        ("qwen2.5-32b", 32.76e9, gated(*QWEN_2_32B, extra=56 * 128)),  # biases of q, k and v
        ("phi3-mini", 3.82e9, gated(*PHI_MINI)),
        ("falcon-7b", 6.92e9, falcon()),
        ("qwen3-30b-a3b", 30.53e9, qwen_mixture()),
        ("gpt-oss-120b", 116.83e9, gpt_oss()),
        ("deepseek-v3", 671.03e9, deepseek()),
    ],
)
def test_a_shape_has_the_published_number_of_parameters(name, published, counted):
    directory = resolve_model_directory(f"shape:{name}")
    built = build(directory, torch.bfloat16, TuneConfig(method="full"), 0, reads_weights=False)
    assert measure_model_size(built.module).num_parameters == counted
    assert counted == pytest.approx(published, abs=0.005e9)


def test_every_shape_is_counted_above():
    assert model_shape_names() == [
        *("deepseek-v3", "falcon-7b", "gpt-oss-120b", "llama3-405b", "llama3-70b", "llama3-8b"),
        *("phi3-mini", "qwen2.5-32b", "qwen3-30b-a3b", "qwen3-32b"),
    ]


def test_a_directory_stays_a_directory():
    assert str(resolve_model_directory("models/x")) == "models/x"
    refuse_weightless_shape("models/x")
    refuse_weightless_shape(RunConfig().model.path)


def test_an_unknown_shape_names_the_near_ones():
    with pytest.raises(ConfigError, match=r"shape:llama3-7b: no such shape; .*llama3-70b"):
        resolve_model_directory("shape:llama3-7b")


def test_a_shape_cannot_be_trained():
    with pytest.raises(ConfigError, match="has no weights"):
        refuse_weightless_shape("shape:llama3-8b")
