"""Rows that several ranks share (context parallelism): each rank has a part of the tokens.

If C divides the number of heads, ranks exchange heads (DeepSpeed-Ulysses, arXiv:2309.14509):

    a row of T tokens -> shard_batch_to_rank -> S = T / C tokens on each of C ranks, in order
    attention: the own tokens of all heads -> all-to-all -> all tokens of H / C heads
               -> the usual attention of whole rows, within the same documents
               -> all-to-all -> the own tokens of all heads

Otherwise, keys are gathered (Llama 3, arXiv:2407.21783, section 3.3.2):

    a row of T tokens -> 2 C slices -> rank r has the r-th from the start and the r-th from the end,
                                       so that all ranks attend to equally many keys
    attention: keys and values of the own tokens -> all-gather -> keys and values of all tokens
               -> the own queries, all heads, within the same documents

Everything else in a model is computed token by token. Only data move, so results are the same as
on one rank: masks, windows, caps and sinks are those of the whole row.

Shapes: B rows, T tokens of a row, S of them on this rank, C ranks, H heads, K heads of keys and
values, D values per head, P pairs, N tokens with loss.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from hpc_tune.batch import IGNORED_LABEL, Batch, read_document_lengths
from hpc_tune.model.varlen_attention import DocumentPart

# Called with a rank's index, queries, keys and values; returns BTHD.
RankAttention = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class RowShard:
    """Which tokens of each row the ``rank``-th of ``size`` ranks has.

    One slice, or two with ``is_head_tail``: one as far from the start as the other is from the end.
    With ``is_head_tail`` attention gathers keys, otherwise it exchanges heads.
    """

    rank: int = 0
    size: int = 1
    is_head_tail: bool = False

    @property
    def num_slices(self) -> int:
        """How many slices a row is cut into; its tokens are padded to a multiple of that."""
        return 2 * self.size if self.is_head_tail else self.size

    def slices(self, num_tokens: int) -> list[slice]:
        """Return the slices of this rank's tokens in a row of ``num_tokens``, ascending."""
        width = num_tokens // self.num_slices
        numbers = [self.rank]
        if self.is_head_tail:
            numbers.append(self.num_slices - 1 - self.rank)
        return [slice(number * width, (number + 1) * width) for number in numbers]

    def shard_to_rank(self, x_BT: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Return this rank's part of a tensor that has all tokens of the rows along ``dim``."""
        parts = [x_BT.narrow(dim, s.start, s.stop - s.start) for s in self.slices(x_BT.shape[dim])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class SharedRows(Protocol):
    """How the ranks that share rows work together.

    ``part``: this rank's part of the rows. ``uses_eager``: attention is the family's own function,
    with a mask. ``kernel_supports_parts``: the GPU kernel accepts parts of documents. ``ranks``:
    the ranks whose attention is computed here.
    """

    part: RowShard
    uses_eager: bool
    kernel_supports_parts: bool
    ranks: Sequence[int]

    def attend(self, attention: RankAttention, *inputs_BHSD: torch.Tensor) -> torch.Tensor:
        """Return the attention of the own tokens, BSHD.

        ``attention(rank, query, key, value)`` returns a rank's attention, BTHD: of all tokens for
        its share of the heads, or, if keys are gathered, of its own queries for all heads.
        """

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks; each gets the gradient of its own summand."""


@dataclass(frozen=True)
class RowCollectives:
    """The collectives of ranks that share rows; ``out`` receives the result.

    ``all_to_all(out, x)`` sends equal parts of ``x``, ``all_reduce(x)`` is in place,
    ``all_gather(out, x)`` and ``reduce_scatter(out, x)`` order parts by rank.
    """

    all_to_all: Callable[[torch.Tensor, torch.Tensor], None]
    all_reduce: Callable[[torch.Tensor], None]
    all_gather: Callable[[torch.Tensor, torch.Tensor], None]
    reduce_scatter: Callable[[torch.Tensor, torch.Tensor], None]


class RankSharedRows:
    """One rank's share of the rows, which communicates with the ranks that hold the rest."""

    def __init__(
        self, row_shard: RowShard, collectives: RowCollectives, kernel_supports_parts: bool = True
    ) -> None:
        self.part, self._collectives = row_shard, collectives
        self.ranks: Sequence[int] = (row_shard.rank,)
        self.uses_eager, self.kernel_supports_parts = False, kernel_supports_parts

    def attend(self, attention: RankAttention, *inputs_BHSD: torch.Tensor) -> torch.Tensor:
        """See ``SharedRows``."""
        if self.part.is_head_tail:
            query_BHSD, *keys_BKSD = inputs_BHSD
            return attention(self.part.rank, query_BHSD, *self._gather_keys_and_values(keys_BKSD))
        return self._exchange_heads(attention, *inputs_BHSD)

    def sum_over_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """See ``SharedRows``."""
        total: torch.Tensor = _SumOverRanks.apply(x, self._collectives)
        return total

    def _exchange_heads(self, attention: RankAttention, *inputs_BHSD: torch.Tensor) -> torch.Tensor:
        num_rows, _, num_own, _ = inputs_BHSD[0].shape
        size, exchange = self.part.size, self._collectives.all_to_all
        parts = [self._group_heads_by_rank(x) for x in repeat_kv_heads(inputs_BHSD, size)]
        widths = [part.shape[2] * part.shape[3] for part in parts]
        sent_CNF = torch.cat([part.flatten(2) for part in parts], -1)
        received_CNF: torch.Tensor = _AllToAll.apply(sent_CNF, exchange)
        received_BTF = received_CNF.view(size, num_rows, num_own, -1).transpose(0, 1).flatten(1, 2)
        heads = [
            values.unflatten(-1, part.shape[2:]).transpose(1, 2)
            for values, part in zip(received_BTF.split(widths, -1), parts, strict=True)
        ]
        out_BTHD = attention(self.part.rank, *heads)
        out_CNF = out_BTHD.reshape(num_rows, size, num_own, -1).transpose(0, 1).flatten(1, 2)
        result_CNF: torch.Tensor = _AllToAll.apply(out_CNF.contiguous(), exchange)
        result = result_CNF.view(size, num_rows, num_own, *out_BTHD.shape[2:])
        return result.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _group_heads_by_rank(self, x_BHSD: torch.Tensor) -> torch.Tensor:
        """Return heads grouped by the rank that receives them, [C, B S, H / C, D]."""
        by_rank = x_BHSD.unflatten(1, (self.part.size, -1)).permute(1, 0, 3, 2, 4)
        return by_rank.flatten(1, 2)

    def _gather_keys_and_values(self, inputs_BKSD: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return keys and values of all tokens in order, BKTD."""
        sent_BSF = torch.cat([x.transpose(1, 2).flatten(2) for x in inputs_BKSD], -1)
        gathered_RSF: torch.Tensor = _AllGather.apply(sent_BSF, self._collectives, self.part.size)
        gathered_BTF = join_head_tail(gathered_RSF.unflatten(0, (self.part.size, -1)))
        widths = [x.shape[1] * x.shape[3] for x in inputs_BKSD]
        return [
            values.unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
            for values, x in zip(gathered_BTF.split(widths, -1), inputs_BKSD, strict=True)
        ]


def join_head_tail(parts_CBSF: torch.Tensor) -> torch.Tensor:
    """Return the tokens of whole rows in order, [B, T, F], from the parts of all ranks."""
    head, tail = parts_CBSF.chunk(2, 2)
    return torch.cat([head, tail.flip(0)]).transpose(0, 1).flatten(1, 2)


class _AllToAll(torch.autograd.Function):
    """Sends each of C parts to its rank; the gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, x_CNF: torch.Tensor, all_to_all: Callable[..., None]) -> torch.Tensor:
        ctx.all_to_all = all_to_all
        out_CNF = torch.empty_like(x_CNF)
        all_to_all(out_CNF, x_CNF)
        return out_CNF

    @staticmethod
    def backward(ctx: Any, grad_CNF: torch.Tensor) -> Any:  # type: ignore[override]
        out_CNF = torch.empty_like(grad_CNF, memory_format=torch.contiguous_format)
        ctx.all_to_all(out_CNF, grad_CNF.contiguous())
        return out_CNF, None


class _AllGather(torch.autograd.Function):
    """Gathers the rows of all ranks, R = C B; gradients are summed on the rank of each row."""

    @staticmethod
    def forward(
        ctx: Any, x_BSF: torch.Tensor, collectives: RowCollectives, num_ranks: int
    ) -> torch.Tensor:
        ctx.collectives, ctx.size = collectives, num_ranks
        out_RSF = x_BSF.new_empty(num_ranks * len(x_BSF), *x_BSF.shape[1:])
        collectives.all_gather(out_RSF, x_BSF)
        return out_RSF

    @staticmethod
    def backward(ctx: Any, grad_RSF: torch.Tensor) -> Any:  # type: ignore[override]
        out_BSF = grad_RSF.new_empty(len(grad_RSF) // ctx.size, *grad_RSF.shape[1:])
        ctx.collectives.reduce_scatter(out_BSF, grad_RSF.contiguous())
        return out_BSF, None, None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, collectives: RowCollectives) -> torch.Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        collectives.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, None


def repeat_kv_heads(inputs_BHSD: Sequence[torch.Tensor], num_ranks: int) -> list[torch.Tensor]:
    """Return queries, keys and values whose heads ``num_ranks`` ranks share evenly.

    ``num_ranks`` divides H. If it does not divide the number of key heads, each key and value head
    is repeated; autograd adds up their gradients.
    """
    query_BHSD, *keys_BKSD = inputs_BHSD
    copies = count_repeated_key_heads(keys_BKSD[0].shape[1], num_ranks) // keys_BKSD[0].shape[1]
    if copies > 1:
        keys_BKSD = [x.repeat_interleave(copies, 1) for x in keys_BKSD]
    return [query_BHSD, *keys_BKSD]


def count_repeated_key_heads(num_key_heads: int, num_ranks: int) -> int:
    """Return how many key heads there are when repeated for ``num_ranks`` ranks."""
    return math.lcm(num_key_heads, num_ranks)


class RankHeadsView:
    """A view of an attention module for a part of its heads: per-head parameters are cut."""

    def __init__(
        self, module: Any, rank: int, num_ranks: int, num_query_heads: int, num_key_heads: int
    ) -> None:
        """``num_query_heads`` and ``num_key_heads`` are those of this rank, of ``num_ranks``."""
        self._module, self._rank, self._size, self._heads = module, rank, num_ranks, num_query_heads
        self.num_key_value_groups = num_query_heads // num_key_heads

    def __getattr__(self, name: str) -> Any:
        return self.shard_to_rank(getattr(self._module, name))

    def shard_to_rank(self, value: Any) -> Any:
        """Return this rank's part of a parameter with one value per head; else ``value``."""
        full_shape = (self._size * self._heads,)
        if not isinstance(value, torch.nn.Parameter) or value.shape != full_shape:
            return value
        return value.chunk(self._size)[self._rank]


# -- A rank's part of a micro-batch.


def shard_batch_to_rank(batch: Batch, row_shard: RowShard) -> Batch:
    """Return a batch with a rank's tokens of each row of ``batch``.

    Rows are padded to a multiple of the number of slices. Labels and positions are cut as they are:
    the label of a slice's last token is the first token of the next slice. ``document_lengths``,
    ``padding`` and pairs still describe whole rows, except
    ``PreferencePairs.num_local_loss_tokens_P2``.
    """
    num_added = -batch.tokens_BT.shape[1] % row_shard.num_slices
    lengths = batch.document_lengths or read_document_lengths(batch.positions_BT)
    padding = [n + num_added for n in batch.padding or [0] * len(lengths)]
    if num_added:
        lengths = [
            [*row[: len(row) - (n > num_added)], n] for row, n in zip(lengths, padding, strict=True)
        ]
    positions_BT = F.pad(batch.positions_BT, (0, num_added))
    num_tokens = positions_BT.shape[1]
    for positions_T, n in zip(positions_BT, padding, strict=True):
        positions_T[num_tokens - n :] = torch.arange(n)
    slices = row_shard.slices(num_tokens)
    loss_tokens = _find_own_loss_tokens(batch, slices, row_shard)
    return replace(
        batch,
        tokens_BT=row_shard.shard_to_rank(F.pad(batch.tokens_BT, (0, num_added))).contiguous(),
        labels_BT=row_shard.shard_to_rank(
            F.pad(batch.labels_BT, (0, num_added), value=IGNORED_LABEL)
        ).contiguous(),
        positions_BT=row_shard.shard_to_rank(positions_BT).contiguous(),
        num_loss_tokens=loss_tokens.count,
        num_tokens=sum(len(range(num_tokens - n)[s]) for n in padding for s in slices),
        document_lengths=lengths,
        padding=padding,
        pairs=batch.pairs
        and replace(batch.pairs, num_local_loss_tokens_P2=loss_tokens.num_loss_tokens_P2),
        mismatched_batch=batch.mismatched_batch
        and shard_batch_to_rank(batch.mismatched_batch, row_shard),
        weights_N=loss_tokens.weights_N,
    )


def count_own_tokens(batch: Batch, row_shard: RowShard) -> tuple[int, int]:
    """Return how many tokens, padding included, and how many tokens with loss a part has."""
    if row_shard.size == 1:
        return batch.tokens_BT.numel(), batch.num_loss_tokens
    num_rows, num_tokens = batch.tokens_BT.shape
    slices = row_shard.slices(num_tokens + -num_tokens % row_shard.num_slices)
    num_loss_tokens = sum(int((batch.labels_BT[:, s] != IGNORED_LABEL).sum()) for s in slices)
    return num_rows * sum(s.stop - s.start for s in slices), num_loss_tokens


@dataclass(frozen=True)
class _OwnLossTokens:
    """How many of a batch's tokens with loss a rank has, also per answer, and their weights."""

    count: int
    num_loss_tokens_P2: torch.Tensor | None
    weights_N: torch.Tensor | None


def _find_own_loss_tokens(
    batch: Batch, slices: Sequence[slice], row_shard: RowShard
) -> _OwnLossTokens:
    pairs, weights_N = batch.pairs, batch.weights_N
    if isinstance(batch.labels_BT, FakeTensor):  # a trace has no values: assume an even share
        count = len(range(row_shard.rank, batch.num_loss_tokens, row_shard.size))
        num_loss_tokens_P2 = None if pairs is None else pairs.num_loss_tokens_P2 // row_shard.size
        return _OwnLossTokens(
            count, num_loss_tokens_P2, None if weights_N is None else weights_N[:count]
        )
    column_N = torch.nonzero(batch.labels_BT != IGNORED_LABEL)[:, 1]
    is_own_N = torch.zeros_like(column_N, dtype=torch.bool)
    for own_slice in slices:
        is_own_N |= (column_N >= own_slice.start) & (column_N < own_slice.stop)
    num_loss_tokens_P2 = None
    if pairs is not None:
        counts = pairs.num_loss_tokens_P2.flatten()
        answer_N = torch.repeat_interleave(torch.arange(len(counts)), counts)
        own_counts = torch.bincount(answer_N[is_own_N], minlength=len(counts))
        num_loss_tokens_P2 = own_counts.view_as(pairs.num_loss_tokens_P2)
    own_weights_N = None if weights_N is None else weights_N[is_own_N]
    return _OwnLossTokens(int(is_own_N.sum()), num_loss_tokens_P2, own_weights_N)


def shard_documents(lengths: Sequence[Sequence[int]], row_shard: RowShard) -> list[DocumentPart]:
    """Return the parts of documents that a rank has, in the order of its tokens.

    ``lengths``: the lengths of each row's documents; the number of slices must divide their sum.
    """
    parts = []
    for row, row_lengths in enumerate(lengths):
        ends = list(accumulate(row_lengths))
        for own_slice in row_shard.slices(ends[-1]):
            parts += [
                (row, start, max(start, own_slice.start), min(stop, own_slice.stop))
                for start, stop in pairwise([0, *ends])
                if start < own_slice.stop and stop > own_slice.start
            ]
    return parts
