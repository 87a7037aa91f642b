"""Time of a step in a layout, from measured compute, measured links, and bytes (pure).

    ComputeTimes  seconds per token of a decoder block, when all ranks compute at once
    Network       latency and rate between any two ranks, and of collectives of all ranks
    step_time(work, layout, order of ranks, ...) -> StepTime

Collectives follow the ring algorithms (see ``step/layout.py``): each rank sends to the next one in
its group, and the slowest link delays all.
"""

import dataclasses
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.probe.links import Link, Links
from hpc_tune.step.layout import CollectiveKind, Layout, ring_steps
from hpc_tune.step.messages import (
    FIRST_AND_LAST_STAGE_AXES,
    Message,
    context_messages,
    expert_messages,
    gradient_messages,
    tensor_messages,
    weight_messages,
)
from hpc_tune.step.plan import GRADIENT_BUCKET_BYTES, MicroTokens, StepPlan
from hpc_tune.step.size import ModelSize

# -- The links between ranks: latency and rate of each pair, and the times of collectives.
#
# Collectives follow the ring algorithms (see ``step/layout.py``): each rank sends to the next one
# in its group, and the slowest link delays all.


_MIN_SLOWDOWN, _MAX_SLOWDOWN = 0.5, 20.0
_COLLECTIVE_LABELS: dict[CollectiveKind, str] = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}


