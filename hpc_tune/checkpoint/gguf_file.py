"""Export a checkpoint to one GGUF file, for llama.cpp and tools built on it.

    config.json     -> hyperparameters; refused if llama.cpp would compute a different model
    tokenizer.json  -> tokens, their types, merges, and the pre-tokenizer (how text is split)
    merged tensors  -> by GGUF's names, one at a time

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, written by the gguf package.
"""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_tune.checkpoint.export import (
    GGUF_FILE,
    copy_tokenizer,
    replace_folder,
    require_merge_memory,
)
from hpc_tune.checkpoint.export_metadata import (
    find_base_model_name,
    read_rope_scaling,
    write_chat_templates,
    write_model_card,
)
from hpc_tune.checkpoint.merge import MergedModel
from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError
from hpc_tune.log import Progress
from hpc_tune.model.language import read_config
from hpc_tune.model.regions import Region
from hpc_tune.model.rotary import llama3_frequency_divisors, position_limit
from hpc_tune.packages import is_importable

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_LLAMA3 = "llama3"
_SCALED_ROPE_TYPES = ("linear", "yarn")  # scalings that llama.cpp computes from the file's metadata
# The biases that llama.cpp applies.
_BIASES = {"llama": (), "qwen2": ("q_proj.bias", "k_proj.bias", "v_proj.bias"), "qwen3": ()}
_ALTERNATIVE = "export --to merged, and convert that folder with llama.cpp's convert_hf_to_gguf.py"
# How byte-level tokenizers split text: the pattern, and llama.cpp's name for it.
_WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZER_NAMES = {_WORD_PATTERN % "{1,3}": "llama-bpe", _WORD_PATTERN % "": "qwen2"}
_NORMAL_TOKEN, _CONTROL_TOKEN, _USER_DEFINED_TOKEN, _UNUSED_TOKEN = 1, 3, 4, 5  # GGUF's token types


