"""A checkpoint -> files that other tools load: a peft adapter, or a merged model.

Everything is streamed tensor by tensor: merging holds one base tensor and its change at a time.
"""

import functools
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from hpc_tune.atomic_file import sync_folder
from hpc_tune.checkpoint.card import CARD, CONFIG, write_card
from hpc_tune.checkpoint.chat_template import OTHERS, write_template
from hpc_tune.checkpoint.store import synced
from hpc_tune.config.schema import TuneConfig
from hpc_tune.errors import CheckpointError, ConfigError, MemoryBudgetError
from hpc_tune.log import Progress
from hpc_tune.memory.host import find_limit, used_bytes
from hpc_tune.memory.policy import room_of
from hpc_tune.model.language import Storage, storage_of
from hpc_tune.model.regions import Region, WrittenFile, write_regions
from hpc_tune.model.weights import (
    ADAPTER_FILE,
    ADAPTER_FOLDER,
    PIECE_BYTES,
    TensorIndex,
    index_checkpoint,
    index_model_directory,
)
from hpc_tune.units import format_bytes

SHARD_BYTES = 2 << 30
# transformers, and its model without values: 113 to 140 MiB (transformers 5.23).
_STOCK_BYTES = 130 << 20
GGUF_FILE = "model.gguf"
_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt", ".gguf")
_ADAPTER_PREFIX = "base_model.model."
_LANGUAGE_MODEL = re.compile(r"(\w+\.)*(language_model|text_model)\.")  # as a part of a model


def export_adapter(
    checkpoint: Path, tune: TuneConfig, base: Path, out: Path, template: str | None = None
) -> Path:
    """Write the adapter of a checkpoint as a directory that stock peft loads.

    ``template``: the chat template that was trained with, where it is not the base's.

    Raises:
        ConfigError: if the run had no adapter, or ``out`` holds something that is not an export.
        CheckpointError: if files are damaged.
    """
    if tune.method == "full":
        raise ConfigError("tune.method=full has no adapter; export --to merged writes the model")
    index = index_checkpoint(checkpoint)
    with replacing(out, base) as temporary:
        write_adapter(index, tune, base, temporary)
        copy_tokenizer(base, temporary)
        write_template(template, base, temporary)
        named = (name.removeprefix(_ADAPTER_PREFIX) for name in index.pieces)
        whole = any(map(_LANGUAGE_MODEL.match, named))
        write_card(checkpoint, base, temporary, "adapter", whole)
    return out


def write_adapter(index: TensorIndex, tune: TuneConfig, base: Path, out: Path) -> WrittenFile:
    """Write the adapter's weights and configuration, as peft names them, into the folder ``out``.

    One tensor is held at a time. Returns the file of the weights; the configuration is synced too.
    """
    from hpc_tune.model.build import lora_config

    names = [n for n in index.pieces if n.startswith(_ADAPTER_PREFIX)]
    regions = []
    for name in names:
        shape, values = index.shapes[name], functools.partial(_read, index, name)
        region = Region(name, index.dtypes[name], shape, (0,) * len(shape), shape, values)
        regions.append(region)
    written = write_regions(out / ADAPTER_FILE, regions)
    config = lora_config(tune)
    config.base_model_name_or_path = str(base.resolve())
    config.inference_mode = True
    layers = sorted({n.removeprefix(_ADAPTER_PREFIX).partition(".lora_")[0] for n in names})
    within = _LANGUAGE_MODEL.match(layers[0]) if layers else None
    if tune.targets == "all-linear" or within:
        config.target_modules = {layer.rpartition(".")[2] for layer in layers}
    if within:  # the other parts of such a model may have layers of the same names
        kinds = "|".join(sorted(config.target_modules))
        config.target_modules = rf"{re.escape(within.group())}.*\.({kinds})"
    config.save_pretrained(out)
    return written


