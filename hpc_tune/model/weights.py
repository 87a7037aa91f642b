"""An index of a directory's tensors by name, made by reading its files' headers once.

    index_model_directory   a Hugging Face directory: each tensor in one piece
    index_checkpoint        a checkpoint: tensors in pieces, whose offsets are in the file's header
    TensorIndex: name -> TensorSource of ``tensor_sources.py``, which reads any region of the tensor

Both use the safetensors format (an 8-byte header length, a JSON header, raw bytes), so nothing here
unpickles.
"""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from hpc_tune.errors import CheckpointError, DataError, HpcTuneError
from hpc_tune.files import explain_pointer_file
from hpc_tune.model.config_json import (
    ShapeIndex,
    config_parts,
    read_config_json,
    try_read_config_json,
)
from hpc_tune.model.tensor_sources import (
    BLOCK_BYTES,
    BLOCK_VALUES,
    Box,
    JoinedTensor,
    Mxfp4Stack,
    PlainTensor,
    ReserveFunction,
    ScaledTensor,
    StoredBox,
    TensorFiles,
    TensorSource,
    explain_open_failure,
    reserve_nothing,
)

# -- NaN and inf among the values of a tensor.


_MAX_SEARCH_PARTS = 64  # parts of the rows that are searched one after the other


@dataclass(frozen=True)
class NonFiniteValue:
    """A value that is NaN or inf, and its index in the tensor."""

    value: float
    position: tuple[int, ...]


