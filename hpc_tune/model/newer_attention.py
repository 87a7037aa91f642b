"""FlashAttention 3 and 4 in the place of torch's own kernel, where they are installed.

torch has FlashAttention 2, and calls a newer one where it is told to
(``torch.nn.attention.activate_flash_attention_impl``, torch 2.11). On an H100 version 3 takes about
half of the time (arXiv:2407.08608). It is tried beside masked attention before it is used, as
torch's own is, and taken back if it differs.
"""

import functools
from typing import Any

import torch

from hpc_tune.errors import first_line
from hpc_tune.log import log
from hpc_tune.model import varlen_attention
from hpc_tune.packages import is_installed
from hpc_tune.world.architecture import NEWER_ATTENTION, find_architecture

FLASH_NAMES = {"FA3": "FlashAttention 3", "FA4": "FlashAttention 4"}


def list_installed(device: torch.device) -> list[str]:
    """Return which of them are there for a GPU, the best first."""
    from torch.nn import attention

    architecture = find_architecture(device)
    if architecture is None or not hasattr(attention, "activate_flash_attention_impl"):
        return []
    return [name for name in architecture.newer_attention if is_installed(NEWER_ATTENTION[name][0])]


@functools.cache
def use_flash_attention(
    device: torch.device, dtype: torch.dtype, values: int, groups: int, window: int | None = None
) -> str:
    """Let torch call the best that is installed and right; return its name, "" for torch's own.

    For heads of ``values``, of which ``groups`` share one of keys; ``window``: tokens of a sliding
    window that is tried too, None for none. It holds for the whole process.
    """
    from torch.nn import attention

    flash: Any = attention
    most = varlen_attention.MAX_EPS * torch.finfo(dtype).eps
    for name in list_installed(device):
        try:
            flash.activate_flash_attention_impl(name)
            gaps = [
                gap
                for tried in {None, window}
                for gap in varlen_attention.compare_with_mask(
                    device, dtype, values, groups, tried
                ).values()
            ]
        except Exception as error:  # noqa: BLE001 - a package that was built for another torch
            why = f"it fails here ({first_line(error)})"
        else:
            if all(gap <= most for gap in gaps):
                return FLASH_NAMES[name]
            why = f"it differs from masked attention by {max(gaps):.1e} of the norm"
        flash.restore_flash_attention_impl(_raise_warn=False)
        log.warning("%s is installed and not used: %s", FLASH_NAMES[name], why)
    return ""
