"""The ``parallel`` section of the configuration: how the model is spread over the ranks."""

import math
from typing import Any, Literal

from hpc_tune.config.section import PositiveInt, Section, setting
from hpc_tune.units import format_quantity

AXES = ("replicate", "shard", "tensor", "pipeline")
_SHARD_SETTINGS = ("reshard", "blocks_per_unit", "reduce_dtype")


class ParallelConfig(Section):
    """How the model is spread: replicate x shard x tensor x pipeline is the world size."""

    layout: Literal["simple", "auto"] = setting(
        "simple",
        "free",
        "simple: unset axes are chosen by memory alone. auto: at the start the links between "
        "the ranks and a decoder block are measured, and of all layouts that fit into memory the "
        "one with the shortest predicted step is used, even one on fewer ranks if that is faster; "
        "axes that are set are kept. 'parallel: auto' means the same.",
    )
    engine: Literal["auto", "native", "deepspeed"] = setting(
        "auto",
        "free",
        "What shards the model. auto: DeepSpeed if zero_stage is set, else native "
        "PyTorch, which supports more layouts.",
    )
    replicate: PositiveInt | None = setting(
        None,
        "free",
        "Copies of the model that each train on their share of the rows; gradients are "
        "all-reduced once per step, and each copy takes its own memory. Unset: chosen.",
        aliases="ddp data_parallel_replicate_dim",
    )
    shard: PositiveInt | None = setting(
        None,
        "free",
        "Ranks over which one copy of the weights is split (FSDP2): less memory per "
        "rank, but more communication. Unset: chosen.",
        aliases="fsdp data_parallel_shard_dim",
    )
    tensor: PositiveInt | None = setting(
        None,
        "free",
        "Ranks over which each matrix multiplication is split; it must divide the attention "
        "heads and the key-value heads. Two messages per block and direction: keep it inside a "
        "node. Unset: 1.",
        aliases="tensor_parallel_dim tensor_parallel_size tp_size",
    )
    pipeline: PositiveInt | None = setting(
        None,
        "free",
        "Ranks over which the decoder blocks are split. Only activations are sent, so "
        "it suits slow links; give each rank several micro-batches per step, or it is idle much "
        "of the time. Unset: 1.",
        aliases="pipeline_parallel_size pp_size",
    )
    expert: PositiveInt = setting(
        1,
        "free",
        "Ranks over which the routed experts of a mixture are spread: experts stay where "
        "they are, and tokens are sent to them (arXiv:2006.16668). It must divide parallel.shard, "
        "whose ranks otherwise gather the weights of all experts. If it is smaller than "
        "parallel.shard, neighboring ranks exchange tokens, and ranks with the same experts shard "
        "and gather these. For few tokens per step and many or large experts. 1: not spread.",
    )
    context: PositiveInt = setting(
        1,
        "free",
        "Ranks that share each row: each rank has a part of the tokens, and attention sees the "
        "whole row through two all-to-all messages per layer and direction (DeepSpeed-Ulysses, "
        "arXiv:2309.14509). For rows whose activations do not fit on one rank; the losses "
        "are those of one rank. It adds no ranks: it groups neighbors of replicate x shard, which "
        "it must divide. If it does not divide the attention heads, each rank gathers the keys "
        "of whole rows instead (arXiv:2407.21783). Keep it inside a node. 1: rows are not shared; "
        "layout=auto may share them if whole rows do not fit or are fewer than the ranks.",
        aliases="context_parallel_size cp_size sequence_parallel_size sp_size context_parallel_dim",
    )
    stages_per_rank: PositiveInt = setting(
        1,
        "free",
        "Pipeline stages (virtual stages) that each rank holds. 1: the 1F1B schedule "
        "(arXiv:1806.03377); more: interleaved 1F1B (arXiv:2104.04473), less idle time but more "
        "messages.",
    )
    reshard: Literal["auto", "block", "micro", "step"] = setting(
        "auto",
        "free",
        "How long gathered weights are kept if shard > 1: longer takes more memory and "
        "fewer messages. block: until the block is computed, and they are gathered again in the "
        "backward pass; micro: until the micro-batch's backward pass is over; step: until the "
        "optimizer step, and gradients are reduced once. auto: step if a whole copy fits.",
    )
    blocks_per_unit: PositiveInt = setting(
        1,
        "free",
        "Decoder blocks that are gathered and freed together if shard > 1. More blocks: "
        "fewer and larger messages, and more memory.",
    )
    reduce_dtype: Literal["fp32", "bf16"] = setting(
        "fp32",
        "free",
        "The dtype in which sharded gradients are sent and summed. bf16 halves the "
        "bytes and loses digits with many ranks.",
    )
    zero_stage: Literal[1, 2, 3] | None = setting(
        None,
        "free",
        "The DeepSpeed ZeRO stage (arXiv:1910.02054): 1 splits the optimizer state "
        "over all ranks, 2 the gradients too, 3 the weights too; each stage takes less memory "
        "and more messages. Unset: the native engine.",
        aliases="deepspeed",
    )
    offload_params: Literal["none", "cpu", "nvme"] = setting(
        "none",
        "free",
        "Where weights are kept while they are not used: cpu and nvme free device "
        "memory and cost a transfer in each pass. cpu works for sharded weights with either "
        "engine (the native one moves their optimizer state too), nvme with zero_stage=3.",
        aliases="fsdp_cpu_offload",
    )
    offload_optimizer: Literal["none", "cpu", "nvme"] = setting(
        "none",
        "free",
        "Where optimizer state is kept: cpu and nvme free device memory, and weights "
        "are updated on the host, which is slower. cpu works with zero_stage 1 to 3; nvme, with "
        "the state on disk, with zero_stage=3.",
    )
    offload_path: str | None = setting(
        None,
        "free",
        "The folder for nvme, on a disk of the node itself, used by one job at a time. "
        "Unset: nothing is offloaded to disk.",
        path="file",
    )
    recompute: Literal["none", "selective", "full"] = setting(
        "none",
        "free",
        "Which activations are recomputed in the backward pass instead of kept. "
        "full: all but each decoder block's input, a third more flops for far less memory "
        "(arXiv:1604.06174); selective: all but the results of matmuls and attention, a "
        "few more flops for somewhat less memory. The losses are bitwise the same.",
        aliases="gradient_checkpointing enable_activation_checkpointing activation_checkpointing",
    )
    row_pieces: PositiveInt | Literal["auto"] = setting(
        "auto",
        "free",
        "The number of pieces into which each row is cut for the dense MLPs. Each piece is "
        "computed by itself, and again in the backward pass, so that only one piece's inner "
        "values are in memory (tiled MLP, arXiv:2506.13996). With recompute=full it takes about "
        "as long for most families; without, another forward pass of the MLPs. The losses are the "
        "same; the last digits of gradients may differ. auto: pieces of 4096 tokens or more with "
        "recompute=full if blocks are not compiled, else 1.",
        aliases="tiled_mlp tiled_mlp_num_shards",
    )
    offload_activations: bool = setting(
        False,
        "free",
        "Keep the inputs of recomputed blocks in pinned host memory instead of a GPU's: they are "
        "copied while the next block is computed, and come back one block ahead of the backward "
        "pass. Needs recompute=full; for rows so long that these inputs fill the GPU. The losses "
        "are bitwise the same.",
        aliases="activation_offloading enable_activation_offloading offload_activation",
    )

    @property
    def axes(self) -> dict[str, int]:
        """The axes that are set."""
        return {axis: ranks for axis in AXES if (ranks := getattr(self, axis)) is not None}

    @property
    def ranks_needed(self) -> int:
        """The product of the axes that are set: the number of ranks, or a divisor of it."""
        return math.prod(self.axes.values())

    @property
    def takes_more_ranks(self) -> bool:
        """Whether an unset axis (replicate or shard) can take the remaining ranks."""
        return self.replicate is None or self.shard is None

    def fits_ranks(self, num_ranks: int) -> bool:
        """Return whether the axes that are set can be laid out on ``num_ranks`` ranks."""
        num_needed = self.ranks_needed
        return num_ranks == num_needed or (self.takes_more_ranks and num_ranks % num_needed == 0)

    @property
    def rank_count_text(self) -> str:
        """How many ranks the axes need, such as ``"a multiple of 4 ranks"``."""
        ranks = format_quantity(self.ranks_needed, "rank")
        return f"{'a multiple of ' if self.takes_more_ranks else ''}{ranks}"

    @property
    def changed_shard_settings(self) -> dict[str, Any]:
        """The settings for weights sharded by FSDP2 that differ from the defaults."""
        defaults = {name: type(self).model_fields[name].default for name in _SHARD_SETTINGS}
        return {n: v for n, default in defaults.items() if (v := getattr(self, n)) != default}


