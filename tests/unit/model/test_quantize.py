import sys

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hpc_tune.checkpoint.export import export_adapter, export_merged
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError
from hpc_tune.model import quantized_base
from hpc_tune.model.build import build
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.load import allocate, load_weights
from hpc_tune.model.quantized_base import FourBitLinear
from hpc_tune.model.regions import write_regions
from hpc_tune.model.weights import index_model_directory
from hpc_tune.step.layout import Layout
from hpc_tune.step.size import measure_model_size, static_bytes
from tests.support.nf4 import unpack_linears, values_of
from tests.support.regions import regions_of
from tests.support.training import give_manifest

bitsandbytes = pytest.importorskip("bitsandbytes")
QLORA = TuneConfig(method="qlora", rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(directory)
    return directory


def loaded(base, dtype=torch.float32):
    built = build(base, dtype, QLORA, 0)
    allocate(built.module, torch.device("cpu"))
    load_weights(built)
    return built


def stock(base, dtype):
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return AutoModelForCausalLM.from_pretrained(
        base, dtype=dtype, quantization_config=config, device_map={"": "cpu"}
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_packed_byte_and_every_product_is_that_of_stock_bitsandbytes(base, dtype):
    ours = dict(loaded(base, dtype).module.causal_lm().named_modules())
    compared = 0
    for name, theirs in stock(base, dtype).named_modules():
        if not isinstance(theirs, bitsandbytes.nn.Linear4bit):
            continue
        layer = ours[f"{name}.base_layer"]
        assert isinstance(layer, FourBitLinear)
        assert torch.equal(layer.weight, theirs.weight)
        x = torch.randn(3, layer.in_features, dtype=dtype, requires_grad=True)
        mine = layer(x)
        whole = values_of(theirs.weight.data, theirs.weight.quant_state).to(dtype)
        is_in_blocks = layer.in_features % 64 == 0  # of others it takes wrong scales
        other = theirs(x) if is_in_blocks else x @ whole.T
        assert torch.equal(mine, other)
        [mine], [other] = (torch.autograd.grad(y.sum(), x) for y in (mine, other))
        assert torch.equal(mine, other)
        compared += is_in_blocks
    assert compared == 4 * 6
    assert type(ours["lm_head"]) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "width"),
    [
        *[(24, 64), (128, 352), (512, 96), (6, 16), (5, 80), (4, 40), (7, 30)],
        # bitsandbytes compiles what it does with an odd width.
        pytest.param(9, 17, marks=pytest.mark.full),
        (1, 144),
    ],
)
def test_products_are_those_of_the_documented_values_whatever_the_width(
    tmp_path, rows, width, dtype
):
    """Rows that end within a block, an odd number of values, blocks of other sizes."""
    torch.manual_seed(1)
    scales = (1 + torch.arange(rows * width) // 64 % 5).view(rows, width)
    values = torch.randn(rows, width) * scales
    write_regions(tmp_path / "model.safetensors", regions_of({"w": values}))
    linear = nn.Linear(width, rows)
    layer = FourBitLinear(linear, dtype)
    layer.fill(layer.weight.data, (0, 0), index_model_directory(tmp_path), "w")
    whole = values_of(layer.weight, layer._quant_state((rows, width))).to(dtype)
    assert ((whole - values).abs() / scales).max() < 0.6  # no other block's
    x = torch.randn(4, width, dtype=dtype, requires_grad=True)
    out, wanted = layer(x), nn.functional.linear(x, whole, linear.bias.to(dtype))
    [grad], [wanted_grad] = (torch.autograd.grad(y.sum(), x) for y in (out, wanted))
    rounding = 1e-6 if dtype == torch.float32 else 1e-2
    for one, other in ((out, wanted), (grad, wanted_grad)):
        assert (one - other).abs().max() <= rounding * other.abs().max()


@pytest.mark.parametrize(("rows", "width"), [(64, 64), (32, 128)])
def test_releases_of_bitsandbytes_before_050_give_the_same_product(
    tmp_path, monkeypatch, rows, width
):
    """They go by the shape of the packed bytes, as their own layer has them."""

    def product_of_049(x, packed, quant_state, bias):
        whole = values_of(packed.reshape(-1, 1), quant_state)
        as_they_see_it = whole.t() if packed.shape[0] == 1 else whole
        return nn.functional.linear(x, as_they_see_it.t(), bias)

    torch.manual_seed(1)
    values, x = torch.randn(rows, width), torch.randn(3, width)
    write_regions(tmp_path / "model.safetensors", regions_of({"w": values}))
    layer = FourBitLinear(nn.Linear(width, rows), torch.float32)
    layer.fill(layer.weight.data, (0, 0), index_model_directory(tmp_path), "w")
    wanted = layer(x)
    monkeypatch.setattr(bitsandbytes, "matmul_4bit", product_of_049)
    assert torch.allclose(layer(x), wanted, atol=1e-4)


@pytest.mark.parametrize(("rows", "width"), [(40, 64), (24, 40), (7, 30), (300, 17)])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_pieces_and_shards_give_the_bytes_of_the_whole(
    tmp_path, monkeypatch, rows, width, num_ranks
):
    """Widths that are no multiple of a block of 64, an odd number of values, uneven shards."""
    torch.manual_seed(1)
    values = torch.randn(rows, width)
    write_regions(tmp_path / "model.safetensors", regions_of({"w": values}))
    index = index_model_directory(tmp_path)
    packed, state = bitsandbytes.functional.quantize_4bit(
        values, blocksize=64, quant_type="nf4", compress_statistics=True
    )
    monkeypatch.setattr(quantized_base, "PIECE_BYTES", 4 * 700)
    layer = FourBitLinear(nn.Linear(width, rows, bias=False), torch.float32)
    assert layer.weight.shape == packed.shape
    for start, local in zip(
        range(0, len(packed), -(-len(packed) // num_ranks)),
        layer.weight.data.chunk(num_ranks),
        strict=True,
    ):
        layer.fill(local, (start, 0), index, "w")
    assert torch.equal(layer.weight, packed)
    found = layer._quant_state((rows, width))
    assert torch.equal(found.absmax, state.absmax)
    assert torch.equal(found.state2.absmax, state.state2.absmax)
    assert found.offset == state.offset


def test_casting_the_model_leaves_the_scales_as_they_are(base):
    built = loaded(base)
    layer = built.module.causal_lm().model.layers[0].mlp.up_proj.base_layer
    before = layer(x := torch.randn(2, 128))
    built.module.to(torch.bfloat16)
    assert torch.equal(layer(x), before)


def test_the_bytes_of_a_4_bit_base_are_counted_before_they_exist(base):
    packed = measure_model_size(build(base, torch.float32, QLORA, 0).module)
    whole = measure_model_size(build(base, torch.float32, TuneConfig(rank=4, alpha=8.0), 0).module)
    assert packed.num_frozen == whole.num_frozen
    values = 4 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 352)  # of the blocks' matrices
    assert whole.frozen_bytes - packed.frozen_bytes == 4 * values - values // 2
    # A byte per 64 values, 4 per 64 x 256 of them or part of it, a mean and a table per layer.
    sizes = [
        n for n in (128 * 128, 128 * 128, 64 * 128, 64 * 128, *[128 * 352] * 3) for _ in "4444"
    ]
    assert packed.scale_bytes == sum(n // 64 + 4 * -(-n // 16384) + 4 + 1024 for n in sizes)
    allocated = loaded(base).module
    counted = sum(
        b.numel()
        for layer in allocated.modules()
        if isinstance(layer, FourBitLinear)
        for b in (*layer.parameters(), *layer.buffers())
    )
    assert counted == values // 2 + packed.scale_bytes
    state = 16 * packed.num_trained
    assert static_bytes(packed, Layout(1, 1)) == packed.frozen_bytes + packed.scale_bytes + state
    sharded = static_bytes(packed, Layout(1, 4))
    assert sharded == packed.frozen_bytes // 4 + packed.scale_bytes + state


def test_without_bitsandbytes_there_is_one_clear_error(base, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"pip install 'hpc_tune\[qlora\]', or use tune.method"):
        build(base, torch.float32, QLORA, 0)


def test_the_adapter_loads_into_stock_peft_and_merges_into_the_full_precision_base(base, tmp_path):
    built = loaded(base)
    names = dict(built.module.named_parameters())
    torch.manual_seed(3)
    adapter = {saved: names[name].data for name, saved in built.saved_names.items()}
    for values in adapter.values():
        values.add_(0.02 * torch.randn_like(values))
    (tmp_path / "step").mkdir()
    write_regions(tmp_path / "step" / "rank-00000.safetensors", regions_of(adapter))
    give_manifest(tmp_path / "step")
    out = export_adapter(tmp_path / "step", QLORA, base, tmp_path / "adapter")
    tokens_BT = torch.arange(12).view(1, 12)
    theirs = stock(base, torch.float32)
    unpack_linears(theirs)
    four_bit = PeftModel.from_pretrained(theirs, out)
    with torch.no_grad():
        theirs = four_bit(input_ids=tokens_BT, use_cache=False).logits
        ours = built.module.eval().causal_lm()(input_ids=tokens_BT, use_cache=False).logits
    assert (theirs - ours).abs().max() <= 1e-5 * ours.abs().max()
    merged = export_merged(tmp_path / "step", QLORA, base, tmp_path / "merged")
    layer = "model.layers.2.mlp.up_proj"
    [file] = [f for f in merged.glob("*.safetensors") if f"{layer}.weight" in load_file(f)]
    a, b = (adapter[f"base_model.model.{layer}.lora_{x}.weight"] for x in "AB")
    exact = load_file(base / "model.safetensors")[f"{layer}.weight"] + 2.0 * b @ a
    assert torch.allclose(load_file(file)[f"{layer}.weight"], exact, atol=1e-6)
