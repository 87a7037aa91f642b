"""Small mixtures of experts, as directories that stock transformers loads and trains."""

from pathlib import Path
from typing import Any

import torch

from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.loss import LossModel
from hpc_tune.model.stock_reference import write_small_model
from hpc_tune.packages import fast_imports

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "vocab_size": 320,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "qwen2_moe": {
        "num_experts": 6,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "gpt_oss": {"num_local_experts": 6, "sliding_window": 32},
    "granitemoe": {"num_local_experts": 6},
    "deepseek_v3": {
        **{"n_routed_experts": 8, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1},
        **{"first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "head_dim": 8},
        **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
        "num_key_value_heads": 4,
    },
}


def write_mixture(family: str, directory: Path, **said: Any) -> Path:
    """Write a mixture with random weights and a byte tokenizer into ``directory``.

    ``said``: fields of its config.json, set before the model is made small.
    """
    with fast_imports():
        from transformers import AutoConfig

    write_tiny_model(directory)
    config = AutoConfig.for_model(family, **_SHAPE | _FAMILIES[family] | said)
    (directory / "model.safetensors").unlink()
    write_small_model(config, directory)
    return directory


def write_large_mixture(family: str, directory: Path, **said: Any) -> Path:
    """Write a mixture likewise, but in fp32 and in exactly the sizes given."""
    with fast_imports():
        from transformers import AutoConfig, AutoModelForCausalLM

    write_tiny_model(directory)
    (directory / "model.safetensors").unlink()
    config = AutoConfig.for_model(family, **_SHAPE | _FAMILIES[family] | said)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


def spread_experts(directory: Path) -> None:
    """Make routers choose more evenly, with weights larger than initial ones."""
    from safetensors.torch import load_file, save_file

    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if "gate.weight" in name or "router" in name:
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(3)))
    save_file(tensors, file, metadata={"format": "pt"})


def merged_and_own_logits(
    merged: Path, module: LossModel, tokens_BT: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of ``merged`` as stock transformers loads it, completely, and our own."""
    with fast_imports():
        from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        merged, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        stock = model.eval()(input_ids=tokens_BT, use_cache=False).logits
        return stock, module.causal_lm()(input_ids=tokens_BT, use_cache=False).logits
