"""Which documents of a file are used: all, or as many as ``limit`` says; and what they hold."""

from collections.abc import Iterator

import numpy as np

from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.sampler import Indexed, Shuffle

_TOKENS_AT_ONCE = 1 << 22  # tokens whose masks are read at once
_Histogram = tuple[np.ndarray, np.ndarray, Indexed]


def sort_by_length(store: TokenStore, limit: int | None = None) -> _Histogram:
    """Return sizes (rising), how many documents have each, and their numbers in that order.

    With ``limit`` of them, which a permutation of all their numbers draws: always the same ones.
    """
    if limit is None or limit >= store.num_documents:
        return store.length_values, store.length_counts, store.by_length
    numbers = draw_documents(store.num_documents, limit)
    sizes = store.sizes(0, store.num_documents)[numbers]
    values, counts = np.unique(sizes, return_counts=True)
    return values, counts, numbers[np.argsort(sizes, kind="stable")]


def draw_documents(num_documents: int, limit: int) -> np.ndarray:
    """Return the numbers of ``limit`` documents, rising, int64."""
    shuffle = Shuffle(num_documents, "limit")
    return np.sort(np.array([shuffle(at) for at in range(limit)], dtype=np.int64))


def count_learned_tokens(store: TokenStore, seq_len: int, limit: int | None = None) -> int:
    """Return the tokens with loss in one pass over rows of ``seq_len`` tokens.

    Masks are read where the file's own count is of other documents, or of longer ones.
    """
    is_whole = limit is None or limit >= store.num_documents
    if is_whole and store.length_values[-1] <= seq_len:
        return store.attributes.counters.loss_tokens
    if not is_whole:
        masks = (
            _learned_mask(store, int(n)) for n in draw_documents(store.num_documents, limit or 0)
        )
        return sum(int(np.count_nonzero(mask[:seq_len])) for mask in masks)
    return sum(_count_learned_by_piece(store, seq_len))


def count_tokens(store: TokenStore, limit: int | None = None) -> tuple[int, int]:
    """Return the tokens of the documents that are used, and how many of them are learned."""
    if limit is None or limit >= store.num_documents:
        return store.attributes.counters.tokens, store.attributes.counters.loss_tokens
    tokens = learned = 0
    for number in draw_documents(store.num_documents, limit):
        mask = _learned_mask(store, int(number))
        tokens, learned = tokens + len(mask), learned + int(np.count_nonzero(mask))
    return tokens, learned


def _learned_mask(store: TokenStore, document: int) -> np.ndarray:
    """Return the mask of what is learned of a document: of a labelled answer the own side."""
    return store.document(document)[1] if store.labels is None else store.sides(document)[0][1]


def _count_learned_by_piece(store: TokenStore, seq_len: int) -> Iterator[int]:
    """Yield the tokens with loss of all documents, cut at ``seq_len``, piece by piece."""
    offsets = store.offsets[:]
    first = 0
    while first < store.num_documents:
        stop = int(np.searchsorted(offsets, offsets[first] + _TOKENS_AT_ONCE, side="right")) - 1
        stop = min(max(stop, first + 1), store.num_documents)
        at = offsets[first : stop + 1] - offsets[first]
        mask = store.loss_mask[int(offsets[first]) : int(offsets[stop])]
        before = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        ends = np.minimum(at[1:], at[:-1] + seq_len)
        yield int((before[ends] - before[at[:-1]]).sum())
        first = stop
