"""The fused LoRA layer against peft's own."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_tune.engine.activation_checkpoint import checkpoint_blocks
from hpc_tune.model.lora_linear import AdapterCopies, adapter_weight, use_lora_linear


class Block(nn.Module):
    """Two layers with adapters, one of them with a bias, and something between them."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(24, 40, bias=True)
        self.down = nn.Linear(40, 24, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def model(dtype=torch.float64, std=0.3, **settings):
    torch.manual_seed(0)
    net = nn.Sequential(Block(), Block()).to(dtype)
    words = {"target_modules": ["up", "down"], "r": 4, "lora_alpha": 12, **settings}
    net = get_peft_model(net, LoraConfig(**words), autocast_adapter_dtype=True)
    for name, parameter in net.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=std)
    return net


def step(net, x, needs_input=True):
    """Return the output and the gradients of the input and of every trained weight."""
    x = x.clone().requires_grad_(needs_input)
    out = net(x)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    (out * weight).sum().backward()
    grads = {n: p.grad for n, p in net.named_parameters() if p.requires_grad}
    return out, x.grad, grads


@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize("shape", [(3, 5, 24), (7, 24), (1, 1, 24)])
def test_output_and_gradients_are_those_of_peft(shape, needs_input):
    stock = model()
    fused = copy.deepcopy(stock)
    assert len(use_lora_linear([fused])) == 4
    x = torch.randn(*shape, dtype=torch.float64)
    out, grad, grads = step(fused, x, needs_input)
    wanted_out, wanted_grad, wanted = step(stock, x, needs_input)
    assert torch.allclose(out, wanted_out, rtol=1e-12, atol=1e-12)
    assert (grad is None) == (not needs_input)
    assert grad is None or torch.allclose(grad, wanted_grad, rtol=1e-12, atol=1e-12)
    assert set(grads) == set(wanted)
    for name, expected in wanted.items():
        assert torch.allclose(grads[name], expected, rtol=1e-12, atol=1e-12), name


def test_in_bf16_it_is_no_further_from_the_exact_result_than_peft():
    stock = model(torch.bfloat16, std=0.05)
    exact = copy.deepcopy(stock).double()
    fused = copy.deepcopy(stock)
    use_lora_linear([fused])
    x = torch.randn(64, 24).bfloat16()
    wanted = step(exact, x.double())
    errors = []
    for net in (fused, stock):
        out, grad, grads = step(net, x)
        assert out.dtype == grad.dtype == torch.bfloat16
        assert all(one.dtype == torch.float32 for one in grads.values())
        pairs = [(out, wanted[0]), (grad, wanted[1])]
        pairs += [(grads[name], wanted[2][name]) for name in grads]
        errors.append([((a.double() - b).norm() / b.norm()).item() for a, b in pairs])
    mine, peft = (sum(one) / len(one) for one in errors)
    assert mine < 1.25 * peft, (mine, peft)
    assert max(errors[0]) < 0.03


@pytest.mark.parametrize("rank", [4, 16])  # of 16, the adapter's product is worth keeping
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_blocks_give_the_same_bits(recompute, rank):
    plain = model(r=rank)
    use_lora_linear([plain])
    again = copy.deepcopy(plain)
    checkpoint_blocks([m for m in again.modules() if isinstance(m, Block)], recompute)
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    out, grad, grads = step(again, x)
    wanted_out, wanted_grad, wanted = step(plain, x)
    assert torch.equal(out, wanted_out)
    assert torch.equal(grad, wanted_grad)
    assert all(torch.equal(grads[name], wanted[name]) for name in wanted)


def test_what_is_kept_for_the_backward_pass_is_the_input_and_a_narrow_product():
    net = model()
    use_lora_linear([net])
    kept = []
    weights = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            kept.append(tuple(tensor.shape))
        return tensor

    layer = net.base_model.model[0].up
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(torch.randn(6, 24, dtype=torch.float64, requires_grad=True))
    assert sorted(kept) == [(6, 4), (6, 24)]


