"""What a rank of the tensor axis holds of each parameter, by the model's own plan (pure).

See ``engine/tensor_parallel.py``, which cuts and connects the slices.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal

from torch import nn

from hpc_tune.model.config_json import value_shared_by_layers
from hpc_tune.model.loss import LossModel, find_decoder
from hpc_tune.step.layout import Layout

# "slice": of the first dimension, "inner slice": of another one.
TensorRole = Literal["slice", "inner slice", "partial"]
SLICE_ROLES = ("slice", "inner slice")
EXPERTS_STYLE = "moe_tp_experts"  # the style of a module with stacks of experts
_TP_STYLES = {
    *("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input"),
    *("replicated_with_grad_allreduce", "packed_colwise", "packed_rowwise", EXPERTS_STYLE),
}
_INNER_SIZE_KEYS = (
    *("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"),
    *("linear_num_key_heads", "linear_num_value_heads"),  # of linear attention
)
# See read_tp_plan.
_PARTIAL_GRADIENT_FOLLOWERS = {"q_proj": "q_norm", "k_proj": "k_norm", "up_proj": "act_fn"}
_BLOCK_INDEX_PATTERN = re.compile(r"\.(\d+)\.")  # of a decoder block, in a path
_FEATURE_ALIGNMENT = 4  # inner features of an expert in a slice: its matmuls need 16-byte rows


@dataclass(frozen=True)
class ExpertStack:
    """A stack of experts: its name in its module ``owner``, and the (A, B) of each adapter."""

    name: str
    owner: Any
    adapters: list[tuple[Any, Any]]

    @property
    def parameter(self) -> nn.Parameter:
        """The tensor."""
        parameter: nn.Parameter = getattr(self.owner, self.name)
        return parameter

    def list_adapter_slices(self, dim: int) -> Iterator[tuple[Any, Any, int]]:
        """Yield each adapter's matrix that a cut along ``dim`` cuts, the other, and the dim."""
        outputs = 2 if getattr(self.owner, "is_transposed", False) else 1  # for peft
        for a, b in self.adapters:
            yield (b, a, 0) if dim == outputs else (a, b, 1)


def read_tp_plan(config: Any) -> dict[str, str]:
    """Return the model's own plan, plus what it leaves out between columnwise and rowwise layers.

    Per-head norms (GLM-4.5, Qwen3-VL-MoE) and learned activations (Apertus) see a part of the
    features on each rank, so their gradients are partial sums. Empty without a plan.

    transformers 5.17 puts the embedding into the plan of a model whose head is tied to it, 5.18 and
    later do not; it is left out here, since ``slice_model`` cuts every embedding.
    """
    plan: dict[str, str] = dict(getattr(config, "base_model_tp_plan", None) or {})
    if plan.get("embed_tokens") == "embedding_rowwise":
        del plan["embed_tokens"]
    for path, style in list(plan.items()):
        parent, _, name = path.rpartition(".")
        if style == "colwise" and name in _PARTIAL_GRADIENT_FOLLOWERS:
            plan.setdefault(
                f"{parent}.{_PARTIAL_GRADIENT_FOLLOWERS[name]}", "replicated_with_grad_allreduce"
            )
    return plan


def has_gathered_input(path: str, style: str) -> bool:
    """Return whether a layer's input is computed from outputs gathered in the same module.

    That holds for linear attention's last layer (Qwen3-Next): what lies between is computed whole
    on each rank, and needs the sum of the gradients before the gathered outputs get theirs.
    """
    return style == "colwise_gather_output" and path.endswith(".out_proj")


def splits_heads(config: Any) -> bool:
    """Return whether a rank of the tensor axis computes only its part of the attention heads.

    Fused projections (Phi-3) are gathered before they are split into heads: a rank computes all.
    """
    plan = read_tp_plan(config).items()
    return any(style == "colwise" and "att" in path for path, style in plan)


def num_local_query_heads(config: Any, layout: Layout) -> int:
    """Return the number of query heads for which a rank of the tensor axis computes attention."""
    heads: int = config.num_attention_heads
    return heads // (layout.tensor if splits_heads(config) else 1)


def gathers_keys(config: Any, layout: Layout) -> bool:
    """Whether ranks that share rows gather keys, because they do not divide the attention heads."""
    return layout.context > 1 and num_local_query_heads(config, layout) % layout.context != 0


