"""How torch's CUDA allocator is set up: by the environment, before torch is imported.

It reads that at its first use, or parts of it when it is loaded, by its version and for AMD.
"""

import ctypes
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Literal

# In the order in which torch reads them: one alone counts.
ALLOC_CONF_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
_MAPPING_ATTRIBUTE = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED of cuda.h


def can_map_memory() -> bool:
    """Return whether there are NVIDIA GPUs, and each can map memory."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    num, found = ctypes.c_int(), ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(num)):
        return False
    for index in range(num.value):
        device = ctypes.c_int()
        if cuda.cuDeviceGet(ctypes.byref(device), index):
            return False
        if (
            cuda.cuDeviceGetAttribute(ctypes.byref(found), _MAPPING_ATTRIBUTE, device)
            or not found.value
        ):
            return False
    return num.value > 0


def expand_segments(
    environ: MutableMapping[str, str],
    wanted: Literal["auto", "cpu", "cuda"],
    can_map: Callable[[], bool] = can_map_memory,
) -> None:
    """Let the allocator grow its segments, unless ``environ`` has a configuration already.

    Blocks of changing sizes then leave no gaps that none of them fits into. Segments grow by
    mapping memory, which some virtual GPUs cannot: there the first allocation would fail.
    """
    if wanted == "cpu" or any(name in environ for name in ALLOC_CONF_VARIABLES):
        return
    if can_map():
        environ["PYTORCH_ALLOC_CONF"] = _EXPANDABLE


def read_settings() -> Mapping[str, Any]:
    """Return what the allocator of this rank's GPU has read; nothing where torch does not tell."""
    import torch

    try:
        found = torch.cuda.memory._snapshot().get("allocator_settings", {})
    except (AttributeError, RuntimeError):
        return {}
    return found if isinstance(found, Mapping) else {}


def unread_settings_warning(environ: Mapping[str, str], settings: Mapping[str, Any]) -> str | None:
    """Return a warning where segments shall grow and torch's ``settings`` say otherwise (pure)."""
    wanted = next((environ[name] for name in ALLOC_CONF_VARIABLES if name in environ), "")
    told = settings.get("expandable_segments")
    if _EXPANDABLE not in wanted or told is None or str(told).lower() in ("true", "1"):
        return None
    return (
        f"torch has not read {_EXPANDABLE} from the environment, so GPU memory fragments: "
        "torch was imported before the ranks set it. Export "
        "PYTORCH_ALLOC_CONF=expandable_segments:True "
        "in the job"
    )