def export_gguf(
    checkpoint: Path,
    tune: TuneConfig,
    base: Path,
    out: Path,
    template: str | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write base plus adapter (or the fully tuned weights) as a folder with one GGUF file.

    ``dtype``: that of matrices, as in ``export_merged``; vectors are fp32, as in llama.cpp.
    Only one tensor is held at a time. ``template``: the chat template used in training, if it is
    not the base's.

    Raises:
        CheckpointError, DataError: if files are damaged or belong to another model, or a value is
        too large for its dtype. ConfigError: if gguf is not installed, the model's shape or
        tokenizer is not supported, or ``out`` holds something that is not an export.
        MemoryBudgetError: if there is no room for one tensor.
    """
    if not is_importable("gguf"):
        raise ConfigError(
            "--to gguf needs gguf, which is not installed; pip install 'hpc_tune[gguf]'"
        )
    scaling = read_rope_scaling(checkpoint, base)
    transformers_config = read_config(base, scaling)
    config = transformers_config.to_dict()
    config["max_position_embeddings"] = position_limit(transformers_config, scaling)
    architecture = _architecture_of(config)
    merged_model = MergedModel(checkpoint, tune, base, dtype)
    require_merge_memory(merged_model)
    regions = _tensor_regions(architecture, config, merged_model)
    if config["rope_parameters"]["rope_type"] == _LLAMA3:
        name, divisors = "rope_freqs.weight", llama3_frequency_divisors(transformers_config)
        shape = tuple(divisors.shape)
        regions[name] = Region.cover_tensor(name, divisors.dtype, shape, lambda: divisors)
    from gguf import GGUFWriter

    with replace_folder(out, base) as temporary:
        writer = GGUFWriter(temporary / GGUF_FILE, architecture)
        writer.add_name(find_base_model_name(base).name.rpartition("/")[2])
        _add_shape(writer, config)
        with tempfile.TemporaryDirectory() as folder:
            copy_tokenizer(base, Path(folder))
            write_chat_templates(template, base, Path(folder))
            num_tokens = regions["token_embd.weight"].box.shape[0]
            _add_tokenizer(writer, Path(folder), num_tokens, config)
        _write_tensors(writer, regions, config, architecture)
        write_model_card(checkpoint, base, temporary, "gguf")
    return out


def _architecture_of(config: dict[str, Any]) -> str:
    """Return llama.cpp's name of the architecture.

    Raises:
        ConfigError: if llama.cpp would not compute the same model as transformers.
    """
    kind = config.get("model_type")
    rope = config.get("rope_parameters") or {}
    window = config.get("use_sliding_window", True) and config.get("sliding_window")
    arch = _ARCHITECTURES.get(str(kind), "")
    heads, width = config.get("num_attention_heads") or 1, config.get("hidden_size") or 0
    head_dim = config.get("head_dim") or width // heads
    reason = None
    if kind not in _ARCHITECTURES:
        reason = f"model_type={kind}, expected one of {', '.join(_ARCHITECTURES)}"
    elif rope.get("rope_type", "default") not in ("default", _LLAMA3, *_SCALED_ROPE_TYPES):
        reason = f"its rotary positions are scaled ({rope['rope_type']})"
    elif differences := _yarn_differences(rope):
        reason = f"its rotary positions are scaled (yarn) with {', '.join(differences)}"
    elif rope.get("rope_type") == _LLAMA3 and arch != "llama":
        reason = f"its rotary positions are scaled (llama3), which llama.cpp's {arch} cannot do"
    elif rope.get("partial_rotary_factor", 1.0) != 1.0:
        reason = f"only part of each head has rotary positions ({rope['partial_rotary_factor']:g})"
    elif arch == "qwen2" and head_dim * heads != width:
        reason = (
            f"its {heads} heads of {head_dim} values do not add up to hidden_size={width}, as "
            "llama.cpp's qwen2 requires"
        )
    elif window and window < config.get("max_position_embeddings", 0):
        reason = f"its attention only sees {window} tokens (sliding_window)"
    elif config.get("hidden_act", "silu") != "silu":
        reason = f"hidden_act={config['hidden_act']}, expected silu"
    if reason is not None:
        raise ConfigError(f"--to gguf does not write this model: {reason}; {_ALTERNATIVE}")
    return arch


def _yarn_differences(rope: dict[str, Any]) -> list[str]:
    """Return the YaRN settings of a model that differ from llama.cpp's ``fixed_values``."""
    if rope.get("rope_type") != "yarn":
        return []
    factor = 0.1 * math.log(rope["factor"]) + 1.0
    fixed_values = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "attention_factor": factor}
    model_values = {k: rope[k] for k in (*fixed_values, "mscale", "mscale_all_dim") if rope.get(k)}
    if rope.get("truncate") is False:
        model_values["truncate"] = False
    return [
        f"{k}={value}"
        for k, value in model_values.items()
        if k not in fixed_values or not math.isclose(value, fixed_values[k], rel_tol=1e-3)
    ]


