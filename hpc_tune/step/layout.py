"""How ranks are laid out: four axes, a rank's coordinates, and which ranks share an axis.

Ranks are numbered with ``tensor`` innermost, then ``shard``, ``replicate`` and ``pipeline``: axes
with much communication are neighbors, which launchers put on one node. ``expert`` and ``context``
add no ranks: they group neighbors of the shard axis, and of shard and replicate together.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from hpc_tune.model.config_json import value_shared_by_layers

_AXES_OUTERMOST_FIRST = ("pipeline", "replicate", "expert_shard", "expert", "tensor")
_SHARD_AXES = ("expert_shard", "expert")
GROUPING_AXES = ("expert", "context")  # of ranks that are on other axes


@dataclass(frozen=True)
class Layout:
    """Ranks along each axis; the product of the first four is the world size.

    ``replicate`` counts copies of the base weights and ``shard`` the ranks that hold one copy
    together, each with rows of its own. The ranks of the ``tensor`` axis share each matmul, those
    of the ``pipeline`` axis hold different decoder blocks; both work on the same rows.

    A mixture's routed experts are spread over ``expert`` neighbors of the shard axis, and each
    rank's experts are sharded over the ``expert_shard`` ranks that have the same ones: for experts
    the shard axis is expert_shard x expert.

    ``context`` neighbors among the replicate x shard ranks share their rows: each has a part of the
    tokens. They hold the same weights and gradients as they would without it.
    """

    replicate: int
    shard: int
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    context: int = 1

    @property
    def size(self) -> int:
        """The world size."""
        return self.num_weight_ranks * self.tensor * self.pipeline

    @property
    def num_weight_ranks(self) -> int:
        """How many ranks replicate and shard the weights."""
        return self.replicate * self.shard

    @property
    def data_parallel_size(self) -> int:
        """How many ranks, or groups of ranks that share rows, have rows of their own."""
        return self.num_weight_ranks // self.context

    @property
    def expert_shard(self) -> int:
        """How many ranks of the shard axis have the same experts."""
        return self.shard // self.expert

    def group_size(self, axes: Iterable[str]) -> int:
        """Return the number of ranks of a group along these axes."""
        return math.prod(getattr(self, axis) for axis in axes)

    def rows_per_rank(self, global_rows: int) -> int:
        """Return the rows of a step on the rank that has the most."""
        return -(-global_rows // self.data_parallel_size)

    def coordinates(self, rank: int) -> "MeshCoordinates":
        """Return the coordinates of ``rank`` on each axis."""
        rest, tensor = divmod(rank, self.tensor)
        rest, shard = divmod(rest, self.shard)
        pipeline, replicate = divmod(rest, self.replicate)
        data, context = divmod(replicate * self.shard + shard, self.context)
        return MeshCoordinates(replicate, shard, tensor, pipeline, data, context)

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` on no axis but ``axes``, in order.

        ``context`` cannot be combined with other axes.
        """
        if axes == ("context",):
            first = rank - self.coordinates(rank).context * self.tensor
            return tuple(range(first, first + self.context * self.tensor, self.tensor))
        ranks, stride = [rank], self.size
        for axis in _AXES_OUTERMOST_FIRST:
            size = getattr(self, axis)
            stride //= size
            if axis in axes or (axis in _SHARD_AXES and "shard" in axes):
                coordinate = rank // stride % size
                ranks = [r + (i - coordinate) * stride for r in ranks for i in range(size)]
        return tuple(ranks)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """Return the ranks of each group along these axes, each in order."""
        groups = (self.group_of(rank, *axes) for rank in range(self.size))
        return list(dict.fromkeys(groups))

    @property
    def saved_axes(self) -> dict[str, int]:
        """What checkpoints record: ranks by axis, but of ``GROUPING_AXES`` only those above 1."""
        return {name: n for name, n in asdict(self).items() if name not in GROUPING_AXES or n > 1}

    def __str__(self) -> str:
        return describe_axes(asdict(self))


def describe_axes(
    axes: Mapping[str, int], always_shown: Collection[str] = ("replicate", "shard")
) -> str:
    """Describe axis sizes in words ("replicate 2 x shard 4").

    Axes of size 1 are left out unless they are in ``always_shown``. ``GROUPING_AXES`` come last:
    their ranks are already counted.
    """
    shown_sizes = {axis: n for axis, n in axes.items() if n > 1 or axis in always_shown}
    groups = [f", {axis} {n}" for axis in GROUPING_AXES if (n := shown_sizes.pop(axis, 1)) > 1]
    return " x ".join(f"{axis} {n}" for axis, n in shown_sizes.items()) + "".join(groups)


