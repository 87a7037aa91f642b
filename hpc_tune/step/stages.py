"""Which decoder blocks a pipeline stage has, and the order of a rank's passes (pure).

A rank has one stage (1F1B, arXiv:1806.03377) or several (interleaved 1F1B, arXiv:2104.04473): stage
s is on rank s mod P.
"""

from dataclasses import dataclass
from typing import Any, Literal

from hpc_tune.step.layout import Layout

Direction = Literal["forward", "backward"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


def staging_problems(config: Any, ranks: int, stages_per_rank: int) -> list[str]:
    """Return the reasons why a model cannot be cut into stages; none if it can."""
    layers, stages = config.num_hidden_layers, ranks * stages_per_rank
    if not getattr(config, "base_model_pp_plan", None):
        return [
            f"parallel.pipeline={ranks}: transformers has no plan for cutting a "
            f"{config.model_type} model into stages; use parallel.shard"
        ]
    if len(set(getattr(config, "layer_types", None) or ["one"])) > 1:
        return [
            f"parallel.pipeline={ranks}: the blocks of this {config.model_type} model are of "
            "different kinds by their number; use parallel.shard"
        ]
    if stages > layers:
        return [
            f"parallel.pipeline={ranks} with stages_per_rank={stages_per_rank} makes {stages} "
            f"stages of {layers} decoder blocks; use at most {layers} stages"
        ]
    return []


def balance_stages(
    num_blocks: int, num_stages: int, head_blocks: float, num_ranks: int
) -> list[range]:
    """Return the blocks of each stage, balanced over ranks, then over stages.

    The head costs as much as ``head_blocks`` blocks. Rank r has the stages r, r + num_ranks, ...
    """

    def counts_with(last: int) -> list[int]:
        others, more = divmod(num_blocks - last, num_stages - 1)
        return [others + (i < more) for i in range(num_stages - 1)] + [last]

    def imbalance(counts: list[int]) -> tuple[float, float, float]:
        costs = [*counts[:-1], counts[-1] + head_blocks]
        slowest = max(sum(costs[rank::num_ranks]) for rank in range(num_ranks))
        return slowest, max(costs), -min(costs)

    choices = [counts_with(last) for last in range(1, num_blocks - num_stages + 2)]
    counts = min(choices, key=imbalance)
    starts = [sum(counts[:i]) for i in range(num_stages)]
    return [range(s, s + n) for s, n in zip(starts, counts, strict=True)]


def stage_blocks(
    config: Any,
    num_blocks: int,
    block_values: float,
    layout: Layout,
    stages_per_rank: int,
    loss_share: float,
) -> list[range]:
    """Return the blocks of each stage of a model whose blocks each compute with ``block_values``.

    ``loss_share`` of the tokens reach the output head.
    """
    head_values = config.vocab_size * config.hidden_size
    return balance_stages(
        num_blocks,
        layout.pipeline * stages_per_rank,
        loss_share * head_values / block_values,
        layout.pipeline,
    )


@dataclass(frozen=True)
class Pass:
    """One micro-batch forward or backward through the ``chunk``-th stage of a rank."""

    kind: Direction
    chunk: int
    micro: int


def schedule(rank: int, ranks: int, chunks: int, num_micro: int) -> list[Pass]:
    """Return the passes of one rank, in order: warm-up, one forward one backward, cool-down (pure).

    With several chunks ``num_micro`` must be a multiple of ``ranks``.
    """
    total = num_micro * chunks

    def number(k: int, kind: Direction) -> Pass:
        if chunks == 1:
            return Pass(kind, 0, k)
        chunk = k // ranks % chunks
        micro = k // (ranks * chunks) * ranks + k % ranks
        return Pass(kind, chunk if kind == "forward" else chunks - 1 - chunk, micro)

    if chunks > 1 and num_micro % ranks:
        raise ValueError(f"{num_micro} micro-batches are no multiple of {ranks} ranks")
    ahead = ranks - rank - 1
    warm_up = min(total, ahead if chunks == 1 else 2 * ahead + (chunks - 1) * ranks)
    passes = [number(k, "forward") for k in range(warm_up)]
    for k in range(total - warm_up):
        passes += [number(warm_up + k, "forward"), number(k, "backward")]
    return passes + [number(k, "backward") for k in range(total - warm_up, total)]
