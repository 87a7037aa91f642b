"""One micro-batch of packed rows.

Shapes: B rows, T tokens per row, N tokens with loss. Tokens, labels and positions are int64 of
shape BT; those that wait for a GPU to copy them are int32, in pinned memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch

from hpc_tune.config.data import Form

IGNORED_LABEL = -100


@dataclass(frozen=True)
class PreferencePairs:
    """What a preference objective needs beside the tokens of a micro-batch with P pairs.

    A pair is two documents of one row, the chosen answer before the rejected one, both after the
    same prompt. Rows of labelled answers are pairs whose second document is missing.
    ``counts_P2``: their tokens with loss, int64. ``reference_P2``: their summed log-probabilities
    under the reference, fp32, zeros where there is none. ``desirable_P``: the labels of labelled
    answers, bool; empty for pairs. ``kl``: the step's mean difference to the reference of
    mismatched answers, not below 0. ``own_counts_P2``: the tokens with loss that this rank has of
    them where ranks share rows, else None: all.
    """

    counts_P2: torch.Tensor
    reference_P2: torch.Tensor
    desirable_P: torch.Tensor
    kl: float = 0.0
    own_counts_P2: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that there are."""
        own = () if self.own_counts_P2 is None else (self.own_counts_P2,)
        return self.counts_P2, self.reference_P2, self.desirable_P, *own

    def map_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "PreferencePairs":
        """Return these with each tensor changed."""
        counts_P2, reference_P2, desirable_P, *own = map(change, self.tensors)
        return PreferencePairs(counts_P2, reference_P2, desirable_P, self.kl, *own)


@dataclass(frozen=True)
class Batch:
    """Rows of tokens with their next-token labels and the position of each token in its document.

    ``labels_BT[b, t]`` is the token to predict *at* position t (already shifted), or
    ``IGNORED_LABEL``. ``positions_BT`` starts again at 0 with each document of a packed row:
    attention must not cross such a start. ``num_tokens`` counts the tokens of documents, without
    padding. ``first_row`` is the index of the first row in the global stream of rows, and each
    further row's is higher by ``row_stride``; they key the randomness. ``document_lengths`` are the
    tokens of each row's documents, padding as the last one; without them positions are read.
    ``padding``: the tokens of each row's padding, which are those of no document. ``pairs``: of
    rows of preferences. ``mismatched``: for rows of labelled answers, the same prompts with
    another's answer. ``weights_N``: what each token with loss counts, row by row, fp32; where it is
    None each counts 1.
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
    mismatched: "Batch | None" = None
    weights_N: torch.Tensor | None = None

    def with_kl(self, kl: float) -> "Batch":
        """Return this batch of labelled answers with the step's ``PreferencePairs.kl``."""
        return replace(self, pairs=self.pairs and replace(self.pairs, kl=kl))

    @cached_property
    def num_terms(self) -> float:
        """What the loss is a sum over: pairs, or labelled answers, or else tokens by their weights.

        It is read before a batch is on a device.
        """
        if self.weights_N is not None:
            return float(self.weights_N.double().sum())
        return self.num_loss_tokens if self.pairs is None else len(self.pairs.counts_P2)

    @property
    def form(self) -> Form:
        """What its rows hold."""
        if self.pairs is None:
            return "answers"
        return "pairs" if self.mismatched is None else "labels"

    @property
    def num_bytes(self) -> int:
        """What its tensors take."""
        return sum(tensor.nbytes for tensor in self.all_tensors)

    @property
    def all_tensors(self) -> list[torch.Tensor]:
        """All that it holds."""
        tensors = [*self.tensors, *(self.pairs.tensors if self.pairs else ())]
        tensors += self.mismatched.all_tensors if self.mismatched else ()
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
        """Return this batch as a GPU copies it: half as many bytes, and the host need not wait."""
        return self._map_tensors(lambda t: t.int().pin_memory(), lambda t: t.pin_memory())

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
        return source._map_tensors(
            lambda t: t.to(device, non_blocking=True).long(),
            lambda t: t.to(device, non_blocking=True),
        )

    def _map_tensors(
        self,
        token_wise: Callable[[torch.Tensor], torch.Tensor],
        other: Callable[[torch.Tensor], torch.Tensor],
    ) -> "Batch":
        """Return this batch with its tensors of shape BT, and all others, changed.

        A mismatched batch has pairs of its own: the same answers with other counts.
        """
        tokens_BT, labels_BT, positions_BT = map(token_wise, self.tensors)
        return replace(
            self,
            tokens_BT=tokens_BT,
            labels_BT=labels_BT,
            positions_BT=positions_BT,
            pairs=self.pairs and self.pairs.map_tensors(other),
            mismatched=self.mismatched and self.mismatched._map_tensors(token_wise, other),
            weights_N=None if self.weights_N is None else other(self.weights_N),
        )


def read_document_lengths(positions_BT: torch.Tensor) -> list[list[int]]:
    """Return the lengths of each row's documents, which begin at position 0."""
    starts = [torch.nonzero(positions_T == 0).flatten().tolist() for positions_T in positions_BT]
    ends = positions_BT.shape[1]
    return [[stop - start for start, stop in pairwise([*row, ends])] for row in starts]


def full_batch(num_rows: int, seq_len: int) -> Batch:
    """Return rows of one document each, all of whose tokens carry loss: the costliest rows."""
    positions_BT = torch.arange(seq_len).expand(num_rows, seq_len).contiguous()
    num_tokens = num_rows * seq_len
    tokens_BT = positions_BT % 32
    lengths = [[seq_len]] * num_rows
    return Batch(
        tokens_BT, tokens_BT, positions_BT, num_tokens, num_tokens, 0, document_lengths=lengths
    )


def empty_batch(first_row: int, form: Form = "answers") -> Batch:
    """Return a row of one token without a label: it joins collectives and changes nothing.

    As other batches of ``form`` it has pairs, none, and a mismatched batch, empty as well.
    """
    zeros_BT = torch.zeros(1, 1, dtype=torch.int64)
    labels_BT = torch.full_like(zeros_BT, IGNORED_LABEL)
    tensors = zeros_BT, labels_BT, zeros_BT.clone()
    batch = Batch(*tensors, 0, 0, first_row, document_lengths=((1,),), padding=(1,))
    if form == "answers":
        return batch
    none = torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2), torch.zeros(0, dtype=torch.bool)
    batch = replace(batch, pairs=PreferencePairs(*none))
    return replace(batch, mismatched=batch) if form == "labels" else batch
