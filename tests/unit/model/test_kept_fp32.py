"""What transformers loads in fp32 of a bf16 model is fp32 here, with the values of the file."""

import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hpc_tune.config.tune import TuneConfig
from hpc_tune.model.build import build
from hpc_tune.model.load import allocate, load_weights
from tests.unit.checkpoint.test_mixture_round_trips import write_family

BF16 = torch.bfloat16
OURS = re.compile(r"^model\.(base_model\.model\.)?|\.base_layer")
FAMILIES = ("deepseek_v3", "ernie4_5_moe")
MORE = ("glm4_moe", "nemotron_h", "gpt_oss", "qwen3_next", "lfm2_moe", "minimax_m2", "afmoe")


def write(family, directory):
    """Write a mixture whose biases of a choice have digits that bf16 has not."""
    directory.mkdir()
    file = write_family(family, directory) / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("bias") and ("correction" in name or "expert_bias" in name):
            tensor.copy_(4.0 + torch.rand(tensor.shape, generator=torch.Generator().manual_seed(1)))
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def tensors_of(model):
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if "lora_" not in name}


def loaded(directory, tune):
    built = build(directory, BF16, tune, 0)
    allocate(built.module, torch.device("cpu"))
    load_weights(built)
    return {OURS.sub("", name): tensor for name, tensor in tensors_of(built.module).items()}


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)]
)
def test_frozen_tensors_have_the_dtype_and_the_values_of_stock_transformers(tmp_path, family):
    base = write(family, tmp_path / "base")
    query = "q_a_proj" if family == "deepseek_v3" else "q_proj"
    own = loaded(base, TuneConfig(method="lora", rank=4, targets=[query, "experts"]))
    wanted = tensors_of(AutoModelForCausalLM.from_pretrained(base, dtype=BF16))
    assert own.keys() == wanted.keys()
    assert {n: t.dtype for n, t in own.items()} == {n: t.dtype for n, t in wanted.items()}
    assert all(torch.equal(own[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("method", ["lora", "full", "qlora"])
def test_biases_of_a_choice_are_exact_whatever_is_trained(tmp_path, method):
    if method == "qlora":
        pytest.importorskip("bitsandbytes")
    base = write("deepseek_v3", tmp_path / "base")
    full = {"param_dtype": "bf16"}
    tensors = loaded(base, TuneConfig(method=method, **(full if method == "full" else {})))
    stored = load_file(base / "model.safetensors")
    biases = [name for name in stored if name.endswith("e_score_correction_bias")]
    assert biases
    for name in biases:
        assert torch.equal(tensors[name], stored[name])
        assert not torch.equal(stored[name], stored[name].to(BF16).float())
