"""Regions of plain tensors, to be written like those of an engine."""

import functools
from collections.abc import Mapping

import torch

from hpc_tune.model.regions import Region, local_region
from hpc_tune.model.tensor_sources import Box


def regions_of(tensors: Mapping[str, torch.Tensor]) -> list[Region]:
    """Return what this rank holds of each tensor, sharded or whole."""
    regions = []
    for name, tensor in tensors.items():
        local, offset = local_region(tensor.detach())
        if local.numel():
            regions.append(
                Region(
                    name,
                    local.dtype,
                    Box(offset, tuple(local.shape)),
                    tuple(tensor.shape),
                    functools.partial(torch.Tensor.contiguous, local),
                )
            )
    return regions
