"""Functions of transformers' code that other packages do, on GPUs alone.

Where causal_conv1d, mamba_ssm or flash-linear-attention can be imported, transformers calls them
wherever tensors are. They are for GPUs: on a CPU each call fails, and so would every trial of a
small model, which is on a CPU, and every plan.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor


def use_plain_functions_on_cpu(model: nn.Module) -> None:
    """Let a model's code call such packages for tensors on a GPU, else transformers' own functions.

    Both compute the same. Changes the module of the code, for all models of the family; does
    nothing a second time.
    """
    from transformers.integrations import hub_kernels

    for name in {type(module).__module__ for module in model.modules()}:
        code = sys.modules[name]
        for attribute, function in list(vars(code).items()):
            made_in = getattr(getattr(function, "__code__", None), "co_filename", "")
            if made_in == hub_kernels.__file__ and hasattr(function, "__wrapped__"):
                setattr(code, attribute, _choose_by_device(function))


def _choose_by_device(function: Callable[..., Any]) -> Callable[..., Any]:
    own: Callable[..., Any] = function.__wrapped__  # type: ignore[attr-defined]
    known = inspect.signature(own).parameters

    @functools.wraps(own)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        # Documents that share a row are kept apart by packages alone; transformers refuses them.
        keeps_apart = any(kwargs.get(name) is not None for name in ("seq_idx", "cu_seqlens"))
        if keeps_apart or _is_on_gpu((*args, *kwargs.values())):
            return function(*args, **kwargs)
        return own(*args, **{name: value for name, value in kwargs.items() if name in known})

    return chosen


def _is_on_gpu(values: Iterable[Any]) -> bool:
    """Whether the first tensor is on a GPU, and not only said to be, as in a trace."""
    first = next((value for value in values if isinstance(value, torch.Tensor)), None)
    return first is not None and first.is_cuda and not isinstance(first, FakeTensor)
