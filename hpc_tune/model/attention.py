"""Attention within documents: of a packed row's T x T products, those that count.

transformers keeps the documents of a row apart by a mask of T x T, under which all products are
made and most are thrown away. Here each document is attended to by itself, without a mask: a row of
D equal documents costs 1/D. Layers whose mask says more (a sliding window, a mask that was given)
keep transformers' own way, and so does generation, where no documents are known.

Shapes: B rows, T tokens, H heads, K heads of keys and values, D values per head.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F

NAME = "hpc_tune_documents"
Document = tuple[int, int, int]

# (row, start, stop) of what is being computed with; the backward pass runs in threads of its own.
_documents: Sequence[Document] = ()


@contextmanager
def of_documents(documents: Sequence[Document]) -> Iterator[None]:
    """Let attention work within these documents, which make up all rows; none: as stock does."""
    global _documents
    before, _documents = _documents, documents
    try:
        yield
    finally:
        _documents = before


def remembering_documents(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward``, to be recomputed later for the documents of now."""
    documents = _documents

    def again(*args: Any, **kwargs: Any) -> Any:
        with of_documents(documents):
            return forward(*args, **kwargs)

    return again


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
    if _documents and not says_more and options.get("attention_mask") is None:
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
    if attention_mask is not None or not _documents:
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
    for row, start, stop in _documents:
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
