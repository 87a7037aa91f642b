"""Mixtures of experts: what in a model is a router, and what an expert.

A layer's experts are stacked in tensors of three dimensions, one for each product; a router gives
each token a few of them. Families differ in where both are, so they are found by shape and name.
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
from hpc_tune.model.config_json import common_value

# The module between a stack of experts and the tokens, or a part of it, in its path.
_ROUTER = re.compile(r"(^|\.)(router|gate|shared_expert_gate|classifier|moe_statics)(\.|$)")
ROUTED, OTHERS = "routed experts", "norms, embeddings and the rest"
_STACK = re.compile(r"(^|\.)experts\.|_linear\.(base_layer\.)*weight$")  # JetMoe's are linears
_INSIDE_EXPERTS = re.compile(r"(^|\.)experts(\.|$)")
_SHARED = re.compile(r"shared_(expert|mlp)")
CORRECTION_BIASES = {"e_score_correction_bias", "expert_bias"}
_NOISE = ("jitter_noise", "input_jitter_noise", "router_jitter_noise", "moe_jitter_eps")


def find_stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that hold stacks of experts, with their paths.

    By name too: dense models have tensors of three dimensions as well (RWKV, RecurrentGemma).
    """
    for path, module in model.named_modules():
        own = module.named_parameters(recurse=False)
        if any(p.dim() == 3 and _STACK.search(f"{path}.{name}") for name, p in own):
            yield path, module


def list_stacked_tensors(model: nn.Module, path: str) -> list[str]:
    """Return the paths of the stacks that a module of ``find_stacks`` holds, in its order."""
    own = model.get_submodule(path).named_parameters(recurse=False)
    return [f"{path}.{name}" for name, parameter in own if parameter.dim() == 3]


@dataclass(frozen=True)
class AdaptedTensor:
    """A tensor that peft adapts by itself: a stack of experts, or a matrix (``num_experts`` 1).

    ``is_transposed``: a stack is E x inputs x outputs, not E x outputs x inputs. ``form``: how gate
    and up lie in one that is of both, where transformers says it.
    """

    tensor: str
    num_experts: int = 1
    is_transposed: bool = False
    form: Literal["halves", "interleaved", "unknown"] = "halves"


def find_adapted_tensors(model: nn.Module) -> dict[str, AdaptedTensor]:
    """Return, for each stack of experts, by the path that peft gives its adapter's layer.

    It wraps a module once for each tensor, the first one inside.
    """
    found = {}
    for path, module in find_stacks(model):
        names = list_stacked_tensors(model, path)
        of_form = {True: "halves", False: "interleaved", None: "unknown"}
        form: Any = of_form[getattr(module, "is_concatenated", None)]
        for number, name in enumerate(names):
            layer = path + ".base_layer" * (len(names) - 1 - number)
            num_experts = model.get_parameter(name).shape[0]
            found[layer] = AdaptedTensor(
                name, num_experts, getattr(module, "is_transposed", False), form
            )
    return found


def has_experts(config: Any) -> bool:
    """Whether a model's configuration has a number of experts above one."""
    return bool(_expert_counts(config))


def _expert_counts(config: Any) -> list[int]:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    counts = [common_value(part, name) for part in _config_parts(config) for name in names]
    return [count for count in counts if isinstance(count, int) and count > 1]


def _config_parts(config: Any) -> list[Any]:
    """Return a language model's configuration and the parts of it, as DBRX has for its experts."""
    names = getattr(config, "sub_configs", ())
    return [config, *(part for name in names if (part := getattr(config, name, None)) is not None)]


def num_experts(config: Any) -> int:
    """Return the number of a layer's routed experts; 0 in a dense model."""
    return max(_expert_counts(config), default=0)


def chosen_expert_share(config: Any) -> float:
    """Return which share of a layer's routed experts a token goes through; 1 in a dense model."""
    return num_chosen_experts(config) / num_experts(config) if has_experts(config) else 1.0


def num_chosen_experts(config: Any) -> int:
    """Return how many experts a router gives a token, by a model's configuration; 1 if unknown."""
    names = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
    for part, name in itertools.product(_config_parts(config), names):
        value = common_value(part, name)
        if isinstance(value, list) and value:
            value = max(value)
        if isinstance(value, int) and value > 0:
            return value
    return 1


