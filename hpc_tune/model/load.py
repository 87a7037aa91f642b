"""Allocate a model that was built on the meta device, and fill in its values.

allocate                 uninitialized memory, after the engine has cut and sharded the module
load_weights             each rank reads its own regions; adapters and buffers are initialized
init_sharded_magnitudes  initial values that need the weights of several ranks
"""

import json
import math
import re
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Shard

from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError, DataError
from hpc_tune.model.adapters import restore_layer_patterns
from hpc_tune.model.build import BuiltModel, LocalRegion
from hpc_tune.model.config_json import ShapeIndex
from hpc_tune.model.language import TensorNames, stored_tensors
from hpc_tune.model.modules_to_save import TOKEN_DELTA_SUFFIX, TrainableTokenRows
from hpc_tune.model.quantized_base import find_packed_weights
from hpc_tune.model.rotary import fix_rotary_frequencies
from hpc_tune.model.tensor_sources import ReserveFunction, reserve_nothing
from hpc_tune.model.weights import (
    ADAPTER_FILE,
    ADAPTER_PREFIX,
    TensorIndex,
    index_checkpoint,
    index_files,
    is_lora_a,
)
from hpc_tune.world.pinned import empty_pinned_like, pinned_blocks_bytes

# -- Adapters that continue from ones saved by peft or the Hugging Face Trainer.


_TUNE_FIELDS = {"r": "rank", "lora_alpha": "alpha", "use_rslora": "rslora", "use_dora": "method"}
_TUNE_FIELDS |= {name: name for name in ("rank_pattern", "alpha_pattern")}
# peft's fields that do not change what an adapter with given tensors computes: names, how it was
# initialized, and which tensors there are (the tensors are compared one by one).
_IGNORED_PEFT_FIELDS = frozenset(
    (
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
        *("revision", "inference_mode", "runtime_config", "megatron_config", "megatron_core"),
        *("target_modules", "exclude_modules", "modules_to_save", "trainable_token_indices"),
        *("layers_to_transform", "layers_pattern", "target_parameters", "ensure_weight_tying"),
        *("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("lora_dropout", "bias", "qalora_group_size"),
    )
)
# peft's names of initializations that leave the base unchanged; pissa, olora and others change it.
_INITS_KEEPING_BASE = (True, False, "gaussian", "eva", "orthogonal")


def use_init_adapter(built: BuiltModel, directory: Path) -> BuiltModel:
    """Return the model with adapters that will start from those of a peft directory.

    Raises:
        ConfigError: if it is no such directory, or its adapters do not fit this model and ``tune``;
        lists the reasons. DataError: if their file is damaged.
    """
    file, config = directory / ADAPTER_FILE, _read_adapter_config(directory)
    fields = {key: config.get(key, False) for key in _TUNE_FIELDS}
    model: Any = built.module.model
    expected_fields = {key: getattr(model.peft_config["default"], key) for key in _TUNE_FIELDS}
    for key in ("rank_pattern", "alpha_pattern"):
        expected_fields[key] = restore_layer_patterns(expected_fields[key])
        fields[key] = _expand_patterns_to_paths(
            restore_layer_patterns(fields[key]), expected_fields[key]
        )
    problems = _compare_expert_ranks(fields, expected_fields, built.tune)
    problems += [
        f"{key} is {fields[key]} there, and tune.{_TUNE_FIELDS[key]} says {expected_fields[key]}"
        for key in _TUNE_FIELDS
        if fields[key] != expected_fields[key]
    ]
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        problems.append(f"peft_type is {kind} there, and only LORA is supported here")
    problems += _compare_trainable_tokens(
        config.get("trainable_token_indices") or [], [*built.tokens]
    )
    extra_keys = sorted(config.keys() - _IGNORED_PEFT_FIELDS - _TUNE_FIELDS.keys())
    problems += [f"{key} is set there, and not supported here" for key in extra_keys if config[key]]
    if (init := config.get("init_lora_weights", True)) not in _INITS_KEEPING_BASE:
        problems.append(
            f"init_lora_weights is {init} there, which subtracted its first values from the base: "
            "it only fits that changed base; save it with peft's "
            "path_initial_model_for_weight_conversion"
        )
    index = use_whole_model_names(index_files([file]), built.names)
    _refuse_unstacked_experts(directory, index, built.saved_names.values())
    parameters = dict(built.module.named_parameters())
    shapes = {name: tuple(parameters[path].shape) for path, name in built.saved_names.items()}
    names, stored_names = set(shapes), set(index.shapes)
    problems += [f"it has no {name}" for name in sorted(names - stored_names)[:1]]
    problems += [
        f"it has {name}, which this run does not have" for name in sorted(stored_names - names)[:1]
    ]
    misfits = [name for name in sorted(names & stored_names) if index.shapes[name] != shapes[name]]
    problems += [
        f"{name} has shape {list(index.shapes[name])} there and {list(shapes[name])} in this "
        "model: it is of another base"
        for name in (misfits if fields["r"] == expected_fields["r"] else [])[:1]
    ]
    if problems:
        raise ConfigError(f"tune.init_from={directory}: " + "; ".join(problems))
    return replace(built, init_index=index)


def _read_adapter_config(directory: Path) -> dict[str, Any]:
    file, settings = directory / ADAPTER_FILE, directory / "adapter_config.json"
    if not file.is_file() or not settings.is_file():
        has_pickle = (directory / "adapter_model.bin").is_file()
        advice = (
            "adapter_model.bin is a pickle, which is not read; load it with peft and save it again"
            if has_pickle
            else "name the folder that peft's save_pretrained or the Trainer wrote"
        )
        raise ConfigError(
            f"tune.init_from={directory}: expected {ADAPTER_FILE} and adapter_config.json in it; "
            + advice
        )
    try:
        content = json.loads(settings.read_text(encoding="utf-8"))
        patterns = {key: {**(content.get(key) or {})} for key in ("rank_pattern", "alpha_pattern")}
        return {**content, **patterns}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"tune.init_from: {settings} cannot be read: {error}") from None


