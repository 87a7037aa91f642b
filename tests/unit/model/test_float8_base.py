"""tune.base_dtype=fp8: the bytes of rows, their products, and a model beside stock peft's."""

import copy
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from hpc_tune.config.tune import TuneConfig
from hpc_tune.model import float8
from hpc_tune.model.build import build
from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.float8 import Float8Linear, Float8Stack, quantize_float8_rows
from hpc_tune.model.layers import find_blocks
from hpc_tune.model.load import allocate, load_weights
from hpc_tune.model.lora_linear import AdapterCopies, use_lora_linear
from hpc_tune.model.quantized_base import find_packed_weights
from hpc_tune.model.regions import write_regions
from hpc_tune.model.weights import index_model_directory
from hpc_tune.step.layout import Layout
from hpc_tune.step.size import flops_per_token, measure_model_size, static_bytes
from tests.support.mixtures import write_mixture
from tests.support.regions import regions_of

FP8 = TuneConfig(base_dtype="fp8", rank=4, alpha=8.0)
TOKENS_BT = torch.arange(2, 26).view(2, 12)
# e4m3: 4 bits of exponent, 3 of mantissa, bias 7; the largest is 448, the least above 0 is 2^-9.
E4M3 = sorted(
    {
        (mantissa / 8 + (exponent > 0)) * 2.0 ** (max(exponent, 1) - 7)
        for exponent in range(16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)  # NaN
    }
)


def torch_scales_rows():
    """Return whether torch's float8 matmul takes a scale for each row on this CPU."""
    codes, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(codes, codes.t(), scales, scales.t(), out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


needs_row_scales = pytest.mark.skipif(
    not torch_scales_rows(), reason=f"torch {torch.__version__} scales whole matrices on this CPU"
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(directory)
    return directory


def rounded(row):
    """Return the nearest values that a row can have, by the format's definition."""
    largest = row.abs().max().item()
    scale = 2.0 ** math.ceil(math.log2(largest / 448)) if largest else 1.0
    codes = torch.tensor(E4M3, dtype=torch.float64)
    sizes = row.detach().double().abs() / scale
    above = torch.searchsorted(codes, sizes).clamp(1, len(codes) - 1)
    up, down = codes[above] - sizes, sizes - codes[above - 1]
    is_above = (up < down) | ((up == down) & (above % 2 == 0))  # of two, the even code
    return scale * torch.where(is_above, codes[above], codes[above - 1]) * row.double().sign()


def linear_of(tmp_path, values, dtype=torch.float32, bias=False):
    write_regions(tmp_path / "model.safetensors", regions_of({"w": values}))
    linear = nn.Linear(values.shape[1], values.shape[0], bias=bias)
    layer = Float8Linear(linear, dtype)
    layer.fill(layer.weight.data, (0, 0), index_model_directory(tmp_path), "w")
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(24, 64), (5, 80), (7, 30), (9, 17), (1, 144), (3, 1)])
def test_values_are_the_nearest_ones_of_the_format_whatever_the_width(tmp_path, rows, width, dtype):
    torch.manual_seed(1)
    values = torch.randn(rows, width) * torch.logspace(-12, 12, rows)[:, None]
    values[0, 0], values[-1] = 448 * 2.0**-9, values[-1].clamp(min=0)
    values = values.to(dtype)
    layer = linear_of(tmp_path, values, dtype)
    wanted = torch.stack([rounded(row) for row in values])
    assert torch.equal(layer.unpack(layer.weight).double(), wanted)


def test_rows_of_zeros_and_of_the_least_values_are_finite(tmp_path):
    values = torch.stack([torch.zeros(32), torch.full((32,), 1e-38), torch.full((32,), 3e38)])
    layer = linear_of(tmp_path, values)
    found = layer.unpack(layer.weight)
    assert found.isfinite().all()
    assert not found[0].any()
    assert torch.allclose(found[2], values[2], rtol=1 / 16)


