"""Imports that take less: without what is not used here, and without looking for garbage.

A rank imports 2,800 modules. Where many ranks share few cores, that is most of a start.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Two seconds per rank, for layers of its own that hpc_tune does not use: it has others in
# quantize.py and engine/float8.py.
_HIDDEN = ("torchao", "bitsandbytes")


@contextmanager
def lean_imports() -> Iterator[None]:
    """Let what transformers and peft ask in this context answer that those are not installed.

    Nothing is collected meanwhile, and what is there at the end never will be: modules stay, and
    looking at their objects again and again takes a fifth of an import.
    """
    modules: dict[str, Any] = sys.modules
    hidden = [name for name in _HIDDEN if name not in modules]
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
