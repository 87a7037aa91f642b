"""Which layout a run takes, and whether the model can be laid out like that.

choose_layout   by memory alone: replicate where the base fits, else shard
candidates      parallel.layout=auto: every legal layout, by the predicted time of a step
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.config.schema import RunConfig
from hpc_tune.engine.mesh import Layout
from hpc_tune.engine.pipeline_parallel import why_no_stages
from hpc_tune.engine.tensor_parallel import why_no_slices
from hpc_tune.errors import ConfigError
from hpc_tune.plan.model_size import ModelSize, static_bytes
from hpc_tune.plan.step_time import Compute, Network, StepTime, StepWork, step_time
from hpc_tune.units import format_bytes

_FEW_RANKS, _MARGIN, _CLEARLY = 5, 0.03, 0.8
ROOM_FOR_ACTIVATIONS = 0.6  # of the memory a rank has may go to weights, gradients and optimizer


def choose_layout(
    parallel: ParallelConfig,
    world_size: int,
    size: ModelSize,
    bytes_per_rank: int,
    ranks_per_node: int = 1,
) -> tuple[Layout, str]:
    """Return the layout for this world and the reason in words.

    Axes that are set are kept; tensor and pipeline are 1 unless set; of replicate and shard an
    unset one takes what is left. Where both are unset, all ranks replicate if the model fits into
    ``ROOM_FOR_ACTIVATIONS`` of ``bytes_per_rank``; else each node holds a sharded copy if one fits
    there, so that weights are gathered over its fast links alone (``ranks_per_node``: 1 where nodes
    differ); else all ranks shard.

    Raises:
        ConfigError: if the axes that are set do not multiply to the world size.
    """
    if parallel.zero_stage is not None:
        layout = Layout(1, world_size) if parallel.zero_stage == 3 else Layout(world_size, 1)
        return layout, f"DeepSpeed ZeRO {parallel.zero_stage}, as configured"
    tensor, pipeline = parallel.tensor or 1, parallel.pipeline or 1
    replicate, shard = parallel.replicate, parallel.shard
    fixed = tensor * pipeline * (replicate or 1) * (shard or 1)
    rest = world_size // fixed
    if fixed * rest != world_size or (replicate and shard and rest != 1):
        raise ConfigError(_not_the_product(parallel, world_size))
    if replicate is not None or shard is not None:
        layout = Layout(replicate or rest, shard or rest, tensor, pipeline)
        return layout, f"as configured, {format_bytes(static_bytes(size, layout))} per rank"
    whole = Layout(rest, 1, tensor, pipeline)
    needed, room = static_bytes(size, whole), int(bytes_per_rank * ROOM_FOR_ACTIVATIONS)
    sizes = f"{format_bytes(needed)} of {format_bytes(room)}"
    if needed <= room:
        return whole, f"each rank can hold its part of the model ({sizes})"
    if rest == 1:
        return whole, f"the model does not fit, and no rank is left to split it over ({sizes})"
    by_node = ranks_per_node // tensor  # stages are further apart than shards
    if 1 < by_node < rest and rest % by_node == 0:
        hybrid = Layout(rest // by_node, by_node, tensor, pipeline)
        if (needed := static_bytes(size, hybrid)) <= room:
            sizes = f"{format_bytes(needed)} of {format_bytes(room)}"
            return hybrid, f"the ranks of a node can hold the model together ({sizes} each)"
    return Layout(1, rest, tensor, pipeline), f"no rank can hold the model ({sizes})"


@dataclass(frozen=True)
class Candidate:
    """A layout, the ranks that take its positions in order, and how long a step of it takes."""

    layout: Layout
    ranks: tuple[int, ...]
    reshard: str
    micro_rows: int
    time: StepTime

    def __str__(self) -> str:
        axes = ("replicate", "shard", "tensor", "pipeline")
        sizes = [(axis, size) for axis in axes if (size := getattr(self.layout, axis)) > 1]
        gathers = f", gathered per {self.reshard}" if self.layout.shard > 1 else ""
        return (" x ".join(f"{axis} {size}" for axis, size in sizes) or "one rank") + gathers


def candidates(
    config: RunConfig,
    work: StepWork,
    room: int,
    compute: Compute,
    network: Network,
    process_bytes: int = 0,
) -> list[Candidate]:
    """Return every legal layout in its fastest order of ranks, the fastest first.

    Also on fewer ranks than there are. ``room``: bytes of a rank; a layout whose weights, gradients
    and optimizer state are more, with ``process_bytes`` for the process itself, is left out.
    """
    found = []
    orders_of = functools.cache(functools.partial(orders, network))
    for layout in legal_layouts(config, work.config, len(network.nodes)):
        if static_bytes(work.size, layout) + process_bytes > room:
            continue
        reshard = keeps_gathered(config.parallel, work.size, layout, room)
        parallel = config.parallel.model_copy(update={"reshard": reshard})
        rows = micro_rows(config, layout)
        best = min(
            (
                Candidate(layout, ranks, reshard, rows, time)
                for ranks in orders_of(layout.size)
                if (time := step_time(work, layout, ranks, parallel, rows, compute, network))
            ),
            # Of orders that are as fast the one whose neighbours have the fastest links.
            key=lambda one: (one.time.seconds, -_slowest_neighbours(one.ranks, network)),
        )
        found.append(best)
    return sorted(found, key=lambda one: preference(one, len(network.nodes)))


def legal_layouts(config: RunConfig, model: Any, num_ranks: int) -> list[Layout]:
    """Return the layouts of up to ``num_ranks`` ranks that the settings and the model allow.

    Axes that are set are kept. Of more than eight ranks, fewer are looked at in powers of two.
    """
    parallel = config.parallel
    no_slices = config.tune.method in ("dora", "qlora") or config.train.compile
    found = []
    for size in range(1, num_ranks + 1):
        if size < num_ranks and num_ranks > 8 and size & (size - 1):
            continue
        for pipeline, tensor, shard in itertools.product(_divisors(size), repeat=3):
            if size % (pipeline * tensor * shard):
                continue
            layout = Layout(size // (pipeline * tensor * shard), shard, tensor, pipeline)
            asked = all(
                (wanted := getattr(parallel, axis)) is None or wanted == getattr(layout, axis)
                for axis in ("replicate", "shard", "tensor", "pipeline")
            )
            if asked and not (tensor > 1 and no_slices) and not why_not(layout, parallel, model):
                found.append(layout)
    return found


def micro_rows(config: RunConfig, layout: Layout) -> int:
    """Return the rows of a micro-batch that a run would try, where memory allows it."""
    if config.batch.micro_size != "auto":
        return config.batch.micro_size
    rows = -(-config.batch.global_size // layout.data_size)
    # Stages work at the same time on different micro-batches; four each keep most of them busy.
    return rows if layout.pipeline == 1 else max(1, rows // (4 * layout.pipeline))


def preference(one: Candidate, num_ranks: int) -> float:
    """Return the seconds of a step and a little more for each axis, and for ranks that idle.

    Predictions are not exact: of layouts that are about as fast the simple one is better.
    """
    axes = sum(getattr(one.layout, axis) > 1 for axis in ("shard", "tensor", "pipeline"))
    return one.time.seconds * (1 + _MARGIN * (axes + (one.layout.size < num_ranks)))


def orders(network: Network, num_ranks: int) -> list[tuple[int, ...]]:
    """Return which ranks may take the positions of a layout, in order.

    All of them for up to five ranks. Of more, as the launcher numbers them, and each next one by
    the fastest link; where some are left out, those with the slowest links. The first rank holds
    the store of the job and always works.
    """
    everyone = range(len(network.nodes))
    if len(everyone) <= _FEW_RANKS:
        return [o for o in itertools.permutations(everyone, num_ranks) if 0 in o]
    kept = set(everyone)
    sums = {a: sum(network.rate(a, b) for b in everyone if b != a) for a in everyone if a}
    while len(kept) > num_ranks:
        slowest = min(sums, key=lambda a: (sums[a], -a))
        kept.remove(slowest)
        sums = {a: rates - network.rate(a, slowest) for a, rates in sums.items() if a != slowest}
    chain, rest = [0], kept - {0}
    while rest:
        chain.append(max(rest, key=lambda b: (network.rate(chain[-1], b), -b)))
        rest.remove(chain[-1])
    return list(dict.fromkeys([tuple(sorted(kept)), tuple(chain)]))


def ring_order(network: Network) -> tuple[int, ...]:
    """Return all ranks, the first one first, in an order whose ring has no needlessly slow link."""
    size = len(network.nodes)

    def gathers_s(ranks: Sequence[int]) -> float:
        return network.ring_s("all_gather", [ranks], 1.0)

    launched = tuple(range(size))
    best = min((o for o in orders(network, size) if o[0] == 0), key=gathers_s)
    return best if gathers_s(best) < _CLEARLY * gathers_s(launched) else launched


def without_effect(layout: Layout, parallel: ParallelConfig) -> list[str]:
    """Return, in words, the settings that do nothing in a layout."""
    settings = {
        "reshard": parallel.reshard != "auto",
        "blocks_per_unit": parallel.blocks_per_unit != 1,
        "reduce_dtype": parallel.reduce_dtype != "fp32",
    }
    return [
        f"parallel.{name}={getattr(parallel, name)} has no effect where nothing is sharded "
        f"({layout})"
        for name, is_set in settings.items()
        if is_set and layout.shard == 1 and parallel.offload_params == "none"
    ]


def check_layout(layout: Layout, parallel: ParallelConfig, config: Any) -> None:
    """Check a layout against the shape of a model, before any weight is read.

    ``config`` is the model's transformers config.

    Raises:
        ConfigError: lists all that is impossible, and what would work.
    """
    if problems := why_not(layout, parallel, config):
        raise ConfigError(
            "this model cannot be laid out like that:\n"
            + "\n".join(f"  - {problem}" for problem in problems)
        )


def why_not(layout: Layout, parallel: ParallelConfig, config: Any) -> list[str]:
    """Return why a model cannot be laid out like that, in words; nothing if it can."""
    problems = []
    if layout.tensor > 1:
        problems += why_no_slices(config, layout.tensor)
    if layout.pipeline > 1:
        problems += why_no_stages(config, layout.pipeline, parallel.stages_per_rank)
    return problems


def keeps_gathered(parallel: ParallelConfig, size: ModelSize, layout: Layout, room: int) -> str:
    """Return parallel.reshard with ``auto`` decided: step where a whole copy fits into ``room``."""
    if parallel.reshard != "auto":
        return parallel.reshard
    whole = Layout(layout.data_size, 1, layout.tensor, layout.pipeline)
    return "step" if static_bytes(size, whole) <= room * ROOM_FOR_ACTIVATIONS else "block"


def _slowest_neighbours(ranks: Sequence[int], network: Network) -> float:
    return min((network.rate(a, b) for a, b in itertools.pairwise(ranks)), default=0.0)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _not_the_product(parallel: ParallelConfig, world_size: int) -> str:
    axes = {
        name: getattr(parallel, name)
        for name in ("replicate", "shard", "tensor", "pipeline")
        if getattr(parallel, name) is not None
    }
    said = ", ".join(f"parallel.{name}={value}" for name, value in axes.items())
    others = [f"parallel.{n}={v}" for n, v in axes.items() if n in ("tensor", "pipeline")]
    split = (parallel.tensor or 1) * (parallel.pipeline or 1)
    if world_size % split:
        advice = f"start a multiple of {split} ranks, or change {' and '.join(others)}"
    else:
        left = world_size // split
        advice = f"set parallel.replicate={left} or parallel.shard={left}, or neither"
    return (
        f"{said} on {world_size} ranks: expected replicate x shard x tensor x pipeline = "
        f"{world_size}; {advice}"
    )