def slicing_problems(config: Any, num_ranks: int) -> list[str]:
    """Return the reasons why a model cannot be split over ``num_ranks``; empty if it can."""
    plan = read_tp_plan(config)
    if not plan or not set(plan.values()) <= _TP_STYLES:
        return [
            f"parallel.tensor={num_ranks}: transformers has no plan for splitting a "
            f"{config.model_type} model's matrices; use parallel.shard"
        ]
    heads = value_shared_by_layers(config, "num_attention_heads")
    if heads is None:
        return [
            f"parallel.tensor={num_ranks}: the layers of this {config.model_type} model differ in "
            "their numbers of heads; use parallel.shard"
        ]
    kv_heads = value_shared_by_layers(config, "num_key_value_heads") or heads
    features = getattr(config, "intermediate_size", None)  # or one for each layer
    features = [features or 0] if isinstance(features, int | None) else features
    counts = {"intermediate features": gcd(*features)}  # none where all layers have experts
    for name in _INNER_SIZE_KEYS:
        if isinstance(width := getattr(config, name, None), int) and width:
            counts[name] = width
    if EXPERTS_STYLE in plan.values():
        width = counts.get("moe_intermediate_size", counts["intermediate features"])
        counts[f"times {_FEATURE_ALIGNMENT} inner features of an expert"] = (
            width // _FEATURE_ALIGNMENT
        )
    splits_attention = any("attn" in name or "attention" in name for name in plan)
    if splits_attention and "colwise" in plan.values():
        counts |= {"attention heads": heads, "key-value heads": kv_heads}
    elif splits_attention:  # gathered before they are split into heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        counts |= {"fused projections": (heads + 2 * kv_heads) * head_dim}
    if all(count % num_ranks == 0 for count in counts.values()):
        return []
    divisors = [n for n in range(1, heads + 1) if all(c % n == 0 for c in counts.values())]
    return [
        f"parallel.tensor={num_ranks} does not divide "
        f"{', '.join(f'{count} {name}' for name, count in counts.items())}; use "
        f"{', '.join(map(str, divisors))}"
    ]


def list_stack_slices(layer: Any, config: Any, path: str) -> list[tuple[ExpertStack, int, int]]:
    """Return (stack, dimension that is cut, number of parts) of an experts' module.

    A rank has a share of each expert's inner features. Gate and up lie one after the other in one
    stack, as two parts that are cut separately.
    """
    plan, cuts = read_tp_plan(config), []
    stacks = find_expert_stacks(layer)
    is_turned = any(find_tp_style(f"{path}.{s.name}", plan) == "packed_rowwise" for s in stacks)
    for stack in stacks:
        style = find_tp_style(f"{path}.{stack.name}", plan) or ""
        if style.startswith("packed"):
            cuts.append((stack, 2 if is_turned else 1, 2))
        else:
            cuts.append((stack, 1 if is_turned else 2, 1))
    return cuts


def find_tensor_roles(module: LossModel) -> dict[nn.Parameter, TensorRole]:
    """Return what ``slice_model`` would leave a rank of each parameter that it changes.

    Either a slice, or all of it with a gradient that is a partial sum.
    """
    roles: dict[nn.Parameter, TensorRole] = {}
    head = module.causal_lm().get_output_embeddings()
    for path, layer, style in [*_iter_tp_plan_layers(module), ("", head, "colwise")]:
        if style == EXPERTS_STYLE:
            roles |= _roles_of_experts(layer, module.config, path)
            continue
        if style == "replicated_with_grad_allreduce":
            roles |= {parameter: "partial" for parameter in layer.parameters()}
            continue
        base, adapters = unwrap_adapters(layer)
        is_columns = style.startswith("colwise")
        roles[base.weight] = "slice" if is_columns else "inner slice"
        if is_columns and base.bias is not None:
            roles[base.bias] = "slice"
        for a, b in adapters:
            sliced, whole = (b, a) if is_columns else (a, b)
            roles[sliced.weight] = "slice" if is_columns else "inner slice"
            roles[whole.weight] = "partial"
    embedding = module.causal_lm().get_input_embeddings()
    return roles | {embedding.weight: "slice"}


