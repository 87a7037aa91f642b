"""One micro-batch of packed rows.

Shapes: B rows, T tokens per row. All three tensors are int64 of shape BT; those that wait for a GPU
to copy them are int32, in pinned memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

IGNORED_LABEL = -100


@dataclass(frozen=True)
class Batch:
    """Rows of tokens with their next-token labels and the position of each token in its document.

    ``labels_BT[b, t]`` is the token to predict *at* position t (already shifted), or
    ``IGNORED_LABEL``. ``positions_BT`` starts again at 0 with each document of a packed row:
    attention must not cross such a start. ``num_tokens`` counts the tokens of documents, without
    padding. ``first_row`` is the index of the first row in the global stream of rows, and each
    further row's is higher by ``row_stride``; they key the randomness. ``document_lengths`` are the
    tokens of each row's documents, padding as the last one; without them positions are read.
    ``padding``: the tokens of each row's padding, which are those of no document.
    """

    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor
    num_loss_tokens: int
    num_tokens: int
    first_row: int
    row_stride: int = 1
    document_lengths: Sequence[Sequence[int]] = ()
    padding: Sequence[int] = ()

    @property
    def rows(self) -> range:
        """The indices of the rows in the global stream."""
        num, stride = self.tokens_BT.shape[0], self.row_stride
        return range(self.first_row, self.first_row + num * stride, stride)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens, labels and positions."""
        return self.tokens_BT, self.labels_BT, self.positions_BT

    def pinned(self) -> "Batch":
        """Return this batch as a GPU copies it: half as many bytes, and the host need not wait."""
        return self._with(tensor.int().pin_memory() for tensor in self.tensors)

    @property
    def real_lengths(self) -> list[int]:
        """The tokens of all rows' documents, without padding."""
        padding = self.padding or [0] * len(self.document_lengths)
        rows = zip(self.document_lengths, padding, strict=True)
        return [length for row, padded in rows for length in (row[:-1] if padded else row)]

    def to(self, device: torch.device) -> "Batch":
        """Return this batch on ``device``, as int64; a GPU copies it while the host goes on."""
        if device.type == "cpu":
            return self
        source = self if self.tokens_BT.is_pinned() else self.pinned()
        return self._with(t.to(device, non_blocking=True).long() for t in source.tensors)

    def _with(self, tensors: Iterable[torch.Tensor]) -> "Batch":
        tokens_BT, labels_BT, positions_BT = tensors
        return replace(self, tokens_BT=tokens_BT, labels_BT=labels_BT, positions_BT=positions_BT)


def full_batch(num_rows: int, seq_len: int) -> Batch:
    """Return rows of one document each, all of whose tokens carry loss: the costliest rows."""
    positions_BT = torch.arange(seq_len).expand(num_rows, seq_len).contiguous()
    num_tokens = num_rows * seq_len
    tokens_BT = positions_BT % 32
    lengths = [[seq_len]] * num_rows
    return Batch(
        tokens_BT, tokens_BT, positions_BT, num_tokens, num_tokens, 0, document_lengths=lengths
    )


def empty_batch(first_row: int) -> Batch:
    """Return a row of one token without a label: it joins collectives and changes nothing."""
    zeros_BT = torch.zeros(1, 1, dtype=torch.int64)
    labels_BT = torch.full_like(zeros_BT, IGNORED_LABEL)
    tensors = zeros_BT, labels_BT, zeros_BT.clone()
    return Batch(*tensors, 0, 0, first_row, document_lengths=((1,),), padding=(1,))