def num_shardable_experts(model: nn.Module) -> int:
    """Return a number whose divisors are the numbers of ranks that experts can be split over.

    1 for a dense model, and where a layer's experts do not say which tokens they want.
    """
    counts = [
        getattr(stack, name).shape[0] if hasattr(stack, "has_gate") else 1
        for _, stack in find_stacks(model)
        for name, parameter in stack.named_parameters(recurse=False)
        if parameter.dim() == 3
    ]
    return math.gcd(*counts) if counts else 1


def require_shardable_experts(model: Any, ranks: int) -> int:
    """Return ``num_shardable_experts`` of a model with a ``config``; ``ranks`` must divide it.

    Raises:
        ConfigError: if it does not.
    """
    found = num_shardable_experts(model)
    if found % ranks:
        raise ConfigError(
            f"parallel.expert={ranks}: the experts of a {model.config.model_type} model can be "
            f"split over {f'a divisor of {found}' if found > 1 else 'no'} ranks; leave it out"
        )
    return found


def disable_router_losses(config: Any) -> None:
    """Ask no loss of its routers of a transformers configuration: it is ``tune.router_aux_loss``.

    Tools that train with one leave that they asked for it in config.json.
    """
    parts: list[Any] = [config, getattr(config, "text_config", None)]
    for part in parts:
        if getattr(part, "output_router_logits", False):
            part.output_router_logits = False


def is_mixture(model: nn.Module) -> bool:
    """Whether some layers of a model are mixtures of experts."""
    return next(find_expert_modules(model), None) is not None


def find_expert_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that hold experts, also where these are no stacks (DBRX), with paths."""
    stacks = {path for path, _ in find_stacks(model)}
    for path, module in model.named_modules():
        own = module.named_parameters(recurse=False)
        if path in stacks or (_INSIDE_EXPERTS.search(path) and any(p.dim() > 1 for _, p in own)):
            yield path, module


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that choose experts or weigh shared ones, by their paths.

    Empty for a dense model.
    """
    if not is_mixture(model):
        return {}
    return {path: module for path, module in model.named_modules() if _ROUTER.search(path)}


def make_routers_deterministic(model: nn.Module) -> dict[str, float]:
    """Let routers choose in training as they do in evaluation; return what was drawn, by name.

    Some families multiply a router's input with noise or draw experts at random, anew in each
    micro-batch: losses would depend on the number of ranks, and a resumed run would differ. The
    biases that correct a router's choice get no gradient: they are made buffers, and stay.
    """
    removed: dict[str, float] = {}
    for module in model.modules():
        for name in CORRECTION_BIASES & module._parameters.keys():
            values = module._parameters.pop(name)
            assert values is not None
            module.register_buffer(name, values.detach())
        noise = {name: value for name in _NOISE if (value := getattr(module, name, None))}
        if noise:
            module.training = False
            module.train = types.MethodType(_stay_in_eval, module)  # type: ignore[method-assign]
            removed |= noise
    return removed


def _stay_in_eval(self: Any, mode: bool = True) -> Any:
    nn.Module.train(self, mode)
    self.training = False
    return self


def group_parameters(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return what each parameter of a mixture belongs to, in words; empty for a dense model.

    Adapters belong to what they are on.
    """
    roots = {path.replace(".base_layer", "") for path, _ in find_expert_modules(model)}
    kinds = {}
    for name, parameter in model.named_parameters() if roots else ():
        path = name.replace(".base_layer", "")
        if any(path.startswith(f"{root}.") for root in roots):
            kinds[parameter] = ROUTED
        elif _ROUTER.search(path):
            kinds[parameter] = "routers"
        elif _SHARED.search(path):
            kinds[parameter] = "shared experts"
        else:
            kinds[parameter] = "attention" if "att" in path else OTHERS
    return kinds


@contextlib.contextmanager
def looping_over_experts_in_fp32() -> Iterator[None]:
    """Let transformers multiply experts one by one in 32 bits, where all of them are trained.

    For traces: torch's fake grouped product has bf16 alone. What is kept has the same sizes.
    """
    from transformers.integrations import moe

    before = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda x, *_: x.dtype == torch.bfloat16
    try:
        yield
    finally:
        moe._can_use_grouped_mm = before
