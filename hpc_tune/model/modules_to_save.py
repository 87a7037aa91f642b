"""Modules that are trained in full alongside adapters: embeddings, the output head, norms.

peft trains a copy of each. Here the base model's own parameter is trained, in tune.param_dtype, and
saved under peft's name in checkpoints; results and exports are the same.
"""

import difflib
import json
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hpc_tune.config.tune import TuneConfig
from hpc_tune.errors import ConfigError
from hpc_tune.model.layers import is_vector


def make_modules_trainable(
    model: Any, tune: TuneConfig, is_tied: bool, trained_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    """Make the modules that tune.modules_to_save names trainable, on the meta device.

    As in peft, a name selects each module whose path ends with it. Their weights get
    ``trained_dtype``, their results ``dtype``.

    Raises:
        ConfigError: if a name matches no module, or a module that cannot be trained alongside
            adapters.
    """
    for name in tune.modules_to_save:
        matches = [(path, module) for path, module in model.named_modules() if path.endswith(name)]
        if not matches:
            raise ConfigError(_explain_unknown_module(name, model))
        for path, module in matches:
            _require_trainable(name, path, module, model, is_tied)
            for parameter in module.parameters():
                parameter.requires_grad_(True)
                parameter.data = parameter.data.to(trained_dtype)
            if trained_dtype != dtype:
                _cast_outputs(module, dtype)


def _explain_unknown_module(name: str, model: Any) -> str:
    parts = {
        path.rpartition(".")[2]
        for path, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        or module is model.get_output_embeddings()
        or _is_norm(path, module)
    }
    close_names = difflib.get_close_matches(name, sorted(parts), n=3)
    hint = f"; did you mean {' or '.join(close_names)}?" if close_names else "."
    return (
        f"tune.modules_to_save: no module of this model is called {name}{hint} Its embeddings, "
        f"head and norms: {', '.join(sorted(parts))}"
    )


def _require_trainable(name: str, path: str, module: Any, model: Any, is_tied: bool) -> None:
    head = model.get_output_embeddings()
    setting = f"tune.modules_to_save: {name}"
    if hasattr(module, "lora_A"):
        raise ConfigError(f"{setting} is {path}, which has an adapter by tune.targets; keep one")
    if is_tied and (module is head or module is model.get_input_embeddings()):
        raise ConfigError(
            f"{setting} is {path}, and the output head of this model is its embedding: peft would "
            "train a copy of one and leave the other unchanged; use tune.method=full"
        )
    is_head = module is head and type(module) is nn.Linear
    if not (is_head or isinstance(module, nn.Embedding) or _is_norm(path, module)):
        raise ConfigError(
            f"{setting} is {path}, a {type(module).__name__}; only embeddings, the output head and "
            "norms can be trained alongside adapters: put linear layers into tune.targets, or use "
            "tune.method=full"
        )


def _is_norm(path: str, module: nn.Module) -> bool:
    """Whether a module holds nothing but vectors of its own (Cohere's: one vector per head)."""
    items = [(f"{path}.{name}", p) for name, p in module.named_parameters(recurse=False)]
    return bool(items) and not list(module.children()) and all(is_vector(*item) for item in items)


def _cast_outputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Make a module whose weights have another dtype return results in ``dtype``."""
    if type(module) is nn.Linear:  # its matmul then runs in the dtype of its input
        module.__dict__["forward"] = types.MethodType(_cast_linear, module)
    else:
        module.register_forward_hook(lambda _module, _inputs, out: out.to(dtype))


def _cast_linear(self: Any, x: torch.Tensor) -> torch.Tensor:
    bias = None if self.bias is None else self.bias.to(x.dtype)
    return F.linear(x, self.weight.to(x.dtype), bias)


# -- Rows of the embedding that are trained alongside adapters, for tokens that were added.
#
#     token ids [B, T] -> the frozen embedding's vectors, with tune.trainable_tokens' replaced
#
# Like peft's trainable_token_indices, and saved under its names. Nothing as large as the embedding
# is allocated. If the output head is tied to the embedding, its logits of these tokens come from
# the same rows.
#
# Shapes: B rows, T tokens, D hidden, K trained tokens, V vocabulary.


TOKEN_DELTA_SUFFIX = ".token_adapter.trainable_tokens_delta"


class TrainableTokenRows(nn.Module):
    """The trained rows, in ascending order of token id; their values are loaded with the weights.

    ``ids``: the token ids; ``token_ids``: the same as an int64 buffer [K], set by ``fill_ids``.
    """

    def __init__(self, ids: Sequence[int], embedding: Any, dtype: torch.dtype) -> None:
        """Take the token ids, ascending, and the embedding that holds all other rows."""
        super().__init__()
        self.ids = tuple(ids)
        width = embedding.weight.shape[1]
        # Gemma's embeddings are scaled.
        self._scale = float(getattr(embedding, "scalar_embed_scale", 1.0))
        self.trainable_tokens_delta = nn.Parameter(torch.empty(len(ids), width, dtype=dtype))
        self.register_buffer("token_ids", torch.empty(len(ids), dtype=torch.int64), False)

    def fill_ids(self) -> None:
        """Fill the buffer once its memory is allocated."""
        ids: Any = self.token_ids
        ids.copy_(torch.tensor(self.ids))

    def forward(self, inputs: torch.Tensor, out: torch.Tensor, is_head: bool) -> torch.Tensor:
        """Return ``out`` (vectors of tokens BT, or logits) with the trained rows' values put in."""
        ids_K: Any = self.token_ids
        if is_head:
            rows_KD = self.trainable_tokens_delta.to(inputs.dtype)
            return out.index_copy(-1, ids_K, F.linear(inputs, rows_KD).to(out.dtype))
        index_BT = torch.searchsorted(ids_K, inputs).clamp_(max=len(self.ids) - 1)
        rows_BTD = F.embedding(index_BT, self.trainable_tokens_delta) * self._scale
        is_row_BT1 = (ids_K[index_BT] == inputs).unsqueeze(-1)
        return torch.where(is_row_BT1, rows_BTD.to(out.dtype), out)


def add_trainable_token_rows(
    model: Any, ids: Sequence[int], is_tied: bool, dtype: torch.dtype
) -> None:
    """Add trained rows to the embedding of a model with adapters, on the meta device.

    Raises:
        ConfigError: if the model lacks one of the tokens, or its whole embedding is trained.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    num_rows = embedding.weight.shape[0]
    if unknown := [number for number in ids if not 0 <= number < num_rows]:
        raise ConfigError(
            f"tune.trainable_tokens: {unknown[0]} is no token of this model, whose embedding has "
            f"{num_rows} rows; resize it first (resize_token_embeddings)"
        )
    if embedding.weight.requires_grad:
        raise ConfigError(
            "tune.trainable_tokens is set, and tune.modules_to_save names the embedding, which "
            "trains all of its rows; keep one of the two settings"
        )
    with torch.device("meta"):
        embedding.token_adapter = TrainableTokenRows(ids, embedding, dtype)
    embedding.register_forward_hook(
        lambda layer, inputs, out: layer.token_adapter(inputs[0], out, False)
    )
    if is_tied:
        # Not registered as the head's submodule: the rows must have only one name.
        head.__dict__["rows_of"] = embedding
        head.register_forward_hook(
            lambda layer, inputs, out: layer.rows_of.token_adapter(inputs[0], out, True)
        )


def token_ids(directory: Path, tokens: Sequence[int | str]) -> list[int]:
    """Return the ids of tokens, ascending, looking up texts in the model's tokenizer.json.

    Raises:
        ConfigError: if the file cannot be read, a text is no token, or a token is named twice.
    """
    vocabulary: dict[str, int] = {}
    if any(isinstance(token, str) for token in tokens):
        vocabulary = _read_vocabulary_ids(directory / "tokenizer.json")
    if unknown := [token for token in tokens if isinstance(token, str) and token not in vocabulary]:
        raise ConfigError(
            f"tune.trainable_tokens: {unknown[0]!r} is no token of {directory}/tokenizer.json; add "
            "it to the tokenizer and resize the embedding, or give the token's number"
        )
    ids = [vocabulary[token] if isinstance(token, str) else token for token in tokens]
    if repeated_ids := [number for number in ids if ids.count(number) > 1]:
        raise ConfigError(f"tune.trainable_tokens names the token {repeated_ids[0]} twice")
    return sorted(ids)


def _read_vocabulary_ids(file: Path) -> dict[str, int]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = content["model"].get("vocab", {})
        if isinstance(vocabulary, list):  # of [text, score]
            vocabulary = {text: number for number, (text, _) in enumerate(vocabulary)}
        added_tokens = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
        return {**vocabulary, **added_tokens}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"tune.trainable_tokens: {file} cannot be read ({error!r}); give tokens by number"
        ) from None