METHODS = {
    "dora": {"use_dora": True},
    "dropout": {"lora_dropout": 0.3},
    "dora with dropout": {"use_dora": True, "lora_dropout": 0.3},
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("settings", METHODS.values(), ids=METHODS)
def test_dora_and_dropout_are_those_of_peft(settings, training):
    stock = model(**settings).train(training)
    for name, parameter in stock.named_parameters():
        if "magnitude" in name:
            nn.init.uniform_(parameter, 0.5, 2.0)
    fused = copy.deepcopy(stock)
    assert len(use_lora_linear([fused])) == 4
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    results = []
    for net in (fused, stock):
        torch.manual_seed(1)
        out, grad, grads = step(net, x)
        results.append([out, grad, *(grads[name] for name in sorted(grads))])
    assert any("magnitude" in name for name in grads) == ("use_dora" in settings)
    for mine, theirs in zip(*results, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-9)


def test_a_layer_without_adapters_stays_as_it_is():
    assert use_lora_linear([Block()]) == []


class Attention(nn.Module):
    """Layers that share an input, by the names of transformers, and one that does not."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(24, 24)
        self.k_proj = nn.Linear(24, 12)
        self.v_proj = nn.Linear(24, 12)
        self.o_proj = nn.Linear(24, 24)
        self.others = 0  # how many layers take another input

    def forward(self, x):
        query = self.q_proj(x)
        key = self.k_proj(3 * x if self.others > 1 else x)
        value = self.v_proj(2 * x if self.others else x)
        return x + self.o_proj(query * torch.cat([key, value], -1))


def attention(dtype=torch.float64, **settings):
    torch.manual_seed(0)
    net = nn.Sequential(Attention(), Attention()).to(dtype)
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = LoraConfig(target_modules=names, r=4, **settings)
    net = get_peft_model(net, config, autocast_adapter_dtype=True)
    for name, parameter in net.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            nn.init.normal_(parameter, std=0.3)
    return net


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("others", [0, 1, 2])
def test_layers_that_share_an_input_are_those_of_peft(others, settings, recompute):
    """With several micro-batches in flight, as in a pipeline, and over steps."""
    stock = attention(**settings)
    fused = copy.deepcopy(stock)
    blocks = [m for m in fused.modules() if isinstance(m, Attention)]
    copies = AdapterCopies()
    copies.keep_copies(blocks, groups := use_lora_linear(blocks, shares_inputs=True))
    assert sorted(len(group.layers) for group in groups) == [1, 1, 3, 3]
    checkpoint_blocks(blocks, recompute)
    for net in (stock, fused):
        for block in net.base_model.model:
            block.others = others
    for seed in range(3):
        generator = torch.manual_seed(seed)
        xs = [torch.randn(3, 5, 24, dtype=torch.float64, generator=generator) for _ in range(4)]
        copies.refresh()
        together = [group for group in groups if len(group.layers) > 1]
        assert all(group._shares_input == (others == 0 or seed == 0) for group in together)
        results = []
        for net in (fused, stock):
            net.zero_grad()
            inputs = [x.clone().requires_grad_() for x in xs]
            outs = [net(x) for x in inputs]
            for out in outs:
                out.square().sum().backward()
            grads = [p.grad for p in net.parameters() if p.requires_grad]
            results.append([*outs, *(x.grad for x in inputs), *grads])
        for mine, theirs in zip(*results, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-8)
    copies.refresh()
    assert all(group._input is None and not group._pending_outputs for group in groups)


def test_a_row_without_tokens_is_taken():
    net = attention()
    use_lora_linear(net.base_model.model, shares_inputs=True)
    assert net(torch.zeros(2, 0, 24, dtype=torch.float64)).shape == (2, 0, 24)


class Shapes(TorchDispatchMode):
    """Notes the shapes of the arguments of each call of an operator."""

    def __init__(self, operator):
        super().__init__()
        self.operator, self.calls = operator, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is self.operator:
            self.calls.append([tuple(arg.shape) for arg in args])
        return func(*args, **(kwargs or {}))


def test_an_input_that_is_shared_is_read_by_one_narrow_product():
    fused = attention()
    use_lora_linear(fused.base_model.model, shares_inputs=True)
    x = torch.randn(7, 24, dtype=torch.float64, requires_grad=True)
    with Shapes(torch.ops.aten.mm.default) as products:
        out = fused(x)
    assert products.calls.count([(7, 24), (24, 12)]) == 2  # three A's of rank 4 in each block
    assert products.calls.count([(7, 24), (24, 4)]) == 2  # of o_proj
    out.sum().backward()


def test_gradients_of_an_input_are_added_up_by_the_large_products():
    fused = attention()
    use_lora_linear(fused.base_model.model, shares_inputs=True)
    out = fused(torch.randn(7, 24, dtype=torch.float64, requires_grad=True))
    with Shapes(torch.ops.aten.addmm_.default) as added:
        out.sum().backward()
    # In each block o, q, k and v, by the features that are summed over; no adapter's rank of 4.
    assert sorted(weight[0] for _, _, weight in added.calls) == [12, 12, 12, 12, 24, 24, 24, 24]


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_copies_follow_the_adapters(dtype, settings):
    plain = attention(dtype, **settings)
    kept = copy.deepcopy(plain)
    use_lora_linear(plain.base_model.model)
    copies, blocks = AdapterCopies(), list(kept.base_model.model)
    copies.keep_copies(blocks, use_lora_linear(blocks))
    x = torch.randn(3, 5, 24, dtype=dtype)
    outs = []
    for _ in range(3):
        copies.refresh()
        out, grad, grads = step(kept, x)
        wanted_out, wanted_grad, wanted = step(plain, x)
        outs.append(out)
        near = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5}
        torch.testing.assert_close(out, wanted_out, **{"atol": 1e-5, **near})
        torch.testing.assert_close(grad, wanted_grad, **{"atol": 1e-5, **near})
        for name, expected in wanted.items():
            torch.testing.assert_close(grads[name], expected, **{"atol": 1e-4, **near})
        for net in (plain, kept):
            with torch.no_grad():
                for parameter in net.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(1e-2 * parameter.grad.sign())
                        parameter.grad = None
        copies.mark_changed()
    assert not torch.allclose(outs[0], outs[2], rtol=1e-3)


def test_copies_are_made_once_for_each_change():
    net = attention(torch.bfloat16)
    copies, blocks = AdapterCopies(), list(net.base_model.model)
    copies.keep_copies(blocks, groups := use_lora_linear(blocks, shares_inputs=True))
    copies.refresh()
    first, weight = groups[0].a_SI, adapter_weight(groups[0].layers[0], "A")
    assert len({group.a_SI.untyped_storage().data_ptr() for group in groups}) == 1
    before = weight.bfloat16()
    assert torch.equal(first[:4], before)
    with torch.no_grad():
        weight.add_(1)
    copies.refresh()
    assert torch.equal(first[:4], before)
    copies.mark_changed()
    copies.refresh()
    assert groups[0].a_SI is first
    assert torch.equal(first[:4], weight.bfloat16())


class Clipping(Block):
    """A block that changes what a layer gives in place, as OLMo clips queries and keys."""

    def forward(self, x):
        up = self.up(x)
        up.clamp_(min=-0.5, max=0.5)
        return x + self.down(up)


def test_what_a_layer_gives_may_be_changed_in_place():
    stock = model()
    for block in stock.base_model.model:
        block.__class__ = Clipping
    fused = copy.deepcopy(stock)
    use_lora_linear([fused])
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    out, grad, grads = step(fused, x)
    wanted_out, wanted_grad, wanted = step(stock, x)
    assert torch.allclose(out, wanted_out, rtol=1e-12, atol=1e-12)
    assert torch.allclose(grad, wanted_grad, rtol=1e-12, atol=1e-12)
    for name, expected in wanted.items():
        assert torch.allclose(grads[name], expected, rtol=1e-12, atol=1e-12), name
    assert not torch.allclose(out, step(model(), x)[0]), "nothing was clipped"
