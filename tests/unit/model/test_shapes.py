import pytest
import torch

from hpc_tune.config.schema import RunConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import build
from hpc_tune.model.shapes import refuse_shape, shape_directory, shape_names
from hpc_tune.step.size import measure

# (hidden, wide, layers, width of queries, width of keys and of values, vocabulary)
LLAMA_8B = (4096, 14336, 32, 4096, 1024, 128256)
LLAMA_70B = (8192, 28672, 80, 8192, 1024, 128256)
LLAMA_405B = (16384, 53248, 126, 16384, 1024, 128256)
QWEN_32B = (5120, 25600, 64, 8192, 1024, 151936)
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


@pytest.mark.parametrize(
    ("name", "published", "counted"),
    [
        ("llama3-8b", 8.03e9, gated(*LLAMA_8B)),
        ("llama3-70b", 70.55e9, gated(*LLAMA_70B)),
        ("llama3-405b", 405.85e9, gated(*LLAMA_405B)),
        ("qwen3-32b", 32.76e9, gated(*QWEN_32B, extra=2 * 128)),  # norms of q and k
        ("phi3-mini", 3.82e9, gated(*PHI_MINI)),
        ("falcon-7b", 6.92e9, falcon()),
    ],
)
def test_a_shape_has_the_published_number_of_parameters(name, published, counted):
    directory = shape_directory(f"shape:{name}")
    built = build(directory, torch.bfloat16, TuneConfig(method="full"), 0, weights=False)
    assert measure(built.module).num_parameters == counted
    assert counted == pytest.approx(published, abs=0.005e9)


def test_every_shape_is_counted_above():
    assert shape_names() == [
        *("falcon-7b", "llama3-405b", "llama3-70b", "llama3-8b", "phi3-mini", "qwen3-32b")
    ]


def test_a_directory_stays_a_directory():
    assert str(shape_directory("models/x")) == "models/x"
    refuse_shape("models/x")
    refuse_shape(RunConfig().model.path)


def test_an_unknown_shape_names_the_near_ones():
    with pytest.raises(ConfigError, match=r"shape:llama3-7b: no such shape; .*llama3-70b"):
        shape_directory("shape:llama3-7b")


def test_a_shape_cannot_be_trained():
    with pytest.raises(ConfigError, match="has no weights"):
        refuse_shape("shape:llama3-8b")
