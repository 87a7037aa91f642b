"""Stacks of experts in MXFP4, as gpt_oss is published: read as transformers reads them."""

import json
import random
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hpc_tune.checkpoint.export import export_merged
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import DataError
from hpc_tune.model import tensor_sources
from hpc_tune.model.weights import index_model_directory
from tests.support.mixtures import merged_and_own_logits, write_mixture
from tests.unit.checkpoint.test_export import TOKENS_BT, trained

EXPERTS, ROWS, GROUPS = 3, 10, 4
STACK = "model.layers.0.mlp.experts.gate_up_proj"


def packed(experts, rows, groups, scales=(0, 256)):
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(256, (experts, rows, groups, 16), generator=generator)
    exponents = torch.randint(*scales, (experts, rows, groups), generator=generator)
    return blocks.to(torch.uint8), exponents.to(torch.uint8)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A small gpt_oss whose stacks are MXFP4, with the names and the settings of the real one."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    directory = write_mixture("gpt_oss", folder, intermediate_size=128)
    file, out = directory / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        if tensor.dim() == 3:
            experts, inputs, rows = tensor.shape
            blocks, scales = packed(experts, rows, inputs // 32, (118, 124))
            out |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            out[name] = tensor.bfloat16()
    save_file(out, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    config |= {"dtype": "bfloat16", "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def stock(directory, **options):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **options).eval()


def dequantized(directory):
    return stock(directory, quantization_config=Mxfp4Config(dequantize=True))


def test_any_region_is_what_transformers_makes_of_the_blocks(tmp_path, monkeypatch):
    blocks, scales = packed(EXPERTS, ROWS, GROUPS)
    save_file(
        {f"{STACK}_blocks": blocks, f"{STACK}_scales": scales}, tmp_path / "model.safetensors"
    )
    index = index_model_directory(tmp_path)
    wanted = convert_moe_packed_tensors(blocks, scales)
    assert index.stored_names == [STACK]
    assert index.shapes[STACK] == tuple(wanted.shape) == (EXPERTS, 32 * GROUPS, ROWS)
    assert index.map_pages(STACK, torch.bfloat16) is None
    draw = random.Random(7)
    boxes = [[(0, size) for size in wanted.shape]]
    boxes += [[sorted(draw.sample(range(n + 1), 2)) for n in wanted.shape] for _ in range(60)]
    for piece_bytes in (16 << 20, 4000):  # in one part, and in some
        monkeypatch.setattr(tensor_sources, "PIECE_BYTES", piece_bytes)
        for box in boxes:
            region = wanted[tuple(slice(*ends) for ends in box)]
            local = torch.full(region.shape, 9.0, dtype=torch.bfloat16)
            index.fill(local, STACK, tuple(first for first, _ in box))
            assert torch.equal(local.nan_to_num(9.0), region.nan_to_num(9.0)), box


def test_a_rank_reads_the_blocks_of_its_region_alone(tmp_path, monkeypatch):
    blocks, scales = packed(EXPERTS, ROWS, GROUPS)
    save_file(
        {f"{STACK}_blocks": blocks, f"{STACK}_scales": scales}, tmp_path / "model.safetensors"
    )
    index, read = index_model_directory(tmp_path), []
    read_box = tensor_sources.PlainTensor.read
    monkeypatch.setattr(
        tensor_sources.PlainTensor,
        "read",
        lambda source, box: read.append(box) or read_box(source, box),
    )
    index.fill(torch.empty(1, 40, 3, dtype=torch.bfloat16), STACK, (2, 30, 5))
    # inputs 30 to 69 are in the groups 0, 1 and 2
    assert [(box.offset, box.shape) for box in read] == [
        ((2, 5, 0), (1, 3, 3)),
        ((2, 5, 0, 0), (1, 3, 3, 16)),
    ]


def test_scales_that_are_missing_or_do_not_fit_are_refused(tmp_path):
    blocks, scales = packed(EXPERTS, ROWS, GROUPS)
    file = tmp_path / "model.safetensors"
    save_file({f"{STACK}_blocks": blocks}, file)
    with pytest.raises(DataError, match=r"_scales should be uint8 .*\[3, 10, 4\]; no such tensor"):
        index_model_directory(tmp_path)
    save_file({f"{STACK}_blocks": blocks, f"{STACK}_scales": scales[:2].contiguous()}, file)
    with pytest.raises(DataError, match=r"should be uint8 .*; found \[2, 10, 4\]"):
        index_model_directory(tmp_path)


def test_a_merged_model_is_what_transformers_saves_of_the_dequantized_one(published, tmp_path):
    """With nothing trained in the experts their values are those of the blocks, bit for bit.

    Else transformers 5.23 calls bf16 stacks NAME_blocks, which it cannot load again.
    """
    tune = TuneConfig(method="lora", rank=4, targets=["q_proj"])
    module = trained(published, tune, tmp_path / "step")
    out = export_merged(tmp_path / "step", tune, published, tmp_path / "merged")
    dequantized(published).save_pretrained(tmp_path / "stock", save_original_format=False)
    theirs, ours = (index_model_directory(d) for d in (tmp_path / "stock", out))
    assert (ours.shapes, ours.dtypes) == (theirs.shapes, theirs.dtypes)
    for name in ours.stored_names:
        both = [torch.empty(ours.shapes[name], dtype=ours.dtypes[name]) for _ in "ab"]
        for values, index in zip(both, (ours, theirs), strict=True):
            index.fill(values, name)
        assert torch.equal(*both) == ("q_proj.weight" not in name), name
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    merged, wanted = merged_and_own_logits(out, module, TOKENS_BT)
    assert (merged - wanted).abs().max() <= 0.02 * wanted.abs().max()  # bf16 rounds q_proj


def test_a_stack_without_one_of_its_experts_is_refused(published, tmp_path):
    shutil.copytree(published, tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    for kind in ("blocks", "scales"):
        tensors[f"{STACK}_{kind}"] = tensors[f"{STACK}_{kind}"][1:].contiguous()
    save_file(tensors, file)
    with pytest.raises(DataError, match=r"has shape \[5, 32, 128\], config.json asks for \[6, 32"):
        trained(tmp_path / "base", TuneConfig(method="lora", rank=4), tmp_path / "step")
