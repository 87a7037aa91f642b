"""Stacks of experts in 4 bits against bitsandbytes, expert by expert."""

import pytest
import torch

from hpc_tune.config.tune import TuneConfig
from hpc_tune.model.build import build
from hpc_tune.model.load import allocate, load_weights
from hpc_tune.model.quantized_base import FourBitStack, find_packed_weights
from hpc_tune.model.regions import write_regions
from hpc_tune.model.weights import index_model_directory
from hpc_tune.step.size import flops_per_token, measure_model_size
from tests.support.mixtures import write_mixture
from tests.support.regions import regions_of

bitsandbytes = pytest.importorskip("bitsandbytes")
TARGETS = ["q_proj", "experts"]
QLORA = TuneConfig(method="qlora", rank=4, alpha=8.0, targets=TARGETS)
LORA = TuneConfig(method="lora", rank=4, alpha=8.0, targets=TARGETS)
FAMILIES = ("mixtral", "gpt_oss")  # one file tensor per expert; stacks as they are, transposed
TOKENS_BT = torch.arange(5, 25).view(2, 10)


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    return {family: write_mixture(family, folder / family) for family in FAMILIES}


def loaded(directory, tune, dtype=torch.float32):
    built = build(directory, dtype, tune, 0)
    allocate(built.module, torch.device("cpu"))
    load_weights(built)
    torch.manual_seed(5)
    for name, parameter in built.module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return built.module


def rounded(matrix):
    """Return what bitsandbytes makes of a matrix, as one row.

    Of rows that are no whole blocks of 64, its dequantization on CPUs takes wrong scales.
    """
    packed = bitsandbytes.functional.quantize_4bit(
        matrix.reshape(1, -1), blocksize=64, quant_type="nf4", compress_statistics=True
    )
    values = bitsandbytes.functional.dequantize_4bit(*packed)
    assert (values - matrix.reshape(1, -1)).abs().max() < 0.2 * matrix.abs().max()
    return values.view(matrix.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_expert_has_the_values_of_stock_bitsandbytes(mixtures, family, dtype):
    ours, whole = (loaded(mixtures[family], tune, dtype) for tune in (QLORA, LORA))
    stacks = {n: p for n, p in find_packed_weights(ours) if isinstance(p, FourBitStack)}
    assert len(stacks) == 2 * 2  # of two layers
    for name, stack in stacks.items():
        wanted = torch.stack([rounded(matrix) for matrix in whole.get_parameter(name).data])
        values = stack.unpack(ours.get_parameter(name))
        assert values.dtype == dtype
        assert torch.equal(values, wanted), name


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_a_base_with_these_values(mixtures, family):
    ours, other = (loaded(mixtures[family], tune) for tune in (QLORA, LORA))
    linears = dict(ours.named_modules())
    for name, layer in find_packed_weights(ours):
        values = other.get_parameter(name).data
        if isinstance(layer, FourBitStack):
            values.copy_(layer.unpack(ours.get_parameter(name)))
        else:
            linear, rows = linears[name.removesuffix(".weight")], torch.eye(values.shape[1])
            values.copy_((linear(rows) - linear(torch.zeros_like(rows))).t())  # without a bias
    found = []
    for module in (ours, other):
        out = module.causal_lm()(input_ids=TOKENS_BT, use_cache=False).logits
        out.square().mean().backward()
        found.append((out, {n: p.grad for n, p in module.named_parameters() if p.requires_grad}))
    (logits, grads), (wanted_logits, wanted) = found
    assert torch.allclose(logits, wanted_logits, atol=1e-5 * wanted_logits.abs().max().item())
    assert grads.keys() == wanted.keys()
    for name, expected in wanted.items():
        atol = 1e-5 * expected.abs().max().item()
        assert torch.allclose(grads[name], expected, atol=atol), name


@pytest.mark.parametrize(("rows", "width"), [(40, 64), (7, 30), (300, 17), (512, 96)])
def test_a_rank_reads_the_experts_that_it_keeps(tmp_path, rows, width):
    """Sizes that are no multiple of a block, and of 256 blocks; experts 2 and 3 of 5."""
    torch.manual_seed(1)
    values = torch.randn(5, rows, width) * torch.arange(1, 6).view(5, 1, 1)
    write_regions(tmp_path / "model.safetensors", regions_of({"w": values}))
    index = index_model_directory(tmp_path)
    stack = FourBitStack(values, torch.float32)
    packed = torch.empty(5, 1, stack.expert_bytes, dtype=torch.uint8)
    stack.fill(packed, (0, 0, 0), index, "w")
    some = torch.empty(2, 1, stack.expert_bytes, dtype=torch.uint8)
    stack.fill(some, (2, 0, 0), index, "w")
    assert torch.equal(some, packed[2:4])
    wanted = torch.stack([rounded(matrix) for matrix in values])
    assert torch.equal(stack.unpack(packed), wanted)
    assert torch.equal(stack.unpack(some), wanted[2:4])


def test_stacks_take_a_bit_more_than_half_a_byte_per_value_and_the_flops_of_whole_ones(mixtures):
    packed, whole = (build(mixtures["mixtral"], torch.bfloat16, tune, 0) for tune in (QLORA, LORA))
    small, large = measure_model_size(packed.module), measure_model_size(whole.module)
    assert small.num_frozen == large.num_frozen
    assert flops_per_token(small, packed.config, 64) == flops_per_token(large, whole.config, 64)
    modules = dict(whole.module.named_modules())
    saved = 0
    for name, layer in find_packed_weights(packed.module):
        if not isinstance(layer, FourBitStack):  # its scales are no parameter
            saved += 2 * layer.num_values - layer.num_values // 2
            continue
        experts, rows, width = modules[name.rpartition(".")[0]].get_parameter("gate_up_proj").shape
        if name.endswith("down_proj"):
            rows, width = width, rows // 2
        # Codes, a byte for each 64 values, a scale of these bytes and a mean in fp32; in sixteens.
        row = rows * width // 2 + rows * width // 64 + 4 + 4
        saved += 2 * experts * rows * width - experts * -(-row // 16) * 16
    assert large.frozen_bytes - small.frozen_bytes == saved
