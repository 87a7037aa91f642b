"""Moments in 8 bits, against torchao's own AdamW8bit and arithmetic."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpc_tune.config.load import load_config
from hpc_tune.config.optim import OptimConfig
from hpc_tune.engine import adamw_8bit
from hpc_tune.engine.adamw import set_lr
from hpc_tune.engine.adamw_8bit import (
    CodeTable,
    QuantizedMoment,
    fill_moment,
    make_optimizer,
    moment_regions,
    require_single_slices,
    require_torchao,
)
from hpc_tune.errors import ConfigError
from hpc_tune.model.build import LocalRegion, Slice
from hpc_tune.model.regions import write_regions
from hpc_tune.model.weights import index_checkpoint
from hpc_tune.step.layout import Layout
from hpc_tune.step.size import MOMENT_NAMES, measure_model_size, static_bytes

quant_utils = pytest.importorskip("torchao.optim.quant_utils")
CPU = torch.device("cpu")
EIGHT = OptimConfig(name="adamw_8bit", lr=0.01, beta2=0.95, weight_decay=0.1)


def test_of_fp32_numbers_a_table_gives_the_codes_of_torchao():
    torch.manual_seed(0)
    for signed in (True, False):
        table = CodeTable.make_on_device(signed, CPU)
        assert (
            table.values.tolist() == torch.tensor(quant_utils.create_dynamic_map(signed)).tolist()
        )
        up, down = (torch.nextafter(table.borders, torch.tensor(x)) for x in (2.0, -2.0))
        random = torch.rand(1 << 18) * 10 ** (-8 * torch.rand(1 << 18))
        x = torch.cat([random, -random, table.values, table.borders, up, down])
        x = x.clip(-1.0 if signed else 0.0, 1.0)
        codes = torch.bucketize(x, table.borders, right=True).to(torch.uint8)
        assert torch.equal(codes, quant_utils.quantize_8bit_with_qmap(x, table.values))


class Theirs:
    """torchao's AdamW8bit over the same groups, not compiled, with rates as it wants them."""

    def __init__(self, parameters, optim):
        from torchao.optim import AdamW8bit

        groups = [
            {"params": [p for p in parameters if (p.dim() < 2) == is_vector], "weight_decay": decay}
            for is_vector, decay in ((False, optim.weight_decay), (True, 0.0))
        ]
        betas = optim.beta1, optim.beta2
        self.optimizer = AdamW8bit(groups, lr=optim.peak_lr, betas=betas, eps=optim.eps)

    def step(self, lr):
        for group in self.optimizer.param_groups:
            group["lr"].fill_(lr)
        self.optimizer.step()


