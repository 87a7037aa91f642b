"""ZeRO stage 3: each parameter is replaced by this rank's part of it, one at a time.

    meta parameter -> DeepSpeed's parameter without values -> the rank's part, read from the files

The module is never whole; ``zero.Init`` would allocate every parameter whole and broadcast it. This
file imports DeepSpeed, so it is imported only once DeepSpeed is connected.
"""

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import (
    AsyncPartitionedParameterSwapper,
    PartitionedParamStatus,
)
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import (
    Init,
    ZeroParamStatus,
    free_param,
    register_external_parameter,
)
from torch import nn

from hpc_tune.engine.zero import state
from hpc_tune.model.build import BuiltModel
from hpc_tune.model.layers import find_blocks
from hpc_tune.model.load import find_owners, load_weights
from hpc_tune.model.tensor_sources import ReserveFunction
from hpc_tune.world.pinned import empty_pinned_like, pinned_blocks_bytes


def partition_parameters(
    built: BuiltModel, config: dict[str, Any], device: torch.device, reserve: ReserveFunction
) -> None:
    """Partition the parameters of a meta model and fill them; ``config`` is DeepSpeed's.

    Raises:
        DataError: if the weights on disk are damaged or of another model.
    """
    partitioner = _Partitioner(built, config, device)
    owners, named_params = find_owners(built.module), list(built.module.named_parameters())
    partitioner.allocate_pinned(named_params, reserve)
    for name, meta in named_params:
        parameter = partitioner.make_partitioned_parameter(name, meta, reserve)
        for owner, attribute in owners[meta]:
            owner._parameters[attribute] = parameter
    for block in find_blocks(built.module):
        for parameter in block.parameters():
            # Otherwise it is gathered when its own layer is called, in a separate message.
            register_external_parameter(block, parameter)
    for owner in built.module.modules():
        for attribute, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[attribute] = torch.empty_like(buffer, device=device)
    load_weights(built, reserve, fills_parameters=False)


class _Partitioner:
    """Makes DeepSpeed's partitioned parameters, on the device, the host or NVMe."""

    def __init__(self, built: BuiltModel, config: dict[str, Any], device: torch.device) -> None:
        self._built, self._device = built, device
        self._dtype = next(built.module.parameters()).dtype
        zero = config["zero_optimization"]
        self._offload: str | None = zero.get("offload_param", {}).get("device")
        self._persistence_threshold: int = zero["stage3_param_persistence_threshold"]
        self._swapper: Any = None
        if self._offload == "nvme":
            # Init would make one of another dtype on a CPU, whatever is passed to it.
            self._swapper = AsyncPartitionedParameterSwapper(DeepSpeedConfig(config), self._dtype)
        self._zero_init = Init(
            config_dict_or_path=config, dtype=self._dtype, param_swapper=self._swapper
        )
        self._pinned_buffers: dict[str, torch.Tensor] = {}

    def allocate_pinned(
        self, named_params: Sequence[tuple[str, nn.Parameter]], reserve: ReserveFunction
    ) -> None:
        """Allocate the parts that are kept in host memory, if that is to be pinned."""
        if not self._zero_init.pin_memory:
            return
        parts = {}
        for name, meta in named_params:
            num_local_values = self._num_local_values(meta)
            if not self._is_swapped(meta, num_local_values):
                parts[name] = torch.empty(num_local_values, dtype=meta.dtype, device="meta")
        reserve(pinned_blocks_bytes(part.nbytes for part in parts.values()))
        self._pinned_buffers = dict(zip(parts, empty_pinned_like([*parts.values()]), strict=True))

    def make_partitioned_parameter(
        self, name: str, meta_param: nn.Parameter, reserve: ReserveFunction
    ) -> Any:
        """Return DeepSpeed's parameter for ``meta_param``, of which this rank holds its part."""
        # One value in memory, expanded: only the shape matters.
        dummy = torch.empty(1, dtype=meta_param.dtype, device=self._device).expand(meta_param.shape)
        parameter: Any = nn.Parameter(dummy, requires_grad=meta_param.requires_grad)
        self._zero_init._convert_to_deepspeed_param(parameter)
        num_local_values = self._num_local_values(meta_param)
        is_swapped = self._is_swapped(meta_param, num_local_values)
        flat: Any = self._pinned_buffers.pop(name, None)
        if flat is None:
            flat = self._allocate_buffer(parameter, meta_param.dtype, num_local_values, is_swapped)
        flat.ds_numel = num_local_values
        flat.status = PartitionedParamStatus.AVAILABLE
        flat.final_location = OffloadDeviceEnum.nvme if is_swapped else None
        parameter.ds_tensor = flat
        parameter.ds_numel_aligned = num_local_values * self._zero_init.dp_world_size
        start = num_local_values * self._zero_init.rank
        state.fill_parameter(self._built, name, flat, tuple(meta_param.shape), start, reserve)
        free_param(parameter)
        parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE
        if is_swapped:
            self._swapper.swap_out_and_release([parameter])
        return parameter

    def _num_local_values(self, meta_param: nn.Parameter) -> int:
        return -(-meta_param.numel() // int(self._zero_init.dp_world_size))

    def _is_swapped(self, meta_param: nn.Parameter, num_local_values: int) -> bool:
        """Whether a part is kept on NVMe: not if it stays gathered or has another dtype."""
        return (
            self._swapper is not None
            and meta_param.dtype == self._dtype
            and meta_param.numel() > self._persistence_threshold
            and self._swapper.swappable_tensor(numel=num_local_values)
        )

    def _allocate_buffer(
        self, parameter: Any, dtype: torch.dtype, num_local_values: int, is_swapped: bool
    ) -> Any:
        if is_swapped:
            flat = torch.empty(0, dtype=dtype)
            flat.data = self._swapper.get_buffer(parameter, num_local_values).data
            return flat
        return torch.empty(
            num_local_values, dtype=dtype, device="cpu" if self._offload else self._device
        )
