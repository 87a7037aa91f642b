"""A frozen base whose blocks have their weights in packed bytes: 4 bits, or float8.

    nn.Linear on meta -> a packed layer on meta -> (sharded, allocated) -> packed while it is read
    a stack of experts -> a stack of their bytes, and a module that makes values of them

Each kind of layer or stack has ``num_values``, ``compute_dtype``, ``unpack(packed)``, which makes
the values, and ``fill``, which reads and packs what a rank holds.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hpc_tune.config.tune import TuneConfig
from hpc_tune.model.blocks import find_blocks
from hpc_tune.model.experts import find_expert_modules
from hpc_tune.model.float8_base import Float8Linear, Float8Stack
from hpc_tune.model.four_bit import FourBitLinear, FourBitStack, require_bitsandbytes
from hpc_tune.model.grouped_experts import (
    has_grouped_form,
    packing_name,
    stack_names,
    use_grouped_experts,
)
from hpc_tune.model.special_linears import find_unquantised_layers

PackedLinear = FourBitLinear | Float8Linear
PackedStack = FourBitStack | Float8Stack
PackedLayer = PackedLinear | PackedStack


def pack_base(model: Any, tune: TuneConfig, dtype: torch.dtype) -> None:
    """Pack the frozen weights of the decoder blocks, on the meta device.

    After peft, which goes by the shapes of whole weights. Of the linear layers all but
    ``find_unquantised_layers``, of the stacks of experts those that ``grouped_experts`` computes.

    Raises:
        ConfigError: if bitsandbytes is needed, and not installed or cannot be imported.
    """
    in_4_bits = tune.method == "qlora"
    if in_4_bits:
        require_bitsandbytes()
    blocks = find_blocks(model)
    others = find_unquantised_layers(model, blocks)
    for owner in list(blocks.modules()):
        for name, child in list(owner.named_children()):
            if type(child) is nn.Linear and not child.weight.requires_grad and child not in others:
                kind = FourBitLinear if in_4_bits else Float8Linear
                setattr(owner, name, kind(child, dtype))
    # Some families read a layer's weight themselves, unless the config says, as transformers does
    # of what it has quantised, that it is no matrix (Jamba).
    model.config._is_quantized = True
    for experts in filter(has_grouped_form, blocks.modules()):
        for name in stack_names(experts):
            values = experts.get_parameter(name)
            stack = FourBitStack(values, dtype) if in_4_bits else Float8Stack(values, dtype)
            experts.add_module(packing_name(name), stack)
            packed = torch.empty(stack.packed_shape, dtype=torch.uint8, device="meta")
            experts.register_parameter(name, nn.Parameter(packed, requires_grad=False))
    use_grouped_experts(blocks)


def find_packed_weights(module: nn.Module) -> Iterator[tuple[str, PackedLayer]]:
    """Yield what the packed weights of a model mean, by the weight's name."""
    for path, layer in module.named_modules():
        if isinstance(layer, PackedLinear):
            yield f"{path}.weight", layer
        elif isinstance(layer, PackedStack):
            yield path.removesuffix(packing_name("")), layer


def unpack_linears(module: nn.Module) -> nn.Module:
    """Put linear layers of the same values in the place of packed ones; return the module."""
    packed = [(path, m) for path, m in module.named_modules() if isinstance(m, PackedLinear)]
    for path, layer in packed:
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        plain.weight = nn.Parameter(layer.unpack(layer.weight), requires_grad=False)
        plain.bias = layer.bias
        module.set_submodule(path, plain)
    return module


def unpacked_stack_bytes(module: nn.Module) -> int:
    """Return the bytes of frozen experts that are not packed: of undecorated ones."""
    own = (p for _, part in find_expert_modules(module) for p in part.parameters(recurse=False))
    return sum(p.nbytes for p in own if not p.requires_grad and p.is_floating_point())


def scale_bytes(layer: PackedLayer) -> int:
    """Return the bytes of a layer's scales that are not among its packed ones."""
    return sum(buffer.numel() for buffer in layer._buffers.values() if buffer is not None)
