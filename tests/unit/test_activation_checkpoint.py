import copy
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import LlamaConfig, LlamaForCausalLM

from hpc_tune.engine.activation_checkpoint import checkpoint_blocks


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


def test_blocks_that_need_nothing_are_left_alone():
    block = nn.Linear(2, 2)
    checkpoint_blocks([block], "none")
    assert "forward" not in vars(block)
