"""The dtype in which a micro-batch is computed, and the seed of its random numbers."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hpc_tune.model.build import DTYPES, BuiltModel


def autocast_dtype(built: BuiltModel) -> torch.dtype | None:
    """Return the dtype to cast trained weights to for each product, None where they have it.

    Full fine-tuning updates weights of tune.param_dtype and computes in model.dtype. Adapters cast
    themselves.
    """
    casts = built.tune.method == "full" and built.dtype != DTYPES[built.tune.param_dtype]
    return built.dtype if casts else None


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Compute matrix products in ``dtype`` within a block; None leaves all as it is."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def seed_micro_batch(seed: int, first_row: int, stage: int = 0) -> None:
    """Seed torch for a micro-batch in a pipeline stage, the same in every layout."""
    torch.manual_seed((seed * 1_000_003 + first_row) ^ (stage << 52))
