"""Bytes from shapes: what a layout costs before anything is allocated."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from hpc_tune.engine.mesh import Layout
from hpc_tune.model.quantize import four_bit_layers, scale_bytes

STATE_COPIES = 4  # of a trained value: itself, its gradient and two moments, of one dtype


@dataclass(frozen=True)
class ModelSize:
    """Values and bytes of a model by whether they are trained.

    ``scale_bytes`` are those that tell what a 4-bit base's codes mean.
    """

    num_frozen: int
    num_trained: int
    frozen_bytes: int
    trained_bytes: int
    scale_bytes: int = 0

    @property
    def num_parameters(self) -> int:
        """All values."""
        return self.num_frozen + self.num_trained


def measure(module: nn.Module) -> ModelSize:
    """Count a model's parameters, tied ones once; works on the meta device."""
    frozen = [p for p in module.parameters() if not p.requires_grad]
    trained = [p for p in module.parameters() if p.requires_grad]
    packed = [layer for _, layer in four_bit_layers(module)]
    return ModelSize(
        sum(p.numel() for p in frozen)
        + sum(layer.num_values - layer.weight.numel() for layer in packed),
        sum(p.numel() for p in trained),
        sum(p.numel() * p.element_size() for p in frozen),
        sum(p.numel() * p.element_size() for p in trained),
        sum(map(scale_bytes, packed)),
    )


def static_bytes(size: ModelSize, layout: Layout) -> int:
    """Return the bytes per rank of weights, gradients and optimizer state.

    Adapters (a frozen base is there) and the scales of a 4-bit base are not sharded; all else is
    divided by the shards. The tensor and pipeline axes divide everything, but for norms and uneven
    stages.
    """
    state = STATE_COPIES * size.trained_bytes
    cut = layout.tensor * layout.pipeline
    if size.num_frozen:
        return size.frozen_bytes // (layout.shard * cut) + (size.scale_bytes + state) // cut
    return state // (layout.shard * cut)


def activation_bound(model: Any, tokens: int) -> int:
    """Return more than a micro-batch of ``tokens`` makes a rank keep without recompute, in bytes.

    34 bytes x tokens x hidden x layers in 16 bits (arXiv:2205.05198, without the scores, which are
    not kept), twice that in 32, and the logits in fp32 with their gradient.
    """
    kept: int = 68 * tokens * model.hidden_size * model.num_hidden_layers
    logits: int = 8 * tokens * model.vocab_size
    return kept + logits
