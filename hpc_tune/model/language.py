"""The language model of a directory, alone or as a part of a model that also reads images.

read_config           config.json, as transformers reads it
read_language_config  the language model's part of it, checked before any rank starts work
make_language_model   the language model with its output head, and its tensors' names in the files

Gemma 3, Qwen3.5 and Mistral Small are published as one model with an image encoder. Only their
language model is trained here; the other parts stay unchanged in the model directory and in a
merged export. Files and adapters name its tensors as parts of the whole model
(``model.language_model.layers.0...``), and so do checkpoints and exports here.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpc_tune.config.rope import ORIGINAL_LENGTH_KEY, format_rope_scaling, suggest_rope_scaling
from hpc_tune.errors import ConfigError, DataError, first_line
from hpc_tune.files import explain_pointer_file, read_json_object
from hpc_tune.hub_cache import advise_on_snapshots, missing_snapshot_hint
from hpc_tune.model.config_json import (
    read_config_json,
    refuse_hub_kernels,
    refuse_huge_layer_counts,
)
from hpc_tune.model.experts import (
    AdaptedExpertStack,
    disable_router_losses,
    map_adapter_layers_to_stacks,
)
from hpc_tune.model.loss import find_decoder
from hpc_tune.model.rotary import apply_rope_scaling, position_limit
from hpc_tune.model.tensor_sources import PIECE_BYTES, find_joined_tensors, find_renamed_tensors
from hpc_tune.model.transformers_compat import use_plain_functions_on_cpu
from hpc_tune.model.weights import TensorIndex
from hpc_tune.packages import fast_imports

_CONSTANT_SUFFIXES = (".inv_freq", ".masked_bias", ".attn.bias", ".attention.bias")


def require_model_directory(directory: Path) -> None:
    """Raise a DataError that says what to do if there is no such directory."""
    if not directory.is_dir():
        location = "" if directory.is_absolute() else f" in {Path.cwd()}"
        raise DataError(
            f"model.path={directory}: no such directory{location}"
            f"{missing_snapshot_hint(str(directory), 'model')}. It must be a Hugging Face "
            "model directory (config.json, *.safetensors, tokenizer.json); models are not "
            "downloaded in a run, because compute nodes have no internet. On the login node: hf "
            "download NAME --local-dir DIR"
        )
    config = directory / "config.json"
    if not config.is_file() and (advice := advise_on_snapshots(directory, "model.path")):
        raise DataError(advice)
    if reason := explain_pointer_file(config):
        raise DataError(reason)


def read_config(directory: Path, rope_scaling: Mapping[str, Any] | None = None) -> Any:
    """Return the transformers config of a model directory; nothing is fetched or executed.

    ``rope_scaling``: model.rope_scaling, which overrides the scaling in config.json.

    Raises:
        DataError: if the directory or its config.json is missing or cannot be used. ConfigError: if
        the family does not support this scaling.
    """
    require_model_directory(directory)
    if not (directory / "config.json").is_file():
        raise DataError(
            f"model.path={directory}: no config.json in it; {_explain_missing_config(directory)}"
        )
    refuse_huge_layer_counts(directory)
    with fast_imports():
        from transformers import AutoConfig

    try:
        with fast_imports():
            config = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # transformers' classes raise anything for odd values
        refuse_remote_code(directory, "config.json", error)
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{directory}/config.json cannot be used: {reason}") from None
    refuse_hub_kernels(directory)
    if rope_scaling is not None:
        config = apply_rope_scaling(config, read_config_json(directory), rope_scaling)
    disable_router_losses(config)
    return config


def explain_too_long_texts(
    config: Any,
    directory: Path,
    rope_scaling: Mapping[str, Any] | None,
    max_text_tokens: int,
    length_description: str,
) -> str:
    """Return why texts of ``max_text_tokens`` tokens exceed a model's positions; "" if they do not.

    ``config`` is the language model's, with ``rope_scaling``; ``length_description`` is for people.
    """
    positions = position_limit(config, rope_scaling)
    if positions is None or max_text_tokens <= positions:
        return ""
    advice = advise_rope_scaling(directory, rope_scaling, max_text_tokens)
    return (
        f"texts of up to {length_description} are longer than the model's {positions} positions, "
        f"and it was never trained on later ones: use texts of {positions} or less (data.seq_len "
        "cuts them)" + (f", or {advice}" if advice else "")
    )


def advise_rope_scaling(
    directory: Path, current_scaling: Mapping[str, Any] | None, max_text_tokens: int
) -> str | None:
    """Return the setting that lets a model take texts of ``max_text_tokens`` tokens, or None.

    ``current_scaling``: the current model.rope_scaling; its factor is raised if it is a ratio of
    lengths.
    """
    trained_length = position_limit(read_language_config(directory), None)
    current = current_scaling or {}
    # llama3's factor is not a ratio of lengths.
    is_raised = "factor" in current and current["rope_type"] != "llama3"
    if is_raised:
        trained_length = current.get(ORIGINAL_LENGTH_KEY, trained_length)
    if not trained_length:
        return None
    new_scaling = suggest_rope_scaling(max_text_tokens, trained_length)
    if is_raised:
        new_scaling = {**current, "factor": new_scaling["factor"]}
    try:
        read_config(directory, new_scaling)
    except ConfigError:
        return None
    return format_rope_scaling(new_scaling)


def _explain_missing_config(directory: Path) -> str:
    """Return what a directory without a config.json is, and what to do."""
    if not (settings := directory / "adapter_config.json").is_file():
        if any(directory.glob("*.gguf")):
            return (
                "GGUF files are not read: take the model that they were made from, in safetensors"
            )
        return "is it a model directory?"
    base = read_json_object(settings).get("base_model_name_or_path", "its base")
    return (
        f"it holds an adapter of {base}. Name the directory of that model; to continue from the "
        f"adapter, set tune.init_from={directory}"
    )


def refuse_remote_code(directory: Path, file: str, error: Exception) -> None:
    """Raise a DataError if transformers' ``error`` says that it needs code from the directory."""
    if "trust_remote_code" in str(error):
        raise DataError(
            f"{directory}/{file} needs Python code that is in the directory (auto_map), and no "
            "code of a model directory is run; take a model whose type transformers knows itself"
        ) from None


