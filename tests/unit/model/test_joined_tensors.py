"""Stacks of experts that files hold one by one."""

import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpc_tune.checkpoint.export import export_merged
from hpc_tune.checkpoint.gguf_file import export_gguf
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError, DataError
from hpc_tune.model.build import build
from hpc_tune.model.language import make_language_model, read_config
from hpc_tune.model.weights import index_model_directory
from tests.support.mixtures import merged_and_own_logits, write_mixture
from tests.unit.checkpoint.test_export import TOKENS_BT, trained
from tests.unit.model.test_float8_checkpoints import quantized

BLOCK = 24  # of which no matrix has a whole number
LORA = TuneConfig(method="lora", rank=4, alpha=6.0)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return write_mixture("qwen3_moe", tmp_path_factory.mktemp("qwen"))


def changed(base, directory, change):
    """Copy a model with its tensors changed."""
    directory.mkdir()
    for file in base.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def drop(name):
    return lambda tensors: tensors.pop(name)


def cut(name, dim):
    def change(tensors):
        length = tensors[name].shape[dim] - 1
        tensors[name] = tensors[name].narrow(dim, 0, length).contiguous()

    return change


EXPERT = "model.layers.1.mlp.experts.2"
WRONG = {
    "one": (
        drop(f"{EXPERT}.up_proj.weight"),
        r"experts by config.json, but the files hold \d+ of .*experts\.N\.up_proj",
    ),
    "rows": (
        cut(f"{EXPERT}.up_proj.weight", 0),
        rf"{EXPERT}.up_proj.weight has the shape .*experts.0.up_proj.weight, which it is stacked",
    ),
    "columns": (
        cut(f"{EXPERT}.down_proj.weight", 1),
        rf"{EXPERT}.down_proj.weight has the shape .*experts.0.down_proj.weight, which it is",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_expert_that_is_missing_or_of_another_shape_is_refused(qwen, tmp_path, wrong):
    change, said = WRONG[wrong]
    base = changed(qwen, tmp_path / "base", change)
    with pytest.raises(DataError, match=said):
        build(base, torch.float32, LORA, 0)


@pytest.mark.full
def test_a_run_without_one_expert_ends_with_one_message(qwen, tmp_path):
    base = changed(qwen, tmp_path / "base", WRONG["one"][0])
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a document of some words"}\n' * 4)
    words = [f"model.path={base}", f"data.path={data}", f"run.dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, "-m", "hpc_tune", *words, "data.seq_len=32", f"data.cache={tmp_path}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    said = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert len(said) == 1, done.stderr
    assert re.search(WRONG["one"][1], said[0])


def test_a_mixture_is_not_written_as_gguf(qwen, tmp_path):
    trained(qwen, LORA, tmp_path / "step")
    with pytest.raises(ConfigError, match=r"model_type=qwen3_moe, expected one of llama"):
        export_gguf(tmp_path / "step", LORA, qwen, tmp_path / "out")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """A small DeepSeek-V3 in float8 with block scales, as it is published; and what it means."""
    directory = write_mixture("deepseek_v3", tmp_path_factory.mktemp("deepseek"))
    file, out, meant = directory / "model.safetensors", {}, {}
    for name, tensor in load_file(file).items():
        if tensor.dim() == 2 and "layers" in name and ".gate.weight" not in name:
            values, scale, whole = quantized(tensor.float(), "block", BLOCK)
            out |= {name: values, f"{name}_scale_inv": scale.contiguous()}
            meant[name] = (values.float() * whole).bfloat16()
        else:
            keeps = "e_score_correction_bias" in name
            out[name] = meant[name] = tensor if keeps else tensor.bfloat16()
    save_file(out, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    quantization = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    quantization |= {"weight_block_size": [BLOCK, BLOCK]}
    config |= {"dtype": "bfloat16", "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    return directory, meant


def test_any_region_of_a_stack_of_float8_experts_is_what_they_stand_for(deepseek):
    directory, meant = deepseek
    index = index_model_directory(directory)
    index = make_language_model(read_config(directory), directory, torch.float32, index).index
    path = "model.layers.1.mlp.experts"
    experts = [f"{path}.{number}" for number in range(8)]
    gates, ups, downs = (
        torch.stack([meant[f"{expert}.{name}_proj.weight"] for expert in experts])
        for name in ("gate", "up", "down")
    )
    stacks = {f"{path}.gate_up_proj": torch.cat([gates, ups], 1), f"{path}.down_proj": downs}
    for name, whole in stacks.items():
        assert index.shapes[name] == tuple(whole.shape)
        for box in (whole.shape, (2, whole.shape[1] - 5, 7)):
            start = tuple(a - b for a, b in zip(whole.shape, box, strict=True))
            local = torch.empty(box, dtype=torch.bfloat16)
            index.fill(local, name, start)
            assert torch.equal(local, whole[tuple(slice(s, None) for s in start)])


def test_a_float8_mixture_is_merged_in_bf16_under_its_own_names(deepseek, tmp_path):
    directory, meant = deepseek
    tune = LORA.model_copy(update={"targets": ["q_a_proj"]})
    module = trained(directory, tune, tmp_path / "step")
    out = export_merged(tmp_path / "step", tune, directory, tmp_path / "merged")
    tensors = load_file(out / "model-00001-of-00001.safetensors")
    assert tensors.keys() == meant.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, meant[name]) == ("q_a_proj" not in name), name
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    merged, ours = merged_and_own_logits(out, module, TOKENS_BT)
    assert (merged - ours).abs().max() <= 0.02 * ours.abs().max()  # bf16 rounds q_a_proj