# -- The layout for fewer ranks than a configuration was written for, such as after losing a node.


def fit_layout(parallel: ParallelConfig, num_ranks: int) -> dict[str, int] | None:
    """Return the axes to change for ``num_ranks`` ranks; ``None`` if no layout divides them.

    Unset axes are chosen later. tensor and pipeline stay, since they fit the model; the rest is
    ``num_ranks`` / (tensor x pipeline). expert becomes its greatest common divisor with the rest,
    shard the largest multiple of that up to its set value that divides the rest, and replicate the
    remaining factor; without shard, replicate becomes the largest divisor of rest / expert up to
    its set value. context stays, since a row may not fit fewer ranks, and must divide the rest.
    With zero_stage no axis changes.
    """
    rest, remainder = divmod(num_ranks, (parallel.tensor or 1) * (parallel.pipeline or 1))
    if remainder or not rest or rest % parallel.context:
        return None
    if parallel.zero_stage is not None:
        return {}
    # Experts stay spread over the same number of ranks if possible, else over fewer.
    replicate, shard, expert = parallel.replicate, parallel.shard, math.gcd(rest, parallel.expert)
    axes = {}
    if shard is not None:
        axes["shard"] = expert * _largest_divisor(rest // expert, shard // expert)
    axes["expert"] = expert
    if replicate is not None and shard is not None:
        axes["replicate"] = rest // axes["shard"]
    elif replicate is not None:
        axes["replicate"] = _largest_divisor(rest // expert, replicate)
    return {name: size for name, size in axes.items() if size != getattr(parallel, name)}


def _largest_divisor(number: int, max_divisor: int) -> int:
    return next(size for size in range(min(number, max_divisor), 0, -1) if number % size == 0)
