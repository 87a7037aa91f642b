"""Writes a Llama of random weights of any size, in several files, without holding it in memory."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hpc_tune.model.builtin import write_tiny_model
from hpc_tune.model.regions import Region, write_regions

# The shape of TinyLlama-1.1B.
SHAPE_1B = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
# A quarter of the 1.1B shape's depth and half its width: 0.1B values, 200 MB.
SHAPE_SMALL = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 16000,
}


def write_random_model(directory: Path, dtype: torch.dtype = torch.bfloat16, **shape: int) -> int:
    """Write such a Llama with the tokenizer of builtin:tiny, so that it can be trained.

    ``directory`` must be new; return the bytes of the weights.
    """
    write_tiny_model(directory)
    (directory / "model.safetensors").unlink()
    return write_random_llama(directory, dtype=dtype, **shape)


def write_random_llama(
    directory: Path, num_files: int = 4, dtype: torch.dtype = torch.bfloat16, **shape: int
) -> int:
    """Write the model and return the bytes of its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(**shape, tie_word_embeddings=False)
    with torch.device("meta"):
        parameters = dict(LlamaForCausalLM(config).named_parameters())
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    names = sorted(parameters)
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        mine = names[number::num_files]
        regions = []
        for name in mine:
            full = tuple(parameters[name].shape)

            def values(full: tuple[int, ...] = full) -> torch.Tensor:
                return (torch.randn(full, generator=generator) * 0.02).to(dtype)

            regions.append(Region.cover_tensor(name, dtype, full, values))
        write_regions(directory / file, regions)
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(directory)
    return sum(p.numel() for p in parameters.values()) * dtype.itemsize
