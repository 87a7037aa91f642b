"""A model directory -> a model on the meta device -> weights in their place.

read_shape      config.json only: what can be checked before any rank starts work
build           the module tree with adapters, no byte of weights
(the engine shards and allocates it)
load_weights    each rank reads its own regions; adapters and buffers get their first values
"""

import hashlib
import json
import math
import warnings
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpc_tune.config.schema import TuneConfig
from hpc_tune.errors import ConfigError, DataError
from hpc_tune.model.loss import LossModel
from hpc_tune.model.weights import (
    TensorIndex,
    index_checkpoint,
    index_model_directory,
    local_region,
)

_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that ``model.dtype`` means on this device (auto: bf16 on a GPU with it)."""
    if name == "auto":
        has_bf16 = device.type == "cuda" and torch.cuda.is_bf16_supported()
        return torch.bfloat16 if has_bf16 else torch.float32
    return DTYPES[name]


def read_shape(directory: Path) -> Any:
    """Return the transformers config of a model directory; nothing is fetched or executed.

    Raises:
        DataError: if the directory or its config.json is missing or is not a causal LM's.
    """
    if not directory.is_dir():
        raise DataError(
            f"model.path={directory}: no such directory. It must be a Hugging Face model directory "
            "(config.json, *.safetensors, tokenizer.json); models are not downloaded in a run, "
            "because compute nodes have no internet. On the login node: hf download NAME "
            "--local-dir DIR"
        )
    if not (directory / "config.json").is_file():
        raise DataError(f"model.path={directory}: no config.json in it; is it a model directory?")
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise DataError(f"{directory}/config.json cannot be used: {error}") from None
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise DataError(f"{directory}: model_type {config.model_type} is not a causal LM")
    return config


def load_tokenizer(directory: Path, chat_template: str | None = None) -> Any:
    """Return the fast tokenizer of a model directory, with ``chat_template`` (a file) if given.

    Raises:
        DataError: if it is missing or has no fast form; or if the template file is missing.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError, ImportError) as error:
        raise DataError(f"{directory}: no usable tokenizer ({_first_line(error)})") from None
    if not tokenizer.is_fast:
        raise DataError(f"{directory}: its tokenizer has no fast form (tokenizer.json is missing)")
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise DataError(f"data.chat_template={chat_template}: {error}") from None
    return tokenizer


@dataclass(frozen=True)
class Slice:
    """Where a tensor-parallel slice lies in its full tensor: from ``start`` along ``dim``."""

    dim: int
    start: int
    full_shape: tuple[int, ...]


@dataclass(frozen=True)
class LocalRegion:
    """The values that this rank holds of a tensor, where they begin in it, and its whole shape."""

    local: torch.Tensor
    offset: tuple[int, ...]
    full_shape: tuple[int, ...]


@dataclass(frozen=True)
class BuiltModel:
    """A model on the meta device and where its weights are.

    ``base_names`` maps the name that a parameter or a persistent buffer has in ``module`` to its
    name in the model directory.
    ``saved_names`` maps a trained parameter's name to the one it has in checkpoints and exports:
    peft's for adapters, the model directory's for full fine-tuning. ``slices`` names the parameters
    of which this rank has only a slice, beyond what a DTensor says of itself. ``tied`` is the
    stored name of the weight that is both the embedding and the output head.
    """

    module: LossModel
    config: Any
    directory: Path
    index: TensorIndex
    base_names: dict[str, str]
    saved_names: dict[str, str]
    tune: TuneConfig
    dtype: torch.dtype
    seed: int
    tied: str | None = None
    slices: Mapping[str, Slice] = field(default_factory=dict)

    def region(self, name: str, tensor: torch.Tensor) -> LocalRegion:
        """Return what this rank holds of ``tensor``, laid out as the parameter ``name`` is."""
        local, offset = local_region(tensor.detach())
        if (cut := self.slices.get(name)) is None:
            return LocalRegion(local, offset, tuple(tensor.shape))
        moved = (*offset[: cut.dim], offset[cut.dim] + cut.start, *offset[cut.dim + 1 :])
        return LocalRegion(local, moved, cut.full_shape)

    @property
    def identity(self) -> str:
        """A hash over the names and shapes of the base's tensors and what its config.json says."""
        shapes = sorted((name, list(shape)) for name, shape in self.index.shapes.items())
        said = json.loads((self.directory / "config.json").read_text(encoding="utf-8"))
        kept = {key: value for key, value in said.items() if key not in _NOT_THE_MODEL}
        return hashlib.sha256(json.dumps([shapes, kept], sort_keys=True).encode()).hexdigest()


