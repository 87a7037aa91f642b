"""Rows of documents through torch's variable-length attention, against masked attention.

A CPU stands for the GPU: see tests/support/varlen_on_cpu.py.
"""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, masking_utils

from hpc_tune.batch import Batch, costliest_batch, padding_batch
from hpc_tune.data.packed_rows import make_batch
from hpc_tune.engine.activation_checkpoint import checkpoint_blocks
from hpc_tune.engine.context_parallel import parallelize_attention
from hpc_tune.model import varlen_attention
from hpc_tune.model.layers import find_blocks
from hpc_tune.model.loss import LossModel
from hpc_tune.model.micro_batch import MicroBatch, batch_context
from hpc_tune.model.packed_attention import _attend, _make_document_mask, use_document_attention
from hpc_tune.model.shared_rows import RowShard, shard_batch_to_rank, shard_documents
from hpc_tune.model.varlen_attention import (
    DocumentParts,
    DocumentStarts,
    decode_window,
    encode_window,
    make_document_starts,
    varlen_kernel_fault,
)
from hpc_tune.train.startup.architecture_check import StackedSharedRows, stack_shards
from tests.support.varlen_on_cpu import CALLS, HAS_WINDOWS, use_cpu_kernels

BY_NAME = pytest.mark.skipif(
    not HAS_WINDOWS, reason="torch before 2.11 has no varlen_attn that takes windows"
)
CPU = torch.device("cpu")
# Documents of three rows: several, one, and single tokens at an end.
LENGTHS = ((5, 9, 2), (16,), (14, 1, 1))
STARTS = [0, 5, 14, 16, 32, 46, 47, 48]


@pytest.fixture(autouse=True)
def _cpu_kernels(monkeypatch):
    """A kernel on CPUs, which takes fp32 too, where results can be told apart from rounding."""
    use_cpu_kernels()
    monkeypatch.setattr(varlen_attention, "DTYPES", (*varlen_attention.DTYPES, torch.float32))
    CALLS.clear()
    varlen_kernel_fault.cache_clear()


def batch():
    generator = torch.Generator().manual_seed(3)
    tokens_BT = torch.randint(0, 64, (3, 16), generator=generator)
    rows = [torch.cat([torch.arange(length) for length in lengths]) for lengths in LENGTHS]
    made = Batch(tokens_BT, tokens_BT.roll(-1, 1), torch.stack(rows), 48, 48, 0)
    return replace(made, document_lengths=LENGTHS)


def model_of(family="llama", recompute="none", **more):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = CONFIG_MAPPING[family](**{**shape, **heads, **more})
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config)
    module = LossModel(lm, config, use_document_attention(lm)).train()
    assert module.uses_document_attention
    module.has_varlen_kernel = True
    checkpoint_blocks(list(find_blocks(module)), recompute)
    return module


def by_mask(module):
    module.uses_document_attention = module.has_varlen_kernel = False
    return loss_and_grads(module)


def loss_and_grads(module):
    module.zero_grad()
    loss = module(batch())
    loss.backward()
    return loss.item(), [p.grad.clone() for p in module.parameters()]


def are_equal(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    for grad, other in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-6)


@pytest.fixture
def masks(monkeypatch):
    """What transformers makes as masks, and what is made in place of the kernel."""
    made = []
    theirs, ours = masking_utils.sdpa_mask, DocumentStarts.mask_B1TT
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda **o: made.append(1) or theirs(**o))
    monkeypatch.setattr(DocumentStarts, "mask_B1TT", lambda *of: made.append(1) or ours(*of))
    return made


def test_starts_are_the_sums_of_all_rows_lengths():
    starts = make_document_starts(LENGTHS, CPU)
    assert starts.starts_N.tolist() == STARTS
    assert starts.starts_N.dtype == torch.int32
    assert (starts.num_rows, starts.num_tokens, starts.max_length) == (3, 16, 16)
    assert starts.is_packed
    assert not make_document_starts([[4], [4]], CPU).is_packed


def test_rows_of_several_lengths_are_no_batch():
    with pytest.raises(ValueError, match="unpack"):
        make_document_starts([[4], [3]], CPU)


