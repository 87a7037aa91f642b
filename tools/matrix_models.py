"""The architectures of the matrix: transformers' configurations, as published models set them.

``config_of`` gives each its scales: a factor of 1, as many configurations have by default, would
hide that it is forgotten.
"""

from typing import Any

from transformers import AutoConfig

DENSE = """
apertus arcee biogpt bitnet bloom codegen cohere cohere2 ctrl cwm diffllama doge ernie4_5 exaone4
falcon falcon_mamba gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox
gpt_neox_japanese gptj granite helium hyperclovax internlm3 jais2 llama mamba mamba2 minicpm3
ministral3 mistral mpt nanochat olmo olmo2 olmo3 openai-gpt opt persimmon phi phi3 qwen2 qwen3
qwen3_5_text recurrent_gemma rwkv seed_oss smollm3 stablelm starcoder2 vaultgemma xglm youtu zamba2
zaya
"""
OTHERS = "bart bert camembert cpmant electra roberta xlnet xlstm"  # most are not causal
WITH_IMAGES = "exaone4_5 gemma3 gemma4 internvl llava mistral3 qwen3_5 qwen3_vl smolvlm"
SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
EXPERTS = "gpt_oss mixtral olmoe qwen3_moe qwen3_next"
HEADS_OF_128 = {"head_dim": 128}
MODELS: dict[str, dict[str, Any]] = {
    **{name: {} for part in (DENSE, WITH_IMAGES, OTHERS, EXPERTS) for name in part.split()},
    "bamba": {"attn_layer_indices": [1, 2]},
    "falcon_h1": {"num_hidden_layers": 2},
    "gemma3n_text": {},
    "gemma4_text": {},
    "granitemoehybrid": {
        "num_local_experts": 0,
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
    },
    "hunyuan_v1_dense": HEADS_OF_128,
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "ministral": HEADS_OF_128,
    "qwen2_5_vl": {"text_config": {"rope_parameters": SECTIONS}},
    "nemotron": {"num_key_value_heads": 8},
    "olmo_hybrid": {},
}


def config_of(name: str) -> Any:
    """Return the configuration of an architecture."""
    config = AutoConfig.for_model(name, **MODELS[name])
    for key, value in list(vars(config).items()):
        if isinstance(value, float) and value == 1.0 and ("multiplier" in key or "scal" in key):
            setattr(config, key, 1.3)
    return config
