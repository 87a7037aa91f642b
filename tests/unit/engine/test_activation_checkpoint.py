import copy
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import LlamaConfig, LlamaForCausalLM, OlmoConfig, OlmoForCausalLM

from hpc_tune.engine.activation_checkpoint import checkpoint_blocks
from hpc_tune.model.dropout import RowDropout
from hpc_tune.model.lora_linear import use_lora_linear
from hpc_tune.model.micro_batch import MicroBatch, batch_context


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        use_cache=False,
    )
    adapted = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return adapted.train()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make, and the most that live at once."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self.known:
                storage = tensor.untyped_storage()
                self.known[storage] = True
                self.live += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def free(self, num_bytes):
        self.live -= num_bytes


def step(model, recompute):
    """Return (loss, gradients, peak bytes of memory beside the model) of one step."""
    model = copy.deepcopy(model)
    blocks = list(model.base_model.model.model.layers)
    checkpoint_blocks(blocks, recompute)
    tokens_BT = torch.arange(512).view(4, 128) % 100
    with LiveBytes() as counted:
        loss = model(input_ids=tokens_BT).logits.logsumexp(-1).sum()
        loss.backward()
    return loss.item(), [p.grad for p in model.parameters() if p.requires_grad], counted.peak


def test_selective_recompute_takes_less_memory_than_none_and_more_than_full_to_the_same_bits(model):
    loss, gradients, most = step(model, "none")
    memory = {}
    for recompute in ("selective", "full"):
        same_loss, same_gradients, memory[recompute] = step(model, recompute)
        assert same_loss == loss
        assert all(map(torch.equal, same_gradients, gradients))
    print({"none": most} | memory)
    assert memory["full"] < 0.8 * memory["selective"] < 0.8 * 0.8 * most


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_blocks_that_clip_in_place_have_the_gradients_of_transformers(
    adapted, recompute
):
    """OLMo clips queries, keys and values where they are (clip_qkv)."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = OlmoConfig(**sizes, num_hidden_layers=2, vocab_size=100, clip_qkv=0.05)
    stock = OlmoForCausalLM(config).train()
    if adapted:
        stock = get_peft_model(stock, LoraConfig(r=4, target_modules="all-linear"))
    ours = copy.deepcopy(stock)
    blocks = next(list(m.layers) for m in ours.modules() if hasattr(m, "layers"))
    use_lora_linear(blocks)
    for _ in range(2):  # as when the governor gives memory back
        checkpoint_blocks(blocks, recompute)
    tokens_BT = torch.arange(64).view(2, 32)
    for model in (stock, ours):
        model(input_ids=tokens_BT, use_cache=False).logits.logsumexp(-1).sum().backward()
    wanted = {n: p.grad for n, p in stock.named_parameters() if p.grad is not None}
    for name, parameter in ours.named_parameters():
        if name in wanted:
            assert torch.allclose(parameter.grad, wanted[name], rtol=1e-4, atol=1e-5), name
    hooks = [len(b.self_attn.q_proj._forward_hooks) for b in blocks]
    assert hooks == [recompute == "selective"] * 2


def test_blocks_that_need_nothing_are_left_alone():
    block = nn.Linear(2, 2)
    checkpoint_blocks([block], "none")
    assert "forward" not in vars(block)


class Dropping(nn.Module):
    """A block with the dropout of ``kind``."""

    def __init__(self, dropout):
        super().__init__()
        self.linear, self.dropout = nn.Linear(16, 16), dropout

    def forward(self, x_BTD):
        return self.dropout(self.linear(x_BTD).relu())


def gradients_of(blocks, recompute, num_steps=3, evaluates=False):
    """Return the gradients of some steps, and how often the state of random numbers was read."""
    blocks, states, real = copy.deepcopy(blocks), [], torch.get_rng_state
    checkpoint_blocks(blocks, recompute)
    found = []
    for block in blocks if evaluates else ():
        with torch.no_grad():
            block.eval()(torch.zeros(2, 3, 16))
        block.train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_rng_state", lambda: states[-1].append(1) or real())
        for step in range(num_steps):
            states.append([])
            torch.manual_seed(step)
            x_BTD = torch.randn(2, 3, 16)
            with batch_context.use_batch(MicroBatch(rows=(2 * step, 2 * step + 1))):
                for block in blocks:
                    x_BTD = block(x_BTD)
            x_BTD.sum().backward()
            found += [p.grad.clone() for block in blocks for p in block.parameters()]
    return found, [len(read) for read in states]


DROPOUTS = {
    "none": (nn.Identity(), False),
    "by row": (RowDropout(0.5, 7, "layer"), False),
    "torch's": (nn.Dropout(0.5), True),
    "torch's, off": (nn.Dropout(0.0), False),
}


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("kind", DROPOUTS)
def test_random_numbers_are_preserved_only_for_blocks_that_draw_some(kind, recompute):
    dropout, draws = DROPOUTS[kind]
    torch.manual_seed(0)
    blocks = [Dropping(dropout) for _ in range(2)]
    expected, _ = gradients_of(blocks, "none")
    found, states = gradients_of(blocks, recompute)
    assert all(map(torch.equal, found, expected))
    assert (states[-1] > 0) == draws


def test_an_evaluation_does_not_tell_whether_a_block_draws():
    torch.manual_seed(0)
    blocks = [Dropping(nn.Dropout(0.5))]
    expected, _ = gradients_of(blocks, "none", evaluates=True)
    found, _ = gradients_of(blocks, "full", evaluates=True)
    assert all(map(torch.equal, found, expected))
