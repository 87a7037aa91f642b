"""How long a step takes in a layout: from measured compute, measured links, and bytes (pure).

    Compute  seconds per token of a decoder block, when all ranks compute at once
    Network  what ranks reach between any two of them, and all together (network.py)
    step_time(work, layout, order of ranks, ...) -> StepTime

Collectives are those of the ring algorithms (see ``step/rings.py``): each rank
sends to the next of its group, and the slowest link holds up all.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.engine.gradients import PIECE_BYTES
from hpc_tune.plan.network import Network
from hpc_tune.step.layout import Layout
from hpc_tune.step.messages import BACKWARD_SUMS, FORWARD_SUMS
from hpc_tune.step.plan import uses_fsdp
from hpc_tune.step.rings import Kind
from hpc_tune.step.size import ModelSize
from hpc_tune.step.stages import deal_blocks

# The sums of a step's tokens, loss, gradient norm and memory.
_SMALL_SUMS = 4
# On the tensor axis, forward and backward.
SUMS_OF_A_BLOCK, _SUMS_OF_THE_ENDS = FORWARD_SUMS + BACKWARD_SUMS, 4


@dataclass(frozen=True)
class Compute:
    """What a rank computes with, while all ranks do.

    ``block_s``: one decoder block, forward and backward with what is recomputed, per token;
    ``head_s``: embedding, head and loss, per token; ``update_s``: the optimizer, per trained value;
    ``unshard_s``: memory for gathered weights and the copy into it, per byte; ``sync_s``: what a
    small collective of all ranks adds between two pieces of work, waiting for each other included.
    ``sharing``: how many times as fast a rank is while the others wait, 1 where each has its own
    processors. ``overlaps``: gathering weights runs beside compute, as it does on GPUs.
    """

    block_s: float
    head_s: float
    update_s: float
    unshard_s: float = 0.0
    sync_s: float = 0.0
    sharing: float = 1.0
    overlaps: bool = False


@dataclass(frozen=True)
class StepWork:
    """What one optimizer step has to do. ``model`` is the transformers config."""

    size: ModelSize
    model: Any
    global_rows: int
    seq_len: int
    itemsize: int

    @property
    def wire(self) -> int:
        """Bytes of a value between blocks."""
        return self.size.wire(self.itemsize)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: all, and those in which ranks wait for messages that nothing hides."""

    seconds: float
    comm_s: float

    @property
    def comm_share(self) -> float:
        """The part of the step that goes to messages, 0 to 1."""
        return self.comm_s / self.seconds


