"""The dtype in which a micro-batch is computed, and the seed of its random numbers."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Compute matrix products in ``dtype`` within a block; None leaves all as it is."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def seed_micro_batch(seed: int, first_row: int, stage: int = 0) -> None:
    """Seed torch for a micro-batch in a pipeline stage, the same in every layout."""
    torch.manual_seed((seed * 1_000_003 + first_row) ^ (stage << 52))
