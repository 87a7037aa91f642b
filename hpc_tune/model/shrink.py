"""A model's configuration made small: the same architecture in a few million values.

    shrink_config(config)        few layers, narrow layers, a small vocabulary; all else as it was
    shrink_whole_config(config)  so with the language model of one that has other parts, too

What is kept decides how the model computes: the number of heads and their groups, kinds of layers,
activations, scales, biases, rotary positions. Feature widths are divided by one number, so that
what has to fit together (heads x values per head = width) still does. Where the smallest of these
models is too large yet, the heads are divided too, and with them every width but that of a head.
"""

import re
from typing import Any

from hpc_tune.model.config_json import common_value
from hpc_tune.model.experts import num_chosen_experts

VOCABULARY = 512
WINDOW = 16  # tokens a layer sees, or takes at once: shorter than the documents of a trial
FACTORS = (64, 32, 16, 8, 4, 2, 1)
FEWER = (1, 4)  # times the heads: all of them, if that can be
OTHER_FACTORS = (8, 1)  # of parts for other things than text, of which no value is looked at
_MULTIPLE = 8  # of inner features: products of experts want rows of 16 bytes
MIN_HEAD = 8  # values per head: rotary positions of a part of them want an even number
_WIDTHS = re.compile(
    r"^(hidden_size|d_model|n_embd|dim|model_dim|intermediate_size.*|.*_intermediate_size|ffn_dim"
    r"|.*_ffn_dim|.*ffn_hidden_size|n_inner|d_ff|.*head_dim|.*_head_size|kv_channels|.*_lora_rank"
    r"|.*lora_r|mamba_d_(head|ssm|state)|state_size|.*_d_head|lru_width|word_embed_proj_dim"
    r"|.*_embedding_size|.*_embd|.*_proj_dim|hidden_size_per_layer_input|d_kv|.*hidden_dim"
    r"|.*_hidden_size|dim_ff|expand_size|embedding_size|time_mix_.*_rank|.*_low_rank_dim"
    r"|attention_hidden_size|rotary_dim|.*headdim|embedding_dim)$"
)
_HEADS = re.compile(r"^(num_(.*_)?heads|(.*_)?n_heads?|n_head_kv|linear_num_.*_heads)$")
_HEAD_SIZES = re.compile(r".*(head_dim|head_size|headdim|_d_head|d_kv|kv_channels)$|^rotary_dim$")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "depth")
OTHER_LAYERS = (*LAYERS, "encoder_layers")  # of parts for other things than text
_WINDOWS = {
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("window_size", "chunk_size", "mamba_chunk_size"), WINDOW),
    **dict.fromkeys(("index_topk", "indexer_budget"), WINDOW),
    **{"index_block_size": WINDOW // 4, "index_topk_blocks": 2},
}
_LAYER_KINDS = (
    *("layer_types", "layers_block_type", "attn_layer_indices", "block_types"),
    *("mlp_layer_types", "mlp_layers_types"),
)
# How many of the first layers have no experts.
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_EXPERTS = re.compile(r"^(moe_)?(num|n)_(local_|routed_)?experts$")
_MIN_EXPERTS = 8  # or twice as many as a token chooses


