"""The architectures of the matrix: transformers' configurations, as published models set them.

``config_of`` changes scaling factors of 1, the default of many configurations: they would hide that
a factor is not applied.
"""

from typing import Any

from transformers import AutoConfig

DENSE_MODELS = """
apertus arcee biogpt bitnet bloom codegen cohere cohere2 ctrl cwm diffllama doge ernie4_5 exaone4
falcon falcon_mamba gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neo gpt_neox
gpt_neox_japanese gptj granite helium hyperclovax internlm3 jais2 llama mamba mamba2 minicpm3
ministral3 mistral mpt nanochat olmo olmo2 olmo3 openai-gpt opt persimmon phi phi3 qwen2 qwen3
qwen3_5_text recurrent_gemma rwkv seed_oss smollm3 stablelm starcoder2 vaultgemma xglm youtu zamba2
zaya
"""
OTHER_MODELS = "bart bert camembert cpmant electra roberta xlnet xlstm"  # most are not causal
IMAGE_MODELS = (
    "exaone4_5 gemma3 gemma4 internvl llava mistral3 muse_glimmer qwen3_5 qwen3_vl smolvlm"
)
SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
EXPERTS = """
exaone_moe flex_olmo gemma4 glm4_moe_lite gpt_oss granitemoe granitemoeshared jetmoe llama4_text
longcat_flash minimax minimax_m2 mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe_text
qwen3_moe qwen3_next qwen3_vl_moe afmoe aria jamba ernie4_5_moe deepseek_v3 deepseek_v32
axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_v4 dots3_note ernie4_5_vl_moe flint glm4v_moe
glm5_next glm_moe_dsa granitemoe_swa hy_v3 hy_v4 inkling2 inkling_mm_model kimi_k25 kimi_linear
kolibri1 laguna llama4 mellum mimo_v2_flash mistral4 mistral_large4 muse_spark
nemotron_h_omni openai_privacy_filter qwen3_omni_moe solar_open unlimited_ocr
"""
INDEXER = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 128}
INDEXER |= {"indexer_budget": 2048, "indexer_compress_ratio": 16}
QUARTER_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
HEADS_OF_128 = {"head_dim": 128}
MODELS: dict[str, dict[str, Any]] = {
    **{
        name: {}
        for part in (DENSE_MODELS, IMAGE_MODELS, OTHER_MODELS, EXPERTS)
        for name in part.split()
    },
    "bamba": {"attn_layer_indices": [1, 2]},
    "dbrx": {
        **{"d_model": 6144, "n_heads": 48, "n_layers": 40},
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "deepseek_ocr2": {
        "text_config": {
            **{"hidden_size": 1280, "num_attention_heads": 10, "num_hidden_layers": 12},
            **{"moe_intermediate_size": 896, "num_experts_per_tok": 6},
            "mlp_layer_types": ["dense"] + ["sparse"] * 11,
        }
    },
    "deepseek_v2": {
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
    },
    "diffusion_gemma": {
        "text_config": {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    },
    "deepseek_v32": {
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 1024},
        **{"intermediate_size": 2048, "moe_intermediate_size": 512},
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
    "qwen3_omni_moe_thinker": {"text_config": HEADS_OF_128 | {"num_attention_heads": 32}},
    "qwen4_exp": {
        "text_config": INDEXER | {"rope_parameters": QUARTER_ROPE | {"mrope_section": [11, 11, 10]}}
    },
    "minimax_m3_vl": {
        "text_config": {
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        }
    },
    "step3p7": {"text_config": {"sliding_window": 512}},
    "nemotron": {"num_key_value_heads": 8},
    "olmo_hybrid": {},
}

# Seeds with no choice of experts near a tie in stock's own steps: AFMoE has one in nine. With the
# first of hy_v4, shards choose another expert on some CPUs (2.4e-4), with the next two on none.
SEEDS = {"afmoe": 2, "hy_v4": 1}


def config_of(name: str) -> Any:
    """Return the configuration of an architecture, or of one of its kinds that has its own name."""
    config = AutoConfig.for_model(**{"model_type": name} | MODELS[name])
    for key, value in list(vars(config).items()):
        if isinstance(value, float) and value == 1.0 and ("multiplier" in key or "scal" in key):
            setattr(config, key, 1.3)
    return config
