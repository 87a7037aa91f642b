"""Measure latency and bandwidth between the ranks: of pairs, and of collectives of all ranks.

    pairs within a node, one after the other; pairs of nodes, all nodes at a time in rounds
    -> Link(latency, bytes per second) -> classes (same node, across nodes) -> outliers (pure)

Everything goes through torch.distributed, as training does: NCCL on GPUs, gloo on CPUs.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from hpc_tune.world.comm import Comm

if TYPE_CHECKING:
    import torch

SMALL_MESSAGE_BYTES, FIRST_LARGE_MESSAGE_BYTES, MAX_MESSAGE_BYTES = 8, 1 << 18, 1 << 26
_MIN_LARGE_MESSAGE_S = 0.03  # a message that takes this long is no longer dominated by latency
_EXCHANGE_S = 0.25
_NUM_PINGS = 20
_SLOW_FACTOR = 4.0  # a link is an outlier below a quarter of the fastest of its kind


@dataclass(frozen=True)
class Link:
    """One link: its latency (half a round trip of 8 bytes) and the rate of a large message.

    ``exchange_bytes_per_s``: the rate in each direction while both send, if measured.
    """

    ranks: tuple[int, int]
    nodes: tuple[int, int]
    latency_s: float
    bytes_per_s: float
    exchange_bytes_per_s: float | None = None

    @property
    def kind(self) -> str:
        """The kind of link; a link is compared with others of its kind."""
        return "same node" if self.nodes[0] == self.nodes[1] else "across nodes"


@dataclass(frozen=True)
class CollectiveTime:
    """One operation of all ranks.

    ``bytes_per_s`` is the bus bandwidth: what each link carries, for any number of ranks
    (2 (n - 1) / n of the message per second for all-reduce, (n - 1) / n for the others;
    github.com/NVIDIA/nccl-tests, PERFORMANCE.md).
    """

    name: str
    num_bytes: int
    seconds: float
    bytes_per_s: float


@dataclass(frozen=True)
class Links:
    """All measurements; for ``skipped`` pairs there was no time.

    ``order``: the order of the ranks in the collectives, if not that of their numbers. ``lanes``:
    the rate that two nodes reach when all their ranks communicate in pairs, as a multiple of the
    rate of one pair across nodes; 1 if the ranks share one network card.
    """

    pairs: tuple[Link, ...]
    collectives: tuple[CollectiveTime, ...]
    skipped: int = 0
    lanes: float = 1.0
    order: tuple[int, ...] | None = None


def measure_links(comm: Comm, limit_s: float = 30.0) -> Links:
    """Measure links and collectives; returns the same on every rank. Collective.

    ``limit_s`` bounds, approximately, the time for pairs.
    """
    collectives = measure_collectives(comm)
    return replace(measure_pairs(comm, limit_s), collectives=collectives)


def measure_collectives(comm: Comm) -> tuple[CollectiveTime, ...]:
    """Measure operations of all ranks; returns the same on every rank. Collective."""
    return tuple(_time_collectives(comm)) if comm.world.size > 1 else ()


def measure_pairs(comm: Comm, limit_s: float) -> Links:
    """Measure only links, in about ``limit_s``; returns the same on every rank. Collective."""
    if comm.world.size == 1:
        return Links((), ())
    until_s = time.monotonic() + limit_s
    own_links, num_skipped = [], 0
    nodes = [peer.node for peer in comm.roster]
    for round_ in list_pair_rounds(nodes):
        # All ranks skip a round or none does: a rank that is out of time keeps no other waiting.
        if comm.max([time.monotonic() > until_s]) != [0]:
            num_skipped += len(round_)
            continue
        for pair in round_:
            if comm.world.rank in pair:
                figures = _measure_pair(comm, pair)
                if comm.world.rank == pair[0]:
                    own_links.append(Link(pair, (nodes[pair[0]], nodes[pair[1]]), *figures))
    all_links = [pair for pairs in comm.gather(own_links) for pair in pairs]
    pairs = tuple(sorted(all_links, key=lambda pair: pair.ranks))
    return Links(pairs, (), num_skipped, _measure_lanes(comm, pairs))


def list_pair_rounds(nodes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs of ranks that may communicate at once (pure). ``nodes``: by rank.

    First the pairs within nodes, at most one per node at a time, since they share its memory or
    switch; then the first rank of each node with that of every other node, each node in one pair at
    a time, since its network is shared (the circle method of round-robin tournaments).
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    pairs_by_node = [
        [(a, b) for i, a in enumerate(ranks) for b in ranks[i + 1 :]] for ranks in ranks_of.values()
    ]
    for number in range(max(map(len, pairs_by_node))):
        yield [pairs[number] for pairs in pairs_by_node if number < len(pairs)]
    circle: list[int | None] = [ranks[0] for ranks in ranks_of.values()]
    if len(circle) % 2:
        circle.append(None)
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        round_ = [(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None]
        if round_:
            yield round_
        circle = [circle[0], circle[-1], *circle[1:-1]]


def describe_links(links: Links) -> str:
    """Describe the median rate and latency of each kind of link, and the rates of collectives."""
    parts = []
    for kind in dict.fromkeys(pair.kind for pair in links.pairs):
        alike = [pair for pair in links.pairs if pair.kind == kind]
        speed = format_rate(statistics.median(pair.bytes_per_s for pair in alike))
        latency_us = 1e6 * statistics.median(pair.latency_s for pair in alike)
        parts.append(f"{kind} {speed}, {latency_us:.0f} us")
    largest = {c.name: c for c in sorted(links.collectives, key=lambda c: c.num_bytes)}
    parts += [f"{name} {format_rate(timing.bytes_per_s)}" for name, timing in largest.items()]
    return "; ".join(parts)


def describe_slow_links(pairs: Sequence[Link]) -> list[str]:
    """Return a line for each link that is far slower than the fastest of its kind (pure).

    If all of a node's links to other nodes are, one line stands for them. The fastest link is the
    reference, because with one bad node of three most links are slow.
    """
    lines = []
    for kind in sorted({pair.kind for pair in pairs}):
        alike = [pair for pair in pairs if pair.kind == kind]
        max_rate = max(pair.bytes_per_s for pair in alike)
        slow = [pair for pair in alike if pair.bytes_per_s < max_rate / _SLOW_FACTOR]
        reference, remaining = f"others up to {format_rate(max_rate)}", slow
        for node in sorted({node for pair in slow for node in set(pair.nodes)}):
            links = [pair for pair in alike if node in pair.nodes]
            if kind == "across nodes" and len(links) > 1 and all(pair in slow for pair in links):
                worst = min(pair.bytes_per_s for pair in links)
                lines.append(f"all links of node {node}: {format_rate(worst)}, {reference}")
                remaining = [pair for pair in remaining if node not in pair.nodes]
        for pair in remaining:
            ranks = f"ranks {pair.ranks[0]}-{pair.ranks[1]}"
            lines.append(f"{ranks} ({kind}): {format_rate(pair.bytes_per_s)}, {reference}")
    return lines


def format_rate(bytes_per_s: float) -> str:
    """Format a rate, such as ``"11.2 GB/s"``."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.1f} {unit}"
    return f"{bytes_per_s / 1e3:.1f} kB/s"


