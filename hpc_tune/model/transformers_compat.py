"""Differences between the versions of transformers that hpc_tune runs on.

    from 5.23   an operator for the gradient of matmuls grouped by expert (``grouped_matmul.py``)
    from 5.21   families that cap attention scores (Gemma 2, VaultGemma) do not use SDPA, which
                ignores the cap; before, they do
                Bloom's masks respect where documents begin; before, they do not, as a trial finds
    from 5.20   experts with a norm after them (``grouped_experts.py``)
    from 5.18   LongCat's config stores one number of blocks; before, two (``plan/resolve.py``)
                Doge's masks are causal; before, a trial refuses it

For torch, see ``hpc_tune/torch_versions.py``.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from hpc_tune.packages import parse_release

_MIN_UNCAPPED_SDPA_VERSION = (5, 21)


def avoid_sdpa_with_capped_scores(model: Any) -> None:
    """Keep a model that caps attention scores from using SDPA, which ignores the cap."""
    from transformers import __version__ as version  # imported already: the model comes from it

    cap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if (
        cap
        and parse_release(version) < _MIN_UNCAPPED_SDPA_VERSION
        and model.config._attn_implementation == "sdpa"
    ):
        model.set_attn_implementation("eager")


# -- Functions of transformers' code that other packages replace, for GPUs only.
#
# If causal_conv1d, mamba_ssm or flash-linear-attention can be imported, transformers calls them on
# any device. They are for GPUs: on a CPU each call fails, and so would every plan and every trial
# of a small model, which run on a CPU.


def use_plain_functions_on_cpu(model: nn.Module) -> None:
    """Make a model's code call causal_conv1d and the like only on a GPU, else transformers' own.

    Both compute the same, but calls that separate documents (``seq_idx``, ``cu_seqlens``) always go
    to the packages. This patches the family's Python module, for all of its models; a second call
    does nothing.
    """
    from transformers.integrations import hub_kernels

    for name in {type(module).__module__ for module in model.modules()}:
        code = sys.modules[name]
        for attribute, function in list(vars(code).items()):
            source_file = getattr(getattr(function, "__code__", None), "co_filename", "")
            if source_file == hub_kernels.__file__ and hasattr(function, "__wrapped__"):
                setattr(code, attribute, _dispatch_by_device(function))


def _dispatch_by_device(function: Callable[..., Any]) -> Callable[..., Any]:
    plain_function: Callable[..., Any] = function.__wrapped__  # type: ignore[attr-defined]
    parameters = inspect.signature(plain_function).parameters

    @functools.wraps(plain_function)
    def call_by_device(*args: Any, **kwargs: Any) -> Any:
        # Only the packages can separate documents that share a row; transformers refuses them.
        is_packed = any(kwargs.get(k) is not None for k in ("seq_idx", "cu_seqlens"))
        if is_packed or _is_on_gpu((*args, *kwargs.values())):
            return function(*args, **kwargs)
        return plain_function(*args, **{k: v for k, v in kwargs.items() if k in parameters})

    return call_by_device


def _is_on_gpu(values: Iterable[Any]) -> bool:
    """Whether the first tensor is really on a GPU, not a fake tensor of a trace."""
    first = next((value for value in values if isinstance(value, torch.Tensor)), None)
    return first is not None and first.is_cuda and not isinstance(first, FakeTensor)
