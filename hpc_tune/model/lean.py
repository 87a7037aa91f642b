"""transformers and peft without what they import only because it is installed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Two seconds per rank, for layers of its own that hpc_tune does not use: it has others in
# quantize.py and engine/float8.py.
_HIDDEN = ("torchao", "bitsandbytes")


@contextmanager
def lean_imports() -> Iterator[None]:
    """Let what is imported or asked in this context believe that those are not installed."""
    modules: dict[str, Any] = sys.modules
    hidden = [name for name in _HIDDEN if name not in modules]
    modules.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]