def _add_rope_scaling(writer: Any, rope: dict[str, Any]) -> None:
    """Write linear scaling or YaRN; Llama 3's scaling is a tensor of its own."""
    from gguf import RopeScalingType

    if (kind := rope["rope_type"]) not in _SCALED_ROPE_TYPES:
        return
    writer.add_rope_scaling_type(RopeScalingType(kind))
    writer.add_rope_scaling_factor(float(rope["factor"]))
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _add_shape(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config["rope_parameters"]["rope_theta"]))
    _add_rope_scaling(writer, config["rope_parameters"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _tensor_regions(
    architecture: str, config: dict[str, Any], merged_model: MergedModel
) -> dict[str, Region]:
    """Return the tensors to write, by GGUF's names.

    Raises:
        ConfigError: if GGUF has no name for a tensor.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    key = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    gguf_names = get_tensor_name_map(key, config["num_hidden_layers"])
    regions = {}
    for name in merged_model.names:
        if name.endswith("rotary_emb.inv_freq"):  # computed from the shape
            continue
        gguf_name = gguf_names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None or (
            name.endswith(".bias") and not name.endswith(_BIASES[architecture])
        ):
            raise ConfigError(
                f"--to gguf does not write this model: it has {name}, which llama.cpp's "
                f"{architecture} has no place for; {_ALTERNATIVE}"
            )
        regions[gguf_name] = merged_model.region(name)
    return regions


def _write_tensors(
    writer: Any, regions: dict[str, Region], config: dict[str, Any], architecture: str
) -> None:
    from gguf import GGMLQuantizationType, LlamaFileType

    kinds = {
        torch.float32: (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
        torch.float16: (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
        torch.bfloat16: (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    }
    dtypes = {name: region.dtype for name, region in regions.items() if len(region.box.shape) > 1}
    writer.add_file_type(kinds[next(iter(dtypes.values()))][1])
    for name, region in regions.items():
        dtype = dtypes.get(name, torch.float32)
        num_bytes, values = dtype.itemsize * region.box.num_values, np.dtype(f"u{dtype.itemsize}")
        writer.add_tensor_info(name, region.box.shape, values, num_bytes, kinds[dtype][0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    progress = Progress("writing", len(regions))
    num_heads = config["num_attention_heads"]
    heads = {"attn_q": num_heads, "attn_k": config.get("num_key_value_heads") or num_heads}
    for num_written, (name, region) in enumerate(regions.items(), 1):
        dtype = dtypes.get(name, torch.float32)
        rotary_heads = heads.get(name.split(".")[-2]) if architecture == "llama" else None
        writer.write_tensor_data(_bits_as_integers(region, dtype, rotary_heads))
        progress.update(num_written)
    progress.close()
    for file in writer.fout:
        file.flush()
        os.fsync(file.fileno())
    writer.close()


def _bits_as_integers(
    region: Region, dtype: torch.dtype, num_heads: int | None
) -> np.ndarray[Any, Any]:
    """Return a tensor's bits as integers; ``num_heads`` is set if its rows must be interleaved."""
    tensor = region.values().to(dtype)
    if num_heads is not None:
        tensor = _interleave_halves(tensor, num_heads)
    integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    return tensor.contiguous().view(integers).numpy()


def _interleave_halves(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Put the two rows of each rotary pair next to each other, as llama.cpp's llama stores them.

    transformers stores the halves of a head one after the other: 0 1 2 3 -> 0 2 1 3.
    """
    by_half = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return by_half.swapaxes(1, 2).reshape(tensor.shape)


def _add_tokenizer(writer: Any, folder: Path, num_tokens: int, config: dict[str, Any]) -> None:
    """Add the tokenizer of ``folder``; embeddings without a token get an unused token.

    Raises:
        ConfigError: if there is no tokenizer.json, it is not a byte-level BPE, or it splits text in
            a way that has no known name in llama.cpp.
    """
    from gguf import SpecialVocab

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"--to gguf needs the base model's tokenizer.json; {_ALTERNATIVE}")
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    split_rule = _pre_tokenizer_name(tokenizer)
    tokens = [f"[PAD{i}]" for i in range(num_tokens)]
    kinds = [_UNUSED_TOKEN] * num_tokens
    entries = [(index, text, _NORMAL_TOKEN) for text, index in tokenizer["model"]["vocab"].items()]
    for token in tokenizer.get("added_tokens", []):
        kind = _CONTROL_TOKEN if token["special"] else _USER_DEFINED_TOKEN
        entries.append((token["id"], token["content"], kind))
    for index, text, kind in entries:
        if index < num_tokens:
            tokens[index], kinds[index] = text, kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split_rule)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    ids = {name: value for name, value in config.items() if name.endswith("_token_id")}
    (folder / "config.json").write_text(json.dumps(ids), encoding="utf-8")
    has_merges = bool(tokenizer["model"].get("merges"))
    SpecialVocab(folder, load_merges=has_merges, n_vocab=num_tokens).add_to_gguf(writer, quiet=True)


def _pre_tokenizer_name(tokenizer: dict[str, Any]) -> str:
    """Return llama.cpp's name for how a byte-level BPE tokenizer splits text."""
    model, pre_tokenizer = tokenizer["model"], tokenizer.get("pre_tokenizer") or {}
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    types = [step.get("type") for step in steps]
    is_bytes = model.get("type") == "BPE" and types[-1:] == ["ByteLevel"]
    if is_bytes and not model.get("merges"):
        return "gpt-2"  # each byte is a token, however the text is split
    if is_bytes and types == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if is_bytes and types == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if is_bytes and types == ["Split", "ByteLevel"]:
        rule = steps[0].get("pattern", {}).get("Regex")
        if rule in _PRE_TOKENIZER_NAMES:
            return _PRE_TOKENIZER_NAMES[rule]
    kind = "byte-level BPE with another splitting rule" if is_bytes else model.get("type")
    raise ConfigError(
        f"--to gguf does not write this tokenizer ({kind}): expected a byte-level BPE that splits "
        f"text like those of GPT-2, Llama 3, Qwen or SmolLM; {_ALTERNATIVE}"
    )
