"""Rows of documents -> batches.

    row number -> documents (order.py) -> their sides (TokenStore) -> Batch, with PreferencePairs

For pairs, the chosen answer is followed by the rejected one in the same row. For labeled answers,
the batch holds the rows' own answers, and ``mismatched_batch`` other rows' answers to the same
prompts.

Shapes: B rows, T tokens per row, P pairs or labeled answers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from hpc_tune.batch import IGNORED_LABEL, Batch, PreferencePairs, padding_batch
from hpc_tune.config.data import DataForm
from hpc_tune.data.hdf5_format import TokensAndMask, TokenStore
from hpc_tune.data.order import Indexable, MixturePhase, PackedSampler, SampleOrder, Shuffle
from hpc_tune.errors import ConfigError, DataError

# -- Which documents of a file are used (all, or as many as ``document_limit`` says), and their
# tokens.


_TOKENS_PER_READ = 1 << 22  # tokens whose masks are read at once
_DocumentsByLength = tuple[np.ndarray, np.ndarray, Indexable]


def sort_by_length(store: TokenStore, document_limit: int | None = None) -> _DocumentsByLength:
    """Return sizes (rising), how many documents have each, and document numbers in that order."""
    indices = _used_documents(store, document_limit)
    if indices is None:
        return store.length_values, store.length_counts, store.documents_by_length
    packed_lengths = store.packed_lengths(0, store.num_documents)[indices]
    values, counts = np.unique(packed_lengths, return_counts=True)
    return values, counts, indices[np.argsort(packed_lengths, kind="stable")]


def select_documents(num_documents: int, document_limit: int) -> np.ndarray:
    """Return the numbers of ``document_limit`` documents, rising, int64; always the same ones."""
    shuffle = Shuffle(num_documents, "limit")
    return np.sort(np.array([shuffle(index) for index in range(document_limit)], dtype=np.int64))


def count_learned_tokens(store: TokenStore, seq_len: int, document_limit: int | None = None) -> int:
    """Return the number of tokens with loss in one pass over rows of ``seq_len`` tokens.

    Masks are read if the file's own count includes other documents, or longer ones.
    """
    indices = _used_documents(store, document_limit)
    if indices is not None:
        masks = (_learned_mask(store, int(number)) for number in indices)
        return sum(int(np.count_nonzero(mask[:seq_len])) for mask in masks)
    if store.length_values[-1] <= seq_len:
        return store.attributes.counters.loss_tokens
    return sum(_count_learned_tokens_by_range(store, seq_len))


def count_tokens(store: TokenStore, document_limit: int | None = None) -> tuple[int, int]:
    """Return how many tokens the used documents have, and how many of them are learned."""
    indices = _used_documents(store, document_limit)
    if indices is None:
        return store.attributes.counters.tokens, store.attributes.counters.loss_tokens
    num_tokens = num_learned = 0
    for number in indices:
        mask = _learned_mask(store, int(number))
        num_tokens, num_learned = num_tokens + len(mask), num_learned + int(np.count_nonzero(mask))
    return num_tokens, num_learned


def _used_documents(store: TokenStore, document_limit: int | None) -> np.ndarray | None:
    """Return the numbers of the documents that are used, rising; None if all are."""
    if document_limit is None or document_limit >= store.num_documents:
        return None
    return select_documents(store.num_documents, document_limit)


def _learned_mask(store: TokenStore, document: int) -> np.ndarray:
    """Return a document's loss mask; for a labeled answer, that of its own side."""
    return store.document(document)[1] if store.labels is None else store.sides(document)[0][1]


def _count_learned_tokens_by_range(store: TokenStore, seq_len: int) -> Iterator[int]:
    """Yield how many tokens with loss all documents have, cut at ``seq_len``, piece by piece."""
    offsets = store.offsets[:]
    first = 0
    while first < store.num_documents:
        stop = int(np.searchsorted(offsets, offsets[first] + _TOKENS_PER_READ, side="right")) - 1
        stop = min(max(stop, first + 1), store.num_documents)
        local_offsets = offsets[first : stop + 1] - offsets[first]
        mask = store.loss_mask[int(offsets[first]) : int(offsets[stop])]
        running_sum = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        ends = np.minimum(local_offsets[1:], local_offsets[:-1] + seq_len)
        yield int((running_sum[ends] - running_sum[local_offsets[:-1]]).sum())
        first = stop


