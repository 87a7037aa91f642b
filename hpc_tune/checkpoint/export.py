"""Export a checkpoint to files that other tools load: a peft adapter, or a merged model.

Everything is streamed tensor by tensor: merging holds one base tensor and its change at a time.
"""

import functools
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hpc_tune.checkpoint.expert_adapters import (
    find_adapted_stacks,
    layers_ignored_by_peft,
    make_peft_targets,
    split_adapter_by_expert,
)
from hpc_tune.checkpoint.export_metadata import (
    CARD_FILE,
    CONFIG_FILE,
    OTHER_TEMPLATES_FOLDER,
    read_rope_scaling,
    write_adapter_config,
    write_chat_templates,
    write_model_card,
)
from hpc_tune.checkpoint.merge import MergedModel
from hpc_tune.checkpoint.store import sync_and_hash
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import CheckpointError, ConfigError, MemoryBudgetError, find_remedy
from hpc_tune.files import sync_folder
from hpc_tune.log import Progress, log
from hpc_tune.memory.host import EMPTY_MODEL_BYTES, find_host_limit, free_host_bytes
from hpc_tune.model.config_json import config_parts
from hpc_tune.model.language import read_config
from hpc_tune.model.regions import Region, WrittenFile, write_regions
from hpc_tune.model.rotary import apply_rope_scaling_to_json
from hpc_tune.model.tensor_sources import PIECE_BYTES
from hpc_tune.model.tokenizer import load_tokenizer
from hpc_tune.model.weights import (
    ADAPTER_FILE,
    ADAPTER_FOLDER,
    ADAPTER_PREFIX,
    QUANTIZATION_KEYS,
    TensorIndex,
    adapted_layer,
    index_checkpoint,
    index_files,
)
from hpc_tune.units import format_bytes

SHARD_BYTES = 2 << 30
PER_EXPERT_SUFFIX = "-per-expert"  # after the name of an adapter's folder
GGUF_FILE = "model.gguf"
_COMPANION_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".codes")
_EXPORT_SUFFIXES = (*_COMPANION_SUFFIXES, ".safetensors", ".gguf")
# Prefixes of a tokenizer's files: those of a vocabulary outside tokenizer.json, and all of them.
_VOCABULARY_PREFIXES = (
    *("vocab", "merges", "spiece", "sentencepiece", "spm", "bpe.codes", "dict.txt", "byte_maps"),
    *("tokenizer.model", "tokenizer.tiktoken", "qwen.tiktoken"),
)
_TOKENIZER_PREFIXES = (
    *_VOCABULARY_PREFIXES,
    "tokenizer",
    "special_tokens_map",
    "added_tokens",
    "chat_template",
)
_LANGUAGE_PREFIX = re.compile(r"(\w+\.)*(language_model|text_model)\.")  # within a larger model


def export_adapter(
    checkpoint: Path, tune: TuneConfig, base: Path, out: Path, template: str | None = None
) -> Path:
    """Write the adapter of a checkpoint as a directory that stock peft loads.

    For routed experts, a folder beside it (``PER_EXPERT_SUFFIX``) gets the adapter per expert too.
    ``template``: the chat template used in training, if it is not the base's.

    Raises:
        ConfigError: if the run had no adapter, or ``out`` or the folder beside it holds something
        that is not an export. CheckpointError: if files are damaged.
    """
    if tune.method == "full":
        raise ConfigError("tune.method=full has no adapter; export --to merged writes the model")
    index = index_checkpoint(checkpoint)
    with replace_folder(out, base) as temporary:
        write_adapter(index, tune, base, temporary)
        copy_tokenizer(base, temporary)
        write_chat_templates(template, base, temporary)
        names = (name.removeprefix(ADAPTER_PREFIX) for name in index.shapes)
        is_whole_model = any(map(_LANGUAGE_PREFIX.match, names))
        write_model_card(checkpoint, base, temporary, "adapter", is_whole_model)
    stacks = find_adapted_stacks(base)
    _warn_of_nonstandard_scales(index, tune, out)
    if ignored_layers := layers_ignored_by_peft(index, base) if stacks else []:
        log.warning(
            "peft does not load %d of the adapters in %s, such as that of %s: for this kind of "
            "model it takes their names for those of other layers. Use export --to merged",
            *(len(ignored_layers), out, ignored_layers[0]),
        )
    if any(adapted_layer(name) in stacks for name in index.shapes):
        _export_per_expert(checkpoint, base, out, template)
    return out


