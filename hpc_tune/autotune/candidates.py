"""parallel.layout=auto: every legal layout, its ranks, and its predicted step time.

legal_layouts -> predict_candidates: each in its fastest order of ranks; the fastest layout first
"""

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import BatchConfig
from hpc_tune.plan.hardware import Machine
from hpc_tune.plan.memory_model import process_bytes_on_device
from hpc_tune.plan.resolve import choose_reshard, layout_problems, max_micro_rows
from hpc_tune.plan.step_time import ComputeTimes, Network, StepTime, StepWork, step_time
from hpc_tune.step.layout import Layout, describe_axes, list_divisors, row_sharing_problems
from hpc_tune.step.size import static_bytes

_MAX_PERMUTED_RANKS, _PENALTY_PER_AXIS, _REORDER_TIME_RATIO = 5, 0.03, 0.8


@dataclass(frozen=True)
class Candidate:
    """A layout, the ranks that take its positions in order, and its predicted step time.

    ``memory``: of the rank that needs most, in words. ``fits`` is None if unknown: candidates that
    are slower than one that fits are not planned. ``links``: the measured links, in words.
    """

    layout: Layout
    ranks: tuple[int, ...]
    reshard: str
    micro_rows: int
    time: StepTime
    memory: str = ""
    fits: bool | None = None
    links: str = ""

    def __str__(self) -> str:
        gathers = f", gathered per {self.reshard}" if self.layout.shard > 1 else ""
        return (describe_axes(asdict(self.layout), always_shown=()) or "one rank") + gathers

    def penalized_s(self, num_ranks: int) -> float:
        """Return the seconds of a step, plus a small penalty for each axis and for idle ranks.

        Predictions are not exact: of layouts that are about equally fast, the simpler is better.
        """
        names = ("shard", "tensor", "pipeline", "expert", "context")
        axes = sum(getattr(self.layout, axis) > 1 for axis in names)
        return self.time.seconds * (1 + _PENALTY_PER_AXIS * (axes + (self.layout.size < num_ranks)))


def predict_candidates(
    layouts: Iterable[Layout],
    parallel: ParallelConfig,
    batch: BatchConfig,
    work: StepWork,
    machine: Machine,
    compute: ComputeTimes,
    network: Network,
) -> list[Candidate]:
    """Return the layouts, each in its fastest order of ranks, sorted by ``penalized_s``.

    Layouts whose weights, gradients and optimizer state exceed the memory of a rank are left out.
    """
    candidates = []
    orders_of = functools.cache(functools.partial(rank_orders, network))
    for layout in layouts:
        if (
            static_bytes(work.size, layout) + process_bytes_on_device(machine)
            > machine.bytes_per_rank
        ):
            continue
        reshard = choose_reshard(parallel, work.size, layout, machine.bytes_per_rank)
        settings = parallel.model_copy(update={"reshard": reshard})
        rows = max_micro_rows(batch, layout)
        best = min(
            (
                Candidate(layout, ranks, reshard, rows, time)
                for ranks in orders_of(layout.size)
                if (time := step_time(work, layout, ranks, settings, rows, compute, network))
            ),
            # Of equally fast orders, prefer the one whose slowest link of neighbors is fastest.
            key=lambda c: (c.time.seconds, -_slowest_link_rate(c.ranks, network)),
        )
        candidates.append(best)
    return sorted(candidates, key=lambda candidate: candidate.penalized_s(len(network.nodes)))