# -- Rows of documents, and batches of rows.


ROW_WIDTH_MULTIPLE = 8


class Rows(Protocol):
    """A stream of rows, from one file or from several."""

    form: DataForm
    seq_len: int
    has_weights: bool

    @property
    def num_rows(self) -> int:
        """Rows per epoch."""

    @property
    def padding(self) -> float:
        """The share of an epoch's tokens that packing leaves empty."""

    def epoch_at(self, stream_row: int) -> float:
        """Return how many epochs come before a row of the stream."""

    def row_at(self, epochs: float) -> int:
        """Return the row of the stream before which ``epochs`` epochs are over."""

    def read(self, stream_row: int) -> "RowDocuments":
        """Return a row's documents."""

    def state(self) -> dict[str, Any]:
        """Return what identifies this stream, saved with positions in it, in JSON types."""

    def require_state(self, state: Mapping[str, Any]) -> None:
        """Check that a position is in this stream; ConfigError if it is in another."""


@dataclass(frozen=True)
class RowDocuments:
    """The P documents of a row, with the ``sides`` of each.

    ``reference_log_probs_P2``: fp32, zeros without a reference. ``desirable_labels``: for labeled
    answers.
    """

    sides: Sequence[Sequence[TokensAndMask]]
    reference_log_probs_P2: np.ndarray
    desirable_labels: Sequence[bool] = ()


class PackedRows:
    """The rows of a store: packed once, read when a batch is built from them."""

    def __init__(
        self, store: TokenStore, order: SampleOrder, document_limit: int | None = None
    ) -> None:
        """Pack the store's length histogram, or that of ``document_limit`` documents of it.

        Raises:
            DataError: if preferences are longer than a row: a cut would lose part of an answer.
        """
        values, counts, indices = sort_by_length(store, document_limit)
        longest = int(values[-1])
        if store.form != "answers" and longest > order.seq_len:
            description = "both answers together" if store.form == "pairs" else "with their prompts"
            raise DataError(
                f"{store.path} has preferences of up to {longest} tokens, {description}, "
                f"but data.seq_len={order.seq_len} would cut them; set data.seq_len={longest} or"
                " more, or prepare the data again with this one"
            )
        self.store, self.form, self.seq_len = store, store.form, order.seq_len
        self.has_weights = store.attributes.has_weights
        self._reference_D2: np.ndarray | None = None
        self.sampler = PackedSampler(values, counts, indices, order)

    @property
    def num_rows(self) -> int:
        """Rows per epoch, in which each document comes once."""
        return self.sampler.num_rows

    @property
    def padding(self) -> float:
        """The share of an epoch's tokens that packing leaves empty."""
        return self.sampler.padding

    def epoch_at(self, stream_row: int) -> float:
        """Return how many epochs come before a row of the stream."""
        return stream_row / self.num_rows

    def row_at(self, epochs: float) -> int:
        """Return the row of the stream before which ``epochs`` epochs are over."""
        return math.ceil(epochs * self.num_rows)

    def state(self) -> dict[str, Any]:
        """Return what identifies this stream, saved with positions in it."""
        return {"content": self.store.attributes.content}

    def require_state(self, state: Mapping[str, Any]) -> None:
        """Check that a position is in this stream.

        Raises:
            ConfigError: if it is in other data.
        """
        if state.get("content") != self.store.attributes.content:
            raise ConfigError(
                f"data.path={self.store.attributes.source} is not the data this run was trained "
                "on, or it was prepared in another way. Give the old data, or another run.dir; if "
                "hpc_tune was updated since, give the .h5 file that it prepared before, which is "
                "in the run's folder data"
            )

    def set_reference_log_probs(self, reference_D2: np.ndarray) -> None:
        """Set the log-probabilities under the reference model, fp32 [num_documents, 2]."""
        expected = (self.store.num_documents, 2)
        assert reference_D2.shape == expected, f"{reference_D2.shape}, expected {expected}"
        self._reference_D2 = reference_D2.astype(np.float32, copy=False)

    def documents_in(self, batch: Batch) -> list[int]:
        """Return the numbers of a batch's documents, in order (for preferences, that of P)."""
        if not batch.num_tokens:
            return []
        return [document for row in batch.rows for document in self.sampler.documents_of(row)]

    def read(self, stream_row: int) -> RowDocuments:
        """Return a row's documents."""
        store, indices = self.store, self.sampler.documents_of(stream_row)
        reference_log_probs_P2 = np.zeros((len(indices), 2), dtype=np.float32)
        if self._reference_D2 is not None:
            reference_log_probs_P2[:] = self._reference_D2[indices]
        labels = store.labels
        desirable_labels = [] if labels is None else [bool(labels[number]) for number in indices]
        return RowDocuments(
            [store.sides(number) for number in indices], reference_log_probs_P2, desirable_labels
        )


