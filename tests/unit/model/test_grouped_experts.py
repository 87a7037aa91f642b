"""Grouped experts, trained or with adapters, against transformers' and peft's own."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.integrations.moe import use_experts_implementation

from hpc_tune import torch_versions
from hpc_tune.engine.activation_checkpoint import checkpoint_blocks
from hpc_tune.model.grouped_experts import use_grouped_experts
from hpc_tune.model.grouped_matmul import num_padded_rows

HIDDEN, INNER, EXPERTS, CHOSEN = 16, 24, 5, 2


class Config:
    _experts_implementation = "batched_mm"  # grouped products take no fp64


def experts_class(**variant):
    has_gate, transposed = variant.get("has_gate", True), variant.get("is_transposed", False)

    class Stacks(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts, self.act_fn = EXPERTS, nn.SiLU()
            up = "gate_up_proj" if has_gate else "up_proj"
            wide = 2 * INNER if has_gate else INNER
            for name, inputs, outputs in ((up, HIDDEN, wide), ("down_proj", INNER, HIDDEN)):
                shape = (inputs, outputs) if transposed else (outputs, inputs)
                setattr(self, name, nn.Parameter(torch.empty(EXPERTS, *shape)))
                if variant.get("has_bias"):
                    setattr(self, f"{name}_bias", nn.Parameter(torch.empty(EXPERTS, outputs)))

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise AssertionError("not by a loop")

    if not variant.get("is_concatenated", True):

        def interleaved(self, gate_up):
            gate, up = gate_up[..., ::2].clamp(max=1.5), gate_up[..., 1::2].clamp(-1.5, 1.5)
            return (up + 1) * gate * torch.sigmoid(1.7 * gate)

        Stacks._apply_gate = interleaved
    return use_experts_implementation(Stacks, **variant)


VARIANTS = {
    "plain": {},
    "bias": {"has_bias": True},
    "transposed": {"is_transposed": True},
    "gpt_oss": {"is_transposed": True, "has_bias": True, "is_concatenated": False},
    "no gate": {"has_gate": False},
}


class Routed(nn.Module):
    """Experts to which all tokens are given in the same way."""

    def __init__(self, experts, chosen_TK, weights_TK):
        super().__init__()
        self.experts, self.choice = experts, (chosen_TK, weights_TK)

    def forward(self, x):
        return self.experts(x, *self.choice)


class Block(nn.Module):
    """Experts behind a router, and something that needs a gradient in front of both."""

    def __init__(self, variant):
        super().__init__()
        self.before = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = experts_class(**variant)(Config())
        self.away = torch.zeros(EXPERTS)

    def forward(self, x):
        hidden = self.before(x)
        logits = self.router(hidden) + self.away.to(x.dtype)
        weights, chosen = logits.softmax(-1).topk(CHOSEN)
        return x + self.experts(hidden, chosen, weights)


def model(variant="plain", dtype=torch.float64, rank=3, adapted=True, trained=False):
    torch.manual_seed(0)
    net = nn.Sequential(Block(VARIANTS[variant]), Block(VARIANTS[variant])).to(dtype)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    if trained:
        return net
    stacks = [n for n, p in net[0].experts.named_parameters() if p.dim() == 3]
    words = {"target_modules": ["before"], "r": rank, "lora_alpha": 2 * rank}
    if adapted:
        words["target_parameters"] = [f"experts.{name}" for name in stacks]
    net = get_peft_model(net, LoraConfig(**words))
    for name, parameter in net.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    return net


def blocks_of(net):
    return [part for part in net.modules() if isinstance(part, Block)]


def grouped(net):
    again = copy.deepcopy(net)
    assert use_grouped_experts(blocks_of(again)) == 2
    return again


def step(net, x):
    """Return the output and the gradients of the input and of every trained weight."""
    x = x.clone().requires_grad_()
    out = net(x)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weight).sum().backward()
    return out, x.grad, {n: p.grad for n, p in net.named_parameters() if p.grad is not None}


def mean_error(one, exact):
    """Return how far what ``step`` returned is from what is exact, relative to it."""
    pairs = [(one[0], exact[0]), (one[1], exact[1])]
    pairs += [(one[2][name], exact[2][name]) for name in one[2]]
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]
    return sum(errors) / len(errors)


def close(actual, expected):
    return (actual - expected).abs().max() <= 1e-12 * expected.abs().max()


MODES = {"adapters": {}, "frozen": {"adapted": False}, "trained": {"trained": True}}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_output_and_gradients_are_those_of_transformers_and_peft(variant, mode):
    stock = model(variant, **MODES[mode])
    ours = grouped(stock)
    x = torch.randn(11, HIDDEN, dtype=torch.float64)
    out, grad, grads = step(ours, x)
    wanted_out, wanted_grad, wanted = step(stock, x)
    assert close(out, wanted_out)
    assert close(grad, wanted_grad)
    assert set(grads) == set(wanted)
    biases = 2 * bool(VARIANTS[variant].get("has_bias"))
    of_a_block = {"adapters": 4, "frozen": 0, "trained": 2 + biases}[mode]
    assert sum("experts" in name for name in grads) == 2 * of_a_block
    for name, expected in wanted.items():
        assert close(grads[name], expected), name


def test_a_stack_may_be_trained_while_the_other_is_frozen():
    stock = model("gpt_oss", trained=True)
    for block in blocks_of(stock):
        block.experts.gate_up_proj.requires_grad_(False)
        block.experts.down_proj_bias.requires_grad_(False)
    x = torch.randn(11, HIDDEN, dtype=torch.float64)
    grads, wanted = step(grouped(stock), x)[2], step(stock, x)[2]
    assert set(grads) == set(wanted)
    assert all(close(grads[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("variant", ["plain", "gpt_oss"])
def test_trained_experts_are_computed_in_the_dtype_of_autocast(variant, monkeypatch):
    product, dtypes = torch_versions.grouped_mm, set()

    def watched(x, weight, offs):
        dtypes.add((x.dtype, weight.dtype))
        return product(x, weight, offs=offs)

    weights_TK, chosen_TK = torch.randn(64, EXPERTS).softmax(-1).topk(CHOSEN)
    x_TI = torch.randn(64, HIDDEN)

    stock = model(variant, dtype=torch.float32, trained=True)
    experts = grouped(stock)[0].experts
    monkeypatch.setattr(torch_versions, "grouped_mm", watched)
    kept = []
    notes = saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor)
    with torch.autocast("cpu", torch.bfloat16), notes:
        out, grad, grads = step(Routed(experts, chosen_TK, weights_TK), x_TI)
    assert any(
        torch.equal(tensor, x_TI.bfloat16()) for tensor in kept if tensor.dtype != x_TI.dtype
    )
    assert not any(torch.equal(tensor, x_TI) for tensor in kept if tensor.dtype == x_TI.dtype)
    assert dtypes == {(torch.bfloat16, torch.bfloat16)}
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    whole = copy.deepcopy(stock[0].experts).double()
    exact = step(Routed(whole, chosen_TK, weights_TK.double()), x_TI.double())
    mine = mean_error((out, grad, grads), exact)
    half = step(
        Routed(stock[0].experts.bfloat16(), chosen_TK, weights_TK.bfloat16()), x_TI.bfloat16()
    )
    assert 1e-4 < mine < 1.25 * mean_error(half, exact)


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_expert_without_tokens_gives_its_adapter_a_gradient_of_zero(dtype, tokens):
    net = model(dtype=dtype)
    for block in blocks_of(net):
        block.away = torch.tensor([-100.0, 0, 0, -100.0, 0])
    out, _, grads = step(grouped(net), torch.randn(tokens, HIDDEN, dtype=dtype))
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads.values())
    for name, grad in grads.items():
        if "experts" in name:
            by_expert = grad.view(EXPERTS, -1) if "lora_A" in name else grad.view(-1, EXPERTS).t()
            assert not by_expert[[0, 3]].any()
            assert by_expert.any()


def test_all_tokens_may_go_to_the_same_experts():
    stock = model()
    for block in blocks_of(stock):
        block.away = torch.tensor([-100.0, -100.0, 0, 0, -100.0])
    x = torch.randn(9, HIDDEN, dtype=torch.float64)
    out, _, grads = step(grouped(stock), x)
    wanted_out, _, wanted = step(stock, x)
    assert close(out, wanted_out)
    assert all(close(grads[name], wanted[name]) for name in wanted)


def test_in_bf16_it_is_no_further_from_the_exact_result_than_peft():
    stock = model(dtype=torch.bfloat16)
    exact = copy.deepcopy(stock).double()
    ours = grouped(stock)
    x = torch.randn(64, HIDDEN).bfloat16()
    same = [block.router.weight for net in (stock, exact, ours) for block in blocks_of(net)]
    for weight in same:  # so that rounding does not change who is chosen
        weight.data.mul_(30)
    wanted = step(exact, x.double())
    mine, peft = (mean_error(step(net, x), wanted) for net in (ours, stock))
    assert mine < 1.25 * peft, (mine, peft)


@pytest.mark.parametrize("mode", ["adapters", "trained"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_blocks_give_the_same_bits(recompute, mode):
    plain = grouped(model(**MODES[mode]))
    again = grouped(model(**MODES[mode]))
    checkpoint_blocks(blocks_of(again), recompute)
    x = torch.randn(11, HIDDEN, dtype=torch.float64)
    out, grad, grads = step(again, x)
    wanted_out, wanted_grad, wanted = step(plain, x)
    assert torch.equal(out, wanted_out)
    assert torch.equal(grad, wanted_grad)
    assert all(torch.equal(grads[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("mode", ["adapters", "trained"])
def test_what_is_kept_for_the_backward_pass_is_one_wide_tensor_and_narrow_ones(mode):
    net = grouped(model(**MODES[mode]))
    kept = []
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def pack(tensor):
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in weights:
            kept.append(tuple(tensor.shape))
        return tensor

    experts = blocks_of(net)[0].experts
    x_TI = torch.randn(11, HIDDEN, dtype=torch.float64, requires_grad=True)
    weights_TK, chosen_TK = torch.randn(11, EXPERTS, dtype=torch.float64).topk(CHOSEN)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        experts(x_TI, chosen_TK, weights_TK)
    rows = 11 * CHOSEN
    wanted = [(11, HIDDEN), (11, CHOSEN), (rows, 2 * INNER)]
    wanted += [(rows, 4), (rows, 4)] if mode == "adapters" else []  # rank 3, padded
    assert sorted(kept) == sorted(wanted)


def test_padding_is_at_most_15_rows_or_a_quarter():
    assert [num_padded_rows(n) for n in (0, 1, 16, 17, 100, 128, 129, 300)] == [
        *(0, 16, 16, 32, 112, 128, 160, 320)
    ]
    assert all(n <= num_padded_rows(n) <= n + max(15, n / 4) for n in range(5000))
    assert (
        len({num_padded_rows(n) for n in range(1, 5000)}) == 8 + 5 * 4 + 1
    )  # to 128, to 4,096, 5,120


def test_in_bf16_on_a_cpu_experts_have_one_of_few_numbers_of_rows(monkeypatch):
    product, counts = torch_versions.grouped_mm, set()

    def watched(x, weight, offs):
        counts.update(torch.diff(offs, prepend=offs.new_zeros(1)).tolist())
        return product(x, weight, offs=offs)

    monkeypatch.setattr(torch_versions, "grouped_mm", watched)
    for dtype, wanted in ((torch.bfloat16, {16, 32}), (torch.float32, None)):
        counts.clear()
        step(grouped(model(dtype=dtype, rank=4)), torch.randn(40, HIDDEN, dtype=dtype))
        assert counts <= wanted if wanted else any(count % 16 for count in counts)


def test_padding_of_an_expert_cannot_overflow():
    experts = blocks_of(grouped(model(dtype=torch.bfloat16)))[0].experts
    experts.get_base_layer().gate_up_proj.data[1] *= 1e10
    x_TI = torch.full((4, HIDDEN), 1e-3, dtype=torch.bfloat16)
    x_TI[0] = 1e15  # the token that padding is of: by expert 1 it would be infinite
    chosen_TK = torch.tensor([[0, 2], [1, 3], [1, 4], [2, 3]])
    out = experts(x_TI.requires_grad_(), chosen_TK, torch.ones(4, CHOSEN, dtype=torch.bfloat16))
    (out * 1e-20).sum().backward()
    grads = [p.grad for p in experts.parameters() if p.requires_grad]
    assert len(grads) == 4
    assert all(grad.isfinite().all() for grad in (x_TI.grad, *grads))
