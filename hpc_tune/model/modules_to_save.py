"""Modules that are trained in full beside adapters: embeddings, the output head, norms.

peft makes a copy of each and trains that. Here the base's own parameter is trained, in
tune.param_dtype, and has peft's name in checkpoints; what is computed and exported is the same.
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


# -- Rows of the embedding that are trained beside adapters: those of tokens that were added.
#
#     token ids [B, T] -> the frozen embedding's vectors, those of tune.trainable_tokens replaced
#
# As peft's trainable_token_indices, under whose names they are saved. Nothing as large as the
# embedding is made. Where the output head is the embedding, its logits of these tokens come from
# the same rows.
#
# Shapes: B rows, T tokens, D hidden, K trained tokens, V vocabulary.


SUFFIX = ".token_adapter.trainable_tokens_delta"


class TokenRows(nn.Module):
    """The trained rows, by rising number of their tokens; they get their values with the weights.

    ``ids``: their numbers; ``token_ids``: the same, int64 [K], which ``fill_ids`` puts into memory.
    """

    def __init__(self, ids: Sequence[int], embedding: Any, dtype: torch.dtype) -> None:
        """Take the numbers of the tokens, rising, and the embedding that has other rows."""
        super().__init__()
        self.ids = tuple(ids)
        width = embedding.weight.shape[1]
        # Gemma's embeddings are scaled.
        self._scale = float(getattr(embedding, "scalar_embed_scale", 1.0))
        self.trainable_tokens_delta = nn.Parameter(torch.empty(len(ids), width, dtype=dtype))
        self.register_buffer("token_ids", torch.empty(len(ids), dtype=torch.int64), False)

    def fill_ids(self) -> None:
        """Give the buffer its values, once it has memory."""
        ids: Any = self.token_ids
        ids.copy_(torch.tensor(self.ids))

    def forward(self, inputs: torch.Tensor, out: torch.Tensor, is_head: bool) -> torch.Tensor:
        """Return vectors of tokens BT (or logits of hidden states) with those of the rows."""
        ids_K: Any = self.token_ids
        if is_head:
            rows_KD = self.trainable_tokens_delta.to(inputs.dtype)
            return out.index_copy(-1, ids_K, F.linear(inputs, rows_KD).to(out.dtype))
        at_BT = torch.searchsorted(ids_K, inputs).clamp_(max=len(self.ids) - 1)
        rows_BTD = F.embedding(at_BT, self.trainable_tokens_delta) * self._scale
        is_row_BT1 = (ids_K[at_BT] == inputs).unsqueeze(-1)
        return torch.where(is_row_BT1, rows_BTD.to(out.dtype), out)


def add_trained_rows(model: Any, ids: Sequence[int], is_tied: bool, dtype: torch.dtype) -> None:
    """Put trained rows into the embedding of a model with adapters, on the meta device.

    Raises:
        ConfigError: if the model has no such tokens, or its embedding is trained in whole.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    num_rows = embedding.weight.shape[0]
    if outside := [number for number in ids if not 0 <= number < num_rows]:
        raise ConfigError(
            f"tune.trainable_tokens: {outside[0]} is no token of this model, whose embedding has "
            f"{num_rows} rows; resize it first (resize_token_embeddings)"
        )
    if embedding.weight.requires_grad:
        raise ConfigError(
            "tune.trainable_tokens with the embedding in tune.modules_to_save, which trains all of "
            "its rows; keep one of them"
        )
    with torch.device("meta"):
        embedding.token_adapter = TokenRows(ids, embedding, dtype)
    embedding.register_forward_hook(
        lambda layer, inputs, out: layer.token_adapter(inputs[0], out, False)
    )
    if is_tied:
        # Not as a module of the head: it has one name.
        head.__dict__["rows_of"] = embedding
        head.register_forward_hook(
            lambda layer, inputs, out: layer.rows_of.token_adapter(inputs[0], out, True)
        )


def token_ids(directory: Path, tokens: Sequence[int | str]) -> list[int]:
    """Return the numbers of tokens, rising, as the tokenizer.json of a model has them.

    Raises:
        ConfigError: if a text is no token, or one is named twice.
    """
    known: dict[str, int] = {}
    if any(isinstance(token, str) for token in tokens):
        known = _read_token_numbers(directory / "tokenizer.json")
    if unknown := [token for token in tokens if isinstance(token, str) and token not in known]:
        raise ConfigError(
            f"tune.trainable_tokens: {unknown[0]!r} is no token of {directory}/tokenizer.json; add "
            "it to the tokenizer and resize the embedding, or give the token's number"
        )
    ids = [known[token] if isinstance(token, str) else token for token in tokens]
    if twice := [number for number in ids if ids.count(number) > 1]:
        raise ConfigError(f"tune.trainable_tokens names the token {twice[0]} twice")
    return sorted(ids)


def _read_token_numbers(file: Path) -> dict[str, int]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = read["model"].get("vocab", {})
        if isinstance(vocabulary, list):  # of [text, score]
            vocabulary = {text: number for number, (text, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in read.get("added_tokens", [])}
        return {**vocabulary, **added}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"tune.trainable_tokens: {file} cannot be read ({error!r}); give tokens by number"
        ) from None
