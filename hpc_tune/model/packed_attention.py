"""Attention within documents: block-diagonal attention of packed rows, without a mask.

transformers separates the documents of a row by a T x T mask: all scores are computed and most are
discarded. Here attention runs document by document: a row of D equal documents costs 1/D of that.
Layers with another mask (one passed explicitly, or on a CPU a sliding window) keep transformers'
own attention, and so does generation, where no documents are known.

Shapes: B rows, T tokens, H heads, K heads of keys and values, D values per head.
"""

import functools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hpc_tune.errors import ConfigError
from hpc_tune.model import varlen_attention
from hpc_tune.model.micro_batch import Document, batch_context
from hpc_tune.model.shared_rows import RankHeadsView
from hpc_tune.model.tiled_attention import tiled_attention
from hpc_tune.model.transformers_compat import avoid_sdpa_with_capped_scores

ATTENTION_NAME = "hpc_tune_documents"
# Sparse attention (DeepSeek V3.2): an indexer in each layer chooses the keys of each token.
# transformers masks the other keys only for its own attention implementations.
_INDEXER = re.compile(r"(^|\.)indexer$")


def find_indexers(model: nn.Module) -> list[nn.Module]:
    """Return the modules that choose the keys of each token."""
    return [module for path, module in model.named_modules() if _INDEXER.search(path)]


def make_documents(lengths: Sequence[Sequence[int]]) -> list[Document]:
    """Return the documents of rows, in order; a single entry if each row is one document."""
    if all(len(row_lengths) == 1 for row_lengths in lengths):
        return [(slice(0, len(lengths)), 0, lengths[0][0])]
    return [
        (slice(row, row + 1), stop - length, stop)
        for row, row_lengths in enumerate(lengths)
        for stop, length in zip(accumulate(row_lengths), row_lengths, strict=True)
    ]


def use_document_attention(model: Any) -> bool:
    """Make a model attend document by document; return whether its attention can be replaced."""
    avoid_sdpa_with_capped_scores(model)
    _patch_mask_functions(model)
    if model.config._attn_implementation != "sdpa" or not model._can_set_attn_implementation():
        return False
    if any(find_indexers(model)):
        return False
    _set_attention(model)
    return True


def force_document_attention(model: Any) -> bool | None:
    """Route a model's attention through this module, as is needed when ranks share rows.

    Return whether the family's own function must compute it; None if it cannot be replaced.
    """
    implementation = model.config._attn_implementation
    if implementation == ATTENTION_NAME:
        return False
    if implementation not in ("eager", "sdpa") or any(find_indexers(model)):
        return None
    if not model._can_set_attn_implementation():
        return None
    _set_attention(model)
    return bool(implementation == "eager")


def _set_attention(model: Any) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attend)
    AttentionMaskInterface.register(ATTENTION_NAME, _make_document_mask)
    _patch_packed_sequence_search()
    model.set_attn_implementation(ATTENTION_NAME)


def _patch_packed_sequence_search() -> None:
    """Make transformers take documents from the host if the host knows them.

    transformers reads from the positions whether a row has several documents, and so waits for the
    device. If ranks share rows, it is told of none, because attention makes the masks itself.
    """
    from transformers import masking_utils

    original_function = getattr(masking_utils, "find_packed_sequence_indices", None)
    if original_function is None or hasattr(original_function, "asks_host"):
        return

    @functools.wraps(original_function)
    def find_documents(position_ids: torch.Tensor) -> torch.Tensor | None:
        if batch_context.batch.row_sharing is not None:
            return None
        if (starts := batch_context.batch.starts) is None:
            document_ids_BT: torch.Tensor | None = original_function(position_ids)
            return document_ids_BT
        return starts.document_ids_BT() if starts.is_packed else None

    find_documents.asks_host = True  # type: ignore[attr-defined]
    masking_utils.find_packed_sequence_indices = find_documents


def _patch_mask_functions(model: Any) -> None:
    """Pass positions to the mask functions of families that leave them out (gpt-oss).

    transformers finds from them where documents begin, if it is given no cache and no mask.
    """
    code = sys.modules[type(model).__module__]
    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        original_function = getattr(code, name, None)
        if original_function is not None and not hasattr(original_function, "knows_positions"):
            setattr(code, name, _wrap_with_positions(original_function))


def _wrap_with_positions(original_function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original_function)
    def make_mask_with_positions(*args: Any, **options: Any) -> Any:
        is_given = (options.get(n) is not None for n in ("attention_mask", "past_key_values"))
        if not args and options.get("position_ids") is None and not any(is_given):
            options["position_ids"] = batch_context.batch.positions_BT
        return original_function(*args, **options)

    make_mask_with_positions.knows_positions = True  # type: ignore[attr-defined]
    return make_mask_with_positions