@dataclass(frozen=True)
class Network:
    """Latency in seconds and rate in bytes per second between any two ranks.

    ``duplex_bytes_per_s``: the rate in each direction while both ranks send, as in an all-gather of
    two ranks. ``lanes``: two nodes together reach this multiple of the rate of one pair of their
    ranks.
    ``slowdowns``: for each collective of all ranks, the ratio of the measured time to the time
    predicted from the links, and that prediction in seconds per byte of the message.
    """

    nodes: tuple[int, ...]
    latency_s: Mapping[tuple[int, int], float]
    bytes_per_s: Mapping[tuple[int, int], float]
    duplex_bytes_per_s: Mapping[tuple[int, int], float]
    slowdowns: Mapping[CollectiveKind, tuple[float, float]]
    lanes: float = 1.0

    @classmethod
    def from_links(cls, links: Links, nodes: Sequence[int]) -> "Network":
        """Take what was measured; an unmeasured pair is like another pair of the same two nodes."""
        size = len(nodes)
        by_nodes: dict[tuple[int, int], Link] = {}
        for pair in links.pairs:
            by_nodes.setdefault(_ordered_pair(*pair.nodes), pair)
        by_ranks = {pair.ranks: pair for pair in links.pairs}
        medians = {same: _median_link(links.pairs, same) for same in (True, False) if links.pairs}
        latency, rate, duplex_rate = {}, {}, {}
        for a in range(size):
            for b in range(a + 1, size):
                similar = by_ranks.get((a, b)) or by_nodes.get(_ordered_pair(nodes[a], nodes[b]))
                pair = similar or medians[nodes[a] == nodes[b]]
                latency[a, b], rate[a, b] = pair.latency_s, pair.bytes_per_s
                duplex_rate[a, b] = pair.exchange_bytes_per_s or pair.bytes_per_s
        network = cls(tuple(nodes), latency, rate, duplex_rate, {}, links.lanes)
        slowdowns, all_ranks = {}, [links.order or range(size)]
        for kind, name in _COLLECTIVE_LABELS.items():
            times = [(c.num_bytes, c.seconds) for c in links.collectives if c.name == name]
            if len(times) > 1:
                (_, small_s), *_, (num_bytes, large_s) = times
                predicted_s = network.collective_s(kind, all_ranks, num_bytes)
                ratio = max(large_s - small_s, 0.0) / predicted_s
                ratio = min(_MAX_SLOWDOWN, max(_MIN_SLOWDOWN, ratio))
                slowdowns[kind] = ratio, predicted_s / num_bytes
        return dataclasses.replace(network, slowdowns=slowdowns)

    def collective_s(
        self,
        kind: CollectiveKind,
        groups: Sequence[Sequence[int]],
        num_bytes: float,
        speedup: float = 1.0,
    ) -> float:
        """Return the seconds in which all ``groups`` move their bytes in a collective.

        ``num_bytes`` is the whole message: the summed tensor, or the result of a gather. Groups
        share the links between nodes. The time beyond that of the links is the work of processors,
        here ``speedup`` times as fast as in the measurement: it does not grow if a link is slower
        than the measured ones, and shrinks if a link is faster.
        """
        size = len(groups[0])
        if size == 1:
            return 0.0
        if kind == "all_to_all":
            return self._all_to_all_s(groups, num_bytes)
        edges = [(g[i], g[(i + 1) % size]) for g in groups for i in range(size)]
        rate = self.min_bytes_per_s(edges, exchange=size == 2 and kind == "all_gather")
        moving_s = ring_steps(kind, size) / size * num_bytes / rate
        ratio, predicted_s = self.slowdowns.get(kind, (1.0, 0.0))
        overhead_s = (ratio - 1) * min(moving_s, predicted_s * num_bytes)
        return moving_s + (overhead_s / speedup if overhead_s > 0 else overhead_s)

    def _all_to_all_s(self, groups: Sequence[Sequence[int]], num_bytes: float) -> float:
        """Return the seconds in which each rank sends a part to every other rank of its group.

        A rank sends its parts one after the other on its link; parts that leave a node also share
        the node's lanes.
        """
        size = len(groups[0])
        rates = self.duplex_bytes_per_s if size == 2 else self.bytes_per_s
        intra_node_s: defaultdict[int, float] = defaultdict(float)
        inter_node_s: defaultdict[int, float] = defaultdict(float)
        node_s: defaultdict[int, float] = defaultdict(float)
        for group in groups:
            for a, b in itertools.permutations(group, 2):
                seconds = num_bytes / size / rates[_ordered_pair(a, b)]
                (intra_node_s if self.nodes[a] == self.nodes[b] else inter_node_s)[a] += seconds
        for rank, seconds in inter_node_s.items():
            node_s[self.nodes[rank]] += seconds / self.lanes
        return max([*intra_node_s.values(), *inter_node_s.values(), *node_s.values()])

    def latency(self, a: int, b: int) -> float:
        """Return the seconds that a small message takes between two ranks."""
        return self.latency_s[_ordered_pair(a, b)]

    def rate(self, a: int, b: int) -> float:
        """Return the bytes per second between two ranks while no others communicate."""
        return self.bytes_per_s[_ordered_pair(a, b)]

    def min_bytes_per_s(self, edges: Sequence[tuple[int, int]], exchange: bool = False) -> float:
        """Return the bytes per second of the slowest edge when all are used at once, one way.

        ``exchange``: each edge is used in both directions.
        """
        rates = self.duplex_bytes_per_s if exchange else self.bytes_per_s
        num_leaving = Counter(self.nodes[a] for a, b in edges if self.nodes[a] != self.nodes[b])

        def shared_rate(a: int, b: int) -> float:
            full_rate = rates[_ordered_pair(a, b)]
            if self.nodes[a] == self.nodes[b]:
                return full_rate
            return full_rate / max(1.0, num_leaving[self.nodes[a]] / self.lanes)

        return min(shared_rate(a, b) for a, b in edges)


def _ordered_pair(a: int, b: int) -> tuple[int, int]:
    return (a, b) if a <= b else (b, a)


def _median_link(pairs: Sequence[Link], same_node: bool) -> Link:
    """Return a pair with the medians of its kind, or those of all pairs if its kind has none."""
    kind = "same node" if same_node else "across nodes"
    alike = [pair for pair in pairs if pair.kind == kind] or list(pairs)
    return Link(
        alike[0].ranks,
        alike[0].nodes,
        statistics.median(pair.latency_s for pair in alike),
        statistics.median(pair.bytes_per_s for pair in alike),
        statistics.median(pair.exchange_bytes_per_s or pair.bytes_per_s for pair in alike),
    )


# -- How long a step takes.


_NUM_SMALL_ALL_REDUCES = 4  # of a step's tokens, loss, gradient norm and memory
_FSDP_REDUCTION_AXES = (("shard",), ("expert_shard",), ("replicate",))


