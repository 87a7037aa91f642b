"""Modules that are trained in full beside adapters: embeddings, the output head, norms.

peft makes a copy of each and trains that. Here the base's own parameter is trained, in
tune.param_dtype, and has peft's name in checkpoints; what is computed and exported is the same.
"""

import difflib
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError
from hpc_tune.model.vectors import is_vector


def train_modules(
    model: Any, tune: TuneConfig, is_tied: bool, trained_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Make the modules that tune.modules_to_save names trained, on the meta device.

    A name means each module whose path ends with it, as in peft. They compute in ``dtype``.

    Raises:
        ConfigError: if a name is no module's, or that of one that cannot be trained beside
            adapters.
    """
    for name in tune.modules_to_save:
        found = [(path, part) for path, part in model.named_modules() if path.endswith(name)]
        if not found:
            raise ConfigError(_explain_unknown(name, model))
        for path, part in found:
            _require_trainable(name, path, part, model, is_tied)
            for parameter in part.parameters():
                parameter.requires_grad_(True)
                parameter.data = parameter.data.to(trained_dtype)
            if trained_dtype != dtype:
                _cast_outputs(part, dtype)


def _explain_unknown(name: str, model: Any) -> str:
    parts = {
        path.rpartition(".")[2]
        for path, part in model.named_modules()
        if isinstance(part, nn.Embedding)
        or part is model.get_output_embeddings()
        or _is_norm(path, part)
    }
    near = difflib.get_close_matches(name, sorted(parts), n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    return (
        f"tune.modules_to_save: no module of this model is called {name}{hint} Its embeddings, "
        f"head and norms: {', '.join(sorted(parts))}"
    )


def _require_trainable(name: str, path: str, part: Any, model: Any, is_tied: bool) -> None:
    head = model.get_output_embeddings()
    said = f"tune.modules_to_save: {name}"
    if hasattr(part, "lora_A"):
        raise ConfigError(f"{said} is {path}, which has an adapter by tune.targets; keep one")
    if is_tied and (part is head or part is model.get_input_embeddings()):
        raise ConfigError(
            f"{said} is {path}, and the output head of this model is its embedding: peft would "
            "train a copy of the one and leave the other as it was; use tune.method=full"
        )
    is_head = part is head and type(part) is nn.Linear
    if not (is_head or isinstance(part, nn.Embedding) or _is_norm(path, part)):
        raise ConfigError(
            f"{said} is {path}, a {type(part).__name__}; embeddings, the output head and norms "
            "are trained beside adapters: put linear layers into tune.targets, or use "
            "tune.method=full"
        )


def _is_norm(path: str, part: nn.Module) -> bool:
    """Whether all that a module holds are vectors of its own, of Cohere's one for each head."""
    own = [(f"{path}.{name}", p) for name, p in part.named_parameters(recurse=False)]
    return bool(own) and not list(part.children()) and all(is_vector(*one) for one in own)


def _cast_outputs(part: nn.Module, dtype: torch.dtype) -> None:
    """Let a module with weights of more bytes give results of ``dtype``."""
    if type(part) is nn.Linear:  # its product has the dtype of what comes in
        part.__dict__["forward"] = types.MethodType(_cast_linear, part)
    else:
        part.register_forward_hook(lambda _module, _inputs, out: out.to(dtype))


def _cast_linear(self: Any, x: torch.Tensor) -> torch.Tensor:
    bias = None if self.bias is None else self.bias.to(x.dtype)
    return F.linear(x, self.weight.to(x.dtype), bias)
