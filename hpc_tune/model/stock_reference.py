"""The reference for an architecture: transformers' own losses and gradients for a small model.

write_small_model         writes a small, random model of a config's architecture to a directory
compute_stock_losses      each document's loss in transformers' model, and the gradient of their sum
compute_reference_losses  both, with values for which no choice of experts depends on rounding
"""

import importlib.metadata
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_tune.errors import DataError, first_line
from hpc_tune.model.config_json import value_shared_by_layers
from hpc_tune.model.experts import CORRECTION_BIASES, num_experts_per_token
from hpc_tune.model.language import auto_model_class, language_config, read_config
from hpc_tune.model.transformers_compat import (
    avoid_sdpa_with_capped_scores,
    use_plain_functions_on_cpu,
)
from hpc_tune.packages import fast_imports

# -- A model's configuration made small: the same architecture in a few million values.
#
#     shrink_config(config)        few layers, narrow layers, a small vocabulary; all else as it was
#     shrink_whole_config(config)  the same for a model that has other parts than a language model
#
# Everything that decides how the model computes is kept: the number of heads and their groups,
# kinds of layers, activations, scales, biases, rotary positions. Feature widths are divided by one
# number, so that dependent sizes still match (heads x values per head = width). If even the
# smallest of these models is too large, the number of heads is divided too, and with it every width
# but that of a head.