@dataclass(frozen=True)
class ComputeTimes:
    """Measured seconds of a rank's work while all ranks compute.

    ``block_s``: one decoder block, forward, recomputation and backward, per token; ``head_s``:
    embedding, head and loss, per token; ``update_s``: the optimizer, per trained value;
    ``unshard_s``: allocating gathered weights and copying into them, per byte; ``sync_s``: what a
    small collective of all ranks adds between two pieces of work, including the wait for others.
    ``sharing``: speedup of a rank while the others wait, 1 if each has its own processors.
    ``overlaps``: weights are gathered during compute, as on GPUs. ``host_copy_s``: a copy from a
    GPU to pinned memory or back while all ranks copy, per byte.
    """

    block_s: float
    head_s: float
    update_s: float
    unshard_s: float = 0.0
    sync_s: float = 0.0
    sharing: float = 1.0
    overlaps: bool = False
    host_copy_s: float = 0.0


@dataclass(frozen=True)
class StepWork:
    """What one optimizer step has to do. ``model`` is the transformers config."""

    size: ModelSize
    model: Any
    global_rows: int
    seq_len: int
    itemsize: int


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: all, and those in which ranks wait for messages not hidden by compute."""

    seconds: float
    comm_s: float

    @property
    def comm_share(self) -> float:
        """The part of the step that goes to messages, 0 to 1."""
        return self.comm_s / self.seconds


@dataclass(frozen=True)
class TensorAxisTime:
    """Messages of the tensor axis: seconds to transfer their bytes, and their number."""

    transfer_s: float
    num_messages: int


def step_time(
    work: StepWork,
    layout: Layout,
    ranks: Sequence[int],
    parallel: ParallelConfig,
    micro_rows: int,
    compute: ComputeTimes,
    network: Network,
) -> StepTime:
    """Return the time of one step when ``ranks``, in this order, take the positions of ``layout``.

    ``parallel.reshard`` must have been decided. If ranks share processors, those of ranks without a
    position serve the others.
    """
    plan = StepPlan(layout, parallel, work.size, work.model, work.itemsize)
    speedup = min(compute.sharing, len(network.nodes) / layout.size)
    rows = layout.rows_per_rank(work.global_rows)
    num_micro_batches = math.ceil(rows / micro_rows)
    tokens = plan.num_local_tokens(min(micro_rows, rows) * work.seq_len)
    placement = _RankLayout(layout, ranks, network, compute.sync_s)
    kinds = _representative_ranks(plan)
    waits_s = dict.fromkeys(kinds, 0.0)  # of a micro-batch
    stages_s = [stage_s / speedup for stage_s in _stages_s(plan, tokens, compute)]
    micros = [(tokens, tokens)]
    gathers = partial(_gathering_s, plan, placement, num_micro_batches, compute.unshard_s)
    begin_s = 0.0
    if parallel.reshard == "step":
        # A stage begins to gather when its first micro-batch arrives, so stages gather in turn.
        gather_speedup = max(speedup, min(compute.sharing, speedup * layout.pipeline))
        begin_s = sum(gathers(kind, gather_speedup) for kind in kinds)
    else:
        waits_s = {kind: gathers(kind, speedup) / num_micro_batches for kind in waits_s}
    if compute.overlaps:
        # The next block is gathered while one computes; nothing hides the first block's gather.
        hidden_s = sum(stages_s) / len(stages_s)
        waits_s = {k: max(s - hidden_s, s / plan.num_fsdp_units(k)) for k, s in waits_s.items()}
    for kind in waits_s:
        waits_s[kind] += placement.serial_messages_s(tensor_messages(plan, micros, pp_rank=kind))
        waits_s[kind] += placement.serial_messages_s(expert_messages(plan, micros, pp_rank=kind))
        waits_s[kind] += placement.serial_messages_s(context_messages(plan, micros, pp_rank=kind))
    passes = _PipelineTime(
        stages_s,
        [waits_s[kind] for kind in kinds],
        placement.stage_hops_s(plan.num_activation_values(micros) * plan.activation_itemsize),
        num_micro_batches,
        parallel.stages_per_rank,
    )
    sharing = compute.sharing / speedup
    reducing_s = max(_reducing_s(plan, placement, num_micro_batches, kind) for kind in {*kinds})
    if plan.has_only_replicas:
        # The last backward pass, two thirds of a micro-batch's time, hides the reduction, except
        # that of the last piece.
        num_pieces = math.ceil(work.size.trained_bytes / GRADIENT_BUCKET_BYTES)
        reducing_s = max(reducing_s - stages_s[0] * 2 / 3, reducing_s / num_pieces)
    reducing_s += _NUM_SMALL_ALL_REDUCES * placement.sync_time_s(layout.size)
    update_s = max(map(plan.num_updated_values, {*kinds})) * compute.update_s / speedup
    comm_s = begin_s + reducing_s + passes.messages_s(sharing)
    return StepTime(begin_s + passes.seconds(sharing) + reducing_s + update_s, comm_s)


def tensor_axis_time(
    plan: StepPlan, ranks: Sequence[int], network: Network, micro_tokens: MicroTokens
) -> TensorAxisTime:
    """Return the time of a micro-batch's messages on the tensor axis, of all decoder blocks."""
    placement = _RankLayout(plan.layout, ranks, network, 1.0)
    messages = [*tensor_messages(plan, [micro_tokens])]
    return TensorAxisTime(sum(map(placement.transfer_s, messages)), sum(m.times for m in messages))