SHAPES = {"matrix": (40, 512), "narrow": (128, 96), "small": (8, 16), "odd": (65, 67)}
SHAPES |= {"vector": (600,), "long vector": (8192,)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_are_those_of_torchaos_adamw8bit(monkeypatch, dtype):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    torch.manual_seed(0)
    start = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
    ours, others = ({n: nn.Parameter(p.clone()) for n, p in start.items()} for _ in range(2))
    optimizer, theirs = make_optimizer(list(ours.items()), EIGHT), Theirs(others.values(), EIGHT)
    for step in range(10):
        for name, parameter in ours.items():
            spread = 10 ** (-4 * torch.rand(parameter.shape))
            parameter.grad = (torch.randn(parameter.shape) * spread).to(dtype)
            others[name].grad = parameter.grad.clone()
        set_lr(optimizer, 0.01 / (1 + step))
        optimizer.step()
        theirs.step(0.01 / (1 + step))
    for name, parameter in ours.items():
        held, wanted = optimizer.state[parameter], theirs.optimizer.state[others[name]]
        assert held["step"] == wanted["step"] == 10
        in_8_bits = name in ("matrix", "narrow", "long vector")
        assert isinstance(held["exp_avg"], QuantizedMoment) == in_8_bits, name
        assert torch.equal(parameter, others[name]), name
        if in_8_bits:
            for part in MOMENT_NAMES:
                assert torch.equal(held[part].codes.view(parameter.shape), wanted[part].codes)
                assert torch.equal(held[part].scales, wanted[part].scale), (name, part)


def moments(shape, signed, seed=0):
    """Values as an average of gradients has them, or of their squares; blocks of all sizes."""
    torch.manual_seed(seed)
    rows, width = shape
    values = torch.randn(shape) * 10 ** (2 - 16 * torch.rand(rows, 1))
    values[:2] = 0.0
    return values if signed else values.square()


@pytest.mark.parametrize("signed", [True, False])
def test_what_was_quantized_in_the_same_blocks_comes_back_bit_for_bit(signed):
    first = QuantizedMoment.zeros(4096 * 256, signed, CPU)
    again = QuantizedMoment.zeros(4096 * 256, signed, CPU)
    assert not first.values().any()
    first.quantize(moments((4096, 256), signed))
    again.quantize(first.values())
    changed = (again.values() != first.values()).any(-1).float().mean()
    print(f"signed={signed}: plain quantization would change {changed:.1%} of the blocks")
    assert (changed > 0.3) == signed
    again.quantize_exactly(first.values())
    assert torch.equal(again.values(), first.values())
    assert torch.equal(again.codes, first.codes)


@pytest.mark.parametrize("signed", [True, False])
def test_other_values_are_restored_as_torchao_quantizes_them(signed):
    values, restored = moments((512, 256), signed), QuantizedMoment.zeros(512 * 256, signed, CPU)
    restored.quantize_exactly(values)
    scaled, scales = quant_utils.scale_tensor(values, 256)
    assert torch.equal(restored.scales, scales)
    assert torch.equal(
        restored.codes, quant_utils.quantize_8bit_with_qmap(scaled, restored.table.values)
    )


def held(full_shape, rows):
    """What a rank that has these rows of a tensor is told of them."""
    local = torch.empty(len(rows), *full_shape[1:], device="meta")
    return LocalRegion(local, (rows.start, *(0 for _ in full_shape[1:])), full_shape)


# Of 300 values a block reaches over rows: a region begins where one ends.
@pytest.mark.parametrize("piece_bytes", [40_000, 1 << 24])
@pytest.mark.parametrize("shape", [(96, 512), (256, 300), (12288,), (8, 16, 96)])
def test_a_checkpoint_in_fp32_gives_each_cut_what_the_whole_held(
    tmp_path, monkeypatch, shape, piece_bytes
):
    monkeypatch.setattr(adamw_8bit, "PIECE_BYTES", piece_bytes)
    whole = QuantizedMoment.zeros(math.prod(shape), True, CPU)
    whole.quantize(moments((math.prod(shape) // 256, 256), True))
    regions = [*moment_regions("exp_avg.w", whole, held(shape, range(shape[0])))]
    assert (len(regions) > 1) == (piece_bytes == 40_000)
    write_regions(tmp_path / "rank-00000.safetensors", regions)
    index = index_checkpoint(tmp_path)
    read = torch.empty(shape)
    index.fill(read, "exp_avg.w")
    assert torch.equal(read.view(-1, 256), whole.values())
    half = shape[0] // 2
    for rows in (range(half), range(half, shape[0])):
        part = QuantizedMoment.zeros(len(rows) * math.prod(shape[1:]), True, CPU)
        fill_moment(part, held(shape, rows), index, "exp_avg.w")
        assert torch.equal(part.values().view(-1), read[rows.start : rows.stop].flatten())


def test_large_parameters_take_a_quarter_and_small_ones_what_they_took():
    module = nn.Sequential(nn.Linear(512, 40), nn.Linear(40, 16))
    announced = []
    optimizer = make_optimizer([*module.named_parameters()], EIGHT, announced.append)
    large, small = 512 * 40, 40 + 40 * 16 + 16
    assert announced[0] == 2 * (large + large // 64)
    assert sum(announced) == announced[0] + 8 * small
    kept = optimizer.state[module[0].weight]
    assert sum(t.nbytes for part in MOMENT_NAMES for t in kept[part].tensors) == announced[0]
    for is_8bit, of_moments in ((False, 8 * (large + small)), (True, sum(announced))):
        size = measure_model_size(module, is_8bit)
        assert static_bytes(size, Layout(1, 1)) == 8 * (large + small) + of_moments


def test_what_it_cannot_be_combined_with_is_refused_by_name(monkeypatch):
    for words, said in (
        (["parallel.zero_stage=2"], "optim.name=adamw_8bit with parallel.zero_stage=2"),
        (["parallel.offload_params=cpu"], "optim.name=adamw_8bit with parallel.offload_params"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_config(None, ["optim.name=adamw_8bit", *words])
    monkeypatch.setitem(sys.modules, "torchao.optim.adam", None)
    with pytest.raises(ConfigError, match=r"needs torchao.*pip install 'hpc_tune\[adamw8bit\]'"):
        require_torchao()


def test_a_tensor_of_which_a_rank_has_several_slices_is_refused():
    module = nn.Linear(512, 16)
    for parts in (1, 2):
        cut = {"weight": Slice(0, 0, (32, 512), parts)}
        stage = SimpleNamespace(module=module, slices=cut, saved_names={"weight": "experts.up"})
        if parts == 1:
            require_single_slices(stage)
    with pytest.raises(ConfigError, match="experts.up is cut into 2 slices"):
        require_single_slices(stage)
