"""Bytes and flops from shapes: what a model costs before anything is allocated."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from hpc_tune.model.config_json import value_shared_by_layers
from hpc_tune.model.experts import (
    ROUTED_EXPERTS,
    active_expert_share,
    has_experts,
    label_parameters_by_part,
    num_experts_per_token,
)
from hpc_tune.model.kernels import layer_windows
from hpc_tune.model.layers import find_blocks, is_vector
from hpc_tune.model.loss import LossModel
from hpc_tune.model.quantized_base import PackedLayer, find_packed_weights, scale_bytes
from hpc_tune.step.layout import Layout
from hpc_tune.step.slices import (
    BlockAllReduces,
    TensorRole,
    count_all_reduces,
    find_tensor_roles,
    num_gathered_features,
)

ModelPart = Literal["blocks", "embedding", "end"]
MOMENT_NAMES = ("exp_avg", "exp_avg_sq")  # AdamW's state of each trained value; torch's names
NUM_MOMENTS = len(MOMENT_NAMES)
# Copies of a trained value, in one dtype: itself, gradient and moments; all but the gradient.
STATE_COPIES, SAVED_COPIES = 2 + NUM_MOMENTS, 1 + NUM_MOMENTS
# With optim.name=adamw_8bit: values that share an fp32 scale, and a parameter's minimum of values.
VALUES_PER_8BIT_BLOCK, _MIN_8BIT_VALUES = 256, 4096


def has_8bit_moments(num_values: int) -> bool:
    """Return whether optim.name=adamw_8bit quantizes the moments of a parameter of this size."""
    return num_values >= _MIN_8BIT_VALUES


@dataclass(frozen=True)
class WeightGroup:
    """All of a model's parameters that every layout treats alike, added up.

    ``part``: the decoder blocks; the input embedding, with the head if they are tied; or what
    follows the blocks. ``role``: what a rank of the tensor axis holds of each parameter, a slice or
    all of it with a whole or a partial gradient. ``is_vector``: norms, and what has fewer than two
    dims. ``kind``: what they are in a mixture of experts (``experts.label_parameters_by_part``).
    ``values_by_block``: the values in each decoder block, if blocks differ. ``shape``: of each
    parameter, empty if no layout shards it; of packed codes the first length.
    """

    part: ModelPart
    role: TensorRole | Literal["whole"]
    is_trained: bool
    is_vector: bool
    num_values: int = 0
    num_bytes: int = 0
    kind: str = ""
    values_by_block: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()

    def padded_size(self, amount: int, num_shards: int, can_shard_any_dim: bool = False) -> int:
        """Return ``amount`` values or bytes of these, with the padding for shards of equal size.

        FSDP2 cuts each tensor into shards of equally many rows; the last may get fewer or none.
        ``can_shard_any_dim``: it cuts another dimension instead if the shards divide that one.
        """
        shardable_dims = self.shape if can_shard_any_dim else self.shape[:1]
        if not shardable_dims or any(length % num_shards == 0 for length in shardable_dims):
            return amount
        rows = self.shape[0]
        return amount * (-(-rows // num_shards) * num_shards) // rows

    def row_shard_shape(self, num_shards: int) -> tuple[int, ...]:
        """Return the shape of each parameter if its rows are cut into ``num_shards`` parts."""
        return (self.shape[0] // num_shards, *self.shape[1:]) if self.shape else ()

    def num_values_in(self, blocks: Sequence[int], num_blocks: int) -> int:
        """Return the values in some of the ``num_blocks`` decoder blocks."""
        if not self.values_by_block:
            return self.num_values * len(blocks) // num_blocks
        return sum(self.values_by_block[block] for block in blocks)


@dataclass(frozen=True)
class ModelSize:
    """Values and bytes of a model, by whether they are trained.

    ``scale_bytes``: the scales of a 4-bit base's codes. ``weights``: all parameters, by what
    layouts do with them. ``num_gathered_features``: how many features of a token the tensor axis
    gathers in all blocks, forward and backward; ``block_all_reduces``: what it sums in each.
    ``moment_savings_bytes``: what 8-bit moments save. ``num_blocks``: its decoder blocks, if they
    were counted; a configuration may count their attention layers instead.
    """

    num_frozen: int
    num_trained: int
    frozen_bytes: int
    trained_bytes: int
    scale_bytes: int = 0
    weights: tuple[WeightGroup, ...] = ()
    num_gathered_features: tuple[int, int] = (0, 0)
    block_all_reduces: tuple[BlockAllReduces, ...] = ()
    moment_savings_bytes: int = 0
    num_blocks: int = 0

    @property
    def num_parameters(self) -> int:
        """All values."""
        return self.num_frozen + self.num_trained

    @property
    def is_fully_trained(self) -> bool:
        """Whether all weights are trained."""
        return self.num_frozen == 0

    @property
    def trains_embedding(self) -> bool:
        """Whether the input embedding is trained, or rows of it."""
        return any(w.is_trained and w.num_values for w in self.weights if w.part == "embedding")

    @property
    def trains_block_input(self) -> bool:
        """Whether something before the first block's matmuls is trained."""
        blocks = [w for w in self.weights if w.part == "blocks" and w.is_vector]
        return self.trains_embedding or any(w.is_trained for w in blocks)

    @property
    def trained_nonblock_bytes(self) -> int:
        """Bytes of the trained matrices that are in no decoder block."""
        ends = (w for w in self.weights if w.is_trained and w.part != "blocks")
        return sum(w.num_bytes for w in ends if not w.is_vector)

    @property
    def trained_itemsize(self) -> int:
        """Bytes of a trained value as it is stored."""
        return self.trained_bytes // self.num_trained

    def blocks(self, config: Any) -> int:
        """Return the number of decoder blocks of a transformers config's model."""
        return self.num_blocks or int(config.num_hidden_layers)

    def activation_itemsize(self, itemsize: int) -> int:
        """Return the bytes of a value between blocks: as weights are stored, if all are trained.

        ``itemsize``: of a value in matmuls.
        """
        return max(itemsize, self.trained_itemsize) if self.is_fully_trained else itemsize


