"""Rows that ranks share: which tokens each has of them, and what attention makes of the parts."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig

from hpc_tune.autotune.candidates import row_sharing_layouts
from hpc_tune.batch import IGNORED_LABEL, PreferencePairs, costliest_batch, padding_batch
from hpc_tune.data.packed_rows import make_batch
from hpc_tune.model.objective import AnswerLogProbabilities, PreferenceObjective, TokenSum
from hpc_tune.model.shared_rows import (
    RankHeadsView,
    RowShard,
    count_own_tokens,
    count_repeated_key_heads,
    shard_batch_to_rank,
    shard_documents,
)
from hpc_tune.plan.resolve import kv_gathering_warnings
from hpc_tune.step.layout import Layout, row_sharing_problems
from hpc_tune.step.slices import splits_heads
from hpc_tune.train.startup.architecture_check import StackedSharedRows, check_architecture
from tests.support.older_transformers import skip_without


def batch_of_documents(rows):
    """Return rows of documents of so many tokens, most of which carry loss."""
    rng, laid = np.random.default_rng(0), []
    for row in rows:
        tokens = [rng.integers(1, 99, length) for length in row]
        masks = [np.arange(length) >= 1 for length in row]
        laid.append(list(zip(tokens, masks, strict=True)))
    return make_batch(laid, 64, 0)


def all_parts(batch, size, is_head_tail=False):
    return [shard_batch_to_rank(batch, RowShard(rank, size, is_head_tail)) for rank in range(size)]


def in_order(parts, is_head_tail):
    """Return the tokens of whole rows from those that ranks have."""
    if not is_head_tail:
        return torch.cat(parts, 1)
    halves = [part.chunk(2, 1) for part in parts]
    return torch.cat([head for head, _ in halves] + [tail for _, tail in halves[::-1]], 1)


@pytest.mark.parametrize("is_head_tail", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_parts_of_a_batch_are_its_tokens(size, is_head_tail):
    batch = batch_of_documents([[5, 9, 3], [20], [4, 4]])
    parts = all_parts(batch, size, is_head_tail)
    width = batch.tokens_BT.shape[1]
    for name in ("tokens_BT", "labels_BT", "positions_BT"):
        joined = in_order([getattr(part, name) for part in parts], is_head_tail)
        assert joined.shape[1] % (2 * size if is_head_tail else size) == 0
        if name != "positions_BT":
            assert joined[:, :width].equal(getattr(batch, name))
            continue
        for found, wanted, n in zip(joined, batch.positions_BT, parts[0].padding, strict=True):
            num_real = len(found) - n
            assert found.tolist() == [*wanted[:num_real].tolist(), *range(n)]
    assert sum(part.num_loss_tokens for part in parts) == batch.num_loss_tokens
    assert sum(part.num_tokens for part in parts) == batch.num_tokens
    for rank, part in enumerate(parts):
        assert count_own_tokens(batch, RowShard(rank, size, is_head_tail)) == (
            part.tokens_BT.numel(),
            part.num_loss_tokens,
        )
        assert {sum(lengths) for lengths in part.document_lengths} == {joined.shape[1]}
        assert part.document_lengths == parts[0].document_lengths


def test_positions_go_on_in_a_documents_next_part_and_padding_is_one_document():
    batch = batch_of_documents([[13]])
    parts = all_parts(batch, 3)
    positions = torch.cat([part.positions_BT for part in parts], 1)[0].tolist()
    assert positions == [*range(13), *range(len(positions) - 13)]
    assert parts[0].document_lengths == [[13, len(positions) - 13]]
    assert parts[0].padding == [len(positions) - 13]


def test_a_row_without_padding_gets_it_where_ranks_do_not_divide_its_tokens():
    part = shard_batch_to_rank(costliest_batch(2, 16), RowShard(2, 3))
    assert part.document_lengths == [[16, 2]] * 2
    assert part.positions_BT.tolist() == [[12, 13, 14, 15, 0, 1]] * 2
    assert part.labels_BT[0, -2:].tolist() == [IGNORED_LABEL] * 2


@pytest.mark.parametrize("is_head_tail", [False, True])
@pytest.mark.parametrize("form", ["answers", "pairs", "labels"])
def test_an_empty_batch_is_one_token_of_each_slice(form, is_head_tail):
    parts = all_parts(padding_batch(0, form), 4, is_head_tail)
    assert [part.tokens_BT.shape for part in parts] == [(1, 1 + is_head_tail)] * 4
    assert not any(part.num_loss_tokens for part in parts)


@pytest.mark.parametrize("is_head_tail", [False, True])
def test_weights_of_tokens_go_with_them(is_head_tail):
    batch = batch_of_documents([[7, 6], [9]])
    batch = replace(batch, weights_N=torch.arange(batch.num_loss_tokens).float())
    parts = all_parts(batch, 2, is_head_tail)
    losses_BT = torch.zeros_like(batch.labels_BT, dtype=torch.float32)
    losses_BT[batch.labels_BT != IGNORED_LABEL] = batch.weights_N
    for rank, part in enumerate(parts):
        own = RowShard(rank, 2, is_head_tail)
        own_BS = own.shard_to_rank(F.pad(losses_BT, (0, -losses_BT.shape[1] % own.num_slices)))
        assert part.weights_N.equal(own_BS[part.labels_BT != IGNORED_LABEL])


@pytest.mark.parametrize("is_head_tail", [False, True])
@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo", "kto"])
def test_an_answer_on_several_ranks_has_the_loss_and_gradient_that_it_has_on_one(
    name, is_head_tail
):
    rng = random.Random(0)
    batch = batch_of_documents([[6, 9, 5, 8], [10, 7]])
    counts = torch.tensor([[5, 8], [4, 7], [9, 6]])  # of documents one token longer
    pairs = PreferencePairs(counts, -torch.rand(3, 2), torch.tensor([True, False, True]))
    if name == "kto":
        counts = torch.tensor([[n, 0] for n in (5, 8, 4, 7, 9, 6)])
        labels = torch.tensor([rng.random() < 0.5 for _ in range(6)])
        pairs = PreferencePairs(counts, -torch.rand(6, 2), labels, kl=0.1)
    batch, objective = replace(batch, pairs=pairs), PreferenceObjective(name, beta=0.3, gamma=0.2)
    torch.manual_seed(1)
    losses_N = torch.rand(batch.num_loss_tokens, requires_grad=True)
    whole = objective.sums(losses_N, batch)
    whole[0].backward()
    wanted, losses_N.grad = losses_N.grad, None
    log_probs = AnswerLogProbabilities().sums(losses_N.detach(), batch).view(-1, 2)
    rows_N = (batch.labels_BT != IGNORED_LABEL).nonzero()
    for rank in range(3):
        own = RowShard(rank, 3, is_head_tail)
        part = shard_batch_to_rank(batch, own)
        columns = own.slices(3 * part.tokens_BT.shape[1])
        is_own = sum((rows_N[:, 1] >= s.start) & (rows_N[:, 1] < s.stop) for s in columns) > 0
        own_N = losses_N[is_own]

        def sum_over_ranks(own_P2):
            """Return the sum over ranks, with the gradient of this one's summand."""
            return own_P2 + (log_probs - own_P2).detach()

        sums = objective.sums(own_N, part, sum_over_ranks)
        assert torch.allclose(sums, whole, rtol=1e-5, atol=1e-6)
        sums[0].backward()
    assert torch.allclose(losses_N.grad, wanted, rtol=1e-5, atol=1e-7)
    assert TokenSum().sums(losses_N, batch).shape == (1,)


