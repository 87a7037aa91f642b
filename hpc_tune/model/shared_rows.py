"""Rows that several ranks share: each has a part of the tokens (DeepSpeed-Ulysses).

    a row of T tokens -> share_batch -> S = T / C tokens on each of C ranks, in order
    attention: the own tokens of all heads -> all-to-all -> all tokens of H / C heads
               -> the attention that rows have anyway, within the same documents
               -> all-to-all -> the own tokens of all heads

All else in a model is computed token by token. Only data move (arXiv:2309.14509), so each head's
result is what it is on one rank: masks, windows, caps and sinks are those of the whole row.

Shapes: B rows, T tokens of a row, S of them on this rank, C ranks, H heads, K heads of keys and
values, D values per head, P pairs, N tokens with loss.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from hpc_tune.batch import IGNORED_LABEL, Batch, read_document_lengths

HeadAttention = Callable[..., torch.Tensor]


class SharedRows(Protocol):
    """How the ranks that share rows work together. ``rank`` is this one's number of ``size``.

    ``uses_eager``: attention is the family's own function, with a mask.
    """

    rank: int
    size: int
    uses_eager: bool

    def attend(self, attention: HeadAttention, *inputs_BHSD: torch.Tensor) -> torch.Tensor:
        """Return the attention of the own tokens, BSHD.

        ``attention(part, query_BHTD, key_BKTD, value_BKTD)`` returns that of all tokens for the
        ``part``-th of ``size`` parts of the heads, BTHD.
        """

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks; each gets the gradient of its own summand."""


