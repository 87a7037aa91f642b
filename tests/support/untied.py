"""builtin:tiny with an untied output head."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from hpc_tune.model.builtin import write_tiny_model


def write_untied(directory: Path) -> Path:
    """Write the model and its tokenizer into ``directory``."""
    write_tiny_model(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.config.tie_word_embeddings = False
    untied = type(model)(model.config)
    torch.manual_seed(0)
    values = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    values["lm_head.weight"] = 0.02 * torch.randn(model.lm_head.weight.shape)
    untied.load_state_dict(values)
    untied.save_pretrained(directory)
    return directory