def find_non_finite(tensor: torch.Tensor) -> NonFiniteValue | None:
    """Return the first NaN or inf of a tensor of any shape, dtype and device, or None.

    The minimum and maximum show whether there is one, in a single pass that allocates nothing: 10
    GB/s on a core. torch's ``isfinite`` takes ten times as long.
    """
    if not tensor.numel() or not tensor.is_floating_point() or _is_finite(tensor):
        return None
    if not tensor.dim():
        return NonFiniteValue(tensor.item(), ())
    step = -(-len(tensor) // _MAX_SEARCH_PARTS)
    parts = enumerate(tensor.split(step))
    number, part = next((number, part) for number, part in parts if not _is_finite(part))
    position = tuple(torch.nonzero(~part.isfinite())[0].tolist())
    return NonFiniteValue(part[position].item(), (number * step + position[0], *position[1:]))


def _is_finite(tensor: torch.Tensor) -> bool:
    return all(math.isfinite(extreme.item()) for extreme in tensor.aminmax())


# -- Names of an adapter's tensors, as in peft: LAYER followed by one of these.
#
# In files, ADAPTER_PREFIX precedes them; in a model, they contain the adapter's name, "default".
# Modules that are trained in full alongside an adapter have only the prefix.


LORA_A, LORA_B, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector"
ADAPTER_PREFIX = "base_model.model."


def adapted_layer(name: str) -> str:
    """Return the layer that an adapter's tensor or module belongs to; "" for any other name."""
    layer, separator, _ = name.removeprefix(ADAPTER_PREFIX).partition(".lora_")
    return layer if separator else ""


def is_lora_a(name: str) -> bool:
    """Whether a tensor is an adapter's A, by its name in files or in a model."""
    return ".lora_A." in name


def is_lora_b(name: str) -> bool:
    """Whether a tensor is an adapter's B, by its name in files or in a model."""
    return ".lora_B." in name


# -- Names in directories, and in headers of files.


ADAPTER_FILE = "adapter_model.safetensors"  # peft's name
SHARD_INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FOLDER = "adapter"  # of a checkpoint
OFFSETS_KEY = "hpc_tune_offsets"
FULL_SHAPES_KEY = "hpc_tune_full_shapes"
NAMES_KEY = "hpc_tune_names"  # tensor names of pieces that share a file with another of its pieces
DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",  # powers of two: scales
}
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
# Raised when JSON has another structure than ours.
_PARSE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class TensorIndex:
    """The tensors of some files by name, and those joined from several of them.

    ``ignored_weights``: other weights in the directory. ``unsupported_operations``: tensors of the
    model that transformers would make by operations not supported here, with the operations' names.
    Problems are raised as ``error``.
    """

    sources: Mapping[str, TensorSource]
    files: Sequence[Path]
    error: type[HpcTuneError] = DataError
    ignored_weights: tuple[str, ...] = ()
    unsupported_operations: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor."""
        return {name: source.shape for name, source in self.sources.items()}

    @functools.cached_property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """The dtype of each tensor; for tensors quantized in the files, the dequantized dtype."""
        return {name: source.dtype for name, source in self.sources.items()}

    @property
    def stored_names(self) -> list[str]:
        """Names of the tensors as stored in the files, without the joined ones."""
        return [name for name in self.sources if name not in self.joined_tensors]

    @functools.cached_property
    def joined_tensors(self) -> Mapping[str, JoinedTensor]:
        """The tensors that are assembled from several stored ones."""
        return {n: source for n, source in self.sources.items() if isinstance(source, JoinedTensor)}

    @property
    def is_quantized(self) -> bool:
        """Whether files hold tensors in float8 or MXFP4."""
        return any(isinstance(s, ScaledTensor | Mxfp4Stack) for s in self.sources.values())

    def with_names(self, rename: Callable[[str], str]) -> "TensorIndex":
        """Return an index of the same tensors under other names."""
        sources = {rename(n): source for n, source in self.sources.items()}
        return replace(self, sources={n: replace(tensor, name=n) for n, tensor in sources.items()})

    def tensor_bytes(self, name: str) -> int:
        """Return the size of a whole tensor in bytes."""
        return torch.Size(self.shapes[name]).numel() * self.dtypes[name].itemsize

    def read(self, name: str) -> torch.Tensor:
        """Return a whole tensor."""
        return self.sources[name].read(Box.cover_tensor(self.shapes[name]))

    def fill(
        self,
        local_tensor: torch.Tensor,
        name: str,
        offset: tuple[int, ...] = (),
        reserve: ReserveFunction = reserve_nothing,
    ) -> None:
        """Copy the region of ``name`` at ``offset`` with ``local_tensor``'s shape into it.

        The dtype is converted on the way. At most ``PIECE_BYTES`` of the file's data are copied
        into anonymous memory at once.

        Raises:
            HpcTuneError: if the tensor on disk has no such region or its bytes cannot be read.
        """
        source, offset = self.sources[name], offset or (0,) * local_tensor.dim()
        if not Box(offset, tuple(local_tensor.shape)).is_within(source.shape):
            raise self.error(
                f"{source.file}: {name} has shape {list(source.shape)}, which has no region of "
                f"shape {list(local_tensor.shape)} at {list(offset)}; the weights belong to "
                "another model"
            )
        source.fill(local_tensor, offset, reserve)

    def require_finite(
        self, local_tensor: torch.Tensor, name: str, offset: tuple[int, ...]
    ) -> None:
        """Raise a HpcTuneError for NaN or inf in ``local_tensor``, from ``name`` at ``offset``."""
        if (fault := find_non_finite(local_tensor)) is None:
            return
        position = [a + b for a, b in zip(fault.position, offset, strict=True)]
        raise self.error(
            f"{self.sources[name].file}: {name} has {fault.value:g} at {position}, expected finite "
            "numbers only: the loss would be nan from the first step. The weights are damaged, or "
            "were converted wrongly; copy or convert them again"
        )

    def require(self, names: Iterable[str]) -> None:
        """Raise a HpcTuneError if one of ``names`` is missing."""
        for name in names:
            if name not in self.sources:
                raise self.error(
                    f"{self.files[0].parent}: it has no {name}; it belongs to another model"
                )

    def map_pages(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor that *is* the file's pages; see ``PlainTensor.map_pages``."""
        source = self.sources[name]
        return source.map_pages(dtype) if isinstance(source, PlainTensor) else None


def index_files(files: Sequence[Path], error: type[HpcTuneError] = DataError) -> TensorIndex:
    """Index safetensors files, reading only their headers.

    Raises:
        HpcTuneError: of type ``error``, if a file is missing, truncated or not safetensors.
    """
    return TensorIndex(_read_headers(files, error), files, error)