def measure_model_size(module: nn.Module, has_8bit_optimizer: bool = False) -> ModelSize:
    """Count a model's parameters, tied ones once; works on the meta device.

    Of a module that is no ``LossModel`` only values and bytes are counted. ``has_8bit_optimizer``:
    whether the optimizer's moments have 8 bits.
    """
    frozen = [p for p in module.parameters() if not p.requires_grad]
    trained = [p for p in module.parameters() if p.requires_grad]
    packed_layers = {module.get_parameter(n): layer for n, layer in find_packed_weights(module)}
    model = module if isinstance(module, LossModel) else None
    return ModelSize(
        sum(p.numel() for p in frozen)
        + sum(layer.num_values - p.numel() for p, layer in packed_layers.items()),
        sum(p.numel() for p in trained),
        sum(p.numel() * p.element_size() for p in frozen),
        sum(p.numel() * p.element_size() for p in trained),
        sum(map(scale_bytes, packed_layers.values())),
        () if model is None else _group_weights(model, packed_layers),
        (0, 0) if model is None else num_gathered_features(model),
        () if model is None else count_all_reduces(model),
        sum(_moment_savings_bytes(p) for p in trained) if has_8bit_optimizer else 0,
        0 if model is None else len(find_blocks(model)),
    )


def _moment_savings_bytes(parameter: nn.Parameter) -> int:
    """Return what 8-bit moments save: codes and scales replace values."""
    num_values = parameter.numel()
    if not has_8bit_moments(num_values):
        return 0
    in_8_bits = num_values + 4 * (num_values // VALUES_PER_8BIT_BLOCK)
    return NUM_MOMENTS * (num_values * parameter.element_size() - in_8_bits)


def _group_weights(
    module: LossModel, packed: Mapping[nn.Parameter, PackedLayer]
) -> tuple[WeightGroup, ...]:
    roles, blocks = find_tensor_roles(module), _map_blocks_by_parameter(module)
    embedding = set(module.causal_lm().get_input_embeddings().parameters())
    kinds = label_parameters_by_part(module)
    trained = {p for p in module.parameters() if p.requires_grad}
    adapters = trained if len(trained) < len(list(module.parameters())) else set()
    groups: dict[WeightGroup, list[nn.Parameter]] = {}
    for name, p in module.named_parameters():
        part: ModelPart = "blocks" if p in blocks else "embedding" if p in embedding else "end"
        group = WeightGroup(
            part,
            roles.get(p, "whole"),
            p.requires_grad,
            is_vector(name, p),
            kind=kinds.get(p, ""),
            shape=() if p in adapters else tuple(p.shape[:1] if p in packed else p.shape),
        )
        groups.setdefault(group, []).append(p)
    weights = []
    for group, parameters in groups.items():
        values = {p: packed[p].num_values if p in packed else p.numel() for p in parameters}
        num_bytes = sum(p.numel() * p.element_size() for p in parameters)
        values_by_block = [0] * (max(blocks.values()) + 1)
        for p in parameters if group.part == "blocks" else ():
            values_by_block[blocks[p]] += values[p]
        sizes = tuple(values_by_block) if len(set(values_by_block)) > 1 else ()
        total = sum(values.values())
        weights.append(replace(group, num_values=total, num_bytes=num_bytes, values_by_block=sizes))
    return tuple(weights)


def _map_blocks_by_parameter(module: LossModel) -> dict[nn.Parameter, int]:
    return {p: block for block, part in enumerate(find_blocks(module)) for p in part.parameters()}


def static_bytes(size: ModelSize, layout: Layout) -> int:
    """Return the bytes per rank of weights, gradients and optimizer state.

    Adapters (if the base is frozen) and the scales of a 4-bit base are not sharded, but adapters on
    experts are spread with them; everything else is divided by the shards, with padding. It is
    assumed that the tensor and pipeline axes divide everything, even norms and uneven stages.
    """
    state = STATE_COPIES * size.trained_bytes - size.moment_savings_bytes
    num_slices = layout.tensor * layout.pipeline
    if not size.is_fully_trained:
        routed_bytes = sum(
            w.num_bytes for w in size.weights if w.is_trained and w.kind == ROUTED_EXPERTS
        )
        state -= STATE_COPIES * (routed_bytes - routed_bytes // layout.expert)
        frozen_bytes = _padded_bytes(size.frozen_bytes, size, layout) // (layout.shard * num_slices)
        return frozen_bytes + (size.scale_bytes + state) // num_slices
    return _padded_bytes(state, size, layout) // (layout.shard * num_slices)


def _padded_bytes(num_bytes: int, size: ModelSize, layout: Layout) -> int:
    """Return the bytes of all shards: ``num_bytes``, enlarged as padding enlarges sharded weights.

    The weights' lengths are those before the tensor axis cuts them.
    """
    sharded_weights = [w for w in size.weights if w.shape]
    total_bytes = sum(w.num_bytes for w in sharded_weights)
    padded_bytes = 0
    for weights in sharded_weights:
        if weights.kind == ROUTED_EXPERTS and layout.expert > 1:
            rank_weights = replace(weights, shape=weights.row_shard_shape(layout.expert))
            padded_bytes += rank_weights.padded_size(
                weights.num_bytes, layout.expert_shard, can_shard_any_dim=True
            )
        else:
            padded_bytes += weights.padded_size(weights.num_bytes, layout.shard)
    return num_bytes * padded_bytes // total_bytes if total_bytes else num_bytes


def max_activation_bytes(config: Any, tokens: int) -> int:
    """Return a bound in bytes on what a rank keeps of ``tokens`` tokens without recompute.

    68 bytes x tokens x hidden x layers: in 32 bits, twice the 16-bit values of arXiv:2205.05198
    without the scores, which are not kept. The fp32 logits and their gradient. In each layer, for
    each expert of a token, 4 bytes x (3 hidden + 4 inner): its input, output and weighted output;
    gate and up, the activation, and their product.
    """
    hidden: int = config.hidden_size
    token_bytes = 68 * hidden
    if has_experts(config):
        token_bytes += (
            4 * (3 * hidden + 4 * _expert_inner_size(config)) * num_experts_per_token(config)
        )
    block_bytes: int = token_bytes * tokens * config.num_hidden_layers
    logits_bytes: int = 8 * tokens * config.vocab_size
    return block_bytes + logits_bytes


def _expert_inner_size(config: Any) -> int:
    names = ("moe_intermediate_size", "intermediate_size")
    inner = next((value for n in names if (value := value_shared_by_layers(config, n))), 0)
    return int(max(inner) if isinstance(inner, list) else inner)


def flops_per_token(size: ModelSize, config: Any, seq_len: int) -> float:
    """Return the flops of one training step per token of a document of ``seq_len`` tokens.

    Counts the weights, and attention within the document. ``config`` is the transformers config.
    """
    return weight_flops_per_token(size, config) + attention_flops(config, [seq_len]) / seq_len


def weight_flops_per_token(size: ModelSize, config: Any) -> float:
    """Return the flops of one training step per token in matmuls with weights.

    Without recomputation. Two per weight forward and two backward for the gradient of the input,
    two more for the gradient of a trained weight: 4 x frozen + 6 x trained. The input embedding
    counts only if it is also the head, and routed experts only as far as a token uses them.
    """
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    flops = 4.0 * size.num_frozen + 6.0 * size.num_trained
    weights = [w for w in size.weights if w.part == "embedding" and w.is_trained]
    is_trained = size.is_fully_trained or sum(w.num_values for w in weights) >= embedding > 0
    expert_groups = [w for w in size.weights if w.kind == ROUTED_EXPERTS]
    idle_flops = sum((6.0 if w.is_trained else 4.0) * w.num_values for w in expert_groups)
    idle_flops *= 1 - active_expert_share(config)
    return flops - (6.0 if is_trained else 4.0) * embedding - idle_flops


def attention_flops(config: Any, lengths: Sequence[int]) -> float:
    """Return the flops of causal attention in one training step of documents of ``lengths`` tokens.

    6 x hidden x length^2 in each layer (arXiv:2204.02311, appendix B, halved for causality). A
    sliding window of W tokens leaves out the triangle of tokens further away, (length - W)^2.
    """
    scores = 0
    for window, num_layers in Counter(layer_windows(config)).items():
        excess_lengths = (max(0, length - (window or length)) for length in lengths)
        scores += num_layers * (sum(n * n for n in lengths) - sum(n * n for n in excess_lengths))
    return 6.0 * config.hidden_size * scores
