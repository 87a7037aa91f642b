"""What tools/bench.py train says of its rounds: medians, spreads, and the ratios of each round."""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench_quiet import DISTURBED

OURS = "hpc_tune"


@dataclass(frozen=True)
class Measured:
    """One run of one contender; None where it does not tell. ``tokens_per_s`` are useful ones.

    ``others_share``: of the cores, what other processes took until the first step or during the
    counted ones, whichever is more. ``grown``: the peak of a rank's anonymous bytes after the first
    step over that within it.
    """

    tokens_per_s: float
    first_s: float
    host_bytes: int
    device_bytes: int | None
    others_share: float
    save_s: float | None = None
    data_share: float | None = None
    rest_share: float | None = None
    grown: float | None = None


Round = Mapping[str, Measured]  # by contender
# What is compared: the best of the peers, and how it is called.
COMPARED: dict[str, tuple[Callable[[Iterable[float]], float], str]] = {
    "tokens_per_s": (max, "the tokens per second"),
    "first_s": (min, "the time to the first step"),
    "host_bytes": (min, "the host memory"),
}


def table(rounds: Sequence[Round], limit: float) -> Iterator[str]:
    """Yield the lines of the comparison; ``limit``: tokens per second that the machine allows."""
    header = f"{'':10}{'useful/s':>10}{'spread':>14}{'limit':>8}{'first':>9}{'host':>11}"
    yield (
        header
        + "".join(
            f"{name:>{width}}"
            for name, width in (("grown", 7), ("device", 12), ("save", 8), ("data", 8), ("rest", 8))
        )
        + f"{'others':>8}"
    )
    for name, found in by_contender(rounds).items():
        one, speeds = _median(found), [each.tokens_per_s for each in found]
        spread = f"{min(speeds):.0f}-{max(speeds):.0f}"
        yield (
            f"{name:10}{one.tokens_per_s:>10.0f}{spread:>14}{one.tokens_per_s / limit:>8.2f}"
            f"{one.first_s:>8.1f}s{one.host_bytes / 1e9:>8.2f} GB{_or_dash(one.grown, 1, 7)}"
            f"{_or_dash(one.device_bytes, 1e9, 9, ' GB')}"
            f"{_or_dash(one.save_s, 1, 7, 's')}{_or_dash(one.data_share, 0.01, 7, '%')}"
            f"{_or_dash(one.rest_share, 0.01, 7, '%')}"
            f"{max(each.others_share for each in found):>8.0%}"
        )
    told = {name: ratios(rounds, name) for name in COMPARED}
    if all(told.values()):
        yield ""
        yield "to the best peer of each round, median (least to most):"
        for name, some in told.items():
            middle = statistics.median(some)
            yield f"  {middle:.2f} ({min(some):.2f} to {max(some):.2f}) x {COMPARED[name][1]}"
    for number, names in disturbed(rounds).items():
        yield f"round {number} was disturbed, do not rely on it: other processes took {names}"


def by_contender(rounds: Sequence[Round]) -> dict[str, list[Measured]]:
    """Return the runs of each contender, in the order of the first round."""
    names = dict.fromkeys(name for one in rounds for name in one)
    return {name: [one[name] for one in rounds if name in one] for name in names}


def ratios(rounds: Sequence[Round], name: str) -> list[float]:
    """Return a figure of hpc_tune over that of the round's best peer, for each round with one."""
    best, found = COMPARED[name][0], []
    for one in rounds:
        peers = [getattr(run, name) for who, run in one.items() if who != OURS]
        if peers and OURS in one:
            found.append(getattr(one[OURS], name) / best(peers))
    return found


def disturbed(rounds: Sequence[Round]) -> dict[int, str]:
    """Return the numbers of the rounds, from 1 on, in which others took much, and how much."""
    found = {}
    for number, one in enumerate(rounds, 1):
        shares = [
            f"{run.others_share:.0%} beside {name}"
            for name, run in one.items()
            if run.others_share > DISTURBED
        ]
        if shares:
            found[number] = ", ".join(shares)
    return found


def quieter(first: Round, again: Round) -> tuple[Round, Round]:
    """Return the round to keep and the one to leave out; speed is not asked."""
    most = [max(run.others_share for run in one.values()) for one in (first, again)]
    return (first, again) if most[0] <= most[1] else (again, first)


def sentence(one: Measured) -> str:
    """Return what is said of a run as soon as it has ended."""
    return (
        f"{one.tokens_per_s:.0f} tokens/s, first step after {one.first_s:.1f} s, "
        f"{one.host_bytes / 1e9:.2f} GB, others: {one.others_share:.0%}"
    )


def _median(found: Sequence[Measured]) -> Measured:
    def middle(name: str) -> Any:
        values = [getattr(one, name) for one in found if getattr(one, name) is not None]
        return statistics.median(values) if values else None

    return Measured(*(middle(name) for name in Measured.__dataclass_fields__))


def _or_dash(value: float | None, unit: float, width: int, ending: str = "") -> str:
    if value is None:
        return "-".rjust(width + len(ending))
    return f"{value / unit:>{width}.2f}{ending}"