def _make_document_mask(*args: Any, **options: Any) -> torch.Tensor | None:
    from transformers.masking_utils import sdpa_mask

    if batch_context.batch.row_sharing is not None:
        return _encode_shared_row_window(options)
    starts, window = batch_context.batch.starts, options.get("local_size")
    has_documents = batch_context.batch.documents or starts is not None
    if has_documents and not options.get("use_vmap") and options.get("attention_mask") is None:
        if window is None:
            return None
        if starts is not None and starts.supports_windows and _is_sliding_window(options):
            return varlen_attention.encode_window(window, starts.starts_N.device)
    mask: torch.Tensor | None = sdpa_mask(*args, **options)
    return mask


def _encode_shared_row_window(options: dict[str, Any]) -> torch.Tensor | None:
    """Return ``encode_window`` for a layer's sliding window, or None if the layer has none.

    No mask is made: over shared rows, attention masks by itself.

    Raises:
        ConfigError: if a layer needs another mask, which would cover only this rank's tokens.
    """
    window = options.get("local_size")
    has_own_mask = options.get("use_vmap") or options.get("attention_mask") is not None
    if has_own_mask or (window is not None and not _is_sliding_window(options)):
        raise ConfigError("a layer has a mask that is neither plainly causal nor a sliding window")
    if window is None:
        return None
    return varlen_attention.encode_window(
        window, batch_context.batch.whole_row_document_starts.starts_N.device
    )


def _is_sliding_window(options: dict[str, Any]) -> bool:
    """Whether a mask is a causal sliding window, neither chunked nor bidirectional."""
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
    if batch_context.batch.row_sharing is None:
        return _attend_unshared_rows(module, *inputs, attention_mask, dropout, scaling, **options)
    window = None if attention_mask is None else varlen_attention.decode_window(attention_mask)
    call = _SharedRowsAttention(module, window, dropout, scaling, options)
    row_sharing = batch_context.batch.row_sharing
    attend = call.attend_own_queries if row_sharing.part.is_head_tail else call.attend_own_heads
    cast_inputs = map(varlen_attention.cast_to_autocast_dtype, inputs)  # before they are sent
    return row_sharing.attend(attend, *cast_inputs), None


