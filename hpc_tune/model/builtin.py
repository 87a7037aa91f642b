"""builtin:tiny, the model that needs no download: Llama-shaped, byte tokens, the same everywhere.

It is written out as an ordinary Hugging Face directory, so nothing else treats it as special.
"""

from pathlib import Path
from typing import Any

import numpy as np

from hpc_tune.errors import ConfigError, find_remedy

BUILTIN_TINY_MODEL = "builtin:tiny"
TINY_SEED = 20240229
SPECIAL_TOKENS = ("<|pad|>", "<|start|>", "<|end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TINY_CONFIG = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "vocab_size": 320,
    "tie_word_embeddings": True,
}


def write_tiny_model(directory: Path) -> None:
    """Write builtin:tiny (0.8M parameters) and its tokenizer, unless ``directory`` has it already.

    The weights come from numpy's Philox stream, normal with standard deviation 0.02 (norms are
    one), so that they are the same bits on every machine.

    Raises:
        ConfigError: if the files cannot be written.
    """
    if (directory / "config.json").exists():
        return
    from safetensors import SafetensorError

    try:
        _write_model(directory)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{directory} cannot be written: {error}{find_remedy(error)}") from None


def _write_model(directory: Path) -> None:
    from safetensors.numpy import save
    from transformers import LlamaConfig

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = _make_tokenizer()
    config = LlamaConfig(
        **TINY_CONFIG,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    tokenizer.save_pretrained(directory)
    rng = np.random.Generator(np.random.Philox(TINY_SEED))
    weights = {
        name: (
            np.ones(shape, np.float32)
            if len(shape) == 1
            else (0.02 * rng.standard_normal(shape, np.float32))
        )
        for name, shape in _weight_shapes().items()
    }
    # Not save_file: it makes the file readable for this user only, whatever the umask.
    (directory / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))
    # Written last: a directory with config.json counts as complete.
    config.save_pretrained(directory)


def _weight_shapes() -> dict[str, tuple[int, ...]]:
    hidden, intermediate = TINY_CONFIG["hidden_size"], TINY_CONFIG["intermediate_size"]
    kv_size = hidden // TINY_CONFIG["num_attention_heads"] * TINY_CONFIG["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (TINY_CONFIG["vocab_size"], hidden)
    }
    for i in range(TINY_CONFIG["num_hidden_layers"]):
        block = f"model.layers.{i}."
        shapes |= {
            block + "self_attn.q_proj.weight": (hidden, hidden),
            block + "self_attn.k_proj.weight": (kv_size, hidden),
            block + "self_attn.v_proj.weight": (kv_size, hidden),
            block + "self_attn.o_proj.weight": (hidden, hidden),
            block + "mlp.gate_proj.weight": (intermediate, hidden),
            block + "mlp.up_proj.weight": (intermediate, hidden),
            block + "mlp.down_proj.weight": (hidden, intermediate),
            block + "input_layernorm.weight": (hidden,),
            block + "post_attention_layernorm.weight": (hidden,),
        }
    return {**shapes, "model.norm.weight": (hidden,)}


def _make_tokenizer() -> Any:
    """One token per byte and three special ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        bos_token="<|start|>",
        eos_token="<|end|>",
        model_max_length=TINY_CONFIG["max_position_embeddings"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
