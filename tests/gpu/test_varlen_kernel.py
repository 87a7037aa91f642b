"""Rows of documents through torch's variable-length attention on the hardware that has it.

    python -m pytest -s -m "soak or not soak" tests/gpu/test_varlen_kernel.py

prints what the kernel takes beside a mask, in seconds and bytes, and how far it is from it.
"""

import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters
from torch.profiler import profile
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hpc_tune.data.packed_rows import make_batch
from hpc_tune.engine.activation_checkpoint import checkpoint_blocks
from hpc_tune.engine.compile import compile_blocks
from hpc_tune.model.kernels import choose_model_kernels
from hpc_tune.model.layers import find_blocks, use_faster_layers
from hpc_tune.model.loss import LossModel
from hpc_tune.model.packed_attention import use_document_attention
from hpc_tune.model.varlen_attention import (
    MAX_ERROR_EPS,
    compare_kernel_with_mask,
    make_document_starts,
)
from hpc_tune.world.device import find_architecture

architecture = find_architecture(torch.device("cuda", 0)) if torch.cuda.is_available() else None
capable = architecture is not None and architecture.has_varlen_attention
pytestmark = pytest.mark.skipif(
    not capable, reason="needs a GPU of compute capability 8.0 or later (FlashAttention)"
)
GPU = torch.device("cuda", 0)
TOKENS = 8192
# Llama 3 8B's attention; 32 MiB of weights in each block, as documents are what is looked at.
SHAPE = {
    **{"hidden_size": 4096, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512},
    **{"num_attention_heads": 32, "num_key_value_heads": 8},
}
SMALL = {
    **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 512},
    **{"num_attention_heads": 8, "num_key_value_heads": 2},
}


def batch_of(*rows):
    """A batch on the GPU of rows of documents, by their lengths."""
    laid, number = [], 0
    for row in rows:
        laid.append([])
        for length in row:
            tokens_T = (torch.arange(length) * 7 + number) % 512
            laid[-1].append((tokens_T.numpy(), torch.ones(length, dtype=torch.bool).numpy()))
            number += 1
    return make_batch(laid, max(map(sum, rows)), 0)


def model_of(shape, recompute="none", dtype=torch.bfloat16, window=None):
    family = "mistral" if window else "llama"
    config = CONFIG_MAPPING[family](**shape, **({"sliding_window": window} if window else {}))
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config, dtype=dtype).to(GPU)
    module = LossModel(lm, config, use_document_attention(lm)).train()
    assert not choose_model_kernels(config, dtype, False, GPU).mask_reason
    module.has_varlen_kernel = True
    checkpoint_blocks(list(find_blocks(module)), recompute)
    return module


def step(module, batch):
    module.zero_grad()
    loss = module(batch.to(GPU))
    loss.backward()
    return loss


@contextmanager
def by_mask(module):
    module.has_varlen_kernel = False
    try:
        yield
    finally:
        module.has_varlen_kernel = True


