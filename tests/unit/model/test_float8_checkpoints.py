"""float8 checkpoints with scales, and quantized ones that are refused."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config

from hpc_tune.errors import DataError
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.tensor_sources import ScaledTensor
from hpc_tune.model.weights import index_model_directory
from tests.unit.model.test_model_build import FAMILY, documents, loaded, our_loss, row, stock_loss

BLOCK = 128


def quantized(matrix, kind, size=BLOCK):
    """Return float8 values and their scales, as transformers and vLLM's tools store them."""
    rows, columns = matrix.shape
    if kind == "block":
        down, right = -(-rows // size), -(-columns // size)
        padded = torch.zeros(down * size, right * size)
        padded[:rows, :columns] = matrix
        blocks = padded.view(down, size, right, size)
        scale = (blocks.abs().amax((1, 3)) / 448).clamp(min=1e-8)
        whole = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[:rows, :columns]
        return (matrix / whole).to(torch.float8_e4m3fn), scale, whole
    dims = () if kind == "tensor" else (1,)
    scale = matrix.abs().amax(dims, keepdim=bool(dims)) / 448 if dims else matrix.abs().max() / 448
    return (matrix / scale).to(torch.float8_e4m3fn), scale, scale.expand_as(matrix)


def stored(directory, kind, quantization, suffix):
    """Turn a tiny model into a float8 one; return the values that it stands for, in bf16."""
    write_tiny_model(directory)
    tensors = load_file(directory / "model.safetensors")
    meant, out = {}, {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "layers" in name:
            values, scale, whole = quantized(tensor.float(), kind)
            out |= {name: values, name + suffix: scale.contiguous()}
            meant[name] = (values.float() * whole).bfloat16()
        else:
            out[name] = meant[name] = tensor
    save_file(out, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({**config, "quantization_config": quantization})
    )
    return meant


KINDS = {
    "block": ("block", {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, "_scale_inv"),
    "tensor": ("tensor", {"quant_method": "fp8", "weight_block_size": None}, "_scale_inv"),
    "row": ("row", {"quant_method": "compressed-tensors", "format": "float-quantized"}, "_scale"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_region_of_a_float8_weight_is_read_as_what_it_stands_for(tmp_path, kind):
    meant = stored(tmp_path, *KINDS[kind])
    index = index_model_directory(tmp_path)
    assert index.shapes.keys() == meant.keys()
    for name, whole in meant.items():
        if whole.dim() != 2:
            continue
        rows, columns = whole.shape
        for box in ((0, rows, 0, columns), (rows // 3, rows, 1, columns - 1), (3, 4, 0, columns)):
            top, bottom, left, right = box
            local = torch.empty(bottom - top, right - left, dtype=torch.bfloat16)
            index.fill(local, name, (top, left))
            assert torch.equal(local, whole[top:bottom, left:right].bfloat16()), name
        assert index.map_pages(name, torch.bfloat16) is None or not isinstance(
            index.sources[name], ScaledTensor
        )


def test_scales_that_are_missing_or_do_not_fit_are_refused(tmp_path):
    stored(tmp_path, *KINDS["block"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("_scale_inv"))
    save_file({**tensors, name: tensors[name].repeat(2, 1)}, file)
    with pytest.raises(DataError, match="which does not fit a matrix of"):
        index_model_directory(tmp_path)
    save_file({n: t for n, t in tensors.items() if n != name}, file)
    with pytest.raises(DataError, match=r"stored in float8 without a scale"):
        index_model_directory(tmp_path)


@pytest.mark.parametrize("block", [[0, 128], ["128", 128], [128], 128, [1.5, 2], {}])
def test_blocks_that_are_no_two_sizes_are_refused(tmp_path, block):
    stored(tmp_path, *KINDS["block"])
    file = tmp_path / "config.json"
    quantization = {"quant_method": "fp8", "weight_block_size": block}
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization})
    )
    with pytest.raises(DataError, match=re.escape(f"in blocks of {block}")):
        index_model_directory(tmp_path)


def test_scales_that_are_powers_of_two_may_be_stored_as_exponents(tmp_path):
    """As in DeepSeek's files from V3.1 on, scale_fmt ue8m0."""
    stored(tmp_path, *KINDS["block"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    scales = {n for n in tensors if n.endswith("_scale_inv")}
    powers = {n: torch.exp2(torch.log2(tensors[n]).ceil()) for n in scales}
    exponents = {n: power.to(torch.float8_e8m0fnu) for n, power in powers.items()}
    save_file({**tensors, **exponents}, file)
    index = index_model_directory(tmp_path)
    for name in scales:
        weight = name.removesuffix("_scale_inv")
        local = torch.empty(index.shapes[weight], dtype=torch.float32)
        index.fill(local, weight)
        rows, columns = local.shape
        whole = powers[name].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        assert torch.equal(local, tensors[weight].float() * whole[:rows, :columns])


def test_a_dtype_that_is_not_read_is_named(tmp_path):
    write_tiny_model(tmp_path)
    save_file({"a.weight": torch.ones(4, dtype=torch.uint16)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"a\.weight is stored as U16, which is not read here"):
        index_model_directory(tmp_path)


def test_a_config_that_speaks_of_quantized_weights_where_none_are_is_refused_as_such(tmp_path):
    write_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"\(mxfp4\), but none has a .* remove quantization_config"):
        index_model_directory(tmp_path)


def test_a_stack_of_matrices_in_float8_is_refused(tmp_path):
    write_tiny_model(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stack = {name: torch.ones(2, 4, 4).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1)}
    save_file(stack, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"a stack of matrices in float8, \[2, 4, 4\]"):
        index_model_directory(tmp_path)


@pytest.mark.parametrize("shape", [(8,), ()])
def test_what_is_no_matrix_in_float8_is_refused_by_name(tmp_path, shape):
    config = {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"a.weight": torch.zeros(shape).to(torch.float8_e4m3fn)}
    tensors["a.weight_scale_inv"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        DataError, match=r"a\.weight is stored in float8 and has the shape .* matrix"
    ):
        index_model_directory(tmp_path)


@pytest.mark.parametrize(
    ("method", "extra"),
    [
        ("gptq", "model.layers.0.self_attn.q_proj.qweight"),
        ("awq", "model.layers.0.self_attn.q_proj.qweight"),
        ("bitsandbytes", "model.layers.0.self_attn.q_proj.weight.absmax"),
        ("compressed-tensors", "model.layers.0.self_attn.q_proj.weight_packed"),
        (None, "model.layers.0.self_attn.q_proj.qweight"),
    ],
)
def test_other_quantized_checkpoints_are_refused_by_their_method(tmp_path, method, extra):
    write_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, extra: torch.ones(4, 4)}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = rf"quantized \({method or 'an unknown method'}, such as in .*tune.method=qlora"
    with pytest.raises(DataError, match=said):
        index_model_directory(tmp_path)


@pytest.mark.parametrize("kind", ["block", "tensor"])
def test_a_float8_model_has_the_loss_of_what_transformers_makes_of_it(tmp_path, kind):
    shape = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", **FAMILY | shape)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file, out = tmp_path / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        is_scaled = tensor.dim() == 2 and "layers" in name
        values, scale, _ = quantized(tensor, kind) if is_scaled else (tensor, None, None)
        out |= {name: values} if scale is None else {name: values, f"{name}_scale_inv": scale}
    save_file(out, file, metadata={"format": "pt"})
    blocks = [BLOCK, BLOCK] if kind == "block" else None
    said = json.loads((tmp_path / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": blocks}
    (tmp_path / "config.json").write_text(json.dumps(said | {"quantization_config": quantization}))
    options = FineGrainedFP8Config(dequantize=True, weight_block_size=blocks)
    stock = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=options
    )
    docs = documents(128)
    wanted = stock_loss(stock.eval(), docs)
    ours = our_loss(loaded(tmp_path).module, *map(row, docs))
    assert abs(ours - wanted) <= 1e-6 * wanted