@dataclass(frozen=True)
class MeshCoordinates:
    """A rank's coordinate on each axis.

    ``data`` determines which rows it gets, and ``context`` which part of their tokens.
    """

    replicate: int
    shard: int
    tensor: int
    pipeline: int
    data: int
    context: int = 0

    @property
    def counts_rows(self) -> bool:
        """Whether this rank counts for its rows in sums over ranks, of which some share rows."""
        return self.tensor == 0 and self.pipeline == 0 and self.context == 0


# -- Which models can have rows that are shared by ranks (pure).


_WHOLE_ROW_LAYERS = ("full_attention", "sliding_attention")


def row_sharing_problems(config: Any, layout: Layout) -> list[str]:
    """Return the reasons why ranks cannot share a model's rows; empty if they can."""
    axis = f"parallel.context={layout.context}"
    if layout.num_weight_ranks % layout.context:
        return [
            f"{axis} groups the {layout.num_weight_ranks} ranks of replicate x shard, which it "
            f"must divide; use {format_choices(list_divisors(layout.num_weight_ranks))}"
        ]
    kinds = set(getattr(config, "layer_types", None) or ()) - set(_WHOLE_ROW_LAYERS)
    if kinds:
        return [
            f"{axis}: layers of {' and '.join(sorted(kinds))} in a {config.model_type} model mix "
            "or select tokens other than by attention over the row; use parallel.context=1"
        ]
    if value_shared_by_layers(config, "num_attention_heads") is None:
        return [
            f"{axis}: the layers of a {config.model_type} model differ in their numbers of heads; "
            "use parallel.context=1"
        ]
    return []


