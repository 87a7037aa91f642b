"""FlashAttention 3 and 4 in the place of torch's own kernel, where they are installed.

torch has FlashAttention 2, and calls a newer one where it is told to
(``torch.nn.attention.activate_flash_attention_impl``, torch 2.11). On an H100 version 3 takes about
half of the time (arXiv:2407.08608). It is tried beside masked attention before it is used, as
torch's own is, and taken back if it differs.
"""

import functools
import importlib.util
from typing import Any

import torch

from hpc_tune.errors import first_line
from hpc_tune.log import log
from hpc_tune.model import varlen_attention

# By the major compute capability, the best first.
NEWER = {9: ("FA3", "FA4"), 10: ("FA4",)}
_MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}
NAMES = {"FA3": "FlashAttention 3", "FA4": "FlashAttention 4"}


def installed(major: int) -> list[str]:
    """Return which of them are there for a GPU of a compute capability, the best first."""
    from torch.nn import attention

    if not hasattr(attention, "activate_flash_attention_impl"):
        return []
    return [name for name in NEWER.get(major, ()) if _is_installed(_MODULES[name])]


@functools.cache
def use_newer(
    device: torch.device, dtype: torch.dtype, values: int, groups: int, window: int | None = None
) -> str:
    """Let torch call the best that is installed and right; return its name, "" for torch's own.

    For heads of ``values``, of which ``groups`` share one of keys; ``window``: tokens of a sliding
    window that is tried too, None for none. It holds for the whole process.
    """
    from torch.nn import attention

    flash: Any = attention
    most = varlen_attention.MAX_EPS * torch.finfo(dtype).eps
    for name in installed(torch.cuda.get_device_capability(device)[0]):
        try:
            flash.activate_flash_attention_impl(name)
            gaps = [
                gap
                for tried in {None, window}
                for gap in varlen_attention.gaps_to_mask(
                    device, dtype, values, groups, tried
                ).values()
            ]
        except Exception as error:  # noqa: BLE001 - a package that was built for another torch
            why = f"it fails here ({first_line(error)})"
        else:
            if all(gap <= most for gap in gaps):
                return NAMES[name]
            why = f"it differs from masked attention by {max(gaps):.1e} of the norm"
        flash.restore_flash_attention_impl(_raise_warn=False)
        log.warning("%s is installed and not used: %s", NAMES[name], why)
    return ""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # of a package that it is in
        return False