def legal_layouts(
    parallel: ParallelConfig,
    model: Any,
    num_ranks: int,
    allow_tensor_parallel: bool = True,
    num_experts: int = 1,
) -> list[Layout]:
    """Return the layouts of up to ``num_ranks`` ranks that the settings and the model allow.

    Axes that are set are kept. With more than eight ranks, only all of them and powers of two are
    tried. ``model`` is the transformers config; ``allow_tensor_parallel``: see
    ``constraints.allows_tensor_parallel``; ``num_experts``: how many experts can be distributed
    over ranks.
    """
    layouts = []
    for size in range(1, num_ranks + 1):
        if size < num_ranks and num_ranks > 8 and size & (size - 1):
            continue
        for pipeline, tensor, shard in itertools.product(list_divisors(size), repeat=3):
            if size % (pipeline * tensor * shard) or (tensor > 1 and not allow_tensor_parallel):
                continue
            axes = (size // (pipeline * tensor * shard), shard, tensor, pipeline)
            base_layout = Layout(*axes, context=parallel.context)
            is_asked = all(getattr(base_layout, a) == ranks for a, ranks in parallel.axes.items())
            if is_asked and not layout_problems(base_layout, parallel, model):
                max_expert_ranks = 1 if tensor > 1 else math.gcd(shard, num_experts)
                layouts += [replace(base_layout, expert=n) for n in list_divisors(max_expert_ranks)]
    return [layout for layout in layouts if parallel.expert in (1, layout.expert)]


def row_sharing_layouts(
    layouts: Iterable[Layout], model: Any, global_rows: int, max_sharing_ranks: int
) -> tuple[list[Layout], list[Layout]]:
    """Return variants of the layouts in which ranks share rows, for each possible number of ranks.

    The first list has layouts in which some ranks would otherwise have no row, the second the rest.
    ``model`` is the transformers config; ``max_sharing_ranks``: how many ranks are close enough to
    share rows.
    """
    idle: list[Layout] = []
    busy: list[Layout] = []
    for layout in layouts:
        for n in list_divisors(layout.num_weight_ranks)[1:]:
            variant = replace(layout, context=n)
            if layout.tensor * n <= max_sharing_ranks and not row_sharing_problems(model, variant):
                (idle if global_rows < layout.num_weight_ranks else busy).append(variant)
    return idle, busy


def rank_orders(network: Network, num_ranks: int) -> list[tuple[int, ...]]:
    """Return the orders in which ranks may take the positions of a layout.

    For up to five ranks, all orders. For more, the launcher's order, and the order in which each
    rank is followed by the one with the fastest link to it; the ranks with the slowest links are
    left out if fewer are needed. The first rank holds the store of the job and is always used.
    """
    all_ranks = range(len(network.nodes))
    if len(all_ranks) <= _MAX_PERMUTED_RANKS:
        return [o for o in itertools.permutations(all_ranks, num_ranks) if 0 in o]
    kept_ranks = set(all_ranks)
    sums = {a: sum(network.rate(a, b) for b in all_ranks if b != a) for a in all_ranks if a}
    while len(kept_ranks) > num_ranks:
        slowest = min(sums, key=lambda a: (sums[a], -a))
        kept_ranks.remove(slowest)
        sums = {a: rates - network.rate(a, slowest) for a, rates in sums.items() if a != slowest}
    chain, remaining = [0], kept_ranks - {0}
    while remaining:
        chain.append(max(remaining, key=lambda b: (network.rate(chain[-1], b), -b)))
        remaining.remove(chain[-1])
    return list(dict.fromkeys([tuple(sorted(kept_ranks)), tuple(chain)]))


def ring_order(network: Network) -> tuple[int, ...]:
    """Return all ranks, rank 0 first, in an order whose ring has no needlessly slow link."""
    size = len(network.nodes)

    def gather_s(ranks: Sequence[int]) -> float:
        return network.collective_s("all_gather", [ranks], 1.0)

    launch_order = tuple(range(size))
    best = min((o for o in rank_orders(network, size) if o[0] == 0), key=gather_s)
    return best if gather_s(best) < _REORDER_TIME_RATIO * gather_s(launch_order) else launch_order


def _slowest_link_rate(ranks: Sequence[int], network: Network) -> float:
    return min((network.rate(a, b) for a, b in itertools.pairwise(ranks)), default=0.0)
