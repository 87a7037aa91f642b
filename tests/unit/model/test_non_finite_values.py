"""NaN and inf in what is read: named at loading, whatever the method."""

import math
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hpc_tune.config.tune import TuneConfig
from hpc_tune.engine.zero.state import fill_parameter
from hpc_tune.errors import DataError
from hpc_tune.model.build import build
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.load import allocate, load_weights, use_init_adapter
from hpc_tune.model.tensor_sources import reserve_nothing
from hpc_tune.model.weights import find_non_finite

NAME = "model.layers.2.self_attn.k_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_value_that_is_not_finite_is_found_wherever_it_is(dtype, value):
    whole = torch.randn(257, 12).to(dtype)
    assert find_non_finite(whole) is None
    for row, column in ((0, 0), (130, 5), (256, 11)):
        tensor = whole.clone()
        tensor[row, column] = value
        tensor[256, 11] = value
        for view, at in ((tensor, (row, column)), (tensor.t(), None), (tensor[:, :], None)):
            found = find_non_finite(view)
            assert found is not None
            assert view[found.position].isfinite().item() is False
            assert str(found.value) == str(value)
            assert at is None or found.position == at
    assert find_non_finite(torch.tensor(value, dtype=dtype)).position == ()


def test_what_has_no_values_or_no_fractions_is_finite():
    for tensor in (torch.empty(0, 3), torch.arange(5), torch.zeros(2, dtype=torch.uint8)):
        assert find_non_finite(tensor) is None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("base") / "tiny"
    write_tiny_model(directory)
    return directory


def damaged(tiny, directory, value, name=NAME):
    shutil.copytree(tiny, directory)
    weights = load_file(directory / "model.safetensors")
    weights[name].view(-1)[-1] = value
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory, [n - 1 for n in weights[name].shape]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["lora", "full", "qlora", "dora"])
def test_a_weight_of_the_base_that_is_not_finite_is_named(tiny, tmp_path, method, dtype, value):
    if method == "qlora":
        pytest.importorskip("bitsandbytes")
    base, place = damaged(tiny, tmp_path / "base", value)
    built = build(base, dtype, TuneConfig(method=method), 0)
    allocate(built.module, torch.device("cpu"))
    with pytest.raises(DataError) as raised:
        load_weights(built)
    message = str(raised.value)
    assert f"model.safetensors: {NAME} has {value:g} at {place}, expected finite" in message
    assert "copy or convert them again" in message


def test_a_norm_and_an_embedding_are_looked_at_too(tiny, tmp_path):
    for number, name in enumerate(("model.norm.weight", "model.embed_tokens.weight")):
        base, place = damaged(tiny, tmp_path / str(number), math.nan, name)
        built = build(base, torch.float32, TuneConfig(), 0)
        allocate(built.module, torch.device("cpu"))
        with pytest.raises(DataError, match=rf"{name} has nan at \[{place[0]}"):
            load_weights(built)


def test_a_part_of_a_weight_under_zero_3_names_its_place_in_the_whole(tiny, tmp_path):
    base, place = damaged(tiny, tmp_path / "base", math.nan)
    built = build(base, torch.float32, TuneConfig(), 0)
    (own,) = (own for own, stored in built.base_names.items() if stored == NAME)
    shape = tuple(built.index.shapes[NAME])
    half = math.prod(shape) // 2
    part = torch.empty(half)
    fill_parameter(built, own, part, shape, 0, reserve_nothing)
    with pytest.raises(DataError, match=rf"{NAME} has nan at \[{place[0]}, {place[1]}\]"):
        fill_parameter(built, own, part, shape, half, reserve_nothing)


def test_an_adapter_to_begin_with_that_is_not_finite_is_named(tiny, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
    with torch.no_grad():
        adapted.base_model.model.model.layers[1].mlp.up_proj.lora_B["default"].weight[3, 1] = (
            math.nan
        )
    adapted.save_pretrained(tmp_path / "adapter")
    built = build(tiny, torch.float32, TuneConfig(rank=4, alpha=6.0), 0)
    built = use_init_adapter(built, tmp_path / "adapter")
    allocate(built.module, torch.device("cpu"))
    with pytest.raises(
        DataError, match=r"adapter_model.safetensors: .*lora_B.* has nan at \[3, 1\]"
    ):
        load_weights(built)