def list_divisors(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def format_choices(numbers: Iterable[int]) -> str:
    """Return the numbers to choose from, in words."""
    return " or ".join(map(str, numbers))


# -- Which decoder blocks a pipeline stage has, and the order of a rank's passes (pure).
#
# A rank has one stage (1F1B, arXiv:1806.03377) or several (interleaved 1F1B, arXiv:2104.04473):
# stage s is on rank s mod P.


Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def pipeline_problems(
    config: Any, num_blocks: int, num_ranks: int, stages_per_rank: int
) -> list[str]:
    """Return the reasons why a model cannot be cut into stages; empty if it can."""
    stages = num_ranks * stages_per_rank
    if not getattr(config, "base_model_pp_plan", None):
        return [
            f"parallel.pipeline={num_ranks}: transformers has no plan for cutting a "
            f"{config.model_type} model into stages; use parallel.shard"
        ]
    if len(set(getattr(config, "layer_types", None) or ["one"])) > 1:
        return [
            f"parallel.pipeline={num_ranks}: the blocks of this {config.model_type} model are "
            "not all of one kind; use parallel.shard"
        ]
    if stages > num_blocks:
        return [
            f"parallel.pipeline={num_ranks} with stages_per_rank={stages_per_rank} makes {stages} "
            f"stages of {num_blocks} decoder blocks; use at most {num_blocks} stages"
        ]
    return []


def balance_stages(
    num_blocks: int, num_stages: int, head_blocks: float, num_ranks: int
) -> list[range]:
    """Return the blocks of each stage, balanced over ranks, then over stages.

    The head costs as much as ``head_blocks`` blocks. Rank r has the stages r, r + num_ranks, ...
    """

    def count_stage_blocks(last: int) -> list[int]:
        per_stage, remainder = divmod(num_blocks - last, num_stages - 1)
        return [per_stage + (i < remainder) for i in range(num_stages - 1)] + [last]

    def imbalance(counts: list[int]) -> tuple[float, float, float]:
        costs = [*counts[:-1], counts[-1] + head_blocks]
        slowest = max(sum(costs[rank::num_ranks]) for rank in range(num_ranks))
        return slowest, max(costs), -min(costs)

    choices = [count_stage_blocks(last) for last in range(1, num_blocks - num_stages + 2)]
    counts = min(choices, key=imbalance)
    starts = [sum(counts[:i]) for i in range(num_stages)]
    return [range(s, s + n) for s, n in zip(starts, counts, strict=True)]


def assign_stage_blocks(
    config: Any,
    num_blocks: int,
    values_per_block: float,
    layout: Layout,
    stages_per_rank: int,
    loss_token_fraction: float,
) -> list[range]:
    """Return the blocks of each stage; a block computes with ``values_per_block`` weights.

    ``loss_token_fraction`` of the tokens reach the output head.
    """
    head_values = config.vocab_size * config.hidden_size
    return balance_stages(
        num_blocks,
        layout.pipeline * stages_per_rank,
        loss_token_fraction * head_values / values_per_block,
        layout.pipeline,
    )


@dataclass(frozen=True)
class PipelinePass:
    """One micro-batch forward or backward through the ``chunk``-th stage of a rank."""

    kind: Direction
    chunk: int
    micro_batch: int


def schedule_passes(
    rank: int, num_ranks: int, num_chunks: int, num_micro: int
) -> list[PipelinePass]:
    """Return the passes of one rank, in order: warm-up, one forward one backward, cool-down (pure).

    ``rank`` is one of ``num_ranks`` of the pipeline; each has ``num_chunks`` stages. With several
    of these, ``num_micro`` must be a multiple of ``num_ranks``, else it raises ValueError.
    """
    if num_chunks > 1 and num_micro % num_ranks:
        raise ValueError(f"{num_micro} micro-batches are not a multiple of {num_ranks} ranks")

    def nth_pass(n: int, kind: Direction) -> PipelinePass:
        if num_chunks == 1:
            return PipelinePass(kind, 0, n)
        chunk = n // num_ranks % num_chunks
        batch = n // (num_ranks * num_chunks) * num_ranks + n % num_ranks
        return PipelinePass(kind, chunk if kind == "forward" else num_chunks - 1 - chunk, batch)

    total, later_ranks = num_micro * num_chunks, num_ranks - rank - 1
    warm_up = min(
        total, later_ranks if num_chunks == 1 else 2 * later_ranks + (num_chunks - 1) * num_ranks
    )
    passes = [nth_pass(n, "forward") for n in range(warm_up)]
    for n in range(total - warm_up):
        passes += [nth_pass(warm_up + n, "forward"), nth_pass(n, "backward")]
    return passes + [nth_pass(n, "backward") for n in range(total - warm_up, total)]


# -- How many groups of ranks the messages of a layout go through.


_COMMON_AXES = (
    ("tensor",),
    ("replicate", "shard"),
    ("replicate", "shard", "tensor"),
    ("expert",),
    ("replicate", "expert_shard"),
    ("context",),
)
_FSDP_AXES = (("shard",), ("replicate",), ("expert_shard",))


def num_process_groups(layout: Layout, uses_fsdp: bool, trains_tied_embedding: bool = False) -> int:
    """Return how many groups of several ranks the first rank is in, including the world.

    Groups of two neighbors in a pipeline are not counted. ``trains_tied_embedding``: the pipeline's
    first and last stage train one weight, the embedding and the head.
    """
    axes = (*_COMMON_AXES, *(_FSDP_AXES if uses_fsdp else ()))
    ranks = {layout.group_of(0, *names) for names in axes} | {tuple(range(layout.size))}
    if trains_tied_embedding:
        first, *_ = stages = layout.group_of(0, "pipeline")
        ranks.add((first, stages[-1]) if len(stages) > 1 else (first,))
    return sum(len(members) > 1 for members in ranks)


# -- What a rank sends in a collective (pure).
#
# The ring algorithms, which gloo and NCCL use for large messages: each of g ranks sends a g-th of
# the message to the next rank, g - 1 times in an all-gather or a reduce-scatter and 2 (g - 1) times
# in an all-reduce (Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002). In an all-to-all it
# sends a g-th to each of the other ranks.


CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "reduce", "send", "all_to_all"
]


def ring_steps(kind: CollectiveKind, num_ranks: int) -> int:
    """Return how many times a rank sends the ``num_ranks``-th part of a message."""
    match kind:
        case "all_reduce":
            return 2 * (num_ranks - 1)
        case "all_gather" | "reduce_scatter" | "all_to_all":
            return num_ranks - 1
        case _:  # all of it along a chain; in a reduction not the last rank
            return num_ranks if num_ranks > 1 else 0


def sent_bytes(kind: CollectiveKind, num_ranks: int, num_bytes: int) -> int:
    """Return the bytes that a rank sends.

    ``num_bytes`` is the whole message: what is summed, scattered or sent, or what every rank has
    after a gather.
    """
    return ring_steps(kind, num_ranks) * num_bytes // num_ranks
