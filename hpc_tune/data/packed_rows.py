"""Rows of documents -> batches.

    row number -> documents (sampler.py) -> their sides (TokenStore) -> Batch, with Pairs

Of pairs, the chosen answer is followed by the rejected one in the same row. Of labelled answers,
the batch holds those that rows give, and ``mismatched`` those of other rows after their prompts.

Shapes: B rows, T tokens per row, P pairs or labelled answers.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from hpc_tune.batch import IGNORED_LABEL, Batch, Pairs, empty_batch
from hpc_tune.data.hdf5_format import TokenStore
from hpc_tune.data.sampler import PackedSampler, SampleOrder
from hpc_tune.errors import DataError

ROUND_TO = 8
Side = tuple[np.ndarray, np.ndarray]  # tokens and loss mask, of fp32 if it has weights


class PackedRows:
    """The rows of a store: packed once, read when a batch is made of them."""

    def __init__(self, store: TokenStore, order: SampleOrder) -> None:
        """Pack the store's length histogram.

        Raises:
            DataError: for preferences that are longer than a row: cut, they would lose an answer.
        """
        longest = int(store.length_values[-1])
        if store.form != "answers" and longest > order.seq_len:
            raise DataError(
                f"{store.path} has preferences of up to {longest} tokens, both answers together, "
                f"and data.seq_len={order.seq_len} would cut them; set data.seq_len={longest} or"
                " more, or prepare the data again with this one"
            )
        self._store, self._form, self._seq_len = store, store.form, order.seq_len
        self._reference_D2: np.ndarray | None = None
        self.sampler = PackedSampler(
            store.length_values, store.length_counts, store.by_length, order
        )

    def set_reference(self, reference_D2: np.ndarray) -> None:
        """Give the log-probabilities under the reference, fp32 [num_documents, 2]."""
        expected = (self._store.num_documents, 2)
        assert reference_D2.shape == expected, f"{reference_D2.shape}, expected {expected}"
        self._reference_D2 = reference_D2.astype(np.float32, copy=False)

    def batches(self, own_rows: range, most_rows: int, micro_size: int) -> list[Batch]:
        """Build the micro-batches of ``own_rows``, as many as a rank with ``most_rows`` has."""
        batches = []
        for at in range(0, most_rows, micro_size):
            rows = own_rows[at : at + micro_size]
            batches.append(
                self._batch(rows, own_rows.step)
                if rows
                else empty_batch(own_rows.start, self._form)
            )
        return batches

    def documents_in(self, batch: Batch) -> list[int]:
        """Return the numbers of a batch's documents, in their order: of pairs, that of P."""
        if not batch.num_tokens:
            return []
        return [document for row in batch.rows for document in self.sampler.documents_of(row)]

    def _batch(self, rows: range, stride: int) -> Batch:
        store = self._store
        numbers = [self.sampler.documents_of(row) for row in rows]
        if self._form == "answers":
            laid = [[store.document(number) for number in row] for row in numbers]
            return make_batch(laid, self._seq_len, rows[0], stride)
        read = [[store.sides(number) for number in row] for row in numbers]
        pairs = self._pairs([d for row in numbers for d in row], [p for row in read for p in row])
        if self._form == "pairs":
            laid = [[side for sides in row for side in sides] for row in read]
            return replace(make_batch(laid, self._seq_len, rows[0], stride), pairs=pairs)
        laid = [[sides[0] for sides in row] for row in read]
        own = make_batch(laid, self._seq_len, rows[0], stride)
        laid = [[sides[1] for sides in row if len(sides) > 1] for row in read]
        others = make_batch(laid, self._seq_len, rows[0], stride)
        # Each with the tokens that it has.
        counts_P2 = pairs.counts_P2
        first, second = (counts_P2 * torch.tensor(side) for side in ([1, 0], [0, 1]))
        others = replace(others, pairs=replace(pairs, counts_P2=second))
        return replace(own, pairs=replace(pairs, counts_P2=first), mismatched=others)

    def _pairs(self, numbers: Sequence[int], read: Sequence[Sequence[Side]]) -> Pairs:
        counts_P2 = np.zeros((len(read), 2), dtype=np.int64)
        for number, sides in enumerate(read):
            counts_P2[number, : len(sides)] = [np.count_nonzero(mask[1:]) for _, mask in sides]
        reference_P2 = np.zeros((len(read), 2), dtype=np.float32)
        if self._reference_D2 is not None:
            reference_P2[:] = self._reference_D2[numbers]
        labels = self._store.labels
        desirable_P = [] if labels is None else [bool(labels[number]) for number in numbers]
        return Pairs(
            torch.from_numpy(counts_P2),
            torch.from_numpy(reference_P2),
            torch.tensor(desirable_P, dtype=torch.bool),
        )


def make_batch(
    rows: list[list[tuple[np.ndarray, np.ndarray]]],
    seq_len: int,
    first_row: int,
    row_stride: int = 1,
) -> Batch:
    """Lay rows of documents (tokens, loss mask) out as a batch, padded to the longest row.

    The padding is a document of its own: its positions begin at 0, its labels are ignored. A mask
    of fp32 holds weights.
    """
    longest = max(sum(min(len(tokens), seq_len) for tokens, _ in row) for row in rows)
    width = min(-(-max(longest, 1) // ROUND_TO) * ROUND_TO, seq_len)
    tokens_BT = np.zeros((len(rows), width), dtype=np.int64)
    labels_BT = np.full((len(rows), width), IGNORED_LABEL, dtype=np.int64)
    positions_BT = np.empty((len(rows), width), dtype=np.int64)
    counting = np.arange(width)
    num_loss_tokens = num_tokens = 0
    document_lengths, padding, weights = [], [], []
    for number, row in enumerate(rows):
        at, lengths = 0, []
        for tokens, loss_mask in row:
            length = min(len(tokens), seq_len)
            tokens_BT[number, at : at + length] = tokens[:length]
            positions_BT[number, at : at + length] = counting[:length]
            learned = np.flatnonzero(loss_mask[1:length])
            labels_BT[number, at + learned] = tokens[1:length][learned]
            num_loss_tokens += len(learned)
            if loss_mask.dtype == np.float32:
                weights.append(loss_mask[1:length][learned])
            at += length
            lengths.append(length)
        num_tokens += at
        document_lengths.append([length for length in (*lengths, width - at) if length])
        padding.append(width - at)
        positions_BT[number, at:] = counting[: width - at]
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
        weights_N=torch.from_numpy(np.concatenate(weights)) if weights else None,
    )
