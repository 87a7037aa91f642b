"""Time from flops: what a step must cost at least on a known device."""

from typing import Any

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
