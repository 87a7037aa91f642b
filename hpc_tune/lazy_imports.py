"""Faster imports: unused optional packages are hidden, garbage collection is off.

A rank imports 2,800 modules. Where many ranks share few cores, that is most of the startup.
"""

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

# Two seconds per rank, for layers of its own that hpc_tune does not use: it has others in
# quantize.py and engine/float8.py.
_HIDDEN = ("torchao", "bitsandbytes")

_COMPILER = "torch._dynamo"
_ITEMS = f"{_COMPILER}._trace_wrapped_higher_order_op"


class _Compiler(ModuleType):
    """Takes the place of torch._dynamo where nothing is compiled; any other attribute imports it.

    It has the attributes that torch and transformers use in a run that compiles nothing.
    """

    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # at each init_process_group
    eval_frame = SimpleNamespace(OptimizedModule=())  # no module is a compiled one

    @staticmethod
    def disable(fn: Any = None, *_: Any, **__: Any) -> Any:
        """Return a function as it is: nothing is compiled."""
        return fn if fn is not None else lambda function: function

    allow_in_graph = assume_constant_result = disallow_in_graph = disable

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Do nothing: there is no graph to break."""

    def __getattr__(self, name: str) -> Any:
        if name == "__file__":  # inspect asks all modules for it
            raise AttributeError(name)
        return getattr(_real_compiler(), name)


def postpone_compiler() -> None:
    """Import torch's compiler only when it is used; for runs that compile nothing.

    It is a fifth of a rank's imports. torch's optimizers and transformers' modules use it only to
    mark functions that must not be compiled. torch itself must be imported already.
    """
    if _COMPILER in sys.modules:
        return
    items = ModuleType(_ITEMS)
    items.TransformGetItemToIndex = _real_items  # type: ignore[attr-defined]
    sys.modules[_COMPILER], sys.modules[_ITEMS] = _Compiler(_COMPILER), items


def _real_compiler() -> ModuleType:
    if isinstance(sys.modules.get(_COMPILER), _Compiler):
        del sys.modules[_COMPILER], sys.modules[_ITEMS]
    return importlib.import_module(_COMPILER)


def _real_items() -> Any:
    _real_compiler()
    transform: Callable[[], Any] = importlib.import_module(_ITEMS).TransformGetItemToIndex
    return transform()


def import_transformers() -> None:
    """Import transformers and its ``models``, which scan its 1,600 files once, not twice.

    Each of the two reads every file to learn what it defines: a tenth of the import time, and 3,200
    files to open on a parallel file system. transformers' own cache misses, because it has the
    folder under two names.
    """
    with lazy_imports():
        package = importlib.import_module("transformers")
        finder: Any = importlib.import_module("transformers.utils.import_utils")
        name = "create_import_structure_from_path"
        scan = getattr(finder, name, None)
        if scan is not None and "transformers.models" not in sys.modules:
            models = Path(package.__path__[0]) / "models"
            named_again = models / "__init__.py"
            setattr(finder, name, lambda p: scan(models if Path(p) == named_again else p))
        try:
            importlib.import_module("transformers.models")
        finally:
            if scan is not None:
                setattr(finder, name, scan)


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; a folder of its name is not one."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


@contextmanager
def lazy_imports() -> Iterator[None]:
    """Hide torchao and bitsandbytes from transformers and peft, which look for them.

    Garbage collection is off meanwhile, and what has been imported is never collected: modules
    stay, and scanning their objects again and again takes a fifth of an import.
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
