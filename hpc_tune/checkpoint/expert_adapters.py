"""Adapters on a mixture of experts: the entries in adapter_config.json with which stock peft loads
them, and the same adapter split into single experts.

Stacks of experts are not linear layers: peft adapts their tensors (target_parameters). For families
whose experts were linear layers in transformers 4, peft takes these layers' names for the stacks,
and so skips, for example, a shared expert's gate_proj. We name such layers by their tensor too.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hpc_tune.config.tune import match_patterns
from hpc_tune.model.experts import AdaptedExpertStack, has_experts, map_adapter_layers_to_stacks
from hpc_tune.model.language import (
    find_model_file_layout,
    make_language_model,
    make_whole_model,
    read_config,
    read_language_config,
)
from hpc_tune.model.regions import Region, write_regions
from hpc_tune.model.tensor_sources import find_names_renamed_again
from hpc_tune.model.weights import (
    ADAPTER_FILE,
    ADAPTER_PREFIX,
    LORA_A,
    LORA_B,
    TensorIndex,
    adapted_layer,
    index_model_directory,
)

if TYPE_CHECKING:
    from hpc_tune.model.adapters import Targets

_BLOCK_PREFIX = re.compile(r".*\.\d+\.")  # up to a block's number


def find_adapted_stacks(base: Path) -> Mapping[str, AdaptedExpertStack]:
    """Return the stacks of experts in a model directory, by the name of the adapter layer on each.

    Empty for a dense model. The layers are named as in the whole model.
    """
    return _find_expert_stacks(base) if has_experts(read_language_config(base)) else {}


@functools.cache
def _find_expert_stacks(base: Path) -> Mapping[str, AdaptedExpertStack]:
    language = make_language_model(read_config(base), base, torch.float32, None)
    name_in_whole = language.names.whole_model_name
    return {
        name_in_whole(layer): s for layer, s in map_adapter_layers_to_stacks(language.model).items()
    }


def layers_ignored_by_peft(index: TensorIndex, base: Path) -> list[str]:
    """Return the layers whose adapters in ``index`` peft does not load onto the base model."""
    adapters = (n for n in index.shapes if n.startswith(ADAPTER_PREFIX) and adapted_layer(n))
    names = (n.removeprefix(ADAPTER_PREFIX) for n in adapters)
    ignored_names = find_names_renamed_again(make_whole_model(read_config(base)), names)
    return sorted({adapted_layer(name) for name in ignored_names})


def make_peft_targets(
    index: TensorIndex,
    layers: Sequence[str],
    stacks_by_layer: Mapping[str, AdaptedExpertStack],
    ambiguous_names: Collection[str],
) -> "Targets":
    """Return the targets, by names that peft matches with exactly these ``layers``.

    ``ambiguous_names``: the layer names, such as gate_proj, that peft may take for stacks.
    """
    from hpc_tune.model.adapters import Targets

    modules, parameters, stack_modules, rank = set(), set(), set(), 0
    weight_layers = []
    for layer in layers:
        layer_path = _BLOCK_PREFIX.sub("", layer)
        if (stack := stacks_by_layer.get(layer)) is not None:
            tensor = _BLOCK_PREFIX.sub("", stack.tensor)
            parameters.add(tensor)
            stack_modules.add(tensor.rpartition(".")[0])
            rank = index.shapes[f"{ADAPTER_PREFIX}{layer}{LORA_A}"][0] // stack.num_experts
        elif layer_path.rpartition(".")[2] in ambiguous_names:
            parameters.add(f"{layer_path}.weight")
            weight_layers.append(layer)
        else:
            modules.add(layer_path.rpartition(".")[2])
    return Targets(
        sorted(modules), tuple(sorted(parameters)), tuple(stack_modules), rank, tuple(weight_layers)
    )


# -- An adapter on a mixture split into single experts, as vLLM reads it for most families.
#
#     peft's file: A [E R, inputs], expert-major; B [outputs, R E], an expert has every E-th column
#     here: A_e [R, inputs] and B_e [outputs, R] for each matrix of each expert; gate and up, one
#     stack in memory, share A_e and have different rows of B_e
#
# Layers are named like the tensors in the base's files. If these files contain stacks, the experts
# get vLLM's names.


# vLLM's names for the matrices of an expert, by the name of the stack.
_STACK_MATRICES = {
    "experts.gate_up_proj": ("gate_proj", "up_proj"),
    "experts.down_proj": ("down_proj",),
    "experts.up_proj": ("up_proj",),
    "input_linear.weight": ("w1", "w3"),
    "output_linear.weight": ("w2",),
}


@dataclass(frozen=True)
class _ExpertMatrix:
    """One matrix of one expert: its layer's name, and the outputs of the stack that it covers."""

    layer: str
    expert: int
    outputs: slice


