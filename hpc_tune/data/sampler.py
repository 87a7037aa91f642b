"""The sampler: which documents share a row, and in which order the rows come. Pure.

    histogram of lengths -> patterns (a multiset of lengths, and how many rows have it)
    stream row -> epoch, position -> shuffled row -> pattern, k -> by_length[the k-th of a length]

Packing works on the histogram, not on documents (M. M. Krell et al., "Efficient Sequence Packing
without Cross-contamination", arXiv:2107.02027): ten million documents pack in the time that their
few thousand lengths take, and no array per document or per row is ever made. The order is a pure
function of (seed, epoch, position). It does not know how many ranks there are, and any position of
it is found at once.
"""

import hashlib
import math
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

ORDER_VERSION = 1  # another one for each change after which a seed gives another order
_Items = tuple[tuple[int, int], ...]
_ROUNDS = 6
_MASK = (1 << 64) - 1


class Indexed(Protocol):
    """What has a value at each index: a list, an array or a column of prepared data."""

    def __getitem__(self, at: Any, /) -> Any:
        """Return the value at an index."""


@dataclass(frozen=True)
class SampleOrder:
    """What decides, beside the data, which documents are in which row of the stream.

    ``packing``: several documents in a row of ``seq_len`` tokens; else one in each.
    """

    seq_len: int
    packing: bool
    seed: int


def source_seed(seed: int, source: str) -> int:
    """Return the seed of a source of a mixture: other sources do not change its order."""
    digest = hashlib.blake2b(repr((seed, source)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class RowPattern:
    """``num_rows`` rows that each hold ``copies`` documents of each ``length`` in ``items``."""

    items: _Items
    num_rows: int


def pack_documents(histogram: dict[int, int], seq_len: int) -> list[RowPattern]:
    """Pack documents {length: count} into rows of ``seq_len`` by best fit decreasing.

    Longest first, each document goes into the fullest row that still takes it. All documents of one
    length are placed together: the rows that are alike so far, and stay alike, are one pattern with
    a count.
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
        left = histogram[length]
        while left:
            at = bisect_left(spaces, length)
            if at == len(spaces):
                put(RowPattern((), left), seq_len)  # empty rows, more than needed: left out below
                continue
            space = spaces[at]
            pattern = open_patterns[space].pop()
            if not open_patterns[space]:
                del open_patterns[space], spaces[at]
            copies = space // length
            full = min(pattern.num_rows, left // copies)
            rest = left - full * copies if full < pattern.num_rows else 0  # fewer than copies
            put(RowPattern((*pattern.items, (length, copies)), full), space - copies * length)
            put(RowPattern((*pattern.items, (length, rest)), int(rest > 0)), space - rest * length)
            untouched = pattern.num_rows - full - bool(rest)
            put(RowPattern(pattern.items, untouched), space)
            left -= full * copies + rest
    return [
        pattern for _, group in sorted(open_patterns.items()) for pattern in group if pattern.items
    ]


def one_per_row(histogram: dict[int, int]) -> list[RowPattern]:
    """Give each document a row of its own."""
    return [RowPattern(((length, 1),), count) for length, count in sorted(histogram.items())]


class PackedSampler:
    """The endless stream of rows: in each epoch each document once, in rows composed afresh."""

    def __init__(
        self,
        length_values: np.ndarray,
        length_counts: np.ndarray,
        by_length: Indexed,
        order: SampleOrder,
    ) -> None:
        """Pack the histogram (``length_values`` rising, ``length_counts``).

        ``by_length`` holds document numbers sorted by length; documents of ``seq_len`` or more
        tokens count as ``seq_len``: they are the tail of it.
        """
        clipped = np.minimum(length_values, order.seq_len)
        lengths, first = np.unique(clipped, return_index=True)
        counts = np.add.reduceat(length_counts, first)
        starts = np.cumsum(counts) - counts
        self._counts = dict(zip(lengths.tolist(), counts.tolist(), strict=True))
        self._starts = dict(zip(lengths.tolist(), starts.tolist(), strict=True))
        self._by_length, self._order = by_length, order
        self.patterns = (
            pack_documents(self._counts, order.seq_len)
            if order.packing
            else one_per_row(self._counts)
        )
        self._firsts = _first_documents(self.patterns)
        self._row_stops = np.cumsum([pattern.num_rows for pattern in self.patterns]).tolist()
        self.num_rows: int = self._row_stops[-1]
        self._epoch = -1
        self._shuffles: dict[int, Shuffle] = {}

    @property
    def padding(self) -> float:
        """The share of an epoch's ``num_rows * seq_len`` places that hold no document."""
        used = sum(length * count for length, count in self._counts.items())
        return 1 - used / (self.num_rows * self._order.seq_len)

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
                documents.append(int(self._by_length[self._starts[length] + shuffle(k)]))
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
    just above n, so that hardly an element leaves the range; one that does is permuted again until
    it is back in the range ("cycle walking"). J. Black and P. Rogaway, "Ciphers with arbitrary
    finite domains", CT-RSA 2002. It is no cipher: the round function is a multiply-and-shift hash.
    """

    __slots__ = ("_a", "_b", "_keys", "n")

    def __init__(self, n: int, *key: int | str) -> None:
        """Derive the round keys; costs the same for any n."""
        self.n = n
        self._a = math.isqrt(max(n - 1, 0)) + 1
        self._b = -(-n // self._a)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [
            int.from_bytes(digest[at : at + 8], "little") for at in range(0, 8 * _ROUNDS, 8)
        ]

    def __call__(self, index: int) -> int:
        """Return where ``index`` goes."""
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


def _first_documents(patterns: list[RowPattern]) -> list[list[int]]:
    """Return, per pattern and item, how many documents of its length earlier patterns use."""
    used: dict[int, int] = {}
    firsts = []
    for pattern in patterns:
        firsts.append([used.get(length, 0) for length, _ in pattern.items])
        for length, copies in pattern.items:
            used[length] = used.get(length, 0) + copies * pattern.num_rows
    return firsts


def _hash_64_bits(value: int) -> int:
    """Hash 64 bits (the finaliser of splitmix64)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)
