"""Layers that are not called as linear layers are have no adapters and stay whole."""

import logging

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import build
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.quantized_base import FourBitLinear
from hpc_tune.model.stock_reference import write_small_model
from hpc_tune.train.model import _log_ignored_parts

LAYERS = {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]}
FAMILIES = {
    "nemotron_h": ({}, {"out_proj"}, "in_proj"),
    "granitemoehybrid": (LAYERS | {"num_local_experts": 0}, {"out_proj"}, "in_proj"),
    "mamba2": ({}, {"out_proj"}, "in_proj"),
    "deepseek_v4": ({}, {"o_a_proj"}, "o_b_proj"),  # of groups
    "deepseek_v32": ({}, {"wq_b", "wk", "weights_proj"}, "o_proj"),  # chooses keys
    "falcon_mamba": ({}, {"out_proj", "x_proj", "dt_proj"}, "in_proj"),
    "jamba": ({}, set(), "out_proj"),  # Mamba 1 with norms between: it calls each projection
    "qwen3_next": ({}, set(), "out_proj"),  # its linear attention calls it
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    fields, expected, other = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("model") / request.param
    write_tiny_model(folder)
    (folder / "model.safetensors").unlink()
    write_small_model(AutoConfig.for_model(request.param, **fields), folder)
    return folder, expected, other


def adapted(built):
    return {name.split(".lora_A")[0].rpartition(".")[2] for name in built.saved_names.values()}


def test_all_linear_leaves_them_out_and_says_so(model, caplog):
    folder, expected, other = model
    built = build(folder, torch.float32, TuneConfig(), 0)
    assert other in adapted(built)
    assert not adapted(built) & expected
    with caplog.at_level(logging.INFO, logger="hpc_tune"):
        _log_ignored_parts(built)
    assert ("have no adapters: the model does not call them" in caplog.text) == bool(expected)
    assert all(name in caplog.text for name in expected)


def test_a_named_one_is_refused(model):
    folder, expected, other = model
    tune = TuneConfig(targets=[other, *sorted(expected)])
    if not expected:
        assert other in adapted(build(folder, torch.float32, tune, 0))
        return
    with pytest.raises(ConfigError, match="is not called like other linear layers") as error:
        build(folder, torch.float32, tune, 0)
    assert f"leave {', '.join(sorted(expected))} out" in str(error.value)


def test_they_are_not_in_4_bits_and_that_is_said(model, caplog):
    folder, expected, other = model
    built = build(folder, torch.bfloat16, TuneConfig(method="qlora", targets=[other]), 0)
    modules = dict(built.module.named_modules())
    linears = {name.rpartition(".")[2] for name, m in modules.items() if isinstance(m, nn.Linear)}
    packed = {
        name.replace(".base_layer", "").rpartition(".")[2]
        for name, module in modules.items()
        if isinstance(module, FourBitLinear)
    }
    assert other in packed
    assert not packed & expected
    assert linears >= expected
    with caplog.at_level(logging.INFO, logger="hpc_tune"):
        _log_ignored_parts(built)
    assert ("are not in 4 bits: the model does not call them" in caplog.text) == bool(expected)
