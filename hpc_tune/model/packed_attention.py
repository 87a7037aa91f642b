"""Attention within documents: block-diagonal attention of packed rows, without a mask.

transformers separates the documents of a row by a T x T mask, under which all products are computed
and most are dropped. Here attention runs document by document: a row of D equal documents costs
1/D. Layers with another mask (a mask that was passed, on a CPU also a sliding window) keep
transformers' own attention, and so does generation, where no documents are known.

Shapes: B rows, T tokens, H heads, K heads of keys and values, D values per head.
"""

import functools
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hpc_tune.errors import ConfigError
from hpc_tune.model import varlen_attention
from hpc_tune.model.micro_batch import Document, batch_context
from hpc_tune.model.shared_rows import HeadsOfModule
from hpc_tune.model.transformers_compat import keep_capped_scores

# -- Causal attention of documents on a CPU, in tiles of matrix products with a softmax in between.
#
#     documents -> padded to whole tiles, those of one length together
#     tile of queries x all keys up to it -> scores -> softmax -> x values
#
# torch's fused kernel for CPUs multiplies blocks that are too small for the matrix units: in bf16
# it takes 2 to 3 times as long (benchmarks/NOTES.md). The backward pass recomputes the
# probabilities, as in FlashAttention (arXiv:2205.14135); no T x T scores are kept.
#
# In 16 bits a score is rounded where it is written, which is too coarse for large ones. So each
# row's largest score is subtracted before that, within the product: what matters to the softmax is
# then near zero, and as exact as scores in fp32.
#
# Shapes: B rows of T tokens; H heads in K groups of G, which share keys and values; D values per
# head, which may be others for V; M documents of L tokens, padded.


TILE, LONG_TILE = 64, 128  # queries at once
LONG_TOKENS = 1024  # tokens from which on the longer tile is faster
MAX_SCORES = 1 << 21  # of one product: more do not stay in a cache
Span = tuple[int, int, int, int]  # first row, end row, start, stop
_LIBRARY = torch.library.Library("hpc_tune", "FRAGMENT")
_LIBRARY.define(
    "document_attention(Tensor query, Tensor key, Tensor value, int[] spans, float scale)"
    " -> (Tensor, Tensor)"
)


def tiled_attention(
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    spans: Sequence[Span],
    scale: float | None,
) -> torch.Tensor:
    """Return the attention of each document as BTHD rows.

    ``spans`` are the documents: rows, and their tokens in each of these; together they are all
    tokens. ``scale`` is 1 / sqrt(D) if None. Selective recompute keeps the result by the name of
    its operator.
    """
    flat = [number for span in spans for number in span]
    scale = query_BHTD.shape[-1] ** -0.5 if scale is None else scale
    out_BTHD: torch.Tensor = _TiledAttention.apply(query_BHTD, key_BKTD, value_BKTD, flat, scale)
    return out_BTHD


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_BHTD: torch.Tensor,
        key_BKTD: torch.Tensor,
        value_BKTD: torch.Tensor,
        spans: list[int],
        scale: float,
    ) -> torch.Tensor:
        inputs = query_BHTD, key_BKTD, value_BKTD
        out_BTHD, shifts = torch.ops.hpc_tune.document_attention(*inputs, spans, scale)
        ctx.save_for_backward(*inputs, shifts)
        ctx.spans, ctx.scale = spans, scale
        return out_BTHD  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_BTHD: torch.Tensor) -> Any:  # type: ignore[override]
        *inputs, shifts = ctx.saved_tensors
        return *_tiled_backward(inputs, grad_BTHD, shifts, ctx.spans, ctx.scale), None, None