def step_time(
    work: StepWork,
    layout: Layout,
    ranks: Sequence[int],
    parallel: ParallelConfig,
    micro_rows: int,
    compute: Compute,
    network: Network,
) -> StepTime:
    """Return the seconds of one step when ``ranks``, in this order, are laid out like that.

    ``parallel.reshard`` must have been decided. Ranks that are left out leave their processors to
    the others where they share them.
    """
    gain = min(compute.sharing, len(network.nodes) / layout.size)
    rows = math.ceil(work.global_rows / layout.data_size)
    num_micro = math.ceil(rows / micro_rows)
    tokens = min(micro_rows, rows) * work.seq_len
    blocks = _blocks_of_ranks(work, layout, parallel.stages_per_rank, compute)
    placed = _Placed(layout, ranks, network, compute.sync_s, units=max(blocks) + 1)
    stages_s = [stage_s / gain for stage_s in _stages_s(blocks, layout, tokens, compute)]
    sums = (layout, ranks, network, tokens, compute.sync_s)
    sums_s = {num: tensor_s(work, num, *sums) for num in set(blocks)}
    if parallel.reshard == "step":
        # A stage begins to gather when its first micro-batch comes: one after the other.
        alone = max(gain, min(compute.sharing, gain * layout.pipeline))
        begin_s = layout.pipeline * _gathering_s(work, placed, compute.unshard_s, alone)
        per_micro_s = 0.0
    else:
        once_s = _gathering_s(work, placed, compute.unshard_s, gain)
        begin_s, per_micro_s = 0.0, once_s * (2 if parallel.reshard == "block" else 1)
    if compute.overlaps and per_micro_s:
        # The next block is gathered while one computes; the first has nothing to hide behind.
        shown_s = per_micro_s - sum(stages_s) / len(stages_s)
        per_micro_s = max(shown_s, per_micro_s / placed.units)
    passes = _Passes(
        stages_s,
        [sums_s[num] + per_micro_s for num in blocks],
        placed.hops_s(tokens * work.model.hidden_size * work.wire),
        num_micro,
        parallel.stages_per_rank,
    )
    sharing = compute.sharing / gain
    reducing_s = _reducing_s(work, placed, parallel, num_micro)
    if layout.replicate == layout.size and not uses_fsdp(layout.shard, parallel):
        # Piece by piece within the last backward pass, two thirds of a micro-batch's time; the last
        # piece has nothing to hide behind.
        num_pieces = math.ceil(work.size.trained_bytes / PIECE_BYTES)
        reducing_s = max(reducing_s - stages_s[0] * 2 / 3, reducing_s / num_pieces)
    reducing_s += _SMALL_SUMS * placed.sync_of(layout.size)
    trained = work.size.num_trained / (layout.tensor * layout.pipeline)
    trained /= layout.shard if work.size.is_full else 1
    update_s = trained * compute.update_s / gain
    comm_s = begin_s + reducing_s + passes.messages_s(sharing)
    return StepTime(begin_s + passes.seconds(sharing) + reducing_s + update_s, comm_s)


def tensor_s(
    work: StepWork,
    blocks: int,
    layout: Layout,
    ranks: Sequence[int],
    network: Network,
    tokens: int,
    sync_s: float,
) -> float:
    """Return the seconds in which ``blocks`` sum up one micro-batch's work.

    As in ``messages.tensor_messages``, less what the ends of the model add in bytes.
    """
    placed = _Placed(layout, ranks, network, sync_s)
    values = blocks * tokens * work.model.hidden_size
    num_bytes = values * (FORWARD_SUMS * work.itemsize + BACKWARD_SUMS * work.wire)
    times = SUMS_OF_A_BLOCK * blocks + _SUMS_OF_THE_ENDS  # of the embedding, and of the loss
    return placed.ring_s("all_reduce", ["tensor"], num_bytes, times)


