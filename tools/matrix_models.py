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
EXPERTS = """
exaone_moe flex_olmo gemma4 glm4_moe_lite gpt_oss granitemoe granitemoeshared jetmoe llama4_text
longcat_flash minimax minimax_m2 mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe_text
qwen3_moe qwen3_next qwen3_vl_moe afmoe aria jamba ernie4_5_moe deepseek_v3 deepseek_v32
"""
HEADS_OF_128 = {"head_dim": 128}
MODELS: dict[str, dict[str, Any]] = {
    **{name: {} for part in (DENSE, WITH_IMAGES, OTHERS, EXPERTS) for name in part.split()},
    "bamba": {"attn_layer_indices": [1, 2]},
    "deepseek_v2": {
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
    },
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "falcon_h1": {"num_hidden_layers": 2},
    "gemma3n_text": {},
    "gemma4_text": {},
    "glm4_moe": HEADS_OF_128,
    "granitemoehybrid": {
        "num_local_experts": 0,
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
    },
    "granitemoehybrid-experts": {
        "model_type": "granitemoehybrid",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "layer_types": ["mamba", "attention"],
    },
    "hunyuan_v1_dense": HEADS_OF_128,
    "hunyuan_v1_moe": HEADS_OF_128 | {"num_experts": 16, "moe_topk": 2},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
    "ministral": HEADS_OF_128,
    "qwen2_5_vl": {"text_config": {"rope_parameters": SECTIONS}},
    "nemotron": {"num_key_value_heads": 8},
    "olmo_hybrid": {},
}

# Of nine draws, the one in which no choice of experts of stock's own steps is near a tie.
SEEDS = {"afmoe": 2}


def config_of(name: str) -> Any:
    """Return the configuration of an architecture; some have a name for one of two kinds."""
    config = AutoConfig.for_model(**{"model_type": name} | MODELS[name])
    for key, value in list(vars(config).items()):
        if isinstance(value, float) and value == 1.0 and ("multiplier" in key or "scal" in key):
            setattr(config, key, 1.3)
    return config
