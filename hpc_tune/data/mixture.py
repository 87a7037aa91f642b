"""The order of a mixture: which source each row of the stream is of. Pure.

    weights, sizes of the sources -> rows per unit of the run (rates) -> Interleaving
    stream row -> phase -> source, and which row of that source's own stream

Two sources take turns by the largest deficit: the next row is of the one that is further behind its
share, so that after n rows each has its share of n to within half a row. Of more sources, the two
with the smallest rates are taken together as one, again and again, as in Huffman's code: a tree of
such pairs. Which row is whose follows from its number alone, by integer arithmetic, at once for any
row. Three sources are within one row of their shares; any number of them within 1.68 rows, half the
sum of the reciprocals of Fibonacci's numbers (one by one by the largest deficit of all, rows are as
far off, and are found only by counting from the first).

A weight is a share of learned tokens. A row of a source counts as its mean row: the order then
follows from the weights and the sizes alone, and no document is read for it.
"""

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from hpc_tune.units import format_count


@dataclass(frozen=True)
class MixtureSource:
    """A source in a phase of a mixture.

    ``num_rows`` and ``learned_tokens``: of one pass over it. ``rows_before``: how many of its rows
    earlier phases had. ``content`` and ``limit``: which documents it has. One of ``weight``, its
    share of the learned tokens, and ``epochs``, its passes in an epoch of the mixture.
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
        """Its rows, in a unit that all parts of a phase have in common."""
        if self.epochs is not None:
            return Fraction(self.epochs * self.num_rows)
        return Fraction(str(self.weight)) * self.num_rows / self.learned_tokens

    @property
    def asked(self) -> str:
        """What the settings say of it, in words."""
        return f"epochs {self.epochs}" if self.weight is None else f"weight {self.weight:g}"


@dataclass(frozen=True)
class MixturePhase:
    """What holds from stream row ``first_row`` on, where ``first_epoch`` epochs are over.

    ``parts``: by name, in the order of the names, on which the order of rows depends.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    parts: dict[str, MixtureSource]
    first_row: int = 0
    first_epoch: float = 0.0

    @property
    def num_rows(self) -> int:
        """The rows of an epoch.

        With weights it has as many learned tokens as all sources have together; with weights in
        proportion to them it is one pass over each. With epochs it is what they say.
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

    def rows_at(self, stream_row: int) -> dict[str, int]:
        """Return how many rows of each source come before a row of the stream."""
        counts = self.interleaving().counts(stream_row - self.first_row)
        items = zip(self.parts.items(), counts, strict=True)
        return {name: part.rows_before + count for (name, part), count in items}

    def epoch_at(self, stream_row: int) -> float:
        """Return how many epochs come before a row of the stream."""
        return self.first_epoch + (stream_row - self.first_row) / self.num_rows

    def row_at(self, epochs: float) -> int:
        """Return the row of the stream with which some epochs are over."""
        return self.first_row + math.ceil((epochs - self.first_epoch) * self.num_rows)


def rows_before(phases: Sequence[MixturePhase], stream_row: int) -> dict[str, int]:
    """Return how many rows of each source come before a row of the stream, over all phases."""
    ends = [phase.first_row for phase in phases[1:]] + [stream_row]
    rows: dict[str, int] = {}
    for phase, end in zip(phases, ends, strict=True):
        rows |= phase.rows_at(end)
    return rows


@dataclass(frozen=True)
class SourceProgress:
    """What a run has of a source at some row of its stream.

    ``asked``: its weight or epochs. ``learned_tokens`` by its mean row, ``share`` of those of all
    sources, ``passes`` over its ``rows_per_pass`` and ``learned_per_pass``.
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
    """Return what a run has of each source before a row of the stream."""
    rows = rows_before(phases, stream_row)
    parts = {name: part for phase in phases for name, part in phase.parts.items()}
    learned = {n: rows[n] * part.learned_tokens / part.num_rows for n, part in parts.items()}
    total = max(1.0, sum(learned.values()))
    return [
        SourceProgress(
            name,
            part.asked if name in phases[-1].parts else "left out by now",
            rows[name],
            round(learned[name]),
            learned[name] / total,
            rows[name] / part.num_rows,
            part.num_rows,
            part.learned_tokens,
        )
        for name, part in parts.items()
    ]


def phases_from_json(values: Any) -> list[MixturePhase]:
    """Return phases from the JSON types of a checkpoint.

    Raises:
        ValueError: if they are none.
    """
    phases = TypeAdapter(list[MixturePhase]).validate_python(values)
    if not phases:
        raise ValueError("it names no phase")
    return [replace(phase, parts=dict(sorted(phase.parts.items()))) for phase in phases]


@dataclass(frozen=True)
class _Node:
    """A source by its number, or two nodes that take turns; ``rate``: their rows together."""

    rate: int
    source: int = 0
    halves: "tuple[_Node, _Node] | None" = None

    def count_first_half(self, num_rows: int) -> int:
        assert self.halves is not None, "a single source has no halves"
        first, _ = self.halves
        return (2 * first.rate * num_rows + self.rate) // (2 * self.rate)


class Interleaving:
    """An endless sequence of sources with given rates, found at any place at once."""

    def __init__(self, rates: Sequence[Fraction]) -> None:
        """``rates``: how many rows each source has in comparison with the others, above 0."""
        unit = math.lcm(*(rate.denominator for rate in rates))
        heap = [
            (int(rate * unit), at, _Node(int(rate * unit), at)) for at, rate in enumerate(rates)
        ]
        heapq.heapify(heap)
        numbers = itertools.count(len(heap))
        while len(heap) > 1:
            first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
            pair = _Node(first.rate + second.rate, halves=(first, second))
            heapq.heappush(heap, (pair.rate, next(numbers), pair))
        self._root, self._num_sources = heap[0][2], len(rates)

    def at(self, place: int) -> tuple[int, int]:
        """Return the source at a place, and how many of its rows come before."""
        node = self._root
        while node.halves is not None:
            one, other = node.halves
            before = node.count_first_half(place)
            is_of_one = node.count_first_half(place + 1) > before
            node, place = (one, before) if is_of_one else (other, place - before)
        return node.source, place

    def counts(self, num_rows: int) -> list[int]:
        """Return how many of the first ``num_rows`` are of each source."""
        counts = [0] * self._num_sources
        open_nodes = [(self._root, num_rows)]
        while open_nodes:
            node, num = open_nodes.pop()
            if node.halves is None:
                counts[node.source] = num
            else:
                one, other = node.halves
                first = node.count_first_half(num)
                open_nodes += [(one, first), (other, num - first)]
        return counts
