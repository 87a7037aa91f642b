"""The fused LoRA layer against peft's own."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hpc_tune.engine.activation_checkpoint import checkpoint_blocks
from hpc_tune.model.lora_linear import use_lora_linear


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
    assert use_lora_linear([fused]) == 4
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


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.1}, {"use_dora": True}])
def test_dropout_and_dora_stay_with_peft(settings):
    assert use_lora_linear([model(**settings)]) == 0


def test_a_layer_without_adapters_stays_as_it_is():
    assert use_lora_linear([Block()]) == 0


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