@dataclass(frozen=True)
class _Placed:
    """A layout whose positions are taken by ranks.

    ``units``: parts of a stage that are gathered each by itself, its blocks and the rest.
    """

    layout: Layout
    ranks: Sequence[int]
    network: Network
    sync_s: float
    units: int = 1

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the ranks of each group along these axes, in order."""
        return [[self.ranks[p] for p in positions] for positions in self.layout.groups(*axes)]

    def ring_s(
        self, kind: Kind, axes: Sequence[str], num_bytes: float, times: int = 1, gain: float = 1.0
    ) -> float:
        """Return the seconds of ``times`` collectives along these axes; see ``Network.ring_s``."""
        groups = self.groups(*axes)
        moving_s = self.network.ring_s(kind, groups, num_bytes, gain)
        return moving_s + times * self.sync_of(len(groups[0]))

    def sync_of(self, size: int) -> float:
        """Return what it takes ``size`` ranks to wait for each other: as a tree does."""
        everyone = len(self.network.nodes)
        return self.sync_s * math.log2(size) / math.log2(everyone) if size > 1 else 0.0

    def hops_s(self, num_bytes: float) -> list[float]:
        """Return the seconds of one message from each pipeline stage to the next."""
        width = self.layout.data_size * self.layout.tensor
        hops = []
        for start in range(0, width * (self.layout.pipeline - 1), width):
            edges = [(self.ranks[start + i], self.ranks[start + width + i]) for i in range(width)]
            latency = max(self.network.latency(a, b) for a, b in edges)
            hops.append(latency + num_bytes / self.network.least_rate(edges))
        return hops


@dataclass(frozen=True)
class _Passes:
    """All micro-batches forward and backward: seconds of each rank's stages for one of them.

    ``waits_s``: those in which they wait for messages within themselves, for one micro-batch.
    """

    stages_s: list[float]
    waits_s: list[float]
    hops_s: list[float]
    num_micro: int
    stages_per_rank: int

    @property
    def computing_s(self) -> float:
        """What a rank computes, on average."""
        return self.num_micro * sum(self.stages_s) / len(self.stages_s)

    def seconds(self, sharing: float) -> float:
        """Return all, where a rank is up to ``sharing`` times as fast while others wait.

        1F1B fills and drains once (arXiv:1806.03377), interleaved in smaller steps
        (arXiv:2104.04473).
        """
        if len(self.stages_s) == 1:
            return self.computing_s + self.num_micro * self.waits_s[0]
        stages = [sum(both) for both in zip(self.stages_s, self.waits_s, strict=True)]
        slowest = max(stages)
        steady_s = (self.num_micro - 1) * max(slowest / sharing, *self.hops_s)
        fill_s = (slowest + (sum(stages) - slowest) / self.stages_per_rank) / sharing
        path_s = steady_s + fill_s + 2 * sum(self.hops_s)
        return max(path_s, self.num_micro * sum(stages) / len(stages))

    def messages_s(self, sharing: float) -> float:
        """Return how much of ``seconds`` would not be there if messages took no time."""
        silent = dataclasses.replace(self, waits_s=[0.0] * len(self.stages_s), hops_s=[0.0])
        return self.seconds(sharing) - silent.seconds(sharing)


def _blocks_of_ranks(
    work: StepWork, layout: Layout, stages_per_rank: int, compute: Compute
) -> list[int]:
    """Return how many decoder blocks each rank of the pipeline has."""
    layers, num = work.model.num_hidden_layers, layout.pipeline
    if num == 1:
        return [layers]
    dealt = deal_blocks(layers, num * stages_per_rank, compute.head_s / compute.block_s, num)
    return [sum(map(len, dealt[rank::num])) for rank in range(num)]


def _stages_s(blocks: Sequence[int], layout: Layout, tokens: int, compute: Compute) -> list[float]:
    """Return the seconds of each rank's stages for one micro-batch, forward and backward."""
    stages = [count * compute.block_s for count in blocks]
    stages[-1] += compute.head_s
    return [tokens * stage / layout.tensor for stage in stages]


def _gathering_s(work: StepWork, placed: _Placed, unshard_s: float, gain: float) -> float:
    """Return the seconds in which a stage's weights are gathered once, hidden or not (FSDP2).

    ``gain``: how many times as fast processors are as when all ranks gathered.
    """
    layout = placed.layout
    held = work.size.num_trained * work.itemsize if work.size.is_full else work.size.frozen_bytes
    part = held / (layout.tensor * layout.pipeline)
    copying_s = part * unshard_s / gain if layout.shard > 1 else 0.0
    return copying_s + placed.ring_s("all_gather", ["shard"], part, placed.units, gain)


def _reducing_s(work: StepWork, placed: _Placed, parallel: ParallelConfig, num_micro: int) -> float:
    """Return the seconds in which a step's gradients are added up."""
    layout = placed.layout
    cut = layout.tensor * layout.pipeline
    if not work.size.is_full or layout.shard == 1:
        grads = work.size.trained_bytes / cut
        return placed.ring_s("all_reduce", ["replicate", "shard"], grads)
    grads = work.size.num_trained / cut * (2 if parallel.reduce_dtype == "bf16" else 4)
    passes, units = 1 if parallel.reshard == "step" else num_micro, placed.units
    scattering_s = placed.ring_s("reduce_scatter", ["shard"], passes * grads, passes * units)
    return scattering_s + placed.ring_s("all_reduce", ["replicate"], grads / layout.shard, units)