def test_heads_of_keys_become_as_many_as_ranks_share_evenly():
    cases = {(8, 2): 8, (2, 4): 4, (6, 4): 12, (1, 8): 8, (10, 8): 40}
    assert {case: count_repeated_key_heads(*case) for case in cases} == cases


def attend_causally(query, key, value, mask=None):
    out = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, enable_gqa=True
    )
    return out.transpose(1, 2)


def stacked(tensors, size, is_head_tail):
    """Return what ranks have of rows' heads as rows."""
    parts = [RowShard(rank, size, is_head_tail) for rank in range(size)]
    return [torch.cat([part.shard_to_rank(x, 2) for part in parts]) for x in tensors]


@pytest.mark.parametrize(
    ("heads", "groups", "size"), [(8, 8, 2), (8, 2, 4), (12, 6, 4), (6, 1, 3), (8, 2, 8)]
)
def test_each_head_of_a_part_has_the_keys_that_it_has_in_the_whole(heads, groups, size):
    torch.manual_seed(0)
    whole = [torch.randn(1, n, 24, 4) for n in (heads, groups, groups)]
    parts = StackedSharedRows(size).attend(
        lambda rank, *heads: attend_causally(*heads), *stacked(whole, size, False)
    )
    assert torch.allclose(parts.flatten(0, 1), attend_causally(*whole)[0], atol=1e-6)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_own_queries_have_the_keys_of_whole_rows(size):
    torch.manual_seed(0)
    whole = [torch.randn(1, n, 24, 4) for n in (3, 1, 1)]
    mask = torch.ones(24, 24, dtype=torch.bool).tril()

    def attend(rank, *inputs):
        return attend_causally(*inputs, RowShard(rank, size, True).shard_to_rank(mask, 0))

    found = StackedSharedRows(size, True).attend(attend, *stacked(whole, size, True))
    out = attend_causally(*whole).transpose(1, 2)
    assert torch.allclose(found.transpose(1, 2), stacked([out], size, True)[0], atol=1e-6)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_all_ranks_attend_to_as_many_keys(size):
    whole = [[48 * size]]
    seen = [
        sum((stop - first) * (first + stop - 2 * start) // 2 for _, start, first, stop in parts)
        for parts in (shard_documents(whole, RowShard(rank, size, True)) for rank in range(size))
    ]
    assert len(set(seen)) == 1


def test_parts_of_documents_are_those_of_the_own_tokens():
    lengths = [[5, 9, 2], [16]]
    found = [shard_documents(lengths, RowShard(rank, 2, True)) for rank in range(2)]
    assert found[0] == [(0, 0, 0, 4), (0, 5, 12, 14), (0, 14, 14, 16), (1, 0, 0, 4), (1, 0, 12, 16)]
    assert found[1] == [(0, 0, 4, 5), (0, 5, 5, 8), (0, 5, 8, 12), (1, 0, 4, 8), (1, 0, 8, 12)]


def test_what_has_a_value_for_each_head_is_cut_and_nothing_else():
    module = torch.nn.Module()
    module.sinks, module.scaling = torch.nn.Parameter(torch.arange(8.0)), 0.5
    own = RankHeadsView(module, 1, 4, 2, 1)
    assert own.sinks.tolist() == [2, 3]
    assert own.shard_to_rank(torch.arange(8)).tolist() == [*range(8)]  # of eight tokens, as may be
    assert own.scaling == 0.5
    assert own.num_key_value_groups == 2


SHARED = {
    "llama": {},
    "qwen2": {},  # biases
    "gemma2": {},  # caps and windows
    "gemma3_text": {},
    "gpt_oss": {},  # sinks and windows
    "mistral": {"sliding_window": 16},
    "phi3": {},
    "deepseek_v3": {},  # latent attention
    "qwen3_moe": {},
    "cohere2": {},
    "gpt2": {},
}
LFM2 = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in ("gemma2", "gpt_oss") else pytest.param(kind, marks=pytest.mark.full)
        for kind in SHARED
    ],
)
def test_families_whose_tokens_meet_in_attention_alone_can_share_rows(kind):
    skip_without(kind)
    found = check_architecture(AutoConfig.for_model(kind, **SHARED[kind]))
    assert (found.loss, found.packing, found.context) == ("", "", "")