def _warn_of_nonstandard_scales(index: TensorIndex, tune: TuneConfig, out: Path) -> None:
    """Warn of scales other than alpha / rank, which most programs except peft do not support."""
    scales = {tune.adapter_scale(layer) for layer in map(adapted_layer, index.shapes) if layer}
    if scales - {tune.alpha / tune.rank}:
        settings = ("rslora", "rank_pattern", "alpha_pattern")
        log.warning(
            "%s: with %s, some layers are not scaled by alpha / rank = %g. peft supports that, but "
            "servers and converters (vLLM, SGLang, llama.cpp) may use this one scale for all "
            "layers without a warning. Use export --to merged for them",
            out,
            " and ".join(f"tune.{name}" for name in settings if getattr(tune, name)),
            tune.alpha / tune.rank,
        )


def _export_per_expert(
    checkpoint: Path, base: Path, peft_folder: Path, template: str | None
) -> None:
    """Write the adapter in ``peft_folder`` again, split into experts, to a folder beside it."""
    out = peft_folder.with_name(peft_folder.name + PER_EXPERT_SUFFIX)
    if (adapter := split_adapter_by_expert(index_checkpoint(checkpoint), base)) is None:
        log.warning("%s is not written: no names are known for single experts of this model", out)
        return
    with replace_folder(out, base) as temporary:
        adapter.write(peft_folder, temporary)
        copy_tokenizer(base, temporary)
        write_chat_templates(template, base, temporary)
        write_model_card(checkpoint, base, temporary, "per-expert")
    log.info("the same adapter split into single experts, as vLLM reads most families: %s", out)


def write_adapter(index: TensorIndex, tune: TuneConfig, base: Path, out: Path) -> WrittenFile:
    """Write the adapter's weights and configuration, in peft's form, into the folder ``out``.

    Only one tensor is held at a time. Return the file of the weights, which is synced.
    """
    from hpc_tune.model.adapters import (
        EXPERT_LAYER_NAMES,
        Targets,
        find_peft_stack_names,
        make_lora_config,
    )
    from hpc_tune.model.modules_to_save import TOKEN_DELTA_SUFFIX, token_ids

    names = [n for n in index.shapes if n.startswith(ADAPTER_PREFIX)]
    regions = [
        Region.cover_tensor(n, index.dtypes[n], index.shapes[n], functools.partial(index.read, n))
        for n in names
    ]
    weights_file = write_regions(out / ADAPTER_FILE, regions)
    paths = [n.removeprefix(ADAPTER_PREFIX) for n in names]
    layers = sorted({*map(adapted_layer, names)} - {""})
    stacks = find_adapted_stacks(base)
    targets = Targets(tune.targets)
    if stacks:  # a layer named by its weight has no DoRA
        taken_names = find_peft_stack_names(base) if tune.method == "dora" else EXPERT_LAYER_NAMES
        targets = make_peft_targets(index, layers, stacks, taken_names)
    config = make_lora_config(tune, targets)
    prefix_match = _LANGUAGE_PREFIX.match(layers[0]) if layers else None
    if targets.parameters:
        config.lora_dropout = 0.0  # else peft refuses parameters; a loaded adapter has no dropout
    elif "all-linear" in tune.targets or prefix_match:
        config.target_modules = {layer.rpartition(".")[2] for layer in layers}
    if prefix_match:  # use full paths: other parts of such a model may have layers of the same name
        target_names = config.target_modules
        config.target_modules = {name for name in layers if name.rpartition(".")[2] in target_names}
        if config.modules_to_save:
            modules = (p for p in paths if not adapted_layer(p) and TOKEN_DELTA_SUFFIX not in p)
            config.modules_to_save = sorted({path.rpartition(".")[0] for path in modules})
    if tune.trainable_tokens:
        config.trainable_token_indices = token_ids(base, tune.trainable_tokens)
    write_adapter_config(config, base, out)
    return weights_file