@pytest.mark.parametrize(("rows", "width"), [(40, 64), (24, 40), (7, 30), (300, 17)])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_reads_and_packs_its_rows_alone(tmp_path, monkeypatch, rows, width, num_ranks):
    torch.manual_seed(1)
    whole = linear_of(tmp_path, torch.randn(rows, width)).weight.data
    monkeypatch.setattr(float8, "PIECE_BYTES", 4 * 700)
    index, layer = index_model_directory(tmp_path), linear_of(tmp_path, torch.randn(rows, width))
    write_regions(tmp_path / "model.safetensors", regions_of({"w": torch.randn(rows, width)}))
    read = []
    fill = type(index).fill
    monkeypatch.setattr(
        type(index), "fill", lambda s, out, n, at, *a: (read.append(len(out)), fill(s, out, n, at))
    )
    index = index_model_directory(tmp_path)
    expected = torch.empty_like(whole)
    layer.fill(expected, (0, 0), index, "w")
    step = -(-rows // num_ranks)
    for first in range(0, rows, step):
        local = torch.empty_like(whole[first : first + step])
        read.clear()
        layer.fill(local, (first, 0), index, "w")
        assert sum(read) == len(local)
        assert torch.equal(local, expected[first : first + step])


@pytest.mark.parametrize(
    ("dtype", "in_float8"),
    [
        (torch.float32, False),
        (torch.bfloat16, False),
        pytest.param(torch.bfloat16, True, marks=needs_row_scales),
    ],
)
def test_products_are_those_of_the_rounded_values(tmp_path, dtype, in_float8):
    """In float8 by torch's own kernel, which CPUs have too: of rounded inputs and gradients."""
    torch.manual_seed(1)
    layer = linear_of(tmp_path, torch.randn(48, 64) * torch.logspace(-3, 3, 48)[:, None], dtype)
    layer.bias = nn.Parameter(torch.randn(48, dtype=dtype), requires_grad=False)
    layer.multiplies_float8 = in_float8
    x = torch.randn(2, 8, 64, dtype=dtype, requires_grad=True)
    out = layer(x)
    grad = torch.randn_like(out)
    [found] = torch.autograd.grad(out, x, grad)
    weight = layer.unpack(layer.weight).double()
    given, given_grad = x.double(), grad.double()
    scales = weight.abs().amax(1)
    if in_float8:
        given = torch.stack([rounded(row) for row in x.detach().flatten(0, 1)]).view(x.shape)
        powers = torch.tensor([2.0 ** math.ceil(math.log2(s / 448)) for s in scales])
        scaled = (grad.float() * powers).flatten(0, 1)
        given_grad = torch.stack([rounded(row) for row in scaled]).view(grad.shape) / powers
    wanted, wanted_grad = given @ weight.t() + layer.bias, given_grad @ weight
    most = 1e-6 if dtype == torch.float32 else 5e-3
    for one, other in ((out, wanted), (found, wanted_grad)):
        assert (one.double() - other).norm() <= most * other.norm()


@needs_row_scales
def test_the_trial_of_products_is_right_on_this_torch():
    assert float8.measure_float8_error(torch.device("cpu"), torch.bfloat16) < 5e-3


@needs_row_scales
def test_wrong_products_are_not_used(monkeypatch):
    class Card:
        has_float8, gfx = True, ""

    monkeypatch.setattr(float8, "find_architecture", lambda device: Card())
    device = torch.device("cpu")
    assert not float8.explain_missing_float8_matmuls.__wrapped__(device, torch.bfloat16)
    whole = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: 1.02 * whole(*a, **k))
    assert "off by 2" in float8.explain_missing_float8_matmuls.__wrapped__(device, torch.bfloat16)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: 1 / 0)
    assert "fail here" in float8.explain_missing_float8_matmuls.__wrapped__(device, torch.bfloat16)
    assert (
        float8.explain_missing_float8_matmuls.__wrapped__(device, torch.float32)
        == "model.dtype=fp32"
    )


