"""The plan of a step: what each rank computes, holds and sends in one optimizer step (pure).

    layout, resolved settings, sizes of the model -> StepPlan

Engines carry it out; messages, memory and step time are predicted from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.model.balance import num_router_sums
from hpc_tune.model.build import BuiltModel
from hpc_tune.model.experts import ROUTED_EXPERTS, active_expert_share
from hpc_tune.model.shared_rows import RowShard
from hpc_tune.step.layout import Layout, assign_stage_blocks
from hpc_tune.step.size import ModelSize, WeightGroup, measure_model_size
from hpc_tune.step.slices import SLICE_ROLES, gathers_keys

# Gradients that are summed during a backward pass are sent in pieces of so many bytes: enough to
# keep a link busy, and little for a model's last piece, which has nothing to hide behind.
GRADIENT_BUCKET_BYTES = 4 << 20
# A micro-batch's tokens with padding, and its tokens with loss.
MicroTokens = tuple[int, int]


def uses_fsdp(shard: int, parallel: ParallelConfig) -> bool:
    """Whether FSDP2 holds the weights of the PyTorch engine; ``shard`` ranks hold one copy.

    FSDP2 also holds weights that are offloaded, even if nothing is sharded.
    """
    return shard > 1 or parallel.offload_params == "cpu"


@dataclass(frozen=True)
class StepPlan:
    """One step of a model in a layout.

    ``parallel.reshard`` must have been decided. ``model`` is the transformers config. Matmuls use
    values of ``itemsize`` bytes. ``loss_token_fraction`` of the tokens reach the head; pipeline
    stages are balanced for that. A micro-batch gives ``num_sums`` sums, of which the first is the
    loss. ``num_router_sums``: the sums that watched routers add to a step's.
    """

    layout: Layout
    parallel: ParallelConfig
    size: ModelSize
    model: Any
    itemsize: int
    loss_token_fraction: float = 1.0
    num_sums: int = 1
    num_router_sums: int = 0

    @classmethod
    def for_model(
        cls,
        built: BuiltModel,
        layout: Layout,
        parallel: ParallelConfig,
        loss_token_fraction: float = 1.0,
        size: ModelSize | None = None,
    ) -> "StepPlan":
        """Return the plan for a whole model, on the meta device or not; ``size``: if measured."""
        return cls(
            layout,
            parallel,
            size or measure_model_size(built.module),
            built.config,
            built.dtype.itemsize,
            loss_token_fraction,
            built.module.objective.num_sums,
            num_router_sums(built.routers),
        )

    # -- What a rank holds.

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP2 holds weights."""
        is_zero = self.parallel.zero_stage is not None
        return not is_zero and uses_fsdp(self.layout.shard, self.parallel)

    @cached_property
    def stages(self) -> list[range]:
        """The decoder blocks of each stage; rank p of the pipeline axis has stages p, p + P, ..."""
        num_blocks = self.size.blocks(self.model)
        if self.layout.pipeline == 1:
            return [range(num_blocks)]
        blocks = [w for w in self.size.weights if w.part == "blocks"]
        routed_values = sum(w.num_values for w in blocks if w.kind == ROUTED_EXPERTS)
        values = sum(w.num_values for w in blocks) - routed_values * (
            1 - active_expert_share(self.model)
        )
        settings = (self.layout, self.parallel.stages_per_rank, self.loss_token_fraction)
        return assign_stage_blocks(self.model, num_blocks, values / num_blocks, *settings)

    def blocks_of_rank(self, pp_rank: int) -> list[int]:
        """Return the decoder blocks of the ``pp_rank``-th rank of the pipeline axis."""
        return [block for stage in self.stages[pp_rank :: self.layout.pipeline] for block in stage]

    def num_mixture_blocks(self, pp_rank: int) -> int:
        """Return how many of a rank's decoder blocks have routed experts."""
        expert_groups = [weights for weights in self.size.weights if weights.kind == ROUTED_EXPERTS]
        return sum(
            any(not w.values_by_block or w.values_by_block[block] for w in expert_groups)
            for block in self.blocks_of_rank(pp_rank)
        )

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is also the head."""
        return bool(self.model.tie_word_embeddings)

    def weights_of_rank(self, pp_rank: int) -> list[WeightGroup]:
        """Return a rank's part of the weights by pipeline, tensor and expert axis, before sharding.

        On the pipeline axis, the first rank has the embedding and the last has the head.
        """
        layout, num_blocks = self.layout, self.size.blocks(self.model)
        is_first, is_last = pp_rank == 0, pp_rank == layout.pipeline - 1
        holds = {"blocks": True, "embedding": is_first or (is_last and self.is_tied)}
        groups = []
        for weights in self.size.weights:
            if not holds.get(weights.part, is_last):
                continue
            rank_values = weights.num_values
            if weights.part == "blocks":
                rank_values = weights.num_values_in(self.blocks_of_rank(pp_rank), num_blocks)
            expert_ranks = layout.expert if weights.kind == ROUTED_EXPERTS else 1
            num_parts = expert_ranks * (layout.tensor if weights.role in SLICE_ROLES else 1)
            num_bytes = weights.num_bytes * rank_values // (num_parts * max(1, weights.num_values))
            shape = weights.row_shard_shape(
                expert_ranks * (layout.tensor if weights.role == "slice" else 1)
            )
            groups.append(
                replace(
                    weights, num_values=rank_values // num_parts, num_bytes=num_bytes, shape=shape
                )
            )
        return groups

    def is_expert_parallel(self, kind: str) -> bool:
        """Whether weights of a kind are experts that are spread over ranks of the shard axis."""
        return self.layout.expert > 1 and kind == ROUTED_EXPERTS

    @property
    def shards_experts(self) -> bool:
        """Whether FSDP2 holds spread experts: to shard those of a rank, or to cast them.

        torch's grouped matmuls do not support autocast.
        """
        return self.layout.expert > 1 and (self.layout.expert_shard > 1 or self.casts_before_gather)

    def is_replicated(self, is_trained: bool, is_vector: bool) -> bool:
        """Whether every rank keeps all of a parameter where FSDP2 shards the others.

        Adapters (all that is trained on a frozen base) stay whole, and so do norms and biases if
        weights are gathered in bf16, as norms are computed in fp32: bf16 has no number between 1
        and 1.0078.
        """
        return is_trained and (
            not self.size.is_fully_trained or (self.casts_before_gather and is_vector)
        )

    def is_sharded(self, weights: WeightGroup) -> bool:
        """Whether FSDP2 shards ``weights``."""
        if self.is_expert_parallel(weights.kind) and not self.shards_experts:
            return False
        return self.uses_fsdp and not self.is_replicated(weights.is_trained, weights.is_vector)

    def shard_axis(self, kind: str) -> str:
        """Return the axis over which weights of a kind are sharded: ``shard``, or a part of it."""
        return "expert_shard" if self.is_expert_parallel(kind) else "shard"

    def num_shards(self, weights: WeightGroup) -> int:
        """Return the number of ranks over which ``weights`` are sharded."""
        if not self.is_sharded(weights):
            return 1
        return self.layout.group_size([self.shard_axis(weights.kind)])

    def add_fsdp_padding(self, weights: WeightGroup, amount: int) -> int:
        """Return ``amount`` values or bytes of a rank's weights, with FSDP2's padding of shards."""
        return weights.padded_size(
            amount,
            self.num_shards(weights),
            can_shard_any_dim=self.is_expert_parallel(weights.kind),
        )

    def num_fsdp_units(self, pp_rank: int) -> int:
        """Return how many parts of a rank's weights FSDP2 gathers separately."""
        experts = self.num_mixture_blocks(pp_rank) if self.shards_experts else 0
        return -(-len(self.blocks_of_rank(pp_rank)) // self.parallel.blocks_per_unit) + 1 + experts

    # -- What a rank computes.

    @property
    def casts_weights(self) -> bool:
        """Whether trained weights have more bytes than matmuls use, and are cast for each."""
        return self.size.is_fully_trained and self.itemsize < self.size.trained_itemsize

    def skips_empty_micros(self, is_training: bool = True) -> bool:
        """Whether a rank skips a micro-batch without loss: no other rank waits for its messages."""
        if self.parallel.zero_stage is not None:
            # DeepSpeed reduces within each backward pass; stage 3 gathers weights in all passes.
            return not is_training and self.parallel.zero_stage < 3
        if is_training and self.num_router_sums:
            return False  # routers count its tokens all the same
        return self.layout.pipeline == self.layout.context == 1 and not self.uses_fsdp

    def num_padding_micros(self, num_micro: int) -> int:
        """Return how many empty micro-batches are added to ``num_micro``.

        Interleaved stages need whole rounds, of one micro-batch for each rank of the pipeline.
        """
        return -num_micro % self.layout.pipeline if self.parallel.stages_per_rank > 1 else 0

    def executed_micros(self, micros: Sequence[MicroTokens]) -> list[MicroTokens]:
        """Return the micro-batches that a rank computes, including one-token ones it adds."""
        computed_micros = [micro for micro in micros if micro[1] or not self.skips_empty_micros()]
        return [*computed_micros, *[(1, 0)] * self.num_padding_micros(len(computed_micros))]

    def num_local_tokens(self, tokens: int) -> int:
        """Return how many of the tokens of rows a rank computes, when several ranks share rows."""
        part = self.row_shard()
        return -(-tokens // part.num_slices) * (part.num_slices // part.size)

    def row_shard(self, rank: int = 0) -> RowShard:
        """Return which tokens of each row the ``rank``-th rank of the context axis has."""
        return RowShard(rank, self.layout.context, gathers_keys(self.model, self.layout))

    def num_activation_values(self, computed_micros: Sequence[MicroTokens]) -> int:
        """Return the number of values between two blocks: tokens with padding x hidden."""
        return sum(tokens for tokens, _ in computed_micros) * int(self.model.hidden_size)

    def num_updated_values(self, pp_rank: int) -> int:
        """Return how many values a rank's optimizer updates."""
        return sum(
            self.add_fsdp_padding(weights, weights.num_values) // self.num_shards(weights)
            for weights in self.weights_of_rank(pp_rank)
            if weights.is_trained
        )

    # -- What a rank sends.

    @property
    def casts_before_gather(self) -> bool:
        """Whether shards are cast to the dtype of matmuls before they are gathered."""
        return self.uses_fsdp and self.casts_weights

    @property
    def activation_itemsize(self) -> int:
        """Bytes of a value between two blocks: as weights are stored, if all are trained."""
        return self.size.activation_itemsize(self.itemsize)

    @property
    def has_only_replicas(self) -> bool:
        """Whether each rank holds all weights: no message is sent before gradients are summed.

        They are summed while the last backward pass runs.
        """
        layout = self.layout
        return layout.replicate == layout.size and layout.context == 1 and not self.uses_fsdp

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank has a part of the gradients, so that their norm is a sum over ranks."""
        shards = (self.size.is_fully_trained and self.uses_fsdp) or self.layout.expert > 1
        return shards or self.layout.tensor > 1 or self.layout.pipeline > 1

    def reduction_axes(self, is_partial: bool, is_expert_parallel: bool = False) -> tuple[str, ...]:
        """Return the axes over which a gradient is summed; for a partial sum also the tensor axis.

        ``is_expert_parallel``: for spread experts, whose ranks have had all tokens of the expert
        axis.
        """
        if is_expert_parallel:
            return ("replicate", "expert_shard")
        return ("replicate", "shard", "tensor") if is_partial else ("replicate", "shard")
