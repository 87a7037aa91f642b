"""Faster imports: unused optional packages are hidden, garbage collection is off.

A rank imports 2,800 modules. Where many ranks share few cores, that is most of the startup.
"""

import gc
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# About a second per rank (benchmarks/NOTES.md), for layers of their own that hpc_tune does not use:
# it has others in four_bit.py and engine/float8.py.
_HIDDEN_PACKAGES = ("torchao", "bitsandbytes")


def is_importable(package: str) -> bool:
    """Return whether a package can be imported; a folder of its name is not one."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


@contextmanager
def fast_imports() -> Iterator[None]:
    """Hide torchao and bitsandbytes from transformers and peft, which look for them.

    Garbage collection is off meanwhile, and what has been imported is never collected: modules
    stay, and scanning their objects again and again takes a fifth of an import.
    """
    modules: dict[str, Any] = sys.modules
    hidden = [name for name in _HIDDEN_PACKAGES if name not in modules]
    modules.update(dict.fromkeys(hidden))
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]
        gc.freeze()
        if was_on:
            gc.enable()