def loaded(base, tune, dtype=torch.float32):
    built = build(base, dtype, tune, 0)
    allocate(built.module, torch.device("cpu"))
    load_weights(built)
    return built


def step_of(causal_lm, parameters):
    out = causal_lm(input_ids=TOKENS_BT, use_cache=False).logits
    out.square().mean().backward()
    return out.detach(), {name: p.grad for name, p in parameters}


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_a_step_is_that_of_stock_peft_on_the_rounded_weights(base, method):
    built = loaded(base, FP8.model_copy(update={"method": method}))
    ours = dict(built.module.named_parameters())
    torch.manual_seed(3)
    for name in built.saved_names:
        if "lora_B" in name:
            ours[name].data.normal_(std=0.1)
    stock = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", use_dora=method == "dora")
    stock = get_peft_model(stock, lora)
    theirs = dict(stock.named_parameters())
    packed = 0
    for path, layer in built.module.causal_lm().named_modules():
        if isinstance(layer, Float8Linear):
            weight = theirs[f"base_model.model.{path}.weight"]
            row = layer.unpack(layer.weight)
            assert ((row - weight).abs() <= weight.abs() / 16 + 1e-6).all()
            weight.data.copy_(row)
            packed += 1
    assert packed == 4 * 7
    trained = [(n, p) for n, p in stock.named_parameters() if p.requires_grad]
    by_saved = {saved: ours[name] for name, saved in built.saved_names.items()}
    for name, parameter in trained:
        saved = name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector")
        parameter.data.copy_(by_saved[saved].data)
    copies, blocks = AdapterCopies(), list(find_blocks(built.module))
    copies.keep_copies(blocks, use_lora_linear(blocks, shares_inputs=True))
    copies.refresh()
    logits, grads = step_of(built.module.causal_lm(), built.module.named_parameters())
    wanted_logits, wanted = step_of(stock, trained)
    assert (logits - wanted_logits).norm() <= 1e-6 * wanted_logits.norm()
    found = {saved: grads[name] for name, saved in built.saved_names.items()}
    for name, expected in wanted.items():
        saved = name.replace(".default", "").replace("magnitude_vector.weight", "magnitude_vector")
        assert (found[saved] - expected).norm() <= 1e-5 * expected.norm(), name


@needs_row_scales
def test_layers_together_multiply_in_float8_as_each_by_itself(base):
    """And to what float8 leaves of the inputs' and gradients' digits."""
    built = loaded(base, FP8, torch.bfloat16)
    torch.manual_seed(3)
    for name, parameter in built.module.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    found = []
    for in_float8, together in ((False, True), (True, True), (True, False)):
        one = copy.deepcopy(built.module)
        for layer in one.modules():
            if isinstance(layer, Float8Linear):
                layer.multiplies_float8 = in_float8
        use_lora_linear(list(find_blocks(one)), shares_inputs=together)
        trained = [(n, p) for n, p in one.named_parameters() if p.requires_grad]
        found.append(step_of(one.causal_lm(), trained))
    exact, together, apart = found
    assert torch.equal(together[0], apart[0])
    lost = distance(together[1], exact[1])
    assert 0.005 < lost < 0.15  # no digit lost would be no product in float8
    # Sums are rounded in another order, and some then have another code of float8.
    assert distance(together[1], apart[1]) < 0.3 * lost
    assert lost < 1.1 * distance(apart[1], exact[1])


def distance(grads, wanted):
    """Return the mean of the gaps of gradients, as shares of their norms."""
    gaps = [(grads[name] - wanted[name]).norm() / wanted[name].norm() for name in wanted]
    return sum(gap.item() for gap in gaps) / len(gaps)


def test_a_base_of_fp32_files_has_the_same_bytes_whatever_is_computed_in(base):
    found = [
        {name: built.module.get_parameter(name) for name, _ in find_packed_weights(built.module)}
        for built in (loaded(base, FP8, dtype) for dtype in (torch.float32, torch.bfloat16))
    ]
    assert load_file(base / "model.safetensors")["model.norm.weight"].dtype == torch.float32
    for name, packed in found[0].items():
        assert torch.equal(packed, found[1][name]), name