def use_whole_model_names(index: TensorIndex, names: TensorNames) -> TensorIndex:
    """Return an index with whole-model names for an adapter made on a language model alone.

    In a checkpoint the optimizer state is renamed as well.
    """

    def add_whole_model_path(name: str) -> str:
        part, prefix, tensor_name = name.partition(ADAPTER_PREFIX)
        if prefix and not tensor_name.startswith(f"{names.whole_model_decoder}."):
            return part + prefix + names.whole_model_name(tensor_name)
        return name

    return index.with_names(add_whole_model_path)


def _refuse_unstacked_experts(
    directory: Path, index: TensorIndex, known_names: Iterable[str]
) -> None:
    """Refuse an adapter with a pair of tensors per expert, the form for vLLM and transformers 4."""
    names = (name for name in index.shapes if re.search(r"\.experts\.\d+\.", name))
    if (first := next(names, None)) is not None and first not in {*known_names}:
        raise ConfigError(
            f"tune.init_from={directory}: it has {first}: a pair of tensors per expert. Expected "
            "peft's form, all experts of a layer in one pair: the folder export/adapter of a run, "
            "or what peft saves with transformers 5"
        )


def _compare_expert_ranks(
    fields: dict[str, Any], expected_fields: dict[str, Any], tune: TuneConfig
) -> list[str]:
    """Return how experts' ranks and alphas differ from those expected; remove them from both.

    peft's own adapters have a pattern for experts only if their rank differs from the others.
    """
    problems = []
    for key, default_key, message in (
        ("rank_pattern", "r", "the rank of experts is {} there, and tune.expert_rank says {}"),
        (
            *("alpha_pattern", "lora_alpha"),
            "lora_alpha of experts is {} there, and {} here: tune.alpha x expert_rank / rank",
        ),
    ):
        tune_patterns = restore_layer_patterns(getattr(tune, key))
        experts = [path for path in expected_fields[key] if path not in tune_patterns]
        pairs = [
            (fields[key].pop(path, fields[default_key]), expected_fields[key].pop(path))
            for path in experts
        ]
        problems += [message.format(*pair) for pair in pairs if pair[0] != pair[1]][:1]
    return problems


