"""Mixtures of experts: find the routers and the experts of a model.

A layer's experts are stacked in 3-dimensional tensors, one per matmul; a router assigns each token
to a few of them. Families place both differently, so they are found by shape and name.
"""

import contextlib
import itertools
import math
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from hpc_tune.errors import ConfigError
from hpc_tune.model.config_json import value_shared_by_layers

# In a path: the module that assigns tokens to a stack of experts, or a part of this module.
_ROUTER_PATH = re.compile(r"(^|\.)(router|gate|shared_expert_gate|classifier|moe_statics)(\.|$)")
ROUTED_EXPERTS, OTHER_PARTS = "routed experts", "norms, embeddings and the rest"
_STACK_PATH = re.compile(r"(^|\.)experts\.|_linear\.(base_layer\.)*weight$")  # JetMoe: *_linear
_EXPERTS_PATH = re.compile(r"(^|\.)experts(\.|$)")
_SHARED_EXPERT_PATH = re.compile(r"shared_(expert|mlp)")
CORRECTION_BIASES = {"e_score_correction_bias", "expert_bias"}
_NOISE_ATTRIBUTES = ("jitter_noise", "input_jitter_noise", "router_jitter_noise", "moe_jitter_eps")


def find_stacked_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that hold stacks of experts, with their paths.

    Names count too, since dense models also have 3-dimensional tensors (RWKV, RecurrentGemma).
    """
    for path, module in model.named_modules():
        params = module.named_parameters(recurse=False)
        if any(p.dim() == 3 and _STACK_PATH.search(f"{path}.{name}") for name, p in params):
            yield path, module


def list_stacked_tensors(model: nn.Module, path: str) -> list[str]:
    """Return the paths of the stacks in a module of ``find_stacked_experts``, in its order."""
    params = model.get_submodule(path).named_parameters(recurse=False)
    return [f"{path}.{name}" for name, parameter in params if parameter.dim() == 3]


@dataclass(frozen=True)
class AdaptedExpertStack:
    """A stack of experts, which peft adapts as a parameter; ``tensor`` is its path.

    ``is_transposed``: it is E x inputs x outputs, not E x outputs x inputs. ``gate_up_layout``: how
    gate and up are arranged in a stack that joins them, if transformers tells.
    """

    tensor: str
    num_experts: int
    is_transposed: bool
    gate_up_layout: Literal["halves", "interleaved", "unknown"]


def map_adapter_layers_to_stacks(model: nn.Module) -> dict[str, AdaptedExpertStack]:
    """Return the stacks of experts, each by the path that peft gives to the layer of its adapter.

    peft wraps a module once for each tensor; the wrapper of the first tensor is the innermost.
    """
    stacks_by_layer = {}
    layouts = {True: "halves", False: "interleaved", None: "unknown"}
    for path, module in find_stacked_experts(model):
        names = list_stacked_tensors(model, path)
        layout: Any = layouts[getattr(module, "is_concatenated", None)]
        is_transposed = getattr(module, "is_transposed", False)
        for number, name in enumerate(names):
            layer = path + ".base_layer" * (len(names) - 1 - number)
            shape = model.get_parameter(name).shape
            stacks_by_layer[layer] = AdaptedExpertStack(name, shape[0], is_transposed, layout)
    return stacks_by_layer


def has_experts(config: Any) -> bool:
    """Whether a model's configuration has more than one expert."""
    return bool(_expert_counts(config))


def _expert_counts(config: Any) -> list[int]:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    counts = [
        value_shared_by_layers(part, name) for part in _config_parts(config) for name in names
    ]
    return [count for count in counts if isinstance(count, int) and count > 1]


def _config_parts(config: Any) -> list[Any]:
    """Return a language model's configuration and its parts (DBRX has one for its experts)."""
    names = getattr(config, "sub_configs", ())
    return [config, *(part for name in names if (part := getattr(config, name, None)) is not None)]


def num_experts(config: Any) -> int:
    """Return the number of a layer's routed experts; 0 in a dense model."""
    return max(_expert_counts(config), default=0)


def active_expert_share(config: Any) -> float:
    """Return the share of a layer's routed experts that a token uses; 1 in a dense model."""
    return num_experts_per_token(config) / num_experts(config) if has_experts(config) else 1.0


def num_experts_per_token(config: Any) -> int:
    """Return the number of experts per token from a model's configuration; 1 if unknown."""
    names = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
    for part, name in itertools.product(_config_parts(config), names):
        value = value_shared_by_layers(part, name)
        if isinstance(value, list) and value:
            value = max(value)
        if isinstance(value, int) and value > 0:
            return value
    return 1