@dataclass(frozen=True)
class PerExpertAdapter:
    """An adapter to write: its tensors, and the layers that they adapt.

    ``layers`` maps the path of a layer in the files to that in the whole model; ``matrix_suffixes``
    are the last parts of the names of the experts' matrices.
    """

    regions: list[Region]
    layers: dict[str, str]
    matrix_suffixes: set[str]

    def write(self, peft_folder: Path, out: Path) -> None:
        """Write the adapter into ``out``, with the settings of ``peft_folder``, its peft export."""
        write_regions(out / ADAPTER_FILE, self.regions)
        config = json.loads((peft_folder / "adapter_config.json").read_text(encoding="utf-8"))
        text = json.dumps(self._make_per_expert_config(config), indent=2)
        (out / "adapter_config.json").write_text(text, encoding="utf-8")

    def _make_per_expert_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return peft's ``config`` for single layers instead of stacks, with the same scales.

        Ranks and alphas other than ``r`` and ``lora_alpha`` are given by the layers' paths in the
        files. use_rslora becomes larger alphas: some versions of vLLM ignore it for experts.
        """
        ranks, alphas = (config.pop(key, {}) for key in ("rank_pattern", "alpha_pattern"))
        stack = next(name for name in config.pop("target_parameters") if name in ranks)
        experts = rf"experts\.\d+\.({'|'.join(sorted(self.matrix_suffixes))})"
        new_ranks, new_alphas = {experts: ranks[stack]}, {experts: alphas[stack]}
        for stored_layer, layer in sorted(self.layers.items()):
            new_ranks[stored_layer] = _first_match(ranks, layer, config["r"])
            new_alphas[stored_layer] = _first_match(alphas, layer, config["lora_alpha"])
        if config.pop("use_rslora", False):
            config["lora_alpha"] *= math.sqrt(config["r"])
            new_alphas = {key: a * math.sqrt(new_ranks[key]) for key, a in new_alphas.items()}
        names = {stored_layer.rpartition(".")[2] for stored_layer in self.layers}
        config["target_modules"] = sorted(names | self.matrix_suffixes)
        for key, new, common in (
            ("rank_pattern", new_ranks, config["r"]),
            ("alpha_pattern", new_alphas, config["lora_alpha"]),
        ):
            if overrides := {layer: value for layer, value in new.items() if value != common}:
                config[key] = overrides
        return config


def _first_match(patterns: Mapping[str, Any], layer: str, default: Any) -> Any:
    return next((patterns[key] for key in match_patterns(patterns, layer)), default)


def split_adapter_by_expert(index: TensorIndex, base: Path) -> PerExpertAdapter | None:
    """Return the adapter of a checkpoint's ``index``, split into single experts.

    None if it has no adapters on experts, or no names are known for single experts.
    """
    storage = find_model_file_layout(base, index_model_directory(base))
    reader = functools.lru_cache(maxsize=1)(index.read)
    adapter = PerExpertAdapter([], {}, set())
    for name in (name for name in index.shapes if name.startswith(ADAPTER_PREFIX)):
        layer, new_name = adapted_layer(name), name
        if (stack := storage.stacks_by_layer.get(layer)) is not None:
            if not (matrices := list(_iterate_expert_matrices(stack, storage.index))):
                return None
            adapter.regions.extend(_expert_region(index, name, stack, m, reader) for m in matrices)
            adapter.matrix_suffixes.update(m.layer.rpartition(".")[2] for m in matrices)
            continue
        if layer:
            stored_layer = storage.names.renamed_tensors.get(f"{layer}.weight", layer).removesuffix(
                ".weight"
            )
            adapter.layers[stored_layer] = layer
            new_name = f"{ADAPTER_PREFIX}{stored_layer}{name.removeprefix(ADAPTER_PREFIX + layer)}"
        shape, loader = index.shapes[name], functools.partial(reader, name)
        adapter.regions.append(Region.cover_tensor(new_name, index.dtypes[name], shape, loader))
    return adapter if adapter.matrix_suffixes else None


def _iterate_expert_matrices(
    stack: AdaptedExpertStack, base_index: TensorIndex
) -> Iterator[_ExpertMatrix]:
    """Yield the matrices of the experts of a stack; none if their names are unknown."""
    joined_tensor = base_index.joined_tensors.get(stack.tensor)
    if joined_tensor is not None and all(part.axes[0] is None for part in joined_tensor.parts):
        for part in joined_tensor.parts:
            layer = part.source.name.removesuffix(".weight")
            yield _ExpertMatrix(layer, part.box.offset[0], part.box.slices()[1])
        return
    _, first, second = base_index.shapes[stack.tensor]
    num_outputs = second if stack.is_transposed else first
    for ending, names in _STACK_MATRICES.items():
        if stack.gate_up_layout == "unknown" or not stack.tensor.endswith(f".{ending}"):
            continue
        path = f"{stack.tensor.removesuffix(f'.{ending}')}.experts"
        part_size = num_outputs // len(names)
        for position, name in enumerate(names):
            strided_slice = slice(position, num_outputs, len(names))
            half_slice = slice(position * part_size, (position + 1) * part_size)
            output_slice = strided_slice if stack.gate_up_layout == "interleaved" else half_slice
            for expert in range(stack.num_experts):
                yield _ExpertMatrix(f"{path}.{expert}.{name}", expert, output_slice)


def _expert_region(
    index: TensorIndex,
    name: str,
    stack: AdaptedExpertStack,
    matrix: _ExpertMatrix,
    read: Callable[[str], torch.Tensor],
) -> Region:
    """Return lora_A or lora_B of one matrix, from the tensor ``name`` of all experts."""
    is_a, (rows, columns) = name.endswith(LORA_A), index.shapes[name]
    ranks = (rows if is_a else columns) // stack.num_experts
    num_outputs = len(range(*matrix.outputs.indices(rows)))
    shape = (ranks, columns) if is_a else (num_outputs, ranks)

    def read_values() -> torch.Tensor:
        all_experts = read(name)
        if is_a:
            return all_experts.view(stack.num_experts, ranks, columns)[matrix.expert]
        expert_b = all_experts.view(rows, ranks, stack.num_experts)[..., matrix.expert]
        return expert_b[matrix.outputs].contiguous()

    stored_name = f"{ADAPTER_PREFIX}{matrix.layer}{LORA_A if is_a else LORA_B}"
    return Region.cover_tensor(stored_name, index.dtypes[name], shape, read_values)