@pytest.mark.parametrize("queries_are_partial", [False, True])
@pytest.mark.parametrize("window", [None, 1, 70, 128])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("values", [8, 64, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_is_masked_attention_but_for_rounding(
    dtype, values, groups, window, queries_are_partial
):
    gaps = compare_kernel_with_mask(GPU, dtype, values, groups, window, queries_are_partial)
    eps = torch.finfo(dtype).eps
    print({name: f"{gap / eps:.2f} eps" for name, gap in gaps.items()})
    assert max(gaps.values()) < MAX_ERROR_EPS * eps


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_loss_and_gradients_are_those_of_the_mask(recompute, window):
    module = model_of(SMALL, recompute, window=window)
    batch = batch_of((100, 1, 300, 5), (7, 250), (400,))
    loss, grads = step(module, batch).item(), [p.grad.clone() for p in module.parameters()]
    with by_mask(module):
        wanted, wanted_grads = step(module, batch).item(), [p.grad for p in module.parameters()]
    assert loss == pytest.approx(wanted, rel=2e-3)
    for grad, other in zip(grads, wanted_grads, strict=True):
        assert (grad - other).norm() < 0.05 * other.norm()


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_blocks_have_the_kernel_and_the_same_losses(recompute, window):
    module = model_of(SMALL, recompute, window=window)
    batches = [batch_of((100, 1, 300, 5), (7, 250)), batch_of((30, 200), (500, 2), (1,))]
    wanted = [step(module, batch).item() for batch in batches]
    compile_blocks(list(find_blocks(module)))
    counters.clear()
    assert [step(module, batch).item() for batch in batches] == pytest.approx(wanted, rel=2e-3)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    with profile() as found:
        step(module, batches[0])
    assert any("flash" in event.key for event in found.key_averages())


def test_norms_are_one_kernel_that_rounds_once():
    module, batch = model_of(SMALL), batch_of((100, 300), (250,))
    wanted, grads = step(module, batch).item(), [p.grad.clone() for p in module.parameters()]
    use_faster_layers(module, list(find_blocks(module)), False, torch.bfloat16, GPU)
    with profile() as found:
        loss = step(module, batch).item()
    names = {event.key for event in found.key_averages()}
    assert {"aten::_fused_rms_norm", "aten::_fused_rms_norm_backward"} <= names
    assert loss == pytest.approx(wanted, rel=2e-3)
    for grad, parameter in zip(grads, module.parameters(), strict=True):
        assert (parameter.grad - grad).norm() < 0.05 * grad.norm()


def test_a_batch_of_single_tokens_is_trained():
    """The empty micro-batch that joins collectives is one token."""
    module, batch = model_of(SMALL), batch_of((1,) * 8)
    batch.labels_BT[:] = 1
    batch = replace(batch, num_loss_tokens=batch.labels_BT.numel())
    loss, grads = step(module, batch).item(), [p.grad.clone() for p in module.parameters()]
    with by_mask(module):
        assert loss == pytest.approx(step(module, batch).item(), rel=2e-3)
    for grad, other in zip(grads, module.parameters(), strict=True):
        assert (grad - other.grad).norm() <= 0.05 * other.grad.norm() + 1e-6


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_forward_and_backward_wait_for_nothing(recompute):
    module, batch = model_of(SMALL, recompute), batch_of((100, 200), (300,))
    step(module, batch)  # libraries are loaded, memory is pinned
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(module, batch)
        with by_mask(module), pytest.raises(RuntimeError, match="synchroniz"):
            step(module, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def documents(length):
    return (length,) * (TOKENS // length) + ((rest,) if (rest := TOKENS % length) else ())


def test_no_mask_takes_memory():
    module, batch = model_of(SMALL, "full"), batch_of(documents(100))

    def peak_bytes():
        step(module, batch)
        module.zero_grad()
        torch.cuda.reset_peak_memory_stats(GPU)
        before = torch.cuda.memory_allocated(GPU)
        step(module, batch)
        return torch.cuda.max_memory_allocated(GPU) - before

    without = peak_bytes()
    with by_mask(module):
        masked = peak_bytes()
    print(f"\n{TOKENS} tokens: {without >> 20} MiB, with a mask {masked >> 20} MiB")
    assert masked - without > TOKENS * TOKENS, "a byte for each pair of tokens at the least"


def median_s(work, times=10):
    seconds = []
    for _ in range(times + 3):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_s)
    return sorted(seconds[3:])[times // 2]


@pytest.mark.soak
@pytest.mark.parametrize("length", [100, 1000, TOKENS])
def test_packed_rows_take_less_time_than_with_a_mask(length):
    module, batch = model_of(SHAPE), batch_of(documents(length))
    took_s = median_s(lambda: step(module, batch))
    with by_mask(module):
        masked_s = median_s(lambda: step(module, batch))
    print(
        f"\n{torch.cuda.get_device_name(GPU)}, two blocks with Llama 3 8B's attention, {TOKENS} "
        f"tokens in documents of {length}: {took_s * 1e3:.1f} ms, by a mask {masked_s * 1e3:.1f} ms"
    )
    # One document per row has no mask either way.
    assert took_s < masked_s * (1.1 if length == TOKENS else 1.0)


def test_starts_are_copied_while_the_host_goes_on():
    torch.cuda.set_sync_debug_mode("error")
    try:
        starts = make_document_starts([[3, 5], [8]], GPU)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert starts.starts_N.tolist() == [0, 3, 8, 16]
