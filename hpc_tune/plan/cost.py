"""What a step costs from shapes alone: flops, and the bytes that each rank sends."""

from typing import Any

from hpc_tune.engine.mesh import Layout
from hpc_tune.plan.account import ModelSize

REDUCED_BYTES = 4  # FSDP2 adds gradients up in fp32 unless parallel.reduce_dtype says bf16
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


def gathered_bytes(
    size: ModelSize, layout: Layout, full: bool, reshard: str, num_micro: int
) -> int:
    """Return the bytes a rank sends per step to gather sharded weights (FSDP2).

    (g-1)/g of its part of the weights each time: per micro-batch once (reshard=micro) or twice
    (block; but what the root holds stays), or once per step.
    """
    sharded = size.trained_bytes if full else size.frozen_bytes
    part = sharded // (layout.tensor * layout.pipeline)
    once = part * (layout.shard - 1) // layout.shard
    return once * {"step": 1, "micro": num_micro, "block": 2 * num_micro}[reshard]


def reduced_bytes(size: ModelSize, layout: Layout, full: bool) -> dict[str, int]:
    """Return the bytes a rank sends per step to add up gradients, by kind of collective.

    Replicated gradients, of their weights' dtype: an all-reduce, 2 (g-1)/g of them. Sharded ones,
    in fp32: a reduce-scatter over the shards, and an all-reduce of the own shard over the replicas.
    Adapters that are whole on the tensor axis travel over it too, which is left out here.
    """
    grads = size.trained_bytes // (layout.tensor * layout.pipeline)
    shard, replicate = layout.shard, layout.replicate
    if full and shard > 1:
        grads = REDUCED_BYTES * size.num_trained // (layout.tensor * layout.pipeline)
        return {
            "reduce_scatter": grads * (shard - 1) // shard,
            "all_reduce": 2 * (replicate - 1) * grads // (replicate * shard),
        }
    ranks = layout.data_size
    return {"reduce_scatter": 0, "all_reduce": 2 * (ranks - 1) * grads // ranks}


def activation_bytes(
    config: Any, layout: Layout, full: bool, tokens: int, itemsize: int
) -> dict[str, int]:
    """Return the bytes a rank sends per step for the activations of ``tokens`` tokens.

    Tensor axis, per block: two all-reduces of tokens x hidden forward and two backward
    (arXiv:1909.08053), and one each for the embedding and, over the tokens with loss, the head
    (left out here). A frozen embedding needs no gradient from the first block. Pipeline
    axis: the rank's own output forward, its input's gradient backward; an end of the pipeline sends
    one of them.
    """
    hidden = tokens * config.hidden_size * itemsize
    blocks = config.num_hidden_layers // layout.pipeline
    g = layout.tensor
    return {
        "all_reduce": 2 * (g - 1) * (4 * blocks + full) * hidden // g,
        "send": hidden if layout.pipeline > 1 else 0,
    }
