"""What a step costs from shapes alone: flops, and the bytes that each rank sends."""

from collections import Counter
from typing import Any

from hpc_tune.config.parallel import ParallelConfig
from hpc_tune.engine.mesh import Layout
from hpc_tune.plan.account import ModelSize

# Dense bf16 flops per second from the vendors' data sheets, by the name the driver gives.
_PEAK_BF16 = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "MI300X": 1307e12,
    "MI250X": 191.5e12,
}


def flops_per_token(size: ModelSize, config: Any, seq_len: int) -> float:
    """Return the flops of one training step per token, without recomputation.

    Two per weight forward and two backward for the gradient of the input, two more for the
    gradient of a trained weight: 4 x frozen + 6 x trained, where the input embedding counts only if
    it is also the head. Causal attention adds 6 x layers x hidden x seq_len (arXiv:2204.02311,
    appendix B, halved for causality).
    """
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    full = size.num_frozen == 0
    weights = 4.0 * size.num_frozen + 6.0 * size.num_trained
    weights -= (6.0 if full else 4.0) * embedding
    return weights + 6.0 * config.num_hidden_layers * config.hidden_size * seq_len


def peak_flops(device_name: str) -> float | None:
    """Return a GPU's dense bf16 peak in flops per second; None if it is not in the table."""
    return next((peak for name, peak in _PEAK_BF16.items() if name in device_name), None)


def expected_bytes(
    size: ModelSize,
    config: Any,
    layout: Layout,
    parallel: ParallelConfig,
    tokens: int,
    num_micro: int,
    itemsize: int,
) -> dict[str, int]:
    """Return the bytes that rank 0 sends in a step, by kind of collective.

    ``tokens`` are those of the rank's rows with padding, in ``num_micro`` micro-batches, computed
    with in values of ``itemsize`` bytes. ``config`` is the model's transformers config,
    ``parallel.reshard`` must have been decided. See ``traffic`` for what an algorithm sends.
    """
    full = size.num_frozen == 0
    # Where weights are stored in more bytes than they are computed with, so is what flows between.
    wire = max(itemsize, size.trained_bytes // size.num_trained) if full else itemsize
    reduced = 2 if parallel.reduce_dtype == "bf16" else 4
    kinds: Counter[str] = Counter()
    if parallel.zero_stage is not None:
        kinds.update(zero_bytes(size, layout.size, parallel, num_micro))
    else:
        passes = 1 if parallel.reshard == "step" else num_micro
        kinds.update(reduced_bytes(size, layout, full, reduced, passes))
        if layout.shard > 1:
            weights = size.num_trained * itemsize if full else size.frozen_bytes
            kinds["all_gather"] += gathered_bytes(weights, layout, parallel.reshard, num_micro)
        per_rank = parallel.stages_per_rank
        kinds.update(activation_bytes(config, layout, full, tokens, itemsize, wire, per_rank))
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


def gathered_bytes(weights: int, layout: Layout, reshard: str, num_micro: int) -> int:
    """Return the bytes a rank sends per step to gather ``weights`` bytes that are sharded (FSDP2).

    (g-1)/g of its part of the weights each time: per micro-batch once (reshard=micro) or twice
    (block; but what the root holds stays), or once per step.
    """
    part = weights // (layout.tensor * layout.pipeline)
    once = part * (layout.shard - 1) // layout.shard
    return once * {"step": 1, "micro": num_micro, "block": 2 * num_micro}[reshard]


def reduced_bytes(
    size: ModelSize, layout: Layout, full: bool, itemsize: int, passes: int = 1
) -> dict[str, int]:
    """Return the bytes a rank sends per step to add up gradients, by kind of collective.

    Replicated gradients, of their weights' dtype: an all-reduce, 2 (g-1)/g of them. Sharded ones,
    in values of ``itemsize`` bytes (parallel.reduce_dtype): a reduce-scatter over the shards in
    each of ``passes`` backward passes, and an all-reduce of the own shard over the replicas.
    Adapters that are whole on the tensor axis travel over it too, which is left out here.
    """
    grads = size.trained_bytes // (layout.tensor * layout.pipeline)
    shard, replicate = layout.shard, layout.replicate
    if full and shard > 1:
        grads = itemsize * size.num_trained // (layout.tensor * layout.pipeline)
        return {
            "reduce_scatter": passes * (grads * (shard - 1) // shard),
            "all_reduce": 2 * (replicate - 1) * grads // (replicate * shard),
        }
    ranks = layout.data_size
    return {"reduce_scatter": 0, "all_reduce": 2 * (ranks - 1) * grads // ranks}


def activation_bytes(
    config: Any,
    layout: Layout,
    full: bool,
    tokens: int,
    itemsize: int,
    wire: int,
    stages_per_rank: int = 1,
) -> dict[str, int]:
    """Return the bytes rank 0 sends per step for the activations of ``tokens`` tokens.

    Products are in values of ``itemsize`` bytes, what flows between blocks in values of ``wire``.
    Tensor axis, per block: two all-reduces of tokens x hidden forward and two backward
    (arXiv:1909.08053), and one each for the embedding and, over the tokens with loss, the head
    (left out here). A frozen embedding needs no gradient from the first block. Pipeline
    axis: each stage's output forward, its input's gradient backward, but for the model's own ends.
    """
    hidden = tokens * config.hidden_size
    blocks = config.num_hidden_layers // layout.pipeline
    g = layout.tensor
    summed = 2 * blocks * itemsize + (2 * blocks + full) * wire
    return {
        "all_reduce": 2 * (g - 1) * summed * hidden // g,
        "send": (2 * stages_per_rank - 1) * hidden * wire if layout.pipeline > 1 else 0,
    }