def shrink_config(config: Any, factor: int, all_layers: bool = False, fewer: int = 1) -> Any:
    """Return ``config`` with few layers, widths divided by ``factor`` and a small vocabulary.

    ``all_layers`` keeps their number, for architectures whose layers refer to each other.
    ``fewer``: by what the number of heads is divided, and all widths but a head's besides.

    Raises:
        Exception: whatever the configuration's own class raises for what does not fit together.
    """
    fields: dict[str, Any] = config.to_dict()
    old_layers = _first_number(fields, LAYERS)
    layers = None
    if old_layers and not all_layers:
        layers = min(old_layers, _enough_layers(config, fields, old_layers))
    for name, value in list(fields.items()):
        if isinstance(value, bool):
            continue
        if name in LAYERS and layers:
            fields[name] = layers
        elif name == "attn_layer_indices" and isinstance(value, list) and layers:
            fields[name] = [index for index in value if index < layers]
        elif name == "per_layer_config" and isinstance(value, dict):
            fields[name] = {
                layer: {n: _shrink_field(n, v, config, factor, fewer) for n, v in own.items()}
                for layer, own in value.items()
                if not layers or int(layer) < layers
            }
        elif name in config.sub_configs and isinstance(value, dict):  # DBRX's of attention
            part = getattr(config, name)
            fields[name] = {n: _shrink_field(n, v, part, factor, fewer) for n, v in value.items()}
        else:
            small_value = _shrink_field(name, value, config, factor, fewer)
            per_layer = isinstance(value, list) and len(value) == old_layers
            fields[name] = small_value[:layers] if per_layer else small_value
    fields.pop("quantization_config", None)
    small = type(config).from_dict(fields)
    small.use_cache = False
    _shorten_factors(small)
    return small


def _shrink_field(name: str, value: Any, config: Any, factor: int, fewer: int) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        if name in _WINDOWS:
            return min(value, _WINDOWS[name])
        if name.startswith("vocab_size"):
            return min(value, VOCABULARY)
        if _EXPERTS.match(name):
            return min(value, _enough_experts(config))
        if name == "zero_expert_num":  # LongCat's, of no computation
            return min(value, _MIN_EXPERTS)
    if name.endswith(("token_id", "token_ids")):
        return _small_token(name, value)
    return _divide(name, value, factor, fewer)


def shrink_whole_config(
    config: Any, factor: int, all_layers: bool = False, fewer: int = 1, of_others: int = 1
) -> Any:
    """Return ``config`` with its language model ``shrink_config``; other parts get one layer each.

    The widths of those are divided by ``of_others``.

    Raises:
        Exception: as ``shrink_config`` does.
    """
    text = config.get_text_config()
    if text is config:
        return shrink_config(config, factor, all_layers, fewer)
    fields: dict[str, Any] = config.to_dict()
    small = shrink_config(text, factor, all_layers, fewer)
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is text:
            fields[name] = small.to_dict()
        elif part is not None:
            fields[name] = _one_layer(part.to_dict(), of_others)
            for width, value in part.to_dict().items():  # what it gives to the language model
                if "out" in width and value == text.hidden_size:
                    fields[name][width] = small.hidden_size
    for name, value in fields.items():
        if name == "vocab_size" and isinstance(value, int):
            fields[name] = min(value, VOCABULARY)
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            fields[name] = VOCABULARY - 1  # none that a document of a trial has
    return type(config).from_dict(fields)


def _divide(name: str, value: Any, factor: int, fewer: int) -> Any:
    """Return a width, or the width of each layer, divided; other values as they are.

    So is a width that is smaller than what it would be divided by, and a number of heads of which
    no two would be left.
    """
    if isinstance(value, list):
        return [_divide(name, width, factor, fewer) for width in value]
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if _HEADS.match(name):
        return value // fewer if value % fewer == 0 and value >= 2 * fewer else value
    factor *= 1 if _HEAD_SIZES.match(name) else fewer
    if not _WIDTHS.match(name) or value < factor:
        return value
    small = value // factor
    return small + -small % _MULTIPLE if "intermediate" in name and factor > 1 else small


def _one_layer(fields: dict[str, Any], factor: int) -> dict[str, Any]:
    layers = _first_number(fields, OTHER_LAYERS)
    small: dict[str, Any] = {n: 1 for n in OTHER_LAYERS if isinstance(fields.get(n), int)}
    for name, value in fields.items():
        if isinstance(value, list | tuple) and len(value) == layers:
            small[name] = list(value[:1])
        elif name == "per_layer_config" and isinstance(value, dict):
            small[name] = {layer: own for layer, own in value.items() if int(layer) == 0}
        elif isinstance(value, dict) and "model_type" in value:  # one of two encoders
            small[name] = _one_layer(value, factor)
        is_width = name == "embed_dim" or _WIDTHS.match(name)
        if is_width and isinstance(value, int) and value % factor == 0:
            small[name] = value // factor
    return fields | small