def test_the_mask_of_starts_lets_a_token_look_back_within_its_document():
    mask_B1TT = make_document_starts([[2, 1], [3]], CPU).mask_B1TT()
    one = [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    other = [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert mask_B1TT[:, 0].int().tolist() == [one, other]


def test_all_batches_of_a_run_bring_lengths():
    tokens = torch.arange(5).numpy(), torch.ones(5).numpy().astype(bool)
    for made in (make_batch([[tokens, tokens]], 64, 0), costliest_batch(2, 8), padding_batch(0)):
        starts = make_document_starts(made.document_lengths, CPU)
        assert (starts.num_rows, starts.num_tokens) == made.tokens_BT.shape


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_loss_and_gradients_are_those_of_the_mask(family, recompute, masks):
    module = model_of(family, recompute)
    found = loss_and_grads(module)
    assert not masks
    # Queries of 4 heads share keys of 2; selective recompute keeps the kernel's result.
    times = 2 if recompute == "full" else 1
    wanted = {"shapes": [(48, 4, 8), (48, 2, 8), (48, 2, 8)], "starts": STARTS, "before": -1}
    if family == "qwen3":
        wanted["shapes"] = [(48, 4, 128), (48, 2, 128), (48, 2, 128)]
    assert list(CALLS) == [wanted] * 2 * times
    are_equal(found, by_mask(module))
    assert masks


def test_latent_attention_whose_values_have_fewer_numbers_has_the_kernel(masks):
    sizes = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": 8}
    sizes |= {"kv_lora_rank": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2}
    sizes |= {"topk_group": 1, "moe_intermediate_size": 8, "num_key_value_heads": 4}
    module = model_of("deepseek_v3", **sizes)
    found = loss_and_grads(module)
    assert CALLS[0]["shapes"] == [(48, 4, 16)] * 3
    assert not masks
    are_equal(found, by_mask(module))


def test_one_head_of_keys_for_each_of_queries(masks):
    module = model_of(num_key_value_heads=4)
    found = loss_and_grads(module)
    assert CALLS[0]["shapes"] == [(48, 4, 8)] * 3
    assert not masks
    are_equal(found, by_mask(module))


def test_weights_in_fp32_train_in_bf16():
    """What rotary positions leave in fp32 is cast, as torch's own attention does it."""
    module = model_of()
    wanted = loss_and_grads(module)
    varlen_attention.DTYPES = varlen_attention.DTYPES[:2]
    CALLS.clear()
    with torch.autocast("cpu", torch.bfloat16):
        loss, grads = loss_and_grads(module)
    assert len(CALLS) == 2, "the kernel is not used"
    assert loss == pytest.approx(wanted[0], rel=1e-2)
    for grad, other in zip(grads, wanted[1], strict=True):
        assert (grad - other).norm() < 0.05 * other.norm()


class _NoAnswer(TorchDispatchMode):
    """A device that must not be asked for a value, which would wait for it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        asks = name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique_dim")
        if name == "index":
            asks = any(i is not None and i.dtype == torch.bool for i in args[1])
        assert not asks, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_step_asks_the_device_for_nothing(recompute, monkeypatch):
    module, given = model_of(recompute=recompute), batch()

    def waits(*_):
        raise AssertionError("tolist waits for the device")

    monkeypatch.setattr(torch.Tensor, "tolist", waits)
    with _NoAnswer():
        module(given).backward()
    assert CALLS
    module.uses_document_attention = module.has_varlen_kernel = False
    with pytest.raises(AssertionError, match="waits for the device"), _NoAnswer():
        module(given)


def test_lengths_that_the_host_does_not_know_leave_the_mask(masks):
    module = model_of()
    module.uses_document_attention = False  # as positions on a GPU are not read
    loss = module(replace(batch(), document_lengths=())).item()
    assert masks
    assert not CALLS
    assert loss == pytest.approx(by_mask(module)[0], rel=1e-6)


def test_one_document_per_row_is_no_packed_row_for_transformers():
    """Layers with another mask, such as a sliding window, then have that of whole rows."""
    positions_BT = batch().positions_BT
    find = masking_utils.find_packed_sequence_indices
    outside = find(positions_BT)
    with batch_context.use_batch(MicroBatch(starts=make_document_starts(LENGTHS, CPU))):
        inside = find(positions_BT)
    for document_ids_BT in (outside, inside):
        same = document_ids_BT.unsqueeze(2) == document_ids_BT.unsqueeze(1)
        assert torch.equal(same, same.transpose(1, 2))
    assert torch.equal(
        outside.unsqueeze(2) == outside.unsqueeze(1), inside.unsqueeze(2) == inside.unsqueeze(1)
    )
    whole_BT = torch.arange(16).expand(2, 16)
    with batch_context.use_batch(MicroBatch(starts=make_document_starts([[16], [16]], CPU))):
        assert find(whole_BT) is None
    assert find(whole_BT) is None


@pytest.mark.parametrize("window", [1, 3, 5, 16, 100])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_sliding_window_is_that_of_the_mask(window, recompute, masks):
    """Shorter than a document, as long as one and longer than all."""
    module = model_of("mistral", recompute, sliding_window=window)
    found = loss_and_grads(module)
    assert not masks
    assert {call["before"] for call in CALLS} == {window - 1}
    are_equal(found, by_mask(module))
    assert masks


def test_layers_with_and_without_a_window_each_have_their_own(masks):
    kinds = ["sliding_attention", "full_attention"]
    said = {"layer_types": kinds, "sliding_window": 3, "use_sliding_window": True, "head_dim": 8}
    module = model_of("qwen3", **said)
    found = loss_and_grads(module)
    assert not masks
    assert [call["before"] for call in CALLS] == [2, -1]
    are_equal(found, by_mask(module))


def test_a_kernel_without_windows_leaves_them_their_mask(masks):
    module = model_of("mistral", sliding_window=3)
    module.kernel_has_windows = False
    found = loss_and_grads(module)
    assert masks
    assert not CALLS
    are_equal(found, by_mask(module))


@pytest.mark.parametrize("is_head_tail", [False, True])
@pytest.mark.parametrize("windows", [pytest.param(True, marks=BY_NAME), False])
def test_rows_that_ranks_share_have_windows_of_the_kernel_only_where_it_takes_them(
    windows, is_head_tail
):
    whole, module = batch(), model_of("mistral", sliding_window=3)
    wanted = loss_and_grads(module)[0]
    CALLS.clear()
    module.kernel_has_windows = windows
    parallelize_attention(module, StackedSharedRows(2, is_head_tail))
    ranks = [RowShard(rank, 2, is_head_tail) for rank in range(2)]
    losses = []
    for row in range(3):
        tensors = (tensor[row : row + 1] for tensor in whole.tensors)
        one = replace(Batch(*tensors, 16, 16, row), document_lengths=LENGTHS[row : row + 1])
        losses.append(module(stack_shards([shard_batch_to_rank(one, part) for part in ranks])))
    assert sum(losses).item() == pytest.approx(wanted, rel=1e-6)
    assert {call["before"] for call in CALLS} == ({2} if windows else set())


def test_keys_of_neighboring_parts_are_taken_as_one_range():
    """And their gradients are added up where two slices see the same keys."""
    parts = shard_documents([*LENGTHS, (12, 4)], RowShard(1, 2, is_head_tail=True))
    own = DocumentParts(parts)
    assert own.key_ranges == [
        *((0, 0, 8), (0, 5, 12), (1, 0, 8), (1, 0, 12)),
        *((2, 0, 8), (2, 0, 12), (3, 0, 8), (3, 0, 12)),
    ]
    key = torch.randn(4, 2, 16, 3, dtype=torch.float64, requires_grad=True)
    wanted = torch.cat([key[row, :, a:b] for row, a, _, b in parts], 1).unsqueeze(0)
    found = own.take_keys(key)
    assert found.equal(wanted)
    weight = torch.randn_like(wanted)
    [grad], [other] = (torch.autograd.grad(x, key, weight, True) for x in (found, wanted))
    torch.testing.assert_close(grad, other)


@pytest.mark.parametrize("window", [None, 1, 3])
def test_the_mask_of_own_queries_is_their_rows_of_the_whole_one(window):
    starts = make_document_starts(LENGTHS, CPU)
    places = RowShard(1, 4, is_head_tail=True).shard_to_rank(torch.arange(16), 0)
    whole = starts.mask_B1TT(window)
    assert starts.mask_B1ST(places, window).equal(whole[:, :, places])


def test_chunks_of_a_text_are_no_sliding_window(masks):
    """Llama 4 asks for a mask of as many tokens, which begin anew at each multiple."""
    config = SimpleNamespace(sliding_window=None, attention_chunk_size=3)
    options = {"batch_size": 1, "q_length": 16, "kv_length": 16, "local_size": 3}
    with batch_context.use_batch(MicroBatch(starts=make_document_starts([[16]], CPU))):
        mask = _make_document_mask(
            **options, config=config, mask_function=masking_utils.causal_mask_function
        )
    assert masks
    assert mask is None or mask.shape[2] == 16


def test_a_mask_is_no_mark_of_a_window():
    assert decode_window(encode_window(7, CPU)) == 7
    assert decode_window(encode_window(1, CPU)) == 1
    whole = torch.ones(2, 1, 16, 16, dtype=torch.bool)
    for mask in (whole, whole[:1, :, :1], whole[:1, 0], torch.ones(1, 1, 1, 16)):
        assert decode_window(mask) is None


@pytest.mark.parametrize(("dropout", "values"), [(0.0, (10, 6)), (0.0, (12, 12)), (0.3, (8, 8))])
def test_layers_that_the_kernel_cannot_take_have_a_mask(dropout, values, masks):
    generator = torch.Generator().manual_seed(1)
    shapes = ((4, values[0]), (2, values[0]), (2, values[1]))
    inputs = [torch.randn(3, heads, 16, size, generator=generator) for heads, size in shapes]
    layer = SimpleNamespace(num_key_value_groups=2, is_causal=True)

    def second_documents():
        torch.manual_seed(0)
        with batch_context.use_batch(MicroBatch(starts=make_document_starts(LENGTHS, CPU))):
            out_BTHD = _attend(layer, *inputs, None, dropout=dropout)[0]
        assert out_BTHD.shape == (3, 16, 4, values[1])
        return out_BTHD[0, LENGTHS[0][0] :]

    before = second_documents()
    assert masks
    assert not CALLS
    for tensor in inputs:
        tensor[0, :, : LENGTHS[0][0]] += 1.0
    assert torch.equal(second_documents(), before)


@pytest.mark.parametrize("queries_are_partial", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("values", "groups", "window"), [(64, 1, None), (64, 4, None), (256, 2, None), (64, 2, 70)]
)
def test_the_check_lets_a_right_kernel_pass(
    dtype, values, groups, window, queries_are_partial, caplog
):
    assert varlen_kernel_fault(CPU, dtype, values, groups, window, queries_are_partial) == ""
    assert not caplog.records
    gaps = varlen_attention.compare_kernel_with_mask(
        CPU, dtype, values, groups, window, queries_are_partial
    )
    assert len(gaps) == 4
    # So much is left of the bar.
    assert max(gaps.values()) < 1.5 * torch.finfo(dtype).eps


def test_a_kernel_whose_first_query_is_at_the_first_key_takes_no_parts(monkeypatch):
    """As causal masks are laid by some kernels where queries are fewer than keys."""

    def hide_by_first(queries, keys, before):
        apart = torch.arange(queries).unsqueeze(1) - torch.arange(keys)
        return apart < 0

    monkeypatch.setattr("tests.support.varlen_on_cpu._hidden", hide_by_first)
    assert varlen_kernel_fault(CPU, torch.bfloat16, 64, 2) == ""
    why = varlen_kernel_fault(CPU, torch.bfloat16, 64, 2, queries_are_partial=True)
    assert "the last tokens of documents: torch's variable-length kernel is wrong here" in why


def one_more(starts_N):
    """Starts of which the second is one token later: one token is in the wrong document."""
    moved_N = starts_N.clone()
    moved_N[2] += 1
    return moved_N


WRONG = {
    "neighbors": lambda s, o: (one_more(s), o),
    "scale": lambda s, o: (s, {**o, "scale": None}),
    # The last token of the window is left out.
    "window": lambda s, o: (s, {**o, "window_size": (o["window_size"][0] - 1, 0)}),
}


@BY_NAME
@pytest.mark.parametrize("how", WRONG)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_check_finds_a_wrong_kernel_and_tells_of_it_once(how, dtype, monkeypatch, told):
    from torch.nn.attention import varlen

    kernel = varlen.varlen_attn

    @functools.wraps(kernel)
    def wrong(query, key, value, starts_N, _, *max_length, **options):
        starts_N, options = WRONG[how](starts_N, options)
        max_length = [int(starts_N.diff().max())] * 2
        return kernel(query, key, value, starts_N, starts_N, *max_length, **options)

    monkeypatch.setattr(varlen, "varlen_attn", wrong)
    for _ in range(2):
        why = varlen_kernel_fault(CPU, dtype, 64, 2, 70 if how == "window" else None)
        assert "it differs from masked attention in its result by" in why
    assert len(told) == 1
    assert why in told[0]


@BY_NAME
def test_a_kernel_that_fails_is_told_of(monkeypatch, told):
    from torch.nn.attention import varlen

    def fails(*_, enable_gqa=False, **__):
        raise RuntimeError("USE_FLASH_ATTENTION was not enabled for build.\nmore")

    monkeypatch.setattr(varlen, "varlen_attn", fails)
    assert "fails here (USE_FLASH_ATTENTION was not enabled for build.)" in varlen_kernel_fault(
        CPU, torch.bfloat16, 64, 2
    )
    assert len(told) == 1


@BY_NAME
def test_gradients_that_are_no_numbers_are_wrong(monkeypatch, told):
    from torch.nn.attention import varlen

    kernel = varlen.varlen_attn

    @functools.wraps(kernel)
    def silent(query, *others, **options):
        return kernel(query, *others, **options) + 0 * (query - query.detach()).sqrt()

    monkeypatch.setattr(varlen, "varlen_attn", silent)
    assert "the gradient of queries by nan" in varlen_kernel_fault(CPU, torch.bfloat16, 64, 2)


@pytest.fixture
def told(monkeypatch):
    """The warnings that are logged."""
    texts = []
    monkeypatch.setattr(varlen_attention.log, "warning", lambda text, *of: texts.append(text % of))
    return texts
