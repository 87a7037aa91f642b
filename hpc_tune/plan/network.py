"""What the links between ranks carry: latency and rate of each pair, and what collectives reach.

Collectives are those of the ring algorithms (see ``step/rings.py``): each rank
sends to the next of its group, and the slowest link holds up all.
"""

import dataclasses
import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpc_tune.probe.links import Link, Links
from hpc_tune.step.rings import CollectiveKind, ring_steps

_MIN_SLOWER, _MAX_SLOWER = 0.5, 20.0
_OPERATIONS: dict[CollectiveKind, str] = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}


@dataclass(frozen=True)
class Network:
    """Latency in seconds and rate in bytes per second between any two ranks.

    ``exchange_per_s``: the rate each way while both send, as two ranks do that gather alone.
    Two nodes reach ``lanes`` times the rate of one of their pairs. ``slower``: by the name of a
    collective of all ranks, how many times as long as the links promise it took, and what they
    promised, in seconds per byte of the message.
    """

    nodes: tuple[int, ...]
    latency_s: Mapping[tuple[int, int], float]
    bytes_per_s: Mapping[tuple[int, int], float]
    exchange_per_s: Mapping[tuple[int, int], float]
    slower: Mapping[CollectiveKind, tuple[float, float]]
    lanes: float = 1.0

    @classmethod
    def measured(cls, links: Links, nodes: Sequence[int]) -> "Network":
        """Take what was measured; a pair of ranks that was not is as another of its two nodes."""
        size = len(nodes)
        between: dict[tuple[int, int], Link] = {}
        for pair in links.pairs:
            between.setdefault(_ordered(*pair.nodes), pair)
        by_ranks = {pair.ranks: pair for pair in links.pairs}
        of_kind = {same: _median_pair(links.pairs, same) for same in (True, False) if links.pairs}
        latency, rate, exchange = {}, {}, {}
        for a in range(size):
            for b in range(a + 1, size):
                like = by_ranks.get((a, b)) or between.get(_ordered(nodes[a], nodes[b]))
                pair = like or of_kind[nodes[a] == nodes[b]]
                latency[a, b], rate[a, b] = pair.latency_s, pair.bytes_per_s
                exchange[a, b] = pair.exchange_bytes_per_s or pair.bytes_per_s
        plain = cls(tuple(nodes), latency, rate, exchange, {}, links.lanes)
        slower, everyone = {}, [links.order or range(size)]
        for kind, name in _OPERATIONS.items():
            times = [(c.num_bytes, c.seconds) for c in links.collectives if c.name == name]
            if len(times) > 1:
                (_, small_s), *_, (num_bytes, large_s) = times
                promised_s = plain.ring_s(kind, everyone, num_bytes)
                ratio = max(large_s - small_s, 0.0) / promised_s
                ratio = min(_MAX_SLOWER, max(_MIN_SLOWER, ratio))
                slower[kind] = ratio, promised_s / num_bytes
        return dataclasses.replace(plain, slower=slower)

    def ring_s(
        self,
        kind: CollectiveKind,
        groups: Sequence[Sequence[int]],
        num_bytes: float,
        gain: float = 1.0,
    ) -> float:
        """Return the seconds in which all ``groups`` move their bytes in a collective.

        ``num_bytes`` is the whole message: what is summed, or what all have after a gathering.
        Groups share the links between nodes. What collectives take beyond the links is the work of
        processors, here ``gain`` times as fast as in the measurement: it does not grow where a link
        is slower than those were, and shrinks where one is faster.
        """
        size = len(groups[0])
        if size == 1:
            return 0.0
        if kind == "all_to_all":
            return self._all_to_all_s(groups, num_bytes)
        edges = [(g[i], g[(i + 1) % size]) for g in groups for i in range(size)]
        rate = self.min_rate(edges, exchange=size == 2 and kind == "all_gather")
        moving_s = ring_steps(kind, size) / size * num_bytes / rate
        ratio, promised_s = self.slower.get(kind, (1.0, 0.0))
        more_s = (ratio - 1) * min(moving_s, promised_s * num_bytes)
        return moving_s + (more_s / gain if more_s > 0 else more_s)

    def _all_to_all_s(self, groups: Sequence[Sequence[int]], num_bytes: float) -> float:
        """Return the seconds in which each rank sends a part to each other of its group.

        One part after the other on a rank's link, and those that leave a node on its lanes.
        """
        size = len(groups[0])
        rates = self.exchange_per_s if size == 2 else self.bytes_per_s
        within: defaultdict[int, float] = defaultdict(float)
        leaving: defaultdict[int, float] = defaultdict(float)
        of_node: defaultdict[int, float] = defaultdict(float)
        for group in groups:
            for a, b in itertools.permutations(group, 2):
                seconds = num_bytes / size / rates[_ordered(a, b)]
                (within if self.nodes[a] == self.nodes[b] else leaving)[a] += seconds
        for rank, seconds in leaving.items():
            of_node[self.nodes[rank]] += seconds / self.lanes
        return max([*within.values(), *leaving.values(), *of_node.values()])

    def latency(self, a: int, b: int) -> float:
        """Return the seconds that a small message takes between two ranks."""
        return self.latency_s[_ordered(a, b)]

    def rate(self, a: int, b: int) -> float:
        """Return the bytes per second between two ranks while no others talk."""
        return self.bytes_per_s[_ordered(a, b)]

    def min_rate(self, edges: Sequence[tuple[int, int]], exchange: bool = False) -> float:
        """Return the bytes per second of the slowest of these, all at once, one direction each.

        ``exchange``: each is there in both directions.
        """
        rates = self.exchange_per_s if exchange else self.bytes_per_s
        leaving = Counter(self.nodes[a] for a, b in edges if self.nodes[a] != self.nodes[b])

        def shared_rate(a: int, b: int) -> float:
            alone = rates[_ordered(a, b)]
            if self.nodes[a] == self.nodes[b]:
                return alone
            return alone / max(1.0, leaving[self.nodes[a]] / self.lanes)

        return min(shared_rate(a, b) for a, b in edges)


def _ordered(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a <= b else (b, a)


def _median_pair(pairs: Sequence[Link], same_node: bool) -> Link:
    """Return a pair like those of its kind, or like all where there are none."""
    kind = "same node" if same_node else "across nodes"
    alike = [pair for pair in pairs if pair.kind == kind] or list(pairs)
    return Link(
        alike[0].ranks,
        alike[0].nodes,
        statistics.median(pair.latency_s for pair in alike),
        statistics.median(pair.bytes_per_s for pair in alike),
        statistics.median(pair.exchange_bytes_per_s or pair.bytes_per_s for pair in alike),
    )