def list_shrink_factors(config: Any) -> list[int]:
    """Return the numbers to divide a configuration's widths by, the largest that may work first."""
    fields: dict[str, Any] = config.to_dict()
    heads = common_value(config, "num_attention_heads")
    hidden = getattr(config, "hidden_size", None)
    sizes = {name: n for name, n in fields.items() if name.endswith("head_dim") and n}
    sizes = {name: n for name, n in sizes.items() if isinstance(n, int)}
    if sizes:  # of linear attention, or without rotary positions, it is none of "head_dim"
        size = sizes.get("head_dim") or min(sizes.values())
    elif isinstance(heads, int) and isinstance(hidden, int) and heads:
        size = hidden // heads
    else:
        size = hidden // 8 if isinstance(hidden, int) else MIN_HEAD
    return [f for f in FACTORS if f == 1 or (size % f == 0 and size // f >= MIN_HEAD)]


def _enough_layers(config: Any, fields: dict[str, Any], layers: int) -> int:
    """Return how many of the first layers have one of each kind, two at least."""
    dense = [fields.get(name) for name in _DENSE_FIRST]
    enough = max([2, *(number + 1 for number in dense if isinstance(number, int))])
    for name in _LAYER_KINDS:
        kinds = fields.get(name, getattr(config, name, None))
        if name == "attn_layer_indices" and kinds:
            enough = max(enough, min(kinds) + 1)
        elif isinstance(kinds, list) and len(kinds) == layers:
            enough = max(enough, max(kinds.index(kind) for kind in set(kinds)) + 1)
        elif isinstance(kinds, list) and kinds:
            enough = max(enough, len(kinds))
    return enough


def _enough_experts(config: Any) -> int:
    """Return how many experts leave a token a choice, in as many groups as there are."""
    groups = max(getattr(config, "n_group", None) or 1, 1)
    experts = max(_MIN_EXPERTS, 2 * num_chosen_experts(config), 2 * groups)
    return experts + -experts % groups


def _shorten_factors(small: Any) -> None:
    """Leave as many factors and sections of rotary frequencies as narrower heads have."""
    fields = getattr(small, "rope_parameters", None) or {}
    if "mrope_section" in small.ignore_keys_at_rope_validation and fields:
        fields.setdefault("mrope_section", [1, 1, 1])  # the model's code has one for its own heads
    for part in (fields, *(part for part in fields.values() if isinstance(part, dict))):
        share = part.get("partial_rotary_factor") or 1.0
        uneven = "short_factor" in part or "mrope_section" in part
        heads = small.num_attention_heads if uneven else 1
        size = small.to_dict().get("head_dim") or small.hidden_size // heads
        for name in ("short_factor", "long_factor"):
            if isinstance(part.get(name), list):
                part[name] = part[name][: int(size * share) // 2]
        if sections := part.get("mrope_section"):
            part["mrope_section"] = _shorten_sections(sections, int(size * share) // 2)


def _shorten_sections(sections: list[int], half: int) -> list[int]:
    """Return sections of ``half`` frequencies of a head: of time, height and width, or time last.

    Height and width stay equal where they were.
    """
    shares = [half * section // sum(sections) for section in sections]
    if sections[0] == sections[1]:
        return [*shares[:-1], half - sum(shares[:-1])]
    return [half - sum(shares[1:]), *shares[1:]]


def _first_number(fields: dict[str, Any], names: tuple[str, ...]) -> int | None:
    return next((fields[n] for n in names if isinstance(fields.get(n), int)), None)


def _small_token(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_small_token(name, token) for token in value]
    if not isinstance(value, int) or 0 <= value < VOCABULARY:
        return value
    return 0 if name.startswith("pad") else 2
