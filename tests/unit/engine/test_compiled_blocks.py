"""Compiled decoder blocks of packed rows: one graph with the kernel in it, whatever the lengths.

A CPU stands for the GPU (see tests/support/varlen_on_cpu.py): dynamo and autograd see torch's own
operator; only the graph is not made into machine code.
"""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hpc_tune.batch import Batch, padding_batch
from hpc_tune.engine.activation_checkpoint import checkpoint_blocks
from hpc_tune.engine.compile import compile_blocks
from hpc_tune.model import varlen_attention
from hpc_tune.model.layers import find_blocks
from hpc_tune.model.lora_linear import use_lora_linear
from hpc_tune.model.loss import LossModel
from hpc_tune.model.packed_attention import use_document_attention
from tests.support.varlen_on_cpu import CALLS, use_cpu_kernels

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
# Other numbers of rows, tokens and documents, and another longest document, in each.
BATCHES = (
    ((5, 9, 2), (16,), (14, 1, 1)),
    ((8, 9, 2, 5), (20, 4)),
    ((32,), (30, 2)),
    ((3, 3, 3, 3, 3, 1), (7, 9), (10, 6), (8, 8)),
)


@pytest.fixture(autouse=True)
def _one_graph_backend(monkeypatch):
    """Graphs are traced, differentiated and run operator by operator, and counted from 0."""
    use_cpu_kernels()
    monkeypatch.setattr(varlen_attention, "DTYPES", (*varlen_attention.DTYPES, torch.float32))
    theirs = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward: theirs(forward, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    CALLS.clear()
    yield
    torch._dynamo.reset()


def batch_of(lengths):
    generator, num_tokens = torch.Generator().manual_seed(3), sum(lengths[0])
    tokens_BT = torch.randint(0, 64, (len(lengths), num_tokens), generator=generator)
    rows = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    count = tokens_BT.numel()
    made = Batch(tokens_BT, tokens_BT.roll(-1, 1), torch.stack(rows), count, count, 0)
    return replace(made, document_lengths=lengths)


def model_of(family, recompute, has_varlen_kernel=True, adapters=False, shares_inputs=False):
    more = {"sliding_window": 4} if family == "mistral" else {}
    config = CONFIG_MAPPING[family](**SHAPE, **HEADS, **more)
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config)
    can = use_document_attention(lm)
    if adapters:
        from peft import LoraConfig, get_peft_model

        lm = get_peft_model(lm, LoraConfig(r=4, target_modules="all-linear"))
    module = LossModel(lm, config, can).train()
    module.has_varlen_kernel = has_varlen_kernel
    module.uses_document_attention = False
    blocks = list(find_blocks(module))
    use_lora_linear(blocks, shares_inputs)
    checkpoint_blocks(blocks, recompute)
    return module


def loss_and_grads(module, batch):
    module.zero_grad()
    loss = module(batch)
    loss.backward()
    grads = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return [loss.detach(), *grads]


def compare(module, batches):
    """Compare a model's losses and gradients before and after its blocks are compiled."""
    wanted = [loss_and_grads(module, batch) for batch in batches]
    compile_blocks(list(find_blocks(module)))
    CALLS.clear()
    for batch, tensors in zip(batches, wanted, strict=True):
        for found, true in zip(loss_and_grads(module, batch), tensors, strict=True):
            torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-6)
    assert not counters["graph_break"], "a part of a block is not compiled"


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        pytest.param("llama", "none", marks=pytest.mark.full),
        ("mistral", "selective"),
        pytest.param("llama", "selective", marks=pytest.mark.full),
        pytest.param("mistral", "none", marks=pytest.mark.full),
        pytest.param("mistral", "full", marks=pytest.mark.full),
    ],
)
def test_batches_of_any_lengths_share_one_graph_that_has_the_kernel(family, recompute):
    batches = [batch_of(lengths) for lengths in BATCHES]
    compare(model_of(family, recompute), batches)
    assert counters["stats"]["unique_graphs"] == 1
    times = 2 if recompute == "full" else 1
    assert len(CALLS) == len(batches) * SHAPE["num_hidden_layers"] * times
    assert {call["before"] for call in CALLS} == {3 if family == "mistral" else -1}
    starts = [[0, 5, 14, 16, 32, 46, 47, 48], [0, 8, 17, 19, 24, 44, 48]]
    assert CALLS[0]["starts"] == starts[0]
    assert CALLS[SHAPE["num_hidden_layers"] * times]["starts"] == starts[1]


@pytest.mark.parametrize(
    ("recompute", "shares_inputs"),
    [pytest.param("selective", False, marks=pytest.mark.full), ("none", True)],
)
def test_adapters_train_in_the_same_graph(recompute, shares_inputs):
    batches = [batch_of(lengths) for lengths in BATCHES[:2]]
    model = model_of("llama", recompute, adapters=True, shares_inputs=shares_inputs)
    compare(model, batches)
    assert counters["stats"]["unique_graphs"] == 1
    assert len(CALLS) == len(batches) * SHAPE["num_hidden_layers"]


@pytest.mark.full
def test_rows_with_a_mask_are_compiled_with_recompute_too():
    compare(model_of("llama", "selective", has_varlen_kernel=False), [batch_of(BATCHES[0])])
    assert counters["stats"]["unique_graphs"] == 1
    assert not CALLS


def test_the_empty_batch_is_not_compiled():
    module = model_of("llama", "none")
    compile_blocks(list(find_blocks(module)))
    module(padding_batch(0)).backward()
    assert not counters["stats"]