def max_expert_parallel_size(model: nn.Module) -> int:
    """Return a number N: experts can be split over any number of ranks that divides N.

    1 for a dense model, and if a layer's experts lack transformers' common interface
    (``use_experts_implementation``), by which tokens are sent to other ranks.
    """
    counts = [
        getattr(stack, name).shape[0] if hasattr(stack, "has_gate") else 1
        for _, stack in find_stacked_experts(model)
        for name, parameter in stack.named_parameters(recurse=False)
        if parameter.dim() == 3
    ]
    return math.gcd(*counts) if counts else 1


def require_shardable_experts(model: Any, num_ranks: int) -> int:
    """Return ``max_expert_parallel_size`` of a model, which ``num_ranks`` must divide.

    Raises:
        ConfigError: if ``num_ranks`` does not divide it.
    """
    size = max_expert_parallel_size(model)
    if size % num_ranks:
        raise ConfigError(
            f"parallel.expert={num_ranks}: the experts of a {model.config.model_type} model "
            f"{f'need ranks that divide {size}' if size > 1 else 'cannot be split over ranks'}; "
            "leave it out"
        )
    return size


def disable_router_losses(config: Any) -> None:
    """Turn off transformers' router loss in a configuration: tune.router_aux_loss replaces it.

    Tools that train with that loss leave it turned on in config.json.
    """
    parts: list[Any] = [config, getattr(config, "text_config", None)]
    for part in parts:
        if getattr(part, "output_router_logits", False):
            part.output_router_logits = False


def is_mixture_of_experts(model: nn.Module) -> bool:
    """Whether some layers of a model are mixtures of experts."""
    return next(find_expert_modules(model), None) is not None


def find_expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that hold experts, with their paths; DBRX's experts are not stacks."""
    stacks = {path for path, _ in find_stacked_experts(model)}
    for path, module in model.named_modules():
        params = module.named_parameters(recurse=False)
        if path in stacks or (_EXPERTS_PATH.search(path) and any(p.dim() > 1 for _, p in params)):
            yield path, module


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that choose experts or weigh shared ones, and their parts, by path.

    Empty for a dense model.
    """
    if not is_mixture_of_experts(model):
        return {}
    return {path: module for path, module in model.named_modules() if _ROUTER_PATH.search(path)}


def make_routers_deterministic(model: nn.Module) -> dict[str, float]:
    """Make routers choose in training as in evaluation; return the noise turned off, by name.

    Some families multiply a router's input by noise or draw experts at random in each micro-batch:
    losses would depend on the number of ranks, and a resumed run would differ. The biases that
    correct a router's choice get no gradient: they become buffers and keep their values.
    """
    removed_noise: dict[str, float] = {}
    for module in model.modules():
        for name in CORRECTION_BIASES & module._parameters.keys():
            values = module._parameters.pop(name)
            assert values is not None
            module.register_buffer(name, values.detach())
        noise = {
            name: value for name in _NOISE_ATTRIBUTES if (value := getattr(module, name, None))
        }
        if noise:
            module.training = False
            module.train = types.MethodType(_stay_in_eval, module)  # type: ignore[method-assign]
            removed_noise |= noise
    return removed_noise


def _stay_in_eval(self: Any, mode: bool = True) -> Any:
    nn.Module.train(self, mode)
    self.training = False
    return self


def label_parameters_by_part(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return, in words, the part of a mixture that each parameter belongs to; empty if dense.

    An adapter belongs to the part that it adapts.
    """
    roots = {path.replace(".base_layer", "") for path, _ in find_expert_modules(model)}
    labels = {}
    for name, parameter in model.named_parameters() if roots else ():
        path = name.replace(".base_layer", "")
        if any(path.startswith(f"{root}.") for root in roots):
            labels[parameter] = ROUTED_EXPERTS
        elif _ROUTER_PATH.search(path):
            labels[parameter] = "routers"
        elif _SHARED_EXPERT_PATH.search(path):
            labels[parameter] = "shared experts"
        else:
            labels[parameter] = "attention" if "att" in path else OTHER_PARTS
    return labels


@contextlib.contextmanager
def loop_over_fp32_experts() -> Iterator[None]:
    """Make transformers multiply experts one by one unless they are bf16; trained ones may be fp32.

    For traces: torch's fake grouped matmul supports only bf16. Saved activations stay as large.
    """
    from transformers.integrations import moe

    stock_check = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda x, *_: x.dtype == torch.bfloat16
    try:
        yield
    finally:
        moe._can_use_grouped_mm = stock_check
