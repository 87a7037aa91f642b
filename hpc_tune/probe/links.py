"""How fast the ranks can talk, measured: between pairs, and all together.

    pairs within a node, one after the other; pairs of nodes, all nodes at a time in rounds
    -> Pair(latency, bytes per second) -> classes (same node, across nodes) -> outliers (pure)

Everything goes through torch.distributed, as training does: NCCL on GPUs, gloo on CPUs.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpc_tune.world.bootstrap import Session
from hpc_tune.world.collective import gather_objects, max_of

if TYPE_CHECKING:
    import torch

SMALL_BYTES, FIRST_BYTES, MOST_BYTES = 8, 1 << 18, 1 << 26
_LONG_ENOUGH_S = 0.03  # a message that takes this is not latency any more
_PINGS = 20
_SLOW = 4.0  # a link is an outlier below a quarter of the fastest of its kind


@dataclass(frozen=True)
class Pair:
    """One link: half a round trip of 8 bytes, and the rate of a large message."""

    ranks: tuple[int, int]
    nodes: tuple[int, int]
    latency_s: float
    bytes_per_s: float

    @property
    def kind(self) -> str:
        """Which links it is compared with."""
        return "same node" if self.nodes[0] == self.nodes[1] else "across nodes"


@dataclass(frozen=True)
class Collective:
    """One operation of all ranks.

    ``bytes_per_s`` is bus bandwidth: what each link carries, whatever the number of ranks
    (2 (n - 1) / n of the message per second for all-reduce, (n - 1) / n for all-gather;
    github.com/NVIDIA/nccl-tests, PERFORMANCE.md).
    """

    name: str
    num_bytes: int
    seconds: float
    bytes_per_s: float


@dataclass(frozen=True)
class Links:
    """All that was measured; ``skipped`` pairs found no time."""

    pairs: tuple[Pair, ...]
    collectives: tuple[Collective, ...]
    skipped: int = 0


def measure(session: Session, limit_s: float = 30.0) -> Links:
    """Measure the links in at most about ``limit_s``; every rank returns the same. Collective."""
    if session.world.size == 1:
        return Links((), ())
    collectives = tuple(_collectives(session))
    until_s = time.monotonic() + limit_s
    mine, skipped = [], 0
    nodes = [peer.node for peer in session.roster]
    for round_ in rounds(nodes):
        # All or none: who is out of time keeps nobody waiting.
        if max_of(session, [time.monotonic() > until_s]) != [0]:
            skipped += len(round_)
            continue
        for pair in round_:
            if session.world.rank in pair:
                latency_s, rate = _ping_pong(session, pair)
                if session.world.rank == pair[0]:
                    mine.append(Pair(pair, (nodes[pair[0]], nodes[pair[1]]), latency_s, rate))
    found = [pair for some in gather_objects(session, mine) for pair in some]
    return Links(tuple(sorted(found, key=lambda pair: pair.ranks)), collectives, skipped)


def rounds(nodes: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield pairs of ranks that may talk at the same time (pure); ``nodes`` is each rank's.

    First the pairs within nodes, at most one of each node at a time, since they share its memory or
    switch; then one rank of each node with one of each other, each node in one pair at a time,
    since its network is shared (the circle method of round-robin tournaments).
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    within = [
        [(a, b) for i, a in enumerate(ranks) for b in ranks[i + 1 :]] for ranks in ranks_of.values()
    ]
    for number in range(max(map(len, within))):
        yield [pairs[number] for pairs in within if number < len(pairs)]
    places: list[int | None] = [ranks[0] for ranks in ranks_of.values()]
    if len(places) % 2:
        places.append(None)
    for _ in range(len(places) - 1):
        half = len(places) // 2
        opposite = zip(places[:half], reversed(places[half:]), strict=True)
        met = [(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None]
        if met:
            yield met
        places = [places[0], places[-1], *places[1:-1]]


def outliers(pairs: Sequence[Pair]) -> list[str]:
    """Return a line for each link, or for each node all of whose links are, far below the fastest
    of its kind (pure). With one bad node of three, most links are slow.
    """
    lines = []
    for kind in sorted({pair.kind for pair in pairs}):
        alike = [pair for pair in pairs if pair.kind == kind]
        most = max(pair.bytes_per_s for pair in alike)
        slow = [pair for pair in alike if pair.bytes_per_s < most / _SLOW]
        fast = f"others up to {rate(most)}"
        for node in sorted({node for pair in slow for node in set(pair.nodes)}):
            its = [pair for pair in alike if node in pair.nodes]
            if kind == "across nodes" and len(its) > 1 and all(pair in slow for pair in its):
                worst = min(pair.bytes_per_s for pair in its)
                lines.append(f"all links of node {node}: {rate(worst)}, {fast}")
                slow = [pair for pair in slow if node not in pair.nodes]
        for pair in slow:
            ranks = f"ranks {pair.ranks[0]}-{pair.ranks[1]}"
            lines.append(f"{ranks} ({kind}): {rate(pair.bytes_per_s)}, {fast}")
    return lines


def rate(bytes_per_s: float) -> str:
    """Return such as ``"11.2 GB/s"``."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.1f} {unit}"
    return f"{bytes_per_s / 1e3:.1f} kB/s"


