"""How torch's CUDA allocator is set up: it reads that from the environment at its first use."""

import ctypes
from collections.abc import Callable, MutableMapping
from typing import Literal

# In the order in which torch reads them: one alone counts.
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_MAPS_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED of cuda.h


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
        if cuda.cuDeviceGetAttribute(ctypes.byref(found), _MAPS_MEMORY, device) or not found.value:
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
    if wanted == "cpu" or any(name in environ for name in VARIABLES):
        return
    if can_map():
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