@dataclass(frozen=True)
class _SharedRowsAttention:
    """A layer's call of attention over rows that ranks share; its methods compute a rank's part."""

    module: Any
    window: int | None
    dropout: float
    scaling: float | None
    options: dict[str, Any]

    def attend_own_heads(
        self, rank: int, query_BHTD: torch.Tensor, key_BKTD: torch.Tensor, value_BKTD: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention of whole rows for a rank's part of the layer's heads, BTHD."""
        batch, window, inputs = batch_context.batch, self.window, (query_BHTD, key_BKTD, value_BKTD)
        heads, groups = query_BHTD.shape[1], key_BKTD.shape[1]
        view = RankHeadsView(self.module, rank, batch.row_sharing.part.size, heads, groups)
        options = {name: view.shard_to_rank(value) for name, value in self.options.items()}
        if batch.row_sharing.uses_eager:
            return self._attend_eagerly(
                view, options, inputs, batch.whole_row_document_starts.mask_B1TT(window)
            )
        mask = None
        if batch.starts is not None and (window is None or batch.starts.supports_windows):
            if window is not None:
                mask = varlen_attention.encode_window(window, query_BHTD.device)
        elif window is not None or not batch.documents:
            mask = batch.whole_row_document_starts.mask_B1TT(window)
        return _attend_unshared_rows(view, *inputs, mask, self.dropout, self.scaling, **options)[0]

    def attend_own_queries(
        self, rank: int, query_BHSD: torch.Tensor, key_BKTD: torch.Tensor, value_BKTD: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention of a rank's queries over the keys of whole rows, all heads, BSHD."""
        batch, window, inputs = batch_context.batch, self.window, (query_BHSD, key_BKTD, value_BKTD)
        sharing, parts = batch.row_sharing, batch.document_parts_by_rank[rank]
        scale = query_BHSD.shape[-1] ** -0.5 if self.scaling is None else self.scaling
        if batch.starts is not None and sharing.kernel_supports_parts and not sharing.uses_eager:
            query, key, value = _pad_heads(*inputs)
            takes_window = window is None or batch.starts.supports_windows
            if takes_window and varlen_attention.is_supported(query, key, value, self.dropout):
                out_BSHD = varlen_attention.attend_parts(query, key, value, parts, scale, window)
                return _unpad_heads(out_BSHD, value_BKTD)
        elif batch.documents and window is None and not (self.dropout or sharing.uses_eager):
            query = query_BHSD.transpose(0, 1).flatten(1, 2).unsqueeze(0)  # all rows as one
            key, value = parts.take_keys(key_BKTD), parts.take_keys(value_BKTD)
            out = tiled_attention(query, key, value, parts.spans, scale, parts.num_earlier_keys)
            return out.view(query_BHSD.shape[0], -1, *out.shape[2:])
        positions_T = torch.arange(key_BKTD.shape[2], device=key_BKTD.device)
        positions_S = replace(sharing.part, rank=rank).shard_to_rank(positions_T, 0)
        mask_B1ST = batch.whole_row_document_starts.mask_B1ST(positions_S, window)
        if sharing.uses_eager:
            return self._attend_eagerly(self.module, self.options, inputs, mask_B1ST)
        kwargs = {"dropout": self.dropout, "scaling": self.scaling, **self.options}
        return _attend_with_mask(self.module, *inputs, mask_B1ST, **kwargs)[0]

    def _attend_eagerly(
        self,
        rank_part: Any,
        options: dict[str, Any],
        inputs: Sequence[torch.Tensor],
        mask: torch.Tensor,
    ) -> torch.Tensor:
        """Call the family's own attention function; ``rank_part``: the module or a part of it."""
        eager_attention = sys.modules[type(self.module).__module__].eager_attention_forward
        min_score = inputs[0].new_full((), torch.finfo(inputs[0].dtype).min)
        mask_bias = torch.where(mask, min_score.new_zeros(()), min_score)
        kwargs = {"dropout": self.dropout, "scaling": self.scaling, **options}
        out: torch.Tensor = eager_attention(rank_part, *inputs, mask_bias, **kwargs)[0]
        return out


def _attend_with_mask(*inputs: Any, **options: Any) -> tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    out: tuple[torch.Tensor, None] = sdpa_attention_forward(*inputs, **options)
    return out


def _attend_unshared_rows(
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
        query, key, value = _pad_heads(*map(varlen_attention.cast_to_autocast_dtype, inputs))
        is_self = query.shape[2] == key.shape[2]
        if is_self and varlen_attention.is_supported(query, key, value, dropout):
            out_BTHD = varlen_attention.attend(query, key, value, starts, scale, window)
            return _unpad_heads(out_BTHD, value_BKTD), None
        attention_mask = starts.mask_B1TT(window)
    if attention_mask is not None or not batch_context.batch.documents:
        kwargs = {"dropout": dropout, "scaling": scaling, **options}
        return _attend_with_mask(module, *inputs, attention_mask, **kwargs)
    if dropout:  # tiled attention has no dropout
        has_groups = query_BHTD.shape[1] != key_BKTD.shape[1]
        parts = []
        for document in batch_context.batch.documents:
            query, key, value = _slice_document(document, *inputs)
            parts.append(
                F.scaled_dot_product_attention(
                    query, key, value, None, dropout, True, scale=scaling, enable_gqa=has_groups
                )
            )
        return _join_documents(parts, query_BHTD), None
    # Rotary positions leave queries and keys in fp32.
    query, key, value = map(varlen_attention.cast_to_autocast_dtype, inputs)
    spans = [(rows.start, rows.stop, a, b) for rows, a, b in batch_context.batch.documents]
    return tiled_attention(query, key, value, spans, scale), None


def _pad_heads(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Pad the last dimension of each tensor with zeros to the largest one.

    In DeepSeek's latent attention, value heads are narrower than query and key heads. Padding
    leaves scores unchanged and adds only zeros at the end of the result.
    """
    max_dim = max(tensor.shape[-1] for tensor in tensors)
    return [F.pad(t, (0, max_dim - t.shape[-1])) if t.shape[-1] < max_dim else t for t in tensors]


def _unpad_heads(out_BTHD: torch.Tensor, value_BKTD: torch.Tensor) -> torch.Tensor:
    """Cut the result of padded heads back to the width of the value heads."""
    value_dim = value_BKTD.shape[-1]
    # The gradient of a slice is a copy, even of a slice that takes everything.
    return out_BTHD if out_BTHD.shape[-1] == value_dim else out_BTHD[..., :value_dim]


def _join_documents(parts_BHLD: Sequence[torch.Tensor], query_BHTD: torch.Tensor) -> torch.Tensor:
    """Return the documents' results as BTHD rows."""
    parts = [part.transpose(1, 2) for part in parts_BHLD]
    out = parts[0] if len(parts) == 1 else torch.cat([part.flatten(0, 1) for part in parts])
    num_rows, num_heads, num_tokens, _ = query_BHTD.shape
    return out.reshape(num_rows, num_tokens, num_heads, -1)


def _slice_document(document: Document, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the document's slice of each B?T? tensor."""
    rows, start, stop = document
    return [tensor[rows, :, start:stop] for tensor in tensors]
