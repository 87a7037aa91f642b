"""Build the model of a directory on the meta device, before its weights are loaded.

build   the module tree with adapters, without any weights
(then the engine shards it, and load.py fills it)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError, DataError
from hpc_tune.model.adapters import add_adapters
from hpc_tune.model.balance import Router, ScoreFunction
from hpc_tune.model.config_json import ShapeIndex
from hpc_tune.model.dropout import disable_dropout
from hpc_tune.model.experts import make_routers_deterministic
from hpc_tune.model.language import (
    LanguageModel,
    TensorNames,
    language_config,
    make_language_model,
    read_config,
    stored_tensors,
    summarize_unused_tensors,
)
from hpc_tune.model.layers import keep_fp32_tensors
from hpc_tune.model.loss import LossModel
from hpc_tune.model.modules_to_save import TrainableTokenRows
from hpc_tune.model.objective import make_objective
from hpc_tune.model.packed_attention import use_document_attention
from hpc_tune.model.quantized_base import pack_base
from hpc_tune.model.regions import local_region
from hpc_tune.model.rotary import require_scaling_support
from hpc_tune.model.tensor_sources import Box
from hpc_tune.model.weights import (
    ADAPTER_PREFIX,
    TensorIndex,
    fingerprint_weights,
    hash_architecture,
    index_model_directory,
)
from hpc_tune.world.device import find_architecture

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that ``model.dtype`` means on this device (auto: bf16 if a GPU has it)."""
    if name == "auto":
        architecture = find_architecture(device)
        has_bf16 = architecture is not None and architecture.has_bf16
        return torch.bfloat16 if has_bf16 else torch.float32
    return DTYPES[name]


@dataclass(frozen=True)
class Slice:
    """Where a slice lies in its full tensor: from ``start`` along ``dim``.

    ``num_parts``: the full tensor has so many equal parts along ``dim``, and a slice has some of
    each, from ``start`` within the part.
    """

    dim: int
    start: int
    full_shape: tuple[int, ...]
    num_parts: int = 1


@dataclass(frozen=True)
class LocalRegion:
    """This rank's values of a tensor, their offset in it, and the full tensor's shape."""

    values: torch.Tensor
    offset: tuple[int, ...]
    full_shape: tuple[int, ...]

    @property
    def box(self) -> Box:
        """The region of the full tensor."""
        return Box(self.offset, tuple(self.values.shape))


