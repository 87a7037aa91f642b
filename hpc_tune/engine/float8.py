"""float8 matrix products by torchao: weights and activations are scaled and cast for each product.

Only the base's linear layers inside of the decoder blocks are converted: adapters are too small to
gain, and the output head too sensitive to lose digits. Weights stay what they are in memory and in
checkpoints.
"""

from collections.abc import Collection, Sequence

import torch
from torch import nn

from hpc_tune.errors import ConfigError, first_line
from hpc_tune.model.weights import adapted_layer
from hpc_tune.world.architecture import find_architecture

SIDE_MULTIPLE = 16  # of both sides of a weight, which the float8 product of the hardware asks for


def check_float8(device: torch.device) -> None:
    """Check that this rank's device and installation can compute in float8.

    Raises:
        ConfigError: if they cannot, with what to do.
    """
    instead = "set train.float8=false (model.dtype=bf16 is the fastest that it can do)"
    needs = (
        "train.float8=true needs a GPU with float8 products (NVIDIA's H100, L40, RTX 40 or later, "
        "AMD's MI300 or later)"
    )
    architecture = find_architecture(device)
    if architecture is None:
        raise ConfigError(f"{needs}, and this rank computes on {device}; {instead}")
    if not architecture.has_float8:
        name = torch.cuda.get_device_name(device)
        raise ConfigError(f"{needs}; {name} has {architecture}; {instead}")
    try:
        import torchao.float8  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"train.float8=true needs torchao, which cannot be imported ({first_line(error)}); "
            "install it with pip install 'hpc_tune[float8]', or set train.float8=false"
        ) from None


def use_float8(
    blocks: Sequence[nn.Module], exact: Collection[nn.Module] = (), emulate: bool = False
) -> int:
    """Make the products of the blocks' base layers float8; return how many layers that are.

    But those of ``exact`` (``find_unquantised_layers``): experts would be chosen by scores of
    8 bits. It works on the meta device and inside of peft's layers, and changes no parameter's
    name. ``emulate`` rounds to float8 without the hardware, for tests.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    # Padding is for the eager product of an odd number of tokens; compiled ones need none, since a
    # frozen weight's gradient is not computed there.
    config = Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    for block in blocks:
        convert_to_float8_training(
            block,
            module_filter_fn=lambda module, name: module not in exact and _is_plain(module, name),
            config=config,
        )
    return sum(isinstance(m, Float8Linear) for block in blocks for m in block.modules())


def _is_plain(module: nn.Module, name: str) -> bool:
    if type(module) is not nn.Linear or adapted_layer(name):
        return False
    return module.in_features % SIDE_MULTIPLE == 0 and module.out_features % SIDE_MULTIPLE == 0