@dataclass(frozen=True)
class _DocumentGroup:
    """M documents of L tokens; without ``tokens`` they are the rows as they are.

    ``tokens`` are their places in the flattened rows, ``is_padding`` the places in the group (M L)
    that are none of a document: copies of its last token, which no token of it sees.
    """

    num_documents: int
    length: int
    tokens: torch.Tensor | None = None
    is_padding: torch.Tensor | None = None

    def as_documents(self, tensor_BHTD: torch.Tensor, num_groups: int) -> torch.Tensor:
        """Return the documents of a tensor as (M K, L G, D)."""
        tensor = tensor_BHTD.transpose(1, 2)
        if self.tokens is not None:
            tensor = tensor.flatten(0, 1)[self.tokens]
        shape = self.num_documents, self.length, num_groups, -1, tensor_BHTD.shape[-1]
        return tensor.reshape(shape).transpose(1, 2).flatten(0, 1).flatten(1, 2)

    def as_tokens(self, tensor: torch.Tensor, num_groups: int) -> torch.Tensor:
        """Return what ``as_documents`` returns as (M L, H, D)."""
        shape = self.num_documents, num_groups, self.length, -1, tensor.shape[-1]
        return tensor.reshape(shape).transpose(1, 2).flatten(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class _Tiling:
    """The groups, and where each token of the rows is in all of them, one after another."""

    groups: Sequence[_DocumentGroup]
    token_places: torch.Tensor | None
    tile: int

    def write_rows(
        self, parts: Sequence[torch.Tensor], num_groups: int, out_BTHD: torch.Tensor
    ) -> None:
        """Write what was computed of each group as BTHD rows."""
        tokens = [g.as_tokens(part, num_groups) for g, part in zip(self.groups, parts, strict=True)]
        joined = tokens[0] if len(tokens) == 1 else torch.cat(tokens)
        out_SHD = out_BTHD.flatten(0, 1)
        if self.token_places is None:
            out_SHD.copy_(joined)
        else:
            torch.index_select(joined, 0, self.token_places, out=out_SHD)


@lru_cache(maxsize=8)
def _make_tiling(flat: tuple[int, ...], num_rows: int, num_tokens: int, num_heads: int) -> _Tiling:
    spans = zip(*(flat[n::4] for n in range(4)), strict=True)
    documents = [(row, a, b) for first, last, a, b in spans for row in range(first, last)]
    tile = TILE if max(b - a for _, a, b in documents) <= LONG_TOKENS else LONG_TILE
    if num_tokens % TILE == 0 and all(b - a == num_tokens for _, a, b in documents):
        return _Tiling([_DocumentGroup(num_rows, num_tokens)], None, tile)
    by_length = defaultdict(list)
    for row, start, stop in documents:
        padded = -(-(stop - start) // TILE) * TILE
        by_length[padded].append((row * num_tokens + start, stop - start))
    groups, places, at = [], torch.empty(num_rows * num_tokens, dtype=torch.int64), 0
    for length, members in sorted(by_length.items()):
        counting = torch.arange(length)
        most = max(1, MAX_SCORES // (num_heads * tile * length))
        for part in (members[n : n + most] for n in range(0, len(members), most)):
            starts, lengths = torch.tensor(part).unsqueeze(2).unbind(1)
            tokens = (starts + torch.minimum(counting, lengths - 1)).flatten()
            is_padding = (counting >= lengths).flatten()
            places[tokens[~is_padding]] = at + torch.nonzero(~is_padding).flatten()
            groups.append(_DocumentGroup(len(part), length, tokens, is_padding))
            at += len(tokens)
    return _Tiling(groups, places, tile)


@torch.library.impl(_LIBRARY, "document_attention", "CPU")
def _tiled_forward(
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    spans: Sequence[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention as BTHD rows, and what was subtracted from each query's scores (BTH1).

    In 32 bits nothing is: the last size is 0.

    Results are allocated first: what is freed after them leaves no holes in the heap.
    """
    num_rows, num_heads, num_tokens, _ = query_BHTD.shape
    num_groups = key_BKTD.shape[1]
    tiling = _make_tiling(tuple(spans), num_rows, num_tokens, num_heads)
    out_BTHD = query_BHTD.new_empty(num_rows, num_tokens, num_heads, value_BKTD.shape[3])
    has_shifts = int(query_BHTD.dtype.itemsize == 2)
    shifts_BTH1 = query_BHTD.new_empty(*out_BTHD.shape[:3], has_shifts)
    outs, shifts = [], []
    for group in tiling.groups:
        query, key, value = (
            group.as_documents(t, num_groups) for t in (query_BHTD, key_BKTD, value_BKTD)
        )
        out = query.new_empty(*query.shape[:2], value.shape[2])
        shift = query.new_empty(*query.shape[:2], has_shifts)
        for start, stop, part in _cut_tiles(group.length, tiling.tile, num_heads // num_groups):
            tile, keys = query[:, part], key[:, :stop]
            if has_shifts:
                _write_largest(tile, keys, start, scale, shift[:, part])
            torch.bmm(
                _probabilities(tile, keys, start, scale, shift[:, part]),
                value[:, :stop],
                out=out[:, part],
            )
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
) -> list[torch.Tensor]:
    """Return the gradients of queries, keys and values."""
    num_rows, num_heads, num_tokens, _ = inputs[0].shape
    num_groups = inputs[1].shape[1]
    tiling = _make_tiling(tuple(spans), num_rows, num_tokens, num_heads)
    grads_BTHD = [t.new_empty(t.transpose(1, 2).shape) for t in inputs]
    grads: list[list[torch.Tensor]] = [[], [], []]
    for group in tiling.groups:
        query, key, value = (group.as_documents(tensor, num_groups) for tensor in inputs)
        grad = group.as_documents(out_grad_BTHD.transpose(1, 2), num_groups)
        shift = query.new_empty(*query.shape[:2], 0)
        if shifts_BTH1.numel():
            shift = group.as_documents(shifts_BTH1.transpose(1, 2), num_groups)
        if group.is_padding is not None:  # copies of a token: no gradient is theirs
            padded = group.is_padding.view(group.num_documents, 1, group.length, 1)
            grad.view(group.num_documents, num_groups, group.length, -1).masked_fill_(padded, 0.0)
        grad_query = torch.empty_like(query)
        # Sums over the tiles, which are rounded once.
        grad_key = torch.zeros_like(key, dtype=torch.promote_types(key.dtype, torch.float32))
        grad_value = torch.zeros_like(value, dtype=grad_key.dtype)
        for start, stop, part in _cut_tiles(group.length, tiling.tile, num_heads // num_groups):
            tile, keys, out_grad = query[:, part], key[:, :stop], grad[:, part]
            probabilities = _probabilities(tile, keys, start, scale, shift[:, part])
            grad_value[:, :stop] += torch.bmm(probabilities.transpose(1, 2), out_grad)
            wanted = torch.bmm(out_grad, value[:, :stop].transpose(1, 2))
            by_score = torch.ops.aten._softmax_backward_data(
                wanted, probabilities, -1, wanted.dtype
            )
            _matmul(by_score, keys, grad_query[:, part], scale)
            grad_key[:, :stop] += torch.bmm(by_score.transpose(1, 2), tile)
        for found, one in zip(grads, (grad_query, grad_key.mul_(scale), grad_value), strict=True):
            found.append(one.to(query.dtype))
    for found, grad_BTHD in zip(grads, grads_BTHD, strict=True):
        tiling.write_rows(found, num_groups, grad_BTHD)
    return [grad_BTHD.transpose(1, 2) for grad_BTHD in grads_BTHD]


def _cut_tiles(length: int, tile: int, heads_per_group: int) -> list[tuple[int, int, slice]]:
    """Return the first and last token of each tile, and its rows: G heads of each token."""
    ends = [(start, min(start + tile, length)) for start in range(0, length, tile)]
    return [(a, b, slice(a * heads_per_group, b * heads_per_group)) for a, b in ends]


def _write_largest(
    query: torch.Tensor, keys: torch.Tensor, start: int, scale: float, out: torch.Tensor
) -> None:
    """Write each query's largest score, roughly."""
    scores = torch.bmm(query, keys.transpose(1, 2))
    _mask_later(scores, start)
    # In fp32 a maximum takes half as long.
    out.copy_(scores.float().amax(-1, keepdim=True).mul_(scale))


def _probabilities(
    query: torch.Tensor, keys: torch.Tensor, start: int, scale: float, shift: torch.Tensor
) -> torch.Tensor:
    """Return the softmax of the scores of a tile whose first token is ``start``."""
    scores = query.new_empty(*query.shape[:2], keys.shape[1])
    if shift.numel():
        scores.copy_((-shift).expand_as(scores))
    else:
        scores.zero_()
    _mask_later(scores, start)
    _matmul(query, keys.transpose(1, 2), scores, scale, 1.0)
    return torch.ops.aten._softmax(scores, -1, False)  # type: ignore[no-any-return]


def _matmul(
    one: torch.Tensor, other: torch.Tensor, out: torch.Tensor, alpha: float, beta: float = 0.0
) -> None:
    """Write beta out + alpha one other to ``out``, rounded once."""
    torch.baddbmm(out, one, other, beta=beta, alpha=alpha, out=out)


def _mask_later(scores: torch.Tensor, start: int) -> None:
    """Make the scores of keys that come after a query minus infinity, in place."""
    num_keys = scores.shape[2] - start
    scores[..., start:] += _later_mask(num_keys, scores.shape[1] // num_keys, scores.dtype)


@lru_cache(maxsize=32)
def _later_mask(num_tokens: int, heads_per_group: int, dtype: torch.dtype) -> torch.Tensor:
    hidden = torch.full((num_tokens, num_tokens), float("-inf")).triu_(1)
    return hidden.to(dtype).repeat_interleave(heads_per_group, 0)


# -- Attention within documents, for transformers' layers.


ATTENTION_NAME = "hpc_tune_documents"
# Sparse attention (DeepSeek V3.2): a part of a layer chooses the keys of each token. transformers
# masks the others for its own implementations alone, and would leave that to any other.
_INDEXER = re.compile(r"(^|\.)indexer$")


def find_indexers(model: nn.Module) -> list[nn.Module]:
    """Return the parts of layers that choose the keys of each token."""
    return [module for path, module in model.named_modules() if _INDEXER.search(path)]


def make_documents(lengths: Sequence[Sequence[int]]) -> list[Document]:
    """Return the documents of rows by their lengths, in order; one for all if each row is one."""
    if all(len(row_lengths) == 1 for row_lengths in lengths):
        return [(slice(0, len(lengths)), 0, lengths[0][0])]
    return [
        (slice(row, row + 1), stop - length, stop)
        for row, row_lengths in enumerate(lengths)
        for stop, length in zip(accumulate(row_lengths), row_lengths, strict=True)
    ]


def use_document_attention(model: Any) -> bool:
    """Let a transformers model attend within documents, if its attention can be replaced."""
    keep_capped_scores(model)
    _make_masks_with_positions(model)
    if model.config._attn_implementation != "sdpa" or not model._can_set_attn_implementation():
        return False
    if any(find_indexers(model)):
        return False
    _set_attention(model)
    return True


def force_document_attention(model: Any) -> bool | None:
    """Let a model's attention be called here, as rows need that ranks share.

    Return whether it is computed by the family's own function; None if it cannot be replaced.
    """
    before = model.config._attn_implementation
    if before == ATTENTION_NAME:
        return False
    if before not in ("eager", "sdpa") or any(find_indexers(model)):
        return None
    if not model._can_set_attn_implementation():
        return None
    _set_attention(model)
    return bool(before == "eager")


def _set_attention(model: Any) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attend)
    AttentionMaskInterface.register(ATTENTION_NAME, _make_document_mask)
    _find_documents_on_host()
    model.set_attn_implementation(ATTENTION_NAME)


def _find_documents_on_host() -> None:
    """Let transformers take documents from the host where it has them.

    It reads from the positions whether a row has several, and waits for the device to answer.
    """
    from transformers import masking_utils

    theirs = getattr(masking_utils, "find_packed_sequence_indices", None)
    if theirs is None or hasattr(theirs, "asks_host"):
        return

    @functools.wraps(theirs)
    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        if (starts := batch_context.batch.starts) is None:
            found: torch.Tensor | None = theirs(position_ids)
            return found
        return starts.documents_BT() if starts.is_packed else None

    find.asks_host = True  # type: ignore[attr-defined]
    masking_utils.find_packed_sequence_indices = find


def _make_masks_with_positions(model: Any) -> None:
    """Let a family that makes its masks without positions (gpt-oss) make them with those.

    From them transformers sees where documents begin. Only where it has no cache and no mask yet.
    """
    code = sys.modules[type(model).__module__]
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        theirs = getattr(code, name, None)
        if theirs is not None and not hasattr(theirs, "knows_positions"):
            setattr(code, name, _pass_positions(theirs))


def _pass_positions(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def make(*args: Any, **options: Any) -> Any:
        known = (options.get(n) is not None for n in ("attention_mask", "past_key_values"))
        if not args and options.get("position_ids") is None and not any(known):
            options["position_ids"] = batch_context.batch.positions_BT
        return theirs(*args, **options)

    make.knows_positions = True  # type: ignore[attr-defined]
    return make


def _make_document_mask(*args: Any, **options: Any) -> torch.Tensor | None:
    from transformers.masking_utils import sdpa_mask

    if batch_context.batch.share is not None:
        return _mask_of_whole_rows(options)
    starts, window = batch_context.batch.starts, options.get("local_size")
    apart = batch_context.batch.documents or starts is not None
    if apart and not options.get("use_vmap") and options.get("attention_mask") is None:
        if window is None:
            return None
        if starts is not None and starts.windows and _is_sliding(options):
            return varlen_attention.encode_window(window, starts.starts_N.device)
    mask: torch.Tensor | None = sdpa_mask(*args, **options)
    return mask


def _mask_of_whole_rows(options: dict[str, Any]) -> torch.Tensor | None:
    """Return the mark of a window, or None: of shared rows attention makes its masks itself.

    Raises:
        ConfigError: if a layer asks for another mask, which would be of this rank's tokens alone.
    """
    window = options.get("local_size")
    is_own = options.get("use_vmap") or options.get("attention_mask") is not None
    if is_own or (window is not None and not _is_sliding(options)):
        raise ConfigError("a layer masks tokens neither causally alone nor by a sliding window")
    if window is None:
        return None
    return varlen_attention.encode_window(window, batch_context.batch.whole_rows.starts_N.device)


def _is_sliding(options: dict[str, Any]) -> bool:
    """Whether a mask is that of a causal sliding window, and not of chunks or of both sides."""
    window = getattr(options.get("config"), "sliding_window", None)
    return options["local_size"] == window and "allow_is_bidirectional_skip" not in options


def _attend(
    module: Any,
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    inputs = query_BHTD, key_BKTD, value_BKTD
    if batch_context.batch.share is None:
        return _attend_rows(module, *inputs, attention_mask, dropout, scaling, **options)
    window = None if attention_mask is None else varlen_attention.decode_window(attention_mask)
    attention = functools.partial(
        _attend_heads, module, query_BHTD.shape[1], window, dropout, scaling, options
    )
    own = map(varlen_attention.cast_to_autocast, inputs)  # before it is sent
    return batch_context.batch.share.attend(attention, *own), None


def _attend_heads(
    module: Any,
    num_heads: int,
    window: int | None,
    dropout: float,
    scaling: float | None,
    options: dict[str, Any],
    part: int,
    *inputs_BHTD: torch.Tensor,
) -> torch.Tensor:
    """Return the attention of whole rows for a part of a layer's heads, BTHD."""
    batch = batch_context.batch
    share, groups = batch.share, inputs_BHTD[0].shape[1] // inputs_BHTD[1].shape[1]
    own = HeadsOfModule(module, part, share.size, num_heads, groups)
    options = {name: own.cut(value) for name, value in options.items()}
    mask = None
    if share.uses_eager:
        family = sys.modules[type(module).__module__].eager_attention_forward
        dtype = inputs_BHTD[0].dtype
        hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=inputs_BHTD[0].device)
        mask = torch.where(batch.whole_rows.mask_B1TT(window), hidden.new_zeros(()), hidden)
        out_BTHD: torch.Tensor = family(
            own, *inputs_BHTD, mask, dropout=dropout, scaling=scaling, **options
        )[0]
        return out_BTHD
    if batch.starts is not None:
        if window is not None:
            mask = varlen_attention.encode_window(window, inputs_BHTD[0].device)
    elif window is not None or not batch.documents:
        mask = batch.whole_rows.mask_B1TT(window)
    query_BHTD, key_BKTD, value_BKTD = inputs_BHTD
    out = _attend_rows(own, query_BHTD, key_BKTD, value_BKTD, mask, dropout, scaling, **options)
    return out[0]


def _attend_rows(
    module: Any,
    query_BHTD: torch.Tensor,
    key_BKTD: torch.Tensor,
    value_BKTD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    starts, window = batch_context.batch.starts, None
    if starts is not None and attention_mask is not None:
        window = varlen_attention.decode_window(attention_mask)
    scale = query_BHTD.shape[-1] ** -0.5 if scaling is None else scaling
    inputs = query_BHTD, key_BKTD, value_BKTD
    if starts is not None and (attention_mask is None or window is not None):
        query, key, value = _pad_heads(*map(varlen_attention.cast_to_autocast, inputs))
        if varlen_attention.is_supported(query, key, value, dropout):
            out_BTHD = varlen_attention.attend(query, key, value, starts, scale, window)
            values = value_BKTD.shape[-1]
            # The gradient of a slice is a copy, also where it takes all.
            return out_BTHD if out_BTHD.shape[-1] == values else out_BTHD[..., :values], None
        attention_mask = starts.mask_B1TT(window)
    if attention_mask is not None or not batch_context.batch.documents:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        stock: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module,
            *inputs,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **options,
        )
        return stock
    if dropout:  # which the tiles do not draw
        has_groups = query_BHTD.shape[1] != key_BKTD.shape[1]
        parts = []
        for document in batch_context.batch.documents:
            query, key, value = _slices(document, *inputs)
            parts.append(
                F.scaled_dot_product_attention(
                    query, key, value, None, dropout, True, scale=scaling, enable_gqa=has_groups
                )
            )
        return _join_documents(parts, query_BHTD), None
    # Rotary positions leave queries and keys in fp32.
    query, key, value = map(varlen_attention.cast_to_autocast, inputs)
    spans = [(rows.start, rows.stop, a, b) for rows, a, b in batch_context.batch.documents]
    return tiled_attention(query, key, value, spans, scale), None


def _pad_heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return heads padded with zeros to the largest of them.

    In DeepSeek's latent attention values have fewer numbers than queries and keys: scores stay as
    they are, and what follows a result's own numbers is zero.
    """
    most = max(tensor.shape[-1] for tensor in tensors)
    return [F.pad(t, (0, most - t.shape[-1])) if t.shape[-1] < most else t for t in tensors]


def _join_documents(parts_BHLD: Sequence[torch.Tensor], query_BHTD: torch.Tensor) -> torch.Tensor:
    """Return the documents' results as BTHD rows."""
    parts = [part.transpose(1, 2) for part in parts_BHLD]
    joined = parts[0] if len(parts) == 1 else torch.cat([part.flatten(0, 1) for part in parts])
    num_rows, num_heads, num_tokens, _ = query_BHTD.shape
    return joined.reshape(num_rows, num_tokens, num_heads, -1)


def _slices(document: Document, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the document's slice of each B?T? tensor."""
    rows, start, stop = document
    return [tensor[rows, :, start:stop] for tensor in tensors]