def read_language_config(directory: Path, rope_scaling: Mapping[str, Any] | None = None) -> Any:
    """Return the transformers config of a directory's language model; see ``read_config``.

    Raises:
        DataError: as ``read_config`` and ``language_config`` do. ConfigError: as ``read_config``.
    """
    return language_config(read_config(directory, rope_scaling), directory)


def language_config(config: Any, directory: Path) -> Any:
    """Return the language model's part of ``config``, which is often all of it.

    Raises:
        DataError: if it is not a causal LM's, has parts that cannot be separated, or sets a
            sliding window of less than one token.
    """
    with fast_imports():
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        )

    kind = config.model_type
    # Mistral 4 has the class of a causal LM, but is listed only among image models.
    class_name = str(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind))
    is_causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or class_name.endswith("ForCausalLM")
    try:
        text_config = config.get_text_config()
    except ValueError:  # several text configs: an encoder's and a decoder's
        raise DataError(f"{directory}: model_type {kind} is not a causal LM") from None
    if text_config is config and not is_causal:
        raise DataError(f"{directory}: model_type {kind} is not a causal LM")
    if "Diffusion" in class_name:
        raise DataError(
            f"{directory}: {kind} is a text diffusion model; only models that predict the next "
            "token (causal LMs) can be trained"
        )
    if auto_model_class(config) is None:
        raise DataError(
            f"{directory}: a {kind} model has parts for other things than text or images, which "
            "hpc_tune cannot separate; use a text-only checkpoint of this family"
        )
    window = getattr(text_config, "sliding_window", None)
    kinds = getattr(text_config, "layer_types", None)
    has_windows = kinds is None or "sliding_attention" in kinds  # Qwen2-MoE writes 0 for "nowhere"
    if window is not None and window < 1 and has_windows:
        raise DataError(
            f"{directory}/config.json: sliding_window is {window}, so no token attends to any; "
            "write null for attention to all tokens, or a number of tokens"
        )
    return text_config


def auto_model_class(config: Any) -> Any:
    """Return the class of transformers that loads the whole model; None if there is no such class.

    Users load a merged export, or the base of an adapter, with this class.
    """
    with fast_imports():
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.models.auto.modeling_auto import (
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        )

    kind, architectures = config.model_type, config.architectures
    multimodal_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(kind)
    # Some families (Qwen3.5, Llama 4) are listed twice: text-only, and as their files are.
    is_multimodal = isinstance(architectures, list) and multimodal_class in architectures
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not is_multimodal:
        return AutoModelForCausalLM
    return None if multimodal_class is None else AutoModelForImageTextToText


