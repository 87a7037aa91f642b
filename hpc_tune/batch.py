"""One micro-batch of packed rows.

Shapes: B rows, T tokens per row, N tokens with loss. Tokens, labels and positions are int64 of
shape BT; in a batch that waits to be copied to a GPU they are int32, in pinned memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch

from hpc_tune.config.data import DataForm

IGNORED_LABEL = -100


@dataclass(frozen=True)
class PreferencePairs:
    """What a preference objective needs besides the tokens of a micro-batch with P pairs.

    A pair is two documents of one row, the chosen answer before the rejected one, both after the
    same prompt. Rows of labeled answers are pairs without a second document.
    ``num_loss_tokens_P2``: tokens with loss of each document, int64. ``reference_log_probs_P2``:
    summed log-probabilities under the reference, fp32, zeros without a reference.
    ``is_desirable_P``: the labels of labeled answers, bool; empty for pairs. ``kl``: the step's
    mean difference to the reference on mismatched answers, not below 0.
    ``num_local_loss_tokens_P2``: if ranks share rows, the part of ``num_loss_tokens_P2`` on this
    rank; else None.
    """

    num_loss_tokens_P2: torch.Tensor
    reference_log_probs_P2: torch.Tensor
    is_desirable_P: torch.Tensor
    kl: float = 0.0
    num_local_loss_tokens_P2: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors that are not None."""
        counts = () if self.num_local_loss_tokens_P2 is None else (self.num_local_loss_tokens_P2,)
        return (self.num_loss_tokens_P2, self.reference_log_probs_P2, self.is_desirable_P, *counts)

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "PreferencePairs":
        """Return a copy with ``change`` applied to each tensor."""
        num_loss_tokens_P2, reference_log_probs_P2, is_desirable_P, *own_counts = map(
            change, self.tensors
        )
        return PreferencePairs(
            num_loss_tokens_P2, reference_log_probs_P2, is_desirable_P, self.kl, *own_counts
        )


