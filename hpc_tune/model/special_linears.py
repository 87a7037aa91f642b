"""Linear layers that are not called as linear layers are: they have no adapters and stay whole.

What peft or bitsandbytes would put in their place is wrong there, on any device, as a run may go on
anywhere:

- A fused kernel takes the weight as it is. Where mamba_ssm is installed, Mamba 2's does the output
  projection too, and Mamba 1's all after the first: an adapter would not be trained, without a word
  (https://github.com/huggingface/peft/issues/2274 and 2556), and 4-bit codes be taken for weights.
- The product is of groups of inputs, each with its part of the weight (DeepSeek V4).
- An indexer of sparse attention (DeepSeek V3.2, GLM-5) chooses keys by scores that no loss reaches;
  some cast to the dtype of a weight, which of 4-bit codes is that of bytes.
"""

from collections.abc import Iterator

from torch import nn

from hpc_tune.model.experts import find_routers
from hpc_tune.model.kept_fp32 import find_fp32_linears
from hpc_tune.model.packed_attention import indexers_of

# With norms between its projections Jamba's Mamba 1 calls each, and has another slow form.
_MAMBA_1 = ("MambaMixer", "FalconMambaMixer")


def find_unquantised_layers(model: nn.Module, blocks: nn.Module) -> set[nn.Module]:
    """Return the layers in a model's decoder blocks whose products keep their digits.

    Those of routers, layers that are not called as linear layers are, and those that a family keeps
    in fp32.
    """
    paths = {*find_routers(blocks), *find_uncalled_linears(blocks)}
    return {*find_fp32_linears(model), *(blocks.get_submodule(path) for path in paths)}


def find_uncalled_linears(model: nn.Module) -> Iterator[str]:
    """Yield the paths of such layers of a model."""
    choosing = {layer for indexer in indexers_of(model) for layer in indexer.modules()}
    for path, module in model.named_modules():
        own = module._parameters.keys()
        if {"A_log", "D", "dt_bias"} <= own:
            yield f"{path}.out_proj"
        elif type(module).__name__ in _MAMBA_1:
            yield from (f"{path}.{name}" for name in ("x_proj", "dt_proj", "out_proj"))
        elif isinstance(module, nn.Linear) and (hasattr(module, "n_groups") or module in choosing):
            yield path
