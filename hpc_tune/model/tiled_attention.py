"""Causal attention of documents on a CPU: tiled matrix multiplications with a softmax in between.

    documents -> padded to whole tiles, grouped by length
    tile of queries x all keys up to it -> scores -> softmax -> x values

torch's fused kernel for CPUs multiplies blocks that are too small for the matrix units: in bf16
it takes 2 to 3 times as long (benchmarks/NOTES.md). The backward pass recomputes the
probabilities, as in FlashAttention (arXiv:2205.14135); no T x T scores are kept.

In 16 bits a score is rounded when it is written, which is too coarse for large scores. So each
row's largest score is subtracted before that, within the matmul: the scores that matter to the
softmax are then near zero, and as exact as scores in fp32.

All tiles use the same buffers. New buffers for each tile would be mapped and faulted in again
wherever freed memory returns to the kernel, which takes as long as the matmuls.

Shapes: B rows of T tokens; H heads in K groups of G, which share keys and values; D values per
head, possibly another number for V; M documents of L tokens, padded.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

TILE_TOKENS, LONG_TILE_TOKENS = 64, 128  # queries at once
MAX_SHORT_DOCUMENT_TOKENS = 1024  # above this length, the longer tile is faster
MAX_SCORES = 1 << 21  # per matmul: more would not stay in cache
Span = tuple[int, int, int, int]  # first row, end row, start, stop
_LIBRARY = torch.library.Library("hpc_tune", "FRAGMENT")
_LIBRARY.define(
    "document_attention(Tensor query, Tensor key, Tensor value, int[] spans, float scale,"
    " int[] earlier) -> (Tensor, Tensor)"
)


def tiled_attention(
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    spans: Sequence[Span],
    scale: float | None,
    num_earlier_keys: Sequence[int] = (),
) -> torch.Tensor:
    """Return the attention of each document as BTHD rows.

    ``spans`` are the documents: a range of rows, and a range of tokens in each of them; together
    they cover all tokens. ``scale`` is 1 / sqrt(D) if None. Selective recompute recognizes the
    result by the operator's name and keeps it.

    ``num_earlier_keys``: if queries are only the last part of each document, how many keys precede
    it. The queries are then one row and the keys another, with the documents' keys one after the
    other.
    """
    flat_spans = [number for span in spans for number in span]
    scale = query_BHTD.shape[-1] ** -0.5 if scale is None else scale
    out_BTHD: torch.Tensor = _TiledAttention.apply(
        *(query_BHTD, key_BKTD, value_BKTD, flat_spans, scale, list(num_earlier_keys))
    )
    return out_BTHD


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_BHTD: torch.Tensor,
        key_BKTD: torch.Tensor,
        value_BKTD: torch.Tensor,
        *options: Any,
    ) -> torch.Tensor:
        inputs = query_BHTD, key_BKTD, value_BKTD
        out_BTHD, shifts = torch.ops.hpc_tune.document_attention(*inputs, *options)
        ctx.save_for_backward(*inputs, shifts)
        ctx.options = options
        return out_BTHD  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_BTHD: torch.Tensor) -> Any:  # type: ignore[override]
        *inputs, shifts = ctx.saved_tensors
        return *_tiled_backward(inputs, grad_BTHD, shifts, *ctx.options), None, None, None


@dataclass(frozen=True)
class _DocumentGroup:
    """M documents of L tokens; without ``token_indices``, each row is one document.

    ``token_indices``: where they are in the flattened rows. ``is_padding`` marks the positions in
    the group (M L) that are padding: copies of a document's last token, which its tokens do not
    see. Each document has ``num_earlier_keys`` keys before its queries; ``key_indices``: where all
    of its keys are.
    """

    num_documents: int
    length: int
    token_indices: torch.Tensor | None = None
    is_padding: torch.Tensor | None = None
    num_earlier_keys: int = 0
    key_indices: torch.Tensor | None = None

    @property
    def num_keys(self) -> int:
        """How many keys a document has, padding included."""
        return self.num_earlier_keys + self.length

    def as_documents(self, tensor_BHTD: torch.Tensor, num_groups: int) -> torch.Tensor:
        """Rearrange a tensor with a value per query into documents: (M K, L G, D)."""
        return self._to_documents(tensor_BHTD, self.token_indices, self.length, num_groups)

    def as_keys(self, tensor_BKTD: torch.Tensor, num_groups: int) -> torch.Tensor:
        """Rearrange keys or values into documents: (M K, num_earlier_keys + L, D)."""
        return self._to_documents(tensor_BKTD, self.key_indices, self.num_keys, num_groups)

    def _to_documents(
        self, x_BHTD: torch.Tensor, indices: torch.Tensor | None, length: int, num_groups: int
    ) -> torch.Tensor:
        x = x_BHTD.transpose(1, 2)
        x = x if indices is None else x.flatten(0, 1)[indices]
        shape = self.num_documents, length, num_groups, -1, x_BHTD.shape[-1]
        return x.reshape(shape).transpose(1, 2).flatten(0, 1).flatten(1, 2)

    def as_tokens(self, tensor: torch.Tensor, num_groups: int) -> torch.Tensor:
        """Rearrange the layout of ``as_documents`` into (M L, H, D)."""
        return self._from_documents(tensor, self.length, num_groups)

    def as_key_tokens(self, tensor: torch.Tensor, num_groups: int) -> torch.Tensor:
        """Rearrange the layout of ``as_keys`` into (M (num_earlier_keys + L), K, D)."""
        return self._from_documents(tensor, self.num_keys, num_groups)

    def _from_documents(self, tensor: torch.Tensor, length: int, num_groups: int) -> torch.Tensor:
        shape = self.num_documents, num_groups, length, -1, tensor.shape[-1]
        return tensor.reshape(shape).transpose(1, 2).flatten(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class _Tiling:
    """The groups, and where each token of the rows is in the concatenated groups.

    That is ``token_indices``; ``key_indices``: the same for keys. None: each row is one document,
    in order.
    """

    groups: Sequence[_DocumentGroup]
    token_indices: torch.Tensor | None
    key_indices: torch.Tensor | None
    tile: int

    def write_rows(
        self, parts: Sequence[torch.Tensor], num_groups: int, out_BTHD: torch.Tensor
    ) -> None:
        """Write each group's result to BTHD rows."""
        tokens = [g.as_tokens(part, num_groups) for g, part in zip(self.groups, parts, strict=True)]
        _write_tokens(tokens, self.token_indices, out_BTHD)

    def write_keys(
        self, parts: Sequence[torch.Tensor], num_groups: int, out_BTKD: torch.Tensor
    ) -> None:
        """Write each group's result for its keys to BTKD rows."""
        groups = zip(self.groups, parts, strict=True)
        tokens = [group.as_key_tokens(part, num_groups) for group, part in groups]
        _write_tokens(tokens, self.key_indices, out_BTKD)


