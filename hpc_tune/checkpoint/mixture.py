"""What adapter_config.json says of adapters on a mixture of experts, so that stock peft loads them.

Stacks of experts are no linear layers: peft adapts their tensors (target_parameters). For families
whose experts were linear layers in transformers 4 it takes the names of those for the stacks, and
so passes over a shared expert's gate_proj: such layers are named by their tensor, too.
"""

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hpc_tune.model.experts import AdaptedTensor, find_adapted_tensors, has_experts
from hpc_tune.model.joined import find_names_renamed_again
from hpc_tune.model.language import (
    make_language_model,
    make_whole_model,
    read_config,
    read_language_config,
)
from hpc_tune.model.weights import ADAPTER_PREFIX, TensorIndex

if TYPE_CHECKING:
    from hpc_tune.model.adapters import Targets

_BLOCK = re.compile(r".*\.\d+\.")  # up to a block's number


def find_expert_stacks(base: Path) -> Mapping[str, AdaptedTensor]:
    """Return the stacks of experts in the model of a directory, by the layer of an adapter on each.

    Empty for a dense model. The layers are named as in the whole model.
    """
    return _find_expert_stacks(base) if has_experts(read_language_config(base)) else {}


@functools.cache
def _find_expert_stacks(base: Path) -> Mapping[str, AdaptedTensor]:
    language = make_language_model(read_config(base), base, torch.float32, None)
    of_whole = language.names.name_in_whole
    return {of_whole(layer): one for layer, one in find_adapted_tensors(language.model).items()}


def layers_ignored_by_peft(index: TensorIndex, base: Path) -> list[str]:
    """Return the layers whose adapters in ``index`` peft does not load over the model of a base."""
    adapters = (n for n in index.pieces if n.startswith(ADAPTER_PREFIX) and ".lora_" in n)
    named = (n.removeprefix(ADAPTER_PREFIX) for n in adapters)
    lost = find_names_renamed_again(make_whole_model(read_config(base)), named)
    return sorted({name.partition(".lora_")[0] for name in lost})


def mixture_targets(
    index: TensorIndex,
    layers: Sequence[str],
    stacks: Mapping[str, AdaptedTensor],
    taken: Collection[str],
) -> "Targets":
    """Return what has adapters, by names that mean just these ``layers`` to peft.

    ``taken``: the names that it may take for stacks.
    """
    from hpc_tune.model.adapters import Targets

    modules, parameters, adapted, rank = set(), set(), set(), 0
    by_weight = []
    for layer in layers:
        own = _BLOCK.sub("", layer)
        if (stack := stacks.get(layer)) is not None:
            tensor = _BLOCK.sub("", stack.tensor)
            parameters.add(tensor)
            adapted.add(tensor.rpartition(".")[0])
            rank = index.shapes[f"{ADAPTER_PREFIX}{layer}.lora_A.weight"][0] // stack.num_experts
        elif own.rpartition(".")[2] in taken:
            parameters.add(f"{own}.weight")
            by_weight.append(layer)
        else:
            modules.add(own.rpartition(".")[2])
    return Targets(
        sorted(modules), tuple(sorted(parameters)), tuple(adapted), rank, tuple(by_weight)
    )