@dataclass(frozen=True)
class BuiltModel:
    """A model on the meta device and where its weights are.

    ``base_names`` maps the name of a parameter or persistent buffer in ``module`` to its name in
    the model directory. ``saved_names`` maps a trained parameter's name to its name in checkpoints
    and exports: peft's for adapters, the model directory's for full fine-tuning. ``slices``:
    parameters of which this rank has only a slice, apart from DTensors. ``tied_name`` is the stored
    name of the weight that is both the embedding and the output head. ``init_index`` holds the
    initial values of adapters that continue saved ones. ``dropout`` maps names of config.json's
    dropout and router noise settings to their values, which are not applied. Rotary positions that
    depend on the length of a text are scaled for ``seq_len`` tokens in every text. ``names`` maps
    the language model's tensors to their names in the whole model of the directory;
    ``unused_parts`` are parts of its files that are not used. ``routers``: those that are watched;
    ``router_score``: the function with which they weight experts. ``rope_scaling``:
    model.rope_scaling, already applied to ``config``.
    """

    module: LossModel
    config: Any
    directory: Path
    index: TensorIndex | ShapeIndex
    base_names: dict[str, str]
    saved_names: dict[str, str]
    tune: TuneConfig
    dtype: torch.dtype
    seed: int
    tied_name: str | None = None
    slices: Mapping[str, Slice] = field(default_factory=dict)
    init_index: TensorIndex | None = None
    dropout: Mapping[str, float] = field(default_factory=dict)
    seq_len: int | None = None
    names: TensorNames = TensorNames()
    unused_parts: tuple[str, ...] = ()
    routers: tuple[Router, ...] = ()
    router_score: ScoreFunction = ""
    rope_scaling: Mapping[str, Any] | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Ids of the tokens whose embedding rows are trained, in ascending order."""
        embedding = self.module.causal_lm().get_input_embeddings()
        rows = getattr(embedding, "token_adapter", None)
        return rows.ids if isinstance(rows, TrainableTokenRows) else ()

    def locate_initial_values(self, name: str) -> tuple[TensorIndex | ShapeIndex, str] | None:
        """Return the index of files that hold a tensor's initial values, and its name in them.

        ``name`` is the tensor's in ``module``. None if no file holds its values.
        """
        if self.init_index is not None and name in self.saved_names:
            return self.init_index, self.saved_names[name]
        stored_name = self.base_names.get(name)
        return None if stored_name is None else (self.index, stored_name)

    def regions(
        self, name: str, parameter: torch.Tensor, values: torch.Tensor | None = None
    ) -> list[LocalRegion]:
        """Return this rank's regions of ``parameter``, or of ``values`` of the same layout.

        ``values`` may be this rank's part only: optimizer state on the host is not a DTensor. There
        is one region, or one for each part that this rank has a slice of. Regions are views.
        """
        local, offset = local_region(parameter.detach())
        if values is not None:
            new_local = local_region(values.detach())[0]
            assert new_local.shape == local.shape, f"{name}: {new_local.shape} beside {local.shape}"
            local = new_local
        if (own_slice := self.slices.get(name)) is None:
            return [LocalRegion(local, offset, tuple(parameter.shape))]
        dim, width = own_slice.dim, own_slice.full_shape[own_slice.dim] // own_slice.num_parts
        return [
            LocalRegion(
                part,
                (*offset[:dim], offset[dim] + own_slice.start + number * width, *offset[dim + 1 :]),
                own_slice.full_shape,
            )
            for number, part in enumerate(local.chunk(own_slice.num_parts, dim))
        ]

    @property
    def architecture_hash(self) -> str:
        """See ``hash_architecture``."""
        return hash_architecture(self.directory, self.index)

    @property
    def weights_fingerprint(self) -> str:
        """See ``fingerprint_weights``; "" without files, or if a resumed run needs no base values.

        Full fine-tuning needs them only if the initial model is the reference for answers.
        """
        is_needed = self.tune.method != "full" or self.tune.has_reference
        if not is_needed or not isinstance(self.index, TensorIndex):
            return ""
        return fingerprint_weights(self.index)


def build(
    directory: Path,
    dtype: torch.dtype,
    tune: TuneConfig,
    seed: int,
    *,
    reads_weights: bool = True,
    rope_scaling: Mapping[str, Any] | None = None,
) -> BuiltModel:
    """Build the model of ``directory`` with its adapters on the meta device.

    Frozen weights have ``dtype``, trained ones (all with tune.method=full) tune.param_dtype. With
    ``weights=False`` only config.json is read, and loading leaves memory uninitialized.

    Raises:
        DataError: if the directory is unusable. ConfigError: as ``add_adapters`` raises it, or if
            tune.param_dtype is bf16 in an fp32 model, or positions cannot be scaled in this way.
    """
    _refuse_bf16_params_in_fp32(tune, dtype)
    is_full = tune.method == "full"
    base_dtype = DTYPES[tune.param_dtype] if is_full else dtype
    language, dropout = _make_language_model(directory, base_dtype, reads_weights, rope_scaling)
    model, names, file_index = language.model, language.names, language.index
    uses_document_attention = use_document_attention(model)
    dropout |= make_routers_deterministic(model)
    keep_fp32_tensors(model, base_dtype, is_full)
    index = file_index or ShapeIndex(stored_tensors(model))
    shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(model)}
    own_names = {id(tensor): name for name, tensor in stored_tensors(model)}
    tied = own_names[id(model.get_input_embeddings().weight)] if language.is_tied else None
    stored = _find_stored_names(directory, language, index, shapes, tied)  # before peft allocates
    root: nn.Module = model if is_full else add_adapters(language, tune, dtype, directory)
    module = LossModel(root, language.config, uses_document_attention).train()
    module.objective = make_objective(tune)
    base_names = {
        name: stored[own_names[id(tensor)]]
        for name, tensor in stored_tensors(module)
        if id(tensor) in own_names
    }
    if tune.base_format:
        pack_base(model, tune, dtype)
    used = {*base_names.values(), names.find_stored_name(f"{names.head}.weight", index) or ""}
    trained_names = (name for name, p in module.named_parameters() if p.requires_grad)
    saved_names = {n: base_names[n] if is_full else _peft_name(n, names) for n in trained_names}
    return BuiltModel(
        module,
        language.config,
        directory,
        index,
        base_names,
        saved_names,
        tune,
        dtype,
        seed,
        stored[tied] if tied else None,
        dropout=dropout,
        names=names,
        unused_parts=summarize_unused_tensors(file_index, used) if file_index is not None else (),
        rope_scaling=rope_scaling,
    )


def _make_language_model(
    directory: Path, dtype: torch.dtype, reads_weights: bool, rope_scaling: Mapping[str, Any] | None
) -> tuple[LanguageModel, dict[str, float]]:
    """Return the language model of ``directory``, and its dropout rates, which are turned off."""
    config = read_config(directory, rope_scaling)
    dropout = disable_dropout(language_config(config, directory))
    index = index_model_directory(directory) if reads_weights else None
    language = make_language_model(config, directory, dtype, index)
    if rope_scaling is not None:
        require_scaling_support(language.model, rope_scaling)
    language.model.config.use_cache = False
    return language, dropout


def _refuse_bf16_params_in_fp32(tune: TuneConfig, dtype: torch.dtype) -> None:
    if tune.param_dtype == "bf16" and dtype == torch.float32:
        raise ConfigError(
            "tune.param_dtype=bf16 while this device computes in fp32; set model.dtype=bf16, or "
            "leave tune.param_dtype out"
        )


def _find_stored_names(
    directory: Path,
    language: LanguageModel,
    index: TensorIndex | ShapeIndex,
    shapes: Mapping[str, tuple[int, ...]],
    tied_name: str | None,
) -> dict[str, str]:
    """Map each tensor of the language model, as listed in ``shapes``, to its name in the files.

    ``tied_name``: the tensor that is both the embedding and the output head.

    Raises:
        DataError: if a tensor is missing or has another shape.
    """
    names: dict[str, str] = {}
    for name, shape in shapes.items():
        stored = language.names.find_stored_name(name, index, is_tied=name == tied_name)
        if stored is None:
            continue
        names[name] = stored
        if index.shapes[stored] != shape:
            raise DataError(
                f"{directory}: {stored} has shape {list(index.shapes[stored])}, config.json "
                f"asks for {list(shape)}; the weights are of another model"
            )
    missing = [name for name in shapes if name not in names]
    if missing:
        _require_known_conversion(directory, missing, language.names, index)
        raise DataError(
            f"{directory}: {len(missing)} of {len(shapes)} tensors that config.json asks for "
            f"are not in its safetensors files, such as {', '.join(missing[:3])}"
            + _advise_on_prefix(missing[0], index)
        )
    return names


def _require_known_conversion(
    directory: Path,
    missing_names: Sequence[str],
    names: TensorNames,
    index: TensorIndex | ShapeIndex,
) -> None:
    """Refuse a model if transformers makes a missing tensor from stored ones in an unknown way."""
    operations = getattr(index, "unsupported_operations", {})
    bad_name = next(
        (name for name in missing_names if names.whole_model_name(name) in operations), None
    )
    if bad_name is not None:
        raise DataError(
            f"{directory}: transformers makes {bad_name} from tensors in these files by "
            f"{operations[names.whole_model_name(bad_name)]}, which is not supported here, so this "
            "model cannot be read"
        )


def _advise_on_prefix(name: str, index: TensorIndex | ShapeIndex) -> str:
    """Return advice if a tensor is stored with the name of a wrapper module before its own."""
    match = next((stored for stored in index.shapes if stored.endswith(f".{name}")), None)
    if match is None:
        return ""
    return (
        f". {match} is there: the model was saved inside a wrapper of torch.compile, DDP or peft; "
        "unwrap it and save it again"
    )


def _peft_name(name: str, names: TensorNames) -> str:
    """Return the name under which peft saves a parameter of its adapter ``default``."""
    whole_name = names.whole_model_name(name.removeprefix(f"model.{ADAPTER_PREFIX}"))
    plain = whole_name.replace("_magnitude_vector.default.weight", "_magnitude_vector")
    return ADAPTER_PREFIX + plain.replace(".default", "")
