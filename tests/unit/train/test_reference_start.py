"""With which model a run that resumes compares answers."""

import hashlib

import pytest

from hpc_tune.checkpoint.state import RunState
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError, DataError
from hpc_tune.train.reference import hash_init_adapter, require_same_init_adapter

WEIGHTS = b"weights"
HASH = hashlib.sha256(WEIGHTS).hexdigest()


@pytest.fixture
def adapter(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(WEIGHTS)
    return str(tmp_path)


def saved(start, init_from=None):
    config = {"tune": {"init_from": init_from}}
    return RunState(10, 40, "", {}, {}, 1, config, start=start)


def test_the_start_is_that_of_the_adapter_where_answers_are_compared(adapter):
    assert hash_init_adapter(TuneConfig(objective="dpo", init_from=adapter)) == HASH
    assert hash_init_adapter(TuneConfig(objective="kto")) == ""
    assert hash_init_adapter(TuneConfig(objective="orpo", init_from=adapter)) is None
    with pytest.raises(DataError, match="adapter_model.safetensors in it cannot be read"):
        hash_init_adapter(TuneConfig(objective="dpo", init_from=f"{adapter}/gone"))


def test_the_same_start_goes_on_wherever_it_lies(adapter):
    tune = TuneConfig(objective="dpo", init_from=adapter)
    require_same_init_adapter(saved(HASH, "moved/since"), tune)
    require_same_init_adapter(saved(None), tune)  # of a version that did not keep it
    require_same_init_adapter(saved("", adapter), TuneConfig(objective="dpo"))
    require_same_init_adapter(saved("other"), TuneConfig(objective="simpo"))


@pytest.mark.parametrize(
    ("start", "before", "has_adapter", "said"),
    [
        (HASH, "runs/sft", False, "the run started from runs/sft, but none is given now"),
        ("", None, True, "the run started from no adapter, but {adapter} is given now"),
        ("other", "{adapter}", True, "{adapter} has other weights than in the checkpoint's run"),
    ],
)
def test_another_start_is_refused(adapter, start, before, has_adapter, said):
    tune = TuneConfig(objective="dpo", init_from=adapter if has_adapter else None)
    with pytest.raises(ConfigError) as refused:
        require_same_init_adapter(saved(start, before and before.format(adapter=adapter)), tune)
    assert said.format(adapter=adapter) in str(refused.value)
    assert "Give the old adapter, or another run.dir" in str(refused.value)