def _expand_patterns_to_paths(patterns: Any, paths: Iterable[str]) -> Any:
    """Replace each pattern that is the end of some of ``paths`` by these paths."""
    by_path: dict[str, Any] = {}
    for key, value in patterns.items():
        matches = [path for path in paths if path.endswith(f".{key}")]
        by_path |= dict.fromkeys(matches or [key], value)
    return by_path


def _compare_trainable_tokens(saved_tokens: Any, tune_tokens: list[int]) -> list[str]:
    """Return problems if an adapter's rows are for other tokens, or in another order."""
    (saved_tokens,) = (
        saved_tokens.values()
        if isinstance(saved_tokens, dict) and len(saved_tokens) == 1
        else (saved_tokens,)
    )
    if saved_tokens == tune_tokens:
        return []
    return [
        f"trainable_token_indices is {saved_tokens} there, "
        f"and tune.trainable_tokens means {tune_tokens}"
    ]


# -- Allocating a model and filling in its values.


def allocate(
    module: nn.Module,
    device: torch.device,
    offloads: bool = False,
    reserve: ReserveFunction = reserve_nothing,
) -> None:
    """Give every parameter and buffer uninitialized memory on ``device``; tied weights stay tied.

    If a run ``offloads``, sharded parameters are on the host, in pinned memory if ``device`` is a
    GPU; ``reserve`` is called before pinned memory is allocated.
    """
    owners = find_owners(module)
    shards = _allocate_pinned_shards(module, reserve) if offloads and device.type == "cuda" else {}

    def allocate_empty(tensor: torch.Tensor) -> torch.Tensor:
        is_offloaded = offloads and isinstance(tensor, DTensor)
        out = torch.empty_like(tensor, device=torch.device("cpu") if is_offloaded else device)
        if tensor in shards:
            assert isinstance(out, DTensor)
            out._local_tensor = shards[tensor]
        return out

    module._apply(allocate_empty)
    for (first, first_name), *others in owners.values():
        for owner, name in others:
            owner._parameters[name] = first._parameters[first_name]


def _allocate_pinned_shards(
    module: nn.Module, reserve: ReserveFunction
) -> dict[torch.Tensor, torch.Tensor]:
    """Return pinned memory for this rank's part of each sharded parameter, in shared blocks.

    FSDP2 would pin tensors one by one. A part that is shorter than those of other ranks is left to
    FSDP2, which copies it into a longer tensor.
    """
    parts = {
        parameter: parameter.to_local()
        for parameter in module.parameters()
        if isinstance(parameter, DTensor) and not _is_uneven_shard(parameter)
    }
    reserve(pinned_blocks_bytes(part.nbytes for part in parts.values()))
    return dict(zip(parts, empty_pinned_like([*parts.values()]), strict=True))