def make_micro_batches(
    rows: Rows, own_rows: range, max_rows_per_rank: int, micro_size: int
) -> list[Batch]:
    """Build as many micro-batches of ``own_rows`` as a rank with ``max_rows_per_rank`` rows has."""
    batches = []
    for start in range(0, max_rows_per_rank, micro_size):
        indices = own_rows[start : start + micro_size]
        batches.append(
            _read_batch(rows, indices, own_rows.step)
            if indices
            else padding_batch(own_rows.start, rows.form)
        )
    return batches


def _read_batch(rows: Rows, indices: range, stride: int) -> Batch:
    read_rows = [rows.read(number) for number in indices]
    lay_out = partial(make_batch, seq_len=rows.seq_len, first_row=indices[0], row_stride=stride)
    if rows.form == "pairs":
        pair_batch = lay_out([[side for sides in row.sides for side in sides] for row in read_rows])
        return replace(pair_batch, pairs=_make_pairs(read_rows))
    batch = lay_out([[sides[0] for sides in row.sides] for row in read_rows])
    if rows.form == "answers":
        return batch
    mismatch = lay_out([[sides[1] for sides in row.sides if len(sides) > 1] for row in read_rows])
    pairs = _make_pairs(read_rows)
    # Each batch counts only the tokens of its own side.
    num_loss_tokens_P2 = pairs.num_loss_tokens_P2
    first, second = (num_loss_tokens_P2 * torch.tensor(side) for side in ([1, 0], [0, 1]))
    mismatch = replace(mismatch, pairs=replace(pairs, num_loss_tokens_P2=second))
    return replace(batch, pairs=replace(pairs, num_loss_tokens_P2=first), mismatched_batch=mismatch)


def _make_pairs(rows: Sequence[RowDocuments]) -> PreferencePairs:
    documents = [sides for row in rows for sides in row.sides]
    num_loss_tokens_P2 = np.zeros((len(documents), 2), dtype=np.int64)
    for number, sides in enumerate(documents):
        num_loss_tokens_P2[number, : len(sides)] = [np.count_nonzero(mask[1:]) for _, mask in sides]
    return PreferencePairs(
        torch.from_numpy(num_loss_tokens_P2),
        torch.from_numpy(np.concatenate([row.reference_log_probs_P2 for row in rows])),
        torch.tensor([label for row in rows for label in row.desirable_labels], dtype=torch.bool),
    )


