"""Models that tests of several modules share."""

import pytest

from tests.support.random_model import SHAPE_SMALL, write_random_model
from tests.support.ranks import python, rank_environment, run_ranks
from tests.support.training import SMALL


@pytest.fixture(scope="session")
def larger(tmp_path_factory):
    """A model of 33M values: full fine-tuning in fp32 takes about 800 MB, its state 400 MB."""
    folder = tmp_path_factory.mktemp("larger") / "model"
    shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 16000}
    write_random_model(folder, **shape, **heads)
    return folder


@pytest.fixture(scope="session")
def tuned(tmp_path_factory):
    """A run that has tuned adapters of a model of 0.1B values, 200 MB in bf16."""
    folder = tmp_path_factory.mktemp("tuned")
    write_random_model(folder / "model", **SHAPE_SMALL)
    words = [*SMALL, f"model.path={folder / 'model'}", "train.max_steps=1", "tune.method=lora"]
    argv = [*python(), "-m", "hpc_tune", *words, f"run.dir={folder / 'run'}"]
    done = run_ranks(argv, rank_environment(1), 180.0)
    assert done.returncode == 0, done.stderr
    return folder
