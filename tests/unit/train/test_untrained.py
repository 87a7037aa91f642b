"""What is said of adapters and weights that get no gradient."""

import pytest
import torch

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import build
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.train.model import _require_supported_settings, _require_trained_targets
from hpc_tune.train.startup.architecture_check import ArchitectureCheck

PART = "model.layers.*.self_attn.k_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    write_tiny_model(directory := tmp_path_factory.mktemp("tiny") / "model")
    return directory


def built(base, **said):
    return build(base, torch.float32, TuneConfig(**said), 0)


@pytest.mark.parametrize("target", ["k_proj", "self_attn.k_proj"])
def test_a_named_target_whose_adapters_get_no_gradient_is_refused(base, target):
    model = built(base, targets=["q_proj", target])
    with pytest.raises(ConfigError) as error:
        _require_trained_targets(model, ArchitectureCheck(untrained=PART))
    assert f"adapters on {PART} get no gradient: a llama model does not call" in str(error.value)
    assert str(error.value).endswith(f"; leave {target} out")


def test_one_among_all_linear_layers_is_warned_of(base, caplog):
    with caplog.at_level("WARNING", logger="hpc_tune"):
        _require_trained_targets(built(base), ArchitectureCheck(untrained=PART))
    assert f"adapters on {PART} get no gradient" in caplog.text
    assert caplog.text.rstrip().endswith("they stay zero")


def test_a_weight_without_a_gradient_is_warned_of(base, caplog):
    with caplog.at_level("WARNING", logger="hpc_tune"):
        _require_trained_targets(
            built(base, method="full"), ArchitectureCheck(untrained=f"{PART}.weight\nanother")
        )
    assert caplog.text.rstrip().endswith(f"no gradient and stay as they are: {PART}.weight")


@pytest.mark.parametrize("untrained", ["", PART])
def test_nothing_is_said_of_what_is_not_trained(base, untrained, caplog):
    with caplog.at_level("WARNING", logger="hpc_tune"):
        _require_trained_targets(
            built(base, targets=["q_proj"]), ArchitectureCheck(untrained=untrained)
        )
    assert not caplog.text


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("lora", "tune.method=lora with tune.targets=all-linear: a llama model cannot have such"),
        ("qlora", "tune.method=qlora: a llama model's base cannot be in 4 bits: it fails; use"),
    ],
)
def test_adapters_that_fail_in_the_trial_are_refused(method, said):
    tune = TuneConfig(method=method)
    with pytest.raises(ConfigError, match=said):
        _require_supported_settings(
            ArchitectureCheck(adapters="it fails"), "llama", ParallelConfig(), tune
        )
