"""Linear layers whose weights a fused kernel takes as they are.

Where mamba_ssm is installed, Mamba 2's kernel does the output projection too, and Mamba 1's all
after the first. What peft or bitsandbytes put in such a layer's place is not called: an adapter is
not trained, without a word (https://github.com/huggingface/peft/issues/2274 and 2556), and 4-bit
codes are taken for weights. So they have no adapters and are not quantised, on any device: a run
may go on anywhere.
"""

from collections.abc import Iterator

from torch import nn

# With norms between its projections Jamba's Mamba 1 calls each, and has another slow form.
_MAMBA_1 = ("MambaMixer", "FalconMambaMixer")


def fused_projections(model: nn.Module) -> Iterator[str]:
    """Yield the paths of such layers of a model."""
    for path, module in model.named_modules():
        own = module._parameters.keys()
        if {"A_log", "D", "dt_bias"} <= own:
            yield f"{path}.out_proj"
        elif type(module).__name__ in _MAMBA_1:
            yield from (f"{path}.{name}" for name in ("x_proj", "dt_proj", "out_proj"))
