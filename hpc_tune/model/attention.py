"""Attention within documents: of a packed row's T x T products, those that count.

transformers keeps the documents of a row apart by a mask of T x T, under which all products are
made and most are thrown away. Here each document is attended to by itself, without a mask: a row of
D equal documents costs 1/D. Layers whose mask says more (a sliding window, a mask that was given)
keep transformers' own way, and so does generation, where no documents are known.

Shapes: B rows, T tokens, H heads, K heads of keys and values, D values per head.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hpc_tune.model.current import Current

NAME = "hpc_tune_documents"
Document = tuple[int, int, int]

# (row, start, stop) of each; they make up all rows. None: attention is transformers' own.
DOCUMENTS: Current[Sequence[Document]] = Current(())


def documents_in(positions_BT: torch.Tensor) -> list[Document]:
    """Return (row, start, stop) of each document in order; none if no row has more than one."""
    num_rows, num_tokens = positions_BT.shape
    starts = [(row, start) for row, start in torch.nonzero(positions_BT == 0).tolist()]
    if len(starts) == num_rows:
        return []
    ends = [start or num_tokens for _, start in starts[1:]] + [num_tokens]
    return [(row, start, end) for (row, start), end in zip(starts, ends, strict=True)]


def use_document_attention(model: Any) -> bool:
    """Let a transformers model attend within documents, if its attention can be replaced."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if model.config._attn_implementation != "sdpa" or not model._can_set_attn_implementation():
        return False
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)
    return True


def _mask(*args: Any, **options: Any) -> torch.Tensor | None:
    from transformers.masking_utils import sdpa_mask

    says_more = options.get("local_size") is not None or options.get("use_vmap")
    if DOCUMENTS.value and not says_more and options.get("attention_mask") is None:
        return None
    mask: torch.Tensor | None = sdpa_mask(*args, **options)
    return mask


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
    if attention_mask is not None or not DOCUMENTS.value:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        stock: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module,
            query_BHTD,
            key_BKTD,
            value_BKTD,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **options,
        )
        return stock
    parts = []
    for row, start, stop in DOCUMENTS.value:
        here = slice(row, row + 1), slice(None), slice(start, stop)
        part_1HLD = F.scaled_dot_product_attention(
            query_BHTD[here],
            key_BKTD[here],
            value_BKTD[here],
            dropout_p=dropout,
            is_causal=True,
            scale=scaling,
            enable_gqa=query_BHTD.shape[1] != key_BKTD.shape[1],
        )
        parts.append(part_1HLD.squeeze(0).transpose(0, 1))
    num_rows, num_heads, num_tokens, _ = query_BHTD.shape
    return torch.cat(parts).view(num_rows, num_tokens, num_heads, -1), None