def stored_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a model directory stores: parameters (tied ones once) and persistent buffers."""
    yield from module.named_parameters()
    for path, owner in module.named_modules():
        for name, buffer in owner.named_buffers(prefix=path, recurse=False):
            if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                yield name, buffer


@dataclass(frozen=True)
class TensorNames:
    """The names of a language model's tensors in the whole model and in the files.

    ``decoder`` and ``head`` are the paths of decoder and output head in the language model,
    ``whole_model_decoder`` and ``whole_model_head`` in the whole model. ``renamed_tensors`` maps a
    name in the whole model to the name in the files if transformers renames it. Files may add or
    omit ``prefix``.
    """

    decoder: str = ""
    whole_model_decoder: str = ""
    head: str = ""
    whole_model_head: str = ""
    prefix: str = ""
    renamed_tensors: Mapping[str, str] = field(default_factory=dict)

    def whole_model_name(self, name: str) -> str:
        """Return the name in the whole model of a tensor of the language model."""
        for path, whole_path in (
            (self.decoder, self.whole_model_decoder),
            (self.head, self.whole_model_head),
        ):
            if whole_path and name.startswith(f"{path}."):
                return whole_path + name.removeprefix(path)
        return name

    def find_stored_name(self, name: str, index: Any, is_tied: bool = False) -> str | None:
        """Return the name in the files of a tensor of the language model; None if not stored.

        ``is_tied``: it is an embedding that is also the output head, and may be stored as the head.
        """
        whole_name = self.whole_model_name(name)
        if whole_name in self.renamed_tensors:
            return self.renamed_tensors[whole_name]
        names = (whole_name, whole_name.removeprefix(self.prefix), self.prefix + whole_name, name)
        match = next((c for c in names if c in index.shapes), None)
        head = f"{self.head}.weight"
        return self.find_stored_name(head, index) if match is None and is_tied else match


@dataclass(frozen=True)
class LanguageModel:
    """transformers' model on the meta device: the language model of a directory with its head.

    ``config`` is its own. The files' ``index`` knows which tensors are joined from stored ones.
    """

    model: Any
    config: Any
    names: TensorNames
    index: TensorIndex | None

    @property
    def is_tied(self) -> bool:
        """Whether the output head is the embedding."""
        head = self.model.get_output_embeddings()
        return self.model.get_input_embeddings().weight is getattr(head, "weight", None)


def make_language_model(
    config: Any, directory: Path, dtype: torch.dtype, index: TensorIndex | None
) -> LanguageModel:
    """Make the language model of a directory, given the whole model's ``config``.

    If ``config`` ties the output head to the embedding but the files hold both, they are tied only
    if their values are equal, as in transformers. Without an ``index`` of the files, the names in
    the files are not known.

    Raises:
        DataError: if ``language_config`` refuses it, transformers cannot make a model from it, or
            the files lack some experts.
    """
    text_config = language_config(config, directory)
    whole_model = (
        None if text_config is config else _make_meta_model(auto_model_class(config), config, dtype)
    )
    if whole_model is not None:
        is_tied = bool(getattr(whole_model.config, "tie_word_embeddings", False))
        text_config.tie_word_embeddings = is_tied and (
            index is not None or text_config.tie_word_embeddings
        )
    model = _make_text_model(config, text_config, dtype)
    if index is not None:
        tensors, unsupported_ops = find_joined_tensors(whole_model or model, index.sources.values())
        index = replace(
            index, sources={**index.sources, **tensors}, unsupported_operations=unsupported_ops
        )
    names = _find_tensor_names(model, whole_model or model, index)
    language = LanguageModel(model, text_config, names, index)
    if index is None or not language.is_tied or not _has_own_head(language, index):
        return language
    text_config.tie_word_embeddings = False
    return replace(language, model=_make_text_model(config, text_config, dtype))


def make_whole_model(config: Any) -> Any:
    """Return the model of a whole configuration on the meta device, as users would load it."""
    return _make_meta_model(auto_model_class(config), config, torch.float32)


def _make_meta_model(auto_class: Any, config: Any, dtype: torch.dtype) -> Any:
    with fast_imports(), torch.device("meta"):
        # By default transformers uses sdpa if the family supports it, else eager (Gemma 2).
        try:
            model = auto_class.from_config(config, dtype=dtype)
        except Exception as error:  # whatever the model's own code raises for odd sizes
            raise DataError(
                f"transformers cannot make a {config.model_type} model from this config.json: "
                f"{type(error).__name__}: {first_line(error)}"
            ) from None
        use_plain_functions_on_cpu(model)
        return model


def _make_text_model(config: Any, text_config: Any, dtype: torch.dtype) -> Any:
    with fast_imports():
        from transformers import AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if text_config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return _make_meta_model(AutoModelForCausalLM, text_config, dtype)
    # transformers has no class for the text model (Qwen-VL): keep the whole model's decoder only.
    model = _make_meta_model(auto_model_class(config), config, dtype)
    model.model, model.config = find_decoder(model), text_config
    return model


def _find_tensor_names(model: Any, whole_model: Any, index: TensorIndex | None) -> TensorNames:
    path_pairs = []
    for root in (model, whole_model):
        paths = {id(part): path for path, part in root.named_modules()}
        head = root.get_output_embeddings() or root.get_decoder().get_output_embeddings()
        path_pairs.append([paths.get(id(part), "") for part in (find_decoder(root), head)])
    (decoder, head), (whole_decoder, whole_head) = path_pairs
    renames = {} if index is None else find_renamed_tensors(whole_model, index.stored_names)
    return TensorNames(
        decoder, whole_decoder, head, whole_head, f"{whole_model.base_model_prefix}.", renames
    )


def summarize_unused_tensors(index: TensorIndex, used_names: Collection[str]) -> tuple[str, ...]:
    """Return what the files hold besides the tensors ``used_names``, grouped by the names' start.

    For example ``("model.vision_tower (437 tensors)",)``, followed by files that are not read;
    blocks after the last one (for multi-token prediction) are listed by number. Constants that
    transformers computes itself, but that old versions stored, are left out.
    """
    counts: dict[str, int] = {}
    used_roots = {name.partition(".")[0] for name in used_names}
    block_prefixes = {_prefix_before_index(name) for name in used_names}
    tensors = [index.joined_tensors[name] for name in used_names if name in index.joined_tensors]
    used_names = {*used_names, *(part.source.name for tensor in tensors for part in tensor.parts)}
    for name in index.stored_names:
        if name not in used_names and not name.endswith(_CONSTANT_SUFFIXES):
            prefix = _prefix_before_index(name)
            first, *rest = prefix.split(".") if prefix else [name]
            key = ".".join([first, *rest[:1]]) if first in used_roots else first
            if prefix != name and prefix in block_prefixes:
                key = f"{prefix}.{name.removeprefix(prefix).split('.')[1]}"
            counts[key] = counts.get(key, 0) + 1
    descriptions = (f"{key} ({count:,} tensors)" for key, count in sorted(counts.items()))
    return (*descriptions, *index.ignored_weights)


def _prefix_before_index(name: str) -> str:
    """Return the part of a tensor's name before a number, such as the number of its block."""
    return ".".join(itertools.takewhile(lambda part: not part.isdigit(), name.split(".")))


