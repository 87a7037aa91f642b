"""The messages of a step, and the bytes that a rank sends in them (pure).

StepPlan, micro-batches -> step_messages -> expected_bytes
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpc_tune.config.parallel import AXES
from hpc_tune.model.experts import num_experts, num_experts_per_token
from hpc_tune.model.loss import MIN_CHUNK_TOKENS, TRAINED_HEAD_LOGITS_BYTES
from hpc_tune.model.shared_rows import count_repeated_key_heads
from hpc_tune.step.layout import CollectiveKind, sent_bytes
from hpc_tune.step.plan import MicroTokens, StepPlan
from hpc_tune.step.slices import BlockAllReduces, splits_heads

FIRST_AND_LAST_STAGE_AXES = ("ends of the pipeline",)
# All-reduces of a block on the tensor axis (arXiv:1909.08053).
FORWARD_ALL_REDUCES, BACKWARD_ALL_REDUCES = 2, 2


@dataclass(frozen=True)
class Message:
    """A collective over ``axes`` of ``ranks`` ranks in all, or a send, ``times`` in a step.

    ``axes`` may also be ``FIRST_AND_LAST_STAGE_AXES``: the first and the last rank of a pipeline.
    ``num_bytes`` of one message: what is summed, scattered or sent to a neighbor, or what every
    rank has after a gather.
    """

    kind: CollectiveKind
    axes: tuple[str, ...]
    ranks: int
    num_bytes: int
    times: int = 1

    @property
    def sent_bytes(self) -> int:
        """What each rank sends by the ring algorithms."""
        return self.times * sent_bytes(self.kind, self.ranks, self.num_bytes)


def expected_bytes(
    plan: StepPlan, micros: Sequence[MicroTokens], recomputes: bool = False, pp_rank: int = 0
) -> dict[str, int]:
    """Return the bytes that a rank sends in a step, by kind of collective.

    ``micros`` are its micro-batches, only its own tokens if rows are shared; ``pp_rank`` is its
    number on the pipeline axis. ``recomputes``: blocks run again in the backward pass even if
    parallel.recompute does not say so. Exact, with FSDP2's padding of shards, if the ranks of an
    axis divide what else they share, except for ZeRO, which DeepSpeed decides, for an untied frozen
    embedding in a pipeline with reshard=micro, for spread experts, to which tokens are assumed to
    go evenly, and for shared rows, whose few sums of answers and routers are left out.
    """
    bytes_by_kind: Counter[str] = Counter()
    for message in step_messages(plan, micros, recomputes, pp_rank):
        bytes_by_kind[message.kind] += message.sent_bytes
    return {kind: num for kind, num in bytes_by_kind.items() if num}


def step_messages(
    plan: StepPlan, micros: Sequence[MicroTokens], recomputes: bool = False, pp_rank: int = 0
) -> Iterator[Message]:
    """Yield the messages of a rank in a step; see ``expected_bytes``."""
    layout, computed_micros = plan.layout, plan.executed_micros(micros)
    if plan.parallel.zero_stage is not None:
        yield _collective(plan, "all_reduce", AXES, 4 * plan.num_router_sums)
        yield from zero_messages(plan, plan.parallel.zero_stage, len(computed_micros))
        yield from context_messages(plan, computed_micros, recomputes, pp_rank)
        return
    # The sums of the loss and of the routers, in fp32.
    yield _collective(plan, "all_reduce", AXES, 4 * (plan.num_sums + plan.num_router_sums))
    if plan.shards_gradients:
        yield _collective(plan, "all_reduce", AXES, 8)  # the gradients' norm, in fp64
    yield from weight_messages(plan, len(computed_micros), pp_rank)
    yield from gradient_messages(plan, len(computed_micros), pp_rank)
    yield from tensor_messages(plan, computed_micros, recomputes, pp_rank)
    yield from expert_messages(plan, computed_micros, recomputes, pp_rank)
    yield from context_messages(plan, computed_micros, recomputes, pp_rank)
    if layout.pipeline > 1:
        # Each stage's output forward, its input's gradient backward, except at the model's ends.
        hops = 2 * plan.parallel.stages_per_rank - (pp_rank in (0, layout.pipeline - 1))
        num_bytes = plan.num_activation_values(computed_micros) * plan.activation_itemsize
        yield Message("send", ("pipeline",), 2, num_bytes, hops)


def weight_messages(plan: StepPlan, num_micro: int, pp_rank: int) -> Iterator[Message]:
    """Yield the all-gathers of sharded weights (FSDP2).

    Once per step, or per micro-batch once (reshard=micro) or twice (block). With reshard=block,
    weights outside the blocks stay from a forward to its backward pass, or are an embedding that no
    backward pass needs. A frozen embedding is gathered in all backward passes but the step's last,
    for the next forward pass; in a pipeline's first stage once in vain, as no forward pass follows.
    """
    for weights in filter(plan.is_sharded, plan.weights_of_rank(pp_rank)):
        match plan.parallel.reshard:
            case "step":
                times = 1
            case "micro":
                times = num_micro
            case _ if weights.part == "blocks":
                times = 2 * num_micro
            case _:
                is_apart = weights.part == "embedding" and not plan.is_tied
                is_in_vain = (
                    is_apart and not plan.size.is_fully_trained and plan.layout.pipeline > 1
                )
                times = num_micro + (is_in_vain and num_micro > 1)
        num_bytes = (
            plan.itemsize * weights.num_values if plan.casts_before_gather else weights.num_bytes
        )
        num_bytes = plan.add_fsdp_padding(weights, num_bytes)
        yield _collective(plan, "all_gather", (plan.shard_axis(weights.kind),), num_bytes, times)


def gradient_messages(plan: StepPlan, num_micro: int, pp_rank: int) -> Iterator[Message]:
    """Yield the collectives that sum gradients.

    Replicated gradients, in their weights' dtype: an all-reduce over the axes of
    ``reduction_axes``. Sharded ones, in parallel.reduce_dtype: a reduce-scatter over the shards in
    each backward pass, or with reshard=step in the last, and an all-reduce of the own shard over
    the replicas; a partial sum also over the tensor axis, in its weight's dtype. A pipeline's first
    and last stage sum the gradient of a tied embedding, which both hold.
    """
    layout, parallel = plan.layout, plan.parallel
    weight_groups, unsharded_bytes = plan.weights_of_rank(pp_rank), Counter[tuple[str, ...]]()
    for weights in weight_groups:
        if weights.is_trained and not plan.is_sharded(weights):
            axes = plan.reduction_axes(
                weights.role == "partial", plan.is_expert_parallel(weights.kind)
            )
            unsharded_bytes[axes] += weights.num_bytes
    for axes, num_bytes in unsharded_bytes.items():
        yield _collective(plan, "all_reduce", axes, num_bytes)
    if not plan.size.is_fully_trained:
        return
    itemsize = 2 if parallel.reduce_dtype == "bf16" else 4
    passes = 1 if parallel.reshard == "step" else num_micro
    for weights in filter(plan.is_sharded, weight_groups):
        num_bytes = plan.add_fsdp_padding(weights, itemsize * weights.num_values)
        shards = plan.num_shards(weights)
        yield _collective(
            plan, "reduce_scatter", (plan.shard_axis(weights.kind),), num_bytes, passes
        )
        yield _collective(plan, "all_reduce", ("replicate",), num_bytes // shards)
        if weights.role == "partial":
            own_bytes = plan.add_fsdp_padding(weights, weights.num_bytes) // shards
            yield _collective(plan, "all_reduce", ("tensor",), own_bytes)
    if plan.is_tied and layout.pipeline > 1 and pp_rank in (0, layout.pipeline - 1):
        embedding = sum(
            plan.add_fsdp_padding(w, w.num_bytes) for w in weight_groups if w.part == "embedding"
        )
        yield Message("all_reduce", FIRST_AND_LAST_STAGE_AXES, 2, embedding // layout.shard)


def tensor_messages(
    plan: StepPlan,
    computed_micros: Sequence[MicroTokens],
    recomputes: bool = False,
    pp_rank: int = 0,
) -> Iterator[Message]:
    """Yield the messages of activations on the tensor axis.

    For blocks and the embedding see ``_activation_all_reduces``. For the head, on the rank that has
    it: the gradient of its input, for tokens with loss, and three fp32 numbers for each (these
    twice if logits are recomputed). And what the model's plan gathers.
    """
    model, all_reduce = plan.model, partial(_collective, plan, "all_reduce", ("tensor",))
    recomputes = recomputes or plan.parallel.recompute != "none"
    tokens = sum(tokens for tokens, _ in computed_micros)
    for token_bytes, times in _activation_all_reduces(plan, recomputes, pp_rank):
        yield all_reduce(tokens * token_bytes, times)
    if pp_rank == plan.layout.pipeline - 1:
        chunk_tokens = max(MIN_CHUNK_TOKENS, TRAINED_HEAD_LOGITS_BYTES // (4 * model.vocab_size))
        for _, loss_tokens in computed_micros:
            times = 2 if loss_tokens > chunk_tokens else 1
            yield all_reduce(loss_tokens * model.hidden_size * plan.activation_itemsize)
            yield all_reduce(loss_tokens * 3 * 4, times)
    forward, backward = plan.size.num_gathered_features
    features = (2 * forward if recomputes else forward) + backward
    blocks, model_blocks = len(plan.blocks_of_rank(pp_rank)), plan.size.blocks(model)
    if gathered_bytes := tokens * plan.itemsize * features * blocks // model_blocks:
        yield _collective(plan, "all_gather", ("tensor",), gathered_bytes)


def _activation_all_reduces(
    plan: StepPlan, recomputes: bool, pp_rank: int
) -> Iterator[tuple[int, int]]:
    """Yield the all-reduces of a rank's blocks and embedding: bytes per token, and how many.

    A block has two of matmul outputs forward, and two of gradients of matmul inputs backward
    (arXiv:1909.08053); blocks with experts differ, and linear attention has one more inside.
    """
    size, hidden, wire_itemsize = plan.size, plan.model.hidden_size, plan.activation_itemsize
    default = [BlockAllReduces(FORWARD_ALL_REDUCES, BACKWARD_ALL_REDUCES)] * size.blocks(plan.model)
    blocks = [(size.block_all_reduces or default)[n] for n in plan.blocks_of_rank(pp_rank)]
    forward = sum(block.forward for block in blocks)
    router_gradients = sum(block.router_gradients for block in blocks)
    backward, is_first = sum(block.backward for block in blocks), pp_rank == 0
    # A recomputed block repeats its first sums, and stops before its last.
    num_repeated = max(0, forward - len(blocks)) if recomputes else 0
    # A frozen embedding that no trained norm follows needs no gradient from the first block.
    skips_input_grad = blocks[0].includes_block_input and is_first and not size.trains_block_input
    yield hidden * plan.itemsize, forward - router_gradients + num_repeated
    # Experts' outputs have the dtype of activations between blocks, and are a block's last sum.
    yield hidden * wire_itemsize, router_gradients + backward - skips_input_grad
    inner_features = sum(block.inner_features for block in blocks)
    yield wire_itemsize * inner_features, int(inner_features > 0)
    # What routers get back in fp32: a gradient for each expert of a token.
    yield num_experts_per_token(plan.model) * 4, router_gradients
    yield hidden * (plan.itemsize if plan.casts_before_gather else wire_itemsize), int(is_first)


def expert_messages(
    plan: StepPlan,
    computed_micros: Sequence[MicroTokens],
    recomputes: bool = False,
    pp_rank: int = 0,
) -> Iterator[Message]:
    """Yield the messages that send tokens to experts spread over ranks, and back.

    Assumes even routing: each of a token's experts gets its hidden values and sends as many back,
    and likewise their gradients. Before that, each expert's number of tokens is sent, in 8 bytes. A
    recomputed block sends the values again, but not the numbers. Not subtracted: a first block with
    nothing trained before its experts sends back no gradients of its input.
    """
    if plan.layout.expert == 1:
        return
    all_to_all = partial(_collective, plan, "all_to_all", ("expert",))
    num_mixtures = plan.num_mixture_blocks(pp_rank)
    forward_passes = 2 if recomputes or plan.parallel.recompute != "none" else 1
    rows = plan.num_activation_values(computed_micros) * num_experts_per_token(plan.model)
    yield all_to_all(rows * plan.activation_itemsize, 2 * num_mixtures * (forward_passes + 1))
    yield all_to_all(8 * num_experts(plan.model), num_mixtures * len(computed_micros))


def context_messages(
    plan: StepPlan,
    computed_micros: Sequence[MicroTokens],
    recomputes: bool = False,
    pp_rank: int = 0,
) -> Iterator[Message]:
    """Yield the messages by which ranks that share rows compute attention over whole rows.

    Per layer the queries, keys and values of a rank's own tokens go out in one message, and the
    results come back in another; so do their gradients. A recomputed block repeats the forward
    messages. Key and value heads are repeated until the ranks divide them (arXiv:2309.14509).

    If the ranks do not divide the heads, each rank gathers the keys and values of whole rows, and
    their gradients are summed.
    """
    layout = plan.layout
    if layout.context == 1:
        return
    tensor = layout.tensor if splits_heads(plan.model) else 1
    heads, groups, width, value_width = head_counts_and_widths(plan.model, tensor)
    tokens = sum(tokens for tokens, _ in computed_micros)
    forward_passes = 2 if recomputes or plan.parallel.recompute != "none" else 1
    blocks, axes = len(plan.blocks_of_rank(pp_rank)), ("context",)
    if plan.row_shard().is_head_tail:
        gathered_bytes = layout.context * tokens * plan.itemsize * groups * (width + value_width)
        yield _collective(plan, "all_gather", axes, gathered_bytes, blocks * forward_passes)
        yield _collective(plan, "reduce_scatter", axes, gathered_bytes, blocks)
        return
    groups, times = count_repeated_key_heads(groups, layout.context), blocks * (forward_passes + 1)
    all_to_all = partial(_collective, plan, "all_to_all", axes)
    out_features = heads * width + groups * (width + value_width)
    yield all_to_all(tokens * plan.itemsize * out_features, times)
    yield all_to_all(tokens * plan.itemsize * heads * value_width, times)


def head_counts_and_widths(config: Any, num_tensor_ranks: int) -> tuple[int, int, int, int]:
    """Return the query and key heads on a rank of the tensor axis, and the values of each head.

    First of a query or key head, then of a value head: latent attention (DeepSeek) has fewer in the
    latter, and a key head for each query head.
    """
    heads = config.num_attention_heads
    if getattr(config, "qk_rope_head_dim", None) and getattr(config, "v_head_dim", None):
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        return heads // num_tensor_ranks, heads // num_tensor_ranks, width, config.v_head_dim
    groups = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return heads // num_tensor_ranks, max(1, groups // num_tensor_ranks), width, width


def zero_messages(plan: StepPlan, zero_stage: int, num_micro: int) -> Iterator[Message]:
    """Yield the messages of a step under ZeRO (arXiv:1910.02054).

    Stage 1 sums all gradients once per step, stage 2 once per micro-batch, both in all-reduces, and
    both gather the updated weights. Stage 3 gathers weights forward and backward and
    reduce-scatters gradients, per micro-batch. If the base is frozen, trained weights are gathered
    only if they are matrices outside the blocks.
    """
    size, collective = plan.size, partial(_collective, plan)
    if zero_stage == 3:
        weights = (
            size.frozen_bytes + size.trained_nonblock_bytes
            if size.frozen_bytes
            else size.trained_bytes
        )
        yield collective("all_gather", AXES, weights, 2 * num_micro)
        yield collective("reduce_scatter", AXES, size.trained_bytes, num_micro)
        return
    yield collective("all_reduce", AXES, size.trained_bytes, num_micro if zero_stage == 2 else 1)
    yield collective("all_gather", AXES, size.trained_bytes)


def _collective(
    plan: StepPlan, kind: CollectiveKind, axes: tuple[str, ...], num_bytes: int, times: int = 1
) -> Message:
    return Message(kind, axes, plan.layout.group_size(axes), num_bytes, times)