def _ping_pong(session: Session, pair: tuple[int, int]) -> tuple[float, float]:
    """Return (latency in seconds, bytes per second) between the two ranks; both take part.

    The first of them decides how large the large message is: it grows until it takes long enough.
    """
    first = session.world.rank == pair[0]
    other = pair[1] if first else pair[0]
    small = _bytes(session, SMALL_BYTES)
    _there_and_back(small, other, first, session)  # NCCL connects at the first message
    times = [_there_and_back(small, other, first, session) for _ in range(_PINGS)]
    latency_s = statistics.median(times) / 2
    num_bytes, seconds = FIRST_BYTES, 0.0
    while True:
        large = _bytes(session, num_bytes)
        _there_and_back(large, other, first, session)
        seconds = min(_there_and_back(large, other, first, session) for _ in range(2)) / 2
        goes_on = _bytes(session, SMALL_BYTES)
        goes_on.fill_(int(seconds < _LONG_ENOUGH_S and num_bytes < MOST_BYTES))
        _send(goes_on, other) if first else _receive(goes_on, other)
        if not int(goes_on[0]):
            return latency_s, num_bytes / seconds
        num_bytes *= 4


def _there_and_back(data: "torch.Tensor", other: int, first: bool, session: Session) -> float:
    began_s = time.perf_counter()
    _send(data, other) if first else _receive(data, other)
    _receive(data, other) if first else _send(data, other)
    _wait(session)
    return time.perf_counter() - began_s


def _collectives(session: Session) -> Iterator[Collective]:
    import torch
    import torch.distributed as dist

    size = session.world.size
    for num_bytes in (SMALL_BYTES * size, 1 << 22):
        for name, share in (("all-reduce", 2.0), ("all-gather", 1.0)):
            whole = torch.ones(num_bytes // 4 // size * size, device=session.device)
            parts = list(whole.chunk(size))
            part = parts[0].clone()
            times = []
            for _ in range(4):  # the first connects
                dist.barrier(group=session.cpu_group)
                began_s = time.perf_counter()
                if name == "all-reduce":
                    dist.all_reduce(whole)
                else:
                    dist.all_gather(parts, part)
                _wait(session)
                times.append(time.perf_counter() - began_s)
            [seconds] = max_of(session, [statistics.median(times[1:])])
            bus = share * (size - 1) / size * num_bytes / seconds
            yield Collective(name, num_bytes, seconds, bus)


def _bytes(session: Session, number: int) -> "torch.Tensor":
    import torch

    return torch.zeros(number, dtype=torch.uint8, device=session.device)


def _send(data: "torch.Tensor", other: int) -> None:
    import torch.distributed as dist

    dist.send(data, other)


def _receive(data: "torch.Tensor", other: int) -> None:
    import torch.distributed as dist

    dist.recv(data, other)


def _wait(session: Session) -> None:
    if session.device.type == "cuda":
        import torch

        torch.cuda.synchronize(session.device)