def _roles_of_experts(layer: Any, config: Any, path: str) -> dict[nn.Parameter, TensorRole]:
    roles: dict[nn.Parameter, TensorRole] = {}
    for stack, dim, _ in list_stack_slices(layer, config, path):
        roles[stack.parameter] = "inner slice"
        for sliced, whole, cut_dim in stack.list_adapter_slices(dim):
            roles[sliced.weight] = "inner slice" if cut_dim else "slice"
            roles[whole.weight] = "partial"
    return roles


@dataclass(frozen=True)
class BlockAllReduces:
    """All-reduces of the tensor axis in a decoder block.

    ``forward``: of matmul outputs. ``backward``: of gradients of matmul inputs, of which one is the
    block's input if ``includes_block_input``. ``router_gradients``: of gradients of what routers
    give experts. ``inner_features``: the features of a token whose gradients are also summed,
    within linear attention.
    """

    forward: int
    backward: int
    router_gradients: int = 0
    includes_block_input: bool = True
    inner_features: int = 0


def count_all_reduces(module: LossModel) -> tuple[BlockAllReduces, ...]:
    """Return the sums of ``slice_model`` in each block: one per matmul that is split by its
    inputs, one per input shared by matmuls that are split by their outputs, both for experts too.
    """
    blocks: list[list[tuple[str, Any, str]]] = [[] for _ in range(module.config.num_hidden_layers)]
    for path, layer, style in _iter_tp_plan_layers(module):
        if (number := _BLOCK_INDEX_PATTERN.search(path)) is not None:
            blocks[int(number[1])].append((path, layer, style))
    return tuple(map(_count_block_all_reduces, blocks))


def _count_block_all_reduces(styled_layers: list[tuple[str, Any, str]]) -> BlockAllReduces:
    experts = sum(style == EXPERTS_STYLE for _, _, style in styled_layers)
    forward = sum(style.startswith("rowwise") for _, _, style in styled_layers)
    inner = [layer for path, layer, style in styled_layers if has_gathered_input(path, style)]
    columns = (path for path, _, style in styled_layers if style.startswith("colwise"))
    sharing = {path.rpartition(".")[0] for path in columns}
    includes_block_input = not styled_layers or any(
        "attn" in path or "attention" in path for path in sharing
    )
    features = sum(unwrap_adapters(layer)[0].in_features for layer in inner)
    return BlockAllReduces(
        forward + experts, len(sharing) + experts, experts, includes_block_input, features
    )


def num_gathered_features(module: LossModel) -> tuple[int, int]:
    """Return the features per token that the axis gathers in all blocks, forward and backward."""
    pairs = [(unwrap_adapters(layer)[0], style) for _, layer, style in _iter_tp_plan_layers(module)]
    return (
        sum(layer.out_features for layer, style in pairs if style == "colwise_gather_output"),
        sum(layer.in_features for layer, style in pairs if style == "rowwise_split_input"),
    )


def _iter_tp_plan_layers(module: LossModel) -> Iterator[tuple[str, Any, str]]:
    """Yield path, layer and style of all layers that the model's plan names, if there is one."""
    plan = read_tp_plan(module.config)
    if not set(plan.values()) <= _TP_STYLES:
        return
    for name, layer in find_decoder(module.causal_lm()).named_modules():
        if (style := find_tp_style(name, plan)) is not None:
            yield name, layer, style


def find_tp_style(name: str, plan: dict[str, str]) -> str | None:
    """Return the plan's style of a module; ``*`` is the number of a block."""
    return plan.get(re.sub(r"\.\d+\.", ".*.", name))


def unwrap_adapters(layer: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return a base layer and the (A, B) of each adapter around it."""
    if not hasattr(layer, "base_layer"):
        return layer, []
    return layer.base_layer, [(layer.lora_A[name], layer.lora_B[name]) for name in layer.lora_A]


def find_expert_stacks(layer: Any) -> list[ExpertStack]:
    """Return the stacks of an experts' module; adapters may be wrapped around it one by one."""
    adapters: dict[str, list[tuple[Any, Any]]] = {}
    while hasattr(layer, "base_layer"):
        adapters[layer.parameter_name] = [(layer.lora_A[n], layer.lora_B[n]) for n in layer.lora_A]
        layer = layer.base_layer
    stack_names = [name for name, p in layer.named_parameters(recurse=False) if p.dim() == 3]
    return [ExpertStack(name, layer, adapters.get(name, [])) for name in stack_names]