def test_a_model_with_an_odd_number_of_heads_can_share_rows():
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    config = AutoConfig.for_model("llama", hidden_size=576, **heads)
    assert check_architecture(config).context == ""


@pytest.mark.parametrize(
    ("kind", "said", "why"),
    [
        ("bloom", {}, "its own masks"),
        ("opt", {}, "its own masks"),
        ("llama4_text", {}, "neither plainly causal nor a sliding window"),
        ("mamba", {}, "mixed outside of attention"),
        ("lfm2", LFM2, "mixed outside of attention"),
        ("qwen3_next", {}, "mixed outside of attention"),
    ],
)
def test_families_whose_tokens_meet_elsewhere_are_refused(kind, said, why):
    skip_without(kind)
    assert why in check_architecture(AutoConfig.for_model(kind, **said)).context


def test_what_does_not_divide_is_refused_with_what_does():
    config = AutoConfig.for_model(
        "llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=2
    )
    assert row_sharing_problems(config, Layout(2, 2, context=2)) == []
    assert kv_gathering_warnings(config, Layout(2, 2, context=2)) == []
    [warning] = kv_gathering_warnings(config, Layout(2, 2, context=4))
    assert warning == (
        "parallel.context=4 does not divide the 6 attention heads of a rank: in each layer every "
        "rank gathers the keys and values of whole rows; 2 would exchange heads"
    )
    fused = AutoConfig.for_model("phi3", num_attention_heads=6, num_key_value_heads=2)
    assert (splits_heads(config), splits_heads(fused)) == (True, False)
    assert kv_gathering_warnings(config, Layout(2, 2, tensor=2, context=2))  # 3 of a rank
    assert not kv_gathering_warnings(fused, Layout(2, 2, tensor=2, context=2))  # 6 of each
    [why] = row_sharing_problems(config, Layout(1, 4, context=3))
    assert "which it must divide; use 1 or 2 or 4" in why
    [why] = row_sharing_problems(AutoConfig.for_model("lfm2", **LFM2), Layout(2, 1, context=2))
    assert "layers of conv in a lfm2 model" in why