class RankShare:
    """One rank's share of the rows, with messages to those that have the others."""

    def __init__(
        self,
        rank: int,
        size: int,
        all_to_all: Callable[[torch.Tensor, torch.Tensor], None],
        all_reduce: Callable[[torch.Tensor], None],
    ) -> None:
        """``all_to_all(out, x)`` sends equal parts of ``x``; ``all_reduce(x)`` is in place."""
        self.rank, self.size, self.uses_eager = rank, size, False
        self.all_to_all, self.all_reduce = all_to_all, all_reduce

    def attend(self, attention: HeadAttention, *inputs_BHSD: torch.Tensor) -> torch.Tensor:
        """See ``SharedRows``; one message there and one back."""
        num_rows, num_heads, num_own, _ = inputs_BHSD[0].shape
        aligned = AlignedHeads.of(num_heads, inputs_BHSD[1].shape[1], self.size)
        parts = [self._by_rank(x) for x in aligned.align(inputs_BHSD)]
        widths = [part.shape[2] * part.shape[3] for part in parts]
        sent_CNF = torch.cat([part.flatten(2) for part in parts], -1)
        come_CNF: torch.Tensor = _Exchange.apply(sent_CNF, self)
        shape = self.size, num_rows, num_own, -1
        come_BTF = come_CNF.view(shape).transpose(0, 1).reshape(num_rows, self.size * num_own, -1)
        heads = [
            values.unflatten(-1, part.shape[2:]).transpose(1, 2)
            for values, part in zip(come_BTF.split(widths, -1), parts, strict=True)
        ]
        out_BTHD = attention(self.rank, *heads)
        out_CNF = out_BTHD.reshape(num_rows, self.size, num_own, -1).transpose(0, 1).flatten(1, 2)
        back_CNF: torch.Tensor = _Exchange.apply(out_CNF.contiguous(), self)
        back = back_CNF.view(self.size, num_rows, num_own, *out_BTHD.shape[2:])
        return aligned.without_zeros(back.permute(1, 2, 0, 3, 4).flatten(2, 3), 2)

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """See ``SharedRows``."""
        summed: torch.Tensor = _SumOfShares.apply(x, self)
        return summed

    def _by_rank(self, x_BHSD: torch.Tensor) -> torch.Tensor:
        """Return heads by the rank that gets them, [C, B S, H / C, D]."""
        by_rank = x_BHSD.unflatten(1, (self.size, -1)).permute(1, 0, 3, 2, 4)
        return by_rank.flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """Rows of C parts to their ranks; the gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, x_CNF: torch.Tensor, share: RankShare) -> torch.Tensor:
        ctx.share = share
        out_CNF = torch.empty_like(x_CNF)
        share.all_to_all(out_CNF, x_CNF)
        return out_CNF

    @staticmethod
    def backward(ctx: Any, grad_CNF: torch.Tensor) -> Any:  # type: ignore[override]
        out_CNF = torch.empty_like(grad_CNF, memory_format=torch.contiguous_format)
        ctx.share.all_to_all(out_CNF, grad_CNF.contiguous())
        return out_CNF, None


class _SumOfShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, share: RankShare) -> torch.Tensor:
        summed = x.clone(memory_format=torch.contiguous_format)
        share.all_reduce(summed)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return grad, None


@dataclass(frozen=True)
class AlignedHeads:
    """Heads of which ``size`` ranks get as many each, with the keys of their queries.

    Few heads of keys and values are repeated, side by side, and autograd adds up the copies'
    gradients. Where ``size`` does not divide the heads of queries, heads of zeros, whose results
    are dropped, fill up each group that shares keys; or, where that takes more of them, each
    head has keys of its own and the zeros come last.

    ``heads`` of queries in ``blocks``, of which each gets as many zeros; ``copies`` of each head of
    keys. ``total`` and ``total_keys``: those that are computed.
    """

    heads: int
    blocks: int
    copies: int
    total: int
    total_keys: int

    @classmethod
    def of(cls, heads: int, groups: int, size: int) -> "AlignedHeads":
        """Return it for ``heads`` of queries and ``groups`` of keys."""
        least, keys = heads + -heads % size, math.lcm(groups, size)
        if keys * -(-heads // keys) == least:
            return cls(heads, groups, keys // groups, least, keys)
        return cls(heads, 1, heads // groups, least, least)

    def align(self, inputs_BHSD: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return queries, keys and values with as many heads as ranks share evenly."""
        query_BHSD, *keys_BKSD = inputs_BHSD
        keys = [x if self.copies == 1 else x.repeat_interleave(self.copies, 1) for x in keys_BKSD]
        more = self.total_keys - keys[0].shape[1]
        keys = [F.pad(x, (0, 0, 0, 0, 0, more)) if more else x for x in keys]
        return [self.with_zeros(query_BHSD, 1), *keys]

    def with_zeros(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return what has a value for each head along ``dim``, and zeros for the others."""
        if self.total == self.heads:
            return x
        by_block = x.unflatten(dim, (self.blocks, -1)).transpose(dim + 1, -1)
        more = (self.total - self.heads) // self.blocks
        return F.pad(by_block, (0, more)).transpose(dim + 1, -1).flatten(dim, dim + 1)

    def without_zeros(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return what ``with_zeros`` has filled up as it was."""
        if self.total == self.heads:
            return x
        by_block = x.unflatten(dim, (self.blocks, -1))
        return by_block.narrow(dim + 1, 0, self.heads // self.blocks).flatten(dim, dim + 1)


class HeadsOfModule:
    """An attention module as it is for a part of its heads: what has a value per head is cut."""

    def __init__(self, module: Any, part: int, size: int, aligned: AlignedHeads) -> None:
        self._module, self._part, self._size, self._aligned = module, part, size, aligned
        self.num_key_value_groups = aligned.total // aligned.total_keys

    def __getattr__(self, name: str) -> Any:
        return self.cut(getattr(self._module, name))

    def cut(self, value: Any) -> Any:
        """Return this part of a parameter with a value for each head; anything else as it is."""
        if not isinstance(value, torch.nn.Parameter) or value.shape != (self._aligned.heads,):
            return value
        return self._aligned.with_zeros(value, 0).chunk(self._size)[self._part]


# -- A rank's part of a micro-batch.


def share_batch(batch: Batch, rank: int, size: int) -> Batch:
    """Return the tokens that the ``rank``-th of ``size`` ranks has of each row of ``batch``.

    Rows are padded to a multiple of ``size``. Labels and positions are cut as they are: the label
    of a part's last token is the first token of the next part. ``document_lengths`` and ``padding``
    remain those of the whole rows, and so are pairs, but for ``PreferencePairs.own_counts_P2``.
    """
    more = -batch.tokens_BT.shape[1] % size
    lengths = batch.document_lengths or read_document_lengths(batch.positions_BT)
    padding = [n + more for n in batch.padding or [0] * len(lengths)]
    if more:
        lengths = [
            [*row[: len(row) - (n > more)], n] for row, n in zip(lengths, padding, strict=True)
        ]
    positions_BT = F.pad(batch.positions_BT, (0, more))
    for positions_T, n in zip(positions_BT, padding, strict=True):
        positions_T[len(positions_T) - n :] = torch.arange(n)
    num_own = positions_BT.shape[1] // size
    own = slice(rank * num_own, (rank + 1) * num_own)
    labels_BS = F.pad(batch.labels_BT, (0, more), value=IGNORED_LABEL)[:, own].contiguous()
    loss_tokens = _find_own_labels(batch, own, rank, size)
    real = sum(min(max(positions_BT.shape[1] - n - own.start, 0), num_own) for n in padding)
    return replace(
        batch,
        tokens_BT=F.pad(batch.tokens_BT, (0, more))[:, own].contiguous(),
        labels_BT=labels_BS,
        positions_BT=positions_BT[:, own].contiguous(),
        num_loss_tokens=loss_tokens.num,
        num_tokens=real,
        document_lengths=lengths,
        padding=padding,
        pairs=batch.pairs and replace(batch.pairs, own_counts_P2=loss_tokens.counts_P2),
        mismatched=batch.mismatched and share_batch(batch.mismatched, rank, size),
        weights_N=loss_tokens.weights_N,
    )


def own_tokens(batch: Batch, rank: int, size: int) -> tuple[int, int]:
    """Return how many tokens, padding included, and tokens with loss such a part has."""
    if size == 1:
        return batch.tokens_BT.numel(), batch.num_loss_tokens
    num_rows, num_tokens = batch.tokens_BT.shape
    num_own = -(-num_tokens // size)
    own = slice(rank * num_own, (rank + 1) * num_own)
    return num_rows * num_own, int((batch.labels_BT[:, own] != IGNORED_LABEL).sum())


@dataclass(frozen=True)
class _OwnLabels:
    """How many of a batch's tokens with loss a rank has, also of each answer, and their weights."""

    num: int
    counts_P2: torch.Tensor | None
    weights_N: torch.Tensor | None


def _find_own_labels(batch: Batch, own: slice, rank: int, size: int) -> _OwnLabels:
    pairs, weights_N = batch.pairs, batch.weights_N
    if isinstance(batch.labels_BT, FakeTensor):  # in a trace no label has a value: an even share
        num = len(range(rank, batch.num_loss_tokens, size))
        counts_P2 = None if pairs is None else pairs.counts_P2 // size
        return _OwnLabels(num, counts_P2, None if weights_N is None else weights_N[:num])
    column_N = torch.nonzero(batch.labels_BT != IGNORED_LABEL)[:, 1]
    is_own_N = (column_N >= own.start) & (column_N < own.stop)
    counts_P2 = None
    if pairs is not None:
        counts = pairs.counts_P2.flatten()
        answer_N = torch.repeat_interleave(torch.arange(len(counts)), counts)
        own_counts = torch.bincount(answer_N[is_own_N], minlength=len(counts))
        counts_P2 = own_counts.view_as(pairs.counts_P2)
    own_weights_N = None if weights_N is None else weights_N[is_own_N]
    return _OwnLabels(int(is_own_N.sum()), counts_P2, own_weights_N)


def cut_tokens(x_BT: torch.Tensor, rank: int, size: int, dim: int = 1) -> torch.Tensor:
    """Return a rank's part of what is known of all tokens of rows."""
    return x_BT.chunk(size, dim)[rank]