@dataclass(frozen=True)
class _RankLayout:
    """A layout with a rank at each position."""

    layout: Layout
    ranks: Sequence[int]
    network: Network
    sync_s: float

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        has_two_ranks = axes == FIRST_AND_LAST_STAGE_AXES
        groups = self.layout.groups(*(("pipeline",) if has_two_ranks else axes))
        rank_groups = [[self.ranks[position] for position in group] for group in groups]
        return [[group[0], group[-1]] for group in rank_groups] if has_two_ranks else rank_groups

    def transfer_s(self, message: Message, speedup: float = 1.0) -> float:
        """Return the seconds of a message's bytes; ``speedup``: see ``Network.collective_s``."""
        if message.ranks == 1:
            return 0.0
        num_bytes = message.num_bytes * message.times
        return self.network.collective_s(
            message.kind, self.groups(message.axes), num_bytes, speedup
        )

    def serial_messages_s(self, messages: Iterable[Message]) -> float:
        """Return the seconds of messages sent one after the other; all ranks wait for each one."""
        return sum(self.transfer_s(m) + m.times * self.sync_time_s(m.ranks) for m in messages)

    def sync_time_s(self, group_size: int) -> float:
        """Return the seconds in which ``group_size`` ranks wait for each other, as in a tree."""
        num_ranks = len(self.network.nodes)
        return self.sync_s * math.log2(group_size) / math.log2(num_ranks) if group_size > 1 else 0.0

    def stage_hops_s(self, num_bytes: float) -> list[float]:
        """Return the seconds of one message from each pipeline stage to the next."""
        width = self.layout.num_weight_ranks * self.layout.tensor
        hops = []
        for start in range(0, width * (self.layout.pipeline - 1), width):
            edges = [(self.ranks[start + i], self.ranks[start + width + i]) for i in range(width)]
            latency = max(self.network.latency(a, b) for a, b in edges)
            hops.append(latency + num_bytes / self.network.min_bytes_per_s(edges))
        return hops


@dataclass(frozen=True)
class _PipelineTime:
    """All micro-batches forward and backward. ``stages_s``: each rank's stages, per micro-batch.

    ``waits_s``: waits of each rank's stages for messages within a stage, per micro-batch.
    ``stage_hops_s``: one message from each stage to the next.
    """

    stages_s: list[float]
    waits_s: list[float]
    stage_hops_s: list[float]
    num_micro_batches: int
    stages_per_rank: int

    @property
    def computing_s(self) -> float:
        """Seconds of compute of a rank, on average."""
        return self.num_micro_batches * sum(self.stages_s) / len(self.stages_s)

    def seconds(self, idle_speedup: float) -> float:
        """Return the total if a rank is up to ``idle_speedup`` times as fast while others wait.

        1F1B fills and drains once (arXiv:1806.03377), the interleaved schedule in smaller steps
        (arXiv:2104.04473).
        """
        if len(self.stages_s) == 1:
            return self.computing_s + self.num_micro_batches * self.waits_s[0]
        stages = [sum(both) for both in zip(self.stages_s, self.waits_s, strict=True)]
        slowest = max(stages)
        steady_s = (self.num_micro_batches - 1) * max(slowest / idle_speedup, *self.stage_hops_s)
        fill_s = (slowest + (sum(stages) - slowest) / self.stages_per_rank) / idle_speedup
        path_s = steady_s + fill_s + 2 * sum(self.stage_hops_s)
        return max(path_s, self.num_micro_batches * sum(stages) / len(stages))

    def messages_s(self, idle_speedup: float) -> float:
        """Return how much shorter ``seconds`` would be if messages took no time."""
        silent = dataclasses.replace(self, waits_s=[0.0] * len(self.stages_s), stage_hops_s=[0.0])
        return self.seconds(idle_speedup) - silent.seconds(idle_speedup)