def _is_uneven_shard(tensor: DTensor) -> bool:
    """Return whether this rank's part is shorter than the first rank's."""
    mesh, local = tensor.device_mesh, tensor.to_local()
    return any(
        local.shape[placement.dim] < -(-tensor.shape[placement.dim] // mesh.size(axis))
        for axis, placement in enumerate(tensor.placements)
        if isinstance(placement, Shard)
    )


def find_owners(module: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Return each parameter's modules with its name in each; tied weights have several."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owners.setdefault(parameter, []).append((owner, name))
    return owners


def load_weights(
    built: BuiltModel, reserve: ReserveFunction = reserve_nothing, fills_parameters: bool = True
) -> None:
    """Fill the allocated module: base weights from disk, adapters and buffers with initial values.

    Not collective: a rank may fail alone. ``init_sharded_magnitudes`` does the part that needs
    several ranks.

    With ``fills_parameters=False`` only buffers are filled, for an engine that fills parameters
    itself. ``reserve`` is called before host memory is filled.

    Every parameter may be sharded; each rank reads only the regions that it keeps (of a 4-bit
    matrix, all of it). Frozen weights that stay unsharded on a CPU, in the file's dtype, are not
    copied: they are mapped pages of the file, which the ranks of a node share. The initial values
    of adapters depend only on (seed, name), so they are the same in every layout.

    Raises:
        DataError: if a file is truncated, a tensor in it is too small, a weight that this rank
            keeps is NaN or inf, or a buffer gets no values.
    """
    packed_layers = dict(find_packed_weights(built.module))
    for name, parameter in stored_tensors(built.module):
        if not fills_parameters and isinstance(parameter, nn.Parameter):
            continue
        for number, region in enumerate(built.regions(name, parameter)):
            source = built.locate_initial_values(name)
            if source is None or source[0] is built.init_index:
                _init_adapter(built, name, region, reserve)
                continue
            _, key = source
            if name in packed_layers:
                packed_layers[name].fill(region.values, region.offset, built.index, key, reserve)
                continue
            if not _map_pages(built.index, key, parameter, region) and region.values.numel():
                built.index.fill(region.values, key, region.offset, reserve)
            if isinstance(parameter, nn.Parameter):  # buffers may be inf, such as Gemma 4's limits
                values = built.regions(name, parameter)[number].values
                built.index.require_finite(values, key, region.offset)
    _init_buffers(built.module.causal_lm())
    for part in built.module.modules():
        if isinstance(part, TrainableTokenRows):
            part.fill_ids()
    if built.seq_len is not None:
        fix_rotary_frequencies(built.module, built.seq_len)
    if built.tune.method == "dora" and fills_parameters and built.init_index is None:
        _init_magnitudes(built.module, sharded=False)


def _map_pages(
    index: TensorIndex | ShapeIndex, stored_name: str, parameter: torch.Tensor, region: LocalRegion
) -> bool:
    """Map a frozen, unsharded CPU tensor to the file's own pages, if the dtype is the same."""
    if parameter.requires_grad or parameter.device.type != "cpu" or isinstance(parameter, DTensor):
        return False
    pages = index.map_pages(stored_name, parameter.dtype)
    if pages is None or tuple(pages.shape) != region.full_shape:
        return False
    if region.values.shape != parameter.shape:  # one of several parts
        return False
    parameter.data = pages[region.box.slices()]
    return True


def load_trained_parameters(built: BuiltModel, checkpoint: Path) -> None:
    """Fill the trained parameters from a checkpoint's directory, whatever layout saved it.

    Raises:
        CheckpointError: if a file is damaged, or a tensor is missing or too small.
    """
    index = use_whole_model_names(index_checkpoint(checkpoint), built.names)
    index.require(built.saved_names.values())
    for name, parameter in built.module.named_parameters():
        if saved_name := built.saved_names.get(name):
            for region in built.regions(name, parameter):
                index.fill(region.values, saved_name, region.offset)


def _init_adapter(
    built: BuiltModel, name: str, region: LocalRegion, reserve: ReserveFunction
) -> None:
    if built.init_index is not None:
        if region.values.numel():
            built.init_index.fill(region.values, built.saved_names[name], region.offset, reserve)
            built.init_index.require_finite(region.values, built.saved_names[name], region.offset)
        return
    full = make_initial_values(built, name, region.full_shape)
    region.values.copy_(full[region.box.slices()])


def make_initial_values(built: BuiltModel, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the initial values of an adapter, or of trained embedding rows (the base's rows)."""
    if not name.endswith(TOKEN_DELTA_SUFFIX):
        return init_lora_values(name, shape, built.seed)
    rows_KD = torch.empty(shape, dtype=torch.float32)
    stored_name = built.base_names[f"{name.removesuffix(TOKEN_DELTA_SUFFIX)}.weight"]
    for row_1D, number in zip(rows_KD.split(1), built.tokens, strict=True):
        built.index.fill(row_1D, stored_name, (number, 0))
    return rows_KD


def init_lora_values(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """LoRA's initial values: A uniform in +-1/sqrt(fan_in) (Kaiming, a=sqrt(5)), B zero; fp32."""
    full = torch.zeros(shape, dtype=torch.float32)
    if is_lora_a(name):
        # A CPU generator uses only the lower 32 bits of its seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        full.uniform_(-1 / math.sqrt(shape[1]), 1 / math.sqrt(shape[1]), generator=generator)
    return full


def _init_buffers(model: Any) -> None:
    """Fill buffers that no file stores (rotary frequencies, scales) in place.

    Raises:
        DataError: if transformers leaves one uninitialized.
    """
    from transformers.initialization import guard_torch_init_functions

    file_tensors: list[Any] = [tensor for _, tensor in stored_tensors(model)]
    for tensor in file_tensors:
        tensor._is_hf_initialized = True  # so that transformers does not overwrite it
    file_tensor_ids = {id(tensor) for tensor in file_tensors}
    unfilled = {
        name: buffer
        for name, buffer in model.named_buffers()
        if id(buffer) not in file_tensor_ids
        and buffer.is_floating_point()
        and not isinstance(buffer, FakeTensor)  # of a plan: they have no values
    }
    for buffer in unfilled.values():
        buffer.fill_(math.nan)
    owners: dict[str, Any] = {}
    with guard_torch_init_functions():
        for path, module in model.named_modules():
            # The innermost model of transformers around a module knows how to initialize it.
            can_init = hasattr(module, "_init_weights") or not path
            owners[path] = module if can_init else owners[path.rpartition(".")[0]]
            if module._non_persistent_buffers_set:
                owners[path]._init_weights(module)
        if _find_unfilled_buffers(model, unfilled):  # an outer model does it (Falcon-H1)
            for owner in dict.fromkeys(owners.values()):
                owner._init_weights(owner)
    if unset := _find_unfilled_buffers(model, unfilled):
        raise DataError(
            f"{model.config.model_type}: neither its files nor transformers gives {unset[0]} its "
            "values; this architecture cannot be trained here"
        )


def _find_unfilled_buffers(model: nn.Module, names: Iterable[str]) -> list[str]:
    buffers = dict(model.named_buffers())
    return [name for name in names if buffers[name].isnan().any()]


def init_sharded_magnitudes(built: BuiltModel) -> None:
    """Initialize DoRA's magnitudes of sharded weights. Collective."""
    if built.tune.method == "dora" and built.init_index is None:
        _init_magnitudes(built.module, sharded=True)


def _init_magnitudes(module: nn.Module, sharded: bool) -> None:
    """Set magnitudes to the L2 norm of each output row of the base weight (B is zero at first)."""
    layers: Any = module.modules()
    for layer in layers:
        for magnitude in getattr(layer, "lora_magnitude_vector", {}).values():
            base = layer.get_base_layer()
            weight = base.weight.detach()
            if isinstance(weight, DTensor) == sharded:
                full = _gather_weight(weight)
                full = base.unpack(full) if hasattr(base, "unpack") else full
                magnitude.weight.data.copy_(full.float().norm(dim=1))


def _gather_weight(weight: torch.Tensor) -> torch.Tensor:
    """Gather a sharded weight; if one rank has all of it, there is no group to gather over."""
    if not isinstance(weight, DTensor):
        return weight
    full_weight: torch.Tensor = (
        weight.to_local() if weight.device_mesh.size() == 1 else weight.full_tensor()
    )
    return full_weight