def _write_tokens(
    tokens: list[torch.Tensor], indices: torch.Tensor | None, out_BTHD: torch.Tensor
) -> None:
    all_tokens = tokens[0] if len(tokens) == 1 else torch.cat(tokens)
    out_SHD = out_BTHD.flatten(0, 1)
    if indices is None:
        out_SHD.copy_(all_tokens)
    else:
        torch.index_select(all_tokens, 0, indices, out=out_SHD)


@lru_cache(maxsize=8)
def _make_tiling(
    flat_spans: tuple[int, ...],
    num_earlier_keys: tuple[int, ...],
    num_rows: int,
    num_tokens: int,
    num_heads: int,
) -> _Tiling:
    spans = zip(*(flat_spans[n::4] for n in range(4)), strict=True)
    documents = [(row, a, b) for first, last, a, b in spans for row in range(first, last)]
    earlier_counts = num_earlier_keys or (0,) * len(documents)
    longest = max(e + b - a for e, (_, a, b) in zip(earlier_counts, documents, strict=True))
    tile = TILE_TOKENS if longest <= MAX_SHORT_DOCUMENT_TOKENS else LONG_TILE_TOKENS
    is_whole = num_tokens % TILE_TOKENS == 0 and all(b - a == num_tokens for _, a, b in documents)
    if is_whole and not any(earlier_counts):
        return _Tiling([_DocumentGroup(num_rows, num_tokens)], None, None, tile)
    by_length, keys_start = defaultdict(list), 0
    for (row, start, stop), e in zip(documents, earlier_counts, strict=True):
        padded_length = -(-(stop - start) // TILE_TOKENS) * TILE_TOKENS
        token = row * num_tokens + start
        by_length[padded_length, e].append((token, stop - start, keys_start))
        keys_start += e + stop - start
    groups, key_padding = [], []
    for (length, e), members in sorted(by_length.items()):
        group_size = max(1, MAX_SCORES // (num_heads * tile * (e + length)))
        for part in (members[n : n + group_size] for n in range(0, len(members), group_size)):
            starts, lengths, key_starts = torch.tensor(part).unsqueeze(2).unbind(1)
            tokens, is_padding = _make_padded_indices(starts, lengths, length)
            keys, is_key_padding = tokens, is_padding
            if num_earlier_keys:
                keys, is_key_padding = _make_padded_indices(key_starts, e + lengths, e + length)
            groups.append(_DocumentGroup(len(part), length, tokens, is_padding, e, keys))
            key_padding.append(is_key_padding)
    indices = _find_token_positions(
        [(g.token_indices, g.is_padding) for g in groups], num_rows * num_tokens
    )
    if not num_earlier_keys:
        return _Tiling(groups, indices, indices, tile)
    key_groups = zip((g.key_indices for g in groups), key_padding, strict=True)
    return _Tiling(groups, indices, _find_token_positions(list(key_groups), keys_start), tile)


def _make_padded_indices(
    starts: torch.Tensor, lengths: torch.Tensor, padded_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``padded_length`` places for each document, and which of them are padding."""
    offsets = torch.arange(padded_length)
    indices = starts + torch.minimum(offsets, lengths - 1)
    return indices.flatten(), (offsets >= lengths).flatten()


def _find_token_positions(groups: Sequence[tuple[Any, Any]], num_tokens: int) -> torch.Tensor:
    """Return the place of each token in the concatenated groups, skipping padding."""
    tokens, is_padding = (torch.cat(parts) for parts in zip(*groups, strict=True))
    indices = torch.empty(num_tokens, dtype=torch.int64)
    indices[tokens[~is_padding]] = torch.nonzero(~is_padding).flatten()
    return indices


@torch.library.impl(_LIBRARY, "document_attention", "CPU")
def _tiled_forward(
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    spans: Sequence[int],
    scale: float,
    num_earlier_keys: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention as BTHD rows, and the value subtracted from each query's scores (BTH1).

    In 32 bits nothing is subtracted, and the last dimension is 0.

    Results are allocated first, so that memory freed later leaves no holes in the heap.
    """
    num_rows, num_heads, num_tokens, _ = query_BHTD.shape
    num_groups = key_BKTD.shape[1]
    tiling = _make_tiling(tuple(spans), tuple(num_earlier_keys), num_rows, num_tokens, num_heads)
    out_BTHD = query_BHTD.new_empty(num_rows, num_tokens, num_heads, value_BKTD.shape[3])
    has_shifts = int(query_BHTD.dtype.itemsize == 2)
    shifts_BTH1 = query_BHTD.new_empty(*out_BTHD.shape[:3], has_shifts)
    outs, shifts = [], []
    buffers = _make_buffers(query_BHTD, tiling, (1, 1 + has_shifts))
    for group in tiling.groups:
        query = group.as_documents(query_BHTD, num_groups)
        key, value = (group.as_keys(t, num_groups) for t in (key_BKTD, value_BKTD))
        out = query.new_empty(*query.shape[:2], value.shape[2])
        shift = query.new_empty(*query.shape[:2], has_shifts)
        for start, stop, part in _cut_tiles(group, tiling.tile, num_heads // num_groups):
            tile, keys = query[:, part], key[:, :stop]
            if has_shifts:
                _write_largest_scores(tile, keys, start, scale, shift[:, part], buffers)
            probabilities = _probabilities(tile, keys, start, scale, shift[:, part], buffers)
            torch.bmm(probabilities, value[:, :stop], out=out[:, part])
        outs.append(out)
        shifts.append(shift)
    tiling.write_rows(outs, num_groups, out_BTHD)
    if has_shifts:
        tiling.write_rows(shifts, num_groups, shifts_BTH1)
    return out_BTHD, shifts_BTH1


def _tiled_backward(
    inputs: Sequence[torch.Tensor],
    out_grad_BTHD: torch.Tensor,
    shifts_BTH1: torch.Tensor,
    spans: Sequence[int],
    scale: float,
    num_earlier_keys: Sequence[int],
) -> list[torch.Tensor]:
    """Return the gradients of queries, keys and values."""
    num_rows, num_heads, num_tokens, _ = inputs[0].shape
    num_groups = inputs[1].shape[1]
    tiling = _make_tiling(tuple(spans), tuple(num_earlier_keys), num_rows, num_tokens, num_heads)
    grads_BTHD = [t.new_empty(t.transpose(1, 2).shape) for t in inputs]
    grads: list[list[torch.Tensor]] = [[], [], []]
    buffers = _make_buffers(inputs[0], tiling, (1, 1, 1))
    longest = max(group.num_documents * group.num_keys for group in tiling.groups)
    product = buffers[0].new_empty(longest * num_groups * max(t.shape[3] for t in inputs[1:]))
    for group in tiling.groups:
        query = group.as_documents(inputs[0], num_groups)
        key, value = (group.as_keys(tensor, num_groups) for tensor in inputs[1:])
        grad = group.as_documents(out_grad_BTHD.transpose(1, 2), num_groups)
        shift = query.new_empty(*query.shape[:2], 0)
        if shifts_BTH1.numel():
            shift = group.as_documents(shifts_BTH1.transpose(1, 2), num_groups)
        if group.is_padding is not None:  # copies of a token, which must get no gradient
            is_padding = group.is_padding.view(group.num_documents, 1, group.length, 1)
            grad.view(group.num_documents, num_groups, group.length, -1).masked_fill_(
                is_padding, 0.0
            )
        grad_query = torch.empty_like(query)
        # Sums over the tiles, rounded only once.
        grad_key = torch.zeros_like(key, dtype=torch.promote_types(key.dtype, torch.float32))
        grad_value = torch.zeros_like(value, dtype=grad_key.dtype)
        for start, stop, part in _cut_tiles(group, tiling.tile, num_heads // num_groups):
            tile, keys, out_grad = query[:, part], key[:, :stop], grad[:, part]
            probabilities = _probabilities(tile, keys, start, scale, shift[:, part], buffers)
            score_grad, probability_grad = (_view(buffers[n], *probabilities.shape) for n in (0, 2))
            grad_value[:, :stop] += _bmm(probabilities.transpose(1, 2), out_grad, product)
            torch.bmm(out_grad, value[:, :stop].transpose(1, 2), out=probability_grad)
            torch.ops.aten._softmax_backward_data.out(
                probability_grad, probabilities, -1, probability_grad.dtype, grad_input=score_grad
            )
            _matmul(score_grad, keys, grad_query[:, part], scale)
            grad_key[:, :stop] += _bmm(score_grad.transpose(1, 2), tile, product)
        for group_grads, part_grad in zip(
            grads, (grad_query, grad_key.mul_(scale), grad_value), strict=True
        ):
            group_grads.append(part_grad.to(query.dtype))
    tiling.write_rows(grads[0], num_groups, grads_BTHD[0])
    for group_grads, grad_BTHD in zip(grads[1:], grads_BTHD[1:], strict=True):
        tiling.write_keys(group_grads, num_groups, grad_BTHD)
    return [grad_BTHD.transpose(1, 2) for grad_BTHD in grads_BTHD]


def _cut_tiles(
    group: _DocumentGroup, tile_tokens: int, heads_per_group: int
) -> list[tuple[int, int, slice]]:
    """Return each tile's first and end key of its own tokens, and its rows: G heads per token."""
    length, num_earlier, heads = group.length, group.num_earlier_keys, heads_per_group
    ends = [(start, min(start + tile_tokens, length)) for start in range(0, length, tile_tokens)]
    return [(num_earlier + a, num_earlier + b, slice(a * heads, b * heads)) for a, b in ends]


def _make_buffers(
    query_BHTD: torch.Tensor, tiling: _Tiling, sizes: Sequence[int]
) -> list[torch.Tensor]:
    """Return a buffer for each of ``sizes``, in multiples of the largest tile's number of scores.

    Each is allocated separately: small ones stay in the heap.
    """
    heads = query_BHTD.shape[1]
    tiles = (g.num_documents * min(tiling.tile, g.length) * g.num_keys for g in tiling.groups)
    max_scores = heads * max(tiles)
    return [query_BHTD.new_empty(size * max_scores) for size in sizes]


def _view(buffer: torch.Tensor, *shape: int) -> torch.Tensor:
    return buffer[: math.prod(shape)].view(shape)


def _bmm(left: torch.Tensor, right: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Return one @ other, written to the buffer."""
    out = _view(buffer, left.shape[0], left.shape[1], right.shape[2])
    return torch.bmm(left, right, out=out)


def _write_largest_scores(
    query: torch.Tensor,
    keys: torch.Tensor,
    start: int,
    scale: float,
    out: torch.Tensor,
    buffers: Sequence[torch.Tensor],
) -> None:
    """Write each query's largest score, approximately."""
    scores = _bmm(query, keys.transpose(1, 2), buffers[0])
    _mask_later_keys(scores, start)
    # A maximum takes half as long in fp32.
    fp32_scores = _view(buffers[1].view(torch.float32), *scores.shape)
    out.copy_(fp32_scores.copy_(scores).amax(-1, keepdim=True).mul_(scale))


def _probabilities(
    query: torch.Tensor,
    keys: torch.Tensor,
    start: int,
    scale: float,
    shift: torch.Tensor,
    buffers: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Return the softmax of the scores of a tile whose first token is ``start``.

    The result is in the second buffer; the first one is overwritten.
    """
    shape = *query.shape[:2], keys.shape[1]
    scores, probabilities = _view(buffers[0], *shape), _view(buffers[1], *shape)
    if shift.numel():
        scores.copy_((-shift).expand_as(scores))
    else:
        scores.zero_()
    _mask_later_keys(scores, start)
    _matmul(query, keys.transpose(1, 2), scores, scale, 1.0)
    torch.ops.aten._softmax.out(scores, -1, False, out=probabilities)
    return probabilities


def _matmul(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, alpha: float, beta: float = 0.0
) -> None:
    """Write beta * out + alpha * one @ other to ``out``, rounded once."""
    torch.baddbmm(out, left, right, beta=beta, alpha=alpha, out=out)


def _mask_later_keys(scores: torch.Tensor, start: int) -> None:
    """Set the scores of keys that come after a query to minus infinity, in place."""
    num_keys = scores.shape[2] - start
    scores[..., start:] += _causal_bias(num_keys, scores.shape[1] // num_keys, scores.dtype)


@lru_cache(maxsize=32)
def _causal_bias(num_tokens: int, heads_per_group: int, dtype: torch.dtype) -> torch.Tensor:
    bias = torch.full((num_tokens, num_tokens), float("-inf")).triu_(1)
    return bias.to(dtype).repeat_interleave(heads_per_group, 0)