@dataclass(frozen=True)
class Batch:
    """Rows of tokens with their next-token labels and the position of each token in its document.

    ``labels_BT[b, t]`` is the token to predict *at* position t (already shifted), or
    ``IGNORED_LABEL``. ``positions_BT`` restarts at 0 with each document of a packed row: attention
    must not cross such a start. ``num_tokens`` counts the tokens of documents, without padding.
    ``first_row`` is the index of the first row in the global stream of rows, and each further row
    is ``row_stride`` later; these indices seed the randomness. ``document_lengths`` are the lengths
    of each row's documents, with padding as the last one; if empty, positions are read instead.
    ``padding``: the number of padding tokens of each row. ``pairs``: for rows of preferences.
    ``mismatched_batch``: for rows of labeled answers, the same prompts with the answers of other
    rows. ``weights_N``: the loss weight of each token with loss, row by row, fp32; None: all weigh
    1.
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
    pairs: PreferencePairs | None = None
    mismatched_batch: "Batch | None" = None
    weights_N: torch.Tensor | None = None

    def with_kl(self, kl: float) -> "Batch":
        """Return this batch of labeled answers with the step's ``PreferencePairs.kl``."""
        return replace(self, pairs=self.pairs and replace(self.pairs, kl=kl))

    @cached_property
    def num_loss_terms(self) -> float:
        """The number of terms of the loss: pairs, or labeled answers, or the sum of token weights.

        Read it before the batch is moved to a device.
        """
        if self.weights_N is not None:
            return float(self.weights_N.double().sum())
        return self.num_loss_tokens if self.pairs is None else len(self.pairs.num_loss_tokens_P2)

    @property
    def form(self) -> DataForm:
        """What the rows contain."""
        if self.pairs is None:
            return "answers"
        return "pairs" if self.mismatched_batch is None else "labels"

    @property
    def num_bytes(self) -> int:
        """The size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.all_tensors)

    @property
    def all_tensors(self) -> list[torch.Tensor]:
        """All tensors of the batch, of its pairs and of its mismatched batch."""
        tensors = [*self.tensors, *(self.pairs.tensors if self.pairs else ())]
        tensors += self.mismatched_batch.all_tensors if self.mismatched_batch else ()
        return tensors if self.weights_N is None else [*tensors, self.weights_N]

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
        """Return this batch in int32 and pinned memory: half the bytes, copied asynchronously."""
        return self._map_tensors(lambda t: t.int().pin_memory(), lambda t: t.pin_memory())

    @property
    def unpadded_document_lengths(self) -> list[int]:
        """The lengths of all rows' documents, without padding."""
        padding = self.padding or [0] * len(self.document_lengths)
        rows = zip(self.document_lengths, padding, strict=True)
        return [n for row, num_padding in rows for n in (row[:-1] if num_padding else row)]

    def to(self, device: torch.device) -> "Batch":
        """Return this batch on ``device``, as int64; copies to a GPU are asynchronous."""
        if device.type == "cpu":
            return self
        source = self if self.tokens_BT.is_pinned() else self.pinned()
        return source._map_tensors(
            lambda t: t.to(device, non_blocking=True).long(),
            lambda t: t.to(device, non_blocking=True),
        )

    def _map_tensors(
        self,
        change_tokens: Callable[[torch.Tensor], torch.Tensor],
        change: Callable[[torch.Tensor], torch.Tensor],
    ) -> "Batch":
        """Return a copy: ``change_tokens`` applied to tensors of shape BT, ``change`` to the rest.

        A mismatched batch has its own ``pairs``: the same with other numbers of tokens.
        """
        tokens_BT, labels_BT, positions_BT = map(change_tokens, self.tensors)
        return replace(
            self,
            tokens_BT=tokens_BT,
            labels_BT=labels_BT,
            positions_BT=positions_BT,
            pairs=self.pairs and self.pairs.map_tensors(change),
            mismatched_batch=self.mismatched_batch
            and self.mismatched_batch._map_tensors(change_tokens, change),
            weights_N=None if self.weights_N is None else change(self.weights_N),
        )


def read_document_lengths(positions_BT: torch.Tensor) -> list[list[int]]:
    """Return the lengths of each row's documents; a document begins at position 0."""
    starts = [torch.nonzero(positions_T == 0).flatten().tolist() for positions_T in positions_BT]
    ends = positions_BT.shape[1]
    return [[stop - start for start, stop in pairwise([*row, ends])] for row in starts]


def costliest_batch(num_rows: int, seq_len: int) -> Batch:
    """Return rows of one document each with loss on all tokens: the costliest rows."""
    positions_BT = torch.arange(seq_len).expand(num_rows, seq_len).contiguous()
    num_tokens = num_rows * seq_len
    tokens_BT = positions_BT % 32
    lengths = [[seq_len]] * num_rows
    return Batch(
        tokens_BT, tokens_BT, positions_BT, num_tokens, num_tokens, 0, document_lengths=lengths
    )


def padding_batch(first_row: int, form: DataForm = "answers") -> Batch:
    """Return a row of one token without a label, for a rank that only joins collectives.

    It changes no result. Like other batches of ``form``, it may have ``pairs`` (zero of them) and
    a mismatched batch, which is a copy of it.
    """
    zeros_BT = torch.zeros(1, 1, dtype=torch.int64)
    labels_BT = torch.full_like(zeros_BT, IGNORED_LABEL)
    tensors = zeros_BT, labels_BT, zeros_BT.clone()
    batch = Batch(*tensors, 0, 0, first_row, document_lengths=((1,),), padding=(1,))
    if form == "answers":
        return batch
    no_pairs = (
        torch.zeros(0, 2, dtype=torch.int64),
        torch.zeros(0, 2),
        torch.zeros(0, dtype=torch.bool),
    )
    batch = replace(batch, pairs=PreferencePairs(*no_pairs))
    return replace(batch, mismatched_batch=batch) if form == "labels" else batch