def export_merged(
    checkpoint: Path, tune: TuneConfig, base: Path, out: Path, template: str | None = None
) -> Path:
    """Write base plus adapter (or the fully tuned weights) as a Hugging Face model directory.

    ``template``: the chat template that was trained with, where it is not the base's. A head that
    the base stores although it is the embedding is left out: it would be the one before tuning.
    Each tensor keeps the dtype it has in the base, float8 ones with scales become bf16. One tensor
    is held at a time.

    Raises:
        CheckpointError, DataError: if files are damaged or belong to another model. ConfigError:
        if ``out`` holds something that is not an export. MemoryBudgetError: if there is no room
        for one tensor.
    """
    trained, stored = index_checkpoint(checkpoint), index_model_directory(base)
    check_room(stored)
    merged = Merged(trained, stored, tune, base)
    shards = _shards(stored, merged.names)
    num_tensors = sum(map(len, shards))
    progress = Progress("merging", num_tensors)
    weight_map: dict[str, str] = {}
    with replacing(out, base) as temporary:
        for number, names in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_regions(temporary / file, [merged.region(name) for name in names])
            weight_map |= dict.fromkeys(names, file)
            progress.update(len(weight_map))
        total = sum(map(stored.bytes_of, weight_map))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        for file_path in sorted(base.iterdir()):
            if _is_companion(file_path):
                shutil.copyfile(file_path, temporary / file_path.name)
        if stored.scales:
            _drop_quantization(temporary / "config.json")
        write_template(template, base, temporary)
        write_card(checkpoint, base, temporary, "merged")
    progress.close()
    return out


def pack_adapter(
    folder: Path, names: Sequence[str], tune: TuneConfig, base: Path
) -> list[WrittenFile]:
    """Turn the files ``names`` of an unfinished checkpoint into its ``adapter`` folder.

    They hold the ranks' regions of the adapter's weights and are removed, so that a checkpoint
    holds them once, in peft's form.

    Raises:
        CheckpointError: if the file system refuses.
    """
    files = [folder / name for name in names]
    out = folder / ADAPTER_FOLDER
    try:
        out.mkdir()
        weights = write_adapter(TensorIndex(files, CheckpointError), tune, base, out)
        config = synced(out / "adapter_config.json")
        sync_folder(out)
        for file in files:
            file.unlink()
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error}") from None
    return [replace(file, name=f"{ADAPTER_FOLDER}/{file.name}") for file in (weights, config)]


def merge_bytes(largest_tensor_bytes: int) -> int:
    """Return what merging holds at once: a tensor, a piece for the file, and transformers.

    That is asked for the names of most models' tensors. Where an adapter changes a tensor that is
    as large, it is up to two pieces more.
    """
    return largest_tensor_bytes + PIECE_BYTES + _STOCK_BYTES