def _measure_lanes(comm: Comm, pairs: Sequence[Link]) -> float:
    """Measure ``Links.lanes`` between the first two nodes. Collective."""
    first, second = ([p.rank for p in comm.roster if p.node == node] for node in (0, 1))
    rank_pairs = list(zip(first, second, strict=False))
    solo_rates = [pair.bytes_per_s for pair in pairs if rank_pairs and pair.ranks == rank_pairs[0]]
    if len(rank_pairs) < 2 or not solo_rates:
        return 1.0
    own_rates = [_measure_pair(comm, pair)[1] for pair in rank_pairs if comm.world.rank in pair]
    rates = comm.gather(own_rates[0] if own_rates else 0.0)
    return max(1.0, sum(rates[rank] for rank, _ in rank_pairs) / solo_rates[0])


def _measure_pair(comm: Comm, pair: tuple[int, int]) -> tuple[float, float, float]:
    """Return latency in seconds, bytes per second, and bytes per second each way while both send.

    Both ranks call it. The first one decides the size of the large message, which grows until it
    takes long enough.
    """
    import torch
    import torch.distributed as dist

    is_first = comm.world.rank == pair[0]
    other_rank = pair[1] if is_first else pair[0]
    make_bytes = partial(torch.zeros, dtype=torch.uint8, device=comm.device)
    small = make_bytes(SMALL_MESSAGE_BYTES)
    _round_trip_s(small, other_rank, is_first, comm)  # NCCL connects at the first message
    times = [_round_trip_s(small, other_rank, is_first, comm) for _ in range(_NUM_PINGS)]
    latency_s = statistics.median(times) / 2
    num_bytes, seconds = FIRST_LARGE_MESSAGE_BYTES, 0.0
    while True:
        large = make_bytes(num_bytes)
        _round_trip_s(large, other_rank, is_first, comm)
        seconds = min(_round_trip_s(large, other_rank, is_first, comm) for _ in range(2)) / 2
        is_last = seconds >= _MIN_LARGE_MESSAGE_S or num_bytes >= MAX_MESSAGE_BYTES
        # Queues fill for a while before data delays the acknowledgments of the other direction.
        exchange_bytes = max(num_bytes, int(_EXCHANGE_S / seconds * num_bytes)) if is_last else 0
        size_tensor = torch.tensor([min(exchange_bytes, MAX_MESSAGE_BYTES)], device=comm.device)
        dist.send(size_tensor, other_rank) if is_first else dist.recv(size_tensor, other_rank)
        if exchange_bytes := int(size_tensor):
            break
        num_bytes *= 4
    large = make_bytes(exchange_bytes)
    exchange_s = statistics.mean(_exchange_s(large, other_rank, comm) for _ in range(2))
    return latency_s, num_bytes / seconds, exchange_bytes / exchange_s


