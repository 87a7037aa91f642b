"""What of a model is a router, and what an expert."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import build
from hpc_tune.model.experts import find_routers, find_stacked_experts, label_parameters_by_part
from hpc_tune.model.stock_reference import shrink_config
from tests.support.mixtures import write_mixture


def model_of(kind, **fields):
    config = shrink_config(AutoConfig.for_model(kind, **fields), 8)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["llama", "rwkv", "recurrent_gemma", "falcon_mamba"])
def test_a_dense_model_has_neither_whatever_shapes_its_tensors_have(kind):
    model = model_of(kind)
    assert list(find_stacked_experts(model)) == []
    assert find_routers(model) == {}
    assert label_parameters_by_part(model) == {}


@pytest.mark.parametrize(
    ("kind", "fields", "routers"),
    [
        ("mixtral", {}, {"gate"}),
        ("qwen2_moe", {}, {"gate", "shared_expert_gate"}),
        ("gpt_oss", {}, {"router"}),
        ("phimoe", {}, {"router"}),
        ("hunyuan_v1_moe", {"num_experts": 16, "moe_topk": 2, "head_dim": 128}, {"gate", "wg"}),
        ("jetmoe", {}, {"router", "layer"}),
    ],
)
def test_experts_and_routers_of_a_mixture_are_found(kind, fields, routers):
    model = model_of(kind, **fields)
    assert (
        len({path.split(".")[2] for path, _ in find_stacked_experts(model)}) == 2
    )  # in both layers
    assert {path.rpartition(".")[2] for path in find_routers(model)} == routers
    kinds = label_parameters_by_part(model)
    routed = sum(p.numel() for p, kind in kinds.items() if kind == "routed experts")
    assert routed > sum(p.numel() for p, kind in kinds.items() if kind == "attention") > 0
    assert all(p.dim() <= 2 for p, kind in kinds.items() if kind == "routers")


@pytest.mark.parametrize(
    ("targets", "pattern", "said"),
    [
        ("all-linear,experts", "layers.1.mlp.experts", "experts matches model.layers.1.mlp.exp"),
        ("experts", "q_proj", "no layer with an adapter; only experts have one, and their rank is"),
    ],
)
def test_a_pattern_of_experts_alone_is_refused_with_what_it_matches(
    tmp_path, targets, pattern, said
):
    model = write_mixture("mixtral", tmp_path / "mixtral")
    tune = TuneConfig(targets=targets.split(","), rank_pattern={pattern: 2})
    with pytest.raises(ConfigError, match=said):
        build(model, torch.float32, tune, 0)


def test_names_that_files_give_single_experts_are_refused_with_the_name_of_all(tmp_path):
    model = write_mixture("mixtral", tmp_path / "mixtral")
    with pytest.raises(ConfigError) as error:
        build(model, torch.float32, TuneConfig(targets=["w1", "w2"]), 0)
    assert "no layer of this model is called w1, w2. Its linear layers: " in str(error.value)
    assert str(error.value).endswith("; its routed experts, as stacks: experts")


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("jetmoe", "; name them, as in [all-linear, input_linear, output_linear], or leave it out"),
        ("llama", ", and this model has none; leave it out"),
    ],
)
def test_a_rank_of_experts_that_no_target_names_is_refused_with_their_names(kind, advice, tmp_path):
    shrink_config(AutoConfig.for_model(kind), 8).save_pretrained(tmp_path)
    tune = TuneConfig(targets=["all-linear"], expert_rank=4)
    with pytest.raises(ConfigError) as error:
        build(tmp_path, torch.float32, tune, 0, reads_weights=False)
    assert str(error.value).endswith(f"name no routed experts{advice}")