def _read_headers(files: Sequence[Path], error: type[HpcTuneError]) -> dict[str, PlainTensor]:
    handles = TensorFiles(error)
    pieces: dict[str, list[StoredBox]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for file in files:
        try:
            for piece, name, full, dtype in _read_header(handles, file):
                if shapes.setdefault(name, full) != full:
                    raise ValueError(f"{name} has the shape {full}, but another one in other files")
                pieces.setdefault(name, []).append(piece)
                dtypes[name] = dtype
        except FileNotFoundError:
            raise error(
                explain_open_failure(file)
                or f"{file}: no such file, though the model's index names it; copy the directory "
                "again"
            ) from None
        except (SafetensorError, OSError, *_PARSE_ERRORS) as fault:
            raise error(
                explain_pointer_file(file)
                or f"{file}: not a whole safetensors file ({fault}); it is cut off or damaged, "
                "copy it again"
            ) from None
    handles.close()
    return {
        name: PlainTensor(name, shapes[name], dtypes[name], boxes[0].file, tuple(boxes), handles)
        for name, boxes in pieces.items()
    }


def _read_header(
    tensor_files: TensorFiles, file: Path
) -> Iterator[tuple[StoredBox, str, tuple[int, ...], torch.dtype]]:
    """Yield the pieces of a file, each with its tensor's name, shape and dtype."""
    handle = tensor_files.open(file)
    metadata = handle.metadata() or {}
    keys = (OFFSETS_KEY, FULL_SHAPES_KEY, NAMES_KEY)
    offsets, full_shapes, names = (json.loads(metadata.get(key, "{}")) for key in keys)
    for stored_name in handle.keys():  # noqa: SIM118 - not a dict
        tensor_slice = handle.get_slice(stored_name)
        shape = tuple(tensor_slice.get_shape())
        name = str(names.get(stored_name, stored_name))
        box = Box(tuple(offsets.get(stored_name, (0,) * len(shape))), shape)
        full = tuple(full_shapes.get(stored_name, shape))
        if not box.is_within(full):
            raise ValueError(f"{name} has no region of {shape} at {box.offset} of {full}")
        if (dtype := tensor_slice.get_dtype()) not in _DTYPES:
            raise tensor_files.error(
                f"{file}: {name} is stored as {dtype}, which is not read here; take a checkpoint "
                "in bf16, fp16, fp32, float8 with scales or MXFP4"
            )
        yield StoredBox(file, stored_name, box), name, full, _DTYPES[dtype]


def index_model_directory(directory: Path) -> TensorIndex:
    """Index the safetensors files of a Hugging Face model directory.

    Raises:
        DataError: if there are none, one is missing or damaged, or they are quantized in another
            format than float8 or MXFP4.
    """
    files, ignored_weights = _find_weight_files(directory)
    # If several files hold a tensor, the last one counts, as in transformers.
    stored_tensors = {
        name: replace(tensor, file=tensor.pieces[-1].file, pieces=tensor.pieces[-1:])
        for name, tensor in _read_headers(files, DataError).items()
    }
    sources = merge_mxfp4_stacks(stored_tensors, directory)
    _refuse_unknown_quantization(sources, directory)
    return TensorIndex(
        merge_float8_scales(sources, directory), files, ignored_weights=ignored_weights
    )


def _find_weight_files(directory: Path) -> tuple[list[Path], tuple[str, ...]]:
    """Return the files of a directory's weights, and a description of other weights in it.

    If there are both a model.safetensors and shards, transformers takes the former.
    """
    index_file = directory / SHARD_INDEX_FILE
    single = directory / "model.safetensors"
    names = _read_shard_names(index_file) if index_file.exists() else []
    if single.exists() and single.name not in names:
        ignored_weights = (
            f"{SHARD_INDEX_FILE} and its {len(names)} files, as model.safetensors takes precedence"
        )
        return [single], (ignored_weights,) if names else ()
    if names:
        return [directory / name for name in names], ()
    if list(directory.glob("*.bin")):
        raise DataError(
            f"{directory}: found only .bin (pickle) weights, expected .safetensors; convert them "
            "with transformers: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )
    other_names = sorted(file.name for file in directory.glob("*.safetensors"))
    raise DataError(
        f"{directory}: no model.safetensors and no {SHARD_INDEX_FILE} in it"
        + (f"; {other_names[0]} is not in transformers' form" if other_names else "")
    )


def _read_shard_names(index_file: Path) -> list[str]:
    try:
        names = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"].values()
        if foreign_names := [name for name in names if Path(name).name != name]:
            raise ValueError(f"it names {foreign_names[0]}, which is not in this folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (
            explain_pointer_file(index_file) or f"{index_file}: not a safetensors index ({error})"
        )
        raise DataError(reason) from None
    return sorted(set(names))


def index_checkpoint(directory: Path) -> TensorIndex:
    """Index the tensors of a checkpoint.

    Raises:
        CheckpointError: if there are none, or a file is damaged.
    """
    files = sorted(directory.glob("rank-*.safetensors"))
    if not files:
        raise CheckpointError(f"{directory} has no rank-*.safetensors: it is not a checkpoint")
    files += (directory / ADAPTER_FOLDER).glob(ADAPTER_FILE)
    return index_files(files, CheckpointError)


# -- Quantized weights: in float8 with scales, and in MXFP4, as gpt_oss is published.
#
#     NAME, NAME_scale_inv or NAME_scale    float8 and the scales: one tensor, bf16
#     NAME_blocks, NAME_scales              MXFP4: one stack, bf16
#
# Checkpoints that are quantized in another way are refused; the message names the method.


FLOAT8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
QUANTIZATION_KEYS = ("quantization_config", "compression_config")  # in config.json or a part of it
_SCALE_SUFFIXES = ("_scale_inv", "_scale")  # after the weight's name; values are multiplied by both
_INPUT_SCALE_SUFFIXES = (".activation_scale", ".input_scale", ".k_scale", ".v_scale")  # for serving
_BLOCKS_SUFFIX, _SCALES_SUFFIX = "_blocks", "_scales"  # after the name of a stack in MXFP4
Sources = Mapping[str, TensorSource]


def merge_float8_scales(sources: Sources, directory: Path) -> Sources:
    """Return sources with each float8 tensor and its scale merged into one source.

    Raises:
        DataError: if a float8 tensor has no scale, a scale of the wrong shape, or is not a matrix.
    """
    block = _read_quantization(directory).get("weight_block_size")
    scaled_tensors = {
        name: _add_scale(source, sources, directory, block)
        for name, source in sources.items()
        if source.dtype in FLOAT8_DTYPES
    }
    scale_names = {name + end for name in scaled_tensors for end in _SCALE_SUFFIXES}
    if scaled_tensors:
        scale_names |= {name for name in sources if name.endswith(_INPUT_SCALE_SUFFIXES)}
    return {name: t for name, t in {**sources, **scaled_tensors}.items() if name not in scale_names}


def _add_scale(tensor: TensorSource, sources: Sources, directory: Path, block: Any) -> ScaledTensor:
    """Return a float8 tensor combined with the scale that is stored beside it."""
    name = tensor.name
    if len(tensor.shape) > 2:
        raise DataError(
            f"{directory}: {name}: a stack of matrices in float8, {list(tensor.shape)}: they are "
            "read only if files hold each matrix by itself. Take the model in bf16"
        )
    if len(tensor.shape) < 2:
        raise DataError(
            f"{directory}: {name} is stored in float8 and has the shape {list(tensor.shape)}; "
            "expected a matrix. Take the model in bf16"
        )
    scale_name = next((name + end for end in _SCALE_SUFFIXES if name + end in sources), None)
    if scale_name is None:
        raise DataError(
            f"{directory}: {name} is stored in float8 without a scale, such as "
            f"{name}{_SCALE_SUFFIXES[0]}; take the model in bf16"
        )
    rows, columns = tensor.shape
    shape = sources[scale_name].shape
    scales = torch.empty(shape, dtype=torch.float32)
    sources[scale_name].fill(scales, (0,) * len(shape), reserve_nothing)
    make_tensor = functools.partial(
        ScaledTensor, name, tensor.shape, torch.bfloat16, tensor.file, tensor
    )
    if scales.numel() == 1:
        return make_tensor(scales.view(1, 1), rows, columns)
    if shape in ((rows,), (rows, 1)):
        return make_tensor(scales.view(rows, 1), 1, columns)
    is_list = isinstance(block, list) and len(block) == 2
    by_block = is_list and all(type(size) is int and size > 0 for size in block)
    if by_block and shape == (math.ceil(rows / block[0]), math.ceil(columns / block[1])):
        return make_tensor(scales, *block)
    raise DataError(
        f"{directory}: {scale_name} has the shape {list(shape)}, which does not fit a matrix of "
        f"{rows} x {columns} in blocks of {block}"
    )


def merge_mxfp4_stacks(sources: Sources, directory: Path) -> Sources:
    """Return sources with one source per MXFP4 stack in place of its blocks and scales.

    Raises:
        DataError: if scales are missing or do not fit their blocks.
    """
    stacks = {}
    for blocks in filter(_has_mxfp4_blocks, sources.values()):
        name = blocks.name.removesuffix(_BLOCKS_SUFFIX)
        scales = sources.get(name + _SCALES_SUFFIX)
        experts, rows, groups, _ = blocks.shape
        if scales is None or (scales.shape, scales.dtype) != (blocks.shape[:-1], torch.uint8):
            has = "no such tensor is there" if scales is None else f"found {list(scales.shape)}"
            raise DataError(
                f"{directory}: {blocks.name} has the shape {list(blocks.shape)}, so "
                f"{name}{_SCALES_SUFFIX} should be uint8 of the shape {list(blocks.shape[:-1])}; "
                f"{has}. A file is missing or damaged, copy it again"
            )
        shape = (experts, groups * BLOCK_VALUES, rows)
        stacks[name] = Mxfp4Stack(name, shape, torch.bfloat16, blocks.file, blocks, scales)
    unused_names = {name + end for name in stacks for end in (_BLOCKS_SUFFIX, _SCALES_SUFFIX)}
    return {name: source for name, source in sources.items() if name not in unused_names} | stacks


def _has_mxfp4_blocks(tensor: TensorSource) -> bool:
    is_uint8 = tensor.name.endswith(_BLOCKS_SUFFIX) and tensor.dtype is torch.uint8
    return is_uint8 and len(tensor.shape) == 4 and tensor.shape[-1] == BLOCK_BYTES


def _refuse_unknown_quantization(sources: Sources, directory: Path) -> None:
    """Refuse weights that are quantized in another format than float8 with scales, or MXFP4.

    Raises:
        DataError: naming the method, if there are any, or if config.json says that weights are
            quantized and none is in a known format.
    """
    settings = _read_quantization(directory)
    method = str(settings.get("quant_method") or "an unknown method")
    marks = (".qweight", ".weight_packed", ".absmax", _BLOCKS_SUFFIX, ".SCB", ".weight_format")
    names = [
        name
        for name, s in sources.items()
        if name.endswith(marks) or (name.endswith(".weight") and not s.dtype.is_floating_point)
    ]
    is_read = any(isinstance(s, Mxfp4Stack) or s.dtype in FLOAT8_DTYPES for s in sources.values())
    if names:
        raise DataError(
            f"{directory}: its weights are quantized ({method}, such as in {names[0]}); hpc_tune "
            "trains on bf16, fp16, fp32, float8 and MXFP4 checkpoints. Take the one that it was "
            "made from, with tune.method=qlora if memory is short"
        )
    if settings and not is_read:
        raise DataError(
            f"{directory}/config.json says that weights are quantized ({method}), but none has a "
            "quantized format that is known here. If they are not quantized, as after a tool that "
            "merges or dequantizes, remove quantization_config from the file; otherwise take the "
            "checkpoint that this one was made from"
        )


def _read_quantization(directory: Path) -> dict[str, Any]:
    """Return quantization_config of config.json or of a part of it; empty if there is none."""
    config = try_read_config_json(directory)
    candidates = [part.get(key) for part in config_parts(config) for key in QUANTIZATION_KEYS]
    return next((settings for settings in candidates if isinstance(settings, dict)), {})


# -- Which model a directory holds: by the names and shapes of its tensors, and by some values.
#
# A model and its instruct version have the same names, shapes and config.json.


_IGNORED_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
_MAX_SAMPLED_TENSORS = 1024  # takes a second on a parallel file system
_SAMPLED_VALUES = 64  # per tensor: versions that were trained further differ in nearly all of them


def hash_architecture(directory: Path, index: TensorIndex | ShapeIndex) -> str:
    """Return a hash over the names and shapes of a model's tensors and over its config.json."""
    shapes = sorted((name, list(index.shapes[name])) for name in index.stored_names)
    config = read_config_json(directory)
    fields = {key: value for key, value in config.items() if key not in _IGNORED_KEYS}
    return hashlib.sha256(json.dumps([shapes, fields], sort_keys=True).encode()).hexdigest()


def fingerprint_weights(index: TensorIndex) -> str:
    """Return a hash over some values of each of a model's tensors, or of 1,024 if it has more.

    It does not depend on how tensors are spread over files, and is the same for a copy in bf16.

    Raises:
        DataError: if the values cannot be read.
    """
    names = sorted(index.stored_names, key=_pseudorandom_sort_key)[:_MAX_SAMPLED_TENSORS]
    names_by_file = sorted(names, key=lambda name: str(index.sources[name].file))
    hashes = {name: _hash_middle_values(index, name) for name in names_by_file}
    digest = hashlib.sha256()
    for name in sorted(hashes):
        digest.update(f"{name} {hashes[name]}\n".encode())
    return digest.hexdigest()


def _pseudorandom_sort_key(name: str) -> str:
    """Return a pseudorandom sort key for drawing tensors, so that all kinds of layers are drawn."""
    return hashlib.sha256(name.encode()).hexdigest()


def _hash_middle_values(index: TensorIndex, name: str) -> str:
    """Return a hash over the values in the middle of a tensor, as bf16."""
    shape = index.shapes[name]
    if not all(shape):
        return "empty"
    box = [1] * len(shape)
    if shape:
        box[-1] = min(shape[-1], _SAMPLED_VALUES)
    values = torch.empty(box, dtype=torch.float32)
    offset = tuple((size - box_size) // 2 for size, box_size in zip(shape, box, strict=True))
    index.fill(values, name, offset)
    flat = values.bfloat16().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