def test_the_bytes_of_a_float8_base_are_counted_before_they_exist(base):
    packed = measure_model_size(build(base, torch.bfloat16, FP8, 0).module)
    whole = measure_model_size(build(base, torch.bfloat16, TuneConfig(rank=4, alpha=8.0), 0).module)
    assert packed.num_frozen == whole.num_frozen
    assert packed.scale_bytes == 0
    built = loaded(base, FP8, torch.bfloat16)
    held = sum(p.nbytes for p in built.module.parameters() if not p.requires_grad)
    assert held == packed.frozen_bytes
    linears = [layer for _, layer in find_packed_weights(built.module)]
    saved = sum(layer.num_values - 16 * layer.out_features for layer in linears)
    assert whole.frozen_bytes - packed.frozen_bytes == saved
    state = 4 * packed.trained_bytes
    assert static_bytes(packed, Layout(replicate=1, shard=4)) == packed.frozen_bytes // 4 + state


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_are_those_of_the_rounded_values(tmp_path, family):
    write_mixture(family, tmp_path)
    targets = ["all-linear", "experts"]
    tune = TuneConfig(base_dtype="fp8", rank=4, alpha=8.0, targets=targets)
    packed = loaded(tmp_path, tune)
    plain = loaded(tmp_path, TuneConfig(rank=4, alpha=8.0, targets=targets))
    weights, stacks = dict(plain.module.named_parameters()), 0
    for name, layer in find_packed_weights(packed.module):
        values = layer.unpack(packed.module.get_parameter(name))
        assert (values - weights[name]).norm() <= 0.04 * weights[name].norm()
        weights[name].data.copy_(values)
        stacks += isinstance(layer, Float8Stack)
    assert stacks >= 2
    found = []
    for built in (packed, plain):
        trained = [(n, p) for n, p in built.module.named_parameters() if p.requires_grad]
        torch.manual_seed(5)
        for name, parameter in trained:
            if "lora_B" in name:
                parameter.data.normal_(std=0.1)
        found.append(step_of(built.module.causal_lm(), trained))
    (logits, grads), (wanted_logits, wanted) = found
    assert torch.allclose(logits, wanted_logits, atol=1e-5 * wanted_logits.abs().max().item())
    for name, expected in wanted.items():
        assert torch.allclose(grads[name], expected, atol=1e-5 * expected.abs().max().item()), name
    sizes = [measure_model_size(built.module) for built in (packed, plain)]
    assert sizes[0].num_frozen == sizes[1].num_frozen
    assert flops_per_token(sizes[0], packed.config, 64) == flops_per_token(
        sizes[1], plain.config, 64
    )


def test_a_rank_reads_the_experts_that_it_keeps(tmp_path):
    torch.manual_seed(1)
    values = torch.randn(5, 12, 30)
    write_regions(tmp_path / "model.safetensors", regions_of({"w": values}))
    index, stack = index_model_directory(tmp_path), Float8Stack(values, torch.float32)
    packed = torch.empty(stack.packed_shape, dtype=torch.uint8)
    stack.fill(packed, (0, 0, 0), index, "w")
    some = torch.empty_like(packed[2:4])
    stack.fill(some, (2, 0, 0), index, "w")
    assert torch.equal(some, packed[2:4])
    assert torch.equal(stack.unpack(some)[0, 0].double(), rounded(values[2, 0]))


def test_rows_of_no_tokens_have_no_products():
    rows = quantize_float8_rows(torch.empty(0, 64, dtype=torch.bfloat16))
    assert rows.codes.shape == (0, 64)
    layer = Float8Linear(nn.Linear(64, 32, bias=False), torch.bfloat16)
    layer.weight.data.zero_()
    layer.multiplies_float8 = True
    assert layer(torch.empty(0, 64, dtype=torch.bfloat16)).shape == (0, 32)
