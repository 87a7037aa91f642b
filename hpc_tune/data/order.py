"""The sampler: which documents share a row, and in which order the rows come. Pure.

    histogram of lengths -> patterns (a multiset of lengths, and how many rows have it)
    stream row -> epoch, position -> shuffled row -> pattern, k -> the k-th document of a length

Packing works on the histogram, not on documents (M. M. Krell et al., "Efficient Sequence Packing
without Cross-contamination", arXiv:2107.02027): ten million documents pack in the time that their
few thousand lengths take, and no array per document or per row is ever made. The order is a pure
function of (seed, epoch, position). It does not depend on the number of ranks, and any position in
it is computed directly.
"""

import hashlib
import heapq
import itertools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
from pydantic import ConfigDict, TypeAdapter

from hpc_tune.units import format_count

ORDER_VERSION = 1  # to be changed whenever a seed gives another order than before
_LengthsAndCopies = tuple[tuple[int, int], ...]
_FEISTEL_ROUNDS = 6
_MASK_64_BITS = (1 << 64) - 1


class Indexable(Protocol):
    """What has a value at each index: a list, an array or a column of prepared data."""

    def __getitem__(self, index: Any, /) -> Any:
        """Return the value at an index."""


@dataclass(frozen=True)
class SampleOrder:
    """What determines, besides the data, which documents are in which row of the stream.

    ``packing``: whether a row of ``seq_len`` tokens holds several documents, or only one.
    """

    seq_len: int
    packing: bool
    seed: int