def _round_trip_s(data: "torch.Tensor", other_rank: int, is_first: bool, comm: Comm) -> float:
    import torch.distributed as dist

    began_s = time.perf_counter()
    for step in (dist.send, dist.recv) if is_first else (dist.recv, dist.send):
        step(data, other_rank)
    _synchronize(comm)
    return time.perf_counter() - began_s


def _exchange_s(data: "torch.Tensor", other_rank: int, comm: Comm) -> float:
    """Return the seconds in which two ranks send each other ``data`` at the same time."""
    import torch
    import torch.distributed as dist

    transfers = ((dist.isend, data), (dist.irecv, torch.empty_like(data)))
    began_s = time.perf_counter()
    for work in dist.batch_isend_irecv([dist.P2POp(op, buf, other_rank) for op, buf in transfers]):
        work.wait()
    _synchronize(comm)
    return time.perf_counter() - began_s


def _time_collectives(comm: Comm) -> Iterator[CollectiveTime]:
    """Time each operation with a small message, and with one not dominated by latency."""
    size = comm.world.size
    for name, share in (("all-reduce", 2.0), ("all-gather", 1.0), ("reduce-scatter", 1.0)):
        num_bytes = SMALL_MESSAGE_BYTES * size
        while True:
            seconds = _time_collective(name, num_bytes // 4 // size * size, comm)
            is_small = num_bytes < FIRST_LARGE_MESSAGE_BYTES
            is_last = seconds > _MIN_LARGE_MESSAGE_S
            if is_small or is_last or num_bytes >= MAX_MESSAGE_BYTES:
                bus = share * (size - 1) / size * num_bytes / seconds
                yield CollectiveTime(name, num_bytes, seconds, bus)
            if not is_small and (is_last or num_bytes >= MAX_MESSAGE_BYTES):
                break
            num_bytes = FIRST_LARGE_MESSAGE_BYTES if is_small else 4 * num_bytes


def _time_collective(name: str, num_values: int, comm: Comm) -> float:
    """Return the seconds of one operation on the slowest rank."""
    import torch
    import torch.distributed as dist

    from hpc_tune.torch_versions import all_gather, reduce_scatter

    full_tensor = torch.zeros(num_values, device=comm.device)
    part = torch.zeros(num_values // comm.world.size, device=comm.device)
    times = []
    for _ in range(4):  # the first connects
        dist.barrier(group=comm.cpu_group)
        began_s = time.perf_counter()
        match name:
            case "all-reduce":
                dist.all_reduce(full_tensor)
            case "all-gather":
                all_gather(full_tensor, part)
            case _:
                reduce_scatter(part, full_tensor)
        _synchronize(comm)
        times.append(time.perf_counter() - began_s)
    return comm.max([statistics.median(times[1:])])[0]


def _synchronize(comm: Comm) -> None:
    if comm.device.type == "cuda":
        import torch

        torch.cuda.synchronize(comm.device)