def export_merged(
    checkpoint: Path,
    tune: TuneConfig,
    base: Path,
    out: Path,
    template: str | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write base plus adapter (or the fully tuned weights) as a Hugging Face model directory.

    ``template``: the chat template used in training, if it is not the base's. If the base stores a
    copy of a tied output head, it is left out, since its values are those from before tuning.
    Each tensor gets ``dtype``, or keeps its dtype from the base, except that float8 with scales and
    MXFP4 become bf16. Only one tensor is held at a time.

    Raises:
        CheckpointError, DataError: if files are damaged or belong to another model, or a value is
        too large for its dtype. ConfigError: if ``out`` holds something that is not an export.
        MemoryBudgetError: if there is no room for one tensor.
    """
    merged_model = MergedModel(checkpoint, tune, base, dtype)
    require_merge_memory(merged_model)
    shards = _split_into_files(merged_model)
    num_tensors = sum(map(len, shards))
    progress = Progress("merging", num_tensors)
    weight_map: dict[str, str] = {}
    with replace_folder(out, base) as temporary:
        for number, names in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            write_regions(temporary / file, [merged_model.region(name) for name in names])
            weight_map |= dict.fromkeys(names, file)
            progress.update(len(weight_map))
        total = sum(map(merged_model.tensor_bytes, weight_map))
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        for file_path in sorted(base.iterdir()):
            if _accompanies_weights(file_path):
                _copy_without_auto_map(file_path, temporary)
        if (scaling := read_rope_scaling(checkpoint, base)) is not None:
            _write_rope_scaling(temporary / "config.json", base, scaling)
        if merged_model.changes_dtypes:
            _describe_merged_weights_in_config(temporary / "config.json", dtype)
        write_chat_templates(template, base, temporary)
        write_model_card(checkpoint, base, temporary, "merged")
    progress.close()
    return out


def assemble_adapter_folder(
    folder: Path, names: Sequence[str], tune: TuneConfig, base: Path
) -> list[WrittenFile]:
    """Turn the files ``names`` of an unfinished checkpoint into its ``adapter`` folder; return what
    is in it.

    These files hold the ranks' regions of the adapter's weights. They are removed, so that a
    checkpoint stores the weights only once, in peft's form.

    Raises:
        CheckpointError: if the files cannot be read, or the file system refuses.
    """
    files = [folder / name for name in names]
    out = folder / ADAPTER_FOLDER
    try:
        out.mkdir()
        weights = write_adapter(index_files(files, CheckpointError), tune, base, out)
        config = sync_and_hash(out / "adapter_config.json")
        sync_folder(out)
        for file in files:
            file.unlink()
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error}{find_remedy(error)}") from None
    return [replace(file, name=f"{ADAPTER_FOLDER}/{file.name}") for file in (weights, config)]


def estimate_merge_bytes(largest_tensor_bytes: int) -> int:
    """Return the bytes that merging needs at once: a tensor, a piece of a file, and transformers.

    transformers provides the tensor names of most models. If an adapter changes the largest tensor,
    merging needs up to two more pieces.
    """
    return largest_tensor_bytes + PIECE_BYTES + EMPTY_MODEL_BYTES


def require_merge_memory(merged_model: MergedModel) -> None:
    """Refuse to merge if memory is too small, before the kernel kills the process."""
    needed_bytes = estimate_merge_bytes(max(map(merged_model.tensor_bytes, merged_model.names)))
    limit = find_host_limit()
    free_bytes = free_host_bytes(limit)
    if needed_bytes > free_bytes:
        raise MemoryBudgetError(
            f"merging holds one tensor at a time and needs {format_bytes(needed_bytes)}; "
            f"{limit.source} leaves {format_bytes(free_bytes)} of {format_bytes(limit.num_bytes)}: "
            "run it on a machine with more memory"
        )


def _split_into_files(merged_model: MergedModel) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    file_bytes = 0
    for name in merged_model.names:
        num_bytes = merged_model.tensor_bytes(name)
        if shards[-1] and file_bytes + num_bytes > SHARD_BYTES:
            shards.append([])
            file_bytes = 0
        shards[-1].append(name)
        file_bytes += num_bytes
    return shards


def _accompanies_weights(file: Path) -> bool:
    """Whether a file of the base directory belongs to the model but is not its weights.

    An adapter's configuration would make transformers look for an adapter of the merged model, and
    a quantization config (ModelOpt's, GPTQ's) a server look for scales that merged weights lack.
    """
    endings = (".index.json", "adapter_config.json", "quant_config.json", "quantize_config.json")
    return file.suffix in _COMPANION_SUFFIXES and not file.name.endswith(endings)


def _write_rope_scaling(file: Path, base: Path, scaling: Mapping[str, Any]) -> None:
    """Write model.rope_scaling into a copy of the base's config.json."""
    content = json.loads(file.read_text(encoding="utf-8"))
    scaled_config = apply_rope_scaling_to_json(read_config(base), content, scaling)
    file.write_text(json.dumps(scaled_config, indent=2), encoding="utf-8")


def _describe_merged_weights_in_config(file: Path, dtype: torch.dtype | None) -> None:
    """Set the dtype in a config.json and remove quantization, which merged weights do not have."""
    config = json.loads(file.read_text(encoding="utf-8"))
    for part in config_parts(config):
        for key in part.keys() & QUANTIZATION_KEYS:
            del part[key]
        for key in {"dtype", "torch_dtype"} & part.keys() if dtype is not None else ():
            part[key] = str(dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2), encoding="utf-8")