def source_seed(seed: int, source: str) -> int:
    """Return the seed of a source of a mixture, so that other sources do not change its order."""
    digest = hashlib.blake2b(repr((seed, source)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class RowPattern:
    """``num_rows`` rows that each hold ``copies`` documents of each ``length`` in ``items``."""

    items: _LengthsAndCopies
    num_rows: int


def pack_documents(histogram: dict[int, int], seq_len: int) -> list[RowPattern]:
    """Pack documents {length: count} into rows of ``seq_len`` by best fit decreasing.

    Longest first, each document goes into the fullest row that still has room for it. All documents
    of one length are placed together: rows with the same lengths in them are one pattern with a
    count.
    """
    open_patterns: dict[int, list[RowPattern]] = {}
    spaces: list[int] = []  # the keys of open_patterns, rising

    def put(pattern: RowPattern, space: int) -> None:
        if pattern.num_rows:
            if space not in open_patterns:
                open_patterns[space] = []
                insort(spaces, space)
            open_patterns[space].append(pattern)

    for length in sorted(histogram, reverse=True):
        assert 0 < length <= seq_len, f"length {length} is outside 1..{seq_len}"
        count = histogram[length]
        while count:
            index = bisect_left(spaces, length)
            if index == len(spaces):
                put(RowPattern((), count), seq_len)  # empty rows, more than needed: left out below
                continue
            space = spaces[index]
            pattern = open_patterns[space].pop()
            if not open_patterns[space]:
                del open_patterns[space], spaces[index]
            copies = space // length
            num_full = min(pattern.num_rows, count // copies)
            num_extra = (
                count - num_full * copies if num_full < pattern.num_rows else 0
            )  # fewer than copies
            put(RowPattern((*pattern.items, (length, copies)), num_full), space - copies * length)
            put(
                RowPattern((*pattern.items, (length, num_extra)), int(num_extra > 0)),
                space - num_extra * length,
            )
            num_untouched = pattern.num_rows - num_full - bool(num_extra)
            put(RowPattern(pattern.items, num_untouched), space)
            count -= num_full * copies + num_extra
    return [
        pattern for _, group in sorted(open_patterns.items()) for pattern in group if pattern.items
    ]


def pack_one_per_row(histogram: dict[int, int]) -> list[RowPattern]:
    """Give each document a row of its own."""
    return [RowPattern(((length, 1),), count) for length, count in sorted(histogram.items())]


class PackedSampler:
    """The endless stream of rows: each epoch has each document once, in newly composed rows."""

    def __init__(
        self,
        length_values: np.ndarray,
        length_counts: np.ndarray,
        documents_by_length: Indexable,
        order: SampleOrder,
    ) -> None:
        """Pack the histogram (``length_values`` rising, ``length_counts``).

        ``documents_by_length`` holds document numbers sorted by length; documents of ``seq_len``
        or more tokens, at its end, count as ``seq_len``.
        """
        clipped_lengths = np.minimum(length_values, order.seq_len)
        lengths, first = np.unique(clipped_lengths, return_index=True)
        counts = np.add.reduceat(length_counts, first)
        starts = np.cumsum(counts) - counts
        self._counts = dict(zip(lengths.tolist(), counts.tolist(), strict=True))
        self._starts = dict(zip(lengths.tolist(), starts.tolist(), strict=True))
        self._documents_by_length, self._order = documents_by_length, order
        self.patterns = (
            pack_documents(self._counts, order.seq_len)
            if order.packing
            else pack_one_per_row(self._counts)
        )
        self._firsts = _count_earlier_documents(self.patterns)
        self._row_stops = np.cumsum([pattern.num_rows for pattern in self.patterns]).tolist()
        self.num_rows: int = self._row_stops[-1]
        self._epoch = -1
        self._shuffles: dict[int, Shuffle] = {}

    @property
    def padding(self) -> float:
        """The share of an epoch's ``num_rows * seq_len`` places that hold no document."""
        num_tokens = sum(length * count for length, count in self._counts.items())
        return 1 - num_tokens / (self.num_rows * self._order.seq_len)

    def documents_of(self, stream_row: int) -> list[int]:
        """Return the document numbers in row ``epoch * num_rows + position`` of the stream."""
        epoch, position = divmod(stream_row, self.num_rows)
        row = self._shuffle(epoch, 0, self.num_rows)(position)
        number = bisect_right(self._row_stops, row)
        pattern = self.patterns[number]
        row -= self._row_stops[number] - pattern.num_rows
        documents = []
        for (length, copies), first in zip(pattern.items, self._firsts[number], strict=True):
            shuffle = self._shuffle(epoch, length, self._counts[length])
            for k in range(first + row * copies, first + (row + 1) * copies):
                documents.append(int(self._documents_by_length[self._starts[length] + shuffle(k)]))
        return documents

    def _shuffle(self, epoch: int, length: int, n: int) -> "Shuffle":
        """Return the epoch's shuffle of the documents of one length; length 0 means of the rows."""
        if epoch != self._epoch:
            self._epoch, self._shuffles = epoch, {}
        if length not in self._shuffles:
            self._shuffles[length] = Shuffle(n, self._order.seed, epoch, length)
        return self._shuffles[length]


class Shuffle:
    """The pseudo-random permutation of range(n) that belongs to a key such as (seed, epoch).

    It is computed element by element, without memory: a Feistel network over Z_a x Z_b with a * b
    just above n, so that few elements leave the range; one that does is permuted again until it is
    back in the range ("cycle walking"). J. Black and P. Rogaway, "Ciphers with arbitrary finite
    domains", CT-RSA 2002. It is not a cipher: the round function is a multiply-and-shift hash.
    """

    __slots__ = ("_a", "_b", "_keys", "n")

    def __init__(self, n: int, *key: int | str) -> None:
        """Derive the round keys; costs the same for any n."""
        self.n = n
        self._a = math.isqrt(max(n - 1, 0)) + 1
        self._b = -(-n // self._a)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _FEISTEL_ROUNDS).digest()
        self._keys = [
            int.from_bytes(digest[offset : offset + 8], "little")
            for offset in range(0, 8 * _FEISTEL_ROUNDS, 8)
        ]

    def __call__(self, index: int) -> int:
        """Return the element at ``index`` of the permutation."""
        a, b = self._a, self._b
        while True:
            left, right = divmod(index, b)
            for number, key in enumerate(self._keys):
                if number & 1:
                    right = (right + _hash_64_bits(left ^ key)) % b
                else:
                    left = (left + _hash_64_bits(right ^ key)) % a
            index = left * b + right
            if index < self.n:
                return index


def _count_earlier_documents(patterns: list[RowPattern]) -> list[list[int]]:
    """Return, per pattern and item, how many documents of its length earlier patterns use."""
    used_counts: dict[int, int] = {}
    firsts = []
    for pattern in patterns:
        firsts.append([used_counts.get(length, 0) for length, _ in pattern.items])
        for length, copies in pattern.items:
            used_counts[length] = used_counts.get(length, 0) + copies * pattern.num_rows
    return firsts


def _hash_64_bits(value: int) -> int:
    """Hash 64 bits (the finalizer of splitmix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK_64_BITS
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK_64_BITS
    return value ^ (value >> 31)


# -- The order of a mixture: which source each row of the stream comes from. Pure.
#
#     weights, sizes of the sources -> rows per unit of the run (rates) -> Interleaving
#     stream row -> phase -> source, and which row of that source's own stream
#
# Two sources take turns by the largest deficit: the next row comes from the source that is further
# behind its share, so that after n rows each has its share of n to within half a row. Among more
# sources, the two with the smallest rates are merged into one, repeatedly, as in Huffman coding: a
# tree of such pairs. A row's source follows from the row's number alone, by integer arithmetic, not
# by counting. Three sources are within one row of their shares; any number of them within 1.68
# rows, half the sum of the reciprocals of the Fibonacci numbers. (Always choosing the largest
# deficit of all sources is off by as much, and a row is found only by counting from the first.)
#
# A weight is a share of the learned tokens. Each row of a source counts as its mean row, so that
# the order follows from weights and sizes alone, and no document is read for it.


@dataclass(frozen=True)
class MixtureSource:
    """A source in a phase of a mixture.

    ``num_rows`` and ``learned_tokens``: of one pass over it. ``rows_before``: how many of its rows
    earlier phases had. ``content`` and ``limit``: which documents it has. Either ``weight`` (its
    share of the learned tokens, relative to other weights) or ``epochs`` (its passes in an epoch of
    the mixture) is set.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    content: str
    limit: int | None
    num_rows: int
    learned_tokens: int
    weight: float | None = None
    epochs: int | None = None
    rows_before: int = 0

    @property
    def rate(self) -> Fraction:
        """Its number of rows, in a unit that all parts of a phase share."""
        if self.epochs is not None:
            return Fraction(self.epochs * self.num_rows)
        return Fraction(str(self.weight)) * self.num_rows / self.learned_tokens

    @property
    def amount_text(self) -> str:
        """Its epochs or weight in words, as the settings give them."""
        return f"epochs {self.epochs}" if self.weight is None else f"weight {self.weight:g}"


@dataclass(frozen=True)
class MixturePhase:
    """The mixture from stream row ``first_row`` on, before which ``first_epoch`` epochs are over.

    ``parts``: the sources by name, sorted by name, as the order of rows depends on their order.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    parts: dict[str, MixtureSource]
    first_row: int = 0
    first_epoch: float = 0.0

    @property
    def num_rows(self) -> int:
        """The number of rows in an epoch.

        With weights, an epoch has as many learned tokens as all sources together; if the weights
        are in proportion to these, it is one pass over each. With epochs, each has so many passes.
        """
        parts = self.parts.values()
        rates = [part.rate for part in parts]
        if any(part.epochs is not None for part in parts):
            return int(sum(rates))
        weights = sum(Fraction(str(part.weight)) for part in parts)
        return math.ceil(sum(part.learned_tokens for part in parts) * sum(rates) / weights)

    def interleaving(self) -> "Interleaving":
        """Return the order of the sources' rows."""
        return Interleaving([part.rate for part in self.parts.values()])

    def count_rows_before(self, stream_row: int) -> dict[str, int]:
        """Return how many rows of each source come before a row of the stream."""
        counts = self.interleaving().counts(stream_row - self.first_row)
        items = zip(self.parts.items(), counts, strict=True)
        return {name: part.rows_before + count for (name, part), count in items}

    def epoch_at(self, stream_row: int) -> float:
        """Return how many epochs come before a row of the stream."""
        return self.first_epoch + (stream_row - self.first_row) / self.num_rows

    def row_at(self, epochs: float) -> int:
        """Return the row of the stream before which ``epochs`` epochs are over."""
        return self.first_row + math.ceil((epochs - self.first_epoch) * self.num_rows)


def rows_before(phases: Sequence[MixturePhase], stream_row: int) -> dict[str, int]:
    """Return how many rows of each source come before a row of the stream, over all phases."""
    ends = [phase.first_row for phase in phases[1:]] + [stream_row]
    rows: dict[str, int] = {}
    for phase, end in zip(phases, ends, strict=True):
        rows |= phase.count_rows_before(end)
    return rows


@dataclass(frozen=True)
class SourceProgress:
    """How much of a source a run has used at some row of its stream.

    ``asked``: its weight or epochs, or "no longer used". ``learned_tokens``: estimated as ``rows``
    times its mean row. ``share``: of all sources' learned tokens. ``rows_per_pass`` and
    ``learned_per_pass``: rows and learned tokens of one of its ``passes``.
    """

    name: str
    asked: str
    rows: int
    learned_tokens: int
    share: float
    passes: float
    rows_per_pass: int
    learned_per_pass: int

    def __str__(self) -> str:
        """Return one line for a person."""
        return (
            f"{self.name}, {self.asked}: {self.rows:,} rows, {self.passes:.2f} passes, "
            f"{format_count(self.learned_tokens)} learned tokens, {self.share:.2%} of all"
        )


def compute_progress(phases: Sequence[MixturePhase], stream_row: int) -> list[SourceProgress]:
    """Return how much of each source a run has used before a row of the stream."""
    rows = rows_before(phases, stream_row)
    parts = {name: part for phase in phases for name, part in phase.parts.items()}
    learned_tokens = {n: rows[n] * part.learned_tokens / part.num_rows for n, part in parts.items()}
    total = max(1.0, sum(learned_tokens.values()))
    return [
        SourceProgress(
            name,
            part.amount_text if name in phases[-1].parts else "no longer used",
            rows[name],
            round(learned_tokens[name]),
            learned_tokens[name] / total,
            rows[name] / part.num_rows,
            part.num_rows,
            part.learned_tokens,
        )
        for name, part in parts.items()
    ]


def phases_from_json(values: Any) -> list[MixturePhase]:
    """Return phases from the JSON types of a checkpoint.

    Raises:
        ValueError: if the values are not phases.
    """
    phases = TypeAdapter(list[MixturePhase]).validate_python(values)
    if not phases:
        raise ValueError("it names no phase")
    return [replace(phase, parts=dict(sorted(phase.parts.items()))) for phase in phases]


@dataclass(frozen=True)
class _InterleavingNode:
    """A source by its number, or two nodes that take turns; ``rate``: its rows, or theirs."""

    rate: int
    source: int = 0
    halves: "tuple[_InterleavingNode, _InterleavingNode] | None" = None

    def count_first_half(self, num_rows: int) -> int:
        assert self.halves is not None, "a single source has no halves"
        first, _ = self.halves
        return (2 * first.rate * num_rows + self.rate) // (2 * self.rate)


class Interleaving:
    """An endless sequence of sources with given rates; any place is computed directly."""

    def __init__(self, rates: Sequence[Fraction]) -> None:
        """``rates``: how many rows each source has relative to the others, above 0."""
        unit = math.lcm(*(rate.denominator for rate in rates))
        heap = [
            (int(rate * unit), source, _InterleavingNode(int(rate * unit), source))
            for source, rate in enumerate(rates)
        ]
        heapq.heapify(heap)
        numbers = itertools.count(len(heap))
        while len(heap) > 1:
            first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
            pair = _InterleavingNode(first.rate + second.rate, halves=(first, second))
            heapq.heappush(heap, (pair.rate, next(numbers), pair))
        self._root, self._num_sources = heap[0][2], len(rates)

    def source_and_row_at(self, position: int) -> tuple[int, int]:
        """Return the source at a place, and how many of its rows come before."""
        node = self._root
        while node.halves is not None:
            first_half, second_half = node.halves
            num_before = node.count_first_half(position)
            is_in_first = node.count_first_half(position + 1) > num_before
            node, position = (
                (first_half, num_before) if is_in_first else (second_half, position - num_before)
            )
        return node.source, position

    def counts(self, num_rows: int) -> list[int]:
        """Return how many of the first ``num_rows`` are of each source."""
        counts = [0] * self._num_sources
        open_nodes = [(self._root, num_rows)]
        while open_nodes:
            node, num = open_nodes.pop()
            if node.halves is None:
                counts[node.source] = num
            else:
                first_half, second_half = node.halves
                num_first = node.count_first_half(num)
                open_nodes += [(first_half, num_first), (second_half, num - num_first)]
        return counts
