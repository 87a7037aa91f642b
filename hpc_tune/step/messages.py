"""The messages of a step from shapes alone, and the bytes that rank 0 sends in them.

model, layout, micro-batches -> what rank 0 holds -> step_messages -> expected_bytes
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.engine.base import uses_fsdp
from hpc_tune.engine.mesh import Layout
from hpc_tune.engine.pipeline_parallel import stage_blocks
from hpc_tune.model.loss import LEAST_TOKENS, TRAINED_LOGITS_BYTES
from hpc_tune.plan.model_size import ModelSize, Weights

# All-reduces of a block on the tensor axis (arXiv:1909.08053).
FORWARD_SUMS, BACKWARD_SUMS = 2, 2


@dataclass(frozen=True)
class Message:
    """A collective of ``ranks`` ranks, ``times`` in a step, or what rank 0 sends to a neighbour.

    ``num_bytes`` of one: what is summed or scattered, what all have after a gathering, or is sent.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "send"]
    ranks: int
    num_bytes: int
    times: int = 1

    @property
    def sent_bytes(self) -> int:
        """What each rank sends with the ring algorithms; see ``engine/counted_collectives.py``."""
        match self.kind:
            case "send":
                return self.times * self.num_bytes
            case "all_reduce":
                return self.times * (2 * (self.ranks - 1) * self.num_bytes // self.ranks)
            case _:
                return self.times * ((self.ranks - 1) * self.num_bytes // self.ranks)


def expected_bytes(
    size: ModelSize,
    model: Any,
    layout: Layout,
    parallel: ParallelConfig,
    itemsize: int,
    loss_share: float,
    micros: Sequence[tuple[int, int]],
    recomputes: bool = False,
) -> dict[str, int]:
    """Return the bytes that rank 0 sends in a step, by kind of collective.

    ``model`` is the transformers config, ``parallel.reshard`` must have been decided. ``itemsize``:
    bytes of a value in matrix products. ``loss_share`` of all tokens reach the head, for which
    stages are made equal. ``micros``: of each of the rank's micro-batches the tokens with padding,
    and those with loss. ``recomputes``: blocks run again in the backward pass, also where
    parallel.recompute does not say so. Exact where the ranks of an axis divide what they share; but
    for ZeRO, which DeepSpeed decides, and in a pipeline with reshard=micro for a frozen embedding
    of its own.
    """
    if parallel.zero_stage is not None:
        messages = zero_messages(size, layout.size, parallel.zero_stage, len(micros))
    else:
        rank = Rank0(size, model, layout, parallel, itemsize, loss_share, tuple(micros))
        messages = step_messages(rank, recomputes or parallel.recompute != "none")
    sent: Counter[str] = Counter()
    for message in messages:
        sent[message.kind] += message.sent_bytes
    return {kind: num for kind, num in sent.items() if num}


def zero_messages(size: ModelSize, ranks: int, stage: int, num_micro: int) -> Iterator[Message]:
    """Yield the messages of a step under ZeRO (arXiv:1910.02054).

    Stage 1 adds all gradients up once per step, stage 2 once per micro-batch, both in all-reduces,
    and both send the updated weights around. Stage 3 gathers all weights forward and backward;
    gradients are reduce-scattered per micro-batch.
    """
    if stage == 3:
        weights = size.frozen_bytes or size.trained_bytes
        yield Message("all_gather", ranks, weights, 2 * num_micro)
        yield Message("reduce_scatter", ranks, size.trained_bytes, num_micro)
        return
    yield Message("all_reduce", ranks, size.trained_bytes, num_micro if stage == 2 else 1)
    yield Message("all_gather", ranks, size.trained_bytes)


@dataclass(frozen=True)
class Rank0:
    """What rank 0 holds and computes in a step: it has the first stage, and the most rows.

    Products are in values of ``itemsize`` bytes. See ``expected_bytes`` for the rest.
    """

    size: ModelSize
    model: Any
    layout: Layout
    parallel: ParallelConfig
    itemsize: int
    loss_share: float
    micros: tuple[tuple[int, int], ...]

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP2 holds weights."""
        return uses_fsdp(self.layout.shard, self.parallel)

    @property
    def lowers(self) -> bool:
        """Whether fp32 weights are gathered in bf16."""
        return self.uses_fsdp and self.size.is_full and self.itemsize < self.size.trained_itemsize

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is the head too."""
        return bool(self.model.tie_word_embeddings)

    @property
    def wire(self) -> int:
        """Bytes of a value that flows between blocks."""
        return self.size.wire(self.itemsize)

    @cached_property
    def blocks(self) -> int:
        """Decoder blocks of its stages."""
        layout, layers = self.layout, int(self.model.num_hidden_layers)
        if layout.pipeline == 1:
            return layers
        values = sum(w.num_values for w in self.size.weights if w.part == "blocks") / layers
        stages_per_rank = self.parallel.stages_per_rank
        stages = stage_blocks(self.model, values, layout, stages_per_rank, self.loss_share)
        return sum(map(len, stages[:: layout.pipeline]))

    @cached_property
    def held(self) -> list[Weights]:
        """Its part of the weights by pipeline and tensor axis, before any sharding."""
        layout, layers = self.layout, self.model.num_hidden_layers
        held = []
        for weights in self.size.weights:
            if weights.part == "end" and layout.pipeline > 1:
                continue
            share = self.blocks if weights.part == "blocks" else layers
            ways = layers * (layout.tensor if weights.role == "slice" else 1)
            num_values = weights.num_values * share // ways
            num_bytes = weights.num_bytes * share // ways
            held.append(replace(weights, num_values=num_values, num_bytes=num_bytes))
        return held

    @cached_property
    def sharded(self) -> list[Weights]:
        """What FSDP2 shards: all of a frozen base, or all trained weights but some vectors.

        Norms and biases that are not lowered; see ``shard`` for why.
        """
        if not self.uses_fsdp:
            return []
        alike = [weights for weights in self.held if weights.is_trained == self.size.is_full]
        return [weights for weights in alike if not (self.lowers and weights.is_vector)]

    @cached_property
    def computed(self) -> list[tuple[int, int]]:
        """The micro-batches that it computes."""
        layout, micros = self.layout, list(self.micros)
        if layout.pipeline > 1 and self.parallel.stages_per_rank > 1:
            # Interleaving deals micro-batches out in rounds, and fills up with rows of one token.
            return [*micros, *[(1, 0)] * (-len(micros) % layout.pipeline)]
        if layout.pipeline == layout.shard == 1:
            return [micro for micro in micros if micro[1]]
        return micros

    @property
    def values(self) -> int:
        """Values between two blocks: tokens that are computed, with padding, x hidden."""
        return sum(tokens for tokens, _ in self.computed) * int(self.model.hidden_size)


def step_messages(rank: Rank0, recomputes: bool) -> Iterator[Message]:
    """Yield the messages of a step of the native engine; ``recomputes``: blocks run again."""
    layout = rank.layout
    yield Message("all_reduce", layout.size, 4)  # the loss, in fp32
    if layout.tensor > 1 or layout.pipeline > 1 or (rank.size.is_full and rank.uses_fsdp):
        yield Message("all_reduce", layout.size, 8)  # the gradients' norm, in fp64
    yield from gathered_weights(rank)
    yield from summed_gradients(rank)
    yield from tensor_messages(rank, recomputes)
    if layout.pipeline > 1:
        # Each stage's output forward, its input's gradient backward, but at the model's ends.
        hops = 2 * rank.parallel.stages_per_rank - 1
        yield Message("send", 2, rank.values * rank.wire, hops)


def gathered_weights(rank: Rank0) -> Iterator[Message]:
    """Yield the gatherings of weights that are sharded (FSDP2).

    Once per step, or per micro-batch once (reshard=micro) or twice (block). With reshard=block,
    what is in no block, nor in an embedding of its own, stays from a forward to its backward pass;
    and such an embedding, where it is frozen, is gathered in a backward pass for the next forward
    pass.
    """
    num_micro, full = len(rank.computed), rank.size.is_full
    for weights in rank.sharded:
        match rank.parallel.reshard:
            case "step":
                times = 1
            case "micro":
                times = num_micro
            case _ if weights.part == "end" or (weights.part == "embedding" and rank.is_tied):
                times = num_micro
            case _ if weights.part == "embedding" and not full:
                times = num_micro + 1
            case _:
                times = 2 * num_micro
        num_bytes = rank.itemsize * weights.num_values if rank.lowers else weights.num_bytes
        yield Message("all_gather", rank.layout.shard, num_bytes, times)


def summed_gradients(rank: Rank0) -> Iterator[Message]:
    """Yield the collectives that add up gradients.

    Replicated gradients, of their weights' dtype: an all-reduce over the ranks with rows of their
    own, and over the tensor axis too where each rank has a partial sum. Sharded ones, in
    parallel.reduce_dtype: a reduce-scatter over the shards in each backward pass, or with
    reshard=step in the last, and an all-reduce of the own shard over the replicas. A pipeline's
    first and last stage add up what they hold both, the embedding that is the head too.
    """
    layout, parallel, sharded = rank.layout, rank.parallel, rank.sharded
    data, shard = layout.data_size, layout.shard
    for weights in rank.held:
        if weights.is_trained and weights not in sharded:
            ranks = data * (layout.tensor if weights.role == "partial" else 1)
            yield Message("all_reduce", ranks, weights.num_bytes)
    if not rank.size.is_full:
        return
    itemsize = 2 if parallel.reduce_dtype == "bf16" else 4
    passes = 1 if parallel.reshard == "step" else len(rank.computed)
    for weights in sharded:
        num_bytes = itemsize * weights.num_values
        yield Message("reduce_scatter", shard, num_bytes, passes)
        yield Message("all_reduce", layout.replicate, num_bytes // shard)
        if weights.role == "partial":
            yield Message("all_reduce", layout.tensor, weights.num_bytes // shard)
    if rank.is_tied and layout.pipeline > 1:
        embedding = sum(w.num_bytes for w in rank.held if w.part == "embedding")
        yield Message("all_reduce", 2, embedding // shard)


def tensor_messages(rank: Rank0, recomputes: bool) -> Iterator[Message]:
    """Yield the messages of activations on the tensor axis.

    Per block two all-reduces of tokens x hidden forward, of products, and two backward, of what
    flows between blocks (arXiv:1909.08053); one for the embedding. A frozen one needs no gradient
    from the first block. A block that runs again does its first sum again, and stops before its
    last. The head, where rank 0 has it: the gradient of the tokens with loss, and three numbers of
    each in fp32, again where their logits are computed again. And what a plan gathers in between.
    """
    ranks, model, full = rank.layout.tensor, rank.model, rank.size.is_full
    forward = rank.blocks * (FORWARD_SUMS + recomputes)
    backward = rank.blocks * BACKWARD_SUMS - (not full)
    yield Message("all_reduce", ranks, rank.values * rank.itemsize, forward)
    yield Message("all_reduce", ranks, rank.values * rank.wire, backward)
    yield Message("all_reduce", ranks, rank.values * (rank.itemsize if rank.lowers else rank.wire))
    if rank.layout.pipeline == 1:
        most = max(LEAST_TOKENS, TRAINED_LOGITS_BYTES // (4 * model.vocab_size))
        for _, loss_tokens in rank.computed:
            times = 2 if loss_tokens > most else 1
            yield Message("all_reduce", ranks, loss_tokens * model.hidden_size * rank.wire)
            yield Message("all_reduce", ranks, loss_tokens * 3 * 4, times)
    ahead, back = rank.size.gathered_features
    features = (2 * ahead if recomputes else ahead) + back
    tokens = rank.values // model.hidden_size
    gathered = tokens * rank.itemsize * features * rank.blocks // model.num_hidden_layers
    yield Message("all_gather", ranks, gathered)