def _representative_ranks(plan: StepPlan) -> list[int]:
    """Return for each rank of the pipeline axis the first rank that holds and sends the same."""
    first_rank: dict[tuple[Any, ...], int] = {}
    last = plan.layout.pipeline - 1
    signatures = [
        (rank == 0, rank == last, len(plan.blocks_of_rank(rank)), *plan.weights_of_rank(rank))
        for rank in range(plan.layout.pipeline)
    ]
    return [first_rank.setdefault(signature, rank) for rank, signature in enumerate(signatures)]


def _stages_s(plan: StepPlan, tokens: int, compute: ComputeTimes) -> list[float]:
    """Return the seconds of each rank's stages for one micro-batch, forward and backward."""
    blocks = [len(plan.blocks_of_rank(rank)) for rank in range(plan.layout.pipeline)]
    stages = [num * compute.block_s for num in blocks]
    stages[-1] += compute.head_s
    return [
        tokens * stage / plan.layout.tensor + _offloading_s(plan, num, tokens, compute)
        for stage, num in zip(stages, blocks, strict=True)
    ]


def _offloading_s(plan: StepPlan, num_blocks: int, tokens: int, compute: ComputeTimes) -> float:
    """Return the seconds of a micro-batch in which blocks wait for copies of their inputs.

    An input is copied out while its block runs forward, and back while the block after it is
    recomputed and runs backward (``engine/activation_checkpoint.py``). Nothing hides the copy back
    of the last block's input.
    """
    if not plan.parallel.offload_activations:
        return 0.0
    num_bytes = plan.num_activation_values([(tokens, tokens)]) * plan.activation_itemsize
    copy_s = num_bytes * compute.host_copy_s
    block_s = tokens * compute.block_s / plan.layout.tensor
    # A share of forward, recompute and backward; backward counts twice if weights get gradients.
    forward_s = block_s / (4 if plan.size.is_fully_trained else 3)
    out_s, back_s = max(0.0, copy_s - forward_s), max(0.0, copy_s - (block_s - forward_s))
    return num_blocks * out_s + (num_blocks - 1) * back_s + copy_s


def _gathering_s(
    plan: StepPlan,
    placement: _RankLayout,
    num_micro_batches: int,
    unshard_s: float,
    pp_rank: int,
    speedup: float,
) -> float:
    """Return the seconds of a step in which FSDP2 gathers a rank's weights, hidden or not.

    ``speedup``: speedup of the processors over the measurement, in which all ranks gathered.
    """
    messages = [*weight_messages(plan, num_micro_batches, pp_rank)]
    if not messages or plan.layout.shard == 1:
        return 0.0
    copying_s = sum(m.num_bytes * m.times for m in messages) * unshard_s / speedup
    times = plan.num_fsdp_units(pp_rank) * max(m.times for m in messages)
    waiting_s = times * placement.sync_time_s(plan.layout.shard)
    return copying_s + sum(placement.transfer_s(m, speedup) for m in messages) + waiting_s


def _reducing_s(
    plan: StepPlan, placement: _RankLayout, num_micro_batches: int, pp_rank: int
) -> float:
    """Return the seconds in which a step's gradients are reduced.

    Sharded gradients are reduced unit by unit; all others of the same ranks in one message.
    """
    messages = [*gradient_messages(plan, num_micro_batches, pp_rank)]
    waits: dict[tuple[str, tuple[str, ...]], float] = {}
    for m in messages:
        num_units = plan.num_fsdp_units(pp_rank) if m.axes in _FSDP_REDUCTION_AXES else 1
        waits[m.kind, m.axes] = m.times * num_units * placement.sync_time_s(m.ranks)
    return sum(map(placement.transfer_s, messages)) + sum(waits.values())