class Merged:
    """The tensors of the merged model, each computed on demand."""

    def __init__(
        self, trained: TensorIndex, stored: TensorIndex, tune: TuneConfig, base: Path
    ) -> None:
        self._trained, self._stored, self._tune, self._base = trained, stored, tune, base
        suffix = ".lora_A.weight"
        self._adapted: dict[str, str] = {}
        for name in trained.pieces:
            if name.startswith(_ADAPTER_PREFIX) and name.endswith(suffix):
                layer = name.removesuffix(suffix)
                self._adapted[self._base_name(layer)] = layer

    def _base_name(self, layer: str) -> str:
        path = layer.removeprefix(_ADAPTER_PREFIX) + ".weight"
        for candidate in (path, path.partition(".")[2]):
            if candidate in self._stored.pieces:
                return candidate
        if renamed := self._storage.names.renamed.get(path):
            return renamed
        raise CheckpointError(f"the base model has no {path}, which the adapter changes")

    @functools.cached_property
    def _transposed(self) -> frozenset[str]:
        """Which tensors are stored transposed: if one that is not square is, square ones may be."""
        shapes = self._trained.shapes
        straight = all(
            self._stored.shapes[name]
            == (shapes[f"{layer}.lora_B.weight"][0], shapes[f"{layer}.lora_A.weight"][1])
            for name, layer in self._adapted.items()
        )
        return frozenset() if straight else self._storage.transposed

    @functools.cached_property
    def _storage(self) -> Storage:
        return storage_of(self._base, self._stored)

    @property
    def copied_head(self) -> str | None:
        """An output head that is stored beside the embedding it equals, from before tuning."""
        return self._storage.copied_head if "head" in " ".join(self._stored.pieces) else None

    @property
    def names(self) -> list[str]:
        """The tensors of the merged model, in name order."""
        return sorted(self._stored.pieces.keys() - {self.copied_head})

    def region(self, name: str) -> Region:
        """Return a tensor, computed when it is asked for its values."""
        shape, dtype = self._stored.shapes[name], self._stored.dtypes[name]
        return Region(name, dtype, shape, (0,) * len(shape), shape, lambda: self._tensor(name))

    def _tensor(self, name: str) -> torch.Tensor:
        out = torch.empty(self._stored.shapes[name], dtype=self._stored.dtypes[name])
        if name in self._trained.pieces:
            self._trained.fill(out, name)
        elif name in self._adapted:
            self._add_adapter(out, name, self._adapted[name])
        else:
            self._stored.fill(out, name)
        return out

    def _add_adapter(self, out: torch.Tensor, name: str, layer: str) -> None:
        """W + (alpha / rank) B A by blocks of rows; DoRA: each row scaled to its magnitude.

        A transposed W gets the transposed product.
        """
        a, b = (_read(self._trained, f"{layer}.lora_{x}.weight") for x in "AB")
        if name in self._transposed:
            a, b = b.t(), a.t()
        scaling = self._tune.alpha / self._tune.rank
        rows = max(1, PIECE_BYTES // (4 * out.shape[1]))
        blocks = torch.empty((min(rows, len(out)), out.shape[1]), dtype=torch.float32)
        for start in range(0, out.shape[0], rows):
            block = blocks[: len(out) - start]
            self._stored.fill(block, name, (start, 0))
            block.addmm_(b[start : start + rows], a, alpha=scaling)
            if self._tune.method == "dora":
                magnitude = _read(self._trained, f"{layer}.lora_magnitude_vector")
                wanted = magnitude[start : start + rows]
                block *= (wanted / block.norm(dim=1)).unsqueeze(1)
            out[start : start + rows] = block


def check_room(stored: TensorIndex) -> None:
    """Refuse to merge where memory is short, before the kernel kills the process."""
    needed = merge_bytes(max(map(stored.bytes_of, stored.pieces)))
    limit = find_limit()
    room = room_of(used_bytes(limit), limit.num_bytes)
    if needed > room:
        raise MemoryBudgetError(
            f"merging holds one tensor at a time and needs {format_bytes(needed)}; "
            f"{limit.source} leaves {format_bytes(room)} of {format_bytes(limit.num_bytes)}: run "
            "it where there is more memory"
        )


def _read(index: TensorIndex, name: str) -> torch.Tensor:
    tensor = torch.empty(index.shapes[name], dtype=index.dtypes[name])
    index.fill(tensor, name)
    return tensor


def _shards(stored: TensorIndex, names: Sequence[str]) -> list[list[str]]:
    """Cut the tensors into files of about SHARD_BYTES."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name in names:
        num_bytes = stored.bytes_of(name)
        if shards[-1] and filled + num_bytes > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += num_bytes
    return shards


def _is_companion(file: Path) -> bool:
    """Whether a file of the base directory belongs to the model but is not its weights."""
    return file.suffix in (".json", ".jinja", ".model", ".txt") and not file.name.endswith(
        ".safetensors.index.json"
    )


def _drop_quantization(file: Path) -> None:
    """Remove the quantization from a config.json: merged weights have none."""
    config = json.loads(file.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")


def copy_tokenizer(base: Path, out: Path) -> None:
    """Copy the files of a tokenizer."""
    for file in sorted(base.iterdir()):
        if _is_companion(file) and file.name.startswith(("tokenizer", "special", "chat_template")):
            shutil.copyfile(file, out / file.name)


def _is_export(out: Path) -> bool:
    """Whether a folder is empty, or holds weights beside a model's small files and nothing else."""
    if not out.is_dir():
        return False
    entries = list(out.iterdir())
    weights = (ADAPTER_FILE, "model.safetensors.index.json", GGUF_FILE)
    return not entries or (
        any(entry.name in weights for entry in entries)
        and all(e.suffix in _SUFFIXES or e.name in (CARD, CONFIG, OTHERS) for e in entries)
    )


@contextmanager
def replacing(out: Path, base: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes ``out`` when the block ends well, else is removed.

    Raises:
        ConfigError: if there is something at ``out`` that no export has written.
    """
    out = out.resolve()
    temporary = out.with_name(out.name + ".tmp")
    if out.exists() and (out == base.resolve() or not _is_export(out)):
        raise ConfigError(
            f"{out} holds something that is not an export, which would be lost; choose a folder "
            "that does not exist yet"
        )
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        if out.exists():
            shutil.rmtree(out)
        temporary.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
