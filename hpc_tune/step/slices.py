"""What a rank of the tensor axis holds of each parameter, by the model's own plan (pure).

See ``engine/tensor_parallel.py``, which cuts and connects the slices.
"""

import re
from collections.abc import Iterator
from math import gcd
from typing import Any, Literal

from torch import nn

from hpc_tune.model.loss import LossModel, decoder_of

Role = Literal["slice", "partial"]
_STYLES = {
    *("colwise", "rowwise", "colwise_gather_output", "rowwise_split_input"),
    "replicated_with_grad_allreduce",
}


def slicing_problems(config: Any, ranks: int) -> list[str]:
    """Return the reasons why a model cannot be split over ``ranks``; none if it can."""
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan or not set(plan.values()) <= _STYLES:
        return [
            f"parallel.tensor={ranks}: transformers has no plan for splitting a "
            f"{config.model_type} model's matrices; use parallel.shard"
        ]
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    features = config.intermediate_size  # or those of each layer
    counts = {"intermediate features": features if isinstance(features, int) else gcd(*features)}
    if "colwise" in plan.values():
        counts |= {"attention heads": heads, "key-value heads": kv_heads}
    else:  # gathered before they are split into heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        counts |= {"fused projections": (heads + 2 * kv_heads) * head_dim}
    if all(count % ranks == 0 for count in counts.values()):
        return []
    divisors = [n for n in range(1, heads + 1) if all(c % n == 0 for c in counts.values())]
    return [
        f"parallel.tensor={ranks} does not divide "
        f"{', '.join(f'{count} {name}' for name, count in counts.items())}; use "
        f"{', '.join(map(str, divisors))}"
    ]


def roles_of(module: LossModel) -> dict[nn.Parameter, Role]:
    """Return what ``slice_model`` would leave a rank of each parameter that it changes.

    A slice, or all of it with a gradient that is a partial sum.
    """
    roles: dict[nn.Parameter, Role] = {}
    head = module.causal_lm().get_output_embeddings()
    for layer, style in [*_styled(module), (head, "colwise")]:
        base, adapters = parts_of(layer)
        if style == "replicated_with_grad_allreduce":
            roles |= {parameter: "partial" for parameter in layer.parameters()}
            continue
        is_columns = style.startswith("colwise")
        roles[base.weight] = "slice"
        if is_columns and base.bias is not None:
            roles[base.bias] = "slice"
        for a, b in adapters:
            sliced, whole = (b, a) if is_columns else (a, b)
            roles[sliced.weight], roles[whole.weight] = "slice", "partial"
    embedding = module.causal_lm().get_input_embeddings()
    return roles | {embedding.weight: "slice"}


def gathered_features(module: LossModel) -> tuple[int, int]:
    """Return the features of a token that the axis gathers in all blocks, forward and backward."""
    layers = [(parts_of(layer)[0], style) for layer, style in _styled(module)]
    return (
        sum(layer.out_features for layer, style in layers if style == "colwise_gather_output"),
        sum(layer.in_features for layer, style in layers if style == "rowwise_split_input"),
    )


def _styled(module: LossModel) -> Iterator[tuple[Any, str]]:
    """Yield the layers that the model's plan names, and their styles; none without a plan."""
    plan = getattr(module.config, "base_model_tp_plan", None) or {}
    if not set(plan.values()) <= _STYLES:
        return
    for name, layer in decoder_of(module.causal_lm()).named_modules():
        if (style := style_of(name, plan)) is not None:
            yield layer, style


def style_of(name: str, plan: dict[str, str]) -> str | None:
    """Return the plan's style of a module; ``*`` is the number of a block."""
    return plan.get(re.sub(r"\.\d+\.", ".*.", name))


def parts_of(layer: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Return a base layer and the (A, B) of each adapter around it."""
    if not hasattr(layer, "base_layer"):
        return layer, []
    return layer.base_layer, [(layer.lora_A[name], layer.lora_B[name]) for name in layer.lora_A]