def _has_own_head(language: LanguageModel, index: TensorIndex) -> bool:
    """Whether the files hold an output head with other values than the embedding it is tied to."""
    paths = {id(part): path for path, part in language.model.named_modules()}
    layer_paths = paths[id(language.model.get_input_embeddings())], language.names.head
    names = [language.names.find_stored_name(f"{path}.weight", index) for path in layer_paths]
    if None in names or names[0] == names[1]:
        return False
    first, second = (str(name) for name in names)
    if index.shapes[first] != index.shapes[second]:
        return True
    rows, width = index.shapes[first]
    step = max(1, PIECE_BYTES // (4 * width))
    for row in range(0, rows, step):
        pieces = [torch.empty(min(step, rows - row), width) for _ in "ab"]
        for values, name in zip(pieces, (first, second), strict=True):
            index.fill(values, name, (row, 0))
        if not torch.equal(*pieces):
            return True
    return False


@dataclass(frozen=True)
class ModelFileLayout:
    """How a directory's files, with their ``index``, store the tensors of its language model.

    ``transposed_tensors``: those that are stored transposed (Conv1D). ``copied_head``: a tied
    output head that is stored in addition to the embedding. ``stacks_by_layer``: experts', by the
    adapted layer's path.
    """

    index: TensorIndex
    names: TensorNames
    transposed_tensors: frozenset[str]
    copied_head: str | None
    stacks_by_layer: Mapping[str, AdaptedExpertStack]


def find_model_file_layout(directory: Path, index: TensorIndex) -> ModelFileLayout:
    """Return how a directory's language model is stored."""
    from transformers.pytorch_utils import Conv1D

    language = make_language_model(read_config(directory), directory, torch.float32, index)
    names, modules = language.names, language.model.named_modules()
    index = language.index or index
    transposed_tensors = [
        names.find_stored_name(f"{n}.weight", index) for n, m in modules if isinstance(m, Conv1D)
    ]
    head = names.find_stored_name(f"{names.head}.weight", index) if language.is_tied else None
    embedding = language.model.get_input_embeddings()
    (path,) = (n for n, m in language.model.named_modules() if m is embedding)
    if head == names.find_stored_name(f"{path}.weight", index, is_tied=True):
        head = None
    stacks_by_layer = {
        names.whole_model_name(layer): replace(
            stack, tensor=names.find_stored_name(stack.tensor, index) or stack.tensor
        )
        for layer, stack in map_adapter_layers_to_stacks(language.model).items()
    }
    return ModelFileLayout(
        index, names, frozenset(name for name in transposed_tensors if name), head, stacks_by_layer
    )