MAX_VOCABULARY = 512
# Tokens that a layer sees or processes at once: fewer than a trial's documents have.
WINDOW_TOKENS = 16
WIDTH_DIVISORS = (64, 32, 16, 8, 4, 2, 1)
HEAD_DIVISORS = (1, 4)  # divisors of the number of heads: keep all of them if possible
OTHER_DIVISORS = (8, 1)  # divisors for parts that do not process text; their values are never used
_WIDTH_MULTIPLE = 8  # of inner features: the experts' matmuls need rows of 16 bytes
MIN_HEAD_SIZE = 8  # values per head: partial rotary positions need an even number
_WIDTH_FIELDS = re.compile(
    r"^(hidden_size|d_model|n_embd|dim|model_dim|intermediate_size.*|.*_intermediate_size|ffn_dim"
    r"|.*_ffn_dim|.*ffn_hidden_size|n_inner|d_ff|.*head_dim|.*_head_size|kv_channels|.*_lora_rank"
    r"|.*lora_r|mamba_d_(head|ssm|state)|state_size|.*_d_head|lru_width|word_embed_proj_dim"
    r"|.*_embedding_size|.*_embd|.*_proj_dim|hidden_size_per_layer_input|d_kv|.*hidden_dim"
    r"|.*_hidden_size|dim_ff|expand_size|embedding_size|time_mix_.*_rank|.*_low_rank_dim"
    r"|attention_hidden_size|rotary_dim|.*headdim|embedding_dim)$"
)
_HEAD_COUNT_FIELDS = re.compile(r"^(num_(.*_)?heads|(.*_)?n_heads?|n_head_kv|linear_num_.*_heads)$")
_HEAD_SIZE_FIELDS = re.compile(
    r".*(head_dim|head_size|headdim|_d_head|d_kv|kv_channels)$|^rotary_dim$"
)
LAYER_COUNT_FIELDS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "depth",
)
# Of parts that do not process text.
OTHER_LAYER_COUNT_FIELDS = (*LAYER_COUNT_FIELDS, "encoder_layers")
_WINDOW_FIELDS = {
    **dict.fromkeys(
        ("sliding_window", "attention_chunk_size", "attention_window_size"), WINDOW_TOKENS
    ),
    **dict.fromkeys(("window_size", "chunk_size", "mamba_chunk_size"), WINDOW_TOKENS),
    **dict.fromkeys(("index_topk", "indexer_budget"), WINDOW_TOKENS),
    **{"index_block_size": WINDOW_TOKENS // 4, "index_topk_blocks": 2},
}
_LAYER_KIND_FIELDS = (
    *("layer_types", "layers_block_type", "attn_layer_indices", "block_types"),
    *("mlp_layer_types", "mlp_layers_types"),
)
# The fields that say how many of the first layers have no experts.
_NUM_DENSE_FIELDS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_NUM_EXPERTS_FIELD = re.compile(r"^(moe_)?(num|n)_(local_|routed_)?experts$")
_MIN_EXPERTS = 8  # or more: twice as many as a token chooses


def shrink_config(
    config: Any, factor: int, keep_all_layers: bool = False, head_divisor: int = 1
) -> Any:
    """Return ``config`` with few layers, widths divided by ``factor`` and a small vocabulary.

    ``keep_all_layers`` keeps the number of layers, for architectures whose layers refer to each
    other. ``head_divisor`` divides the number of heads, and also all widths but that of a head.

    Raises:
        Exception: whatever the configuration's own class raises for inconsistent values.
    """
    fields: dict[str, Any] = config.to_dict()
    old_layers = _find_first_int(fields, LAYER_COUNT_FIELDS)
    layers = None
    if old_layers and not keep_all_layers:
        layers = min(old_layers, _count_needed_layers(config, fields, old_layers))
    for name, value in list(fields.items()):
        if isinstance(value, bool):
            continue
        if name in LAYER_COUNT_FIELDS and layers:
            fields[name] = layers
        elif name == "attn_layer_indices" and isinstance(value, list) and layers:
            fields[name] = [index for index in value if index < layers]
        elif name == "per_layer_config" and isinstance(value, dict):
            fields[name] = {
                layer: {
                    n: _shrink_field(n, v, config, factor, head_divisor) for n, v in entry.items()
                }
                for layer, entry in value.items()
                if not layers or int(layer) < layers
            }
        elif name in config.sub_configs and isinstance(value, dict):  # such as DBRX's attention
            part = getattr(config, name)
            fields[name] = {
                n: _shrink_field(n, v, part, factor, head_divisor) for n, v in value.items()
            }
        else:
            small_value = _shrink_field(name, value, config, factor, head_divisor)
            per_layer = isinstance(value, list) and len(value) == old_layers
            fields[name] = small_value[:layers] if per_layer else small_value
    fields.pop("quantization_config", None)
    small = type(config).from_dict(fields)
    small.use_cache = False
    _shorten_rotary_factors(small)
    return small


def _shrink_field(name: str, value: Any, config: Any, factor: int, head_divisor: int) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        if name in _WINDOW_FIELDS:
            return min(value, _WINDOW_FIELDS[name])
        if name.startswith("vocab_size"):
            return min(value, MAX_VOCABULARY)
        if _NUM_EXPERTS_FIELD.match(name):
            return min(value, _count_needed_experts(config))
        if name == "zero_expert_num":  # LongCat's experts that compute nothing
            return min(value, _MIN_EXPERTS)
    if name.endswith(("token_id", "token_ids")):
        return _shrink_token_id(name, value)
    return _divide_width(name, value, factor, head_divisor)


def shrink_whole_config(
    config: Any,
    factor: int,
    keep_all_layers: bool = False,
    head_divisor: int = 1,
    other_divisor: int = 1,
) -> Any:
    """Return ``config`` with ``shrink_config`` of its language model, and one layer in other parts.

    The widths of the other parts are divided by ``other_divisor``.

    Raises:
        Exception: as ``shrink_config`` does.
    """
    text = config.get_text_config()
    if text is config:
        return shrink_config(config, factor, keep_all_layers, head_divisor)
    fields: dict[str, Any] = config.to_dict()
    small = shrink_config(text, factor, keep_all_layers, head_divisor)
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is text:
            fields[name] = small.to_dict()
        elif part is not None:
            fields[name] = _shrink_to_one_layer(part.to_dict(), other_divisor)
            for width, value in part.to_dict().items():  # its outputs to the language model
                if "out" in width and value == text.hidden_size:
                    fields[name][width] = small.hidden_size
    for name, value in fields.items():
        if name == "vocab_size" and isinstance(value, int):
            fields[name] = min(value, MAX_VOCABULARY)
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            fields[name] = MAX_VOCABULARY - 1  # a token that a trial's documents do not have
    return type(config).from_dict(fields)


def _divide_width(name: str, value: Any, factor: int, head_divisor: int) -> Any:
    """Divide a width, a list of widths per layer, or a number of heads; keep all other values.

    A width below its divisor is kept too, and so is a number of heads that does not divide evenly
    or would leave fewer than two.
    """
    if isinstance(value, list):
        return [_divide_width(name, width, factor, head_divisor) for width in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if _HEAD_COUNT_FIELDS.match(name):
        return (
            value // head_divisor
            if value % head_divisor == 0 and value >= 2 * head_divisor
            else value
        )
    factor *= 1 if _HEAD_SIZE_FIELDS.match(name) else head_divisor
    if not _WIDTH_FIELDS.match(name) or value < factor:
        return value
    small = value // factor
    return small + -small % _WIDTH_MULTIPLE if "intermediate" in name and factor > 1 else small


def _shrink_to_one_layer(fields: dict[str, Any], factor: int) -> dict[str, Any]:
    layers = _find_first_int(fields, OTHER_LAYER_COUNT_FIELDS)
    small: dict[str, Any] = {
        n: 1 for n in OTHER_LAYER_COUNT_FIELDS if isinstance(fields.get(n), int)
    }
    for name, value in fields.items():
        if isinstance(value, list | tuple) and len(value) == layers:
            small[name] = list(value[:1])
        elif name == "per_layer_config" and isinstance(value, dict):
            small[name] = {layer: entry for layer, entry in value.items() if int(layer) == 0}
        elif isinstance(value, dict) and "model_type" in value:  # one of two encoders
            small[name] = _shrink_to_one_layer(value, factor)
        is_width = name == "embed_dim" or _WIDTH_FIELDS.match(name)
        if is_width and isinstance(value, int) and value % factor == 0:
            small[name] = value // factor
    return fields | small


def list_shrink_factors(config: Any) -> list[int]:
    """Return the possible divisors for a configuration's widths, the largest first."""
    fields: dict[str, Any] = config.to_dict()
    heads = value_shared_by_layers(config, "num_attention_heads")
    hidden_size = getattr(config, "hidden_size", None)
    sizes = {name: n for name, n in fields.items() if name.endswith("head_dim") and n}
    sizes = {name: n for name, n in sizes.items() if isinstance(n, int)}
    if sizes:  # linear attention, or heads without rotary positions, may name it differently
        size = sizes.get("head_dim") or min(sizes.values())
    elif isinstance(heads, int) and isinstance(hidden_size, int) and heads:
        size = hidden_size // heads
    else:
        size = hidden_size // 8 if isinstance(hidden_size, int) else MIN_HEAD_SIZE
    return [f for f in WIDTH_DIVISORS if f == 1 or (size % f == 0 and size // f >= MIN_HEAD_SIZE)]


def _count_needed_layers(config: Any, fields: dict[str, Any], layers: int) -> int:
    """Return how many of the first layers include one of each kind, at least two."""
    dense_counts = [fields.get(name) for name in _NUM_DENSE_FIELDS]
    num_needed = max([2, *(number + 1 for number in dense_counts if isinstance(number, int))])
    for name in _LAYER_KIND_FIELDS:
        kinds = fields.get(name, getattr(config, name, None))
        if name == "attn_layer_indices" and kinds:
            num_needed = max(num_needed, min(kinds) + 1)
        elif isinstance(kinds, list) and len(kinds) == layers:
            num_needed = max(num_needed, max(kinds.index(kind) for kind in set(kinds)) + 1)
        elif isinstance(kinds, list) and kinds:
            num_needed = max(num_needed, len(kinds))
    return num_needed


def _count_needed_experts(config: Any) -> int:
    """Return how many experts leave tokens a choice, as a multiple of the number of groups."""
    groups = max(getattr(config, "n_group", None) or 1, 1)
    experts = max(_MIN_EXPERTS, 2 * num_experts_per_token(config), 2 * groups)
    return experts + -experts % groups


def _shorten_rotary_factors(small_config: Any) -> None:
    """Cut rotary factors and sections to the number of frequencies that narrower heads have."""
    fields = getattr(small_config, "rope_parameters", None) or {}
    if "mrope_section" in small_config.ignore_keys_at_rope_validation and fields:
        fields.setdefault("mrope_section", [1, 1, 1])  # the model's default is for unshrunk heads
    for part in (fields, *(part for part in fields.values() if isinstance(part, dict))):
        share = part.get("partial_rotary_factor") or 1.0
        uneven = "short_factor" in part or "mrope_section" in part
        heads = small_config.num_attention_heads if uneven else 1
        size = small_config.to_dict().get("head_dim") or small_config.hidden_size // heads
        for name in ("short_factor", "long_factor"):
            if isinstance(part.get(name), list):
                part[name] = part[name][: int(size * share) // 2]
        if sections := part.get("mrope_section"):
            part["mrope_section"] = _shorten_rotary_sections(sections, int(size * share) // 2)


def _shorten_rotary_sections(sections: list[int], half_dim: int) -> list[int]:
    """Return sections that sum to ``half_dim``: for time, height and width, or with time last.

    Height and width stay equal if they were.
    """
    shares = [half_dim * section // sum(sections) for section in sections]
    if sections[0] == sections[1]:
        return [*shares[:-1], half_dim - sum(shares[:-1])]
    return [half_dim - sum(shares[1:]), *shares[1:]]


def _find_first_int(fields: dict[str, Any], names: tuple[str, ...]) -> int | None:
    return next((fields[n] for n in names if isinstance(fields.get(n), int)), None)


def _shrink_token_id(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_shrink_token_id(name, token) for token in value]
    if not isinstance(value, int) or 0 <= value < MAX_VOCABULARY:
        return value
    return 0 if name.startswith("pad") else 2


# -- Stock losses and gradients.


MAX_MODEL_VALUES = 64_000_000
_STANDARD_DEVIATION = 0.03  # of the noise on all initial values, so that none is zero or one
_MAX_DRAWS = 5  # draws of values, at most; the last ones are used even if tied
_ADAPTER_PACKAGES = ("peft", "bitsandbytes")
# Of the largest score: rounding moves these models' fp32 scores by half of that.
_TIE_TOLERANCE = 2e-6


class UncheckableArchitecture(Exception):
    """No small model of this architecture can be made or trained; the text is the reason."""


class TopKGapRecorder(TorchDispatchMode):
    """Records the smallest gap between a score that torch.topk chose and one that it left out.

    ``smallest_gap``: this gap, relative to the largest score.
    """

    def __init__(self) -> None:
        """Record the choices made within this context."""
        super().__init__()
        self.smallest_gap = float("inf")

    @property
    def has_tie(self) -> bool:
        """Whether rounding may have decided a choice: summing in another order could change it."""
        return self.smallest_gap < _TIE_TOLERANCE

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` unchanged, and record the gap if it is a choice by torch.topk."""
        if func is torch.ops.aten.topk.default and self._is_topk_choice(*args[:3]):
            scores, count = args[0].detach(), args[1]
            best = scores.topk(count + 1, dim=-1).values
            gaps = (best[..., -2] - best[..., -1]) / best[..., 0].abs()
            self.smallest_gap = min([self.smallest_gap, *gaps[gaps.isfinite()].tolist()])
        return func(*args, **(kwargs or {}))

    def _is_topk_choice(self, scores: torch.Tensor, count: int, dim: int = -1) -> bool:
        is_last = dim in (-1, scores.dim() - 1)
        return scores.is_floating_point() and is_last and 0 < count < scores.shape[-1]


def write_small_model(config: Any, directory: Path, seed: int = 0) -> None:
    """Write a small model of the architecture of ``config`` with random values into ``directory``.

    Raises:
        UncheckableArchitecture: if transformers can make none, or none of at most
        ``MAX_MODEL_VALUES`` values.
    """
    with fast_imports():
        from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        reason, text = "", language_config(config, directory)
    except DataError as error:
        raise UncheckableArchitecture(str(error).removeprefix(f"{directory}: ")) from None
    other_divisors = (1,) if text is config else OTHER_DIVISORS
    for sizes in itertools.product(
        HEAD_DIVISORS, (False, True), list_shrink_factors(text), other_divisors
    ):
        head_divisor, keep_all_layers, factor, other_divisor = sizes
        try:
            small = shrink_whole_config(
                config, factor, keep_all_layers, head_divisor, other_divisor
            )
            with torch.device("meta"):
                model = auto_model_class(config).from_config(small, dtype=torch.float32)
            if (values := sum(p.numel() for p in model.parameters())) > MAX_MODEL_VALUES:
                reason = reason or f"the smallest has {values:,} values"
                continue
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = auto_model_class(config).from_config(small, dtype=torch.float32)
                with torch.no_grad():
                    for values in _find_saved_tensors(model):
                        values.add_(torch.randn(values.shape), alpha=_STANDARD_DEVIATION)
            use_plain_functions_on_cpu(model)
            _document_loss(model.eval(), torch.arange(3, 12))
            _save_model(model, directory)
        except Exception as error:  # noqa: BLE001 - whatever such a model's own code raises
            reason = f"{type(error).__name__}: {first_line(error)}"
            continue
        return
    raise UncheckableArchitecture(reason)


def _find_saved_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that checkpoints hold: parameters, and routers' correction biases."""
    yield from (p for p in model.parameters() if p.is_floating_point())
    for module in model.modules():
        yield from (b for n, b in module.named_buffers(recurse=False) if n in CORRECTION_BIASES)


def compute_stock_losses(
    directory: Path, documents: Sequence[torch.Tensor]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the loss sum of each document of T tokens, run by itself, and their summed gradient.

    The model is loaded by ``from_pretrained``, and computes the loss itself.

    Raises:
        UncheckableArchitecture: if that fails.
    """
    try:
        model = (
            auto_model_class(read_config(directory))
            .from_pretrained(
                directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False
            )
            .eval()
        )
        use_plain_functions_on_cpu(model)
        avoid_sdpa_with_capped_scores(model)
        losses = []
        for tokens_T in documents:
            total = _document_loss(model, tokens_T)
            total.backward()
            losses.append(total.item())
    except Exception as error:  # noqa: BLE001 - whatever such a model's own code raises
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise UncheckableArchitecture(
            f"transformers' own training step fails with {reason}"
        ) from None
    return losses, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def compute_reference_losses(
    config: Any, directory: Path, documents: Sequence[torch.Tensor]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Write a small model into ``directory`` and return ``compute_stock_losses`` of it.

    If two experts' scores differ only by rounding, summing in another order chooses the other one
    and changes the loss, though nothing is wrong: then new values are drawn.

    Raises:
        UncheckableArchitecture: as both do.
    """
    for seed in range(_MAX_DRAWS):
        write_small_model(config, directory, seed)
        with TopKGapRecorder() as choices:
            reference = compute_stock_losses(directory, documents)
        if not choices.has_tie:
            break
    return reference


def _save_model(model: Any, directory: Path) -> None:
    """Do what ``save_pretrained`` does, without importing the packages that it would import."""
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    tensors = revert_weight_conversion(
        model, remove_tied_weights_from_state_dict(model.state_dict(), model)
    )
    state_dict = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(state_dict, directory / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(directory)


def _document_loss(model: Any, tokens_T: torch.Tensor) -> torch.Tensor:
    """Return the summed loss of a document, as transformers itself computes it."""
    tokens_BT = tokens_T.unsqueeze(0)
    mean: torch.Tensor = model(input_ids=tokens_BT, labels=tokens_BT, use_cache=False).loss
    return mean * (len(tokens_T) - 1)


def software_versions() -> str:
    """Return the package versions that a trial's outcome depends on."""
    with fast_imports():
        import transformers

    versions = [f"transformers {transformers.__version__}, torch {torch.__version__}"]
    for package in _ADAPTER_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(versions)