def make_batch(
    rows: list[list[TokensAndMask]], seq_len: int, first_row: int, row_stride: int = 1
) -> Batch:
    """Lay rows of documents (tokens, loss mask) out as a batch, padded to one width.

    The width is the longest row's, rounded up to ROW_WIDTH_MULTIPLE, at most ``seq_len``. Padding
    is a document of its own: its positions begin at 0, its labels are ignored. An fp32 mask holds
    weights; in a batch with such a mask, tokens under another mask have weight 1.
    """
    longest = max(sum(min(len(tokens), seq_len) for tokens, _ in row) for row in rows)
    width = min(-(-max(longest, 1) // ROW_WIDTH_MULTIPLE) * ROW_WIDTH_MULTIPLE, seq_len)
    tokens_BT = np.zeros((len(rows), width), dtype=np.int64)
    labels_BT = np.full((len(rows), width), IGNORED_LABEL, dtype=np.int64)
    positions_BT = np.empty((len(rows), width), dtype=np.int64)
    all_positions = np.arange(width)
    num_loss_tokens = num_tokens = 0
    has_weights = any(mask.dtype == np.float32 for row in rows for _, mask in row)
    document_lengths, padding, weights = [], [], []
    for number, row in enumerate(rows):
        offset, lengths = 0, []
        for tokens, loss_mask in row:
            length = min(len(tokens), seq_len)
            tokens_BT[number, offset : offset + length] = tokens[:length]
            positions_BT[number, offset : offset + length] = all_positions[:length]
            learned_indices = np.flatnonzero(loss_mask[1:length])
            labels_BT[number, offset + learned_indices] = tokens[1:length][learned_indices]
            num_loss_tokens += len(learned_indices)
            weights.append(loss_mask[1:length][learned_indices].astype(np.float32))
            offset += length
            lengths.append(length)
        num_tokens += offset
        document_lengths.append([length for length in (*lengths, width - offset) if length])
        padding.append(width - offset)
        positions_BT[number, offset:] = all_positions[: width - offset]
    return Batch(
        torch.from_numpy(tokens_BT),
        torch.from_numpy(labels_BT),
        torch.from_numpy(positions_BT),
        num_loss_tokens,
        num_tokens,
        first_row,
        row_stride,
        document_lengths,
        padding,
        weights_N=torch.from_numpy(np.concatenate(weights)) if has_weights else None,
    )


# -- The rows of a mixture: each from one source, in the order of its phase (order.py).


class MixedRows:
    """A stream of rows from several sources; ``phases``: a run's earlier ones and the current one.

    Rows before the current phase are never read again.
    """

    def __init__(self, sources: Mapping[str, PackedRows], phases: list[MixturePhase]) -> None:
        """``sources``: by name, in the current phase's order, all of one form and seq_len."""
        self.phase, self.phases = phases[-1], phases
        assert list(sources) == list(self.phase.parts), f"{[*sources]}, {[*self.phase.parts]}"
        self.source_rows, self.names = list(sources.values()), list(sources)
        self._rows_before = [part.rows_before for part in self.phase.parts.values()]
        self._interleaving = self.phase.interleaving()
        self._num_rows = self.phase.num_rows
        self.form: DataForm = self.source_rows[0].form
        self.seq_len = self.source_rows[0].seq_len
        self.has_weights = any(rows.has_weights for rows in self.source_rows)

    @property
    def num_rows(self) -> int:
        """Rows per epoch: see ``MixturePhase``."""
        return self._num_rows

    @property
    def padding(self) -> float:
        """The share of an epoch's tokens that packing leaves empty."""
        counts = self._interleaving.counts(self._num_rows)
        empty = sum(n * rows.padding for n, rows in zip(counts, self.source_rows, strict=True))
        return empty / self._num_rows

    def epoch_at(self, stream_row: int) -> float:
        """Return how many epochs come before a row of the stream."""
        return self.phase.epoch_at(stream_row)

    def row_at(self, epochs: float) -> int:
        """Return the row of the stream before which ``epochs`` epochs are over."""
        return self.phase.row_at(epochs)

    def source_and_row(self, stream_row: int) -> tuple[int, int]:
        """Return the number of a row's source, and which row of that source's stream it is."""
        position = stream_row - self.phase.first_row
        assert position >= 0, f"row {stream_row} is in an earlier phase"
        source, num_before = self._interleaving.source_and_row_at(position)
        return source, self._rows_before[source] + num_before

    def read(self, stream_row: int) -> RowDocuments:
        """Return a row's documents."""
        source, row = self.source_and_row(stream_row)
        return self.source_rows[source].read(row)

    def state(self) -> dict[str, Any]:
        """Return what identifies this stream, saved with positions in it."""
        return {"phases": [asdict(phase) for phase in self.phases]}

    def require_state(self, state: Mapping[str, Any]) -> None:
        """Check that a position is in this stream, or in one that this stream continues.

        Raises:
            ConfigError: if it is in another. ``determine_phases`` decides what may continue.
        """
        saved_phases, own_phases = state.get("phases"), self.state()["phases"]
        if not saved_phases or saved_phases != own_phases[: len(saved_phases)]:
            raise ConfigError(
                "data.sources are not what this run was trained on. Give the old sources, or "
                "another run.dir"
            )
