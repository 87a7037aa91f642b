"""Which models' routers are watched, and what is said where they cannot be."""

import pytest
import torch

from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import build
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.language import read_config
from hpc_tune.train.model import _log_ignored_parts, _with_router_watch
from hpc_tune.train.startup.architecture_check import ArchitectureCheck, check_architecture
from tests.support.mixtures import write_mixture
from tests.support.older_transformers import since

LEARNS = TuneConfig(router_aux_loss=0.01, router_z_loss=0.001)
BOTH = "tune.router_aux_loss=0.01 and tune.router_z_loss=0.001: "


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    write_tiny_model(folder / "dense")
    return {"dense": folder / "dense", "mixture": write_mixture("mixtral", folder / "mixture")}


def built(directory, tune=LEARNS):
    return build(directory, torch.float32, tune, 0)


def test_a_mixture_that_is_understood_is_watched_with_and_without_losses(bases):
    for tune in (LEARNS, TuneConfig()):
        found = _with_router_watch(
            built(bases["mixture"], tune), ArchitectureCheck(score="softmax"), False
        )
        assert [router.num_experts for router in found.routers] == [6] * len(found.routers)
        assert found.routers


@pytest.mark.parametrize(
    ("base", "score", "is_compiled", "said"),
    [
        ("dense", "", False, "a llama model has no experts"),
        ("mixture", "", False, "hpc_tune does not understand how the routers of a mixtral model"),
        ("mixture", "softmax", True, "train.compile=true: routers cannot be watched"),
    ],
)
def test_losses_of_routers_that_cannot_be_watched_are_refused(
    bases, base, score, is_compiled, said, caplog
):
    with pytest.raises(ConfigError) as error:
        _with_router_watch(built(bases[base]), ArchitectureCheck(score=score), is_compiled)
    assert BOTH + said in str(error.value)
    assert str(error.value).endswith("; leave them out")
    with caplog.at_level("WARNING", logger="hpc_tune"):
        found = _with_router_watch(
            built(bases[base], TuneConfig()), ArchitectureCheck(score=score), is_compiled
        )
    assert found.routers == ()
    assert (f"not counted: {said}" in caplog.text) == (base == "mixture")


@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        pytest.param("granitemoe", marks=since("5.18", "fails with a loss of its routers")),
    ],
)
def test_a_loss_that_config_json_asks_transformers_for_is_not_learned_and_said(
    tmp_path, caplog, family
):
    """As trl and LLaMA-Factory leave it there: transformers would add it to the loss."""
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    base = write_mixture(family, tmp_path / "base", **asked)
    assert check_architecture(read_config(base)) == ArchitectureCheck(score="softmax")
    with caplog.at_level("WARNING", logger="hpc_tune"):
        _log_ignored_parts(built(base))
        assert "a loss of the routers" not in caplog.text
        _log_ignored_parts(built(base, TuneConfig()))
    assert "asks for a loss of the routers" in caplog.text
    assert "tune.router_aux_loss, which is not set: no such loss is used" in caplog.text