def copy_tokenizer(base: Path, out: Path) -> None:
    """Copy the files of the tokenizer in ``base`` to ``out``.

    A tokenizer with only vocabulary and merges also gets a tokenizer.json: transformers would need
    config.json, which an adapter's folder lacks, to find the tokenizer's class.
    """
    files = [
        f
        for f in base.iterdir()
        if f.name.startswith(_TOKENIZER_PREFIXES) and _accompanies_weights(f)
    ]
    has_vocabulary = any(file.name.startswith(_VOCABULARY_PREFIXES) for file in files)
    if has_vocabulary and not (base / "tokenizer.json").is_file():
        load_tokenizer(base).save_pretrained(out)
    for file in files:
        if not _repeats_tokenizer_json(file):
            _copy_without_auto_map(file, out)


def _repeats_tokenizer_json(file: Path) -> bool:
    """Whether added_tokens.json only repeats tokenizer.json.

    SGLang takes that file for tokens of the adapter's own; some versions refuse such adapters.
    """
    tokenizer_file = file.with_name("tokenizer.json")
    if file.name != "added_tokens.json" or not tokenizer_file.is_file():
        return False
    ids, tokenizer = (json.loads(f.read_text(encoding="utf-8")) for f in (file, tokenizer_file))
    known_ids = {token["content"]: token["id"] for token in tokenizer.get("added_tokens", ())}
    return dict(ids).items() <= known_ids.items()


def _copy_without_auto_map(file: Path, out: Path) -> None:
    """Copy a small file of the base, without references (auto_map) to code that is not copied.

    Models trained here have a class in transformers, which is used if no code is referenced.
    """
    if file.name in ("config.json", "tokenizer_config.json"):
        settings = json.loads(file.read_text(encoding="utf-8"))
        if settings.pop("auto_map", None) is not None:
            text = json.dumps(settings, indent=2, ensure_ascii=False)
            (out / file.name).write_text(text, encoding="utf-8")
            return
    shutil.copyfile(file, out / file.name)


def _is_empty_or_export(out: Path) -> bool:
    """Whether a folder is empty, or holds only weights and a model's small files."""
    if not out.is_dir():
        return False
    entries = list(out.iterdir())
    weights = (ADAPTER_FILE, "model.safetensors.index.json", GGUF_FILE)
    return not entries or (
        any(entry.name in weights for entry in entries)
        and all(
            e.suffix in _EXPORT_SUFFIXES
            or e.name in (CARD_FILE, CONFIG_FILE, OTHER_TEMPLATES_FOLDER)
            for e in entries
        )
    )


@contextmanager
def replace_folder(out: Path, base: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``out`` if the block succeeds, and else is removed.

    Raises:
        ConfigError: if ``out`` exists and is not an export.
        CheckpointError: if the file system refuses.
    """
    out = out.resolve()
    temporary = out.with_name(out.name + ".tmp")
    if out.exists() and (out == base.resolve() or not _is_empty_or_export(out)):
        raise ConfigError(
            f"{out} holds something that is not an export and would be lost; choose a folder "
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
        raise CheckpointError(f"{out} cannot be written: {error}{find_remedy(error)}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