def test_of_a_model_whose_layers_differ_in_heads_whole_rows_alone_are_laid_out():
    class Mixed:
        model_type, layer_types = "mixed", None

        @property
        def num_attention_heads(self):
            raise RuntimeError("a per-layer attribute")  # as transformers says it

    assert kv_gathering_warnings(Mixed(), Layout(2, 2)) == []
    [why] = row_sharing_problems(Mixed(), Layout(2, 2, context=2))
    assert "a mixed model differ in their numbers of heads" in why
    assert row_sharing_layouts([Layout(2, 2)], Mixed(), 1, 8) == ([], [])


def test_neighbors_share_rows_and_the_first_of_them_counts():
    layout = Layout(2, 4, tensor=2, pipeline=2, context=4)
    assert layout.size == 32
    assert layout.data_parallel_size == 2
    assert layout.group_of(5, "context") == (1, 3, 5, 7)
    assert layout.group_of(30, "context") == (24, 26, 28, 30)
    places = [layout.coordinates(rank) for rank in range(32)]
    assert sum(place.counts_rows for place in places) == layout.data_parallel_size
    for ranks in layout.groups("context"):
        assert [places[rank].context for rank in ranks] == [0, 1, 2, 3]
        assert len({(places[r].data, places[r].tensor, places[r].pipeline) for r in ranks}) == 1
    assert str(layout) == "replicate 2 x shard 4 x tensor 2 x pipeline 2, context 4"
    assert Layout(1, 2, context=2).saved_axes == {
        **{"replicate": 1, "shard": 2, "tensor": 1, "pipeline": 1},
        "context": 2,
    }