def build(directory: Path, dtype: torch.dtype, tune: TuneConfig, seed: int) -> BuiltModel:
    """Build the model of ``directory`` with its adapters on the meta device.

    Frozen weights have ``dtype``; trained ones are fp32, and with tune.method=full all are.

    Raises:
        DataError: if the directory is unusable. ConfigError: if tune.targets match no layer.
    """
    config = read_shape(directory)
    index = index_model_directory(directory)
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        # Without a choice transformers takes sdpa where the family has it, else eager (Gemma 2).
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if tune.method == "full" else dtype
        )
    model.config.use_cache = False
    names = {id(t): n for n, t in _stored_tensors(model)}
    root: nn.Module = model if tune.method == "full" else _with_adapters(model, tune)
    module = LossModel(root, config)
    module.train()
    base_names, missing = {}, []
    for name, tensor in _stored_tensors(module):
        if id(tensor) in names:
            stored = _stored_name(names[id(tensor)], model, index)
            base_names[name] = stored or ""
            missing += [] if stored else [names[id(tensor)]]
            if stored and index.shapes[stored] != tuple(tensor.shape):
                raise DataError(
                    f"{directory}: {stored} has shape {list(index.shapes[stored])}, config.json "
                    f"asks for {list(tensor.shape)}; the weights are of another model"
                )
    if any("experts" in name for name in missing):
        raise DataError(
            f"{directory}: {config.model_type} is a mixture of experts, whose weights hpc_tune "
            "cannot read yet; use a dense model"
        )
    if missing:
        raise DataError(
            f"{directory}: {len(missing)} of {len(base_names)} tensors that config.json asks for "
            f"are not in its safetensors files, such as {', '.join(missing[:3])}"
        )
    saved_names = {
        name: base_names.get(name) or name.removeprefix("model.").replace(".default", "")
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding.weight is getattr(head, "weight", None)
    return BuiltModel(
        module,
        config,
        directory,
        index,
        base_names,
        saved_names,
        tune,
        dtype,
        seed,
        _stored_name(names[id(embedding.weight)], model, index) if tied else None,
    )


def _stored_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a model directory stores: parameters (tied ones once) and persistent buffers."""
    yield from module.named_parameters()
    for path, owner in module.named_modules():
        for name, buffer in owner.named_buffers(prefix=path, recurse=False):
            if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                yield name, buffer


def _with_adapters(model: Any, tune: TuneConfig) -> nn.Module:
    from peft import get_peft_model

    try:
        with warnings.catch_warnings():
            # peft asks transformers for an attribute that has a new name, once per rank.
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = get_peft_model(
                model, lora_config(tune), low_cpu_mem_usage=True, autocast_adapter_dtype=True
            )
    except ValueError as error:
        linear = {
            n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)
        }
        raise ConfigError(
            f"tune.targets={tune.targets}: {_first_line(error)} "
            f"Linear layers of this model: {', '.join(sorted(linear))}"
        ) from None
    if any(getattr(module, "fan_in_fan_out", False) for module in wrapped.modules()):
        raise ConfigError("this model keeps its layers transposed (Conv1D); use tune.method=full")
    if others := [n for n, _ in wrapped.named_parameters() if "lora_embedding_A" in n]:
        raise ConfigError(
            f"tune.targets={tune.targets}: {others[0].partition('.lora_')[0]} is an embedding; "
            "adapters are for linear layers"
        )
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return wrapped


def lora_config(tune: TuneConfig) -> Any:
    """Return the peft configuration of these adapters."""
    from peft import LoraConfig

    return LoraConfig(
        r=tune.rank,
        lora_alpha=tune.alpha,
        lora_dropout=tune.dropout,
        target_modules=tune.targets,
        use_dora=tune.method == "dora",
        task_type="CAUSAL_LM",
    )


def _stored_name(name: str, model: Any, index: TensorIndex) -> str | None:
    """Find a parameter in the index: by its name, with or without the prefix, or its tied twin."""
    prefix = model.base_model_prefix + "."
    candidates = [name, name.removeprefix(prefix), prefix + name]
    if name == "model.embed_tokens.weight" or name.endswith("embed_tokens.weight"):
        candidates.append("lm_head.weight")
    return next((c for c in candidates if c in index.pieces), None)


def allocate(module: nn.Module, device: torch.device, sharded: torch.device | None = None) -> None:
    """Give every parameter and buffer raw memory on ``device``; tied weights stay tied.

    Sharded parameters go to the device ``sharded`` instead, where they are offloaded.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((owner, name))

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        offloaded = sharded is not None and isinstance(tensor, DTensor)
        return torch.empty_like(tensor, device=sharded if offloaded else device)

    module._apply(empty)
    for (first, first_name), *others in owners.values():
        for owner, name in others:
            owner._parameters[name] = first._parameters[first_name]


def load_weights(built: BuiltModel, parameters: bool = True) -> None:
    """Fill the allocated module: base weights from disk, adapters and buffers with first values.

    With ``parameters=False`` only the buffers, for an engine that fills parameters by itself.

    Every parameter may be sharded; each rank reads only the regions that it keeps. Frozen weights
    that stay whole on a CPU are not read at all: they are the pages of the file, which the ranks of
    a node share. The first values of adapters depend on (seed, name) alone, so they are the same in
    every layout.

    Raises:
        DataError: if a file is cut off or a shape is another than config.json says.
    """
    for name, parameter in _stored_tensors(built.module):
        if not parameters and isinstance(parameter, nn.Parameter):
            continue
        region = built.region(name, parameter)
        if stored := built.base_names.get(name):
            if _map_pages(built.index, stored, parameter, region):
                continue
            if region.local.numel():
                built.index.fill(region.local, stored, region.offset)
        else:
            _init_adapter(name, region, built.seed)
    _init_buffers(built.module.causal_lm())
    if built.tune.method == "dora" and parameters:
        _init_magnitudes(built.module)


def _map_pages(
    index: TensorIndex, stored: str, parameter: torch.Tensor, region: LocalRegion
) -> bool:
    """Make a frozen CPU tensor that is not sharded the file's own pages, if it has their dtype."""
    if parameter.requires_grad or parameter.device.type != "cpu" or isinstance(parameter, DTensor):
        return False
    pages = index.mapped(stored, parameter.dtype)
    if pages is None or tuple(pages.shape) != region.full_shape:
        return False
    box = tuple(slice(o, o + n) for o, n in zip(region.offset, parameter.shape, strict=True))
    parameter.data = pages[box]
    return True


def load_trained(built: BuiltModel, checkpoint: Path) -> None:
    """Fill the trained parameters from a checkpoint's directory, whatever layout saved it.

    Raises:
        CheckpointError: if a file is damaged or a tensor has another shape.
    """
    index = index_checkpoint(checkpoint)
    for name, parameter in built.module.named_parameters():
        if saved := built.saved_names.get(name):
            region = built.region(name, parameter)
            index.fill(region.local, saved, region.offset)


def _init_adapter(name: str, region: LocalRegion, seed: int) -> None:
    full = first_values(name, region.full_shape, seed)
    box = zip(region.offset, region.local.shape, strict=True)
    region.local.copy_(full[tuple(slice(o, o + n) for o, n in box)])


def first_values(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """LoRA's first values: A uniform in +-1/sqrt(fan_in) (Kaiming, a=sqrt(5)), B zero; fp32."""
    full = torch.zeros(shape, dtype=torch.float32)
    if "lora_A" in name:
        # A CPU generator looks at the lower 32 bits of its seed only.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        full.uniform_(-1 / math.sqrt(shape[1]), 1 / math.sqrt(shape[1]), generator=generator)
    return full


def _init_buffers(model: Any) -> None:
    """Give buffers that no file stores (rotary frequencies, scales) their values, in place."""
    from transformers.initialization import guard_torch_init_functions

    stored: list[Any] = [tensor for _, tensor in _stored_tensors(model)]
    for tensor in stored:
        tensor._is_hf_initialized = True  # so that transformers leaves it as it was read
    with guard_torch_init_functions():
        for module in model.modules():
            if module._non_persistent_buffers_set:
                model._init_weights(module)


def _init_magnitudes(module: nn.Module) -> None:
    """DoRA's magnitude: the L2 norm of each output row of the base weight (B is zero at first)."""
    layers: Any = module.modules()
    for layer in layers:
        for name, magnitude in getattr(layer, "lora_magnitude_vector", {}).items():
            base = layer.get_base_layer().weight.detach()
            full = base.full_tensor() if isinstance(base, DTensor) else base
            assert name == "default"
            magnitude.weight.data.copy_(full.float().norm(dim=1))


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
