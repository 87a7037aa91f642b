"""The messages of a step from shapes alone: the bytes that rank 0 sends."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.engine.mesh import Layout
from hpc_tune.engine.pipeline_parallel import stage_blocks
from hpc_tune.model.loss import LEAST_TOKENS, TRAINED_LOGITS_BYTES
from hpc_tune.plan.model_size import ModelSize, Weights


def expected_bytes(
    size: ModelSize,
    config: Any,
    layout: Layout,
    parallel: ParallelConfig,
    itemsize: int,
    loss_share: float,
    micros: Sequence[tuple[int, int]],
    recomputes: bool = False,
) -> dict[str, int]:
    """Return the bytes that rank 0 sends in a step, by kind of collective.

    ``config`` is the model's transformers config, ``parallel.reshard`` must have been decided.
    ``itemsize``: bytes of a value in matrix products. ``loss_share`` of all tokens reach the head,
    for which stages are made equal. ``micros``: of each of the rank's micro-batches the tokens with
    padding, and those with loss. ``recomputes``: blocks run again in the backward pass, also where
    parallel.recompute does not say so. See ``traffic`` for what an algorithm sends. Exact where the
    ranks of an axis divide what they share; but for ZeRO, which DeepSpeed decides, and in a
    pipeline with reshard=micro for a frozen embedding of its own.
    """
    recomputes = recomputes or parallel.recompute != "none"
    if parallel.zero_stage is not None:
        kinds = Counter(zero_bytes(size, layout.size, parallel, len(micros)))
    else:
        rank = _rank_0(size, config, layout, parallel, micros, itemsize, loss_share)
        kinds = Counter(all_reduce=_all_reduce(layout.size, 4))  # the loss, in fp32
        if layout.tensor > 1 or layout.pipeline > 1 or (rank.full and rank.uses_fsdp):
            kinds["all_reduce"] += _all_reduce(layout.size, 8)  # the gradients' norm, in fp64
        kinds.update(gathered_bytes(rank, parallel.reshard))
        kinds.update(gradient_bytes(rank, parallel))
        kinds.update(tensor_bytes(rank, size, config, recomputes))
        if layout.pipeline > 1:
            # Each stage's output forward, its input's gradient backward, but at the model's ends.
            messages = 2 * parallel.stages_per_rank - 1
            kinds["send"] += messages * rank.tokens * config.hidden_size * rank.wire
    return {kind: num for kind, num in kinds.items() if num}


def zero_bytes(
    size: ModelSize, ranks: int, parallel: ParallelConfig, num_micro: int
) -> dict[str, int]:
    """Return the bytes a rank sends per step under ZeRO (arXiv:1910.02054).

    Stage 1 adds all gradients up once per step, stage 2 once per micro-batch, both in all-reduces,
    and both send the updated weights around. Stage 3 gathers all weights forward and backward;
    gradients are reduce-scattered per micro-batch.
    """
    grads = size.trained_bytes * (ranks - 1) // ranks
    if parallel.zero_stage == 3:
        weights = (size.frozen_bytes or size.trained_bytes) * (ranks - 1) // ranks
        return {"all_gather": 2 * num_micro * weights, "reduce_scatter": num_micro * grads}
    times = num_micro if parallel.zero_stage == 2 else 1
    return {"all_reduce": 2 * times * grads, "all_gather": grads}


@dataclass(frozen=True)
class _Rank0:
    """What rank 0 holds and computes in a step: it has the first stage, and the most rows.

    ``full``: all weights are trained. Products are in values of ``itemsize`` bytes, what flows
    between blocks in values of ``wire``. ``lowers``: fp32 weights are gathered in bf16. ``tied``:
    the embedding is the head too. ``blocks``: decoder blocks, ``held``: all weights, of which FSDP2
    holds a part on each rank of those that are ``sharded``.
    """

    layout: Layout
    full: bool
    uses_fsdp: bool
    lowers: bool
    tied: bool
    itemsize: int
    wire: int
    blocks: int
    held: tuple[Weights, ...]
    micros: tuple[tuple[int, int], ...]

    @property
    def sharded(self) -> list[Weights]:
        """All of a frozen base, or all trained weights but norms and biases that are not lowered.

        See ``shard`` for why.
        """
        if not self.uses_fsdp:
            return []
        alike = [weights for weights in self.held if weights.is_trained == self.full]
        return [weights for weights in alike if not (self.lowers and weights.is_vector)]

    @property
    def tokens(self) -> int:
        """Tokens that are computed, with padding."""
        return sum(tokens for tokens, _ in self.micros)


def _rank_0(
    size: ModelSize,
    config: Any,
    layout: Layout,
    parallel: ParallelConfig,
    micros: Sequence[tuple[int, int]],
    itemsize: int,
    loss_share: float,
) -> _Rank0:
    full, stored = size.num_frozen == 0, size.trained_bytes // size.num_trained
    uses_fsdp = layout.shard > 1 or parallel.offload_params == "cpu"
    blocks = _first_blocks(size, config, layout, parallel.stages_per_rank, loss_share)
    if layout.pipeline > 1 and parallel.stages_per_rank > 1:
        # Interleaving deals micro-batches out in rounds, and fills up with rows of one token.
        micros = [*micros, *[(1, 0)] * (-len(micros) % layout.pipeline)]
    elif layout.pipeline == layout.shard == 1:
        micros = [one for one in micros if one[1]]  # others are not computed
    return _Rank0(
        layout,
        full,
        uses_fsdp,
        lowers=uses_fsdp and full and itemsize < stored,
        tied=bool(config.tie_word_embeddings),
        itemsize=itemsize,
        # Weights that are stored in more bytes than they are computed with.
        wire=max(itemsize, stored) if full else itemsize,
        blocks=blocks,
        held=tuple(_first_part(size, config, layout, blocks)),
        micros=tuple(micros),
    )


def _first_blocks(
    size: ModelSize, config: Any, layout: Layout, stages_per_rank: int, loss_share: float
) -> int:
    """Return how many decoder blocks rank 0 holds."""
    if layout.pipeline == 1:
        return int(config.num_hidden_layers)
    values = sum(w.num_values for w in size.weights if w.part == "blocks")
    block_values = values / config.num_hidden_layers
    stages = stage_blocks(config, block_values, layout, stages_per_rank, loss_share)
    return sum(map(len, stages[:: layout.pipeline]))


def _first_part(size: ModelSize, config: Any, layout: Layout, blocks: int) -> Iterator[Weights]:
    """Yield rank 0's part of a model's weights by pipeline and tensor axis, before any sharding."""
    for weights in size.weights:
        if weights.part == "end" and layout.pipeline > 1:
            continue
        share = blocks if weights.part == "blocks" else config.num_hidden_layers
        ways = config.num_hidden_layers * (layout.tensor if weights.role == "slice" else 1)
        yield replace(
            weights,
            num_values=weights.num_values * share // ways,
            num_bytes=weights.num_bytes * share // ways,
        )


def gathered_bytes(rank: _Rank0, reshard: str) -> dict[str, int]:
    """Return the bytes a rank sends per step to gather weights that are sharded (FSDP2).

    (g-1)/g of its part of the weights each time: once per step, or per micro-batch once
    (reshard=micro) or twice (block). With reshard=block, what is in no block, nor in an embedding
    of its own, stays from a forward to its backward pass; and such an embedding, where it is
    frozen, is gathered in a backward pass for the next forward pass.
    """
    shard, num_micro, total = rank.layout.shard, len(rank.micros), 0
    for weights in rank.sharded:
        match reshard:
            case "step":
                times = 1
            case "micro":
                times = num_micro
            case _ if weights.part == "end" or (weights.part == "embedding" and rank.tied):
                times = num_micro
            case _ if weights.part == "embedding" and not rank.full:
                times = num_micro + 1
            case _:
                times = 2 * num_micro
        num_bytes = rank.itemsize * weights.num_values if rank.lowers else weights.num_bytes
        total += times * (num_bytes * (shard - 1) // shard)
    return {"all_gather": total}


def gradient_bytes(rank: _Rank0, parallel: ParallelConfig) -> dict[str, int]:
    """Return the bytes a rank sends per step to add up gradients, by kind of collective.

    Replicated gradients, of their weights' dtype: an all-reduce over the ranks with rows of their
    own, and over the tensor axis too where each rank has a partial sum. Sharded ones, in
    parallel.reduce_dtype: a reduce-scatter over the shards in each backward pass, or with
    reshard=step in the last, and an all-reduce of the own shard over the replicas. A pipeline's
    first and last stage add up what they hold both, the embedding that is the head too.
    """
    layout, sharded = rank.layout, rank.sharded
    data, shard, summed = layout.data_size, layout.shard, 0
    for weights in rank.held:
        if weights.is_trained and weights not in sharded:
            ranks = data * (layout.tensor if weights.role == "partial" else 1)
            summed += _all_reduce(ranks, weights.num_bytes)
    if not rank.full:
        return {"all_reduce": summed}
    itemsize = 2 if parallel.reduce_dtype == "bf16" else 4
    passes, scattered = 1 if parallel.reshard == "step" else len(rank.micros), 0
    for weights in sharded:
        num_bytes = itemsize * weights.num_values
        scattered += passes * (num_bytes * (shard - 1) // shard)
        summed += _all_reduce(layout.replicate, num_bytes // shard)
        if weights.role == "partial":
            summed += _all_reduce(layout.tensor, weights.num_bytes // shard)
    if rank.tied and layout.pipeline > 1:
        embedding = sum(w.num_bytes for w in rank.held if w.part == "embedding")
        summed += _all_reduce(2, embedding // shard)
    return {"all_reduce": summed, "reduce_scatter": scattered}


def tensor_bytes(rank: _Rank0, size: ModelSize, config: Any, recomputes: bool) -> dict[str, int]:
    """Return the bytes rank 0 sends per step for activations on the tensor axis.

    Per block two all-reduces of tokens x hidden forward, of products, and two backward, of what
    flows between blocks (arXiv:1909.08053); one for the embedding. A frozen one needs no gradient
    from the first block. A block that runs again does its first sum again, and stops before its
    last. The head, where rank 0 has it: the gradient of the tokens with loss, and three numbers of
    each in fp32, again where their logits are computed again. And what a plan gathers in between.
    """
    layout, hidden = rank.layout, config.hidden_size
    forward = (3 if recomputes else 2) * rank.blocks * rank.itemsize
    backward = (2 * rank.blocks - (not rank.full)) * rank.wire
    embedding = rank.itemsize if rank.lowers else rank.wire
    num_bytes = rank.tokens * hidden * (forward + backward + embedding)
    if layout.pipeline == 1:
        most = max(LEAST_TOKENS, TRAINED_LOGITS_BYTES // (4 * config.vocab_size))
        for _, loss_tokens in rank.micros:
            times = 2 if loss_tokens > most else 1
            num_bytes += loss_tokens * (hidden * rank.wire + 3 * 4 * times)
    ahead, back = size.gathered_features
    features = (2 * ahead if recomputes else ahead) + back
    gathered = rank.tokens * rank.itemsize * features * rank.blocks // config.num_hidden_layers
    return {
        "all_reduce": _all_reduce(layout.tensor, num_bytes),
        "all_gather": gathered * (layout.tensor - 1) // layout.tensor,
    }


def _all_reduce(ranks: int, num_bytes: int) -> int:
    return 2 * (ranks - 1) * num_bytes // ranks
